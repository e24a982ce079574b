"""Train the embedded autoencoder on procedural clips, in three stages of growing clip length."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from flashforward_core.scenes import HEIGHT, WIDTH, sample_scene
from flashforward_core.specs import SPATIAL_FACTOR, TEMPORAL_FACTOR
from flashforward_core.train.loop import LoopConfig, train
from flashforward_core.train.synthetic import classify_colours, render_scene, sprite_boxes
from flashforward_core.train.vae_whole import decode_whole, encode_moments_whole

log = logging.getLogger(__name__)


def new_vae() -> AutoencoderKLWan:
    """Build the embedded autoencoder with random weights: 16 latent channels, 8x in space, 4x in time."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


class ClipPool:
    """Procedural clips drawn once and kept as bytes on the device; a sample is a random window of a random clip.

    Samples are video [B, 3, F, H, W] in -1..1 and marks [B, 1, F, H, W]: 1 in the sprites' boxes, 2 on sprites.
    """

    def __init__(self, seeds: Sequence[int], frames: int, *, device: torch.device) -> None:
        self.video = torch.empty(len(seeds), 3, frames, HEIGHT, WIDTH, dtype=torch.uint8, device=device)
        self.marks = torch.empty(len(seeds), 1, frames, HEIGHT, WIDTH, dtype=torch.uint8, device=device)
        for row, seed in enumerate(seeds):
            video, masks = render_scene(sample_scene(seed, anytime=True), frames, device=device)
            self.video[row] = ((video + 1) * 127.5).round().clamp(0, 255).byte()
            self.marks[row, 0] = sprite_boxes(masks).byte() + (masks.amax(0) > 0.1).byte()

    def sample(self, count: int, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``count`` windows of ``frames`` whole frames."""
        rows, times = self._windows(count, frames, generator)
        video = self.video.transpose(1, 2)[rows, times].transpose(1, 2)
        marks = self.marks.transpose(1, 2)[rows, times].transpose(1, 2)
        return video.float() / 127.5 - 1, marks

    def crops(self, count: int, frames: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return squares of ``size`` pixels, a multiple of 8, out of ``count`` windows, each around a sprite.

        Its middle is a random place in a box that a sprite has at some time, or any place where no sprite shows, as
        nearly as the latents' grid and the frame's edges allow.
        """
        rows, times = self._windows(count, frames, generator)
        seen = (self.marks[rows, 0, times[:, ::SEEN_EVERY]] > 0).any(1)
        # random numbers below 1, and 1 more where sprites are: the largest is a fair draw without asking the host
        drawn = seen + torch.rand(seen.shape, generator=generator, device=seen.device)
        middle = drawn.flatten(1).argmax(1, keepdim=True)
        y = _crop(middle // WIDTH, size, of=HEIGHT).view(-1, 1, size, 1)
        x = _crop(middle % WIDTH, size, of=WIDTH).view(-1, 1, 1, size)
        places = (rows[..., None, None], times[..., None, None], y, x)
        video, marks = (
            clips.permute(0, 2, 3, 4, 1)[places].permute(0, 4, 1, 2, 3) for clips in (self.video, self.marks)
        )
        return video.float() / 127.5 - 1, marks

    def _windows(self, count: int, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw clips [B, 1] and their consecutive frames [B, F]."""
        clips, _, length = self.video.shape[:3]
        device = self.video.device
        rows = torch.randint(clips, (count, 1), generator=generator, device=device)
        starts = torch.randint(length - frames + 1, (count, 1), generator=generator, device=device)
        return rows, starts + torch.arange(frames, device=device)


SEEN_EVERY = 8  # frames between those in which sprites are looked for: they move by a few pixels meanwhile


def _crop(middle_B1: Tensor, size: int, *, of: int) -> Tensor:
    """Return the ``size`` rows or columns [B, size] out of ``of`` around each middle, on the latents' grid."""
    first = (middle_B1 - size // 2 + SPATIAL_FACTOR // 2) // SPATIAL_FACTOR * SPATIAL_FACTOR
    return first.clamp(0, of - size) + torch.arange(size, device=middle_B1.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeLoss:
    """Weights of the reconstruction loss.

    The sprites are a few percent of the pixels, and the first frame is the only one that has a latent frame to itself:
    both count more than their share.
    """

    mse: float = 4.0
    gradient: float = 0.5
    sprite: float = 4.0
    box: float = 1.0
    """How many times the pixels in the boxes around the sprites count, on top of what the sprites themselves do."""
    first_frame: float = 8.0
    kl: float = 3e-5
    even: float = 0.0
    """Weight of frames' differences in dB, where better ones give way to worse ones (``by_place_and_age``)."""
    still: float = 0.0
    """Weight of how errors change from frame to frame outside the boxes: what stands still must not shimmer."""

    def pixels(self, marks: Tensor) -> Tensor:
        """Return each pixel's weight, 1 on average, from marks [B, 1, F, H, W] as of ``ClipPool``."""
        weight = (1 + self.sprite * (marks == 2)) * torch.where(marks > 0, self.box, 1.0)
        weight[:, :, 0] *= self.first_frame
        return weight / weight.mean()


SETTLED = (4, 5, 6, 7, 9, 12, 18, 25)
"""First latent frames of the groups in which frames are compared; before frame 13 the past is still filling up."""
MEMORY = 0.97  # of the running mean of frames' differences, per step: clips differ more than places do


def by_place_and_age(error_BCFHW: Tensor) -> Tensor:
    """Return PSNRs in dB [G, 4], averaged over clips: by age of the latent (``SETTLED``) and place in its four frames.

    Raises ``ValueError`` for fewer than 17 frames, whose latents are all younger than that.
    """
    if error_BCFHW.shape[2] < 17:
        raise ValueError(f"frames={error_BCFHW.shape[2]} has no settled latent to compare; use 17 or more")
    per_frame = decibels((error_BCFHW.float() ** 2).mean((1, 3, 4))).mean(0)
    by_place = per_frame[1:].unflatten(0, (-1, TEMPORAL_FACTOR))
    starts = [start - 1 for start in SETTLED if start <= len(by_place)]
    return torch.stack([part.mean(0) for part in by_place.tensor_split(starts)[1:]])


def shimmer(error_BCFHW: Tensor, marks: Tensor) -> Tensor:
    """Return the mean change of errors from one frame to the next, outside the sprites' boxes in both of them."""
    outside = (marks[:, :, 1:] == 0) & (marks[:, :, :-1] == 0)
    changes = error_BCFHW.diff(dim=2).abs() * outside
    return changes.sum() / (error_BCFHW.shape[1] * outside.sum()).clamp(min=1)


class VaeStep(nn.Module):
    """Reconstruct a batch of clips and score it; a frozen encoder stays as it is, for models that know its latents."""

    def __init__(self, vae: AutoencoderKLWan, *, as_conv2d: bool, autocast: bool) -> None:
        super().__init__()
        self.vae = vae
        self.as_conv2d = as_conv2d
        self.autocast = autocast
        self.register_buffer("differences", torch.zeros(len(SETTLED), TEMPORAL_FACTOR))

    def forward(self, video: Tensor, marks: Tensor, noise: Tensor, weights: VaeLoss) -> dict[str, Tensor]:
        """Return the losses; ``marks`` as of ``ClipPool``, ``noise`` [B, 16, f, h, w] samples the posterior."""
        with torch.autocast(video.device.type, torch.bfloat16, enabled=self.autocast):
            moments = encode_moments_whole(self.vae, video, as_conv2d=self.as_conv2d)
            mean, log_var = moments.float().chunk(2, dim=1)
            log_var = log_var.clamp(-30, 20)
            z = mean + torch.exp(0.5 * log_var) * noise
            out = decode_whole(self.vae, z, as_conv2d=self.as_conv2d).float()
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
        weight = weights.pixels(marks)
        error = out - video
        rows = (out.diff(dim=3) - video.diff(dim=3)).abs().mean()
        columns = (out.diff(dim=4) - video.diff(dim=4)).abs().mean()
        loss = (weight * (error.abs() + weights.mse * error**2)).mean() + weights.gradient * (rows + columns)
        if weights.even > 0:
            loss = loss + weights.even * self._unevenness(error)
        if weights.still > 0:
            loss = loss + weights.still * shimmer(error, marks)
        mse = (error**2).mean()
        sprite = marks == 2
        sprite_mse = (error**2 * sprite).sum() / (3 * sprite.sum()).clamp(min=1)
        return {
            "loss": loss + weights.kl * kl,
            "psnr": decibels(mse),
            "sprite_psnr": decibels(sprite_mse),
            "kl": kl,
            "uneven": self.differences.max() - self.differences.min(),
        }

    def _unevenness(self, error: Tensor) -> Tensor:
        """Sum up frames' PSNRs, each times how much better than the mean such frames have been lately."""
        psnr = by_place_and_age(error)
        seen = self.differences[: len(psnr)]
        if self.training:
            seen.lerp_(psnr.detach() - psnr.detach().mean(), 1 - MEMORY)
        return (seen.clone() * psnr).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """Batches of squares around sprites, which take two steps of three; whole clips take the third."""

    size: int
    """Pixels of a square's side, a multiple of 8 and no more than a frame's height."""
    frames: int
    """Video frames per square."""
    batch: int
    """Squares per process."""
    loss: VaeLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeStage:
    """One stage: whole clips of ``frames`` video frames, ``batch`` of them per process; between them ``crops``."""

    frames: int
    batch: int
    steps: int
    lr: float
    max_s: float
    loss: VaeLoss = VaeLoss()
    """Of whole clips."""
    crops: Crops | None = None

    def draw(self, pool: ClipPool, generator: torch.Generator, step: int) -> tuple[Tensor, Tensor, Tensor, VaeLoss]:
        """Return what ``VaeStep`` takes at ``step``: video, marks, noise and the loss's weights."""
        if self.crops is not None and step % 3 > 0:
            video, marks = pool.crops(self.crops.batch, self.crops.frames, self.crops.size, generator)
            loss = self.crops.loss
        else:
            video, marks = pool.sample(self.batch, self.frames, generator)
            loss = self.loss
        count, _, frames, height, width = video.shape
        size = (count, 16, (frames - 1) // TEMPORAL_FACTOR + 1, height // SPATIAL_FACTOR, width // SPATIAL_FACTOR)
        return video, marks, torch.randn(size, generator=generator, device=video.device), loss


def train_vae(
    vae: AutoencoderKLWan,
    stages: Sequence[VaeStage],
    *,
    out: Path,
    pool: ClipPool,
    accelerator: Accelerator,
    seed: int,
    as_conv2d: bool,
    origin: Mapping[str, str],
) -> AutoencoderKLWan:
    """Run the stages one after the other, each from the averaged weights of the one before."""
    cuda = accelerator.device.type == "cuda"
    for number, stage in enumerate(stages):
        config = LoopConfig(
            out=out / f"stage{number}",
            steps=stage.steps,
            lr=stage.lr,
            max_s=stage.max_s,
            seed=seed + number,
            origin=origin,
        )
        step = VaeStep(vae, as_conv2d=as_conv2d, autocast=cuda)
        vae = train(step, config, accelerator=accelerator, batch=partial(stage.draw, pool)).vae
    return vae


@torch.inference_mode()
def measure_latents(vae: AutoencoderKLWan, seeds: Sequence[int], *, frames: int, device: torch.device) -> None:
    """Write the latents' per-channel mean and deviation into ``vae``'s config."""
    clips = (render_scene(sample_scene(seed, anytime=True), frames, device=device)[0] for seed in seeds)
    z = torch.cat([encode_mean(vae, clip.unsqueeze(0)).float() for clip in clips])
    mean, std = z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def freeze_encoder(vae: AutoencoderKLWan) -> None:
    """Leave the encoder out of training."""
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(False)


def encode_mean(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Encode to the posterior's mean [B, 16, f, h, w], un-normalised."""
    return encode_moments_whole(vae, video, as_conv2d=False).chunk(2, dim=1)[0]


@torch.inference_mode()
def evaluate_vae(
    vae: AutoencoderKLWan, seeds: Sequence[int], *, frames: int, device: torch.device
) -> dict[str, object]:
    """Reconstruct held-out clips in float32; report PSNR overall, per frame, on sprites and their boxes; colours too.

    Each frame's PSNR is the mean over the clips in dB; the same clips make every mean, so their differences are the
    autoencoder's and not the clips'.
    """
    per_frame = torch.zeros(frames, device=device)
    places = {"sprite": [0.0, 0.0], "box": [0.0, 0.0]}  # squared error, values
    shimmers = 0.0
    right, seen = 0, 0
    for seed in seeds:
        scene = sample_scene(seed, anytime=True)
        video, masks = render_scene(scene, frames, device=device)
        out = decode_whole(vae, encode_mean(vae, video.unsqueeze(0)))[0].clamp(-1, 1)
        boxes = sprite_boxes(masks)
        shimmers += 127.5 * float(shimmer((out - video).unsqueeze(0), boxes[None, None])) / len(seeds)
        error = (out - video) ** 2
        per_frame += decibels(error.mean((0, 2, 3))) / len(seeds)
        for name, place in (("sprite", masks.amax(0) > 0.1), ("box", boxes)):
            places[name][0] += float((error * place).sum())
            places[name][1] += 3 * float(place.sum())
        for sprite, names in zip(scene.sprites, classify_colours(out, masks), strict=True):
            right += sum(name == sprite.colour for name in names)
            seen += sum(name is not None for name in names)
    settled = per_frame[13:] if frames > 13 else per_frame
    return {
        "clips": len(seeds),
        "frames": frames,
        "psnr": float(per_frame.mean()),
        **{f"{name}_psnr": float(decibels(torch.tensor(e / max(1.0, n)))) for name, (e, n) in places.items()},
        "shimmer": shimmers,  # levels of 255 per frame
        "psnr_per_frame": [round(p, 3) for p in per_frame.tolist()],
        "psnr_spread_from_13": float(settled.max() - settled.min()),
        "colour_right": right / max(1, seen),
    }


def decibels(mse: Tensor) -> Tensor:
    """PSNR of a squared error on the scale -1..1, at most 80 dB."""
    return 10 * torch.log10(4 / mse.clamp(min=4e-8))


def save_vae(vae: AutoencoderKLWan, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
    """Write config and weights in diffusers' layout."""
    vae.to(dtype).save_pretrained(folder)


def load_vae(folder: Path, device: torch.device) -> AutoencoderKLWan:
    """Read a folder written by ``save_vae`` as float32, offline."""
    return AutoencoderKLWan.from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32).to(device).eval()


def report(results: dict[str, object], path: Path) -> None:
    """Write an evaluation beside the weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
