"""Tensors and modules as bytes that other processes can map without a copy."""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor's bytes, of any dtype and device, as NumPy knows them."""

    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(tensor: Tensor) -> Packed:
    """Return the bytes of ``tensor``; those of a contiguous one on the CPU are its own memory, not a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Packed(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def unpack(packed: Packed) -> Tensor:
    """Return the tensor over the same memory, which may be mapped read-only: never write to it."""
    return torch.from_numpy(packed.data).view(packed.dtype).reshape(packed.shape)


@dataclass(frozen=True, slots=True)
class PackedModules:
    """Modules without their tensors, and the tensors; what is shared stays shared."""

    skeleton: bytes
    tensors: tuple[Packed, ...]
    parameters: tuple[bool, ...]
    """Whether each tensor is a parameter."""


class _Taker(pickle.Pickler):
    """Pickles an object and sets its tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[tuple[object, ...], tuple[int, Tensor]] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        key = (obj.data_ptr() or id(obj), obj.dtype, tuple(obj.shape), obj.stride(), isinstance(obj, nn.Parameter))
        return self.tensors.setdefault(key, (len(self.tensors), obj))[0]


class _Giver(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def pack_modules(modules: Any) -> PackedModules:
    """Take modules, or a structure of them, apart for another process of the same version."""
    file = io.BytesIO()
    taker = _Taker(file)
    taker.dump(modules)
    tensors = [tensor for _, tensor in taker.tensors.values()]
    parameters = tuple(isinstance(tensor, nn.Parameter) for tensor in tensors)
    return PackedModules(file.getvalue(), tuple(map(pack, tensors)), parameters)


def unpack_modules(packed: PackedModules) -> Any:
    """Put modules together over mapped memory: frozen, for inference only."""
    with torch.inference_mode(False), torch.no_grad():
        tensors = [
            nn.Parameter(unpack(one), requires_grad=False) if is_parameter else unpack(one)
            for one, is_parameter in zip(packed.tensors, packed.parameters, strict=True)
        ]
        return _Giver(io.BytesIO(packed.skeleton), tensors).load()
