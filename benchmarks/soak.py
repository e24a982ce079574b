"""Many short runs through a real ComfyUI, cancels and failures among them: does anything grow, is anything lost?

``.venv/bin/python benchmarks/soak.py --runs 200 --json benchmarks/results/soak.json``. Of ten runs five complete, two
are cancelled at a random moment and three fail in turn in one of the ways of ``FAILURES``. After each the server's
memory, threads and open files are noted. At the end every finished video is decoded. Linux only (/proc).
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comfy_client import Client, Result, RunError
from comfy_host import Server, provisioned
from comfy_workflow import to_api

from flashforward_core.commands.bench_rows import commit, machine
from flashforward_core.media import read_frames

ROOT = Path(__file__).resolve().parents[1]
Json = dict[str, Any]
NINE_LATENTS_S = 33 / 16
FRAMES = 33
FIRST_SEED = 1
WARM_UP = 20  # runs in which caches and pools fill
PLAN, RENDER, DECODE = "FlashForwardPlan", "FlashForwardRender", "FlashForwardDecodeVideo"


@dataclass(slots=True)
class Bench:
    """A server with model files that may be harmed, and what was seen."""

    client: Client
    server: Server
    assets: Path
    workflow: Json
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    outcomes: Counter[str] = field(default_factory=Counter)
    samples: list[Json] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    first_sha256: list[str] | None = None

    def prompt(self, *, seed: int, **plan: Any) -> Json:
        prompt: Json = json.loads(json.dumps(self.workflow))
        for node in prompt.values():
            if "seed" in node["inputs"]:
                node["inputs"]["seed"] = seed
        self.node(prompt, PLAN)["inputs"].update(plan)
        return prompt

    def node(self, prompt: Json, class_type: str) -> Json:
        found: list[Json] = [node for node in prompt.values() if node["class_type"] == class_type]
        assert len(found) == 1, f"{len(found)} nodes of {class_type}"
        return found[0]

    def note(self, outcome: str) -> None:
        """Count an outcome and look at the server's process."""
        assert self.server.process is not None
        self.outcomes[outcome] += 1
        process = Path(f"/proc/{self.server.process.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        self.samples.append(
            {
                "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
                "threads": int(status["Threads"]),
                "files": len(os.listdir(process / "fd")),
                "outcome": outcome,
            }
        )


def complete(bench: Bench, number: int) -> str:
    """Run to the end; every fifth time with the first seed, whose latents must be the same again."""
    again = number % 50 == 40
    seed = FIRST_SEED if again or bench.first_sha256 is None else FIRST_SEED + 1 + number
    if again:
        bench.client.request("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1.5)  # the server frees when it is next idle
    result: Result = bench.client.run(bench.prompt(seed=seed))
    bench.videos += result.files(bench.server.output)
    if bench.first_sha256 is None:
        bench.first_sha256 = result.sha256()
    assert not again or result.sha256() == bench.first_sha256, "the first seed gave other latents"
    return "equal to the first run" if again else "completed"


def cancel(bench: Bench, number: int) -> str:
    """Interrupt at a random step."""
    wait_for, seen = bench.draw.randrange(1, 45), 0

    def press(node: str, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == wait_for:
            bench.client.interrupt()

    try:
        result = bench.client.run(bench.prompt(seed=FIRST_SEED + 1 + number), on_progress=press)
    except RunError as error:
        assert "interrupted" in str(error), error
        return "cancelled"
    bench.videos += result.files(bench.server.output)
    return "completed before the cancel"


@contextlib.contextmanager
def as_it_is(bench: Bench) -> Iterator[None]:
    """Harm nothing."""
    yield


@contextlib.contextmanager
def without_file(bench: Bench) -> Iterator[None]:
    """Take the autoencoder's weights away for a moment."""
    path = bench.assets / "vae" / "diffusion_pytorch_model.safetensors"
    away = path.rename(path.with_suffix(".away"))
    try:
        yield
    finally:
        away.rename(path)


@contextlib.contextmanager
def with_half_a_file(bench: Bench) -> Iterator[None]:
    """Put half of the renderer's LoRA in its place for a moment."""
    path = bench.assets / "renderer_lora.safetensors"
    away = path.rename(path.with_suffix(".away"))
    try:
        path.write_bytes(away.read_bytes()[: away.stat().st_size // 2])
        yield
    finally:
        path.unlink()
        away.rename(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A way to fail, and what must be said."""

    name: str
    words: str
    change: Callable[[Bench, Json], None] = lambda bench, prompt: None
    around: Callable[[Bench], AbstractContextManager[None]] = as_it_is


def _bad_stride(bench: Bench, prompt: Json) -> None:
    bench.node(prompt, PLAN)["inputs"]["anchor_stride"] = 0


def _image_latent(bench: Bench, prompt: Json) -> None:
    prompt["900"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 192, "height": 128, "batch_size": 1}}
    bench.node(prompt, DECODE)["inputs"]["samples"] = ["900", 0]


def _outside(bench: Bench, prompt: Json) -> None:
    bench.node(prompt, DECODE)["inputs"]["filename_prefix"] = "../outside"


def _blocked(bench: Bench, prompt: Json) -> None:
    (bench.server.output / "blocked").touch()
    bench.node(prompt, DECODE)["inputs"]["filename_prefix"] = "blocked/clip"


FAILURES = (
    Failure(name="a value out of range", words="anchor_stride=0", change=_bad_stride),
    Failure(name="a missing file", words="is missing", around=without_file),
    Failure(name="latents of an image", words="samples has 4 axes", change=_image_latent),
    Failure(name="half a file", words="renderer_lora.safetensors", around=with_half_a_file),
    Failure(name="a path outside", words="outside", change=_outside),
    Failure(name="a file in the way of a folder", words="blocked", change=_blocked),
)


def fail(bench: Bench, number: int) -> str:
    """Fail in the next way."""
    failure = FAILURES[(number // 10 * 3 + number % 10 // 4) % len(FAILURES)]
    prompt = bench.prompt(seed=FIRST_SEED + 1 + number)
    failure.change(bench, prompt)
    with failure.around(bench):
        try:
            bench.client.run(prompt)
        except RunError as error:
            assert failure.words in str(error), f"{failure.name}: {error}"
            return f"failed: {failure.name}"
    raise AssertionError(f"{failure.name}: the run succeeded")


KINDS = (complete, cancel, fail, complete, complete, fail, cancel, complete, fail, complete)


def run_all(bench: Bench, runs: int) -> None:
    """Do the runs, and say after each how it ended."""
    for number in range(runs):
        bench.note(KINDS[number % len(KINDS)](bench, number))
        last = bench.samples[-1]
        print(
            f"{number + 1:4} {last['outcome']:32} {last['rss_mib']:8.0f} MiB {last['threads']:4} threads "
            f"{last['files']:4} files",
            flush=True,
        )


def rows(bench: Bench, *, seconds: float) -> list[Json]:
    """Return benchmark rows: first and last fifth after the warm-up, and what came out."""
    settled = bench.samples[WARM_UP:] or bench.samples
    part = max(1, len(settled) // 5)
    config = {
        "model": "embedded",
        "latents": 9,
        "runs": len(bench.samples),
        "outcomes": dict(sorted(bench.outcomes.items())),
        "seconds": round(seconds),
    }
    today = datetime.date.today().isoformat()
    shared = {"config": config, "machine": machine("cpu"), "date": today, "commit": commit()}
    found = []
    for name, unit in (("rss_mib", "MiB"), ("threads", "threads"), ("files", "files")):
        for when, some in (("first", settled[:part]), ("last", settled[-part:])):
            value = statistics.median(sample[name] for sample in some)
            found.append({"metric": f"soak_{name}_{when}_fifth", "value": value, "unit": unit, **shared})
    playable = sum(sum(len(chunk) for chunk in read_frames(path)) == FRAMES for path in bench.videos)
    found.append({"metric": "soak_videos", "value": len(bench.videos), "unit": "videos", **shared})
    found.append({"metric": "soak_videos_that_play", "value": playable, "unit": "videos", **shared})
    stray = [path for path in bench.server.output.rglob("*.mp4") if path not in bench.videos]
    found.append({"metric": "soak_stray_files", "value": len(stray), "unit": "files", **shared})
    return found


def main() -> int:
    """Run, print the rows, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    host = provisioned()
    if host is None:
        raise SystemExit("no ComfyUI here; run: python3 scripts/comfy_host.py provision --dev")
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(shutil.copytree(ROOT / "flashforward_core" / "assets", Path(folder) / "assets"))
        env = {"FLASHFORWARD_ASSETS": str(assets)}
        with Server(host=host, cpu=True, data=Path(folder) / "comfyui", env=env) as server:
            client = Client(server.url)
            workflow = to_api(json.loads((ROOT / "workflows" / "quickstart.json").read_text()), client.object_info())
            bench = Bench(client, server, assets, workflow)
            bench.node(workflow, PLAN)["inputs"]["seconds"] = NINE_LATENTS_S
            began = time.monotonic()
            run_all(bench, args.runs)
            found = rows(bench, seconds=time.monotonic() - began)
    for row in found:
        print(f"{row['metric']:28} {row['value']:.0f} {row['unit']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
