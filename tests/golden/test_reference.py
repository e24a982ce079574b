"""The oracle and a forward that reads kept keys and values agree, whatever the schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from flashforward_core.flow import predict_x0, renoise, timestep
from flashforward_core.graph.schedules import SCHEDULES, build_graph
from flashforward_core.graph.task import ForwardTask, Kind, Role, Slot, Space, TaskGraph
from flashforward_core.model.config import WanConfig
from flashforward_core.model.reference import (
    Reference,
    latent_slot,
    needed_tasks,
    reference_rollout,
    rendered,
    task_frames,
    task_noise,
    visible_frames,
)
from flashforward_core.model.roles import attach_roles
from flashforward_core.model.transformer import CausalWanTransformer, KeyValue
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)
TOKENS = 4  # of a latent frame of 4x4

# Both sides compute the same sums in float64, in another order: errors of some 1e-13 at values near 1.
EXACT = 1e-10


@pytest.fixture(scope="module")
def model() -> CausalWanTransformer:
    """A random float64 model whose roles differ in embedding and LoRA."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CausalWanTransformer(TINY).double()
    for factor in attach_roles(model, rank=3, alpha=3):
        torch.nn.init.normal_(factor, std=0.2)
    torch.nn.init.normal_(model.role_embedding.weight)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, TINY.text_len, TINY.text_dim, generator=generator, dtype=torch.float64) for _ in range(2)]


def small_spec(schedule: str, **changes: object) -> RolloutSpec:
    """14 latent frames: 5 chunks, the last one short; 5 anchors in 2 blocks; the history and its end are reached."""
    spec = RolloutSpec(
        shape=VideoShape(width=32, height=32, latent_frames=14),
        schedule=schedule,
        stages=StageSchedule(starts=(1.0, 0.5)),
        anchors=AnchorPlan(stride=3),
        history=History(chunks=2, planner_blocks=1),
        prompts=(PromptSpan(), PromptSpan(start=6, prompt=1)),
        seed=7,
    )
    return replace(spec, **changes)


@dataclass
class KeptKV:
    """The simplest KV context: what each slot holds is kept as a list over blocks, and concatenated to be read."""

    read: list[list[KeyValue]]
    own: list[KeyValue] = field(default_factory=list)

    def extend(self, block: int, k_BNHD: Tensor, v_BNHD: Tensor) -> KeyValue:
        assert block == len(self.own)
        self.own.append((k_BNHD, v_BNHD))
        pairs = [*(kept[block] for kept in self.read), (k_BNHD, v_BNHD)]
        return torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)


def publish(spec: RolloutSpec, task: ForwardTask, own: list[KeyValue], kept: dict[Slot, list[KeyValue]]) -> None:
    for slot in task.writes:
        if slot.space is Space.KV:
            kept[slot] = own
        elif slot.space is Space.ANCHOR_KV:
            place = spec.anchor_blocks()[task.index].index(slot.index)
            at = slice(place * TOKENS, (place + 1) * TOKENS)
            kept[slot] = [(k[:, at], v[:, at]) for k, v in own]


def cached_rollout(
    model: CausalWanTransformer,
    spec: RolloutSpec,
    texts: list[Tensor],
    graph: TaskGraph,
    *,
    misplaced: Mapping[str, int] = MappingProxyType({}),
) -> dict[Slot, Tensor]:
    """Run a graph task by task, each forward reading the kept KV of exactly the slots that it lists.

    ``misplaced`` is the mutation of a task's positions, in latent frames.
    """
    kept: dict[Slot, list[KeyValue]] = {}
    latents: dict[Slot, Tensor] = {}
    sigmas = spec.stages.sigmas
    for task in graph.tasks:
        start, frames = latent_slot(task), task_frames(spec, task)
        if start.level == 0:
            latents[start] = task_noise(spec, task, stage=0, seeds=[spec.seed]).double()
        x = latents[start]
        context = KeptKV([kept[slot] for slot in task.reads if slot in kept])
        v = model(
            x,
            timestep_BF=torch.full((1, len(frames)), timestep(sigmas[task.stage]), dtype=torch.float64),
            text=model.text_context(texts[spec.prompt_at(frames[0])], task.role),
            frames=torch.tensor(frames) + misplaced.get(task.id, 0),
            role=task.role,
            kv=context,
        )
        publish(spec, task, context.own, kept)
        if task.kind is Kind.DENOISE:
            x0 = predict_x0(x, v, sigma=sigmas[task.stage])
            last = task.stage == spec.stages.num_stages - 1
            noise = task_noise(spec, task, stage=task.stage + 1, seeds=[spec.seed])
            latents[replace(start, level=task.stage + 1)] = (
                x0 if last else renoise(x0, noise, sigma=sigmas[task.stage + 1])
            )
    return latents


def worst(one: Mapping[Slot, Tensor], other: Mapping[Slot, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[slot] - other[slot]).abs().max()) for slot in one)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_kept_kv_equals_full_recompute(schedule: str, model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec(schedule)
    graph = build_graph(spec, decode=False)
    assert worst(cached_rollout(model, spec, texts, graph), reference_rollout(model, spec, texts)) < EXACT


def test_kept_kv_equals_full_recompute_with_a_sink_and_a_cut(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    cut = (PromptSpan(), PromptSpan(start=9, prompt=1, hard_cut=True))
    for spec in (small_spec("self_forcing", history=History(chunks=2, sink=3)), small_spec("hiar", prompts=cut)):
        graph = build_graph(spec, decode=False)
        assert worst(cached_rollout(model, spec, texts, graph), reference_rollout(model, spec, texts)) < EXACT


def test_dropping_one_kv_edge_changes_the_video(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec("flashforward")
    graph = build_graph(spec, decode=False)
    victim = graph.by_id()["renderer/denoise/c2/s0"]
    lost = next(slot for slot in victim.reads if slot.space is Space.KV)
    blind = replace(victim, reads=tuple(slot for slot in victim.reads if slot != lost))
    mutated = TaskGraph(tuple(blind if task is victim else task for task in graph.tasks), graph.inputs)
    whole, cut = (rendered(spec, reference_rollout(model, spec, texts, graph=g)) for g in (graph, mutated))
    assert torch.equal(whole[:, :, :6], cut[:, :, :6])
    assert (whole - cut).abs().max() > 1e-4


@pytest.mark.parametrize("victim", ["planner/commit/b0", "renderer/denoise/c1/s0", "renderer/denoise/c4/s1"])
def test_positions_off_by_one_chunk_change_the_video(
    victim: str, model: CausalWanTransformer, texts: list[Tensor]
) -> None:
    spec = small_spec("flashforward")
    graph = build_graph(spec, decode=False)
    off = cached_rollout(model, spec, texts, graph, misplaced={victim: spec.chunk_frames})
    assert worst(off, reference_rollout(model, spec, texts)) > 1e-4


def test_rollout_depends_on_seed_and_prompt(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec("last_stage", shape=VideoShape(width=32, height=32, latent_frames=6), prompts=(PromptSpan(),))
    base = rendered(spec, reference_rollout(model, spec, texts))
    assert base.shape == (1, 16, 6, 4, 4)
    assert (rendered(spec, reference_rollout(model, replace(spec, seed=8), texts)) - base).abs().max() > 1e-2
    assert (rendered(spec, reference_rollout(model, spec, texts[::-1])) - base).abs().max() > 1e-4


def test_batch_rows_are_rollouts_of_their_own_seeds(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec("flashforward", shape=VideoShape(width=32, height=32, latent_frames=6), prompts=(PromptSpan(),))
    both = rendered(spec, reference_rollout(model, spec, [texts[0].expand(2, -1, -1)], seeds=(7, 8)))
    for row, seed in enumerate((7, 8)):
        alone = rendered(spec, reference_rollout(model, replace(spec, seed=seed), texts))
        assert (both[row : row + 1] - alone).abs().max() < EXACT


def test_given_anchors_replace_the_planner(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec("flashforward")
    planned = reference_rollout(model, spec, texts)
    anchors = {slot: x for slot, x in planned.items() if slot.space is Space.ANCHOR_LATENT and slot.level == 2}
    graph = build_graph(spec, decode=False, given_anchors=True)
    again = reference_rollout(model, spec, texts, graph=graph, given=anchors)
    assert torch.equal(rendered(spec, planned), rendered(spec, again))


def test_a_page_sees_the_anchors_it_lists_and_no_others() -> None:
    spec = small_spec("flashforward")
    graph = build_graph(spec, decode=False)
    task = graph.by_id()["renderer/denoise/c3/s1"]  # latents 9..11: the anchors nearest to 10 are 2, 3, 4
    pages = needed_tasks(graph, task)
    assert [page.id for page in pages] == [
        "planner/commit/b0",
        "renderer/denoise/c0/s1",
        "renderer/denoise/c1/s1",
        "planner/commit/b1",
        "renderer/denoise/c2/s1",
        "renderer/denoise/c3/s1",
    ]
    # Columns: anchors 0-2, chunks 0 and 1, anchors 3-4, chunks 2 and 3. History: 2 chunks, so chunk 0 is out of sight.
    seen = [0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, *[1] * 6]
    assert visible_frames(spec, graph, pages)[-3:].int().tolist() == [seen] * 3


def test_role_of_a_task_is_not_ignored(model: CausalWanTransformer, texts: list[Tensor]) -> None:
    spec = small_spec("flashforward_no_anchors")
    graph = build_graph(spec, decode=False)
    task = graph.by_id()["renderer/denoise/c0/s0"]
    reference = Reference(model=model, spec=spec, graph=graph, texts=texts)
    x = task_noise(spec, task, stage=0, seeds=[0]).double()
    as_planner = model(
        x,
        timestep_BF=torch.full((1, 3), 1000.0, dtype=torch.float64),
        text=model.text_context(texts[0], Role.PLANNER),
        frames=torch.arange(3),
        role=Role.PLANNER,
    )
    assert (reference.velocity(task, {latent_slot(task): x}) - as_planner).abs().max() > 0.1
