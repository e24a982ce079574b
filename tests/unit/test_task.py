"""Claims about tasks, slots and the graph's own checks."""

import pytest

from flashforward_core.graph.task import (
    ForwardTask,
    Kind,
    Role,
    Slot,
    Space,
    TaskGraph,
    slot_from_str,
    sort_topologically,
)

pytestmark = pytest.mark.cpu


def latent(index: int, level: int) -> Slot:
    return Slot(space=Space.LATENT, index=index, level=level)


def denoise(index: int, stage: int, *, reads: tuple[Slot, ...] = (), writes: tuple[Slot, ...] = ()) -> ForwardTask:
    return ForwardTask(
        kind=Kind.DENOISE,
        role=Role.RENDERER,
        index=index,
        stage=stage,
        reads=(latent(index, stage), *reads),
        writes=(latent(index, stage + 1), *writes),
    )


CHAIN = (denoise(0, 0), denoise(0, 1), denoise(0, 2))
NOISE = frozenset({latent(0, 0)})


@pytest.mark.parametrize(
    ("kind", "role", "index", "stage", "task_id"),
    [
        (Kind.DENOISE, Role.PLANNER, 1, 0, "planner/denoise/b1/s0"),
        (Kind.COMMIT, Role.PLANNER, 1, 4, "planner/commit/b1"),
        (Kind.DENOISE, Role.RENDERER, 7, 2, "renderer/denoise/c7/s2"),
        (Kind.COMMIT, Role.RENDERER, 7, 3, "renderer/commit/c7/l3"),
        (Kind.COMPACT, None, 7, 2, "compact/c7/s2"),
        (Kind.DECODE, None, 7, 0, "decode/c7"),
    ],
)
def test_ids_are_the_contract_s(kind: Kind, role: Role | None, index: int, stage: int, task_id: str) -> None:
    assert ForwardTask(kind=kind, role=role, index=index, stage=stage, reads=(), writes=()).id == task_id


@pytest.mark.parametrize(
    ("slot", "text"),
    [
        (Slot(space=Space.KV, index=7, level=2, bank="stage2"), "kv/7/2/stage2"),
        (Slot(space=Space.ANCHOR_KV, index=3, level=4, bank="anchor"), "anchor_kv/3/4/anchor"),
        (Slot(space=Space.LATENT, index=0, level=4), "latent/0/4"),
    ],
)
def test_slots_are_written_as_text_and_read_back(slot: Slot, text: str) -> None:
    assert str(slot) == text
    assert slot_from_str(text) == slot


def test_a_slot_has_one_writer() -> None:
    with pytest.raises(ValueError, match=r"latent/0/1 is written twice"):
        TaskGraph((denoise(0, 0), denoise(0, 0)), NOISE)


def test_an_input_has_no_writer() -> None:
    with pytest.raises(ValueError, match=r"latent/0/1 is written twice"):
        TaskGraph((denoise(0, 0),), NOISE | {latent(0, 1)})


def test_an_unwritten_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"c0/s0 reads latent/0/0 before it exists: nothing writes it"):
        TaskGraph((denoise(0, 0),))


def test_a_cycle_is_refused() -> None:
    ring = (denoise(0, 0, reads=(latent(1, 1),)), denoise(1, 0, reads=(latent(0, 1),)))
    noise = NOISE | {latent(1, 0)}
    with pytest.raises(ValueError, match="cycle"):
        TaskGraph(ring, noise)
    with pytest.raises(ValueError, match="cycle"):
        sort_topologically(ring, noise)


def test_tasks_out_of_order_are_refused_and_can_be_sorted() -> None:
    with pytest.raises(ValueError, match="out of order"):
        TaskGraph(CHAIN[::-1], NOISE)
    assert sort_topologically(CHAIN[::-1], NOISE).tasks == CHAIN


def test_parents_are_the_writers_of_what_is_read() -> None:
    graph = TaskGraph(CHAIN, NOISE)
    assert graph.parents(CHAIN[0]) == ()
    assert graph.parents(CHAIN[2]) == (CHAIN[1],)


def test_counts_tell_roles_and_kinds_apart() -> None:
    commit = ForwardTask(
        kind=Kind.COMMIT,
        role=Role.PLANNER,
        index=0,
        stage=3,
        reads=(latent(0, 3),),
        writes=(Slot(space=Space.ANCHOR_KV, index=0, level=3, bank="anchor"),),
    )
    decode = ForwardTask(kind=Kind.DECODE, role=None, index=0, stage=0, reads=(latent(0, 3),), writes=())
    assert TaskGraph((*CHAIN, commit, decode), NOISE).counts() == {
        "planner_denoise": 0,
        "planner_commit": 1,
        "renderer_denoise": 3,
        "renderer_commit": 0,
        "total": 4,
    }
