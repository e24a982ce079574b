"""Which KV policy a rollout has, whether its attention is sparse, and their settings: frozen and validated.

How each works: kv/policies.py, kv/sparse.py.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from .registry import Registry

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "no whole number"),
    float: ((int, float), "no number"),
    bool: ((bool,), "neither True nor False"),
    str: ((str,), "no text"),
    tuple[int, ...]: ((tuple,), "no tuple of whole numbers"),
}
"""What a field declared so may hold, and what is said of anything else."""


def _check_kinds(options: Any) -> None:
    """Raise ``ValueError`` for a field that holds another kind of value than it is declared with."""
    for entry in fields(options):
        if entry.type not in KINDS:
            continue
        value, (kinds, words) = getattr(options, entry.name), KINDS[entry.type]
        fits = isinstance(value, kinds) and (entry.type is bool or not isinstance(value, bool))
        if not fits or (isinstance(value, tuple) and any(type(item) is not int for item in value)):
            raise ValueError(f"{entry.name}={value!r} is {words}; use one such as {entry.default!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnOptions:
    """How nearest keys are found."""

    method: str = "quantised"
    """``exact`` (brute force), ``quantised`` or ``signs``."""
    bits: int = 8
    """Of a component when quantised (2 to 8), of a whole key with signs (1 to 1024); ``exact`` ignores it."""
    seed: int = 0
    """Of the random planes."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        ranges = {"exact": (0, 1024), "quantised": (2, 8), "signs": (1, 1024)}
        if self.method not in ranges:
            raise ValueError(f"ann method={self.method!r} is unknown; use one of: {', '.join(ranges)}")
        low, high = ranges[self.method]
        if not low <= self.bits <= high:
            raise ValueError(f"bits={self.bits} does not suit method={self.method!r}; use {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """The schedule's own window and sink, untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """The first frames and the latest, first in first out: what the other policies are compared with."""

    budget_frames: int = 9
    """Latent frames kept, the sink's included."""
    sink_frames: int = 3
    """First latent frames, never evicted."""
    rebase: bool = True
    """Move the sink to the positions just before the window, so that distances stay as trained however long it gets."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        if not 0 <= self.sink_frames < self.budget_frames:
            raise ValueError(
                f"budget_frames={self.budget_frames} leaves no window beside sink_frames={self.sink_frames}; "
                f"use at least {self.least_budget}, and a sink of 0 or more"
            )

    @property
    def least_budget(self) -> int:
        """Latent frames that leave something to choose beside what always stays."""
        return max(self.sink_frames, 0) + 1

    def held_frames(self, seen: int) -> int:
        """Return the latent frames that are kept of ``seen``."""
        return min(seen, self.budget_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class TempCacheOptions:
    """What counts as the same token, and how much is kept."""

    threshold: float = 0.9
    """Least cosine of two keys, before rotary positions, to merge them; above 1 nothing merges."""
    ann: AnnOptions = field(default_factory=AnnOptions)
    """How a query's corresponding key is found."""
    budget_frames: int = 9
    """Latent frames' worth of merged tokens that are kept at most; the oldest go first. More than 9 takes longer and
    came no nearer to the full cache (docs/policies.md)."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold} merges unrelated tokens; use a cosine above 0, such as 0.9")
        if self.budget_frames < self.least_budget:
            raise ValueError(f"budget_frames={self.budget_frames} keeps nothing; use at least 1, such as 9")

    @property
    def least_budget(self) -> int:
        """See ``WindowOptions``: nothing always stays."""
        return 1

    def held_frames(self, seen: int) -> int:
        """Return the latent frames' worth of tokens that are kept of ``seen`` when nothing merges."""
        return min(seen, self.budget_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureForcingOptions:
    """What is kept. Where the paper is silent, the defaults are ours (docs/decisions.md)."""

    budget_frames: int = 9
    """Latent frames' worth of tokens that each head keeps."""
    sink_frames: int = 3
    """First latent frames, never evicted."""
    recent_frames: int = 3
    """Latest latent frames, never evicted."""
    future_weight: float = 0.5
    """λ: 1 looks at the future only, 0 at the past only."""
    lookahead: tuple[int, ...] = (1,)
    """Coming chunks that are predicted; 1 is the next."""
    cells: int = 16
    """Places of a frame whose future attention is told apart when tokens are merged."""
    cell_queries: int = 4
    """Predicted queries of a place."""
    weigh_merged: bool = True
    """Let a token into which others were merged draw the attention that they would have drawn (ours)."""
    per_head: bool = False
    """Keep one mean query per head instead of one per token of a frame."""
    history_stride: int = 16
    """Of a chunk, every query this far apart is asked what it attends to."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("sink_frames", "recent_frames"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is below 0; use 3")
        if self.budget_frames < self.least_budget:
            raise ValueError(
                f"budget_frames={self.budget_frames} leaves no choice beside sink_frames={self.sink_frames} and "
                f"{self.recent_frames} recent frames; use at least {self.least_budget}"
            )
        if not 0 <= self.future_weight <= 1:
            raise ValueError(f"future_weight={self.future_weight} is no share; use 0 to 1")
        if not self.lookahead or min(self.lookahead) < 1:
            raise ValueError(
                f"lookahead={self.lookahead} predicts no coming chunk; use numbers from 1, such as 1, 2, 4"
            )
        for name in ("cells", "cell_queries", "history_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} asks nothing; use at least 1")

    @property
    def least_budget(self) -> int:
        """See ``WindowOptions``: the first and the latest frames always stay."""
        return self.sink_frames + self.recent_frames + 1

    def held_frames(self, seen: int) -> int:
        """Return the latent frames' worth of tokens that are kept of ``seen``."""
        return min(seen, self.budget_frames)


KVPolicy = KeepOptions | WindowOptions | FutureForcingOptions | TempCacheOptions

KV_POLICIES: Registry[type[KVPolicy]] = Registry("kv_policy")
KV_POLICIES.add("keep")(KeepOptions)
KV_POLICIES.add("window")(WindowOptions)
KV_POLICIES.add("future_forcing")(FutureForcingOptions)
KV_POLICIES.add("temp_cache")(TempCacheOptions)


def name_of(policy: KVPolicy) -> str:
    """Return the name under which a policy's kind is registered; a kind that is not has its class's."""
    return next((name for name in KV_POLICIES if KV_POLICIES[name] is type(policy)), type(policy).__name__)


def moves_keys(policy: KVPolicy) -> bool:
    """Whether what is kept gets other positions."""
    if isinstance(policy, WindowOptions):
        return policy.rebase and policy.sink_frames > 0
    return isinstance(policy, FutureForcingOptions)


OPTIONS = {
    "budget_frames": "kv_budget",
    "sink_frames": "kv_sink",
    "future_weight": "kv_future_weight",
    "threshold": "kv_threshold",
}
"""A policy's settings that the command line has, and what they are called there; what is not given is the default."""


def has_option(name: str, setting: str) -> bool:
    """Whether the policy ``name`` has a setting."""
    return setting in {entry.name for entry in fields(KV_POLICIES[name])}


def default_of(name: str, setting: str) -> Any:
    """Return what a setting is unless it is chosen. Policies that share a setting share its default."""
    return getattr(KV_POLICIES[name](), setting)


def policy_named(name: str, **settings: int | float | None) -> KVPolicy:
    """Return a policy with its defaults, but for the settings of ``OPTIONS`` that are given.

    ``ValueError``, in the command line's words, for a setting that the policy does not have, or cannot work with.
    """
    kind = KV_POLICIES[name]
    given: dict[str, Any] = {setting: value for setting, value in settings.items() if value is not None}
    for setting, value in given.items():
        if not has_option(name, setting):
            others = ", ".join(other for other in KV_POLICIES if has_option(other, setting))
            raise ValueError(f"{OPTIONS[setting]}={value} has no use with kv_policy={name!r}; it is for: {others}")
    if kind is KeepOptions:
        return kind()
    sink, budget = given.get("sink_frames", 0), given.get("budget_frames", default_of(name, "budget_frames"))
    if sink < 0:
        raise ValueError(f"kv_sink={sink} is below 0; use --kv-sink 0 or more")
    try:
        large: Any = kind(**given | {"budget_frames": max(budget, sink + LARGE)})
    except ValueError as error:
        raise ValueError(_in_options(str(error))) from None
    if budget < (least := large.least_budget):
        raise ValueError(
            f"kv_budget={budget} is below {least}, the least latent frames that kv_policy={name!r} works with; "
            f"use --kv-budget {least} or more"
        )
    return kind(**given)


LARGE = 1000  # latent frames that leave any policy a choice beside its sink


def _in_options(text: str) -> str:
    """Name settings as the command line does."""
    for setting, option in OPTIONS.items():
        text = text.replace(f"{setting}=", f"{option}=")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions:
    """Where attention is sparse, and how fine the buckets are. Planes and tables are ours: the paper gives none."""

    dense_share: float = 0.3
    """Share of the stages that stay dense, the first ones; rounded, at least one stage."""
    sparse_share: float = 0.7
    """Share of the transformer blocks that are sparse, the last ones; rounded."""
    planes: int = 3
    """2^planes buckets."""
    tables: int = 1
    """Sets of planes, of which one must agree."""
    seed: int = 0
    video: bool = True
    """Whether self-attention is sparse (AnnSA)."""
    prompt: bool = True
    """Whether cross-attention is (AnnCA)."""
    attention: str = "auto"
    """The kernel, a name in ``kv.bucket_attention.BUCKET_ATTENTION``; ``auto`` is the fastest that runs."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("dense_share", "sparse_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is no share; use 0 to 1")
        if not 1 <= self.planes <= 16 or not 1 <= self.tables <= 16:
            raise ValueError(f"planes={self.planes} and tables={self.tables} are out of range; use 1 to 16 of each")

    def is_sparse(self, *, stage: int, num_stages: int, block: int, num_blocks: int) -> bool:
        """Whether a transformer block attends sparsely at a stage: of 4 stages the first is dense."""
        first_stage = max(1, round(self.dense_share * num_stages))
        first_block = num_blocks - round(self.sparse_share * num_blocks)
        return stage >= first_stage and block >= first_block


SPARSE_CHOICES: dict[str, SparseOptions | None] = {
    "none": None,
    "cross": SparseOptions(video=False),
    "self": SparseOptions(prompt=False),
    "both": SparseOptions(),
}
"""Which attentions are sparse, by the names that users choose between."""

SPARSE_KERNELS = ("triton", "flashinfer", "flash", "flex", "cpu", "torch")
"""Those of ``kv.bucket_attention``, in the order in which ``auto`` tries them; here so that names need no torch."""


def sparse_named(name: str, *, attention: str = "auto") -> SparseOptions | None:
    """Return what ``name`` means with the kernel ``attention``, None where nothing is sparse."""
    if name not in SPARSE_CHOICES:
        raise ValueError(f"sparse={name!r} is unknown; use one of: {', '.join(SPARSE_CHOICES)}")
    if attention not in ("auto", *SPARSE_KERNELS):
        raise ValueError(f"sparse_attention={attention!r} is unknown; use one of: auto, {', '.join(SPARSE_KERNELS)}")
    options = SPARSE_CHOICES[name]
    if options is None and attention != "auto":
        raise ValueError(f"sparse_attention={attention!r} has no use with sparse={name!r}; use --sparse both")
    return None if options is None else replace(options, attention=attention)
