"""Rendering straight to a video, and small decoders: the same pictures as decoding later, and odd files are refused."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfy_client import Client, RunError
from comfy_host import Server

from flashforward_core.media import probe, read_frames

from .conftest import change, node_id
from .standins import OTHER_DECODER, RAW_DECODER, SMALL_DECODER
from .test_render import interrupted_after
from .test_wan_workflows import runnable

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
PLAN = "FlashForwardPlan"
RENDER, DECODE, FILM = "FlashForwardRender", "FlashForwardDecodeVideo", "FlashForwardRenderVideo"


@pytest.fixture
def later(object_info: Json) -> Json:
    """The 1.3B workflow, cut to three latent frames: latents, decoded with Load VAE when they are finished."""
    return change(runnable("wan_1_3b_long", object_info), PLAN, seconds=9 / 16)


def at_once(api: Json, **inputs: Any) -> Json:
    """The same with one node in the place of two."""
    made = copy.deepcopy(api)
    render, decode = (made.pop(node_id(made, name))["inputs"] for name in (RENDER, DECODE))
    taken = {name: value for name, value in render.items() if name != "reuse_gib"}
    source = {name: decode[name] for name in ("vae",) if name in decode}
    made["902"] = {"class_type": FILM, "inputs": {**taken, **source, "filename_prefix": "video/film", **inputs}}
    return made


def pictures(path: Path) -> np.ndarray:
    return np.concatenate(list(read_frames(path))).astype(int)


def assert_same(first: np.ndarray, second: np.ndarray) -> None:
    """LATENT is un-normalised and back, a rounding that turns a byte of a hundred thousand. The encoder may decide
    otherwise for that (a mean of 0.34 levels was seen), but by less than what it loses anyway, 1.8 levels.
    """
    assert first.shape == second.shape
    assert np.abs(first - second).mean() < 0.5


def test_a_video_rendered_at_once_is_the_one_that_is_decoded_later(client: Client, server: Server, later: Json) -> None:
    one, two = client.run(later), client.run(at_once(later))
    assert one.sha256() == two.sha256()
    (first,), (second,) = one.files(server.output), two.files(server.output)
    assert second.parent.name == "video" and second.name.startswith("film")
    assert_same(pictures(first), pictures(second))
    assert FILM in probe(second).metadata["prompt"]


def test_the_embedded_backbone_decodes_with_its_own_decoder(client: Client, server: Server, prompt: Json) -> None:
    """On the way, one lane renders and two decode."""
    lanes = {"devices": "cpu*3", "layout": "auto", "order": "latency", "decode": "split"}
    prompt["950"] = {"class_type": "FlashForwardDevices", "inputs": lanes}
    change(prompt, PLAN, seconds=9 / 16, devices=["950", 0])
    one, two = client.run(prompt), client.run(at_once(prompt))
    (first,), (second,) = one.files(server.output), two.files(server.output)
    assert one.sha256() == two.sha256()
    assert_same(pictures(first), pictures(second))


def test_a_cancel_leaves_no_file(client: Client, server: Server, later: Json) -> None:
    before = set(server.output.rglob("*"))
    interrupted_after(client, at_once(change(later, PLAN, seconds=30.0)), FILM)
    assert set(server.output.rglob("*")) == before


@pytest.mark.parametrize("name", [SMALL_DECODER, RAW_DECODER])
def test_a_small_decoder_needs_no_vae_and_streams(client: Client, server: Server, later: Json, name: str) -> None:
    """On the way or later: the same pictures. The raw file is also a VAE of ComfyUI's, which then streams too."""
    whole = copy.deepcopy(later)
    del later[node_id(later, DECODE)]["inputs"]["vae"]
    change(later, DECODE, decoder=name)
    found = [client.run(api).files(server.output)[0] for api in (later, at_once(later, decoder=name))]
    if name == RAW_DECODER:
        found.append(client.run(change(whole, "VAELoader", vae_name=name)).files(server.output)[0])
    first, *others = (pictures(path) for path in found)
    assert first.shape == (9, 48, 64, 3) and first.std() > 10
    for other in others:
        assert_same(first, other)


def test_files_that_decode_something_else_are_refused_before_anything_runs(
    client: Client, later: Json, prompt: Json, object_info: Json
) -> None:
    offered = object_info[FILM]["input"]["optional"]["decoder"]
    assert {SMALL_DECODER, RAW_DECODER} <= set(offered[1].get("options", offered[0]))
    for name, words in (
        (OTHER_DECODER, r"no tiny autoencoder for Wan 2.1: decoder.1.weight is \(8, 4, 3, 3\)"),
        ("nowhere.safetensors", "put the file into models/vae_approx"),
    ):
        for api in (at_once(later, decoder=name), change(copy.deepcopy(later), DECODE, decoder=name)):
            with pytest.raises(RunError, match=words) as refusal:
                client.run(api)
            assert "validation" in str(refusal.value)
    with pytest.raises(RunError, match=r"reads Wan 2\.1's latents; this backbone makes its own"):
        client.run(at_once(prompt, decoder=SMALL_DECODER))
    with pytest.raises(RunError, match="this backbone has no autoencoder; connect vae"):
        bare = at_once(later)
        del bare["902"]["inputs"]["vae"]
        client.run(bare)
