"""Two denoising forwards as one batch: the linears of both in one product, each with its own bank and stage.

A product of more rows may round its sums differently, so bytes are not those of the forwards alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flow import timestep
from ..graph.task import ForwardTask, Slot
from ..model.transformer import TextContext
from .graphs import Inputs
from .ops import Homes, LaneState, RunInputs, Values, latents_of, stepped, text_of
from .pair_view import PairView

Outputs = tuple[dict[Slot, Any], list[Callable[[], None]]]
"""What a task writes, and what has to be looked at once its device is done."""


def denoise_pair(
    tasks: Sequence[ForwardTask], inputs: RunInputs, state: LaneState, values: Values, homes: Homes
) -> tuple[Outputs, ...]:
    """Take the latents of two chunks one level down each, as ``ops.denoise`` does."""
    latents = [latents_of(task, inputs, state, values) for task in tasks]
    frames = [list(inputs.frames_of(task)) for task in tasks for _ in range(inputs.batch)]
    text, prompt = text_of(tasks[0], inputs=inputs, state=state, frame=frames[0][0])
    views = [state.banks.open(task, homes) for task in tasks]
    v = state.forward.pair(
        tasks,
        Inputs(torch.cat(latents), _timesteps(tasks, inputs, state), state.lane.ops.put(torch.tensor(frames))),
        text=_twice(text, state),
        prompt=prompt,
        views=views,
        view=PairView(views, state.attention.attend),
    )
    found = []
    for task, x, own_v in zip(tasks, latents, v.chunk(2), strict=True):
        state.banks.close(task)
        outputs = stepped(task, x, own_v, inputs=inputs, state=state)
        checks, state.checks = state.checks, []
        found.append((outputs, checks))
    return tuple(found)


def _timesteps(tasks: Sequence[ForwardTask], inputs: RunInputs, state: LaneState) -> Tensor:
    """Return the noise level of every latent frame, [2B, F]."""
    size = (inputs.batch, len(inputs.frames_of(tasks[0])))
    levels = [timestep(inputs.spec.stages.sigmas[task.stage]) for task in tasks]
    return torch.cat([torch.full(size, level, dtype=state.dtype, device=state.lane.device) for level in levels])


def _twice(text: TextContext, state: LaneState) -> TextContext:
    """Return a prompt for both halves, copied once: not every kernel reads a batch that is one row in truth."""
    if id(text) not in state.pair_texts:
        state.pair_texts[id(text)] = TextContext(
            text.role, tuple((torch.cat([k, k]), torch.cat([v, v])) for k, v in text.pairs)
        )
    return state.pair_texts[id(text)]
