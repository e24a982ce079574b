"""A folder of videos and captions as training clips, with real mp4 files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from flashforward_core.media import VideoWriter
from flashforward_core.model.loading import ASSETS
from flashforward_core.model.vae import encode_frames
from flashforward_core.train import folder as folder_module
from flashforward_core.train.folder import ClipForm, captioned_videos, clips_of, encode_folder

pytestmark = pytest.mark.cpu
FORM = ClipForm(width=32, height=16, frames=5, fps=16)


def video(path: Path, *, frames: int, fps: float = 16, width: int = 32, height: int = 16) -> Path:
    """Write a video whose frame n is grey of level 4n."""
    with VideoWriter(path, width=width, height=height, fps=fps, crf=0) as writer:
        writer.write(np.stack([np.full((height, width, 3), 4 * n % 256, np.uint8) for n in range(frames)]))
    return path


def levels(clip: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 4) for frame in clip]


def test_captions_come_from_text_files_beside_the_videos(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("b", "more/a"):
        video(tmp_path / f"{name}.mp4", frames=2)
        (tmp_path / f"{name}.txt").write_text(f" what {name} shows\n")
    (tmp_path / "notes.md").write_text("no video")
    found = captioned_videos(tmp_path)
    assert [(v.path.relative_to(tmp_path).as_posix(), v.caption) for v in found] == [
        ("b.mp4", "what b shows"),
        ("more/a.mp4", "what more/a shows"),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_captions_come_from_a_manifest(tmp_path: Path, kind: str) -> None:
    names = [video(tmp_path / f"{n}.mp4", frames=2).name for n in ("one", "two", "unlisted")]
    rows = [{"file_name": name, "caption": f"«{name}»", "more": 1} for name in names[:2]]
    if kind == "jsonl":
        (tmp_path / "clips.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "clips.parquet")
    assert [(v.path.name, v.caption) for v in captioned_videos(tmp_path)] == [(n, f"«{n}»") for n in names[:2]]


def test_folders_that_are_off_are_refused_by_name(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            captioned_videos(tmp_path)

    with pytest.raises(ValueError, match="is no folder"):
        captioned_videos(tmp_path / "nowhere")
    refused("holds no videos")
    video(tmp_path / "a.mp4", frames=2)
    refused(r"a\.mp4 has no caption; write it to a\.txt beside it")
    (tmp_path / "a.txt").write_text(" \n")
    refused("empty caption")
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text('{"file_name": "a.mp4"}\n')
    refused(r"clips\.jsonl, row 1 lacks text in 'file_name' or 'caption'")
    manifest.write_text('{"file_name": "b.mp4", "caption": "x"}\n')
    refused(r"row 1 names b\.mp4, which is not there")
    manifest.write_text("{\n")
    refused("line 1 is no JSON")
    manifest.write_text("3\n")
    refused("line 1 is no object")
    (tmp_path / "other.jsonl").write_text("")
    refused("has 2 manifests")


def test_long_videos_give_several_clips_and_rates_are_brought_to_the_form(tmp_path: Path) -> None:
    same = list(clips_of(video(tmp_path / "same.mp4", frames=13), FORM))
    assert [levels(clip) for clip in same] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]  # three frames are left over
    fast = list(clips_of(video(tmp_path / "fast.mp4", frames=20, fps=32), FORM))
    assert [levels(clip) for clip in fast] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
    slow = list(clips_of(video(tmp_path / "slow.mp4", frames=5, fps=8), FORM))
    assert levels(slow[0]) in ([0, 1, 1, 2, 2], [0, 0, 1, 1, 2])  # each frame twice, to the nearest time


def test_other_sizes_are_scaled_to_cover_and_cropped_to_their_middle(tmp_path: Path) -> None:
    path = tmp_path / "wide.mp4"
    picture = np.zeros((32, 128, 3), np.uint8)
    picture[:, 32:96] = 200  # the middle half: just what 2:1 keeps of 4:1
    with VideoWriter(path, width=128, height=32, fps=16, crf=0) as writer:
        writer.write(np.stack([picture] * 5))
    clip = next(clips_of(path, FORM))
    assert clip.shape == (5, 16, 32, 3)
    assert clip[:, :, 2:-2].min() > 180


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(ASSETS / "vae", torch_dtype=torch.float32).eval()


def filled(folder: Path, *, lengths: tuple[int, ...] = (5, 12, 3)) -> Path:
    folder.mkdir()
    for number, frames in enumerate(lengths):
        video(folder / f"{number}.mp4", frames=frames)
        (folder / f"{number}.txt").write_text(f"video {number}")
    return folder


def test_clips_are_encoded_once_and_read_back(
    tmp_path: Path, vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = filled(tmp_path / "data")
    options = {"form": FORM, "cache": tmp_path / "cache", "weights": "w", "shard_videos": 1}
    latents, captions = encode_folder(data, vae, **options)
    assert captions == ["video 0", "video 1", "video 1"] and "2.mp4 is shorter than a clip of 5 frames" in caplog.text
    clip = next(clips_of(data / "1.mp4", FORM))
    expected = encode_frames(vae, torch.from_numpy(clip).unsqueeze(0)).bfloat16()
    assert torch.equal(latents[1:2], expected) and latents.shape == (3, 16, 2, 2, 4)

    # An interrupted encoding leaves whole shards only, and going on makes the missing ones.
    shards = sorted((tmp_path / "cache").rglob("*.safetensors"))
    assert len(shards) == 3
    shards[1].unlink()
    encoded: list[Path] = []
    original = folder_module.clips_of
    monkeypatch.setattr(folder_module, "clips_of", lambda path, form: (encoded.append(path), original(path, form))[1])
    again, words = encode_folder(data, vae, **options)
    assert torch.equal(again, latents) and words == captions and [path.name for path in encoded] == ["1.mp4"]

    (data / "0.txt").write_text("another caption")
    assert encode_folder(data, vae, **options)[1][0] == "another caption"


def test_processes_share_the_videos_and_a_folder_of_short_ones_is_refused(
    tmp_path: Path, vae: AutoencoderKLWan
) -> None:
    data = filled(tmp_path / "data")
    options = {"form": FORM, "cache": tmp_path / "cache", "weights": "w"}
    shares = [encode_folder(data, vae, **options, share=(n, 2))[1] for n in range(2)]
    assert shares == [["video 0"], ["video 1", "video 1"]]
    short = filled(tmp_path / "short", lengths=(3,))
    with pytest.raises(
        ValueError, match=r"no video of 5 frames at 16 per second for process 0 of 1; add videos of 0\.3 s"
    ):
        encode_folder(short, vae, **options)


def test_a_clip_has_4n_plus_1_frames() -> None:
    with pytest.raises(ValueError, match="frames=8 is not 4n\\+1 and 5 or more; use frames=9"):
        ClipForm(width=32, height=16, frames=8, fps=16)
