"""The tiny decoder equals a whole-clip computation written down layer by layer, streams, and refuses other files."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor

from flashforward_core.model.tiny_vae import PastBlock, TinyDecoder, TinyVae, load_tiny_vae
from flashforward_core.model.vae import VaeState

pytestmark = pytest.mark.cpu

LATENTS = 4


@pytest.fixture(scope="module")
def vae() -> TinyVae:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = TinyVae().requires_grad_(False).eval()
    for layer in made.modules():  # PyTorch's own start lets signals die away in 30 layers
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
    for block in (layer for layer in made.decoder if isinstance(layer, PastBlock)):
        block.conv[4].weight.mul_(0.3)
    made.decoder[-1].weight.mul_(0.1)
    made.decoder[-1].bias.fill_(0.5)
    return made


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return 2 * torch.randn(2, 16, LATENTS, 3, 5, generator=torch.Generator().manual_seed(1))


def whole(weights: dict[str, Tensor], latents_BCFHW: Tensor) -> Tensor:
    """Decode one clip at once from the file's own names, [T, 3, H, W]: every layer sees all frames, in file order."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, weights.get(f"{name}.bias"), padding=weight.shape[-1] // 2)

    x = F.relu(conv(3 * torch.tanh(latents_BCFHW[0].transpose(0, 1) / 3), "decoder.1"))
    for start, frames in ((3, 1), (9, 2), (15, 2)):
        for block in range(start, start + 3):
            past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            h = F.relu(conv(torch.cat([x, past], dim=1), f"decoder.{block}.conv.0"))
            h = F.relu(conv(h, f"decoder.{block}.conv.2"))
            x = F.relu(conv(h, f"decoder.{block}.conv.4") + x)
        x = x.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2)
        x = conv(x, f"decoder.{start + 4}.conv")
        x = x.reshape(frames * x.shape[0], -1, *x.shape[2:])
        x = conv(x, f"decoder.{start + 5}")
    return conv(F.relu(x), "decoder.22")[3:]


def test_streaming_equals_the_whole_clip(vae: TinyVae, latents: Tensor) -> None:
    found, _ = TinyDecoder(vae).decode_float(latents, None)
    assert found.shape == (2, 4 * LATENTS - 3, 24, 40, 3)
    for row in range(2):
        expected = whole(vae.state_dict(), latents[row : row + 1]).clamp(0, 1).movedim(1, -1)
        assert expected.std() > 0.1  # random weights leave something to compare
        # float32 sums of the same numbers in batches of another size
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1] * LATENTS, [3, 1], [1, 2, 1]])
def test_any_chunks_give_the_same_bytes_and_leave_the_state_alone(
    vae: TinyVae, latents: Tensor, lengths: list[int]
) -> None:
    decoder, state = TinyDecoder(vae), None
    at_once, _ = decoder.decode(latents, None)
    parts, states = [], []
    for chunk in latents.split(lengths, dim=2):
        frames, state = decoder.decode(chunk, state)
        parts.append(frames)
        states.append((state, [feature.clone() for feature in state.features]))
    assert torch.equal(torch.cat(parts, dim=1), at_once) and at_once.dtype == torch.uint8
    for kept, before in states:
        assert isinstance(kept, VaeState) and all(map(torch.equal, kept.features, before))


def test_a_file_with_its_encoder_loads(vae: TinyVae, latents: Tensor, tmp_path: Path) -> None:
    weights = {name: tensor.half() for name, tensor in vae.state_dict().items()}
    assert {"decoder.1.bias", "decoder.7.conv.weight", "decoder.8.weight", "decoder.22.bias"} <= weights.keys()
    save_file({**weights, "encoder.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "taew2_1.safetensors")
    torch.save(weights, tmp_path / "taew2_1.pth")
    both = [load_tiny_vae(tmp_path / f"taew2_1{suffix}") for suffix in (".safetensors", ".pth")]
    frames = [TinyDecoder(loaded).decode_float(latents, None)[0] for loaded in both]
    assert torch.equal(frames[0], frames[1])
    # weights keep 11 bits in a file of half precision; sums of some hundred of them, ten layers deep
    torch.testing.assert_close(frames[0], TinyDecoder(vae).decode_float(latents, None)[0], rtol=0, atol=5e-3)


def test_lighttaew2_1_takes_latents_as_a_vae_does(vae: TinyVae, latents: Tensor, tmp_path: Path) -> None:
    """Its file tells nothing of it but its name. The numbers of Wan 2.1's latents are diffusers' own."""
    save_file(vae.state_dict(), tmp_path / "lighttaew2_1.safetensors")
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    mean, std = (torch.tensor(defaults[f"latents_{name}"].default).view(16, 1, 1, 1) for name in ("mean", "std"))
    found, _ = TinyDecoder(load_tiny_vae(tmp_path / "lighttaew2_1.safetensors")).decode_float(latents, None)
    expected, _ = TinyDecoder(vae).decode_float(latents * std + mean, None)
    assert torch.equal(found, expected)
    assert not torch.equal(found, TinyDecoder(vae).decode_float(latents, None)[0])


def test_files_for_other_latents_are_refused_by_name(vae: TinyVae, tmp_path: Path) -> None:
    weights = dict(vae.state_dict())
    wide = {**weights, "decoder.1.weight": torch.zeros(256, 48, 3, 3)}
    short = {name: tensor for name, tensor in weights.items() if name != "decoder.22.bias"}
    deep = {**weights, "decoder.24.weight": torch.zeros(1)}
    for name, content, message in (
        ("tiny_a.safetensors", wide, r"tiny_a.safetensors is no tiny .*decoder.1.weight is \(256, 48, 3, 3\)"),
        ("tiny_b.safetensors", short, "decoder.22.bias is nothing, expected .3,.; use taew2_1"),
        ("tiny_c.safetensors", deep, "it also has decoder.24.weight"),
        ("taehv.safetensors", weights, "taehv.safetensors decodes other latents than Wan 2.1's"),
        ("lighttaew2_2.safetensors", weights, "lighttaew2_2.safetensors decodes other latents than Wan 2.1's"),
    ):
        save_file(content, tmp_path / name)
        with pytest.raises(ValueError, match=message):
            load_tiny_vae(tmp_path / name)
