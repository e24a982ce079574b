"""Which forwards may run as one batch of two. Nothing here needs torch."""

from collections.abc import Callable

from ..graph.task import ForwardTask, Kind, Role
from ..specs import RolloutSpec

Pairable = Callable[[ForwardTask, ForwardTask], bool]
"""Whether two forwards that are both ready may run as one."""


def pairable(spec: RolloutSpec) -> Pairable:
    """Return what tells pairs among a rollout's forwards: chunks of one length and one prompt, at any stages.

    Raises ``ValueError`` for rollouts whose forwards have an attention of their own.
    """
    for name, odd in (("kv_policy", spec.compacts), ("sparse", spec.sparse is not None)):
        if odd:
            raise ValueError(f"batch_diagonal=True does not go with {name}; use batch_diagonal=False")

    def alike(first: ForwardTask, second: ForwardTask) -> bool:
        if not all(task.kind is Kind.DENOISE and task.role is Role.RENDERER for task in (first, second)):
            return False
        one, other = spec.chunk(first.index), spec.chunk(second.index)
        return len(one) == len(other) and spec.prompt_at(one.start) == spec.prompt_at(other.start)

    return alike
