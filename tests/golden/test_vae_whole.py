"""The whole-clip autoencoder equals diffusers' chunk-by-chunk one, which is the oracle throughout."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from flashforward_core.train.vae_whole import decode_whole, encode_moments_whole

pytestmark = pytest.mark.cpu

# float32 sums in another order; outputs are of order 1 and about 20 convolutions deep.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1, z_dim=16).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("gamma"):  # ones by default: a forgotten scale would go unseen
                parameter.uniform_(0.5, 1.5)
    return made


def clip(frames: int) -> Tensor:
    return torch.randn(2, 3, frames, 32, 48, generator=torch.Generator().manual_seed(frames))


def latents(frames: int) -> Tensor:
    return torch.randn(2, 16, frames, 4, 6, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("as_conv2d", [False, True])
@pytest.mark.parametrize("frames", [1, 5, 13, 21])
@torch.no_grad()
def test_whole_encode_equals_cached_encode(vae: AutoencoderKLWan, frames: int, as_conv2d: bool) -> None:
    cached = vae.encode(clip(frames)).latent_dist.parameters
    whole = encode_moments_whole(vae, clip(frames), as_conv2d=as_conv2d)
    assert whole.shape == (2, 32, (frames + 3) // 4, 4, 6)
    torch.testing.assert_close(whole, cached, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("as_conv2d", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 4, 6])
@torch.no_grad()
def test_whole_decode_equals_cached_decode(vae: AutoencoderKLWan, frames: int, as_conv2d: bool) -> None:
    cached = vae.decode(latents(frames)).sample
    whole = decode_whole(vae, latents(frames), as_conv2d=as_conv2d)
    assert whole.shape == (2, 3, 4 * frames - 3, 32, 48)
    torch.testing.assert_close(whole.clamp(-1, 1), cached, rtol=TOLERANCE, atol=TOLERANCE)


def gradients(vae: AutoencoderKLWan, *, as_conv2d: bool, recompute: bool) -> dict[str, Tensor]:
    vae.zero_grad()
    moments = encode_moments_whole(vae, clip(9), as_conv2d=as_conv2d, recompute=recompute)
    video = decode_whole(vae, moments[:, :16], as_conv2d=as_conv2d, recompute=recompute)
    video.clamp(-1, 1).square().mean().backward()
    return {name: p.grad.clone() for name, p in vae.named_parameters() if p.grad is not None}


def test_gradients_reach_every_weight_and_equal_the_cached_path(vae: AutoencoderKLWan) -> None:
    vae.zero_grad()
    vae.decode(vae.encode(clip(9)).latent_dist.mean).sample.square().mean().backward()
    cached = {name: p.grad.clone() for name, p in vae.named_parameters() if p.grad is not None}
    whole = gradients(vae, as_conv2d=False, recompute=False)
    assert set(whole) == {name for name, _ in vae.named_parameters()} == set(cached)
    for name, gradient in whole.items():
        assert torch.isfinite(gradient).all(), name
        # relative to each tensor's largest entry: float32 sums over thousands of pixels
        torch.testing.assert_close(gradient, cached[name], rtol=0, atol=1e-4 * float(cached[name].abs().max()) + 1e-9)


@pytest.mark.parametrize("as_conv2d", [False, True])
def test_recomputed_activations_give_the_same_gradients(vae: AutoencoderKLWan, as_conv2d: bool) -> None:
    kept = gradients(vae, as_conv2d=as_conv2d, recompute=False)
    recomputed = gradients(vae, as_conv2d=as_conv2d, recompute=True)
    for name, gradient in kept.items():
        assert torch.equal(gradient, recomputed[name]), name


@torch.no_grad()
def test_autocast_costs_no_more_accuracy_than_the_cached_path(vae: AutoencoderKLWan) -> None:
    exact = vae.decode(latents(3)).sample
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached = vae.decode(latents(3)).sample
        whole = decode_whole(vae, latents(3).contiguous(memory_format=torch.channels_last_3d), as_conv2d=True)
    cached_error = (cached.float() - exact).square().mean().sqrt()
    whole_error = (whole.float().clamp(-1, 1) - exact).square().mean().sqrt()
    assert whole_error < 1.5 * cached_error  # the roundings differ; a wrong layer costs tens of times more


def test_other_frame_counts_are_refused_by_name(vae: AutoencoderKLWan) -> None:
    with pytest.raises(ValueError, match=r"frames=8 is not 4n\+1; use frames=9"):
        encode_moments_whole(vae, clip(8))


@torch.no_grad()
def test_autoencoders_of_another_kind_are_refused_by_name() -> None:
    other = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], patch_size=2)
    with pytest.raises(ValueError, match=r"Wan 2\.1"):
        decode_whole(other, latents(1))
