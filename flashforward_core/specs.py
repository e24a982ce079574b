"""What to make: frozen, validated descriptions that every other part reads.

Nothing here knows torch or how anything runs. A field that cannot work raises ``ValueError``
naming the field, its value, the bound and the remedy.
"""

import math
from dataclasses import dataclass, field

from .kv_policy import FutureForcingOptions, KeepOptions, KVPolicy, SparseOptions, WindowOptions

SPATIAL_FACTOR = 8  # the Wan VAE's spatial stride
TEMPORAL_FACTOR = 4  # the Wan VAE's temporal stride; the first latent frame is one video frame
SIZE_STEP = 16  # VAE stride x the transformer's 2x2 patch
LATENT_CHANNELS = 16
MAX_LATENT_FRAMES = 100_000  # about seven hours at 16 frames per second
MAX_DEVICES = 64  # lanes of one rollout


def _nearest_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


def _at_least(name: str, value: int, bound: int, remedy: str) -> None:
    if value < bound:
        raise ValueError(f"{name}={value} is below {bound}; {remedy}")


def _check_fps(fps: float) -> None:
    if not 0 < fps <= 240:
        raise ValueError(f"fps={fps} is outside (0, 240]; Wan models are made for fps=16")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoShape:
    """The size of a video in pixels and latent frames."""

    width: int
    """Pixels, a multiple of 16."""
    height: int
    """Pixels, a multiple of 16."""
    latent_frames: int
    """VAE time steps; n of them decode to 4n-3 video frames."""
    fps: float = 16.0
    """Video frames per second."""

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("height", self.height)):
            if value < SIZE_STEP or value % SIZE_STEP:
                nearest = _nearest_multiple(value, SIZE_STEP)
                raise ValueError(f"{name}={value} is not a positive multiple of {SIZE_STEP}; use {name}={nearest}")
        _at_least("latent_frames", self.latent_frames, 1, "use latent_frames=1 or more")
        if self.latent_frames > MAX_LATENT_FRAMES:
            raise ValueError(
                f"latent_frames={self.latent_frames} is above {MAX_LATENT_FRAMES}; make a shorter video, or several"
            )
        _check_fps(self.fps)

    @classmethod
    def from_seconds(cls, seconds: float, *, width: int, height: int, fps: float = 16.0) -> "VideoShape":
        """Choose the latent length whose 4n-3 video frames come nearest to ``seconds``."""
        _check_fps(fps)
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"seconds={seconds} is not above 0 and finite; use seconds={1 / fps:g} (one frame) or more"
            )
        longest = (TEMPORAL_FACTOR * (MAX_LATENT_FRAMES - 1) + 1) / fps
        if seconds > longest:
            raise ValueError(
                f"seconds={seconds:g} is above {longest:g} ({MAX_LATENT_FRAMES} latent frames at fps={fps:g}); "
                "make a shorter video, or several"
            )
        steps = round((seconds * fps - 1) / TEMPORAL_FACTOR)
        return cls(width=width, height=height, latent_frames=max(0, steps) + 1, fps=fps)

    @classmethod
    def from_video_frames(cls, frames: int, *, width: int, height: int, fps: float = 16.0) -> "VideoShape":
        """Take a video frame count, which must be 4n+1."""
        if frames < 1 or (frames - 1) % TEMPORAL_FACTOR:
            below = max(1, (frames - 1) // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1)
            raise ValueError(f"frames={frames} is not 4n+1; use frames={below} or frames={below + TEMPORAL_FACTOR}")
        return cls(width=width, height=height, latent_frames=(frames - 1) // TEMPORAL_FACTOR + 1, fps=fps)

    @property
    def video_frames(self) -> int:
        return TEMPORAL_FACTOR * (self.latent_frames - 1) + 1

    @property
    def seconds(self) -> float:
        return self.video_frames / self.fps

    @property
    def latent_height(self) -> int:
        return self.height // SPATIAL_FACTOR

    @property
    def latent_width(self) -> int:
        return self.width // SPATIAL_FACTOR

    @property
    def tokens_per_frame(self) -> int:
        return (self.height // SIZE_STEP) * (self.width // SIZE_STEP)


def shifted_sigma(u: float, shift: float) -> float:
    """Time-shift u in [0, 1]: sigma = s·u / (1 + (s-1)·u)."""
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """The denoising stages: level k is sigmas[k], level S (clean) is 0."""

    shift: float = 5.0
    """Time shift s of the flow; Wan uses 5."""
    starts: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    """Unshifted time u at which each stage starts, falling from 1."""

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift} is not above 0; Wan models use shift=5")
        falling = all(a > b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if not self.starts or self.starts[0] != 1.0 or self.starts[-1] <= 0 or not falling:
            raise ValueError(f"starts={self.starts} must fall from 1.0 and stay above 0; use (1.0, 0.75, 0.5, 0.25)")

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Sigma per level 0..S; the last is 0."""
        return (*(shifted_sigma(u, self.shift) for u in self.starts), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorPlan:
    """Clean planned latent frames at {0, stride, 2·stride, …}."""

    stride: int = 10
    """Latent frames between anchors (Δ)."""
    block_frames: int = 3
    """Anchors that the planner denoises together."""
    rule: str = "nearest"
    """Which anchors a chunk reads (Γ): nearest, aligned or floor."""
    context: int = 3
    """How many anchors a chunk reads."""

    def __post_init__(self) -> None:
        _at_least("anchor_stride", self.stride, 1, "use anchor_stride=10, as the paper does")
        _at_least("block_frames", self.block_frames, 1, "use block_frames=3")
        _at_least("context", self.context, 1, "use context=3, or no anchors at all")

    def positions(self, latent_frames: int) -> tuple[int, ...]:
        """Absolute latent index of every anchor; none lies past the last latent frame."""
        return tuple(range(0, latent_frames, self.stride))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How far back forwards read."""

    chunks: int = 5
    """Previous chunks that a chunk reads (H); the window in latent frames is (H+1)·chunk_frames."""
    planner_blocks: int = 6
    """Previous anchor blocks that an anchor block reads (H_P)."""
    sink: int = 0
    """Latent frames at the start that stay in the history for ever; they count within it."""

    def __post_init__(self) -> None:
        _at_least("history", self.chunks, 0, "use history=5, as the paper does")
        _at_least("planner_history", self.planner_blocks, 0, "use planner_history=6, as the paper does")
        _at_least("sink", self.sink, 0, "use sink=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """A prompt that holds from one latent frame until the next span's start."""

    start: int = 0
    """First latent frame."""
    prompt: int = 0
    """Index into the run's list of prompt embeddings."""
    hard_cut: bool = False
    """Whether history from before ``start`` is forgotten."""


GOOD_ANCHORS = 3
"""As many as models with anchors were trained on at least: a start, a middle and an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything that decides a rollout's pixels, except weights and prompt embeddings."""

    shape: VideoShape
    schedule: str = "flashforward"
    """A name in ``graph.schedules.SCHEDULES``."""
    chunk_frames: int = 3
    """Latent frames the renderer denoises together; the last chunk may be shorter."""
    stages: StageSchedule = field(default_factory=StageSchedule)
    anchors: AnchorPlan | None = field(default_factory=AnchorPlan)
    history: History = field(default_factory=History)
    prompts: tuple[PromptSpan, ...] = (PromptSpan(),)
    seed: int = 0
    kv_policy: KVPolicy = field(default_factory=KeepOptions)
    """What is kept of the history; anything but ``KeepOptions`` replaces the history's window and sink."""
    start_frames: int = 0
    """Latent frames at the start that are given, clean: an image's, or a video's that goes on."""
    sparse: SparseOptions | None = None
    """Where attention is sparse; None: nowhere."""

    def __post_init__(self) -> None:
        _at_least("chunk_frames", self.chunk_frames, 1, "use chunk_frames=3")
        _at_least("seed", self.seed, 0, "use a seed of 0 or more")
        if not 0 <= self.start_frames < self.shape.latent_frames:
            raise ValueError(
                f"start_frames={self.start_frames} leaves nothing to make of {self.shape.latent_frames} latent frames; "
                "use a longer video or a shorter start"
            )
        if self.sparse is not None and self.stages.num_stages == 1:
            raise ValueError(
                "sparse attention has no use with 1 stage, since the first stage stays dense; "
                "use 2 stages or more, or sparse=none"
            )
        if not self.compacts:
            self._check_history()
        starts = [span.start for span in self.prompts]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"prompts start at latent frames {starts}; they must rise from 0")
        if starts[-1] >= self.shape.latent_frames:
            raise ValueError(
                f"a prompt starts at latent frame {starts[-1]}, past the last one "
                f"({self.shape.latent_frames - 1}); make the video longer or drop the span"
            )

    def _check_history(self) -> None:
        if self.history.chunks == 0 and self.anchors is None and self.num_chunks > 1:
            raise ValueError("history=0 reads nothing; use history >= 1 or anchors")
        sink_chunks = -(-self.history.sink // self.chunk_frames)
        if sink_chunks > self.history.chunks:
            bound = self.history.chunks * self.chunk_frames
            raise ValueError(
                f"sink={self.history.sink} is longer than the history of {bound} latent frames; "
                f"use sink <= {bound} or a longer history"
            )

    @property
    def compacts(self) -> bool:
        """Whether a KV policy keeps the history, in COMPACT tasks."""
        return not isinstance(self.kv_policy, KeepOptions)

    def scene_start(self, chunk: int) -> int:
        """First chunk of the scene of ``chunk``: the first that begins at or after the last hard cut so far."""
        start = self.chunk(chunk).start
        cuts = [span.start for span in self.prompts if span.hard_cut and span.start <= start]
        return -(-max(cuts, default=0) // self.chunk_frames)

    def scene_frames(self) -> tuple[int, ...]:
        """Latent frames at which scenes after the first one begin: those of their first chunks."""
        starts = {self.scene_start(chunk) for chunk in range(self.num_chunks)}
        return tuple(self.chunk(chunk).start for chunk in sorted(starts) if chunk)

    @property
    def num_chunks(self) -> int:
        return -(-self.shape.latent_frames // self.chunk_frames)

    @property
    def start_chunks(self) -> int:
        """Chunks that are given as a whole; the frames of the start that are left over begin the next chunk."""
        return self.start_frames // self.chunk_frames

    def chunk(self, index: int) -> range:
        """Latent frames of chunk ``index``."""
        start = index * self.chunk_frames
        return range(start, min(start + self.chunk_frames, self.shape.latent_frames))

    def scene_anchors(self, latent_frame: int) -> range:
        """Indices of the anchors of the scene of ``latent_frame``, between the hard cuts around it; maybe none."""
        if self.anchors is None:
            return range(0)
        cuts = [span.start for span in self.prompts if span.hard_cut]
        start = max((cut for cut in cuts if cut <= latent_frame), default=0)
        stop = min((cut for cut in cuts if cut > latent_frame), default=self.shape.latent_frames)
        stride = self.anchors.stride
        return range(-(-start // stride), -(-stop // stride))

    def anchor_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Anchor indices per planner block, each of one scene; empty without anchors."""
        if self.anchors is None:
            return ()
        size = self.anchors.block_frames
        starts = sorted({0, *(span.start for span in self.prompts if span.hard_cut)})
        scenes = [self.scene_anchors(start) for start in starts]
        return tuple(tuple(scene[at : at + size]) for scene in scenes for at in range(0, len(scene), size))

    def anchor_positions(self) -> tuple[int, ...]:
        """Absolute latent index of every anchor; empty without anchors."""
        return () if self.anchors is None else self.anchors.positions(self.shape.latent_frames)

    @property
    def few_anchors(self) -> str:
        """Advice for a video so short that it holds fewer than ``GOOD_ANCHORS``; empty where none is needed."""
        latents, found = self.shape.latent_frames, len(self.anchor_positions())
        if self.anchors is None or found >= min(GOOD_ANCHORS, latents):
            return ""
        stride = max(1, (latents - 1) // (GOOD_ANCHORS - 1))
        return (
            f"{found} anchor{'s' if found > 1 else ''} in {latents} latent frames, so what moves may get lost; use an "
            f"anchor stride of {stride} or less"
        )

    @property
    def soft_prompts(self) -> str:
        """Advice where a prompt that begins without a hard cut hardly reaches the anchors; empty where it does."""
        if not self.history.planner_blocks:
            return ""
        soft = [span for span in self.prompts[1:] if not span.hard_cut]
        scenes = [self.scene_anchors(span.start) for span in soft]
        if self.anchors is None or not any(scenes):
            return ""
        size, stride = self.anchors.block_frames, self.anchors.stride
        follows = any(  # a block goes by the prompt of its first anchor
            index * stride >= span.start
            for span, scene in zip(soft, scenes, strict=True)
            for index in scene[size::size]
        )
        return (
            "a prompt that begins without # may hardly show, since anchors that are planned with history stay with "
            f"the prompt before; use {'a planner history of 0, or ' if follows else ''}# for a hard cut"
        )

    @property
    def idle_policy(self) -> str:
        """Advice for a KV policy that never drops anything; empty for others, and for TempCache, which merges."""
        policy, seen = self.kv_policy, self.chunk(self.num_chunks - 1).start
        if not isinstance(policy, WindowOptions | FutureForcingOptions) or policy.budget_frames < seen:
            return ""
        return (
            f"a budget of {policy.budget_frames} keeps all that {self.shape.latent_frames} latent frames look back at, "
            "so the KV policy drops nothing; use a smaller budget, or keep"
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """What may surprise in the video, and what to do about it; mostly empty."""
        return tuple(filter(None, (self.few_anchors, self.soft_prompts, self.idle_policy)))

    def prompt_at(self, latent_frame: int) -> int:
        """Index of the prompt that holds at ``latent_frame``."""
        return [span.prompt for span in self.prompts if span.start <= latent_frame][-1]
