"""Weight files of every format to named tensors: safetensors, PyTorch pickles (weights-only), GGUF.

Nothing is copied that can be mapped: safetensors and pickles are memory-mapped, so a file's tensors cost no RAM until
they are converted, and then one at a time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .files import read_json, read_tensors, require

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader, ReaderTensor

WEIGHTS = "diffusion_pytorch_model"
PICKLES = (".pt", ".pth", ".ckpt", ".bin")
SAFETENSORS = (".safetensors", ".sft")
GGUF = ".gguf"
FILE_SUFFIXES = (*SAFETENSORS, *PICKLES, GGUF)
"""Single files that ``read_state`` understands."""

GGUF_SHAPE = "comfy.gguf.orig_shape."  # metadata field: the shape of a tensor that GGUF had to flatten


def read_state(path: Path, *, what: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a single file: what it holds by name, and a safetensors file's metadata.

    ``dtype`` is that of tensors whose format torch does not know (quantised GGUF); others keep their own. A missing
    file raises ``FileNotFoundError``; a damaged or foreign one ``ValueError`` naming it, what was expected and found.
    """
    suffix = path.suffix.lower()
    if suffix in SAFETENSORS:
        tensors, metadata = read_tensors(path, what=what)
        return dict(tensors), metadata
    if suffix == GGUF:
        return read_gguf(path, what=what, dtype=dtype), {}
    if suffix in PICKLES:
        return read_pickle(path, what=what), {}
    raise ValueError(f"{path} is not {what}: expected one of {', '.join(FILE_SUFFIXES)}, found {suffix or 'no suffix'}")


def read_pickle(path: Path, *, what: str) -> dict[str, Any]:
    """Read a dict that ``torch.save`` wrote, memory-mapped, without running anything that it contains."""
    require(path, what=what)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_map(path))
    except Exception as error:  # a damaged or foreign pickle fails in any way
        size = path.stat().st_size
        raise ValueError(
            f"{path} is not {what}: expected a PyTorch checkpoint of plain tensors, found {size} bytes that do not "
            "load as one"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} is not {what}: expected a dict of tensors, found a {type(state).__name__}")
    return dict(state)


def _can_map(path: Path) -> bool:
    """Whether it is a zip, which torch can map; checkpoints from before torch 1.6 are not."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def read_shards(folder: Path, *, what: str) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """Read ``diffusion_pytorch_model*.safetensors`` of a diffusers folder, whole or in shards listed by an index.

    Returns the tensors and the files they came from. A missing or damaged file raises an error that names it.
    """
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if not index.exists():
        whole = folder / f"{WEIGHTS}.safetensors"
        return read_tensors(whole, what=what)[0], (whole,)
    listed = read_json(index, what=f"the index of {what}").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} has no weight_map, so it is not the index of {what}")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SAFETENSORS):
            raise ValueError(
                f"{index}: weight_map has {name!r}; expected the bare name of a .safetensors file beside it"
            )
    shards = tuple(folder / name for name in sorted(set(listed.values())))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read_tensors(shard, what=f"a part of {what}")[0]
    return tensors, (index, *shards)


def read_gguf(path: Path, *, what: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a GGUF file through the ``gguf`` package, one tensor at a time; quantised ones become ``dtype``."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"{path} is a GGUF file, which needs the gguf package; run: pip install gguf") from error
    size = require(path, what=what).stat().st_size
    try:
        reader = GGUFReader(path)
        return {tensor.name: _gguf_tensor(tensor, reader, dtype=dtype) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(
            f"{path} is not {what}: expected a complete GGUF file, found {size} bytes ({error})"
        ) from error


def _gguf_tensor(tensor: "ReaderTensor", reader: "GGUFReader", *, dtype: torch.dtype) -> Tensor:
    from gguf import GGMLQuantizationType as Kind
    from gguf import dequantize

    kept = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    values = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W"))
    shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest axis first
    original = reader.get_field(GGUF_SHAPE + tensor.name)
    if original is not None:
        shape = [int(original.parts[index][0]) for index in original.data]
    return values.reshape(shape).to(kept.get(tensor.tensor_type, dtype))
