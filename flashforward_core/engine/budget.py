"""Whether a rollout fits into the memory that there is, asked before it starts, and how its weights are spread then."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import Tensor

from ..graph.task import TaskGraph
from ..kv.pages import PagePlan
from ..model.fp8 import Fp8Linear
from ..model.roles import Backbone
from ..model.tiny_vae import TinyVae
from ..specs import RolloutSpec
from .lanes import DevicePlan
from .memory import (
    GIB,
    BackboneSizes,
    DeviceMemory,
    MemoryOptions,
    Remedy,
    blocks_that_fit,
    predict_memory,
    refuse,
    remedies_for,
    widening_bytes,
)
from .offload import ALIGNMENT
from .placement import Placement
from .replicas import blocks_on, device_of, tensors_in, weights_on

log = logging.getLogger(__name__)

DECODE_NUMBERS = 92  # per pixel and base channel, at once: 67 in 3D convolutions, 91 in 2D ones, by counting tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a rollout is run so that it fits."""

    options: MemoryOptions = MemoryOptions()  # noqa: RUF009 (frozen)
    resident: Mapping[str, int] = field(default_factory=dict)
    """Blocks of each model that stay on a device, by its name; devices that are not named have all."""
    predicted: tuple[DeviceMemory, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether banks hold keys and values in 8 bits."""
        return self.options.kv == "fp8"

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {memory.device: memory.peak_bytes for memory in self.predicted}


def sizes_of(backbone: Backbone) -> BackboneSizes:
    """Measure a backbone's weights; what weight sets share counts once."""
    models: list[Any] = list(dict.fromkeys(backbone.models.values()))
    blocks = [block for model in models for block in model.blocks]
    everything, in_blocks = _unique(tensors_in(models)), _unique(tensors_in(blocks))
    vae, element = backbone.vae, backbone.dtype.itemsize
    widened = any(type(layer) is Fp8Linear for layer in models[0].modules())
    return BackboneSizes(
        config=backbone.config,
        element_bytes=element,
        outer_bytes=everything - in_blocks,
        blocks_bytes=in_blocks,
        block_bytes=max(_aligned(block) for block in blocks),
        weight_sets=len(models),
        vae_bytes=0 if vae is None else _unique(vae.parameters()),
        vae_frame_bytes=0 if vae is None else decode_numbers(vae) * vae.dtype.itemsize,
        scratch_bytes=widening_bytes(backbone.config, element) if widened else 0,
    )


def decode_numbers(vae: Any) -> int:
    """Return how many numbers decoding one latent frame holds at once, per pixel."""
    numbers: int = vae.numbers_per_pixel if isinstance(vae, TinyVae) else DECODE_NUMBERS * vae.config.base_dim
    return numbers


def _unique(tensors: Iterable[Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _aligned(block: torch.nn.Module) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors_in([block]))


def free_bytes(device: torch.device | str) -> int:
    """Return what could be allocated on ``device`` now: memory that PyTorch holds unused counts as free."""
    device = torch.device(device)
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return min(free + unused, int(fraction * total) - torch.cuda.memory_allocated(device))


def total_bytes(device: torch.device | str) -> int:
    """Return all memory of ``device``."""
    device = torch.device(device)
    if device.type != "cuda":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A rollout, for which memory is to be found."""

    graph: TaskGraph
    spec: RolloutSpec
    sizes: BackboneSizes
    placed: Callable[[str], Placement]
    """Places the graph in another order."""
    pages: PagePlan | None = None
    batch: int = 1
    video: RolloutSpec | None = None
    movable: bool = True
    """Whether weights can stay in host memory: those that a device has as its own cannot."""
    already: Mapping[str, int] = field(default_factory=dict)
    """Blocks on the devices that stream already. No more are brought there: packing a model anew takes its time."""

    def predict(
        self, placement: Placement, options: MemoryOptions, *, limits: Mapping[str, int]
    ) -> tuple[tuple[DeviceMemory, ...], dict[str, int]]:
        """Return each device's memory, and how many blocks stay on it, with offloading to its limit."""

        def predict(resident: int) -> tuple[DeviceMemory, ...]:
            return predict_memory(
                self.graph,
                spec=self.spec,
                placement=placement,
                sizes=self.sizes,
                options=options,
                resident=resident,
                batch=self.batch,
                pages=self.pages,
                video=self.video,
            )

        if options.offload == "off":
            return predict(self.sizes.config.num_layers), {}
        fitting = {m.device: blocks_that_fit(self.sizes, least=m, limit=limits[m.device]) for m in predict(0)}
        resident = {device: min(count, self.already.get(device, count)) for device, count in fitting.items()}
        by_count = {count: predict(count) for count in set(resident.values())}
        found = [
            next(memory for memory in by_count[count] if memory.device == device) for device, count in resident.items()
        ]
        return tuple(found), {d: n for d, n in resident.items() if n < self.sizes.config.num_layers}


def fit(question: Question, *, order: str, options: MemoryOptions, available: Mapping[str, int]) -> Fit:
    """Return how to run a rollout within ``available`` bytes per device, or raise ``DoesNotFit`` with what would help.

    A budget lowers what is available.
    """
    budget = int(options.budget_gib * GIB)
    limits = {device: min(budget, size) if budget else size for device, size in available.items()}
    if options.offload == "on" and not question.movable:
        log.warning("offload=on has no effect: the weights were made on the device and stay there")
        options = replace(options, offload="off")
    predicted, resident = question.predict(question.placed(order), options, limits=limits)
    for memory in predicted:
        if memory.peak_bytes > limits[memory.device]:
            limit = limits[memory.device]
            remedies = _remedies(question, memory, order=order, options=options)
            raise refuse(memory, limit=limit, budget=bool(budget) and limit == budget, remedies=remedies)
    return Fit(options=options, resident=resident, predicted=predicted)


def _remedies(question: Question, found: DeviceMemory, *, order: str, options: MemoryOptions) -> list[Remedy]:
    """Return the changes that lower a device's peak, each on top of those before it."""
    remedies: list[Remedy] = []
    peak = found.peak_bytes
    movable = question.movable and found.device != "cpu"
    for words, changed, changed_order in remedies_for(options, order=order, movable=movable):
        nothing = {lane.device: 0 for lane in question.placed(order).lanes}
        predicted, _ = question.predict(question.placed(changed_order), changed, limits=nothing)
        now = next(memory.peak_bytes for memory in predicted if memory.device == found.device)
        if now < peak:
            remedies.append(Remedy(words=words, peak_bytes=now))
            peak = now
    return remedies


def available_to(backbone: Backbone, devices: Iterable[str]) -> dict[str, int]:
    """Return what a rollout may hold on each device: what is free, and what its weights there take already."""
    return {name: free_bytes(name) + weights_on(backbone, torch.device(name)) for name in devices}


def fit_run(
    backbone: Backbone,
    graph: TaskGraph,
    *,
    spec: RolloutSpec,
    batch: int,
    devices: DevicePlan,
    placed: Callable[[str], Placement],
    pages: PagePlan | None = None,
    video: RolloutSpec | None = None,
) -> Fit:
    """Return how ``graph`` is run with the memory that there is now, or raise ``DoesNotFit``.

    ``placed`` places it in the order that it is given. ``video`` says how many latents and anchors are held, if not
    those of ``spec``.
    """
    if devices.ray_address:  # each machine's memory is its own matter
        if devices.memory.offload == "on":
            log.warning("offload=on has no effect with ray_address: lanes there hold all of their weights")
        return Fit(options=devices.memory)
    names = {lane.device for lane in placed(devices.order).lanes}
    streaming = {name: blocks_on(backbone, torch.device(name)) for name in names}
    question = Question(
        graph=graph,
        spec=spec,
        sizes=sizes_of(backbone),
        placed=placed,
        pages=pages,
        batch=batch,
        video=video,
        movable=device_of(backbone).type == "cpu",
        already={name: count for name, count in streaming.items() if count is not None},
    )
    return fit(question, order=devices.order, options=devices.memory, available=available_to(backbone, names))
