"""Claims about the specs: derived numbers, and refusals that name the field and the remedy."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flashforward_core.graph.parts import Part, parts
from flashforward_core.kv_policy import (
    FutureForcingOptions,
    KeepOptions,
    SparseOptions,
    TempCacheOptions,
    WindowOptions,
)
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu


def shape(latent_frames: int = 81, **changes: Any) -> VideoShape:
    return VideoShape(**{"width": 832, "height": 480, "latent_frames": latent_frames, **changes})


def test_81_latents_are_321_frames_and_20_seconds() -> None:
    assert shape(81).video_frames == 321
    assert shape(81).seconds == pytest.approx(20.0625)  # 321 / 16


def test_480p_has_1560_tokens_per_latent_frame() -> None:
    assert (shape().latent_height, shape().latent_width, shape().tokens_per_frame) == (60, 104, 1560)
    assert shape(width=1280, height=720).tokens_per_frame == 3600


@pytest.mark.parametrize(("seconds", "latents"), [(20.0, 81), (0.01, 1), (5.0, 21), (0.3, 2)])
def test_seconds_become_the_nearest_latent_length(seconds: float, latents: int) -> None:
    assert VideoShape.from_seconds(seconds, width=832, height=480).latent_frames == latents


def test_video_frames_become_latents() -> None:
    assert VideoShape.from_video_frames(321, width=832, height=480).latent_frames == 81


def test_the_four_stages_have_the_papers_timesteps() -> None:
    timesteps = [1000 * sigma for sigma in StageSchedule().sigmas]
    assert timesteps == pytest.approx([1000, 937.5, 2500 / 3, 625, 0])


def test_the_last_chunk_may_be_shorter() -> None:
    spec = RolloutSpec(shape=shape(8))
    assert [list(spec.chunk(i)) for i in range(spec.num_chunks)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_no_anchor_lies_past_the_end_and_the_last_block_may_be_shorter() -> None:
    spec = RolloutSpec(shape=shape(40))
    assert spec.anchor_positions() == (0, 10, 20, 30)
    assert spec.anchor_blocks() == ((0, 1, 2), (3,))
    assert RolloutSpec(shape=shape(40), anchors=None).anchor_blocks() == ()


@pytest.mark.parametrize(
    ("latents", "stride", "advice"),
    [
        (9, 10, "1 anchor in 9 latent frames, so what moves may get lost; use an anchor stride of 4 or less"),
        (20, 10, "2 anchors in 20 latent frames, so what moves may get lost; use an anchor stride of 9 or less"),
        (9, 4, ""),
        (21, 10, ""),
        (1, 10, ""),
    ],
)
def test_a_video_with_few_anchors_gets_advice_that_helps(latents: int, stride: int, advice: str) -> None:
    def spec(stride: int) -> RolloutSpec:
        shape = VideoShape(width=192, height=128, latent_frames=latents)
        return RolloutSpec(shape=shape, anchors=AnchorPlan(stride=stride), history=History(chunks=5), seed=0)

    assert spec(stride).few_anchors == advice
    if advice:
        assert spec(int(advice.split()[-3])).few_anchors == ""


@pytest.mark.parametrize(
    ("history", "cut", "latents", "start", "remedy"),
    [
        (6, False, 81, 41, "use a planner history of 0, or # for a hard cut"),
        (6, False, 81, 65, "use # for a hard cut"),  # no block of three anchors begins after it: 0, 30, 60
        (6, False, 21, 11, "use # for a hard cut"),  # one block
        (6, False, 81, 80, "use # for a hard cut"),
        (6, True, 81, 41, None),
        (0, False, 81, 41, None),
    ],
)
def test_a_prompt_that_hardly_reaches_the_anchors_gets_advice(
    history: int, cut: bool, latents: int, start: int, remedy: str | None
) -> None:
    spec = RolloutSpec(
        shape=shape(latents),
        history=History(planner_blocks=history),
        prompts=(PromptSpan(), PromptSpan(start=start, prompt=1, hard_cut=cut)),
    )
    assert spec.soft_prompts == "" if remedy is None else spec.soft_prompts.endswith(f"before; {remedy}")
    assert not replace(spec, prompts=(PromptSpan(),)).advice
    assert not replace(spec, anchors=None).advice


def test_a_prompt_is_advised_by_the_blocks_of_its_scene() -> None:
    """A hard cut at 40 has anchors 40, 50, 60 in its first block and 70, 80 in its second."""
    spans = (PromptSpan(), PromptSpan(start=40, prompt=1, hard_cut=True))
    for start, follows in ((65, True), (75, False)):
        spec = RolloutSpec(shape=shape(81), prompts=(*spans, PromptSpan(start=start, prompt=2)))
        assert ("planner history of 0" in spec.soft_prompts) is follows


def test_a_policy_that_drops_nothing_gets_advice() -> None:
    """The last of 12 latent frames' chunks begins at 9, so a budget of 9 holds all that it looks back at."""
    for policy, told in (
        (WindowOptions(budget_frames=9), True),
        (WindowOptions(budget_frames=8), False),
        (FutureForcingOptions(budget_frames=9000), True),
        (TempCacheOptions(budget_frames=9000), False),  # it merges
        (KeepOptions(), False),
    ):
        spec = RolloutSpec(shape=shape(12), anchors=None, kv_policy=policy)
        assert bool(spec.idle_policy) is told
        assert spec.advice == ((spec.idle_policy,) if told else ())
    assert "a budget of 9000 keeps all that 6 latent frames look back at" in (
        RolloutSpec(shape=shape(6), kv_policy=WindowOptions(budget_frames=9000)).idle_policy
    )


def test_a_prompt_holds_until_the_next_one() -> None:
    spec = RolloutSpec(shape=shape(9), prompts=(PromptSpan(), PromptSpan(start=4, prompt=1)))
    assert [spec.prompt_at(frame) for frame in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shape(0), "latent_frames=0 is below 1; use latent_frames=1"),
        (lambda: shape(width=833), "width=833 is not a positive multiple of 16; use width=832"),
        (lambda: shape(height=8), "height=8 is not a positive multiple of 16; use height=16"),
        (lambda: shape(fps=0.0), "fps=0.0 is outside"),
        (lambda: VideoShape.from_seconds(0, width=16, height=16), "seconds=0 is not above 0"),
        (lambda: VideoShape.from_video_frames(320, width=16, height=16), "use frames=317 or frames=321"),
        (lambda: VideoShape.from_video_frames(0, width=16, height=16), "frames=0 is not 4n+1; use frames=1"),
        (lambda: StageSchedule(shift=0), "shift=0 is not above 0"),
        (lambda: StageSchedule(starts=(1.0, 1.0)), "must fall from 1.0"),
        (lambda: StageSchedule(starts=(0.9, 0.5)), "must fall from 1.0"),
        (lambda: StageSchedule(starts=()), "must fall from 1.0"),
        (lambda: AnchorPlan(stride=0), "anchor_stride=0 is below 1"),
        (lambda: AnchorPlan(block_frames=0), "block_frames=0 is below 1"),
        (lambda: AnchorPlan(context=0), "context=0 is below 1"),
        (lambda: History(chunks=-1), "history=-1 is below 0"),
        (lambda: History(planner_blocks=-1), "planner_history=-1 is below 0"),
        (lambda: History(sink=-1), "sink=-1 is below 0"),
        (lambda: RolloutSpec(shape=shape(), chunk_frames=0), "chunk_frames=0 is below 1"),
        (lambda: RolloutSpec(shape=shape(), seed=-1), "seed=-1 is below 0"),
        (
            lambda: RolloutSpec(shape=shape(), anchors=None, history=History(chunks=0)),
            "history=0 reads nothing; use history >= 1 or anchors",
        ),
        (
            lambda: RolloutSpec(shape=shape(), history=History(chunks=2, sink=7)),
            "sink=7 is longer than the history of 6 latent frames; use sink <= 6",
        ),
        (
            lambda: RolloutSpec(shape=shape(), stages=StageSchedule(starts=(1.0,)), sparse=SparseOptions()),
            "sparse attention has no use with 1 stage, since the first stage stays dense; use 2 stages or more",
        ),
        (lambda: RolloutSpec(shape=shape(), prompts=()), "they must rise from 0"),
        (lambda: RolloutSpec(shape=shape(), prompts=(PromptSpan(start=1),)), "they must rise from 0"),
        (lambda: RolloutSpec(shape=shape(), prompts=(PromptSpan(), PromptSpan())), "they must rise from 0"),
        (lambda: RolloutSpec(shape=shape(9), prompts=(PromptSpan(), PromptSpan(start=9))), "past the last one (8)"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_kv_policy_takes_any_history_and_sink_and_makes_the_same_parts_with_them() -> None:
    """Ten chunks in parts of four: with the default history and with none at all, beside a sink that fits nowhere."""

    def cut(history: History) -> list[Part]:
        options: Any = {"anchors": None, "schedule": "self_forcing", "kv_policy": WindowOptions()}
        return list(parts(RolloutSpec(shape=shape(30), history=history, **options), size=4))

    expected = cut(History())
    assert [part.chunks for part in expected] == [range(4), range(4, 8), range(8, 10)]
    assert cut(History(chunks=0)) == cut(History(sink=99)) == cut(History(chunks=100)) == expected


@pytest.mark.parametrize("frames", [100_001, 9999999999999999999999])
def test_a_length_above_the_bound_is_refused(frames: int) -> None:
    assert VideoShape(width=64, height=64, latent_frames=100_000).latent_frames == 100_000
    with pytest.raises(ValueError, match=f"latent_frames={frames} is above 100000"):
        VideoShape(width=64, height=64, latent_frames=frames)


@pytest.mark.parametrize(
    ("seconds", "fps", "message"),
    [
        (1e308, 16.0, "seconds=1e.308 is above"),
        (1e18, 16.0, "seconds=1e.18 is above"),
        (5.0, float("inf"), "fps=inf is outside"),
        (5.0, float("nan"), "fps=nan is outside"),
        (5.0, 0.0, "fps=0.0 is outside"),
        (float("inf"), 16.0, "seconds=inf is not"),
        (float("nan"), 16.0, "seconds=nan is not"),
        (-1.0, 0.0, "fps=0.0 is outside"),
    ],
)
def test_seconds_and_fps_out_of_bounds_are_refused_by_name(seconds: float, fps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoShape.from_seconds(seconds, width=64, height=64, fps=fps)


def test_hardly_any_seconds_are_one_frame() -> None:
    assert VideoShape.from_seconds(1e-300, width=64, height=64).latent_frames == 1
