"""The packed training forward equals the forwards that inference runs one by one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Kind, Role, Slot, Space
from flashforward_core.model.config import WanConfig
from flashforward_core.model.roles import attach_roles
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer, TextContext
from flashforward_core.specs import AnchorPlan, History, RolloutSpec, VideoShape
from flashforward_core.train import base, sft
from flashforward_core.train.base import crop_offset
from flashforward_core.train.command import sft_steps
from flashforward_core.train.data import LatentPool
from flashforward_core.train.loop import LoopConfig
from flashforward_core.train.packing import GroupedAttention, Packing, dense_attention, pack

pytestmark = pytest.mark.cpu

CONFIG = WanConfig(name="custom", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=16, text_len=8, freq_dim=32)
SIGMA = {Role.PLANNER: 0.7, Role.RENDERER: 0.4}


def tiny_spec(latent_frames: int) -> RolloutSpec:
    return RolloutSpec(
        shape=VideoShape(width=32, height=32, latent_frames=latent_frames),
        anchors=AnchorPlan(stride=4),
        history=History(chunks=2, planner_blocks=1),
    )


def tiny_model() -> CausalWanTransformer:
    torch.manual_seed(0)
    model = CausalWanTransformer(CONFIG)
    attach_roles(model, rank=2, alpha=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.double()


class StoredKV:
    """Keys and values of the slots that a task reads, then its own, which it keeps."""

    def __init__(self, store: dict[Slot, list[tuple[Tensor, Tensor]]], slots: list[Slot]) -> None:
        self.read = [store[slot] for slot in slots]
        self.own: list[tuple[Tensor, Tensor]] = []

    def extend(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.own.append((k, v))
        pairs = [page[block] for page in self.read] + [(k, v)]
        return torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)


@dataclass
class Separate:
    """Runs tasks one by one, on teacher-forced latents, keeping the KV that they publish."""

    model: CausalWanTransformer
    spec: RolloutSpec
    text: dict[Role, TextContext]
    clean: Tensor
    noisy: dict[Role, Tensor]

    def outputs(self) -> dict[str, Tensor]:
        """Return what the first stage of every task predicts, by task id."""
        self.store: dict[Slot, list[tuple[Tensor, Tensor]]] = {}
        tasks = build_graph(self.spec, decode=False).tasks
        return {task.id: self.run(task) for task in tasks if task.kind is Kind.COMMIT or task.stage == 0}

    def run(self, task: ForwardTask) -> Tensor:
        assert task.role is not None
        committing = task.kind is Kind.COMMIT
        frames = self.frames(task)
        kv = StoredKV(self.store, [slot for slot in task.reads if slot.space in (Space.KV, Space.ANCHOR_KV)])
        sigma = 0.0 if committing else SIGMA[task.role]
        out = self.model(
            (self.clean if committing else self.noisy[task.role])[:, :, frames],
            timestep_BF=torch.full((1, len(frames)), 1000 * sigma, dtype=torch.float64),
            text=self.text[task.role],
            frames=torch.tensor(frames),
            role=task.role,
            kv=kv,
        )
        self.publish(task, kv)
        return out

    def frames(self, task: ForwardTask) -> list[int]:
        if task.role is Role.RENDERER:
            return list(self.spec.chunk(task.index))
        return [self.spec.anchor_positions()[a] for a in self.spec.anchor_blocks()[task.index]]

    def publish(self, task: ForwardTask, kv: StoredKV) -> None:
        tokens = self.spec.shape.tokens_per_frame
        for number, slot in enumerate(s for s in task.writes if s.space in (Space.KV, Space.ANCHOR_KV)):
            cut = slice(None) if slot.space is Space.KV else slice(number * tokens, (number + 1) * tokens)
            self.store[slot] = [(k[:, cut], v[:, cut]) for k, v in kv.own]


def packed_output(separate: Separate, packing: Packing) -> Tensor:
    """Predict everything in one forward."""
    count = packing.num_anchors
    anchors, chunks = list(packing.frames[:count]), list(packing.frames[2 * count :])
    planner, renderer = separate.noisy[Role.PLANNER], separate.noisy[Role.RENDERER]
    packed = torch.cat((separate.clean[:, :, anchors], planner[:, :, anchors], renderer[:, :, chunks]), dim=2)
    levels = [0.0] * count + [SIGMA[Role.PLANNER]] * count + [SIGMA[Role.RENDERER]] * len(chunks)
    return separate.model(
        packed,
        timestep_BF=1000 * torch.tensor([levels], dtype=torch.float64),
        text=[separate.text[segment.role] for segment in packing.segments],
        frames=torch.tensor(packing.frames),
        segments=packing.segments,
        self_attend=dense_attention(packing.visible, separate.spec.shape.tokens_per_frame),
    )


@pytest.mark.parametrize(
    ("latent_frames", "padded", "planner_only"),
    [(13, None, False), (14, None, False), (7, 14, False), (14, None, True), (7, 14, True)],
)
def test_packed_forward_equals_separate_forwards(latent_frames: int, padded: int | None, planner_only: bool) -> None:
    spec, model = tiny_spec(latent_frames), tiny_model()
    packing = pack(spec, padded_to=tiny_spec(padded) if padded else None, planner_only=planner_only)
    clean, noise = (torch.randn(1, 16, padded or latent_frames, 4, 4, dtype=torch.float64) for _ in range(2))
    embedding = torch.randn(1, CONFIG.text_len, CONFIG.text_dim, dtype=torch.float64)
    separate = Separate(
        model=model,
        spec=spec,
        text={role: model.text_context(embedding, role) for role in Role},
        clean=clean,
        noisy={role: (1 - s) * clean + s * noise for role, s in SIGMA.items()},
    )
    out = packed_output(separate, packing)
    compared = 0
    for task_id, expected in separate.outputs().items():
        role, kind, unit, *_ = task_id.split("/")
        if kind == "commit" or (planner_only and role == "renderer"):
            continue  # a commit's output is nobody's
        index = int(unit[1:])
        if role == "planner":
            where = [packing.num_anchors + a for a in spec.anchor_blocks()[index]]
        else:
            where = [packing.chunk_frame(frame) for frame in spec.chunk(index)]
        # float64: the sums differ only in the order of their terms
        torch.testing.assert_close(out[:, :, where], expected, rtol=0, atol=1e-10)
        compared += 1
    assert compared == len(spec.anchor_blocks()) + (0 if planner_only else spec.num_chunks)


def places(separate: Separate, packing: Packing) -> dict[str, list[int]]:
    """Return where each denoising task's latent frames lie in the packed sequence, by task id."""
    spec, found = separate.spec, {}
    for task in build_graph(spec, decode=False).tasks:
        if task.kind is not Kind.DENOISE or task.stage > 0:
            continue
        if task.role is Role.PLANNER:
            found[task.id] = [packing.num_anchors + a for a in spec.anchor_blocks()[task.index]]
        else:
            found[task.id] = [packing.chunk_frame(frame) for frame in spec.chunk(task.index)]
    return found


def test_packed_gradients_equal_those_of_separate_forwards() -> None:
    """Gradients also flow through the keys and values that one forward hands to the next."""
    spec, model = tiny_spec(14), tiny_model()
    packing = pack(spec)
    clean, noise, weight = (torch.randn(1, 16, 14, 4, 4, dtype=torch.float64) for _ in range(3))
    embedding = torch.randn(1, CONFIG.text_len, CONFIG.text_dim, dtype=torch.float64)
    noisy = {role: (1 - s) * clean + s * noise for role, s in SIGMA.items()}

    def gradients(packed: bool) -> list[Tensor | None]:
        text = {role: model.text_context(embedding, role) for role in Role}
        separate = Separate(model=model, spec=spec, text=text, clean=clean, noisy=noisy)
        where = places(separate, packing)
        if packed:
            out = packed_output(separate, packing)
            outputs = {task_id: out[:, :, frames] for task_id, frames in where.items()}
        else:
            outputs = separate.outputs()
        total = torch.zeros((), dtype=torch.float64)
        for task_id in where:
            total = total + (outputs[task_id] * weight[:, :, : outputs[task_id].shape[2]]).sum()
        return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))

    for expected, found in zip(gradients(packed=False), gradients(packed=True), strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            # float64: the sums differ only in the order of their terms
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_unused_frames_of_a_padded_packing_are_marked() -> None:
    packing = pack(tiny_spec(7), padded_to=tiny_spec(14))
    used = [packing.frames[i] for i in torch.nonzero(packing.used).flatten().tolist()]
    assert used == [0, 4, 0, 4, *range(7)]


@pytest.mark.parametrize(("latent_frames", "padded"), [(14, None), (7, 14)])
def test_grouped_attention_equals_dense_attention_under_the_mask(latent_frames: int, padded: int | None) -> None:
    packing = pack(tiny_spec(latent_frames), padded_to=tiny_spec(padded) if padded else None)
    length = len(packing.frames) * 4
    q, k, v = (torch.randn(2, length, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(2, length, 2, 8, dtype=torch.float64)
    results = []
    for attend in (
        dense_attention(packing.visible, 4),
        GroupedAttention(packing.visible, 4, device=torch.device("cpu")),
    ):
        out = attend(q, k, v)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for dense, grouped in zip(*results, strict=True):
        # float64: the sums differ only in the order of their terms
        torch.testing.assert_close(grouped, dense, rtol=0, atol=1e-11)


def test_time_rebase_crops_some_steps_clips_anywhere_within_them() -> None:
    offsets = [crop_offset(6, share=0.5, seed=f"0-{number}") for number in range(400)]
    assert set(offsets) == set(range(7))
    assert 140 < sum(offset > 0 for offset in offsets) < 200  # half of the steps, six sevenths of them not at 0: 171
    assert {crop_offset(6, share=0.0, seed=str(number)) for number in range(50)} == {0}
    assert {crop_offset(0, share=1.0, seed=str(number)) for number in range(50)} == {0}  # no room


def batches_of(phase: Any, monkeypatch: pytest.MonkeyPatch, *, count: int) -> list[Any]:
    """Have a phase's training draw ``count`` batches into the list that is returned, in the place of training."""
    steps: list[Any] = []

    def take(module: Any, config: Any, *, batch: Any, **_: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        steps.extend(batch(generator, number) for number in range(count))
        return module

    monkeypatch.setattr(phase, "train", take)
    return steps


def numbered_pool(*, latents: int) -> tuple[ByteT5Encoder, LatentPool]:
    """Return an encoder, and two clips in which each latent says which it is."""
    text = ByteT5Encoder.create(text_len=CONFIG.text_len, text_dim=CONFIG.text_dim)
    clips = torch.arange(float(latents)).view(1, 1, latents, 1, 1).expand(2, 16, latents, 1, 1)
    return text, LatentPool.of_clips(text, clips, ["a", "b"], device=torch.device("cpu"))


@pytest.mark.parametrize(("latents", "clip_latents"), [(81, 81), (41, 81), (81, 161), (21, 21)])
def test_time_rebase_has_room_in_clips_as_long_as_the_longest_layout(latents: int, clip_latents: int) -> None:
    steps, shorter = sft_steps(clips=1, latents=latents, clip_latents=clip_latents)
    assert [step[::2] for step in steps] == [step[::2] for step in shorter]
    assert all(0 < short[1] <= step[1] for step, short in zip(steps, shorter, strict=True))
    assert clip_latents - max(length for _, length, _ in shorter) >= clip_latents // 4


def test_rebased_steps_see_crops_with_positions_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = batches_of(sft, monkeypatch, count=60)
    text, pool = numbered_pool(latents=24)
    cpu = torch.device("cpu")
    whole = sft.layouts_for([(1, 24, False), (2, 24, True)], width=16, height=16, device=cpu)
    rebased = sft.layouts_for([(1, 18, False), (2, 18, True)], width=16, height=16, device=cpu, padded_to=24)
    config = LoopConfig(out=Path("unused"), steps=60, lr=1e-3)
    options = {"accelerator": Accelerator(cpu=True), "compiled": False, "rebase": 0.5, "rebased": rebased}
    sft.train_sft(CausalWanTransformer(CONFIG), text, pool, whole, config, **options)
    offsets = []
    for number, (packed, _, _, _, _, layout, weights) in enumerate(steps):
        used = weights > 0
        shown = packed[0, 0, :, 0, 0].long()[used] - layout.frames[used]
        offsets.append(int(shown[0]))
        assert torch.equal(shown, torch.full_like(shown, offsets[-1]))  # crops keep their order, from position 0
        assert layout is (rebased if offsets[-1] else whole)[number % 2]
        assert packed.shape[0] == number % 2 + 1
        first = layout.frames[used] == 0
        assert set(weights[used][first].tolist()) == {1.0 if offsets[-1] else base.FIRST_FRAME}
    assert 15 < sum(offset > 0 for offset in offsets) < 40  # half of them
    assert max(offsets[::2]) == 24 - 18 and max(offsets[1::2]) == 24 - 11  # the planner's last anchor lies at 10


def test_the_base_may_see_clips_cropped_anywhere_with_positions_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that has seen beginnings alone takes the middle of a video for one."""
    steps = batches_of(base, monkeypatch, count=40)
    text, pool = numbered_pool(latents=81)
    config = LoopConfig(out=Path("unused"), steps=40, lr=1e-3)
    options = {"accelerator": Accelerator(cpu=True), "layouts": [(1, 21, 1), (2, 9, 10)], "compiled": False}
    base.train_base(CausalWanTransformer(CONFIG), text, pool, config, rebase=0.5, **options)
    starts = set()
    for number, (clean, _, _, _, _, frames, weights) in enumerate(steps):
        shown = clean[0, 0, :, 0, 0].long()
        assert torch.equal(shown, shown[0] + frames) and frames[0] == 0
        assert weights.tolist() == [base.FIRST_FRAME if shown[0] == 0 else 1.0] + [1.0] * (len(frames) - 1)
        assert number % 2 == 0 or shown[0] == 0  # nine latents ten apart leave no room
        starts.add(int(shown[0]))
    assert len(starts) > 5 and max(starts) <= 60
