"""A folder of videos and captions as training clips: found, decoded, encoded once, and kept as safetensors shards.

Captions come from a manifest in the folder (``*.jsonl`` or ``*.parquet`` with the columns ``file_name`` and
``caption``), or from a text file of the video's name beside it. Every video is brought to the model's rate and size:
frames are picked by their time, pictures are scaled to cover the size and cropped to their middle. A video longer than
a clip gives several, one after the other.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashforward_core.model.vae import encode_frames

log = logging.getLogger(__name__)

VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
MANIFESTS = (".jsonl", ".parquet")
SHARD_VIDEOS = 64
"""Videos per shard: what an interrupted encoding does again at most."""
PICKING = 2
"""Which rule picked the clips' frames; a new rule needs a new number, so that old shards are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captioned:
    """A video file and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipForm:
    """What every clip is brought to."""

    width: int
    height: int
    frames: int
    """Video frames per clip, 4n+1."""
    fps: float

    def __post_init__(self) -> None:
        if self.frames < 5 or self.frames % 4 != 1:
            raise ValueError(
                f"frames={self.frames} is not 4n+1 and 5 or more; use frames={max(1, self.frames // 4) * 4 + 1}"
            )


def captioned_videos(folder: Path) -> list[Captioned]:
    """Return the folder's videos with their captions, by name.

    Raises ``ValueError`` for a folder without videos, a video without a caption, or a manifest that is off.
    """
    if not folder.is_dir():
        raise ValueError(f"data={folder} is no folder; name one that holds videos and captions")
    manifests = sorted(path for path in folder.iterdir() if path.suffix in MANIFESTS)
    if len(manifests) > 1:
        names = ", ".join(path.name for path in manifests)
        raise ValueError(f"{folder} has {len(manifests)} manifests ({names}); leave one")
    found = _from_manifest(manifests[0]) if manifests else _from_text_files(folder)
    if not found:
        raise ValueError(f"{folder} holds no videos ({', '.join(VIDEOS)}); put videos and their captions there")
    return sorted(found, key=lambda video: str(video.path))


def _from_text_files(folder: Path) -> list[Captioned]:
    videos = [path for path in folder.rglob("*") if path.suffix.lower() in VIDEOS]
    without = [path for path in videos if not path.with_suffix(".txt").is_file()]
    if without:
        name = without[0].with_suffix(".txt").name
        raise ValueError(f"{without[0]} has no caption; write it to {name} beside it, or add a manifest")
    return [_captioned(path, _text(path.with_suffix(".txt")), path) for path in videos]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _from_manifest(manifest: Path) -> list[Captioned]:
    found = []
    for number, row in enumerate(_rows(manifest), start=1):
        place = f"{manifest.name}, row {number}"
        name, caption = (row.get(column) for column in ("file_name", "caption"))
        if not isinstance(name, str) or not isinstance(caption, str):
            raise ValueError(f"{place} lacks text in 'file_name' or 'caption'; give every row both")
        path = (manifest.parent / name).resolve()
        if not path.is_file():
            raise ValueError(f"{place} names {name}, which is not there; correct the name or leave the row out")
        found.append(_captioned(path, caption, place))
    return found


def _captioned(path: Path, caption: str, place: object) -> Captioned:
    if not caption.strip():
        raise ValueError(f"{place} has an empty caption; say what the video shows")
    return Captioned(path=path, caption=caption.strip())


def _rows(manifest: Path) -> Iterator[dict[str, Any]]:
    if manifest.suffix == ".parquet":
        yield from _parquet_rows(manifest)
        return
    # not splitlines: it also splits at characters that a JSON text may hold, such as U+2028
    for number, line in enumerate(_text(manifest).split("\n"), start=1):
        if line.strip():
            yield _json_row(line, f"{manifest.name}, line {number}")


def _json_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON ({error.msg}); correct it") from error
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; write file_name and caption without nesting") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no object; write one with file_name and caption")
    return row


def _parquet_rows(manifest: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{manifest} needs pyarrow; install it with: pip install pyarrow") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(manifest).to_pylist()
    except (OSError, ValueError) as error:  # damage, or text that is not UTF-8; no message names the file
        raise ValueError(f"{manifest} cannot be read as Parquet ({error}); write it anew") from error
    return rows


LONGEST_STILL_S = 10
"""A longer picture is taken for a jump of the file's times, and would make clips in which nothing moves."""


def clips_of(path: Path, form: ClipForm) -> Iterator[np.ndarray]:
    """Decode a video to clips of ``form``, uint8 [frames, H, W, 3], one after the other; what is left is dropped.

    Each of a clip's times takes the frame that is shown nearest to it. Raises ``ValueError`` where the file is damaged.
    """
    from flashforward_core.media import read_timed_frames  # PyAV is needed for videos only, not for drawn scenes

    fps = Fraction(form.fps)
    kept: list[np.ndarray] = []
    wanted = 0  # frames of the clip's rate taken so far
    for end, picture in _nearest_until(read_timed_frames(path, fps=form.fps)):
        if end - wanted / fps > LONGEST_STILL_S:
            raise ValueError(
                f"{path} stands still for {float(end - wanted / fps):.0f} s after {float(wanted / fps):.1f} s"
            )
        while wanted / fps < end:  # a slow video's frames are repeated
            kept.append(_fitted(picture, form))
            wanted += 1
            if len(kept) == form.frames:
                yield np.stack(kept)
                kept = []


def _nearest_until(frames: Iterator[tuple[Fraction, np.ndarray]]) -> Iterator[tuple[Fraction, np.ndarray]]:
    """Replace each frame's time by the one up to which it is the nearest; the last lasts as long as the one before."""
    gap = Fraction(0)
    before: tuple[Fraction, np.ndarray] | None = None
    for time, picture in frames:
        if before is not None:
            gap = time - before[0]
            yield before[0] + gap / 2, before[1]
        before = time, picture
    if before is not None:
        yield before[0] + gap / 2, before[1]


def _fitted(frame_HWC: np.ndarray, form: ClipForm) -> np.ndarray:
    """Scale a frame [H, W, 3] to cover the form's size and crop its middle."""
    height, width = frame_HWC.shape[:2]
    if (height, width) == (form.height, form.width):
        return frame_HWC
    scale = max(form.height / height, form.width / width)
    size = (max(form.height, round(height * scale)), max(form.width, round(width * scale)))
    image = torch.from_numpy(frame_HWC).permute(2, 0, 1).unsqueeze(0).float()
    scaled = torch.nn.functional.interpolate(image, size=size, mode="bicubic", antialias=True, align_corners=False)
    top, left = (size[0] - form.height) // 2, (size[1] - form.width) // 2
    cropped = scaled[0, :, top : top + form.height, left : left + form.width]
    found: np.ndarray = cropped.round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return found


def encode_folder(
    folder: Path,
    vae: AutoencoderKLWan,
    *,
    form: ClipForm,
    cache: Path,
    weights: str,
    share: tuple[int, int] = (0, 1),
    shard_videos: int = SHARD_VIDEOS,
) -> tuple[Tensor, list[str]]:
    """Return the folder's clips [N, 16, F, h, w], normalised, in bfloat16 on the CPU, and their captions.

    They are encoded into shards under ``cache``, on the device of ``vae``; shards that are there are read. ``weights``
    tells autoencoders apart; a changed video, caption or form has shards of its own. ``share`` (number, processes) is
    this process's. Videos shorter than a clip are left out with a warning, damaged ones from the damage on. Raises
    ``ValueError`` for a damaged shard and where there is no clip.
    """
    videos = captioned_videos(folder)
    shard_videos = max(1, min(shard_videos, len(videos) // share[1]))  # so that each process has one
    target = cache / _key(videos, form, folder=folder, weights=weights, shard_videos=shard_videos)
    groups = list(range(0, len(videos), shard_videos))[share[0] :: share[1]]
    latents: list[Tensor] = []
    captions: list[str] = []
    for first in groups:
        shard = target / f"{first:07d}.safetensors"
        if not shard.is_file():
            _write_shard(shard, videos[first : first + shard_videos], vae, form)
        found, words = _read_shard(shard)
        latents.append(found)
        captions += words
    if not captions:
        seconds = form.frames / form.fps
        raise ValueError(
            f"{folder} has no video of {form.frames} frames at {form.fps:g} per second for process {share[0]} of "
            f"{share[1]}; add videos of {seconds:.1f} s or more, or train on shorter clips"
        )
    return torch.cat(latents), captions


def _key(videos: Sequence[Captioned], form: ClipForm, *, folder: Path, weights: str, shard_videos: int) -> str:
    """Name what the shards depend on, wherever ``folder`` lies."""
    files = [
        (os.path.relpath(v.path, folder), v.path.stat().st_size, v.path.stat().st_mtime_ns, v.caption) for v in videos
    ]
    told = json.dumps([PICKING, files, form.width, form.height, form.frames, form.fps, weights, shard_videos])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _write_shard(shard: Path, videos: Sequence[Captioned], vae: AutoencoderKLWan, form: ClipForm) -> None:
    """Encode the clips of ``videos``; the file appears when it is whole."""
    latents: list[Tensor] = []
    captions: list[str] = []
    for video in videos:
        for clip in _usable_clips(video.path, form):
            latents.append(encode_frames(vae, torch.from_numpy(clip).unsqueeze(0)).bfloat16().cpu())
            captions.append(video.caption)
    shape = (0, 16, (form.frames - 1) // 4 + 1, form.height // 8, form.width // 8)
    clips = torch.cat(latents) if latents else torch.empty(shape, dtype=torch.bfloat16)
    save_whole({"latents": clips.contiguous()}, shard, metadata={"captions": json.dumps(captions)})
    log.info("encoded %s: %d clips of %d videos", shard.name, len(captions), len(videos))


def _usable_clips(path: Path, form: ClipForm) -> Iterator[np.ndarray]:
    """Yield a video's clips; one that is damaged or too short gives a warning, so that the others are still encoded."""
    count = 0
    try:
        for clip in clips_of(path, form):
            count += 1
            yield clip
    except ValueError as error:
        log.warning("%s. Left out from there on; clips before that: %d", error, count)
        return
    if not count:
        log.warning("%s is shorter than a clip of %d frames: left out", path, form.frames)


def _read_shard(shard: Path) -> tuple[Tensor, list[str]]:
    with refused_if_damaged(shard), safe_open(shard, framework="pt") as file:
        return file.get_tensor("latents"), json.loads(file.metadata()["captions"])


def save_whole(tensors: dict[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that appears when it is whole, with the permissions that any new file gets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)  # an interrupted run's, perhaps with other permissions
    part.touch()
    mode = part.stat().st_mode
    save_file(tensors, part, metadata=metadata)
    part.chmod(mode)  # save_file lets nobody but the owner read it
    part.replace(path)


@contextlib.contextmanager
def refused_if_damaged(path: Path) -> Iterator[None]:
    """Raise ``ValueError`` when the safetensors file that the block reads is not whole."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and its clips are encoded again") from error
