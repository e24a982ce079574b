"""Claims about the passes over a graph."""

import json
from itertools import pairwise

import pytest

from flashforward_core.engine.cost import rounds
from flashforward_core.graph.passes import (
    critical_path,
    from_json,
    last_readers,
    prune,
    readers,
    remaining_path,
    to_json,
)
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Kind, Role, Slot, Space, TaskGraph
from flashforward_core.specs import History, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu


def slot(space: Space, index: int, bank: str = "") -> Slot:
    return Slot(space=space, index=index, bank=bank)


def task(kind: Kind, index: int, *, reads: tuple[Slot, ...] = (), writes: tuple[Slot, ...] = ()) -> ForwardTask:
    return ForwardTask(kind=kind, role=Role.RENDERER, index=index, stage=0, reads=reads, writes=writes)


LATENTS = [slot(Space.LATENT, i) for i in range(4)]
KV = [slot(Space.KV, i, "clean") for i in range(4)]
FIRST = task(Kind.DENOISE, 0, writes=(LATENTS[0], KV[0]))
COMMIT = task(Kind.COMMIT, 1, reads=(KV[0],), writes=(KV[1],))
SECOND = task(Kind.DENOISE, 2, reads=(LATENTS[0],), writes=(LATENTS[2], KV[2]))


def rollout(schedule: str = "flashforward", chunks: int = 4) -> TaskGraph:
    shape = VideoShape(width=64, height=64, latent_frames=3 * chunks)
    stages = StageSchedule(starts=(1.0, 0.5))
    return build_graph(RolloutSpec(shape=shape, schedule=schedule, stages=stages, history=History(chunks=2)))


def test_prune_drops_kv_that_nobody_reads_and_the_commits_it_leaves_empty() -> None:
    pruned = prune(TaskGraph((FIRST, COMMIT, SECOND)))
    assert [t.id for t in pruned.tasks] == [FIRST.id, SECOND.id]  # COMMIT goes, and with it the reader of KV 0
    assert [t.writes for t in pruned.tasks] == [(LATENTS[0],), (LATENTS[2],)]


def test_prune_keeps_what_it_is_told_to_keep() -> None:
    graph = TaskGraph((FIRST, COMMIT, SECOND))
    assert prune(graph, keep=KV[1:3]).tasks == graph.tasks


def test_prune_drops_inputs_that_nobody_reads() -> None:
    graph = TaskGraph((FIRST, task(Kind.COMMIT, 3, reads=(LATENTS[3],), writes=(KV[3],))), frozenset({LATENTS[3]}))
    assert prune(graph).inputs == frozenset()


def test_readers_include_those_of_inputs_and_results_have_none() -> None:
    graph = TaskGraph((task(Kind.DENOISE, 0, reads=(LATENTS[0],), writes=(LATENTS[1],)),), frozenset({LATENTS[0]}))
    assert readers(graph) == {LATENTS[0]: graph.tasks, LATENTS[1]: ()}


def test_last_readers_release_each_slot_once_and_never_a_result() -> None:
    graph = rollout()
    released = [s for slots in last_readers(graph).values() for s in slots]
    results = {s for s, tasks in readers(graph).items() if not tasks}
    assert len(released) == len(set(released))
    assert set(released) == set(readers(graph)) - results
    assert {str(s) for s in results} == {*(f"frames/{i}/0" for i in range(4)), "vae_state/3/0"}


def test_a_page_of_history_is_last_read_when_it_leaves_the_window() -> None:
    last = {str(s): task_id for task_id, slots in last_readers(rollout()).items() for s in slots}
    assert last["kv/0/0/stage0"] == "renderer/denoise/c2/s0"  # a history of two chunks: 1 and 2 read chunk 0
    assert last["kv/1/1/stage1"] == "renderer/denoise/c3/s1"


def test_the_critical_path_of_self_forcing_is_every_forward() -> None:
    graph = rollout("self_forcing")
    path = critical_path(graph, cost=rounds)
    assert sum(map(rounds, path)) == graph.counts()["total"] == 4 * 2 + 3


def test_the_critical_path_is_a_chain() -> None:
    graph = rollout("hiar")
    path = critical_path(graph, cost=rounds)
    assert all(earlier in graph.parents(later) for earlier, later in pairwise(path))
    assert sum(map(rounds, path)) == max(remaining_path(graph, cost=rounds).values())


def test_remaining_path_counts_what_comes_after() -> None:
    remaining = remaining_path(rollout("flashforward_no_anchors"), cost=rounds)
    assert remaining["renderer/denoise/c3/s1"] == 1
    assert remaining["renderer/denoise/c0/s0"] == 4 + 2 - 1  # the wavefront: N + S - 1


@pytest.mark.parametrize("schedule", ["flashforward", "hiar", "self_forcing"])
def test_a_graph_survives_json(schedule: str) -> None:
    graph = rollout(schedule)
    assert from_json(json.loads(json.dumps(to_json(graph)))) == graph


def test_json_is_the_contract_s() -> None:
    assert to_json(rollout("self_forcing"))["tasks"][3] == {
        "id": "decode/c0",
        "kind": "decode",
        "role": None,
        "index": 0,
        "stage": 0,
        "reads": ["latent/0/2"],
        "writes": ["frames/0/0", "vae_state/0/0"],
    }
