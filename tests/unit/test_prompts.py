"""Prompt schedules: what is written is when it holds, and what cannot be read is named with its place."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashforward_core.prompts import Moment, PromptTime, parse, spans
from flashforward_core.specs import PromptSpan, VideoShape

pytestmark = pytest.mark.cpu

VIDEO = VideoShape(width=192, height=128, latent_frames=81)  # 321 video frames, 20.06 s at 16 fps


def starts(text: str, shape: VideoShape = VIDEO) -> list[tuple[str, int, bool]]:
    """Each prompt's words, first latent frame and cut."""
    prompts = parse(text)
    found = spans([prompt.time for prompt in prompts], shape)
    assert [span.prompt for span in found] == list(range(len(prompts)))
    return [(prompt.text, span.start, span.hard_cut) for prompt, span in zip(prompts, found, strict=True)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a calm lake", [("a calm lake", 0, False)]),
        ("a lake [5s]", [("a lake", 0, False)]),
        # 5 s are 80 video frames; latent frame 21 begins with video frame 81, latent frame 20 with 77
        ("dawn [5s] | night [10s#]", [("dawn", 0, False), ("night", 21, True)]),
        ("dawn [5s] | night", [("dawn", 0, False), ("night", 21, False)]),
        ("dawn [5s] | night [#]", [("dawn", 0, False), ("night", 21, True)]),
        ("dawn [0-5s] | night [5s - 20s#]", [("dawn", 0, False), ("night", 21, True)]),
        ("dawn [0-81f] | night [81f-300f]", [("dawn", 0, False), ("night", 21, False)]),
        ("a [1s] | b [16f] | c", [("a", 0, False), ("b", 5, False), ("c", 9, False)]),
        ("a [1f] | b", [("a", 0, False), ("b", 1, False)]),
        ("a sign [open] | b", None),
        ("a \\| b", [("a | b", 0, False)]),
        ("a sign that says [open]", [("a sign that says [open]", 0, False)]),
        ("", [("", 0, False)]),
    ],
)
def test_prompts_hold_when_they_say(text: str, expected: list[tuple[str, int, bool]] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="has no length"):
            parse(text)
    else:
        assert starts(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a [5]", ("5 at character 4", "no unit", "5s for seconds", "5f for frames")),
        ("a [5m]", ("5m at character 4", "unit 'm'", "5s")),
        ("a [5s] | b [1.2.3s]", ("[1.2.3s] at character 13", "is no time", "[5s-15s]")),
        ("a [-5s]", ("[-5s] at character 4", "is no time")),
        ("a | b [5s]", ("before character 4 has no length", "[5s]")),
        ("a [5s] | | c", ("prompt at character 9 is empty", "remove the '|'")),
        ("a [5s] |", ("prompt at character 9 is empty",)),
        ("an owl \udce9", ("character 8 is no Unicode character", "remove it")),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        parse(text)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a [0-5s] | b [7-9s]", ("prompt 2 starts at 7 s", "prompt 1 ends at 5 s", "where the one before ends")),
        ("a [0-5s] | b [4-9s]", ("prompt 2 starts at 4 s", "prompt 1 ends at 5 s")),
        ("a [2-5s]", ("prompt 1 starts at 2 s", "the video starts at 0")),
        ("a [30s] | b", ("prompt 2 starts at 30 s", "video ends at 20.0625 s", "longer")),
        ("a [0s] | b", ("prompt 1 ends at 0 s", "make it longer")),
        ("a [5s-2s]", ("prompt 1 starts at 5 s",)),
        ("a [8f] | b [1f] | c", ("prompt 2 is shorter than a latent frame", "4 video frames")),
    ],
)
def test_times_that_do_not_fit_are_refused_by_name(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        starts(text)
    for word in words:
        assert word in str(refusal.value)


def test_frames_count_at_the_rate_they_were_given_for() -> None:
    (first, _) = parse("a [48f] | b")
    assert first.time.end is not None
    assert first.time.end.at_fps(24).video_frame(VIDEO) == 32  # 2 s of the video's 16 fps


def test_shares_of_the_video_are_times_too() -> None:
    half = Moment(share=0.5)
    found = spans([PromptTime(start=Moment(), end=half), PromptTime(start=half, end=Moment(share=1))], VIDEO)
    assert found == (PromptSpan(), PromptSpan(start=41, prompt=1))  # 160.5 of 321: latent frame 41 begins with 161


words = st.text(st.characters(codec="utf-8", exclude_characters="|[]\\"), min_size=1).map(str.strip).filter(bool)


@given(parts=st.lists(st.tuples(words, st.integers(4, 40), st.booleans()), min_size=1, max_size=6), unit=st.booleans())
def test_what_is_written_comes_back(parts: list[tuple[str, int, bool]], unit: bool) -> None:
    """Lengths in latent frames, written as frames or seconds; a span begins within half a latent frame of its time."""
    shape = VideoShape(width=192, height=128, latent_frames=300)
    lengths = [4 * length for _, length, _ in parts]
    written = [f"{n}f" if unit else f"{n / 16:.4f}s" for n in lengths]
    text = " | ".join(f"{w} [{n}{'#' * cut}]" for (w, _, cut), n in zip(parts, written, strict=True))
    found = starts(text, shape)
    assert [(w, cut) for w, _, cut in found] == [(w, cut) for w, _, cut in parts]
    for index, (_, start, _) in enumerate(found):
        video_frame = max(0, 4 * start - 3)
        assert abs(video_frame - sum(lengths[:index])) <= 2


@given(times=st.lists(st.integers(0, 400), min_size=1, max_size=5))
def test_any_times_give_spans_that_a_rollout_takes_or_a_refusal(times: list[int]) -> None:
    edges = [Moment(frames=time) for time in times]
    try:
        found = spans([PromptTime(start=a, end=b) for a, b in zip([Moment(), *edges], edges, strict=False)], VIDEO)
    except ValueError as refusal:
        assert "prompt" in str(refusal)
    else:
        first = [span.start for span in found]
        assert first == sorted(set(first))
        assert first[0] == 0
        assert first[-1] < VIDEO.latent_frames


@given(text=st.text(st.sampled_from("ab |[]#-.59sf\\\n\0é"), max_size=40))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        found = parse(text)
    except ValueError as refusal:
        assert str(refusal)
    else:
        assert spans([prompt.time for prompt in found], VideoShape(width=32, height=32, latent_frames=99))[0].start == 0


@pytest.mark.parametrize("text", ["[" * 50_000, "a [" + "9" * 50_000 + "s]", "a | " * 20_000, "a [5s" + " " * 50_000])
def test_endless_prompts_are_read_or_refused_at_once(text: str) -> None:
    began = time.perf_counter()
    with contextlib.suppress(ValueError):
        parse(text)
    assert time.perf_counter() - began < 5  # quadratic work on 50,000 letters would take minutes
