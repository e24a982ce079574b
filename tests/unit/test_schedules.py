"""Each schedule against an edge table typed by hand: an executor test cannot catch a wrong schedule.

The small case: 12 latents in 4 chunks, 2 stages, a history of 2 chunks; anchors at 0, 2, 4, 6, 8, 10 in three blocks
of two, two read at a time, a planner that reads one block back. The middles of the chunks are 1, 4, 7 and 10, those
of the anchor windows 1, 3, 5, 7 and 9, so Γ is (0, 1), (2, 3) by a tie, (3, 4) across two blocks, and (4, 5).
"""

import re
from typing import Any

import pytest

from flashforward_core.graph.schedules import SCHEDULES, build_graph, history_chunks, planner_graph, spec_for
from flashforward_core.graph.task import TaskGraph
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

PLANNER = {
    "planner/denoise/b0/s0": "anchor_latent/0/0 -> anchor_latent/0/1",
    "planner/denoise/b0/s1": "anchor_latent/0/1 -> anchor_latent/0/2",
    "planner/commit/b0": "anchor_latent/0/2 -> anchor_kv/0/2/anchor anchor_kv/1/2/anchor",
    "planner/denoise/b1/s0": "anchor_latent/1/0 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> anchor_latent/1/1",
    "planner/denoise/b1/s1": "anchor_latent/1/1 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> anchor_latent/1/2",
    "planner/commit/b1": "anchor_latent/1/2 anchor_kv/0/2/anchor anchor_kv/1/2/anchor "
    "-> anchor_kv/2/2/anchor anchor_kv/3/2/anchor",
    "planner/denoise/b2/s0": "anchor_latent/2/0 anchor_kv/2/2/anchor anchor_kv/3/2/anchor -> anchor_latent/2/1",
    "planner/denoise/b2/s1": "anchor_latent/2/1 anchor_kv/2/2/anchor anchor_kv/3/2/anchor -> anchor_latent/2/2",
}
LAST_COMMIT = {
    "planner/commit/b2": "anchor_latent/2/2 anchor_kv/2/2/anchor anchor_kv/3/2/anchor "
    "-> anchor_kv/4/2/anchor anchor_kv/5/2/anchor",
}
TABLES = {
    "flashforward": {
        **PLANNER,
        **LAST_COMMIT,
        "renderer/denoise/c0/s0": "latent/0/0 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/1 kv/0/0/stage0",
        "renderer/denoise/c0/s1": "latent/0/1 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/2 kv/0/1/stage1",
        "renderer/denoise/c1/s0": "latent/1/0 anchor_kv/2/2/anchor anchor_kv/3/2/anchor kv/0/0/stage0 "
        "-> latent/1/1 kv/1/0/stage0",
        "renderer/denoise/c1/s1": "latent/1/1 anchor_kv/2/2/anchor anchor_kv/3/2/anchor kv/0/1/stage1 "
        "-> latent/1/2 kv/1/1/stage1",
        "renderer/denoise/c2/s0": "latent/2/0 anchor_kv/3/2/anchor anchor_kv/4/2/anchor kv/0/0/stage0 kv/1/0/stage0 "
        "-> latent/2/1 kv/2/0/stage0",
        "renderer/denoise/c2/s1": "latent/2/1 anchor_kv/3/2/anchor anchor_kv/4/2/anchor kv/0/1/stage1 kv/1/1/stage1 "
        "-> latent/2/2 kv/2/1/stage1",
        "renderer/denoise/c3/s0": "latent/3/0 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/1/0/stage0 kv/2/0/stage0 "
        "-> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/1/1/stage1 kv/2/1/stage1 "
        "-> latent/3/2",
    },
    "flashforward_no_anchors": {
        "renderer/denoise/c0/s0": "latent/0/0 -> latent/0/1 kv/0/0/stage0",
        "renderer/denoise/c0/s1": "latent/0/1 -> latent/0/2 kv/0/1/stage1",
        "renderer/denoise/c1/s0": "latent/1/0 kv/0/0/stage0 -> latent/1/1 kv/1/0/stage0",
        "renderer/denoise/c1/s1": "latent/1/1 kv/0/1/stage1 -> latent/1/2 kv/1/1/stage1",
        "renderer/denoise/c2/s0": "latent/2/0 kv/0/0/stage0 kv/1/0/stage0 -> latent/2/1 kv/2/0/stage0",
        "renderer/denoise/c2/s1": "latent/2/1 kv/0/1/stage1 kv/1/1/stage1 -> latent/2/2 kv/2/1/stage1",
        "renderer/denoise/c3/s0": "latent/3/0 kv/1/0/stage0 kv/2/0/stage0 -> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 kv/1/1/stage1 kv/2/1/stage1 -> latent/3/2",
    },
    "last_stage": {
        "renderer/denoise/c0/s0": "latent/0/0 -> latent/0/1",
        "renderer/denoise/c0/s1": "latent/0/1 -> latent/0/2 kv/0/1/stage1",
        "renderer/denoise/c1/s0": "latent/1/0 kv/0/1/stage1 -> latent/1/1",
        "renderer/denoise/c1/s1": "latent/1/1 kv/0/1/stage1 -> latent/1/2 kv/1/1/stage1",
        "renderer/denoise/c2/s0": "latent/2/0 kv/0/1/stage1 kv/1/1/stage1 -> latent/2/1",
        "renderer/denoise/c2/s1": "latent/2/1 kv/0/1/stage1 kv/1/1/stage1 -> latent/2/2 kv/2/1/stage1",
        "renderer/denoise/c3/s0": "latent/3/0 kv/1/1/stage1 kv/2/1/stage1 -> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 kv/1/1/stage1 kv/2/1/stage1 -> latent/3/2",
    },
    "self_forcing": {
        "renderer/denoise/c0/s0": "latent/0/0 -> latent/0/1",
        "renderer/denoise/c0/s1": "latent/0/1 -> latent/0/2",
        "renderer/commit/c0/l2": "latent/0/2 -> kv/0/2/clean",
        "renderer/denoise/c1/s0": "latent/1/0 kv/0/2/clean -> latent/1/1",
        "renderer/denoise/c1/s1": "latent/1/1 kv/0/2/clean -> latent/1/2",
        "renderer/commit/c1/l2": "latent/1/2 kv/0/2/clean -> kv/1/2/clean",
        "renderer/denoise/c2/s0": "latent/2/0 kv/0/2/clean kv/1/2/clean -> latent/2/1",
        "renderer/denoise/c2/s1": "latent/2/1 kv/0/2/clean kv/1/2/clean -> latent/2/2",
        "renderer/commit/c2/l2": "latent/2/2 kv/0/2/clean kv/1/2/clean -> kv/2/2/clean",
        "renderer/denoise/c3/s0": "latent/3/0 kv/1/2/clean kv/2/2/clean -> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 kv/1/2/clean kv/2/2/clean -> latent/3/2",
    },
    "hiar": {
        "renderer/denoise/c0/s0": "latent/0/0 -> latent/0/1",
        "renderer/commit/c0/l1": "latent/0/1 -> kv/0/1/stage0",
        "renderer/denoise/c0/s1": "latent/0/1 -> latent/0/2",
        "renderer/commit/c0/l2": "latent/0/2 -> kv/0/2/stage1",
        "renderer/denoise/c1/s0": "latent/1/0 kv/0/1/stage0 -> latent/1/1",
        "renderer/commit/c1/l1": "latent/1/1 kv/0/1/stage0 -> kv/1/1/stage0",
        "renderer/denoise/c1/s1": "latent/1/1 kv/0/2/stage1 -> latent/1/2",
        "renderer/commit/c1/l2": "latent/1/2 kv/0/2/stage1 -> kv/1/2/stage1",
        "renderer/denoise/c2/s0": "latent/2/0 kv/0/1/stage0 kv/1/1/stage0 -> latent/2/1",
        "renderer/commit/c2/l1": "latent/2/1 kv/0/1/stage0 kv/1/1/stage0 -> kv/2/1/stage0",
        "renderer/denoise/c2/s1": "latent/2/1 kv/0/2/stage1 kv/1/2/stage1 -> latent/2/2",
        "renderer/commit/c2/l2": "latent/2/2 kv/0/2/stage1 kv/1/2/stage1 -> kv/2/2/stage1",
        "renderer/denoise/c3/s0": "latent/3/0 kv/1/1/stage0 kv/2/1/stage0 -> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 kv/1/2/stage1 kv/2/2/stage1 -> latent/3/2",
    },
    "clean_history_anchors": {
        **PLANNER,
        **LAST_COMMIT,
        "renderer/denoise/c0/s0": "latent/0/0 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/1",
        "renderer/denoise/c0/s1": "latent/0/1 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/2",
        "renderer/commit/c0/l2": "latent/0/2 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> kv/0/2/clean",
        "renderer/denoise/c1/s0": "latent/1/0 anchor_kv/2/2/anchor anchor_kv/3/2/anchor kv/0/2/clean -> latent/1/1",
        "renderer/denoise/c1/s1": "latent/1/1 anchor_kv/2/2/anchor anchor_kv/3/2/anchor kv/0/2/clean -> latent/1/2",
        "renderer/commit/c1/l2": "latent/1/2 anchor_kv/2/2/anchor anchor_kv/3/2/anchor kv/0/2/clean -> kv/1/2/clean",
        "renderer/denoise/c2/s0": "latent/2/0 anchor_kv/3/2/anchor anchor_kv/4/2/anchor kv/0/2/clean kv/1/2/clean "
        "-> latent/2/1",
        "renderer/denoise/c2/s1": "latent/2/1 anchor_kv/3/2/anchor anchor_kv/4/2/anchor kv/0/2/clean kv/1/2/clean "
        "-> latent/2/2",
        "renderer/commit/c2/l2": "latent/2/2 anchor_kv/3/2/anchor anchor_kv/4/2/anchor kv/0/2/clean kv/1/2/clean "
        "-> kv/2/2/clean",
        "renderer/denoise/c3/s0": "latent/3/0 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/1/2/clean kv/2/2/clean "
        "-> latent/3/1",
        "renderer/denoise/c3/s1": "latent/3/1 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/1/2/clean kv/2/2/clean "
        "-> latent/3/2",
    },
}
DECODES = {
    "decode/c0": "latent/0/2 -> frames/0/0 vae_state/0/0",
    "decode/c1": "latent/1/2 vae_state/0/0 -> frames/1/0 vae_state/1/0",
    "decode/c2": "latent/2/2 vae_state/1/0 -> frames/2/0 vae_state/2/0",
    "decode/c3": "latent/3/2 vae_state/2/0 -> frames/3/0 vae_state/3/0",
}
GIVEN = {
    "planner/commit/b0": "anchor_latent/0/2 -> anchor_kv/0/2/anchor anchor_kv/1/2/anchor",
    "planner/commit/b1": "anchor_latent/1/2 anchor_kv/0/2/anchor anchor_kv/1/2/anchor "
    "-> anchor_kv/2/2/anchor anchor_kv/3/2/anchor",
    "planner/commit/b2": "anchor_latent/2/2 anchor_kv/2/2/anchor anchor_kv/3/2/anchor "
    "-> anchor_kv/4/2/anchor anchor_kv/5/2/anchor",
}

Edges = dict[str, tuple[set[str], set[str]]]


def small(schedule: str, **changes: Any) -> RolloutSpec:
    fields: dict[str, Any] = {
        "shape": VideoShape(width=64, height=64, latent_frames=12),
        "schedule": schedule,
        "stages": StageSchedule(starts=(1.0, 0.5)),
        "anchors": AnchorPlan(stride=2, block_frames=2, context=2),
        "history": History(chunks=2, planner_blocks=1),
    }
    return RolloutSpec(**{**fields, **changes})


def edges(graph: TaskGraph) -> Edges:
    return {task.id: ({str(s) for s in task.reads}, {str(s) for s in task.writes}) for task in graph.tasks}


def typed(table: dict[str, str]) -> Edges:
    halves = {task_id: text.split("->") for task_id, text in table.items()}
    return {task_id: (set(reads.split()), set(writes.split())) for task_id, (reads, writes) in halves.items()}


def test_every_schedule_has_a_table() -> None:
    assert set(TABLES) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", list(TABLES))
def test_the_schedule_is_the_table(schedule: str) -> None:
    assert edges(build_graph(small(schedule), decode=False)) == typed(TABLES[schedule])


@pytest.mark.parametrize("schedule", list(TABLES))
def test_decoding_adds_a_chain_and_changes_nothing_else(schedule: str) -> None:
    assert edges(build_graph(small(schedule))) == typed({**TABLES[schedule], **DECODES})


@pytest.mark.parametrize("schedule", list(TABLES))
def test_only_noise_is_given(schedule: str) -> None:
    noise = {f"latent/{chunk}/0" for chunk in range(4)}
    if SCHEDULES[schedule].uses_anchors:
        noise |= {f"anchor_latent/{block}/0" for block in range(3)}
    assert {str(slot) for slot in build_graph(small(schedule)).inputs} == noise


@pytest.mark.parametrize("schedule", ["flashforward", "clean_history_anchors"])
def test_given_anchors_are_committed_and_not_denoised(schedule: str) -> None:
    graph = build_graph(small(schedule), decode=False, given_anchors=True)
    renderer = {key: row for key, row in TABLES[schedule].items() if key.startswith("renderer")}
    assert edges(graph) == typed({**GIVEN, **renderer})
    assert {str(slot) for slot in graph.inputs if slot.space == "anchor_latent"} == {
        "anchor_latent/0/2",
        "anchor_latent/1/2",
        "anchor_latent/2/2",
    }


def test_the_planner_alone_makes_no_commit_that_nobody_reads() -> None:
    assert edges(planner_graph(small("flashforward"))) == typed(PLANNER)


@pytest.mark.parametrize(
    ("schedule", "planner_denoise", "planner_commit", "renderer_denoise", "renderer_commit"),
    [
        ("flashforward", 12, 3, 108, 0),
        ("self_forcing", 0, 0, 108, 26),
        ("hiar", 0, 0, 108, 104),
        ("last_stage", 0, 0, 108, 0),
        ("flashforward_no_anchors", 0, 0, 108, 0),
        ("clean_history_anchors", 12, 3, 108, 26),
    ],
)
def test_forwards_at_81_latents(
    schedule: str, planner_denoise: int, planner_commit: int, renderer_denoise: int, renderer_commit: int
) -> None:
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81), schedule=schedule)
    assert build_graph(spec).counts() == {
        "planner_denoise": planner_denoise,
        "planner_commit": planner_commit,
        "renderer_denoise": renderer_denoise,
        "renderer_commit": renderer_commit,
        "total": planner_denoise + planner_commit + renderer_denoise + renderer_commit,
    }


def test_an_anchor_block_comes_just_before_the_first_chunk_that_reads_it() -> None:
    ids = [task.id for task in build_graph(small("flashforward"), decode=False).tasks]
    order = [key for key in ids if key.startswith("planner/commit") or key.endswith("/s1")]
    assert [key.removeprefix("renderer/denoise/") for key in order if not key.startswith("planner/denoise")] == [
        "planner/commit/b0",
        "c0/s1",
        "planner/commit/b1",
        "c1/s1",
        "planner/commit/b2",
        "c2/s1",
        "c3/s1",
    ]


def long(**changes: Any) -> RolloutSpec:
    return small("flashforward", shape=VideoShape(width=64, height=64, latent_frames=30), **changes)


def test_history_is_the_last_chunks() -> None:
    spec = long(history=History(chunks=3))
    assert [history_chunks(spec, i) for i in (0, 1, 3, 4, 9)] == [(), (0,), (0, 1, 2), (1, 2, 3), (6, 7, 8)]


def test_a_sink_pins_the_start_and_counts_within_the_history() -> None:
    spec = long(history=History(chunks=3, sink=4))  # 4 latent frames are in the first two chunks
    assert [history_chunks(spec, i) for i in (3, 4, 9)] == [(0, 1, 2), (0, 1, 3), (0, 1, 8)]
    whole = long(history=History(chunks=2, sink=6))
    assert history_chunks(whole, 9) == (0, 1)


def test_a_hard_cut_forgets_history_and_moves_the_sink_to_the_new_scene() -> None:
    cut = (PromptSpan(), PromptSpan(start=13, prompt=1, hard_cut=True))  # chunk 4 begins at 12, chunk 5 at 15
    spec = long(history=History(chunks=3, sink=3), prompts=cut)
    found = {i: history_chunks(spec, i) for i in (3, 4, 5, 6, 8, 9)}
    assert found == {3: (0, 1, 2), 4: (0, 2, 3), 5: (), 6: (5,), 8: (5, 6, 7), 9: (5, 7, 8)}


def test_a_prompt_change_without_a_cut_keeps_history() -> None:
    spec = long(history=History(chunks=2), prompts=(PromptSpan(), PromptSpan(start=15, prompt=1)))
    assert history_chunks(spec, 5) == (3, 4)


CUT_AT_6 = {
    # anchors 0, 2, 4 are the first scene's, in blocks of two and one; 6, 8, 10 the second's
    "planner/denoise/b0/s0": "anchor_latent/0/0 -> anchor_latent/0/1",
    "planner/denoise/b0/s1": "anchor_latent/0/1 -> anchor_latent/0/2",
    "planner/commit/b0": "anchor_latent/0/2 -> anchor_kv/0/2/anchor anchor_kv/1/2/anchor",
    "planner/denoise/b1/s0": "anchor_latent/1/0 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> anchor_latent/1/1",
    "planner/denoise/b1/s1": "anchor_latent/1/1 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> anchor_latent/1/2",
    "planner/commit/b1": "anchor_latent/1/2 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> anchor_kv/2/2/anchor",
    "planner/denoise/b2/s0": "anchor_latent/2/0 -> anchor_latent/2/1",
    "planner/denoise/b2/s1": "anchor_latent/2/1 -> anchor_latent/2/2",
    "planner/commit/b2": "anchor_latent/2/2 -> anchor_kv/3/2/anchor anchor_kv/4/2/anchor",
    "planner/denoise/b3/s0": "anchor_latent/3/0 anchor_kv/3/2/anchor anchor_kv/4/2/anchor -> anchor_latent/3/1",
    "planner/denoise/b3/s1": "anchor_latent/3/1 anchor_kv/3/2/anchor anchor_kv/4/2/anchor -> anchor_latent/3/2",
    "planner/commit/b3": "anchor_latent/3/2 anchor_kv/3/2/anchor anchor_kv/4/2/anchor -> anchor_kv/5/2/anchor",
    "renderer/denoise/c0/s0": "latent/0/0 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/1 kv/0/0/stage0",
    "renderer/denoise/c0/s1": "latent/0/1 anchor_kv/0/2/anchor anchor_kv/1/2/anchor -> latent/0/2 kv/0/1/stage1",
    # without a cut chunk 1 reads the anchors 2 and 3; nobody reads its KV across the cut
    "renderer/denoise/c1/s0": "latent/1/0 anchor_kv/1/2/anchor anchor_kv/2/2/anchor kv/0/0/stage0 -> latent/1/1",
    "renderer/denoise/c1/s1": "latent/1/1 anchor_kv/1/2/anchor anchor_kv/2/2/anchor kv/0/1/stage1 -> latent/1/2",
    "renderer/denoise/c2/s0": "latent/2/0 anchor_kv/3/2/anchor anchor_kv/4/2/anchor -> latent/2/1 kv/2/0/stage0",
    "renderer/denoise/c2/s1": "latent/2/1 anchor_kv/3/2/anchor anchor_kv/4/2/anchor -> latent/2/2 kv/2/1/stage1",
    "renderer/denoise/c3/s0": "latent/3/0 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/2/0/stage0 -> latent/3/1",
    "renderer/denoise/c3/s1": "latent/3/1 anchor_kv/4/2/anchor anchor_kv/5/2/anchor kv/2/1/stage1 -> latent/3/2",
}


def cut_at(*frames: int) -> tuple[PromptSpan, ...]:
    return (PromptSpan(), *(PromptSpan(start=frame, prompt=1, hard_cut=True) for frame in frames))


def test_nothing_is_read_across_a_hard_cut() -> None:
    graph = build_graph(small("flashforward", prompts=cut_at(6)), decode=False)
    assert edges(graph) == typed(CUT_AT_6)


def test_a_scene_with_fewer_anchors_reads_those() -> None:
    """Of the anchors 0, 2, ... 10 only the last lies after the cut at 9; without it chunk 3 reads the last two."""
    reads = edges(build_graph(small("flashforward", prompts=cut_at(9)), decode=False))
    assert reads["renderer/denoise/c3/s0"][0] == {"latent/3/0", "anchor_kv/5/2/anchor"}
    assert reads["renderer/denoise/c2/s0"][0] >= {"anchor_kv/3/2/anchor", "anchor_kv/4/2/anchor"}


def test_a_scene_without_an_anchor_reads_those_of_the_scene_before() -> None:
    """Anchors are at 0, 2, 4, ...; the scenes are the latent frames 0 to 2, 3 alone, which has none, and the rest."""
    spec = small("flashforward", chunk_frames=1, prompts=cut_at(3, 4))
    assert spec.anchor_blocks() == ((0, 1), (2, 3), (4, 5))
    reads = edges(build_graph(spec, decode=False))
    anchors = {
        chunk: sorted(slot for slot in reads[f"renderer/denoise/c{chunk}/s0"][0] if slot.startswith("anchor_kv"))
        for chunk in (2, 3, 4)
    }
    first, second = ([f"anchor_kv/{n}/2/anchor" for n in pair] for pair in ((0, 1), (2, 3)))
    assert anchors == {2: first, 3: first, 4: second}


@pytest.mark.parametrize("schedule", ["flashforward", "clean_history_anchors"])
def test_a_prompt_change_without_a_cut_changes_no_edge(schedule: str) -> None:
    soft = small(schedule, prompts=(PromptSpan(), PromptSpan(start=6, prompt=1)))
    assert edges(build_graph(soft, decode=False)) == edges(build_graph(small(schedule), decode=False))
    assert edges(planner_graph(soft)) == typed(PLANNER)


@pytest.mark.parametrize("schedule", ["flashforward", "clean_history_anchors"])
def test_schedules_with_anchors_refuse_to_go_without(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"anchors=None, but schedule='{schedule}' reads anchors"):
        build_graph(small(schedule, anchors=None))


@pytest.mark.parametrize("schedule", ["self_forcing", "hiar", "last_stage", "flashforward_no_anchors"])
def test_schedules_without_anchors_have_no_planner(schedule: str) -> None:
    assert spec_for(small(schedule)).anchors is None
    assert build_graph(small(schedule)) == build_graph(small(schedule, anchors=None))
    with pytest.raises(ValueError, match=f"schedule='{schedule}' plans no anchors"):
        planner_graph(small(schedule))


def test_a_schedule_left_with_nothing_to_read_is_refused() -> None:
    nothing = small("hiar", history=History(chunks=0))
    with pytest.raises(ValueError, match=re.escape("history=0 reads nothing")):
        build_graph(nothing)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="schedule='fast' is unknown; use one of: flashforward, self_forcing"):
        build_graph(small("fast"))
