"""Lanes on a Ray cluster: an actor each. The only module that knows Ray, which is imported when it is asked for.

Nothing here waits without end: every wait polls, and looks whether all lanes still answer. A lane whose process or
machine is gone, or that is silent for ``SILENCE_S``, raises ``LaneLost``.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .events import LaneInfo
from .lane_worker import LaneError, LaneWorker

log = logging.getLogger(__name__)

POLL_S = 0.04  # how often a wait looks around: a cancel is seen within 50 ms
PULSE_S = 2.0  # how often a lane is asked whether it is alive
SILENCE_S = 60.0  # a lane that has not answered for so long is lost
START_S = 180.0  # a lane's process must have started by then: imports from a slow disk take their time
DIAL_S = 5.0
STAY = ("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")  # else Ray ends this process a minute after its head died
HEAD_TRIES = 5  # a head that is restarted may miss a few
CORE = Path(__file__).resolve().parent.parent
CheckCancel = Callable[[], None]


class LaneLost(ConnectionError):
    """A lane's process or machine is gone, or does not answer."""


class HeadLost(LaneLost):
    """The machine that runs the cluster is gone, and with it all lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    gpus: int

    def __str__(self) -> str:
        return f"node {self.address} ({self.id[:8]})"


def connect(address: str) -> Any:
    """Return the ``ray`` module, connected to the cluster at ``address``: ``auto`` (this machine's) or HOST:PORT.

    The connection is the process's: a second cluster raises ``ValueError``, and so does an address where none is.
    """
    ray = _imported(f"ray_address={address!r}")
    check_address(address)
    if ray.is_initialized() and not answers(ray.get_runtime_context().gcs_address):
        ray.shutdown()
    known = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    if known and (address == "auto" or _same_place(address, known)):
        return ray
    if address != "auto" and not answers(address):
        raise ValueError(f"ray_address={address!r} does not answer; run `ray start --head` there, or use auto")
    if known:
        raise ValueError(f"ray_address={address!r}, but this process is connected to {known}; use that, or start anew")
    try:
        _init(ray, address)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(
            f"ray_address={address!r} cannot be used ({_first_line(error)}); run `ray start` on this machine, "
            "with the same Python and Ray as the cluster's"
        ) from error
    return ray


def _imported(asked: str) -> Any:
    os.environ.setdefault(*STAY)
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"{asked} needs Ray; install it: pip install 'ray>=2.49,<3'") from error
    return ray


def _init(ray: Any, address: str, **options: Any) -> None:
    """Connect; the lanes run this very version of the code."""
    own = {"py_modules": [str(CORE)]}  # a new dict every time: Ray writes one cluster's addresses into it
    with _own_handlers():
        ray.init(address=address, runtime_env=own, log_to_driver=False, logging_level=logging.ERROR, **options)


@contextlib.contextmanager
def local_cluster(*, gpus: int, store_bytes: int) -> Iterator[str]:
    """Start a cluster of this machine alone, yield its address, and end it. For measuring; ``ray`` must be installed.

    ``store_bytes`` of memory hold what lanes are sent. A process that is connected to a cluster already raises
    ``ValueError``.
    """
    ray = _imported("ray=local")
    if ray.is_initialized():
        raise ValueError("ray=local, but this process is connected to a cluster; use ray=auto")
    _init(ray, "local", num_gpus=gpus, object_store_memory=store_bytes, include_dashboard=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise ``ValueError`` for what is no address of a cluster, without connecting."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and "/" not in host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"ray_address={address!r} is no address; use auto (the cluster that this machine is part of) or HOST:PORT, "
            "such as 10.0.0.1:6379"
        )


def answers(address: str) -> bool:
    """Whether anything listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=DIAL_S).close()
        return True
    return False


def _same_place(address: str, known: str) -> bool:
    """Whether two HOST:PORT are one: a cluster calls itself by another name than its users may."""
    host, _, port = address.rpartition(":")
    known_host, _, known_port = known.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return port == known_port and (host == known_host or host.startswith("127."))


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep the process's signal handlers, which connecting would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def nodes_of(ray: Any) -> list[Node]:
    """Return the machines that are up, those with the most GPUs first."""
    found = [
        Node(id=node["NodeID"], address=node["NodeManagerAddress"], gpus=int(node["Resources"].get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (-node.gpus, node.address, node.id))


def cluster_devices(address: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the device of each lane, ``cpu`` or ``cuda``, for what was asked for on the cluster.

    ``auto`` is every GPU, or one CPU lane per machine. A GPU's index means nothing here: each entry takes any GPU of
    the cluster. GPUs that the cluster lacks are left out, with one warning.
    """
    nodes = nodes_of(connect(address))
    gpus = sum(node.gpus for node in nodes)
    found: list[str] = []
    for name in asked:
        found += (["cuda"] * gpus or ["cpu"] * len(nodes)) if name == "auto" else [name.partition(":")[0]]
    lost = found.count("cuda") - gpus
    if lost > 0:
        log.warning("devices: %d GPUs asked for, %d in the cluster", found.count("cuda"), gpus)
        found = [name for name in found if name != "cuda"] + ["cuda"] * gpus
    return tuple(found) or ("cpu",)


def assign_nodes(devices: Sequence[str], nodes: Sequence[Node]) -> list[Node]:
    """Return the machine of each lane: neighbours, which hand latents to each other, share machines.

    GPU lanes fill one machine after the other, CPU lanes are spread evenly.
    """
    seats = iter([node for node in nodes for _ in range(node.gpus)])
    cpus = devices.count("cpu")
    found, placed = [], 0
    for device in devices:
        if device == "cpu":
            found.append(nodes[placed * len(nodes) // cpus])
            placed += 1
        else:
            node = next(seats, None)
            if node is None:
                raise ValueError(f"devices={','.join(devices)} are more GPUs than the cluster has now; use fewer")
            found.append(node)
    return found


@dataclass(slots=True)
class _Head:
    """Watches the cluster's head, without which Ray would wait for ever.

    A dial is begun at one look and judged at a later one, so that nothing waits for it.
    """

    address: str
    failures: int = 0
    _socket: socket.socket | None = None
    _dialled_s: float = 0.0

    def look(self) -> None:
        """Raise ``HeadLost`` when the head has failed to answer ``HEAD_TRIES`` times in a row."""
        now = time.perf_counter()
        if self._socket is None:
            if now - self._dialled_s > PULSE_S:
                self._dial(now)
            return
        _, answered, _ = select.select([], [self._socket], [], 0)
        if not answered and now - self._dialled_s < DIAL_S:
            return
        good = bool(answered) and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        self.close()
        self.failures = 0 if good else self.failures + 1
        if self.failures >= HEAD_TRIES:
            raise HeadLost(f"the head of the Ray cluster at {self.address} does not answer")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _dial(self, now: float) -> None:
        host, _, port = self.address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket, self._dialled_s = socket.socket(family, socket.SOCK_STREAM), now
        self._socket.setblocking(False)
        self._socket.connect_ex((host.strip("[]"), int(port)))


@dataclass(slots=True)
class _Pulse:
    """What is known of a lane's life."""

    ping: Any = None
    sent_s: float = 0.0
    heard: bool = False


@dataclass(slots=True)
class Fleet:
    """The actors of some lanes, one each, and the waits for them."""

    ray: Any
    lanes: tuple[LaneInfo, ...]
    nodes: tuple[Node, ...]
    actors: list[Any]
    head: _Head
    silence_s: float = SILENCE_S
    closed: bool = False
    _pulses: list[_Pulse] = field(default_factory=list)

    @classmethod
    def start(
        cls, address: str, lanes: Sequence[LaneInfo], *, num_threads: int, silence_s: float = SILENCE_S
    ) -> "Fleet":
        """Ask the cluster for an actor per lane; whether they are there shows when they are first waited for."""
        ray = connect(address)
        nodes = assign_nodes([lane.device for lane in lanes], nodes_of(ray))
        remote = ray.remote(concurrency_groups={"control": 1})(LaneWorker)
        actors = [
            remote.options(
                num_cpus=0,
                num_gpus=int(lane.device != "cpu"),
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(lane.name, lane.device, num_threads)
            for lane, node in zip(lanes, nodes, strict=True)
        ]
        pulses = [_Pulse() for _ in actors]
        head = _Head(ray.get_runtime_context().gcs_address)
        return cls(ray, tuple(lanes), tuple(nodes), actors, head, _pulses=pulses)

    def put(self, value: Any) -> Any:
        """Store ``value`` in the cluster once, for many calls."""
        return self.ray.put(value)

    def call(self, lane: int, method: str, *args: Any, returns: int = 1, control: bool = False) -> Any:
        """Ask a lane to run a method after those it was asked before; ``control`` ones do not wait for their turn.

        Returns a reference to the result, or one for each of ``returns``.
        """
        options = {"num_returns": returns} | ({"concurrency_group": "control"} if control else {})
        return getattr(self.actors[lane], method).options(**options).remote(*args)

    def done(self, refs: Collection[Any]) -> list[Any]:
        """Wait a moment for any of ``refs``; return those that are there. Raises ``LaneLost``."""
        self._check_pulses()
        found, _ = self.ray.wait(list(refs), num_returns=1, timeout=POLL_S)
        return list(found)

    def value(self, ref: Any, *, lane: int) -> Any:
        """Return what a lane has answered. Raises ``LaneLost``, ``LaneError`` for a failed task, or what it raised."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=self.silence_s)
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RayError):  # what another lane had left for it is gone
                raise self.lost(self._fallen(lane), error) from error
            if isinstance(error.cause, LaneError | ValueError | OSError):
                raise error.cause from error
            raise
        except errors.RayError as error:
            raise self.lost(self._fallen(lane), error) from error

    def each(self, method: str, *args: Any, check_cancel: CheckCancel | None = None, **options: Any) -> list[Any]:
        """Return what every lane answers. ``args`` are the same for all; a tuple of one per lane goes by lane."""
        refs = {self.call(n, method, *(_of(arg, n) for arg in args), **options): n for n in range(len(self.actors))}
        answers: dict[int, Any] = {}
        while len(answers) < len(refs):
            if check_cancel is not None:
                check_cancel()
            waiting = [ref for ref, lane in refs.items() if lane not in answers]
            answers.update({refs[ref]: self.value(ref, lane=refs[ref]) for ref in self.done(waiting)})
        return [answers[lane] for lane in range(len(refs))]

    def close(self) -> None:
        """End every lane's process; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.head.close()
        if not self.ray.is_initialized():  # Ray would start a cluster to end a lane in
            return
        for actor in self.actors:
            with contextlib.suppress(Exception):  # one that is gone already, or a cluster that is
                self.ray.kill(actor)

    def lost(self, lane: int, why: BaseException | str) -> LaneLost:
        """Say which lane is gone, where, and why."""
        log.info("%s: %s", self.lanes[lane].name, why)
        if not isinstance(why, str):
            why = self._reason(lane, why)
        return LaneLost(f"{self.lanes[lane].name} ({self.lanes[lane].device} on {self.nodes[lane]}) is lost: {why}")

    def _reason(self, lane: int, error: BaseException) -> str:
        if isinstance(error, self.ray.exceptions.OutOfMemoryError):
            return "Ray ended it, since its machine ran out of memory"
        if self.head.failures:  # asking it would take a minute
            return "it does not answer, nor does the cluster's head"
        alive = {node.id for node in nodes_of(self.ray)}
        return "its process has ended" if self.nodes[lane].id in alive else "its machine has left the cluster"

    def leave(self) -> None:
        """Give up a cluster whose head is gone; a later ``connect`` may find another."""
        self.closed = True
        self.ray.shutdown()

    def _check_pulses(self) -> None:
        self.head.look()
        now = time.perf_counter()
        for lane, pulse in enumerate(self._pulses):
            if pulse.ping is None:
                if now - pulse.sent_s > PULSE_S:
                    pulse.ping, pulse.sent_s = self.call(lane, "clock", control=True), now
            elif self.ray.wait([pulse.ping], timeout=0)[0]:
                self.value(pulse.ping, lane=lane)
                pulse.ping, pulse.heard = None, True
            elif now - pulse.sent_s > (self.silence_s if pulse.heard else START_S):
                raise self.lost(lane, self._silent(pulse, now - pulse.sent_s))

    def _silent(self, pulse: _Pulse, seconds: float) -> str:
        if pulse.heard:
            return f"it has not answered for {seconds:.0f} s"
        return f"it has not started within {seconds:.0f} s; are its GPU and its memory free?"

    def _fallen(self, lane: int) -> int:
        """Return the lane whose process is gone; ``lane``, which may only miss what that one sent, if none shows."""
        pings = {self.call(n, "clock", control=True): n for n in range(len(self.actors))}
        self.ray.wait(list(pings), num_returns=len(pings), timeout=1)
        for ref, n in pings.items():
            try:
                self.ray.get(ref, timeout=0)
            except self.ray.exceptions.GetTimeoutError:
                continue
            except self.ray.exceptions.RayError:
                return n
        return lane


def _of(arg: Any, lane: int) -> Any:
    return arg[lane] if isinstance(arg, tuple) else arg


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
