"""Weights in parts, one per process: a transformer block is whole only while it runs (FSDP2).

This is torch's ``fully_shard`` itself, since accelerate shards on GPUs only: here the same code runs on CPUs, in tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flashforward_core.model.transformer import Block, CausalWanTransformer

Part = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of its parameter, and this process's part of it."""


def shard(module: nn.Module, *, device: torch.device) -> None:
    """Leave each process its part of every parameter of ``module``, on ``device``, in place.

    What uses the weights outside of ``forward`` (a prompt's keys and values) gathers them too. Optimisers are made
    after this. Raises ``ValueError`` for a single process and for PyTorch before 2.6.
    """
    try:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError as error:
        raise ValueError(f"shard=True needs PyTorch 2.6, this is {torch.__version__}; train without it") from error
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise ValueError("shard=True is for several processes; start them with torchrun, or leave it out")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (part for part in module.modules() if isinstance(part, Block)):
        fully_shard(block, mesh=mesh)
        register_fsdp_forward_method(block, "text_pair")
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    if isinstance(module, CausalWanTransformer):
        register_fsdp_forward_method(module, "text_context")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor in its own memory; of a whole one, itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor``, a part as of ``local``, as a part of what ``parameter`` is a part of."""
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gather(module: nn.Module, *, keep: bool) -> list[Part]:
    """Put whole tensors, on the CPU, in the place of parts, and return the parts that were there.

    Every process must call it, and only those with ``keep`` get the tensors: the others' modules stay as they are.
    """
    replaced = []
    with torch.no_grad():
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if isinstance(parameter, DTensor):
                    whole = parameter.full_tensor()
                    if keep:
                        replaced.append((owner, name, parameter))
                        owner._parameters[name] = nn.Parameter(whole.cpu(), requires_grad=parameter.requires_grad)
    return replaced


@contextmanager
def whole(module: nn.Module, *, keep: bool) -> Iterator[None]:
    """Have the module hold whole tensors for a while, where ``keep`` says so; every process must take part."""
    replaced = gather(module, keep=keep)
    try:
        yield
    finally:
        for owner, name, part in replaced:
            owner._parameters[name] = part
