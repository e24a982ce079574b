"""What a task costs: one round per forward, or seconds fitted to measurements on a device."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median

from ..graph.passes import KV_SPACES, TaskCost
from ..graph.task import BACK, FRONT, ForwardTask, Kind, Role, Slot, Space
from ..kv_policy import KeepOptions, name_of
from ..specs import RolloutSpec

HALF_SHARES = {FRONT: 0.6, BACK: 0.4}
"""What each half of the Wan decoder's layers takes of the whole, by multiplications."""


def rounds(task: ForwardTask) -> float:
    """Count one per forward and nothing for decoding: the unit in which layouts are compared."""
    return 1.0 if task.is_forward else 0.0


def slot_frames(slot: Slot, spec: RolloutSpec) -> int:
    """Return the latent frames that a slot holds; an anchor's KV is one."""
    if slot.space is Space.ANCHOR_KV:
        return 1
    if slot.space is Space.ANCHOR_LATENT:
        return len(spec.anchor_blocks()[slot.index])
    if slot.space is Space.POLICY_STATE:
        return _policy_frames(slot, spec)
    return len(spec.chunk(slot.index))


def _policy_frames(slot: Slot, spec: RolloutSpec) -> int:
    """Return the frames' worth that a policy keeps, or what is handed over to it: with queries, half as much again."""
    own = spec.chunk(slot.index)
    if slot.bank.endswith(".own") or isinstance(spec.kv_policy, KeepOptions):
        return -(-3 * len(own) // 2)
    return spec.kv_policy.held_frames(own.stop - spec.chunk(spec.scene_start(slot.index)).start)


def num_keys(task: ForwardTask, spec: RolloutSpec) -> int:
    """Return the tokens that a forward attends to, its own included."""
    own = len(spec.anchor_blocks()[task.index]) if task.role is Role.PLANNER else len(spec.chunk(task.index))
    seen = sum(slot_frames(slot, spec) for slot in task.reads if slot.space in KV_SPACES)
    return (own + seen) * spec.shape.tokens_per_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds per task on one device: a forward costs ``forward_s + key_s * keys``."""

    forward_s: float
    """Seconds of a forward, apart from its keys."""
    key_s: float = 0.0
    """Seconds per key token that a forward attends to."""
    decode_frame_s: float = 0.0
    """Seconds to decode one latent frame."""
    compact_frame_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a KV policy takes to add one latent frame to what it keeps, by the policy's name."""
    pair_ratio: float = 1.0
    """Seconds of two forwards as one batch over those of one after the other; 1 until it is measured."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("forward_s", "key_s", "decode_frame_s", "pair_ratio")}
        for name, value in {**given, **self.compact_frame_s}.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} is not a duration of 0 or more; measure the forwards again")

    @classmethod
    def fit(cls, forwards: Mapping[int, float], *, decode_frame_s: float = 0.0) -> "CostModel":
        """Fit a line to measured forwards, key tokens -> seconds: the median of all pairs' slopes (Theil-Sen).

        First forwards may wait for kernels to load; a line of least squares would tilt towards them. One measurement
        fixes only ``forward_s``, and so do those in which more keys take no longer: small forwards on a busy machine.
        A line that starts below 0 is no cost and raises ``ValueError``.
        """
        if not forwards:
            raise ValueError("forwards is empty; measure at least one forward, better three or more")
        pairs = combinations(sorted(forwards.items()), 2)
        slopes = [(later - sooner) / (more - fewer) for (fewer, sooner), (more, later) in pairs]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        start = median(seconds - slope * keys for keys, seconds in forwards.items())
        return cls(forward_s=start, key_s=slope, decode_frame_s=decode_frame_s)

    def of(self, spec: RolloutSpec) -> TaskCost:
        """Return the seconds of each task of a rollout of ``spec``."""
        compact = self.compact_frame_s.get(name_of(spec.kv_policy), 0.0)

        def seconds(task: ForwardTask) -> float:
            if task.kind is Kind.DECODE:
                share = HALF_SHARES.get(task.half, 1.0)
                return share * self.decode_frame_s * len(spec.chunk(task.index))
            if task.kind is Kind.COMPACT:
                return compact * len(spec.chunk(task.index))
            return self.forward_s + self.key_s * num_keys(task, spec)

        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What a fit was measured on."""

    device: str
    """The device's own name, such as ``NVIDIA H200``."""
    model: str
    resolution: str
    precision: str


def load_costs(path: Path) -> dict[CostKey, CostModel]:
    """Return every fit stored in the file, none if it is not there; anything else there raises ``ValueError``."""
    if not path.is_file():
        return {}
    try:
        fits = json.loads(path.read_text(encoding="utf-8"))["fits"]
        return {CostKey(**fit["key"]): CostModel(**fit["cost"]) for fit in fits}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of fitted costs; name one that `bench latency --fit` wrote") from error


def save_cost(path: Path, *, key: CostKey, cost: CostModel) -> None:
    """Store a fit in the JSON file at ``path``, in place of an earlier one of the same key."""
    fits = [{"key": asdict(k), "cost": asdict(c)} for k, c in {**load_costs(path), key: cost}.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"fits": fits}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)  # a reader sees the old file or the new one, never half of it


def load_cost(path: Path, *, key: CostKey) -> CostModel | None:
    """Return the fit stored under ``key``, or None."""
    return load_costs(path).get(key)


def fitted_devices(path: Path, *, model: str, resolution: str, precision: str) -> tuple[str, ...]:
    """Return the names of the devices that have a fit for this work."""
    keys = load_costs(path)
    return tuple(
        key.device for key in keys if (key.model, key.resolution, key.precision) == (model, resolution, precision)
    )
