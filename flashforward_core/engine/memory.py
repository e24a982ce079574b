"""How much memory a rollout takes on each device, from its plan alone; nothing here imports torch.

Counted are weights, banks (as ``kv/bank.py`` makes and drops them), what one forward and one decoded latent frame need
on the way, and prompts' keys and values. The factors of the last two were read off the transformer's and the decoder's
code and are checked against it (``tests/unit/test_memory.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph.passes import TaskCost
from ..graph.schedules import OWN
from ..graph.task import Kind, Role, Slot, Space, TaskGraph
from ..kv.pages import ANCHOR_BANK, PagePlan, kv_slots, plan_pages
from ..kv_policy import FutureForcingOptions, moves_keys
from ..model.config import PATCH, WanConfig
from ..specs import LATENT_CHANNELS, RolloutSpec
from .cost import num_keys, rounds, slot_frames
from .events import TaskSpan
from .placement import Placement
from .simulate import peak_kv_bytes, run_lanes

KV_CHOICES = ("auto", "fp8")
OFFLOAD_CHOICES = ("off", "on")
SLOTS = 3  # blocks of weights that a streaming lane holds: the one that runs and two that are on their way
RECORDED_BLOCK_BYTES = 256 << 20  # larger blocks take a device longer than Python, and a copy of one would be large
LIBRARY_BYTES = 128 << 20  # per CUDA lane: workspaces of matrix libraries, which the allocator counts too
FLOAT32 = INT32 = 4
PLACE_BYTES = 20  # of a token that a KV policy keeps, per head: its count, its place and where it came
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What may be done to need less memory, and how much there is."""

    kv: str = "auto"
    """How banks hold keys and values: ``auto``, as the weights' precision has them, or ``fp8``: half of bf16's memory,
    and a slightly different video."""
    offload: str = "off"
    """``on`` keeps blocks' weights in host memory, as many as do not fit, and copies each shortly before it runs. The
    video is the same; such forwards are not recorded as graphs."""
    budget_gib: float = 0.0
    """Most GiB to use on each device; 0: what is free there."""

    def __post_init__(self) -> None:
        for name, choices in (("kv", KV_CHOICES), ("offload", OFFLOAD_CHOICES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of: {', '.join(choices)}")
        if not 0 <= self.budget_gib < float("inf"):
            raise ValueError(f"budget_gib={self.budget_gib} is no amount of memory; use 0 for what is free, or GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneSizes:
    """What a prediction needs to know of a backbone."""

    config: WanConfig
    element_bytes: int
    """Of activations, keys and values: 2 for bf16."""
    outer_bytes: int
    """Weights outside the blocks, over all weight sets."""
    blocks_bytes: int
    """Blocks' weights, over all weight sets; memory that sets share counts once."""
    block_bytes: int
    """Weights of the largest block of one set."""
    weight_sets: int
    """Transformers: one, or one per role."""
    vae_bytes: int = 0
    vae_frame_bytes: int = 0
    """What decoding needs per pixel, its cache included; 0 without an autoencoder."""
    scratch_bytes: int = 0
    """For widening a weight that is held in 8 bits."""


def backbone_sizes(
    config: WanConfig, *, element_bytes: int, weight_bytes: int | None = None, weight_sets: int = 1
) -> BackboneSizes:
    """Return sizes from a configuration. ``weight_bytes`` is a block weight's, if it differs: 1 for fp8."""
    held = element_bytes if weight_bytes is None else weight_bytes
    block = block_parameters(config) * held
    return BackboneSizes(
        config=config,
        element_bytes=element_bytes,
        outer_bytes=weight_sets * outer_parameters(config) * element_bytes,
        blocks_bytes=weight_sets * config.num_layers * block,
        block_bytes=block,
        weight_sets=weight_sets,
        scratch_bytes=widening_bytes(config, element_bytes) if held < element_bytes else 0,
    )


def block_parameters(config: WanConfig) -> int:
    """Count the numbers of one transformer block."""
    c, f = config.dim, config.ffn_dim
    attentions = 2 * (4 * (c * c + c) + 2 * c)
    return attentions + 2 * c + (c * f + f) + (f * c + c) + 6 * c


def outer_parameters(config: WanConfig) -> int:
    """Count the numbers outside the blocks."""
    c, area = config.dim, PATCH[1] * PATCH[2]
    linears = ((config.freq_dim, c), (c, c), (c, 6 * c), (config.text_dim, c), (c, c), (c, config.channels * area))
    return (config.channels * area + 1) * c + sum(i * o + o for i, o in linears) + (2 + len(Role)) * c


def widening_bytes(config: WanConfig, element_bytes: int) -> int:
    """Return what the largest linear takes while it is widened: two float32 copies, and the result."""
    return config.dim * config.ffn_dim * (2 * FLOAT32 + element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The most bytes that one device holds, by what for."""

    device: str
    weights_bytes: int
    kv_bytes: int
    """Banks, what a KV policy keeps, and prompts' keys and values."""
    workspace_bytes: int
    """One forward on each lane, and latents."""
    decode_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes + self.decode_bytes

    def parts(self) -> str:
        """Say what it is made of."""
        named = (
            ("weights", self.weights_bytes),
            ("KV", self.kv_bytes),
            ("workspace", self.workspace_bytes),
            ("decoding", self.decode_bytes),
        )
        return ", ".join(f"{name} {size(count)}" for name, count in named if count)


def size(num_bytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def predict_memory(
    graph: TaskGraph,
    *,
    spec: RolloutSpec,
    placement: Placement,
    sizes: BackboneSizes,
    options: MemoryOptions = MemoryOptions(),
    resident: int = 0,
    batch: int = 1,
    pages: PagePlan | None = None,
    cost: TaskCost = rounds,
    video: RolloutSpec | None = None,
) -> tuple[DeviceMemory, ...]:
    """Return the peak of each device, in the order of the lanes.

    ``resident`` blocks of a set stay on a device when the others are offloaded. ``pages`` are those of the whole
    rollout, if ``graph`` is only a part; ``video`` is the whole video, if ``spec`` is only its beginning.
    """
    plan = plan_pages(spec, graph) if pages is None else pages
    spans = {span.task: span for span in run_lanes(graph, placement=placement, cost=cost)}
    row = _row_bytes(sizes, options) + _group_bytes(sizes, spec)
    frame = row * spec.shape.tokens_per_frame * batch
    anchors = len((video or spec).anchor_positions())
    frames = {name: max(n, anchors) if name == ANCHOR_BANK else n for name, n in plan.bank_frames.items()}
    banks = bank_peaks(graph, plan=plan, spans=spans, lanes=len(placement.lanes), frames=frames)
    kept = _policy_peaks(graph, spec, spans=spans, lanes=len(placement.lanes), kept=_kept_bytes(sizes, spec))
    lanes = [_Lane(graph, spec, placement=placement, lane=n, plan=plan) for n in range(len(placement.lanes))]
    several = sum(lane.device.startswith("cuda") for lane in placement.lanes) > 1
    records = several and options.offload == "off" and sizes.block_bytes <= RECORDED_BLOCK_BYTES
    found = []
    for device in dict.fromkeys(lane.device for lane in placement.lanes):
        here = [n for n, lane in enumerate(placement.lanes) if lane.device == device]
        latents = LATENT_CHANNELS * spec.shape.latent_height * spec.shape.latent_width * FLOAT32
        workspace = sum(lanes[n].workspace(sizes, options) for n in here) * batch
        workspace += batch * (video or spec).shape.latent_frames * latents + len(here) * sizes.scratch_bytes
        workspace += LIBRARY_BYTES * len(here) if device.startswith("cuda") else 0
        workspace += sum(lanes[n].sizes for n in here) * sizes.block_bytes if records else 0  # what recordings read
        pixels = spec.shape.width * spec.shape.height
        decode = sum(lanes[n].decodes for n in here) * pixels * sizes.vae_frame_bytes * batch
        kv = sum(banks[n] * frame + kept[n] * batch + lanes[n].prompts * _text_bytes(sizes) * batch for n in here)
        weights = _weights(sizes, options, lanes=len(here), resident=resident)
        found.append(
            DeviceMemory(
                device=device, weights_bytes=weights, kv_bytes=kv, workspace_bytes=workspace, decode_bytes=decode
            )
        )
    return tuple(found)


def _row_bytes(sizes: BackboneSizes, options: MemoryOptions) -> int:
    """Return the stored bytes of one token's keys and values in all blocks. A packed head has a byte more."""
    config = sizes.config
    head = config.head_dim + 1 if options.kv == "fp8" else config.head_dim * sizes.element_bytes
    return 2 * config.num_layers * config.num_heads * head


def _group_bytes(sizes: BackboneSizes, spec: RolloutSpec) -> int:
    """Return the bytes of one token's buckets in all blocks: its code in every table, and a place in the order."""
    if spec.sparse is None or not spec.sparse.video:
        return 0
    sparse_blocks = round(spec.sparse.sparse_share * sizes.config.num_layers)
    return INT32 * (spec.sparse.tables + 1) * sizes.config.num_heads * sparse_blocks


def _frame_bytes(sizes: BackboneSizes, spec: RolloutSpec) -> int:
    return sizes.config.kv_bytes_per_frame(spec.shape.tokens_per_frame, element_bytes=sizes.element_bytes)


def _kept_bytes(sizes: BackboneSizes, spec: RolloutSpec) -> tuple[int, int]:
    """Return the bytes of a latent frame that a KV policy keeps of a bank, and those that do not grow with it.

    With the tokens go their places, how moved keys came and, in Future Forcing, the attention that they got; once per
    bank it keeps the mean queries of a frame.
    """
    config = sizes.config
    tokens = spec.shape.tokens_per_frame * config.num_layers * config.num_heads
    channels = 2 * config.rope_pairs[0] if moves_keys(spec.kv_policy) else 0
    looks_ahead = isinstance(spec.kv_policy, FutureForcingOptions)
    token = PLACE_BYTES + channels * sizes.element_bytes + 2 * FLOAT32 * looks_ahead
    frame = _frame_bytes(sizes, spec) + tokens * token + _group_bytes(sizes, spec) * spec.shape.tokens_per_frame
    return frame, looks_ahead * tokens * FLOAT32 * (config.head_dim + 1)


def _text_bytes(sizes: BackboneSizes) -> int:
    return sizes.config.kv_bytes_per_frame(sizes.config.text_len, element_bytes=sizes.element_bytes)


def _weights(sizes: BackboneSizes, options: MemoryOptions, *, lanes: int, resident: int) -> int:
    outer = sizes.outer_bytes + sizes.vae_bytes
    if options.offload == "off" or resident >= sizes.config.num_layers:
        return outer + sizes.blocks_bytes
    slots = min(SLOTS, sizes.config.num_layers - resident)
    stay = sizes.blocks_bytes * resident // sizes.config.num_layers
    return outer + stay + lanes * slots * sizes.block_bytes


class _Lane:
    """What the tasks of one lane need besides weights and banks."""

    def __init__(self, graph: TaskGraph, spec: RolloutSpec, *, placement: Placement, lane: int, plan: PagePlan) -> None:
        tasks = [task for task in graph.tasks if placement.assign[task.id] == lane]
        forwards = [task for task in tasks if task.is_forward]
        self.decodes = int(any(task.kind is Kind.DECODE for task in tasks))
        positions = spec.anchor_positions()
        self.tokens = self.keys = self.gathered = 0
        prompts: set[tuple[Role | None, int]] = set()
        kinds: set[tuple[Role | None, int]] = set()
        for task in forwards:
            own = spec.chunk(task.index)
            first = positions[spec.anchor_blocks()[task.index][0]] if task.role is Role.PLANNER else own.start
            prompts.add((task.role, spec.prompt_at(first)))
            view, keys = plan.views[task.id], num_keys(task, spec)
            kinds.add((task.role, view.own.frames))
            self.tokens = max(self.tokens, view.own.frames * spec.shape.tokens_per_frame)
            self.keys = max(self.keys, keys)
            if spec.compacts or len(view.ranges) > 1:
                self.gathered = max(self.gathered, keys)
        self.prompts = len(prompts)
        self.sizes = len(kinds)  # roles and lengths of forwards
        if any(placement.assign[task_id] == lane for task_id in placement.pairs):
            self.tokens *= 2
            self.prompts *= 3  # beside itself, a pair's prompt is held for both

    def workspace(self, sizes: BackboneSizes, options: MemoryOptions) -> int:
        """Return the most that one forward has at once besides its weights and its bank."""
        own = forward_bytes(sizes.config, tokens=self.tokens, element_bytes=sizes.element_bytes)
        scratch = self.keys if options.kv == "fp8" else self.gathered  # one block's keys and values
        return own + 2 * scratch * sizes.config.dim * sizes.element_bytes


def forward_bytes(config: WanConfig, *, tokens: int, element_bytes: int) -> int:
    """Return the most that an eager forward of ``tokens`` tokens has at once, apart from what it attends to.

    It is either around self-attention, where norms and rotations are in float32, or in the feed-forward; cosines and
    sines come on top.
    """
    around_attention = 4 * FLOAT32 + 7 * element_bytes
    feed_forward = (8 + 2 * config.ffn_dim / config.dim) * element_bytes
    return int(tokens * (config.dim * max(around_attention, feed_forward) + 5 * config.head_dim))


def bank_peaks(
    graph: TaskGraph, *, plan: PagePlan, spans: Mapping[str, TaskSpan], lanes: int, frames: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the most latent frames that each lane's banks have at once, a bank living from its first use to its last.

    ``frames`` are the banks' lengths. On one lane this is what happens; on several, as timed by ``spans``.
    """
    ends: dict[str, float] = {}
    for task in graph.tasks:
        used = {plan.homes[slot].bank for slot in kv_slots(task.reads) if slot in plan.homes}
        used |= {plan.views[task.id].own.bank} if task.id in plan.views else set()
        for bank in used:
            ends[bank] = max(ends.get(bank, 0.0), spans[task.id].end_s)
    peaks = [0] * lanes
    held: list[set[str]] = [set() for _ in range(lanes)]
    for span in sorted(spans.values(), key=lambda span: (span.start_s, span.end_s)):
        if span.task not in plan.views:
            continue
        here = held[span.lane]
        here -= {bank for bank in here if ends[bank] <= span.start_s}
        here.add(plan.views[span.task].own.bank)
        peaks[span.lane] = max(peaks[span.lane], sum(frames[bank] for bank in here))
    return tuple(peaks)


def _policy_peaks(
    graph: TaskGraph, spec: RolloutSpec, *, spans: Mapping[str, TaskSpan], lanes: int, kept: tuple[int, int]
) -> tuple[int, ...]:
    """Return the most bytes that a KV policy keeps on each lane."""

    frame, fixed = kept

    def slot_bytes(slot: Slot) -> int:
        if slot.space is not Space.POLICY_STATE:
            return 0
        return slot_frames(slot, spec) * frame + (0 if slot.bank.endswith(OWN) else fixed)

    if not spec.compacts:
        return (0,) * lanes
    return peak_kv_bytes(graph, spans=tuple(spans.values()), lanes=lanes, slot_bytes=slot_bytes)


class DoesNotFit(ValueError):
    """A rollout needs more memory than there is; raised before anything runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change, and what a device would then need."""

    words: str
    peak_bytes: int


def refuse(found: DeviceMemory, *, limit: int, budget: bool, remedies: Sequence[Remedy]) -> DoesNotFit:
    """Return the error that says what does not fit and what to do, in order. ``remedies`` build on each other."""
    there = f"the budget is {size(limit)}" if budget else f"{size(limit)} are free"
    steps = [f"{remedy.words} ({size(remedy.peak_bytes)})" for remedy in remedies]
    advice = ", then ".join([*steps, "a smaller size or history"])
    return DoesNotFit(
        f"memory: {found.device} needs about {size(found.peak_bytes)} ({found.parts()}), but {there}; use {advice}"
    )


def remedies_for(options: MemoryOptions, *, order: str, movable: bool) -> list[tuple[str, MemoryOptions, str]]:
    """List (words, options, order) that may need less, each with the ones before it.

    ``movable``: whether weights can stay in host memory.
    """
    steps: list[tuple[str, MemoryOptions, str]] = []
    if order != "memory":
        order = "memory"
        steps.append(("order=memory", options, order))
    if options.kv == "auto":
        options = replace(options, kv="fp8")
        steps.append(("kv=fp8", options, order))
    if options.offload == "off" and movable:
        options = replace(options, offload="on")
        steps.append(("offload=on", options, order))
    return steps


def blocks_that_fit(sizes: BackboneSizes, *, least: DeviceMemory, limit: int) -> int:
    """Return how many blocks of each set can stay on a device that needs ``least`` when none do."""
    per_block = max(1, sizes.blocks_bytes // sizes.config.num_layers)
    room = max(0, limit - least.peak_bytes)
    slots = SLOTS * sizes.block_bytes
    if room + slots >= sizes.blocks_bytes:
        return sizes.config.num_layers  # all: then nothing streams, and no slots are needed
    return min(room // per_block, sizes.config.num_layers - 1)
