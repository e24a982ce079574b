"""Several rollouts on the same lanes: each as if alone, one failure is one failure, and no gap stays empty."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.batch import Job, render_many
from flashforward_core.engine.cost import rounds
from flashforward_core.engine.dispatch import Dispatcher, in_flight_for, simulate_queue
from flashforward_core.engine.events import ChunkReady, Event, TaskFinished
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.memory import MemoryOptions
from flashforward_core.engine.rollout import RenderResult, render
from flashforward_core.engine.run import Run
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import Kind
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, RolloutSpec, VideoShape

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def jobs(rig: Any) -> list[Job]:
    """Rollouts that differ in prompt, seed, length and schedule."""
    texts = rig.texts(count=2)
    specs = [
        rig.spec(),
        rig.spec("self_forcing", seed=8),
        rig.spec(latent_frames=5, seed=9),
        rig.spec("hiar", latent_frames=9),
        rig.spec(seed=11),
    ]
    return [Job(spec=spec, texts=texts[number % 2 :]) for number, spec in enumerate(specs)]


def outcomes(backbone: Backbone, several: list[Job], **options: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    render_many(backbone, several, on_done=found.setdefault, **options)
    return found


@pytest.mark.parametrize("lanes", [1, 3])
def test_each_gives_the_bytes_that_it_gives_alone(rig: Any, backbone: Backbone, lanes: int) -> None:
    several = jobs(rig)
    found = outcomes(backbone, several, devices=DevicePlan(devices=(f"cpu*{lanes}",)))
    assert sorted(found) == list(range(len(several)))
    for number, job in enumerate(several):
        alone = render(backbone, job.spec, job.texts)
        assert torch.equal(found[number].latents_BCFHW, alone.latents_BCFHW)
        assert found[number].sha256 == alone.sha256


def test_events_are_those_of_each_rollout_counted_alone(rig: Any, backbone: Backbone) -> None:
    several, heard = jobs(rig), []
    render_many(
        backbone, several, devices=DevicePlan(devices=("cpu*2",)), on_event=lambda n, event: heard.append((n, event))
    )
    for number, job in enumerate(several):
        mine = [event for n, event in heard if n == number and isinstance(event, TaskFinished)]
        assert [event.done for event in mine] == list(range(1, len(build_graph(job.spec, decode=False)) + 1))
        assert {event.total for event in mine} == {len(mine)}


@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_more_rollouts_are_under_way_than_asked_for(
    rig: Any, backbone: Backbone, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_now, most = Counter[str](), 0
    free, begin = Run.free, Run.__init__

    def counted_begin(run: Run, *args: Any, **options: Any) -> None:
        nonlocal most
        open_now["runs"] += 1
        most = max(most, open_now["runs"])
        begin(run, *args, **options)

    def counted_free(run: Run) -> None:
        open_now["runs"] -= 1
        free(run)

    monkeypatch.setattr(Run, "__init__", counted_begin)
    monkeypatch.setattr(Run, "free", counted_free)
    outcomes(backbone, jobs(rig), devices=DevicePlan(devices=("cpu*2",)), in_flight=in_flight)
    assert (most, open_now["runs"]) == (in_flight, 0)


def test_jobs_are_taken_when_there_is_room(rig: Any, backbone: Backbone) -> None:
    taken, ended = [], []

    def come() -> Iterator[Job]:
        for number, job in enumerate(jobs(rig)):
            assert number - len(ended) < in_flight_for(1)
            taken.append(number)
            yield job

    render_many(backbone, come(), on_done=lambda number, _: ended.append(number))
    assert taken == [0, 1, 2, 3, 4]


def test_one_that_fails_is_told_and_the_others_go_on(rig: Any, backbone: Backbone) -> None:
    several = jobs(rig)
    misfit = Job(spec=rig.spec(), texts=[torch.zeros(1, 1, 1)])
    broken = Job(spec=rig.spec(), texts=[torch.full_like(several[0].texts[0], torch.nan)])
    found = outcomes(backbone, [misfit, several[0], broken, several[1]], devices=DevicePlan(devices=("cpu*2",)))
    assert "texts[0] has shape (1, 1, 1)" in str(found[0])
    assert "planner/denoise/b0/s0: anchor block 0 is not finite after stage 0" in str(found[2])
    assert [found[n].sha256 for n in (1, 3)] == [render(backbone, j.spec, j.texts).sha256 for j in several[:2]]


def test_an_error_of_a_listener_ends_that_rollout_only(rig: Any, backbone: Backbone) -> None:
    found: dict[int, Any] = {}
    told: list[int] = []

    def listen(number: int, event: Event) -> None:
        told.append(number)
        if number == 1 and isinstance(event, ChunkReady):
            raise OSError("disk full")

    render_many(backbone, jobs(rig), devices=DevicePlan(devices=("cpu*3",)), on_event=listen, on_done=found.setdefault)
    assert isinstance(found.pop(1), OSError)
    assert len(found) == 4 and all(isinstance(outcome, RenderResult) for outcome in found.values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["check_cancel", "on_done", "jobs"])
def test_whatever_else_is_raised_stops_all(
    rig: Any, backbone: Backbone, error: type[BaseException], where: str
) -> None:
    def stop(*_: Any) -> None:
        raise error("stop")

    def come() -> Iterator[Job]:
        yield from jobs(rig)[:3]
        if where == "jobs":
            stop()

    callbacks = {} if where == "jobs" else {where: stop}
    with pytest.raises(error, match="stop"):
        render_many(backbone, come(), devices=DevicePlan(devices=("cpu*3",)), **callbacks)
    assert not any(thread.name.startswith("flashforward") for thread in threading.enumerate())


def test_spans_carry_their_rollout_and_one_clock(rig: Any, backbone: Backbone) -> None:
    several = jobs(rig)
    timeline = render_many(backbone, several, devices=DevicePlan(devices=("cpu*2",)))
    expected = {
        f"{number}/{task.id}" for number, job in enumerate(several) for task in build_graph(job.spec, decode=False)
    }
    assert {span.task for span in timeline.spans} == expected
    for lane in range(2):
        spans = [span for span in timeline.spans if span.lane == lane]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (DevicePlan(layout="prelude"), "layout='prelude'"),
        (DevicePlan(memory=MemoryOptions(budget_gib=8)), "budget_gib=8"),
        (DevicePlan(order="memory"), "order='memory'"),
        (DevicePlan(decode="own"), "decode='own'"),
    ],
)
def test_what_does_not_go_with_several_is_refused(backbone: Backbone, devices: DevicePlan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render_many(backbone, [], devices=devices)


def long_spec() -> RolloutSpec:
    return RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=81), anchors=AnchorPlan())


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 6])
def test_ten_prompts_keep_lanes_busy_for_95_percent_of_the_time(lanes: int, decode: bool) -> None:
    """27 chunks of 4 stages; decoding a chunk takes as long as half a forward."""
    graph = build_graph(long_spec(), decode=decode)
    forecast = simulate_queue(
        [graph] * 10, num_lanes=lanes, cost=lambda task: 0.5 if task.kind is Kind.DECODE else rounds(task)
    )
    assert forecast.utilisation >= 0.95
    decoding = 27 * 0.5 if decode else 0
    assert sum(forecast.busy) == 10 * (graph.counts()["total"] + decoding)  # nothing is lost or done twice


def test_the_last_rollouts_end_together() -> None:
    """Else the last one runs alone, on the four of eight lanes that hold its stages."""
    graph = build_graph(long_spec(), decode=False)
    forecast = simulate_queue([graph] * 8, num_lanes=8, in_flight=8)
    assert max(forecast.ends) - sorted(forecast.ends)[-3] <= 10  # of some 130 rounds


def test_what_waited_when_the_end_was_told_still_runs_once(rig: Any) -> None:
    """By hand: two rollouts under way, one of them dropped; ``no_more`` forgets neither a task nor the drop."""
    graph = build_graph(rig.spec(), decode=False)
    dispatcher = Dispatcher(num_lanes=2)
    for number in range(3):
        dispatcher.admit(number, graph)
    dispatcher.drop(1)
    dispatcher.no_more()
    ran: list[tuple[int, str]] = []
    while taken := (dispatcher.take(0) or dispatcher.take(1)):
        ran.append((taken[0], taken[1].id))
        dispatcher.finish(*taken)
    assert sorted(ran) == sorted((number, task.id) for number in (0, 2) for task in graph.tasks)


def test_alone_they_would_not(rig: Any) -> None:
    graph = build_graph(long_spec(), decode=False)
    alone = simulate_queue([graph] * 10, num_lanes=4, in_flight=1)
    assert alone.utilisation < 0.9
    assert list(alone.ends) == sorted(alone.ends)


def test_rollouts_that_do_not_use_the_same_schedule_play_too(rig: Any) -> None:
    graphs = [build_graph(job.spec) for job in jobs(rig)]
    assert simulate_queue(graphs, num_lanes=3).length >= max(
        simulate_queue([graph], num_lanes=3).length for graph in graphs
    )
    assert simulate_queue([], num_lanes=2).utilisation == 1.0
    assert replace(simulate_queue(graphs, num_lanes=1), ends=()).utilisation == 1.0
