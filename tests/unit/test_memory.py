"""Memory: what is predicted is what is used, and what cannot fit is refused before anything runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.budget import DECODE_NUMBERS, sizes_of
from flashforward_core.engine.memory import (
    GIB,
    LIBRARY_BYTES,
    DoesNotFit,
    MemoryOptions,
    backbone_sizes,
    block_parameters,
    forward_bytes,
    outer_parameters,
    predict_memory,
    size,
)
from flashforward_core.engine.placement import ORDERS, lanes_for, place
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Role
from flashforward_core.kv.pages import plan_pages
from flashforward_core.kv_policy import FutureForcingOptions, KVPolicy, SparseOptions, TempCacheOptions, WindowOptions
from flashforward_core.model.config import EMBEDDED, WAN_1_3B, WAN_14B, WanConfig
from flashforward_core.model.layers import Segment, rotation
from flashforward_core.model.transformer import Block, CausalWanTransformer
from flashforward_core.model.vae import VaeState, _decode_step
from flashforward_core.specs import RolloutSpec, VideoShape

from .live_memory import LiveMemory

pytestmark = pytest.mark.cpu
TIB = 2**40


@pytest.mark.parametrize("config", [EMBEDDED, WAN_1_3B, WAN_14B], ids=lambda config: config.name)
def test_weights_are_counted_from_the_configuration(config: WanConfig) -> None:
    with torch.device("meta"):
        block = Block(config)
        one_block = CausalWanTransformer(replace(config, num_layers=1))
    in_block = sum(parameter.numel() for parameter in block.parameters())
    assert block_parameters(config) == in_block
    assert outer_parameters(config) == sum(parameter.numel() for parameter in one_block.parameters()) - in_block


def test_measured_and_derived_sizes_of_a_backbone_agree(rig: Any) -> None:
    backbone = rig.backbone(merged=True)
    found, derived = sizes_of(backbone), backbone_sizes(backbone.config, element_bytes=4, weight_sets=2)
    # Merged weight sets share what the LoRA leaves alone: norms, tables and all that is outside the blocks.
    assert found.blocks_bytes < derived.blocks_bytes <= 1.1 * found.blocks_bytes
    assert 2 * found.outer_bytes == derived.outer_bytes
    assert found.block_bytes == pytest.approx(derived.block_bytes, rel=0.02)  # rounded up to aligned addresses


@pytest.mark.parametrize("config", [WAN_1_3B, WAN_14B], ids=lambda config: config.name)
@pytest.mark.parametrize(("rows", "columns"), [(30, 52), (45, 80)], ids=["480p", "720p"])
def test_a_forward_needs_what_is_predicted(config: WanConfig, rows: int, columns: int) -> None:
    """Two blocks on meta tensors of full size: every tensor that is alive is counted."""
    tokens, dtype = 3 * rows * columns, torch.bfloat16
    with torch.device("meta"):
        block = Block(config).to(dtype)
        keys = torch.empty(1, 7 * tokens, config.num_heads, config.head_dim, dtype=dtype)
        time, frames = torch.empty(1, 3, 6, config.dim, dtype=dtype), torch.zeros(3, dtype=torch.long)
        made = torch.empty(1, tokens, config.dim, dtype=dtype)
    segments = (Segment(Role.RENDERER, 0, 3),)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q)

    with torch.inference_mode(), LiveMemory().ignore([keys, time, frames, *block.parameters()]) as live:
        x = made.clone()
        turn = rotation(config, frames=frames, rows=rows, columns=columns, dtype=torch.float32)
        for _ in range(2):
            x = block(x, time, turn, ((keys, keys),), segments, attend, attend, lambda k, v: (keys, keys))
    predicted = forward_bytes(config, tokens=tokens, element_bytes=2)
    assert live.peak <= predicted <= 1.02 * live.peak


@pytest.mark.parametrize(("as_conv2d", "channels_last"), [(False, False), (False, True), (True, False)])
def test_decoding_needs_what_is_predicted(as_conv2d: bool, channels_last: bool) -> None:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        vae = AutoencoderKLWan()
        latent = torch.empty(1, 16, 1, 60, 104)
    state = VaeState(())
    with torch.no_grad(), LiveMemory().ignore([latent, *vae.parameters()]) as live:
        for _ in range(3):  # the third latent frame is the first in the steady state
            _, features = _decode_step(vae, latent, state.features, as_conv2d, channels_last)
            state = VaeState(features)
    predicted = DECODE_NUMBERS * 832 * 480 * vae.config.base_dim * 4
    # 3D convolutions leave a quarter for their libraries' workspaces, which tensors do not show.
    assert live.peak <= predicted <= (1.02 if as_conv2d else 1.4) * live.peak


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_banks_take_what_is_predicted(rig: Any, schedule: str, order: str, kv: str) -> None:
    backbone, spec = rig.backbone(), spec_for(rig.spec(schedule))
    memory = MemoryOptions(kv=kv)
    measured = render(backbone, spec, rig.texts(), devices=DevicePlan(order=order, memory=memory)).timeline
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"]), order=order)
    (found,) = predict_memory(graph, spec=spec, placement=placement, sizes=sizes_of(backbone), options=memory)
    prompts = (2 if spec.anchors else 1) * backbone.config.kv_bytes_per_frame(backbone.config.text_len, element_bytes=4)
    assert found.kv_bytes - prompts == measured.peak_kv_bytes[0]


@pytest.mark.parametrize(
    "policy",
    [WindowOptions(budget_frames=12), FutureForcingOptions(budget_frames=12), TempCacheOptions(threshold=1.1)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("schedule", ["flashforward", "self_forcing"])
def test_what_a_policy_keeps_takes_no_more_than_is_predicted(rig: Any, schedule: str, policy: KVPolicy) -> None:
    """A compaction holds the last state, the next one and what it was handed; a forward that follows counts too."""
    spec = spec_for(rig.spec(schedule, latent_frames=29, kv_policy=policy))
    backbone = rig.backbone(torch.bfloat16)
    measured = render(backbone, spec, rig.texts(torch.bfloat16)).timeline.peak_kv_bytes[0]
    graph = build_graph(spec, decode=False)
    (found,) = predict_memory(
        graph, spec=spec, placement=place(graph, lanes=lanes_for(["cpu"])), sizes=sizes_of(backbone)
    )
    prompts = (2 if spec.anchors else 1) * backbone.config.kv_bytes_per_frame(backbone.config.text_len, element_bytes=2)
    assert measured <= found.kv_bytes - prompts <= 1.2 * measured


def test_memory_order_holds_one_stage_at_a_time(rig: Any) -> None:
    spec = spec_for(rig.spec(latent_frames=26))
    banks = plan_pages(spec, build_graph(spec, decode=False)).bank_frames
    peaks = [
        render(rig.backbone(), spec, rig.texts(), devices=DevicePlan(order=order)).timeline.peak_kv_bytes[0]
        for order in ORDERS
    ]
    stage = banks["stage0"]
    assert banks == {"anchor": banks["anchor"], "stage0": stage, "stage1": stage}
    assert peaks[0] * (banks["anchor"] + stage) == peaks[1] * (banks["anchor"] + 2 * stage)


def wan(latent_frames: int = 81) -> RolloutSpec:
    return RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=latent_frames))


@pytest.mark.parametrize(
    ("order", "memory", "gib"),
    [
        # One latent frame's KV is 1.19 GiB (2 x 40 blocks x 5120 x 1560 x 2 bytes); 4 banks of 21 and 9 anchors.
        ("latency", MemoryOptions(), 26.6 + 93 * 1.19 + 0.8 + 0.8),  # weights, banks, prompts, workspace
        ("memory", MemoryOptions(), 26.6 + 30 * 1.19 + 0.8 + 0.8),
        ("memory", MemoryOptions(kv="fp8"), 26.6 + 30 * 1.19 * 129 / 256 + 0.8 + 1.5),
        ("memory", MemoryOptions(kv="fp8", offload="on"), 0.7 + 3 * 0.66 + 30 * 1.19 * 129 / 256 + 0.8 + 1.5),
    ],
)
def test_the_largest_model_needs_what_was_worked_out_by_hand(order: str, memory: MemoryOptions, gib: float) -> None:
    graph, spec = build_graph(wan(), decode=False), wan()
    placement = place(graph, lanes=lanes_for(["cuda:0"]), order=order)
    sizes = backbone_sizes(WAN_14B, element_bytes=2)
    (found,) = predict_memory(graph, spec=spec, placement=placement, sizes=sizes, options=memory)
    assert found.peak_bytes / GIB == pytest.approx(gib, abs=0.5)  # the figures above have two or three digits


def test_what_recordings_read_is_predicted_where_cuda_lanes_record() -> None:
    """A block's weights for each role and length of forwards, but for blocks that are too large to be recorded."""
    spec = spec_for(RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=21)))
    graph = build_graph(spec, decode=False)

    def workspace(config: WanConfig, device: str, **options: str) -> list[int]:
        placement = place(graph, lanes=lanes_for([f"{device}:0", f"{device}:1"]), layout="prelude")
        sizes = backbone_sizes(config, element_bytes=2, weight_sets=2)
        memory = MemoryOptions(**options)  # type: ignore[arg-type]
        return [
            found.workspace_bytes - LIBRARY_BYTES * (device == "cuda")
            for found in predict_memory(graph, spec=spec, placement=placement, sizes=sizes, options=memory)
        ]

    block = backbone_sizes(WAN_1_3B, element_bytes=2, weight_sets=2).block_bytes
    added = [more - less for more, less in zip(workspace(WAN_1_3B, "cuda"), workspace(WAN_1_3B, "xpu"), strict=True)]
    assert added == [2 * block, block]  # the first lane plans as well
    for config, options in ((WAN_14B, {}), (WAN_1_3B, {"offload": "on"})):
        assert workspace(config, "cuda", **options) == workspace(config, "xpu", **options)


def test_buckets_take_eight_bytes_a_token_and_head_of_sparse_blocks() -> None:
    """At 1.3B 21 of 30 blocks with 12 heads: 1.1 % of what banks take. The prompt's buckets are not counted."""
    sizes, graph = backbone_sizes(WAN_1_3B, element_bytes=2), build_graph(wan(), decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"]))

    def kv_bytes(sparse: SparseOptions | None) -> int:
        return predict_memory(graph, spec=replace(wan(), sparse=sparse), placement=placement, sizes=sizes)[0].kv_bytes

    row = 2 * 30 * 1536 * 2
    tokens, rest = divmod(kv_bytes(None) - 2 * 512 * row, row)
    assert rest == 0
    assert kv_bytes(SparseOptions()) - kv_bytes(None) == tokens * 21 * 12 * 8
    assert kv_bytes(SparseOptions(video=False)) == kv_bytes(None)


def peak(rig: Any, spec: RolloutSpec, *, order: str = "latency", kv: str = "auto") -> int:
    """Return what a render on one CPU lane is predicted to take."""
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"]), order=order)
    sizes, options = sizes_of(rig.backbone()), MemoryOptions(kv=kv)
    return predict_memory(graph, spec=spec, placement=placement, sizes=sizes, options=options)[0].peak_bytes


def test_what_cannot_fit_is_refused_before_anything_runs_and_the_advice_helps(rig: Any) -> None:
    spec, events = rig.spec(latent_frames=26), []
    least = peak(rig, spec, order="memory", kv="fp8")
    tight = MemoryOptions(budget_gib=least / GIB)
    with pytest.raises(DoesNotFit) as refused:
        render(rig.backbone(), spec, rig.texts(), devices=DevicePlan(memory=tight), on_event=events.append)
    assert not events
    text = str(refused.value)
    assert text.startswith(f"memory: cpu needs about {size(peak(rig, spec))} (weights ")
    steps = f"use order=memory ({size(peak(rig, spec, order='memory'))}), then kv=fp8 ({size(least)}), then a smaller"
    assert f"the budget is {size(least)}; {steps}" in text  # a CPU would gain nothing by offloading
    followed = DevicePlan(order="memory", memory=replace(tight, kv="fp8"))
    assert len(render(rig.backbone(), spec, rig.texts(), devices=followed).sha256) == 64


def test_a_budget_that_suffices_is_kept_and_one_byte_less_is_refused(rig: Any) -> None:
    spec = rig.spec()
    for spare in (0, -1):
        plan = DevicePlan(memory=MemoryOptions(budget_gib=(peak(rig, spec) + spare) / GIB))
        if spare:
            with pytest.raises(DoesNotFit):
                render(rig.backbone(), spec, rig.texts(), devices=plan)
        else:
            render(rig.backbone(), spec, rig.texts(), devices=plan)


@pytest.mark.parametrize(
    "bad", [{"kv": "int4"}, {"offload": "maybe"}, {"budget_gib": -1.0}, {"budget_gib": TIB * 1e300}]
)
def test_options_that_cannot_work_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(bad))}="):
        MemoryOptions(**bad)
