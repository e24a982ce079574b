"""Pages: where KV lives, who may take a page, and what a forward then attends to."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.executor import TaskFailed, run_sequential
from flashforward_core.engine.ops import NotFinite, RunInputs
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Slot, Space, TaskGraph
from flashforward_core.kv.bank import BankShape, LaneBanks, Ledger
from flashforward_core.kv.groups import group_page
from flashforward_core.kv.pages import Page, PagePlan, kv_slots, plan_pages
from flashforward_core.kv_policy import SparseOptions
from flashforward_core.specs import History, PromptSpan, RolloutSpec, VideoShape

Homes = dict[Slot, LaneBanks]

pytestmark = pytest.mark.cpu

SHAPE = BankShape(batch=1, num_blocks=2, frame_tokens=4, num_heads=2, head_dim=6, dtype=torch.float32)


def full_length(schedule: str = "flashforward", **changes: object) -> RolloutSpec:
    """81 latent frames, as the paper's 20 seconds."""
    return RolloutSpec(shape=VideoShape(width=32, height=32, latent_frames=81), schedule=schedule, **changes)


def planned(spec: RolloutSpec) -> tuple[TaskGraph, PagePlan]:
    graph = build_graph(spec, decode=False)
    return graph, plan_pages(spec_for(spec), graph)


def banks_for(graph: TaskGraph, plan: PagePlan, *, poison: bool = False) -> tuple[LaneBanks, Ledger]:
    ledger = Ledger(graph.tasks, plan)
    return LaneBanks(plan, shape=SHAPE, ledger=ledger, device=torch.device("cpu"), poison=poison), ledger


def run_task(
    graph: TaskGraph, banks: LaneBanks, ledger: Ledger, *, task_id: str, homes: Homes, value: float = 1.0
) -> list[Tensor]:
    """Do what a forward does with its bank, without the forward; return keys per block."""
    task = graph.by_id()[task_id]
    view = banks.open(task, homes)
    tokens = banks._plan.views[task_id].own.frames * SHAPE.frame_tokens
    own = torch.full((1, tokens, 2, 6), value)
    keys = [view.extend(block, own, -own)[0] for block in range(SHAPE.num_blocks)]
    banks.close(task)
    homes.update(dict.fromkeys(kv_slots(task.writes), banks))
    ledger.finish(task)
    return keys


# Worked out by hand: 3 anchors + (5 earlier chunks + self) x 3 latent frames = 21; 9 anchors at stride 10.
@pytest.mark.parametrize(
    ("schedule", "frames"),
    [
        ("flashforward", {"anchor": 9, "stage0": 21, "stage1": 21, "stage2": 21, "stage3": 21}),
        ("flashforward_no_anchors", {"stage0": 18, "stage1": 18, "stage2": 18, "stage3": 18}),
        ("clean_history_anchors", {"anchor": 9, "clean": 21}),
        ("self_forcing", {"clean": 18}),
        ("hiar", {"stage0": 18, "stage1": 18, "stage2": 18, "stage3": 18}),
        ("last_stage", {"stage3": 18}),
    ],
)
def test_a_bank_is_anchors_and_a_ring_of_one_more_than_the_history(schedule: str, frames: dict[str, int]) -> None:
    _, plan = planned(full_length(schedule))
    assert plan.bank_frames == frames


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("sink", [0, 3])
def test_every_forward_of_a_full_length_run_reads_one_dense_slice(schedule: str, sink: int) -> None:
    _, plan = planned(full_length(schedule, history=History(sink=sink)))
    assert {len(view.ranges) for view in plan.views.values()} == {1}


def test_chunks_take_the_pages_of_the_ring_in_turn() -> None:
    _, plan = planned(full_length())
    starts = [plan.views[f"renderer/denoise/c{chunk}/s2"].own.start for chunk in range(27)]
    assert starts == [3 + chunk % 6 * 3 for chunk in range(27)]


def test_a_sink_keeps_its_page() -> None:
    _, plan = planned(full_length("self_forcing", history=History(chunks=5, sink=3)))
    starts = [plan.views[f"renderer/denoise/c{chunk}/s0"].own.start for chunk in range(27)]
    assert starts == [0] + [3 + (chunk - 1) % 5 * 3 for chunk in range(1, 27)]


def test_a_hard_cut_gets_pages_of_its_own() -> None:
    """Nothing orders the two scenes, so they may run at the same time."""
    spec = full_length(prompts=(PromptSpan(), PromptSpan(start=42, prompt=1, hard_cut=True)))
    _, plan = planned(spec)
    first, second = (
        {plan.views[f"renderer/denoise/c{chunk}/s0"].own.start for chunk in chunks}
        for chunks in (range(14), range(14, 27))
    )
    assert first.isdisjoint(second)
    assert plan.bank_frames["stage0"] == 3 + 2 * 18


def test_a_forward_writes_in_place_and_reads_without_a_copy() -> None:
    graph, plan = planned(full_length("flashforward_no_anchors"))
    banks, ledger = banks_for(graph, plan)
    homes: Homes = {}
    for chunk in range(4):
        keys = run_task(graph, banks, ledger, task_id=f"renderer/denoise/c{chunk}/s0", homes=homes, value=float(chunk))
    buffer = banks._buffers["stage0"]
    assert keys[1].data_ptr() == buffer[0, 1].data_ptr()
    assert keys[1][0, :: 3 * SHAPE.frame_tokens, 0, 0].tolist() == [0, 1, 2, 3]


def test_pages_that_are_no_neighbours_are_gathered() -> None:
    """The last chunk of 20 latent frames has 2 and sits in page 0: a gap of one latent frame follows."""
    spec = replace(full_length("flashforward_no_anchors"), shape=VideoShape(width=32, height=32, latent_frames=20))
    graph, plan = planned(spec)
    banks, ledger = banks_for(graph, plan, poison=True)
    homes: Homes = {}
    for chunk in range(7):
        keys = run_task(graph, banks, ledger, task_id=f"renderer/denoise/c{chunk}/s0", homes=homes, value=float(chunk))
    assert plan.views["renderer/denoise/c6/s0"].ranges == ((0, 2), (3, 18))
    expected = [
        float(chunk) for chunk, frames in ((6, 2), (1, 3), (2, 3), (3, 3), (4, 3), (5, 3)) for _ in range(frames)
    ]
    assert keys[0][0, :: SHAPE.frame_tokens, 0, 0].tolist() == expected


def test_a_page_that_is_still_needed_is_refused_by_both_names() -> None:
    """The mutation: a ring of H pages instead of H+1."""
    graph, plan = planned(full_length("flashforward_no_anchors"))
    banks, ledger = banks_for(graph, _with_page_of(plan, bank="stage0", chunk=5, start=0))
    homes: Homes = {}
    for chunk in range(5):
        run_task(graph, banks, ledger, task_id=f"renderer/denoise/c{chunk}/s0", homes=homes)
    with pytest.raises(AssertionError, match=r"kv/5/0/stage0 takes the page of kv/0/0/stage0, which .*c5/s0"):
        run_task(graph, banks, ledger, task_id="renderer/denoise/c5/s0", homes=homes)


def _with_page_of(plan: PagePlan, *, bank: str, chunk: int, start: int) -> PagePlan:
    """Move a chunk's page; the forward itself must not read what was there, so that only the check can object."""
    task_id = f"renderer/denoise/c{chunk}/s0"
    view = plan.views[task_id]
    page = Page(bank=bank, start=start, frames=view.own.frames)
    moved = replace(
        view,
        own=page,
        publishes=tuple((slot, page) for slot, _ in view.publishes),
        reads=tuple((slot, old) for slot, old in view.reads if old.start != start),
    )
    return replace(plan, views={**plan.views, task_id: moved})


def test_a_freed_page_is_poisoned_and_a_needed_one_is_not() -> None:
    graph, plan = planned(full_length("flashforward_no_anchors"))
    banks, ledger = banks_for(graph, plan, poison=True)
    homes: Homes = {}
    for chunk in range(7):  # chunk 6 takes page 0; chunk 1 is done for once chunk 6 has run
        run_task(graph, banks, ledger, task_id=f"renderer/denoise/c{chunk}/s0", homes=homes)
    banks._sweep()
    buffer = banks._buffers["stage0"][0, 0, 0, :, 0, 0].view(6, -1)
    assert buffer.isnan().all(dim=1).tolist() == [False, True, False, False, False, False]


def test_releasing_pages_early_turns_the_run_red(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the ledger forgets a chunk's last reader, so its page is given back while it is needed."""
    spec = rig.spec("flashforward_no_anchors")
    graph = build_graph(spec, decode=False)
    forgotten = graph.by_id()["renderer/denoise/c2/s0"]  # the last reader of chunk 0 in stage 0

    class Forgetful(Ledger):
        def unfinished(self, slot: Slot) -> tuple[str, ...]:
            return tuple(task for task in super().unfinished(slot) if task != forgotten.id)

    monkeypatch.setattr("flashforward_core.engine.run.Ledger", Forgetful)
    inputs = RunInputs(spec=spec_for(spec), texts=rig.texts())
    with pytest.raises(TaskFailed) as failure:
        run_sequential(graph, inputs=inputs, backbone=rig.backbone(), poison=True)
    assert isinstance(failure.value.__cause__, NotFinite | AssertionError)


def test_anchors_are_fetched_into_the_front_once_per_move_of_gamma() -> None:
    """Γ moves by one anchor at a time, so that one page of three is copied."""
    _graph, plan = planned(full_length())
    seen: list[dict[int, int]] = []
    for chunk in range(27):
        reads = plan.views[f"renderer/denoise/c{chunk}/s0"].reads
        seen.append({page.start: slot.index for slot, page in reads if slot.space is Space.ANCHOR_KV})
    assert all(set(pages) == {0, 1, 2} for pages in seen)
    moved = [sum(a[n] != b[n] for n in range(3)) for a, b in itertools.pairwise(seen)]
    assert set(moved) == {0, 1}
    assert sum(moved) == 6  # from anchors {0, 1, 2} to {6, 7, 8}


def test_a_bank_is_dropped_after_its_last_task() -> None:
    graph, plan = planned(full_length("flashforward_no_anchors"))
    banks, ledger = banks_for(graph, plan)
    homes: Homes = {}
    for stage in range(2):
        for chunk in range(27):
            run_task(graph, banks, ledger, task_id=f"renderer/denoise/c{chunk}/s{stage}", homes=homes)
    assert list(banks._buffers) == ["stage1"]
    assert banks.peak_bytes == SHAPE.bank_bytes(18)


def test_banks_can_be_written_outside_and_inside_inference_mode() -> None:
    graph, plan = planned(full_length("flashforward_no_anchors"))
    banks, ledger = banks_for(graph, plan)
    homes: Homes = {}
    with torch.inference_mode():
        run_task(graph, banks, ledger, task_id="renderer/denoise/c0/s0", homes=homes)
    run_task(graph, banks, ledger, task_id="renderer/denoise/c1/s0", homes=homes)


def test_a_page_is_grouped_once_and_again_only_when_it_holds_something_else() -> None:
    """Every forward asks for all its pages' groups; what it publishes keeps those of its own page."""
    graph, plan = planned(full_length(schedule="self_forcing", anchors=None))
    banks, ledger = banks_for(graph, plan)
    homes: Homes = {}
    made: list[int] = []
    for task in graph.tasks[:60]:
        view = banks.open(task, homes)
        tokens = plan.views[task.id].own.frames * SHAPE.frame_tokens
        keys = [view.extend(block, torch.ones(1, tokens, 2, 6), torch.ones(1, tokens, 2, 6))[0] for block in (0, 1)]
        made.append(0)

        def group(k_BNHD: Tensor) -> Any:
            made[-1] += 1
            return group_page(k_BNHD, options=SparseOptions())

        pages = view.groups(1, keys[1], group)
        assert sum(page.num_keys for page in pages) == keys[1].shape[1]
        banks.close(task)
        homes.update(dict.fromkeys(kv_slots(task.writes), banks))
        ledger.finish(task)
    assert made == [1] * 60, "all but the own page were grouped by the forward that published them"
