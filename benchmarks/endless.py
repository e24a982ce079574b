"""A long render with the embedded model: is a chunk's time, and the process's memory, the same late as early?

    python benchmarks/endless.py --latent-frames 3000 --out endless.mp4 --json benchmarks/results/endless.json

A chunk's time runs from one chunk's frames to the next one's: denoising, planning, decoding and encoding. Processor
time is measured beside it, since other programs may share the machine.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_rows import RowBook, machine
from flashforward_core.commands.render_one import Progress, render_to_file
from flashforward_core.engine.events import Event, FramesReady
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.media import probe
from flashforward_core.model.loading import EMBEDDED_SIZE, load_embedded
from flashforward_core.specs import RolloutSpec, VideoShape

PROMPT = "a red balloon drifts right over green hills at dusk"
SPAN = 100  # chunks whose median is taken


@dataclass(slots=True)
class Watch:
    """Notes the clocks and the memory whenever a chunk's frames are there; else it is a render's progress."""

    progress: Progress
    process: psutil.Process = field(default_factory=psutil.Process)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, FramesReady):
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())
            self.memory.append(self.process.memory_info().rss)
        self.progress(event)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent-frames", type=int, default=3000, metavar="N", help="length in latent frames (3000)")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="the mp4 to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--device", default="cpu", help="cpu, cpu*4, cuda:0 (cpu)")
    args = parser.parse_args()
    width, height = EMBEDDED_SIZE
    spec = RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=args.latent_frames))
    if spec.num_chunks < 3 * SPAN:
        raise ValueError(f"latent_frames={args.latent_frames} are too few; use at least {9 * SPAN}")
    devices = DevicePlan(devices=(args.device,))
    backbone = load_embedded(device=devices.resolve()[0])
    watch = Watch(Progress(total_frames=spec.shape.video_frames, quiet=False))
    texts = [backbone.text_encoder.encode([PROMPT])]
    began = time.perf_counter()
    result = render_to_file(backbone, spec, texts, out=args.out, devices=devices, crf=17, progress=watch)
    seconds = time.perf_counter() - began
    common = {"model": "embedded", "resolution": "128x192", "latents": args.latent_frames, "devices": 1}
    common |= {"device": args.device, "schedule": spec.schedule, "layout": "single", "precision": "fp32"}
    book = RowBook(path=args.json, machine=machine(devices.resolve()[0]), common=common)
    book.add("job_s", seconds, "s", sha256=result.sha256)
    book.add("video_frames", probe(args.out).frames, "frames", expected=spec.shape.video_frames)
    early, late = range(SPAN, 2 * SPAN), range(spec.num_chunks - SPAN, spec.num_chunks)
    for name, span in (("early", early), ("late", late)):
        chunks = f"{span.start}-{span.stop - 1}"
        for clock, found in (("wall", watch.wall), ("processor", watch.cpu)):
            times = [1000 * (found[n] - found[n - 1]) for n in span]
            book.add("chunk_ms", statistics.median(times), "ms", chunks=chunks, when=name, clock=clock)
        memory = statistics.median(watch.memory[n] for n in span)
        book.add("resident_bytes", memory, "B", chunks=chunks, when=name)
    book.add("peak_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "B")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
