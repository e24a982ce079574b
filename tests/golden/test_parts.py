"""A rollout that runs in parts gives the bytes of the whole, and holds no more the longer it is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine import parts as engine_parts
from flashforward_core.engine.events import ChunkReady, Event, TaskFinished
from flashforward_core.engine.rollout import DevicePlan, RenderResult, plan_anchors, render
from flashforward_core.graph.parts import parts
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.kv.pages import plan_pages
from flashforward_core.kv_policy import FutureForcingOptions, TempCacheOptions, WindowOptions
from flashforward_core.specs import History, PromptSpan, RolloutSpec

pytestmark = pytest.mark.cpu

ONE, THREE = DevicePlan(devices=("cpu",)), DevicePlan(devices=("cpu*3",))
POLICIES = {
    "window": WindowOptions(budget_frames=5, sink_frames=2),
    "future_forcing": FutureForcingOptions(budget_frames=7),
    "temp_cache": TempCacheOptions(threshold=0.5, budget_frames=6),
}


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RenderResult]:
    """Renders in parts of about five chunks, however short the video is."""

    def run(*args: Any, **kwargs: Any) -> RenderResult:
        with monkeypatch.context() as patch:
            patch.setattr(engine_parts, "LONGEST_WHOLE", 0)
            patch.setattr(engine_parts, "parts", lambda spec, **options: parts(spec, **{**options, "size": 5}))
            return render(*args, **kwargs)

    return run


def _spec(rig: Any, schedule: str, **changes: Any) -> RolloutSpec:
    """41 latent frames: 14 chunks in three parts, the last chunk short."""
    return spec_for(rig.spec(schedule, latent_frames=41, **changes))


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("sink", [0, 3])
def test_parts_have_the_tasks_of_the_whole_and_its_order_of_keys(rig: Any, schedule: str, sink: int) -> None:
    for policy in (None, *POLICIES.values()):
        spec = _spec(rig, schedule, history=History(chunks=3, planner_blocks=2, sink=sink))
        spec = spec if policy is None else replace(spec, kv_policy=policy)
        whole, some = build_graph(spec), list(parts(spec, size=4))
        assert len(some) == (3 if policy is None else 4)  # a ring of 4 or 3 pages; any cut
        assert {task.id: task for task in whole.tasks} == {t.id: t for part in some for t in part.graph.tasks}
        expected = plan_pages(spec, whole)
        for part in some:
            pages = plan_pages(spec, part.graph)
            for task in part.graph.tasks:
                if task.is_forward:
                    assert _keys_in_order(pages.views[task.id]) == _keys_in_order(expected.views[task.id]), task.id


def _keys_in_order(view: Any) -> list[object]:
    found = sorted([(page.start, slot) for slot, page in view.reads] + [(view.own.start, "own")], key=lambda at: at[0])
    return [slot for _, slot in found]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_parts_give_the_bytes_of_the_whole(rig: Any, in_parts: Callable[..., RenderResult], schedule: str) -> None:
    spec, backbone, texts = _spec(rig, schedule), rig.backbone(), rig.texts()
    expected = render(backbone, spec, texts, devices=ONE)
    for devices in (ONE, THREE):
        found = in_parts(backbone, spec, texts, devices=devices)
        assert found.sha256 == expected.sha256
        assert len(found.timeline.spans) == len(expected.timeline.spans)
        launched = [sum(lane.eager for lane in result.timeline.launches) for result in (found, expected)]
        assert launched == [build_graph(spec, decode=False).counts()["total"]] * 2


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_keeps_goes_from_part_to_part(rig: Any, in_parts: Callable[..., RenderResult], name: str) -> None:
    spec, backbone = replace(_spec(rig, "flashforward"), kv_policy=POLICIES[name]), rig.backbone()
    expected = render(backbone, spec, rig.texts(), devices=ONE)
    assert in_parts(backbone, spec, rig.texts(), devices=THREE).sha256 == expected.sha256


def test_prompts_anchors_and_starts_are_those_of_the_whole(rig: Any, in_parts: Callable[..., RenderResult]) -> None:
    """A prompt change inside a part; anchors that are given; a start of four latent frames."""
    prompts = (PromptSpan(), PromptSpan(start=13, prompt=1))
    spec, backbone, texts = _spec(rig, "flashforward", prompts=prompts), rig.backbone(), rig.texts()
    start = torch.randn(1, 16, 4, 4, 4, generator=torch.Generator().manual_seed(3))
    anchors = plan_anchors(backbone, replace(spec, start_frames=4), texts, start=start, devices=ONE)
    for options in ({}, {"start": start}, {"anchors": anchors}):
        expected = render(backbone, spec, texts, devices=ONE, **options)
        assert in_parts(backbone, spec, texts, devices=ONE, **options).sha256 == expected.sha256


def test_a_part_that_is_given_and_read_by_nobody_has_nothing_to_run(
    rig: Any, in_parts: Callable[..., RenderResult]
) -> None:
    """Chunks read the first one only, and 12 of 14 are given: all of the second part's, chunks 5 to 9."""
    spec = _spec(rig, "self_forcing", history=History(chunks=1, planner_blocks=1, sink=1))
    backbone, texts = rig.backbone(), rig.texts()
    start = torch.randn(1, 16, 36, 4, 4, generator=torch.Generator().manual_seed(3))
    expected = render(backbone, spec, texts, devices=ONE, start=start)
    assert in_parts(backbone, spec, texts, devices=ONE, start=start).sha256 == expected.sha256


def test_after_a_hard_cut_keys_may_come_in_another_order(rig: Any, in_parts: Callable[..., RenderResult]) -> None:
    """Equal bytes up to the cut; after it the same numbers, summed in another order."""
    prompts = (PromptSpan(), PromptSpan(start=24, prompt=1, hard_cut=True))
    spec, backbone, texts = _spec(rig, "flashforward", prompts=prompts), rig.backbone(), rig.texts()
    expected = render(backbone, spec, texts, devices=ONE).latents_BCFHW
    found = in_parts(backbone, spec, texts, devices=ONE).latents_BCFHW
    assert torch.equal(found[:, :, :24], expected[:, :, :24])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_latents_that_are_not_held_have_the_same_hash_and_arrive_as_events(
    rig: Any, in_parts: Callable[..., RenderResult]
) -> None:
    spec, backbone, texts = _spec(rig, "flashforward"), rig.backbone(), rig.texts(batch=2)
    expected = render(backbone, spec, texts, devices=ONE)
    events: list[Event] = []
    found = in_parts(backbone, spec, texts, devices=ONE, hold_latents=False, on_event=events.append)
    assert found.sha256 == expected.sha256
    assert found.latents_BCFHW.shape == (2, 16, 0, 4, 4)
    chunks = [event for event in events if isinstance(event, ChunkReady)]
    torch.testing.assert_close(rig.video(chunks), expected.latents_BCFHW, rtol=0, atol=0)
    tasks = [event for event in events if isinstance(event, TaskFinished)]
    assert [task.done for task in tasks] == list(range(1, len(tasks) + 1))
    assert {task.total for task in tasks} == {len(tasks)}


def test_what_a_part_holds_does_not_grow_with_the_video(rig: Any) -> None:
    """Pages of every bank, the planner's too, slots handed on and tasks, at ten times the length."""
    most = []
    for frames in (300, 3_000):
        spec = rig.spec(latent_frames=frames)
        some = list(parts(spec, size=20))
        banks = [plan_pages(spec, part.graph).bank_frames for part in some]
        most.append(
            (
                max(sum(bank.values()) for bank in banks),
                max(len(part.carried) for part in some),
                max(len(part.graph) for part in some),
            )
        )
    assert most[0] == most[1]


def test_a_cancel_in_a_later_part_stops_the_run(rig: Any, in_parts: Callable[..., RenderResult]) -> None:
    done = 0

    class Cancelled(Exception):
        pass

    def on_event(event: Event) -> None:
        nonlocal done
        done += isinstance(event, ChunkReady)

    def check() -> None:
        if done >= 8:
            raise Cancelled

    with pytest.raises(Cancelled):
        in_parts(rig.backbone(), _spec(rig, "flashforward"), rig.texts(), on_event=on_event, check_cancel=check)
    assert 8 <= done < 14
