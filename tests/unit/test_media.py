"""Video files: what is written is read back, and nothing half-written ever has the target's name."""

import contextlib
import signal
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flashforward_core.media import VideoWriter, probe, read_frames

pytestmark = pytest.mark.cpu

WIDTH, HEIGHT = 96, 64
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 120, 40)]


def clip(frames: int) -> np.ndarray:
    """Moving noise over a gradient, so that every frame differs."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, WIDTH, dtype=np.uint8)[None, None, :, None]
    noise = rng.integers(0, 40, (frames, HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    return ramp + noise.repeat(8, 1).repeat(8, 2)


def patches(colour: tuple[int, int, int], frames: int = 3) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (frames, HEIGHT, WIDTH, 3))


def boxes(path: Path) -> list[bytes]:
    """Top-level MP4 boxes, read independently of the code under test."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        found.append(kind)
        at += size
    return found


def save(path: Path, frames: np.ndarray, **settings: object) -> Path:
    with VideoWriter(path, width=WIDTH, height=HEIGHT, fps=16, **settings) as writer:
        for chunk in np.array_split(frames, max(1, len(frames) // 12)):
            writer.write(chunk)
    return path


def test_321_frames_at_16_fps_are_exactly_that(tmp_path: Path) -> None:
    path = save(tmp_path / "clip.mp4", clip(321))
    info = probe(path)
    assert (info.width, info.height, info.fps, info.frames) == (WIDTH, HEIGHT, Fraction(16), 321)
    assert sum(1 for _ in read_frames(path)) == 321
    with av.open(str(path)) as container:
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
        assert times == [Fraction(i, 16) for i in range(321)]
        assert container.streams.video[0].frames == 321  # the header agrees


def test_file_is_h264_yuv420p_bt709_tv_with_its_index_in_front(tmp_path: Path) -> None:
    path = save(tmp_path / "clip.mp4", clip(5))
    info = probe(path)
    assert (info.codec, info.pix_fmt) == ("h264", "yuv420p")
    assert (info.primaries, info.transfer, info.matrix, info.color_range) == ("bt709", "bt709", "bt709", "tv")
    order = boxes(path)
    assert order.index(b"moov") < order.index(b"mdat") and b"moof" not in order
    assert info.faststart
    assert [file.name for file in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize("colour", COLOURS)
def test_luma_and_chroma_follow_bt709_limited_range(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = save(tmp_path / "clip.mp4", patches(colour), crf=1)
    red, green, blue = (channel / 255 for channel in colour)
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # ITU-R BT.709-6, item 3.2
    expected = [16 + 219 * luma, 128 + 224 * (blue - luma) / 1.8556, 128 + 224 * (red - luma) / 1.5748]
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        found = [np.frombuffer(plane, np.uint8)[plane.line_size * 10 + 10] for plane in frame.planes]
    # one step each for rounding and for compression; BT.601 would be off by up to 28 (green), full range by 16
    assert np.abs(np.array(found, float) - expected).max() <= 2


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_come_back(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = save(tmp_path / "clip.mp4", patches(colour), crf=1)
    frames = next(read_frames(path, chunk=8))
    assert frames.shape == (3, HEIGHT, WIDTH, 3) and frames.dtype == np.uint8
    # two steps of 8-bit chroma are up to 2 * 255 / 224 * 1.8556 = 4.2 levels of blue
    assert np.abs(frames.astype(int) - np.array(colour)).max() <= 5


def test_readers_see_frames_in_order_in_chunks(tmp_path: Path) -> None:
    frames = clip(10)
    path = save(tmp_path / "clip.mp4", frames, crf=1)
    parts = list(read_frames(path, chunk=4))
    assert [len(part) for part in parts] == [4, 4, 2]
    # 4:2:0 and compression blur the edges of 8-pixel squares; another frame's noise differs by 13 on average
    assert np.abs(np.concatenate(parts).astype(int) - frames).mean(axis=(1, 2, 3)).max() < 6


def test_metadata_survives(tmp_path: Path) -> None:
    metadata = {"prompt": '{"1": {"inputs": {"text": "eine Düne \\"山\\""}}}', "workflow": '{"nodes": []}' * 500}
    path = save(tmp_path / "clip.mp4", clip(2), metadata=metadata)
    found = probe(path).metadata
    assert {name: found[name] for name in metadata} == metadata


def test_a_broadcast_rate_stays_a_fraction(tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "clip.mp4", width=WIDTH, height=HEIGHT, fps=24000 / 1001) as writer:
        writer.write(clip(5))
    assert probe(tmp_path / "clip.mp4").fps == Fraction(24000, 1001)


def test_a_killed_process_leaves_a_playable_partial_and_no_target(tmp_path: Path) -> None:
    code = f"""
import os, numpy as np
from flashforward_core.media import VideoWriter
writer = VideoWriter({str(tmp_path / "clip.mp4")!r}, width=96, height=64, fps=16, metadata={{"prompt": "kept"}})
for i in range(160):
    writer.write(np.full((1, 64, 96, 3), i, np.uint8))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 9
    assert [file.name for file in tmp_path.iterdir()] == ["clip.partial.mp4"]
    frames = np.concatenate(list(read_frames(tmp_path / "clip.partial.mp4", chunk=50)))
    # the encoder looks about 40 frames ahead, some more per thread, and a fragment is 32 frames
    assert len(frames) >= 160 - 40 - 32 - 24
    # a grey level is found again within 2 steps of 8 bits, limited range
    assert np.abs(frames[:, 32, 48, 0].astype(int) - np.arange(len(frames))).max() <= 3
    assert probe(tmp_path / "clip.partial.mp4").metadata["prompt"] == "kept"


def test_a_full_disk_raises_and_leaves_no_target(tmp_path: Path) -> None:
    code = f"""
import resource, sys, numpy as np
from flashforward_core.media import VideoWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # a write past it fails, as on a full disk
rng = np.random.default_rng(0)
try:
    with VideoWriter({str(tmp_path / "clip.mp4")!r}, width=96, height=64, fps=16, crf=1) as writer:
        for _ in range(200):
            writer.write(rng.integers(0, 256, (1, 64, 96, 3), dtype=np.uint8))
except OSError:
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == 7
    assert [file.name for file in tmp_path.iterdir()] == ["clip.partial.mp4"]
    played = 0
    with contextlib.suppress(av.FFmpegError):  # the disk was full in the middle of a frame
        for _ in read_frames(tmp_path / "clip.partial.mp4"):
            played += 1
    assert played > 0


def test_an_exception_keeps_a_playable_partial_and_an_old_target(tmp_path: Path) -> None:
    path = save(tmp_path / "clip.mp4", clip(3))
    old = path.read_bytes()
    with (
        pytest.raises(RuntimeError, match="cancelled"),
        VideoWriter(path, width=WIDTH, height=HEIGHT, fps=16) as writer,
    ):
        writer.write(clip(7))
        raise RuntimeError("cancelled")
    assert path.read_bytes() == old
    assert probe(writer.partial_path).frames == 7


def test_abort_removes_what_nobody_needs(tmp_path: Path) -> None:
    empty = VideoWriter(tmp_path / "a.mp4", width=WIDTH, height=HEIGHT, fps=16)
    empty.abort()
    unwanted = VideoWriter(tmp_path / "b.mp4", width=WIDTH, height=HEIGHT, fps=16)
    unwanted.write(clip(2))
    unwanted.abort(keep=False)
    unwanted.abort()  # a second call does nothing
    assert list(tmp_path.iterdir()) == []


def test_closing_without_a_frame_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="no frame was written"),
        VideoWriter(tmp_path / "a.mp4", width=2, height=2, fps=1),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 95}, "width=95 is not a positive even number, as yuv420p needs; use 96"),
        ({"height": 0}, "height=0"),
        ({"fps": 0}, "fps=0 is outside"),
        ({"crf": 52}, "crf=52 is outside 0 to 51"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path: Path, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoWriter(tmp_path / "a.mp4", **{"width": WIDTH, "height": HEIGHT, "fps": 16, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_a_target_cannot_be_another_videos_unfinished_file(tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "a.mp4", width=WIDTH, height=HEIGHT, fps=16) as writer:
        writer.write(clip(3))
        for name in (writer.partial_path.name, "A.Finished-2.MP4"):
            with pytest.raises(ValueError, match="is how unfinished videos are called"):
                VideoWriter(tmp_path / name, width=WIDTH, height=HEIGHT, fps=16)
    assert probe(tmp_path / "a.mp4").frames == 3


@pytest.mark.parametrize("frames", [clip(2)[:, :32], clip(2).astype(np.float32), clip(2)[0]])
def test_frames_of_another_kind_are_refused(tmp_path: Path, frames: np.ndarray) -> None:
    with VideoWriter(tmp_path / "a.mp4", width=WIDTH, height=HEIGHT, fps=16) as writer:
        writer.write(clip(1))
        with pytest.raises(ValueError, match="this video takes uint8"):
            writer.write(frames)


def test_a_file_without_video_names_itself(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
    (tmp_path / "b.md").write_text("# Words")
    for name in ("a.wav", "b.md"):
        with pytest.raises(ValueError, match=rf"{name} holds no video"):
            probe(tmp_path / name)


@pytest.mark.parametrize("call", ["encode", "mux"])
def test_control_c_during_the_last_flush_keeps_every_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writer = VideoWriter(tmp_path / "clip.mp4", width=WIDTH, height=HEIGHT, fps=16)
    writer.write(clip(20))
    inner = writer._stream if call == "encode" else writer._container

    class Interrupted:
        """Gets ctrl-C just after (encode) or before (mux) the call."""

        def __enter__(self) -> "Interrupted":
            return self

        def __exit__(self, *_: object) -> None:
            inner.close()

        def encode(self, frame: object) -> object:
            packets = inner.encode(frame)
            signal.raise_signal(signal.SIGINT)
            return packets

        def mux(self, packets: object) -> None:
            signal.raise_signal(signal.SIGINT)
            inner.mux(packets)

    monkeypatch.setattr(writer, "_stream" if call == "encode" else "_container", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["clip.partial.mp4"]
    assert sum(len(frames) for frames in read_frames(writer.partial_path)) == 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    first = VideoWriter(path, width=WIDTH, height=HEIGHT, fps=16)
    second = VideoWriter(path, width=WIDTH, height=HEIGHT, fps=16)
    for _ in range(40):  # more than the encoder looks ahead, so that both files have begun
        first.write(patches((255, 0, 0)))
        second.write(patches((0, 0, 255), frames=2))
    first.close()
    assert probe(path).frames == 120
    second.close()
    frames = np.concatenate(list(read_frames(path)))
    assert len(frames) == 80 and frames[..., 2].mean() > 200 > 50 > frames[..., 0].mean()
    assert list(tmp_path.iterdir()) == [path]


def test_files_with_the_names_it_would_use_are_left_alone(tmp_path: Path) -> None:
    mine = [tmp_path / "clip.partial.mp4", tmp_path / "clip.finished.mp4"]
    for file in mine:
        file.write_bytes(b"mine")
    save(tmp_path / "clip.mp4", clip(3))
    assert [file.read_bytes() for file in mine] == [b"mine"] * 2
    assert sorted(tmp_path.iterdir()) == sorted([*mine, tmp_path / "clip.mp4"])
