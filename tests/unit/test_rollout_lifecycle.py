"""The façade: what a rollout gives back, how it is stopped, and how it fails."""

import copy
import hashlib
import itertools
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from flashforward_core.engine import parts as engine_parts
from flashforward_core.engine.events import AnchorBlockReady, ChunkReady, Event, FramesReady, TaskFinished
from flashforward_core.engine.executor import TaskFailed, run_placed
from flashforward_core.engine.ops import NotFinite, RunInputs
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.rollout import DevicePlan, plan_anchors, render, reseed, stream_decode
from flashforward_core.engine.transfer import HostMark
from flashforward_core.graph.parts import parts
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Role
from flashforward_core.model.roles import Backbone
from flashforward_core.model.tiny_vae import TinyVae
from flashforward_core.model.vae import StreamingDecoder
from flashforward_core.specs import AnchorPlan, PromptSpan, VideoShape

pytestmark = pytest.mark.cpu

TWO_LANES = DevicePlan(devices=("cpu*2",))


class Cancelled(BaseException):
    """As ComfyUI's own, not an Exception."""


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone()


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, z_dim=16).eval()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def test_a_second_run_gives_the_same_bytes(rig: Any, backbone: Backbone) -> None:
    first, second = (render(backbone, rig.spec(), rig.texts(), devices=TWO_LANES) for _ in range(2))
    assert torch.equal(first.latents_BCFHW, second.latents_BCFHW)
    assert first.sha256 == second.sha256


def test_the_hash_is_of_the_latents_bytes(rig: Any, backbone: Backbone, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="flashforward_core.engine.rollout"):
        result = render(backbone, rig.spec(), rig.texts())
    latents = result.latents_BCFHW
    assert (latents.dtype, latents.device.type, tuple(latents.shape)) == (torch.float32, "cpu", (1, 16, 14, 4, 4))
    assert result.sha256 == hashlib.sha256(latents.numpy().tobytes()).hexdigest()
    (record,) = caplog.records
    assert result.sha256 in record.getMessage() and "flashforward" in record.getMessage()


def test_results_may_be_written_by_their_owner_inside_and_outside_inference_mode(rig: Any, backbone: Backbone) -> None:
    with torch.inference_mode():
        result = render(backbone, rig.spec(), rig.texts())
    result.latents_BCFHW.add_(1)


def test_given_anchors_equal_anchors_planned_on_the_way(rig: Any, backbone: Backbone) -> None:
    spec, texts = rig.spec(), rig.texts()
    anchors = plan_anchors(backbone, spec, texts, devices=TWO_LANES)
    assert anchors.positions == (0, 3, 6, 9, 12)
    assert anchors.locked == (False,) * 5
    planned = render(backbone, spec, texts, devices=TWO_LANES)
    given = render(backbone, spec, texts, anchors=anchors, devices=TWO_LANES)
    assert torch.equal(given.latents_BCFHW, planned.latents_BCFHW)


def test_an_edited_anchor_changes_the_chunks_that_depend_on_it_only(rig: Any, backbone: Backbone) -> None:
    """Chunk 0 reads anchors 0 to 2; the last anchor reaches the later chunks alone."""
    spec, texts = rig.spec(), rig.texts()
    anchors = plan_anchors(backbone, spec, texts)
    latents = anchors.latents_BCAHW.clone()
    latents[:, :, -1] += 1
    before, after = (
        render(backbone, spec, texts, anchors=a).latents_BCFHW
        for a in (anchors, replace(anchors, latents_BCAHW=latents))
    )
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.equal(before[:, :, -2:], after[:, :, -2:])


def test_prompt_seed_and_role_change_the_video(rig: Any, backbone: Backbone) -> None:
    texts = rig.texts()
    runs = {
        "plain": render(backbone, rig.spec(), texts),
        "seed": render(backbone, rig.spec(seed=8), texts),
        "prompt": render(backbone, rig.spec(), texts[1:]),
        "role": render(_with_roles_swapped(backbone), rig.spec(), texts),
    }
    assert len({run.sha256 for run in runs.values()}) == 4


def _with_roles_swapped(backbone: Backbone) -> Backbone:
    """Swap the rows of the role embedding; each role keeps its LoRA."""
    model = copy.deepcopy(backbone.models[Role.RENDERER])
    model.role_embedding.weight.data = model.role_embedding.weight.data.flip(0)
    return replace(backbone, models=dict.fromkeys(Role, model))


def test_a_prompt_holds_from_its_span_on(rig: Any, backbone: Backbone) -> None:
    spec = rig.spec("flashforward_no_anchors")
    spans = (PromptSpan(), PromptSpan(start=6, prompt=1))
    one, two = (render(backbone, s, rig.texts()).latents_BCFHW for s in (spec, replace(spec, prompts=spans)))
    assert torch.equal(one[:, :, :6], two[:, :, :6])
    assert not torch.equal(one[:, :, 6:9], two[:, :, 6:9])


def test_events_come_on_the_calling_thread_and_count_every_task(rig: Any, backbone: Backbone) -> None:
    events: list[Event] = []
    threads = set()

    def keep(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread())

    result = render(backbone, rig.spec(), rig.texts(), devices=DevicePlan(devices=("cpu*3",)), on_event=keep)
    total = len(build_graph(rig.spec(), decode=False))
    finished = [event for event in events if isinstance(event, TaskFinished)]
    assert threads == {threading.current_thread()}
    assert [event.done for event in finished] == list(range(1, total + 1))
    assert {event.total for event in finished} == {total}
    assert len(result.timeline.spans) == total
    assert torch.equal(rig.video(events), result.latents_BCFHW)
    assert sum(isinstance(event, AnchorBlockReady) for event in events) == 3


def test_the_timeline_is_measured_and_no_lane_runs_two_tasks_at_once(rig: Any, backbone: Backbone) -> None:
    timeline = render(backbone, rig.spec(), rig.texts(), devices=DevicePlan(devices=("cpu*3",))).timeline
    assert timeline.source == "measured" and len(timeline.peak_kv_bytes) == 3
    for lane in range(3):
        spans = [span for span in timeline.spans if span.lane == lane]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_memory_order_holds_one_stage_bank_at_a_time(rig: Any, backbone: Backbone) -> None:
    """2 stages: latency order holds both stages' banks, memory order one; the anchors' bank comes on top."""
    spec = rig.spec("flashforward_no_anchors", latent_frames=18)
    latency, memory = (
        render(backbone, spec, rig.texts(), devices=DevicePlan(devices=("cpu",), order=order))
        for order in ("latency", "memory")
    )
    assert memory.timeline.peak_kv_bytes[0] * 2 == latency.timeline.peak_kv_bytes[0]
    assert memory.sha256 == latency.sha256


@pytest.mark.parametrize("decode", ["auto", "any", "split"])
def test_frames_come_in_order_and_equal_decoding_afterwards(
    rig: Any, backbone: Backbone, vae: Any, decode: str
) -> None:
    frames: list[Tensor] = []

    def keep(event: Event) -> None:
        if isinstance(event, FramesReady):
            assert event.index == len(frames)
            frames.append(event.frames)

    whole = replace(backbone, vae=vae)
    devices = DevicePlan(devices=("cpu*2" if decode == "any" else "cpu*4",), decode=decode)
    result = render(whole, rig.spec(latent_frames=14), rig.texts(), devices=devices, decode=True, on_event=keep)
    lanes = {span.lane for span in result.timeline.spans if span.task.startswith("decode/")}
    assert len(lanes) == (1 if decode == "auto" else 2)
    expected, _ = StreamingDecoder(vae).decode(result.latents_BCFHW, None)
    assert torch.equal(torch.cat(frames, dim=1), expected)
    assert torch.equal(torch.cat(list(stream_decode(whole, result.latents_BCFHW))), expected[0])


@pytest.mark.parametrize("devices", [DevicePlan(devices=("cpu*2",)), DevicePlan(devices=("cpu*3",), decode="split")])
def test_after_a_hard_cut_frames_are_those_of_their_own_scene(
    rig: Any, backbone: Backbone, vae: Any, devices: DevicePlan
) -> None:
    frames: list[Tensor] = []

    def keep(event: Event) -> None:
        if isinstance(event, FramesReady):
            frames.append(event.frames)

    prompts = (PromptSpan(), PromptSpan(start=7, prompt=1, hard_cut=True))  # chunks of 3: the scene begins at 9
    spec = rig.spec(latent_frames=14, prompts=prompts)
    assert spec.scene_frames() == (9,)
    result = render(
        replace(backbone, vae=vae),
        spec,
        rig.texts(),
        devices=devices,
        decode=True,
        on_event=keep,
    )
    decoder = StreamingDecoder(vae)
    first, second = result.latents_BCFHW.split([9, 5], dim=2)
    before, carried = decoder.decode(first, None)
    after, _ = decoder.decode(second, decoder.still(second[:, :, :1]))
    assert torch.equal(torch.cat(frames, dim=1), torch.cat([before, after], dim=1))
    assert not torch.equal(after, decoder.decode(second, carried)[0])


def test_a_decoder_in_halves_goes_from_part_to_part(
    rig: Any, backbone: Backbone, vae: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves' states are carried; a small decoder has no halves."""
    monkeypatch.setattr(engine_parts, "LONGEST_WHOLE", 0)
    monkeypatch.setattr(engine_parts, "parts", lambda spec, **options: parts(spec, **{**options, "size": 2}))
    frames: list[Tensor] = []
    devices = DevicePlan(devices=("cpu*3",), decode="split")
    result = render(
        replace(backbone, vae=vae),
        rig.spec(latent_frames=14),
        rig.texts(),
        devices=devices,
        decode=True,
        on_event=lambda event: frames.append(event.frames) if isinstance(event, FramesReady) else None,
    )
    expected, _ = StreamingDecoder(vae).decode(result.latents_BCFHW, None)
    assert torch.equal(torch.cat(frames, dim=1), expected)
    with pytest.raises(ValueError, match="decode='split' is for Wan's autoencoder"):
        render(replace(backbone, vae=TinyVae()), rig.spec(), rig.texts(), devices=devices, decode=True)


def test_decoding_stops_when_cancelled(rig: Any, backbone: Backbone, vae: Any) -> None:
    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        next(stream_decode(replace(backbone, vae=vae), torch.zeros(1, 16, 2, 4, 4), check_cancel=cancel))


@pytest.mark.parametrize("error", [Cancelled, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_cancel_propagates_and_the_next_run_is_right(
    rig: Any, backbone: Backbone, error: type[BaseException], lanes: int
) -> None:
    devices = DevicePlan(devices=(f"cpu*{lanes}",))
    expected = render(backbone, rig.spec(), rig.texts(), devices=devices)
    finished = []

    def cancel() -> None:
        if len(finished) > 5:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        render(backbone, rig.spec(), rig.texts(), devices=devices, on_event=finished.append, check_cancel=cancel)
    assert not any(thread.name.startswith("flashforward") for thread in threading.enumerate())
    assert render(backbone, rig.spec(), rig.texts(), devices=devices).sha256 == expected.sha256


def test_planning_and_planning_one_anchor_again_stop_within_a_forward(rig: Any, backbone: Backbone) -> None:
    """The cancel comes at the second look, after at most one delivery; one more forward per lane may be under way."""
    anchors = plan_anchors(backbone, rig.spec(), rig.texts())
    for plan in (
        lambda **hooks: plan_anchors(backbone, rig.spec(), rig.texts(), devices=TWO_LANES, **hooks),
        lambda **hooks: reseed(anchors, 0, seed=9, check_cancel=hooks["check_cancel"]),
    ):
        finished: list[Event] = []
        looks = itertools.count()

        def cancel(finished: list[Event] = finished, looks: Any = looks) -> None:
            if next(looks) >= 1:
                raise Cancelled

        with pytest.raises(Cancelled):
            plan(on_event=finished.append, check_cancel=cancel)
        assert sum(isinstance(event, TaskFinished) for event in finished) <= 4


def test_frames_are_let_go_as_they_are_used(rig: Any, backbone: Backbone, vae: Any) -> None:
    """A minute of 720p as float32 would be 10 GiB; here nobody keeps a frame that the caller has let go."""
    latents = torch.zeros(1, 16, 6, 4, 4)
    alive: list[weakref.ref[Tensor]] = []
    for frames in stream_decode(replace(backbone, vae=vae), latents):
        assert sum(frame() is not None for frame in alive) <= 1
        alive.append(weakref.ref(frames))
    assert len(alive) == 6


def test_an_error_of_a_listener_stops_the_run(rig: Any, backbone: Backbone) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, ChunkReady):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        render(backbone, rig.spec(), rig.texts(), devices=TWO_LANES, on_event=listen)


def placed(rig: Any, backbone: Backbone, **callbacks: Any) -> None:
    graph = build_graph(rig.spec(), decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"] * 2), layout="interleaved")
    inputs = RunInputs(spec=rig.spec(), texts=rig.texts())
    run_placed(graph, inputs=inputs, backbone=backbone, placement=placement, **callbacks)


def test_the_caller_looks_for_a_cancel_while_forwards_run(rig: Any, backbone: Backbone) -> None:
    """A forward of 0.5 s is 10 times the promised 50 ms; half of that leaves room for a busy machine."""
    looks: list[float] = []

    def slow(task: ForwardTask) -> None:
        if task.id == "planner/denoise/b0/s0":
            time.sleep(0.5)

    placed(rig, backbone, before_task=slow, check_cancel=lambda: looks.append(time.perf_counter()))
    assert sum(look < looks[0] + 0.45 for look in looks) >= 5


def test_a_cancel_waits_for_running_forwards_only(rig: Any, backbone: Backbone) -> None:
    started: list[str] = []

    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        placed(rig, backbone, before_task=lambda task: (started.append(task.id), time.sleep(0.2)), check_cancel=cancel)
    assert len(started) <= 2  # one per lane


def test_a_failing_task_is_named_and_its_cause_chained(rig: Any, backbone: Backbone) -> None:
    def fail(task: ForwardTask) -> None:
        if task.id == "renderer/denoise/c1/s1":
            raise MemoryError("out of memory")

    with pytest.raises(TaskFailed, match="renderer/denoise/c1/s1: out of memory") as failure:
        placed(rig, backbone, before_task=fail)
    assert isinstance(failure.value.__cause__, MemoryError)


def test_a_device_that_fails_ends_the_run_and_the_task_is_named(
    rig: Any, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA device reports errors late: to whoever waits for it, on the lane's own thread."""

    def wait(mark: HostMark) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(HostMark, "wait", wait)
    with pytest.raises(TaskFailed, match=r"/s0: an illegal memory access"):
        placed(rig, backbone)


def test_latents_that_are_not_finite_name_chunk_stage_dtype_and_attention(rig: Any) -> None:
    model = rig.model(torch.float32)
    model.proj_out.weight[0, 0] = torch.nan
    spec = rig.spec("self_forcing")
    with pytest.raises(TaskFailed, match=r"chunk 0 is not finite after stage 0 .*float32, attention sdpa") as failure:
        render(rig.backbone(model=model), spec, rig.texts(), devices=TWO_LANES)
    assert isinstance(failure.value.__cause__, NotFinite)
    with pytest.raises(TaskFailed, match="anchor block 0 is not finite after stage 0"):
        plan_anchors(rig.backbone(model=model), rig.spec(), rig.texts())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": (PromptSpan(), PromptSpan(start=3, prompt=2))}, "prompt 2, but texts hold 2"),
        ({"schedule": "flashforward", "anchors": None}, "anchors=None"),
        ({"schedule": "nonsense"}, "schedule='nonsense' is unknown"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(rig: Any, backbone: Backbone, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(backbone, rig.spec(**changes), rig.texts())


def test_texts_of_another_encoder_are_refused(rig: Any, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match=r"texts\[0\] has shape \(1, 5, 99\)"):
        render(backbone, rig.spec(), [torch.zeros(1, 5, 99)])


def test_a_size_that_the_backbone_cannot_make_is_refused(rig: Any, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match="size=32x32 does not fit the backbone, which makes 192x128 only"):
        render(replace(backbone, size=(192, 128)), rig.spec(), rig.texts())


def test_anchors_of_another_plan_are_refused(rig: Any, backbone: Backbone) -> None:
    anchors = plan_anchors(backbone, rig.spec(), rig.texts())
    other = rig.spec(anchors=AnchorPlan(stride=4, block_frames=2))
    with pytest.raises(ValueError, match=r"anchors are at the latent frames \(0, 3, 6, 9, 12\)"):
        render(backbone, other, rig.texts(), anchors=anchors)
    larger = rig.spec(shape=VideoShape(width=48, height=32, latent_frames=14))
    with pytest.raises(ValueError, match="anchors are 1 x 4x4 latents, but the plan needs 1 x 6x4"):
        render(backbone, larger, rig.texts(), anchors=anchors)
    with pytest.raises(ValueError, match="schedule='hiar' reads no anchors"):
        render(backbone, rig.spec("hiar"), rig.texts(), anchors=anchors)


def test_frames_need_an_autoencoder(rig: Any, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match="decode=True needs a backbone with an autoencoder"):
        render(backbone, rig.spec(), rig.texts(), decode=True)
    with pytest.raises(ValueError, match="no autoencoder"):
        stream_decode(backbone, torch.zeros(1, 16, 1, 4, 4))
