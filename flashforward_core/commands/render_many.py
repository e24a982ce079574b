"""A file of prompts to a folder of mp4s: a few at a time, so that lanes stay busy, and each recorded when it ends."""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from ..engine.batch import Job, Outcome, render_many
from ..engine.events import Event, FramesReady, Timeline
from ..engine.rollout import RenderResult
from ..media import VideoWriter, check_crf
from ..model.loading import EMBEDDED_SIZE
from ..model.roles import Backbone
from ..prompts import TimedPrompt, parse, spans
from ..specs import RolloutSpec, VideoShape
from .interrupts import one_interrupt
from .prompt_files import Wanted, read_prompts, shard_of
from .render import check_out, spec_of
from .render_one import devices_of, load, sparse_kernels
from .results import DONE, FAILED, Result, Results, file_sha256, settings_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """One video to make, checked."""

    wanted: Wanted
    spec: RolloutSpec
    prompts: tuple[TimedPrompt, ...]
    settings: str = ""
    """See ``Result.settings``."""


def run(args: argparse.Namespace) -> int:
    """Render what is not there yet; print how busy lanes were and, last, the results' path. 1: some failed."""
    check_crf(args.crf)
    _check_folder(args.out)
    films = [_film(wanted, args) for wanted in shard_of(read_prompts(args.prompts, seed=args.seed), args.shard)]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for told in dict.fromkeys(line for film in films for line in film.spec.advice):
        logging.warning("%s", told)
    with one_interrupt():
        devices = devices_of(args)
        kernels = sparse_kernels(args, films[0].spec, devices) if films else ""
        backbone = load(args, devices)
        results = Results(args.out, shard=args.shard)
        films = [replace(film, settings=_settings(film, backbone, args, kernels=kernels)) for film in films]
        left = [film for film in films if not results.is_done(film.wanted.out, settings=film.settings)]
        work = _Work(left, results=results, backbone=backbone, crf=args.crf, quiet=args.quiet)
        if len(left) < len(films):
            work.say(f"{len(films) - len(left)} of {len(films)} are there already")
        try:
            timeline = render_many(
                backbone,
                work,
                devices=devices,
                decode=True,
                in_flight=args.in_flight,
                on_event=work.on_event,
                on_done=work.on_done,
            )
        except KeyboardInterrupt as error:
            done = work.counts[DONE]
            raise KeyboardInterrupt(
                f"interrupted; {done} more are done, as {results.path} says; the same command goes on from there"
            ) from error
        finally:
            work.close()
    if left:
        print(f"lanes computed for {busy(timeline):.1%} of the time")
    print(results.path)
    if work.counts[FAILED]:
        print(f"{work.counts[FAILED]} of {len(films)} failed; the same command tries them again", file=sys.stderr)
    return 1 if work.counts[FAILED] else 0


def busy(timeline: Timeline) -> float:
    """Return the share of all lanes' time that they computed, from the first task's start to the last one's end."""
    if not timeline.spans:
        return 1.0
    length = timeline.length - timeline.spans[0].start_s
    return sum(span.end_s - span.start_s for span in timeline.spans) / (length * len(timeline.lanes))


def _film(wanted: Wanted, args: argparse.Namespace) -> Film:
    """Check a prompt with the command's options; ``ValueError`` says which one."""
    own: dict[str, object] = {"seed": wanted.seed}
    if wanted.seconds is not None:
        own |= {"seconds": wanted.seconds, "latent_frames": None}
    try:
        spec = spec_of(argparse.Namespace(**{**vars(args), **own}), size=EMBEDDED_SIZE)
        prompts = parse(wanted.prompt)
        spec = replace(spec, prompts=spans([prompt.time for prompt in prompts], spec.shape))
        if not (args.out / wanted.out).resolve().is_relative_to(args.out.resolve()):
            raise ValueError(f"out={wanted.out!r} leads out of the output folder by a link; use another name")
        check_out(args.out / wanted.out, make=True)
    except ValueError as error:
        raise ValueError(f"{args.prompts}: {wanted.name}: {error}") from error
    return Film(wanted=wanted, spec=spec, prompts=prompts)


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; with --prompts, give a folder for the videos")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"out={str(out)!r} is a folder that you may not write to; use another folder")


def _settings(film: Film, backbone: Backbone, args: argparse.Namespace, *, kernels: str) -> str:
    """Hash every option that the video's bytes depend on; ``kernels`` are those of sparse attention, by name."""
    sparse, spec = film.spec.sparse, film.spec
    return settings_hash(
        prompt=film.wanted.prompt,
        spec=spec if sparse is None else replace(spec, sparse=replace(sparse, attention=kernels)),
        model=backbone.fingerprint,
        dtype=backbone.dtype,
        kv=args.kv,
        crf=args.crf,
    )


@dataclass(slots=True)
class _Work:
    """Feeds the engine, writes what comes, and records how each video ended."""

    films: Sequence[Film]
    results: Results = field(kw_only=True)
    backbone: Backbone = field(kw_only=True)
    crf: int = field(kw_only=True)
    quiet: bool = field(kw_only=True)
    counts: Counter[str] = field(default_factory=Counter)
    began: dict[int, float] = field(default_factory=dict)
    writers: dict[int, VideoWriter] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.films)

    def __iter__(self) -> Iterator[Job]:
        """Yield jobs as they are asked for; prompts are encoded then."""
        for number, film in enumerate(self.films):
            self.began[number] = time.perf_counter()
            yield Job(spec=film.spec, texts=self._encode(film))

    def on_event(self, number: int, event: Event) -> None:
        """Write frames as they come."""
        if isinstance(event, FramesReady):
            if number not in self.writers:
                self.writers[number] = self._writer(self.films[number])
            self.writers[number].write(event.frames[0].numpy())

    def on_done(self, number: int, outcome: Outcome) -> None:
        """Finish or drop the file, and record it."""
        film, writer = self.films[number], self.writers.pop(number, None)
        error = outcome if isinstance(outcome, Exception) else None
        digest = None
        try:
            if writer is not None and error is None:
                writer.close()
                digest = file_sha256(writer.path)
        except (OSError, ValueError) as failed:
            error = failed
        if writer is not None and error is not None:
            writer.abort(keep=False)
        seconds = time.perf_counter() - self.began.pop(number)
        sha256 = outcome.sha256 if isinstance(outcome, RenderResult) else None
        self.results.add(_result(film, error=error, sha256=sha256, file=digest, seconds=seconds))
        self.counts[DONE if error is None else FAILED] += 1
        ended = f"{film.wanted.out} in {seconds:.1f} s" if error is None else f"{film.wanted.name} failed: {error}"
        self.say(f"{self.counts.total()}/{len(self.films)}  {ended}")

    def close(self) -> None:
        """Leave no file of a video that has not ended."""
        for writer in self.writers.values():
            writer.abort(keep=False)
        self.writers.clear()

    def say(self, text: str) -> None:
        """Tell on stderr, unless that is not wanted."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def _encode(self, film: Film) -> list[Tensor]:
        return [self.backbone.text_encoder.encode([prompt.text]) for prompt in film.prompts]

    def _writer(self, film: Film) -> VideoWriter:
        shape: VideoShape = film.spec.shape
        path = self.results.folder / film.wanted.out
        return VideoWriter(path, width=shape.width, height=shape.height, fps=shape.fps, crf=self.crf)


def _result(film: Film, *, error: Exception | None, sha256: str | None, file: str | None, seconds: float) -> Result:
    return Result(
        path=film.wanted.out,
        prompt=film.wanted.prompt,
        seed=film.wanted.seed,
        seconds=film.spec.shape.seconds,
        status=DONE if error is None else FAILED,
        settings=film.settings,
        sha256=sha256 if error is None else None,
        file_sha256=file,
        render_s=round(seconds, 3),
        error=None if error is None else str(error),
    )
