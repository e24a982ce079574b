"""A small random backbone and the rollouts that fit it, for every test of the engine."""

import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from flashforward_core.engine.events import AnchorBlockReady, ChunkReady, Event
from flashforward_core.graph.task import TaskGraph
from flashforward_core.model.config import WanConfig
from flashforward_core.model.roles import Backbone, attach_roles, models_by_role
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import AnchorPlan, History, RolloutSpec, StageSchedule, VideoShape

TINY = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)


# The gate tries the same examples every time, so that it fails for a change and not by chance.
settings.register_profile("gate", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; the tests of ctrl-C need it back
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Rig:
    """Makes what the engine's tests run: weights, prompts, specs and orders."""

    def model(self, dtype: torch.dtype) -> CausalWanTransformer:
        """Return random weights whose roles differ in embedding and LoRA."""
        torch.manual_seed(0)
        model = CausalWanTransformer(TINY)
        for factor in attach_roles(model, rank=3, alpha=3):
            torch.nn.init.normal_(factor, std=0.2)
        torch.nn.init.normal_(model.role_embedding.weight)
        return model.to(dtype).requires_grad_(False)

    def backbone(
        self, dtype: torch.dtype = torch.float32, *, model: CausalWanTransformer | None = None, merged: bool = False
    ) -> Backbone:
        models = models_by_role(model or self.model(dtype), merged=merged)
        return Backbone(
            config=TINY, models=models, vae=None, text_encoder=None, fingerprint="tiny", dtype=dtype, attention="auto"
        )

    def texts(self, dtype: torch.dtype = torch.float32, *, count: int = 2, batch: int = 1) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        size = (batch, TINY.text_len, TINY.text_dim)
        return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]

    def spec(self, schedule: str = "flashforward", *, latent_frames: int = 14, **changes: object) -> RolloutSpec:
        """14 latent frames are 5 chunks, the last one short, and 5 anchors in 3 blocks; histories end within it."""
        spec = RolloutSpec(
            shape=VideoShape(width=32, height=32, latent_frames=latent_frames),
            schedule=schedule,
            stages=StageSchedule(starts=(1.0, 0.5)),
            anchors=AnchorPlan(stride=3, block_frames=2),
            history=History(chunks=2, planner_blocks=1),
            seed=7,
        )
        return replace(spec, **changes)

    def shuffled(self, graph: TaskGraph, *, seed: int) -> list[str]:
        """Return task ids in a random topological order."""
        draw = random.Random(seed)
        missing = {task.id: len(graph.parents(task)) for task in graph.tasks}
        children: dict[str, list[str]] = {}
        for task in graph.tasks:
            for parent in graph.parents(task):
                children.setdefault(parent.id, []).append(task.id)
        ready = [task_id for task_id, count in missing.items() if not count]
        order = []
        while ready:
            order.append(ready.pop(draw.randrange(len(ready))))
            for child in children.get(order[-1], ()):
                missing[child] -= 1
                if not missing[child]:
                    ready.append(child)
        assert len(order) == len(graph)
        return order

    def video(self, events: Iterable[Event]) -> Tensor:
        """Return the finished latents [B, C, F, h, w]; every chunk must have come once, in any order."""
        chunks = sorted((event for event in events if isinstance(event, ChunkReady)), key=lambda event: event.index)
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        return torch.cat([chunk.latents for chunk in chunks], dim=2)

    def anchors(self, events: Sequence[Event]) -> Tensor | None:
        """Return the finished anchors' latents [B, C, anchors, h, w], or None without any."""
        blocks = {event.index: event.latents for event in events if isinstance(event, AnchorBlockReady)}
        return torch.cat([blocks[index] for index in sorted(blocks)], dim=2) if blocks else None


@pytest.fixture(scope="session")
def rig() -> Rig:
    torch.set_num_threads(1)
    return Rig()
