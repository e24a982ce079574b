"""Train the bidirectional base model and the text encoder by flow matching, dense clips and sparse ones in turn."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flashforward_core.graph.task import Role
from flashforward_core.model.roles import role_linears
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import StageSchedule
from flashforward_core.train.loop import LoopConfig, train

if TYPE_CHECKING:
    from flashforward_core.train.data import LatentPool  # it needs diffusers, which takes seconds

SHIFT = 5.0
FIRST_FRAME = 8.0
"""Weight of a clip's first latent frame: one video frame where the others are four, so it looks unlike them, and one
among many."""
CAPTION_DROP = 0.1


def draw_sigmas(shape: tuple[int, ...], generator: torch.Generator, *, device: torch.device) -> Tensor:
    """Draw noise levels: half from the shifted uniform, half from the four levels that inference starts a stage at."""
    u = torch.rand(shape, generator=generator, device=device)
    free = SHIFT * u / (1 + (SHIFT - 1) * u)
    levels = torch.tensor(StageSchedule(shift=SHIFT).sigmas[:-1], device=device)
    picked = levels[torch.randint(len(levels), shape, generator=generator, device=device)]
    return torch.where(torch.rand(shape, generator=generator, device=device) < 0.5, free, picked)


def flow_loss(velocity: Tensor, clean: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of v = noise - clean per batch row and latent frame, [B, F]."""
    return ((velocity.float() - (noise - clean)) ** 2).mean((1, 3, 4))


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of losses [B, F] under weights [F]."""
    return (losses * weights).sum() / (weights.sum() * losses.shape[0])


def crop_offset(room: int, *, share: float, seed: str) -> int:
    """Draw the latent at which clips are cropped, at most ``room`` and alike on every process: 0 but for ``share``."""
    choice = random.Random(f"rebase-{seed}")
    return choice.randint(0, room) if room > 0 and choice.random() < share else 0


def compile_blocks(model: CausalWanTransformer) -> None:
    """Compile what stands before and after self-attention, once for all blocks; in place, so never copy it after."""
    for block in model.blocks:
        block.before = torch.compile(block.before)
        block.after = torch.compile(block.after)


def half_precision(model: nn.Module, device: torch.device) -> bool:
    """Whether to multiply in bfloat16: on GPUs, and where frozen weights are kept so."""
    return device.type == "cuda" or any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


class BaseStep(nn.Module):
    """One bidirectional flow-matching forward; the renderer's role stands for both while they are alike."""

    def __init__(
        self, model: CausalWanTransformer, text: nn.Module, *, autocast: bool, checkpoint_blocks: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.text = text
        self.autocast = autocast
        self.checkpoint_blocks = checkpoint_blocks

    def forward(
        self,
        clean: Tensor,
        ids: Tensor,
        mask: Tensor,
        sigma: Tensor,
        noise: Tensor,
        frames: Tensor,
        weights: Tensor,
    ) -> dict[str, Tensor]:
        """Score clips [B, 16, F, h, w] at one sigma each [B], of positions ``frames`` [F] and ``weights`` [F]."""
        s = sigma.view(-1, 1, 1, 1, 1)
        with torch.autocast(clean.device.type, torch.bfloat16, enabled=self.autocast):
            text = self.model.text_context(self.text(ids, mask), Role.RENDERER)
            times = (1000 * sigma).unsqueeze(1).expand(-1, clean.shape[2])
            velocity = self.model(
                (1 - s) * clean + s * noise,
                timestep_BF=times,
                text=text,
                frames=frames,
                role=Role.RENDERER,
                checkpoint_blocks=self.checkpoint_blocks,
            )
        return {"loss": weighted_mean(flow_loss(velocity, clean, noise), weights)}


def train_base(
    model: CausalWanTransformer,
    text: ByteT5Encoder,
    pool: "LatentPool",
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    layouts: Sequence[tuple[int, int, int]],
    compiled: bool = True,
    checkpoint_blocks: bool = False,
    rebase: float = 0.0,
) -> tuple[CausalWanTransformer, ByteT5Encoder]:
    """Train on ``layouts`` (clips per batch, latent frames, their stride) in turn; return the averaged weights.

    A share ``rebase`` of the steps crops its clips at a random place, with positions from 0, where there is room.
    """
    device = accelerator.device
    step = BaseStep(model, text, autocast=half_precision(model, device), checkpoint_blocks=checkpoint_blocks)

    def batch(generator: torch.Generator, number: int) -> tuple[object, ...]:
        count, length, stride = layouts[number % len(layouts)]
        frames = torch.arange(length, device=device) * stride
        clean, ids, mask = pool.sample(count, generator, drop=CAPTION_DROP)
        room = clean.shape[2] - 1 - (length - 1) * stride
        offset = crop_offset(room, share=rebase, seed=f"{config.seed}-{number}")
        clean = clean[:, :, frames + offset]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # in a clip's middle no latent is a single video frame
        weights = torch.where((frames == 0) & (offset == 0), FIRST_FRAME, 1.0)
        return clean, ids, mask, draw_sigmas((count,), generator, device=device), noise, frames, weights

    compile_parts = partial(compile_blocks, model) if compiled else None
    best = train(step, config, accelerator=accelerator, batch=batch, prepare=compile_parts)
    return best.model, best.text


def save_base(model: CausalWanTransformer, text: ByteT5Encoder, path: Path, *, trained_only: bool = False) -> None:
    """Write a training checkpoint of both for the next step to start from, whole or without frozen weights.

    Beside the weights stands what the roles' LoRAs, if there are any, were attached with. ``path`` changes at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad or not trained_only}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    part = path.with_suffix(".part")
    torch.save({"model": state, "text": text.state_dict(), "roles": _role_options(model)}, part)
    part.replace(path)


def _role_options(model: CausalWanTransformer) -> dict[str, Any] | None:
    """Return the arguments of ``attach_roles``, which gives all of a model's LoRAs the same, or None without LoRAs."""
    layers = role_linears(model)
    if not layers:
        return None
    layer, role = next(iter(layers.values())), Role.PLANNER.value
    names = (name.split(".", 2)[2] for name in layers)  # of blocks.0.attn1.to_q the last part
    return {
        "rank": layer.lora_A[role].out_features,
        "alpha": layer.alphas[role],
        "targets": list(dict.fromkeys(names)),
    }


def read_base(path: Path, *, wanted: str) -> dict[str, Any]:
    """Read a file of ``save_base`` onto the CPU; any other file raises ``ValueError``, which asks for ``wanted``."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign or damaged file fails in any way
        raise ValueError(f"{path} cannot be read as weights ({type(error).__name__}); name {wanted}") from error
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in ("model", "text")):
        raise ValueError(f"{path} holds something else than a model and its text encoder; name {wanted}")
    return found


def load_base(
    model: CausalWanTransformer,
    text: ByteT5Encoder,
    saved: Mapping[str, Any],
    *,
    path: Path,
    wanted: str,
    trained_only: bool = False,
) -> None:
    """Copy what ``read_base`` read into ``model`` and ``text``; with ``trained_only`` it may lack frozen weights.

    Raises ``ValueError`` that names ``path`` and asks for ``wanted`` where the weights do not fit.
    """
    try:
        lacking, unknown = model.load_state_dict(saved["model"], strict=not trained_only)
        text.load_state_dict(saved["text"])
    except RuntimeError as error:  # it lists every tensor
        raise _misfit(path, wanted) from error
    if unknown or any(".lora_" in name for name in lacking):
        raise _misfit(path, wanted)


def _misfit(path: Path, wanted: str) -> ValueError:
    return ValueError(f"{path} holds other weights than this model of these options has; name {wanted}")
