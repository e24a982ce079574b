"""A folder of videos and captions as training clips, with real mp4 files."""

import json
import os
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from flashforward_core.media import VideoWriter
from flashforward_core.model.loading import ASSETS
from flashforward_core.model.vae import encode_frames
from flashforward_core.train import folder as folder_module
from flashforward_core.train.data import LatentPool
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


def odd_video(path: Path, *, times: Sequence[Fraction], kind: str = "mp4") -> Path:
    """Write a video whose frame n is grey of level 3n and is shown at ``times[n]``, multiples of 1/30 s."""
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 30)
        for n, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), 3 * n, np.uint8), format="rgb24")
            frame.pts, frame.time_base = int(time * 30), Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def numbers(clip: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 3) for frame in clip]


def turned(path: Path, quarters_clockwise: int) -> Path:
    """Tag a video as phones do: the matrix of its track header says how to turn the picture (ISO/IEC 14496-12, 8.3)."""
    cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarters_clockwise]
    data = bytearray(path.read_bytes())
    struct.pack_into(">6i", data, data.index(b"tkhd") + 44, *(65536 * n for n in (cos, sin, 0, -sin, cos, 0)))
    path.write_bytes(data)
    return path


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


def test_captions_may_hold_any_character_and_files_a_byte_order_mark(tmp_path: Path) -> None:
    video(tmp_path / "a.mp4", frames=2)
    (tmp_path / "a.txt").write_text("a boat", encoding="utf-8-sig")
    assert [v.caption for v in captioned_videos(tmp_path)] == ["a boat"]
    caption = "one\u2028two\x85three"
    row = json.dumps({"file_name": "a.mp4", "caption": caption}, ensure_ascii=False)
    (tmp_path / "clips.jsonl").write_text(f"{row}\r\n{row}", encoding="utf-8-sig")
    assert [v.caption for v in captioned_videos(tmp_path)] == [caption, caption]


def test_unreadable_captions_are_refused_by_name(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            captioned_videos(tmp_path)

    video(tmp_path / "a.mp4", frames=2)
    (tmp_path / "a.txt").write_bytes("à la carte".encode("latin-1"))
    refused(r"a\.txt is not UTF-8 \(byte 0\); save it as UTF-8")
    manifest = tmp_path / "clips.jsonl"
    manifest.write_bytes('{"caption": "à"}'.encode("latin-1"))
    refused(r"clips\.jsonl is not UTF-8 \(byte 13\)")
    manifest.write_text('{"a":' * 100_000)
    refused(r"clips\.jsonl, line 1 is nested too deeply; write file_name and caption without nesting")
    manifest.unlink()
    pytest.importorskip("pyarrow")
    (tmp_path / "clips.parquet").write_bytes(b"no parquet file")
    refused(r"clips\.parquet cannot be read as Parquet")


def test_frames_are_picked_by_their_own_time(tmp_path: Path) -> None:
    times = [Fraction(n, 30) for n in range(60)] + [2 + Fraction(n, 5) for n in range(25)]
    form = ClipForm(width=32, height=16, frames=49, fps=16)
    clips = list(clips_of(odd_video(tmp_path / "odd.mp4", times=times), form))
    assert len(clips) == 2  # 6.9 s are 111 frames
    assert [numbers(clips[0])[16 * second] for second in (1, 2, 3)] == [30, 60, 65]
    for n, picked in enumerate(numbers(np.concatenate(clips))):
        assert abs(times[picked] - Fraction(n, 16)) == min(abs(time - Fraction(n, 16)) for time in times)


def test_a_jump_of_the_times_makes_no_still_clips(
    tmp_path: Path, vae: AutoencoderKLWan, caplog: pytest.LogCaptureFixture
) -> None:
    times = [Fraction(n, 15) for n in range(12)] + [Fraction(3600), Fraction(3601)]
    (tmp_path / "data").mkdir()
    odd_video(tmp_path / "data" / "jump.mp4", times=times)
    (tmp_path / "data" / "jump.txt").write_text("a jump")
    captions = encode_folder(tmp_path / "data", vae, form=FORM, cache=tmp_path / "cache", weights="w")[1]
    assert len(captions) == 2  # of 0.7 s
    assert "stands still for 1800 s after 0.8 s. Left out from there on; clips before that: 2" in caplog.text


def test_a_video_that_starts_late_begins_with_its_first_frame(tmp_path: Path) -> None:
    late = odd_video(tmp_path / "late.mkv", times=[3 + Fraction(n, 30) for n in range(12)], kind="matroska")
    assert numbers(next(clips_of(late, FORM))) in ([0, 2, 4, 6, 8], [0, 2, 4, 6, 7])  # 7.5 is as near to both


def test_frames_without_a_time_are_counted(tmp_path: Path) -> None:
    path = odd_video(tmp_path / "raw.mkv", times=[Fraction(n, 30) for n in range(12)], kind="h264")
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        assert [frame.pts for frame in container.decode(video=0)] == [None] * 12
    assert rate == 25  # what FFmpeg takes for a bare stream
    assert numbers(next(clips_of(path, FORM))) == [0, 2, 3, 5, 6]  # nearest to n * 25/16: 0, 1.56, 3.1, 4.7, 6.25


@pytest.mark.parametrize(("quarters", "side"), [(0, "left"), (1, "top"), (2, "right"), (3, "bottom")])
def test_videos_are_turned_as_their_tag_says(tmp_path: Path, quarters: int, side: str) -> None:
    picture = np.zeros((16, 32, 3), np.uint8)
    picture[:, :16] = 200
    with VideoWriter(tmp_path / "phone.mp4", width=32, height=16, fps=16, crf=0) as writer:
        writer.write(np.stack([picture] * 5))
    width, height = (16, 32) if quarters % 2 else (32, 16)
    form = ClipForm(width=width, height=height, frames=5, fps=16)
    clip = next(clips_of(turned(tmp_path / "phone.mp4", quarters), form))
    sides = {"left": clip[:, :, :14], "right": clip[:, :, -14:], "top": clip[:, :14], "bottom": clip[:, -14:]}
    assert clip.shape == (5, height, width, 3) and sides[side].min() > 180 and clip.mean() < 110


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

    moved = data.rename(tmp_path / "elsewhere")
    assert encode_folder(moved, vae, **options)[1] == captions and len(encoded) == 1
    data = moved.rename(data)

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


def test_a_damaged_video_is_left_out_by_name(
    tmp_path: Path, vae: AutoencoderKLWan, caplog: pytest.LogCaptureFixture
) -> None:
    data = filled(tmp_path / "data", lengths=(5, 5, 5))
    whole = (data / "0.mp4").read_bytes()
    pictures = whole.index(b"mdat") + 4
    (data / "0.mp4").write_bytes(whole[:pictures] + bytes(len(whole) - pictures))
    (data / "2.mp4").write_bytes(b"")
    captions = encode_folder(data, vae, form=FORM, cache=tmp_path / "cache", weights="w")[1]
    assert captions == ["video 1"]
    assert f"{data / '0.mp4'} is damaged at its start (Invalid data found" in caplog.text
    assert f"{data / '2.mp4'} holds no video" in caplog.text
    assert "shorter than a clip" not in caplog.text


def test_a_title_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with VideoWriter(path, width=32, height=16, fps=16, crf=0, metadata={"title": "cafe"}) as writer:
        writer.write(np.zeros((5, 16, 32, 3), np.uint8))
    path.write_bytes(path.read_bytes().replace(b"cafe", "café".encode("latin-1")))
    with pytest.raises(ValueError, match=r"a\.mp4 has a title or other tags that are not UTF-8; remove them: ffmpeg"):
        next(clips_of(path, FORM))


def test_clips_before_the_damage_are_kept(
    tmp_path: Path, vae: AutoencoderKLWan, caplog: pytest.LogCaptureFixture
) -> None:
    data = filled(tmp_path / "data", lengths=(100,))  # key frames are 32 frames apart
    whole = (data / "0.mp4").read_bytes()
    with av.open(str(data / "0.mp4")) as container:
        keys = [packet.pos for packet in container.demux(video=0) if packet.is_keyframe]
    (data / "0.mp4").write_bytes(whole[: keys[-1]] + bytes(len(whole) - keys[-1]))
    captions = encode_folder(data, vae, form=FORM, cache=tmp_path / "cache", weights="w")[1]
    assert captions and "is damaged after" in caplog.text and f"clips before that: {len(captions)}" in caplog.text


def pool(*, clips: int = 2) -> LatentPool:
    ids = torch.zeros(clips, 4, dtype=torch.long)
    latents = torch.full((clips, 16, 2, 2, 4), float(clips), dtype=torch.bfloat16)
    return LatentPool(latents=latents, ids=ids, mask=ids == 0, empty_ids=ids[:1].clone(), empty_mask=ids[:1] == 0)


def test_an_interrupted_save_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    path = tmp_path / "latents" / "w.safetensors"
    pool(clips=2).save(path)
    for module in ("folder", "data"):  # whichever of them writes
        monkeypatch.setattr(f"flashforward_core.train.{module}.save_file", half, raising=False)
    with pytest.raises(OSError, match="no space left"):
        pool(clips=3).save(path)
    assert torch.equal(LatentPool.load(path, device=torch.device("cpu")).latents, pool(clips=2).latents)


def test_cut_off_latents_are_refused_with_what_to_delete(tmp_path: Path, vae: AutoencoderKLWan) -> None:
    path = tmp_path / "w.safetensors"
    pool().save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        ValueError, match=r"w\.safetensors is damaged \(.*\); delete it, and its clips are encoded again"
    ):
        LatentPool.load(path, device=torch.device("cpu"))

    data = filled(tmp_path / "data", lengths=(5,))
    options = {"form": FORM, "cache": tmp_path / "cache", "weights": "w"}
    encode_folder(data, vae, **options)
    shard = next((tmp_path / "cache").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"0000000\.safetensors is damaged .* delete it"):
        encode_folder(data, vae, **options)
    shard.unlink()
    assert encode_folder(data, vae, **options)[1] == ["video 0"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_encoded_clips_get_the_permissions_of_any_new_file(tmp_path: Path, vae: AutoencoderKLWan) -> None:
    before = os.umask(0o027)
    try:
        pool().save(tmp_path / "cache" / "w.safetensors")
        data = filled(tmp_path / "data", lengths=(5,))
        encode_folder(data, vae, form=FORM, cache=tmp_path / "cache", weights="w")
    finally:
        os.umask(before)
    files = list((tmp_path / "cache").rglob("*.safetensors"))
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640, 0o640]


def test_a_clip_has_4n_plus_1_frames() -> None:
    with pytest.raises(ValueError, match="frames=8 is not 4n\\+1 and 5 or more; use frames=9"):
        ClipForm(width=32, height=16, frames=8, fps=16)
