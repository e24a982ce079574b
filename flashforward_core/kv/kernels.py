"""Triton kernels of the KV policies; each has a torch twin that is right everywhere.

Nothing of size queries × keys is written to memory, and nothing waits for the host. On CUDA block sizes are measured
when a kernel first meets sizes of a class, and kept (``Tuned``).
Letters: B batch, G groups of queries, R queries of a group, L queries, N keys, H heads, D head dim.
"""

# ruff: noqa: ANN001, ANN202 -- a kernel's arguments are pointers and numbers of Triton's own

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


class Tuned:
    """A kernel with block sizes to choose between.

    On CUDA the fastest are measured once per class of sizes (the kernel's argument ``SIZE``), which waits for the
    device; Triton keeps them on disk, so that later runs on the machine use the same ones and give the same bytes.
    Float32 has small blocks without a choice: it fills shared memory, and large blocks take a minute to compile.
    Where Triton's interpreter runs the kernel nothing is measured, and the first sizes serve.
    """

    SMALL = triton.Config({"BLOCK_Q": 32, "BLOCK_K": 32}, num_warps=4, num_stages=2)

    def __init__(self, kernel: Any, configs: Sequence[Any]) -> None:
        self._lock = threading.Lock()  # lanes are threads, and Triton's tuner keeps the arguments of a launch
        self._fixed: Mapping[str, int] = configs[0].kwargs if isinstance(kernel, InterpretedFunction) else {}
        extra: dict[str, Any] = {"prune_configs_by": {"early_config_prune": self._suitable}}
        if "cache_results" in inspect.signature(triton.autotune).parameters:  # not in Triton 3.1, PyTorch 2.5's
            extra["cache_results"] = True
        tuner = triton.autotune([*configs, self.SMALL], ["SIZE", "PAD"], **extra)
        self._kernel = kernel if self._fixed else tuner(kernel)

    def launch(self, grid: Callable[[Mapping[str, int]], tuple[int, ...]], *args: Any, **constants: Any) -> None:
        """Run the kernel over ``grid``, which is given the block sizes."""
        with self._lock:
            self._kernel[grid](*args, **constants, **self._fixed)

    def _suitable(self, configs: list[Any], args: Mapping[str, Any], **constants: Any) -> list[Any]:
        return [self.SMALL] if args["k_ptr"].dtype == torch.float32 else configs


def block_sizes(*sizes: tuple[int, int]) -> list[Any]:
    """Return Triton's configurations with these queries and keys per block."""
    return [
        triton.Config({"BLOCK_Q": queries, "BLOCK_K": keys}, num_warps=8 if queries * keys > 8192 else 4, num_stages=3)
        for queries, keys in sizes
    ]


def size_class(queries: int, keys: int) -> int:
    """Return a number that sizes share whose queries and keys have the same powers of two."""
    return queries.bit_length() * 64 + keys.bit_length()


BLOCKS = ((64, 64), (64, 128), (128, 64), (32, 64))


@triton.jit(do_not_specialize=["SIZE"])
def _log_sums(
    q_ptr, k_ptr, bias_ptr, out_ptr, num_queries, num_keys, scale, SIZE,
    HAS_BIAS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write log Σ exp of each query's logits: q [BH, Q, D], k [BH, N, D], bias [BH, N] -> out [BH, Q]."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, PAD)
    q_at = q_ptr + (head * num_queries + rows[:, None]) * DIM + dims[None, :]
    q = tl.load(q_at, mask=(rows[:, None] < num_queries) & (dims[None, :] < DIM), other=0.0)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_at = k_ptr + (head * num_keys + keys[None, :]) * DIM + dims[:, None]
        k = tl.load(k_at, mask=(keys[None, :] < num_keys) & (dims[:, None] < DIM), other=0.0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_BIAS:
            logits += tl.load(bias_ptr + head * num_keys + keys, mask=keys < num_keys, other=0.0)[None, :]
        logits = tl.where(keys[None, :] < num_keys, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # all keys so far are hidden
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), axis=1)
        top = higher
    tl.store(out_ptr + head * num_queries + rows, top + tl.log(total), mask=rows < num_queries)


@triton.jit(do_not_specialize=["SIZE"])
def _mass(
    q_ptr, k_ptr, bias_ptr, log_sum_ptr, out_ptr, num_groups, group_queries, num_keys, scale, SIZE,
    HAS_BIAS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write each key's mean weight over a group's queries: out [BH, G, N]. One program per keys, group and head."""
    group = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    dims = tl.arange(0, PAD)
    k_at = k_ptr + (head * num_keys + keys[None, :]) * DIM + dims[:, None]
    k = tl.load(k_at, mask=(keys[None, :] < num_keys) & (dims[:, None] < DIM), other=0.0)
    bias = tl.zeros((BLOCK_K,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head * num_keys + keys, mask=keys < num_keys, other=0.0)
    total = tl.zeros((BLOCK_K,), tl.float32)
    first = (head * num_groups + group) * group_queries
    for start in range(0, group_queries, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q_at = q_ptr + (first + rows[:, None]) * DIM + dims[None, :]
        q = tl.load(q_at, mask=(rows[:, None] < group_queries) & (dims[None, :] < DIM), other=0.0)
        log_sum = tl.load(log_sum_ptr + first + rows, mask=rows < group_queries, other=float("inf"))
        logits = tl.dot(q, k, input_precision="ieee") * scale + bias[None, :]
        total += tl.sum(tl.exp(logits - log_sum[:, None]), axis=0)
    at = out_ptr + (head * num_groups + group) * num_keys + keys
    tl.store(at, total / group_queries, mask=keys < num_keys)


_LOG_SUMS = Tuned(_log_sums, block_sizes(*BLOCKS))
_MASS = Tuned(_mass, block_sizes(*BLOCKS, (16, 64)))  # a group may have few queries


def attention_mass_triton(q_BGRHD: Tensor, k_BNHD: Tensor, *, bias_BHN: Tensor | None = None) -> Tensor:
    """Return the mean over each group of softmax(q·k/√d + bias), float32 [B, G, N, H]; as ``attention_mass_torch``.

    Two passes over q and k: the log-sum of every query, then each key's sum over queries; no atomics, so the same
    bytes every time. Queries take the keys' dtype.
    """
    batch, groups, queries, heads, dim = q_BGRHD.shape
    keys = k_BNHD.shape[1]
    q = q_BGRHD.to(k_BNHD.dtype).permute(0, 3, 1, 2, 4).contiguous()
    k = k_BNHD.transpose(1, 2).contiguous()
    bias = k if bias_BHN is None else bias_BHN.to(torch.float32).expand(batch, heads, keys).contiguous()
    fixed = {"HAS_BIAS": bias_BHN is not None, "DIM": dim, "PAD": max(16, triton.next_power_of_2(dim))}
    log_sum = torch.empty(batch * heads, groups * queries, dtype=torch.float32, device=k.device)
    _LOG_SUMS.launch(
        lambda meta: (triton.cdiv(groups * queries, meta["BLOCK_Q"]), batch * heads),
        *(q, k, bias, log_sum, groups * queries, keys, dim**-0.5, size_class(groups * queries, keys)),
        **fixed,
    )
    out = torch.empty(batch, heads, groups, keys, dtype=torch.float32, device=k.device)
    _MASS.launch(
        lambda meta: (triton.cdiv(keys, meta["BLOCK_K"]), groups, batch * heads),
        *(q, k, bias, log_sum, out, groups, queries, keys, dim**-0.5, size_class(queries, keys)),
        **fixed,
    )
    return out.permute(0, 2, 3, 1)


@triton.jit(do_not_specialize=["SIZE"])
def _nearest(
    q_ptr, k_ptr, scale_ptr, out_ptr, num_queries, num_keys, SIZE,
    DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the index of the key with the largest code product · key scale; the first of equals."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, PAD)
    q_at = q_ptr + (head * num_queries + rows[:, None]) * DIM + dims[None, :]
    q = tl.load(q_at, mask=(rows[:, None] < num_queries) & (dims[None, :] < DIM), other=0)
    best = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    found = tl.zeros((BLOCK_Q,), tl.int32)
    for start in range(0, num_keys, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_at = k_ptr + (head * num_keys + keys[None, :]) * DIM + dims[:, None]
        k = tl.load(k_at, mask=(keys[None, :] < num_keys) & (dims[:, None] < DIM), other=0)
        scale = tl.load(scale_ptr + head * num_keys + keys, mask=keys < num_keys, other=-1.0)
        scores = tl.dot(q, k).to(tl.float32) * scale[None, :]
        scores = tl.where(scale[None, :] >= 0, scores, -float("inf"))
        here = tl.max(scores, axis=1)
        index = start + tl.argmax(scores, axis=1)
        found = tl.where(here > best, index, found)
        best = tl.maximum(best, here)
    tl.store(out_ptr + head * num_queries + rows, found, mask=rows < num_queries)


_NEAREST = Tuned(_nearest, block_sizes(*BLOCKS))


def nearest_codes_triton(q_BLHE: Tensor, k_BNHE: Tensor, scale_BNH: Tensor) -> Tensor:
    """Return the index int64 [B, L, H] of the key with the largest product of 8-bit codes times its scale.

    A negative scale marks a key that is not to be found. Codes are integers of at most 8 signed bits, in any dtype.
    """
    batch, queries, heads, dim = q_BLHE.shape
    keys = k_BNHE.shape[1]
    q, k = (x.to(torch.int8).transpose(1, 2).contiguous() for x in (q_BLHE, k_BNHE))
    scale = scale_BNH.to(torch.float32).transpose(1, 2).contiguous()
    out = torch.empty(batch, heads, queries, dtype=torch.int32, device=q.device)
    _NEAREST.launch(
        lambda meta: (triton.cdiv(queries, meta["BLOCK_Q"]), batch * heads),
        *(q, k, scale, out, queries, keys, size_class(queries, keys)),
        **{"DIM": dim, "PAD": max(32, triton.next_power_of_2(dim))},
    )
    return out.transpose(1, 2).to(torch.int64)
