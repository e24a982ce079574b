"""Streaming decode equals decoding the whole clip with diffusers, which is the oracle."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from flashforward_core.model.vae import (
    StreamingDecoder,
    VaeState,
    denormalise,
    encode_frames,
    normalise,
    to_uint8,
)

pytestmark = pytest.mark.cpu

LATENT_FRAMES = 8


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1, z_dim=16).eval()


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(2, 16, LATENT_FRAMES, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Float frames in [0, 1], [B, F, H, W, 3], by diffusers' own ``decode``."""
    with torch.no_grad():
        return ((vae.decode(denormalise(vae, latents)).sample + 1) / 2).permute(0, 2, 3, 4, 1)


def stream(vae: AutoencoderKLWan, latents: Tensor, lengths: list[int]) -> list[tuple[Tensor, VaeState]]:
    decoder, state, parts = StreamingDecoder(vae), None, []
    for chunk in latents.split(lengths, dim=2):
        frames, state = decoder.decode(chunk, state)
        parts.append((frames, state))
    return parts


@pytest.mark.parametrize("lengths", [[8], [3, 3, 2], [1] * 8, [2, 5, 1]])
def test_streaming_in_any_chunks_gives_the_same_bytes(
    vae: AutoencoderKLWan, latents: Tensor, lengths: list[int]
) -> None:
    parts = [frames for frames, _ in stream(vae, latents, lengths)]
    assert [len(part[0]) for part in parts] == [4 * n - (3 if i == 0 else 0) for i, n in enumerate(lengths)]
    at_once, _ = StreamingDecoder(vae).decode(latents, None)
    assert torch.equal(torch.cat(parts, dim=1), at_once)


@pytest.mark.parametrize("as_conv2d", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_streaming_equals_whole_decode(
    vae: AutoencoderKLWan, latents: Tensor, whole: Tensor, as_conv2d: bool, channels_last: bool
) -> None:
    decoder = StreamingDecoder(vae, as_conv2d=as_conv2d, channels_last=channels_last)
    frames, _ = decoder.decode_float(latents, None)
    assert frames.dtype == torch.float32 and frames.shape == (2, 29, 32, 48, 3)
    # float32 sums in another order, about 20 convolutions deep
    torch.testing.assert_close(frames, whole, rtol=0, atol=1e-5)
    different = (to_uint8(frames).int() - to_uint8(whole).int()).abs()
    # only values within 1e-5 of a rounding threshold may fall on its other side: 2 * 255 * 1e-5 of them, by one
    assert different.max() <= 1 and different.float().mean() < 0.0051


def test_a_kept_state_replays_the_same_bytes(vae: AutoencoderKLWan, latents: Tensor) -> None:
    decoder = StreamingDecoder(vae)
    _, kept = decoder.decode(latents[:, :, :3], None)
    before = [feature.clone() for feature in kept.features]
    once, _ = decoder.decode(latents[:, :, 3:6], kept)
    decoder.decode(latents[:, :, 6:], kept)  # another continuation of the same state
    again, _ = decoder.decode(latents[:, :, 3:6], kept)
    assert torch.equal(once, again)
    for old, new in zip(before, kept.features, strict=True):
        assert torch.equal(old, new)


def test_a_step_can_be_compiled_and_gives_the_same_bytes(
    vae: AutoencoderKLWan, latents: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dynamo's own backend runs what was traced as it is; what it cannot trace would fall back, so none may."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, dynamic: compile_(step, dynamic=dynamic, fullgraph=True, backend="eager")
    )
    found, _ = StreamingDecoder(vae, compiled=True).decode(latents[:, :, :2], None)
    expected, _ = StreamingDecoder(vae).decode(latents[:, :, :2], None)
    assert torch.equal(found, expected)


def test_state_does_not_grow_with_the_video(vae: AutoencoderKLWan, latents: Tensor) -> None:
    sizes = [state.num_bytes for _, state in stream(vae, latents, [3, 1, 1, 1, 1, 1])]
    assert len(set(sizes)) == 1 and sizes[0] > 0


@pytest.mark.parametrize("frames", [1, 9])
def test_encoding_frames_equals_diffusers(vae: AutoencoderKLWan, frames: int) -> None:
    video = torch.randint(0, 256, (1, frames, 32, 48, 3), dtype=torch.uint8)
    with torch.no_grad():
        pixels = video.permute(0, 4, 1, 2, 3).float() / 255 * 2 - 1
        expected = normalise(vae, vae.encode(pixels).latent_dist.mean)
    # float32 rounding of the pixels' scaling
    torch.testing.assert_close(encode_frames(vae, video), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(encode_frames(vae, video.float() / 255), expected, rtol=1e-5, atol=1e-5)


def test_normalise_and_denormalise_are_inverse(vae: AutoencoderKLWan, latents: Tensor) -> None:
    torch.testing.assert_close(normalise(vae, denormalise(vae, latents)), latents, rtol=1e-5, atol=1e-6)
    assert denormalise(vae, torch.zeros(1, 16, 1, 1, 1)).flatten().tolist() == pytest.approx(vae.config.latents_mean)


def test_images_of_a_wrong_size_or_length_are_refused(vae: AutoencoderKLWan) -> None:
    with pytest.raises(ValueError, match=r"frames=4 is not 4n\+1; use frames=1"):
        encode_frames(vae, torch.zeros(1, 4, 32, 48, 3))
    with pytest.raises(ValueError, match="image is 48x30"):
        encode_frames(vae, torch.zeros(1, 1, 30, 48, 3))


def test_another_autoencoder_is_refused_by_name() -> None:
    other = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], patch_size=2)
    with pytest.raises(ValueError, match="patch_size=2"):
        StreamingDecoder(other)
