"""A block's parts, compiled once and used by every block.

Attention is called between the parts, so each has a fixed token count and nothing is compiled again as the history
grows. A part's parameters are inputs of its compiled code, not constants of it, so one compilation serves all blocks.
"""

import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from ..graph.task import Role
from .transformer import Block, BlockParts

log = logging.getLogger(__name__)


PLAIN = BlockParts(Block.before, Block.between, Block.finish)


@cache
def compiled_parts(device: torch.device, role: Role, size: tuple[int, ...], *, backend: Any = "inductor") -> BlockParts:
    """Return the parts compiled for one kind of forward; the process keeps them: a later rollout compiles nothing.

    ``size`` is that of the latents, [B, C, F, h, w]. torch.compile gives up after 8 recompilations of one function.
    Devices, roles and sizes each need code of their own, so each gets a copy of the function. Without a working
    compiler the parts run eagerly, after one warning.
    """
    label = f"{role}_{'x'.join(map(str, size))}_{str(device).replace(':', '')}"
    return BlockParts(*(_Compiled(part, label, backend) for part in (PLAIN.before, PLAIN.between, PLAIN.finish)))


class _Compiled:
    """A compiled function that becomes an eager one if it cannot be compiled."""

    def __init__(self, function: Any, label: str, backend: Any) -> None:
        code = function.__code__.replace(co_name=f"{function.__name__}_{label}")
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        self._eager: Callable[..., Any] = function
        self._compiled: Callable[..., Any] | None = torch.compile(
            own, fullgraph=True, dynamic=False, backend=backend, options=_options(backend)
        )

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            return self._eager(*args)
        try:
            return self._compiled(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            _warn(type(error).__name__)
            log.debug("what the compiler said", exc_info=error)
            self._compiled = None
            return self._eager(*args)


def _options(backend: Any) -> dict[str, bool] | None:
    """Return what has each device choose the same kernels for sums, where the compiler knows how.

    Else it may time candidates on each device, and a video's last digits may depend on which devices it ran on.
    """
    if backend != "inductor":
        return None
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else None


@cache
def _warn(reason: str) -> None:
    """Warn once per process and reason."""
    log.warning("blocks cannot be compiled here (%s) and run eagerly, which is slower; set compile='off'", reason)


def gave_up() -> bool:
    """Return whether something could not be compiled in this process, and runs eagerly."""
    return _warn.cache_info().currsize > 0


def num_compilations() -> int:
    """Return how many graphs this process has compiled; a rollout in its steady state adds none."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
