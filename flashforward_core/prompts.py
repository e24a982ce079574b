"""Prompts over time: ``a calm lake at dawn [5s] | the same lake at night [10s#]``.

Prompts are divided by ``|``. What stands in brackets after a prompt says how long it holds, in seconds (``5s``) or
video frames (``80f``), or from when to when (``5s-15s``, ``80-240f``); ``#`` starts it with a hard cut, which forgets
what came before. The last prompt holds to the end of the video, with or without a time. ``\\|`` is a bar within a
prompt.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .specs import TEMPORAL_FACTOR, PromptSpan, VideoShape

_BAR = re.compile(r"(?<!\\)\|")
_BRACKET = re.compile(r"\[([^\[\]]*)\]\s*$")
_NUMBER = r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)"
_TIME = re.compile(rf"{_NUMBER}(?:\s*-\s*{_NUMBER})?\s*(#)?")
_LOOKS_TIMED = re.compile(r"\s*[\d#.+-]")
_SLACK = 0.5  # video frames by which a prompt's start may miss the end of the one before: times are often rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A time in a video whose frame rate and length are not known yet: the sum of its parts."""

    seconds: float = 0.0
    frames: float = 0.0
    """Video frames."""
    share: float = 0.0
    """Of the video's length, 0 to 1."""

    def __add__(self, other: "Moment") -> "Moment":
        return Moment(
            seconds=self.seconds + other.seconds, frames=self.frames + other.frames, share=self.share + other.share
        )

    def video_frame(self, shape: VideoShape) -> float:
        """Return the video frame, counted from 0, at which this is."""
        return self.seconds * shape.fps + self.frames + self.share * shape.video_frames

    def at_fps(self, fps: float) -> "Moment":
        """Return the same with its frames as seconds at ``fps``."""
        return Moment(seconds=self.seconds + self.frames / fps, share=self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTime:
    """When a prompt holds."""

    start: Moment
    end: Moment | None = None
    """None until the end of the video."""
    hard_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPrompt:
    """A prompt and when it holds."""

    text: str
    time: PromptTime


def parse(text: str) -> tuple[TimedPrompt, ...]:
    """Read a prompt schedule; text without bars and times is one prompt for the whole video.

    Raises ``ValueError`` with the character's position, counted from 1, for what cannot be read.
    """
    if alone := re.search("[\ud800-\udfff]", text):  # half of a character: no encoder reads it, no file holds it
        raise ValueError(f"text: character {alone.start() + 1} is no Unicode character; remove it")
    bars = [match.start() for match in _BAR.finditer(text)]
    found: list[TimedPrompt] = []
    now: Moment | None = Moment()
    for start, end in zip([0, *(bar + 1 for bar in bars)], [*bars, len(text)], strict=True):
        words, bracket = _split(text[start:end], offset=start)
        begin = bracket.start or now
        if bars and not words:
            raise ValueError(f"text: the prompt at character {start + 1} is empty; write it, or remove the '|'")
        if begin is None:
            raise ValueError(
                f"text: the prompt before character {start + 1} has no length, so this one has no start; give it one, "
                "such as [5s]"
            )
        now = begin + bracket.length if bracket.length else bracket.end
        time = PromptTime(start=begin, end=now, hard_cut=bracket.hard_cut)
        found.append(TimedPrompt(text=words.replace("\\|", "|"), time=time))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bracket:
    """What stands in a prompt's brackets: a length, or a start and an end."""

    length: Moment | None = None
    start: Moment | None = None
    end: Moment | None = None
    hard_cut: bool = False


def _split(item: str, *, offset: int) -> tuple[str, _Bracket]:
    """Part a prompt's words from its time; ``offset`` is where ``item`` begins in the text."""
    found = _BRACKET.search(item)
    if found is None or not _LOOKS_TIMED.match(found[1]):
        return item.strip(), _Bracket()
    words, inside, position = item[: found.start()].strip(), found[1].strip(), offset + found.start() + 2
    if inside == "#":
        return words, _Bracket(hard_cut=True)
    match = _TIME.fullmatch(inside)
    if match is None:
        raise ValueError(
            f"text: [{inside}] at character {position} is no time; use [5s], [80f] or [5s-15s], with a hard cut [5s#]"
        )
    number, unit, last, last_unit, cut = match.groups()
    if last is None:
        return words, _Bracket(length=_moment(number, unit, position), hard_cut=cut is not None)
    start, end = _moment(number, unit or last_unit, position), _moment(last, last_unit, position)
    return words, _Bracket(start=start, end=end, hard_cut=cut is not None)


def _moment(number: str, unit: str, position: int) -> Moment:
    if unit not in ("s", "f"):
        raise ValueError(
            f"text: {number}{unit} at character {position} has {f'unit {unit!r}' if unit else 'no unit'}; "
            f"use {number}s for seconds or {number}f for frames"
        )
    return Moment(seconds=float(number)) if unit == "s" else Moment(frames=float(number))


def spans(times: Iterable[PromptTime], shape: VideoShape) -> tuple[PromptSpan, ...]:
    """Return one span per prompt, in latent frames of ``shape``; span n has prompt n.

    A span starts with the latent frame whose video frames begin nearest to its time. Raises ``ValueError``, naming the
    prompt, for gaps and overlaps, for a start outside the video, and for prompts too short to be seen.
    """
    found: list[PromptSpan] = []
    meets = 0.0
    for index, time in enumerate(times):
        start = time.start.video_frame(shape)
        if abs(start - meets) > _SLACK:
            before = f"prompt {index} ends at {_said(meets, shape)}" if index else "the video starts at 0"
            raise ValueError(
                f"prompt {index + 1} starts at {_said(start, shape)}, but {before}; let each prompt start where the "
                "one before ends"
            )
        if start > shape.video_frames - 1:
            raise ValueError(
                f"prompt {index + 1} starts at {_said(start, shape)}, but the video ends at "
                f"{_said(shape.video_frames, shape)}; make the video longer or drop the prompt"
            )
        latent = _latent_frame(start)
        if found and latent <= found[-1].start:
            raise ValueError(
                f"prompt {index} is shorter than a latent frame ({TEMPORAL_FACTOR} video frames); make it longer"
            )
        found.append(PromptSpan(start=latent, prompt=index, hard_cut=time.hard_cut))
        meets = shape.video_frames if time.end is None else time.end.video_frame(shape)
        if meets <= start:
            raise ValueError(f"prompt {index + 1} ends at {_said(meets, shape)}, not after its start; make it longer")
    return tuple(found)


def _latent_frame(video_frame: float) -> int:
    """Return the latent frame that begins nearest to ``video_frame``: frame 0 is one video frame, n begins at 4n-3."""
    if video_frame < 0.5:
        return 0
    return max(1, round((video_frame + TEMPORAL_FACTOR - 1) / TEMPORAL_FACTOR))


def _said(video_frame: float, shape: VideoShape) -> str:
    return f"{video_frame / shape.fps:g} s (frame {video_frame:g})"
