"""Video files: a streaming H.264 writer, a reader and a probe. The only user of PyAV besides ``train/data``.

While it runs the writer fills a fragmented MP4 beside the target (``clip.partial.mp4``), because that stays playable
whatever happens. Closing copies its packets, unchanged, into a file with its index in front and renames that to the
target, which therefore never exists half-written. No other file that was there before is touched: where one has the
partial file's name, that becomes ``clip.partial-2.mp4``, and so on. Frames are [F, H, W, 3] uint8 RGB; F H W are
frames, height, width.
"""

import contextlib
import itertools
import logging
import signal
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace

from .names import check_name

logger = logging.getLogger(__name__)

BT709 = 1  # ITU-T H.273 code points of BT.709, the same for primaries, transfer and matrix
TAG_NAMES = {1: "bt709", 2: "unknown", 5: "bt470bg", 6: "smpte170m", 9: "bt2020", 13: "srgb"}
RANGE_NAMES = {0: "unknown", 1: "tv", 2: "pc"}

# default_base_moof: offsets within each fragment; use_metadata_tags: keys of any name, such as ComfyUI's "workflow"
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof+use_metadata_tags", "flush_packets": "1"}
FINISHED = {"movflags": "faststart+use_metadata_tags"}
FRAGMENT_S = 2  # at most this much is lost in a crash, besides what the encoder looks ahead


class VideoWriter:
    """Encode frames as they come: H.264, yuv420p, BT.709, limited range.

    As a context manager it finishes the file on success and keeps the partial one when an exception passes.
    It belongs to one thread at a time and holds no more frames than the encoder looks ahead.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        width: int,
        height: int,
        fps: float | Fraction,
        metadata: Mapping[str, str] | None = None,
        crf: int = 17,
    ) -> None:
        """Start ``path`` (its folder must exist). ``crf`` is x264's quality: 0 lossless, 17 hardly visible, 51 worst.

        ``metadata`` is embedded as it is. Raises ``ValueError`` for odd sizes, for fps or crf out of range and for the
        name of an unfinished video, which may be another writer's.
        """
        _check_settings(width=width, height=height, fps=fps, crf=crf)
        check_name(Path(path))
        self.path = Path(path)
        self.partial_path = _new_file(self.path, "partial")
        self.frames = 0
        self._size = (height, width, 3)
        self._container = av.open(str(self.partial_path), "w", format="mp4", options=FRAGMENTED)
        self._metadata = dict(metadata or {})
        self._container.metadata.update(self._metadata)
        self._stream = _add_h264(self._container, width=width, height=height, fps=_as_fraction(fps), crf=crf)
        self._open = True

    def write(self, frames_FHWC: np.ndarray) -> None:
        """Append uint8 RGB frames [F, H, W, 3]."""
        assert self._open, f"{self.path.name} is closed"
        if frames_FHWC.dtype != np.uint8 or frames_FHWC.shape[1:] != self._size:
            raise ValueError(
                f"frames are {frames_FHWC.dtype} {frames_FHWC.shape}; this video takes uint8 (frames, {self._size})"
            )
        for rgb in frames_FHWC:
            frame = _to_yuv709(rgb)
            frame.pts, frame.time_base = self.frames, self._stream.codec_context.time_base
            with _uninterrupted():  # later frames refer to this one, so its packet must not get lost
                self._container.mux(self._stream.encode(frame))
                self.frames += 1

    def close(self) -> None:
        """Finish the file: its index in front, at its own name. A second call does nothing."""
        if not self._open:
            return
        if not self.frames:
            self.abort()
            raise ValueError(f"no frame was written to {self.path}; write at least one")
        try:
            self._finish_partial()
            self._publish()
        except BaseException:
            self.abort()
            raise
        self._open = False

    def abort(self, *, keep: bool = True) -> None:
        """Stop without the target. ``keep`` leaves a playable ``partial_path`` when it holds a frame."""
        if not self._open:
            return
        self._open = False
        try:
            self._finish_partial()
        except (OSError, av.FFmpegError) as error:  # say why, but do not hide the error that led here
            logger.warning("the end of %s could not be written: %s", self.partial_path.name, error)
        if not keep or not self.frames:
            self.partial_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _finish_partial(self) -> None:
        """Write what the encoder still holds; the file is closed even when that fails. Once only."""
        if self._container is None:
            return
        with _uninterrupted():
            container, self._container = self._container, None
            with container:
                if self.frames:
                    container.mux(self._stream.encode(None))

    def _publish(self) -> None:
        finished = _new_file(self.path, "finished")
        try:
            _copy_packets(self.partial_path, finished, metadata=self._metadata)
            finished.replace(self.path)
        finally:
            finished.unlink(missing_ok=True)
        self.partial_path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """What a video file says about itself."""

    width: int
    height: int
    fps: Fraction
    frames: int
    """Counted packets, not a header's claim."""
    codec: str
    pix_fmt: str
    primaries: str
    transfer: str
    matrix: str
    color_range: str
    """``tv`` (limited), ``pc`` (full) or ``unknown``."""
    metadata: dict[str, str]
    faststart: bool
    """Whether the index comes before all pictures, so that playing can start while loading."""


def probe(path: str | Path) -> VideoInfo:
    """Describe a video file without decoding it. Raises ``ValueError`` when it holds no video."""
    with _opened(path) as container:
        stream = _video_stream(container, path)
        codec = stream.codec_context
        return VideoInfo(
            width=codec.width,
            height=codec.height,
            fps=Fraction(stream.average_rate or 0),
            frames=sum(1 for packet in container.demux(stream) if packet.size),
            codec=codec.name,
            pix_fmt=str(codec.pix_fmt),
            primaries=_tag(codec.color_primaries),
            transfer=_tag(codec.color_trc),
            matrix=_tag(codec.colorspace),
            color_range=RANGE_NAMES.get(int(codec.color_range), "unknown"),
            metadata=dict(container.metadata),
            faststart=_is_faststart(Path(path)),
        )


def read_frames(path: str | Path, *, chunk: int = 1) -> Iterator[np.ndarray]:
    """Decode to uint8 RGB arrays [chunk, H, W, 3] (the last may be shorter); never more than one chunk in memory."""
    with _opened(path) as container:
        held: list[np.ndarray] = []
        for frame in container.decode(_video_stream(container, path)):
            held.append(_to_rgb(frame))
            if len(held) == chunk:
                yield np.stack(held)
                held = []
        if held:
            yield np.stack(held)


def read_timed_frames(path: str | Path, *, fps: float) -> Iterator[tuple[Fraction, np.ndarray]]:
    """Decode to seconds since the first frame and pictures turned upright, uint8 RGB [H, W, 3], one at a time.

    A frame that carries no time follows the one before at the stream's average rate, or at ``fps`` where it has none.
    Raises ``ValueError`` when the file holds no video or is damaged, then only after the frames before the damage.
    """
    with _opened(path) as container:
        stream = _video_stream(container, path)
        step = 1 / Fraction(stream.average_rate or fps)
        time, first = -step, None
        try:
            for frame in container.decode(stream):
                time = time + step if frame.pts is None else frame.pts * Fraction(frame.time_base)
                first = time if first is None else first
                upright = np.rot90(_to_rgb(frame), round(frame.rotation / 90))  # both counterclockwise
                yield time - first, np.ascontiguousarray(upright)
        except av.FFmpegError as error:  # its own message names no file
            if isinstance(error, OSError):  # the disk's or the network's fault, so the next try may succeed
                raise OSError(f"{path} could not be read ({error.strerror}); try again") from error
            place = "at its start" if first is None else f"after {float(time - first):.1f} s"
            raise ValueError(f"{path} is damaged {place} ({error.strerror}); replace it or take it out") from error


def check_crf(crf: int) -> None:
    """Raise ``ValueError`` for a quality that x264 does not know."""
    if not 0 <= crf <= 51:
        raise ValueError(f"crf={crf} is outside 0 to 51; use crf=17")


def _new_file(target: Path, kind: str) -> Path:
    """Create an empty file beside ``target`` that no one else has: ``clip.kind.mp4``, ``clip.kind-2.mp4``, …"""
    for number in itertools.count(1):
        path = target.with_name(f"{target.stem}.{kind}{'' if number == 1 else f'-{number}'}.mp4")
        with contextlib.suppress(FileExistsError):
            path.open("xb").close()
            return path
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let the handlers of ctrl-C and SIGTERM run only after the block. Other threads than the main one run none."""
    arrived: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            handlers[arrived[0]](arrived[0], None)


def _check_settings(*, width: int, height: int, fps: float | Fraction, crf: int) -> None:
    for name, value in (("width", width), ("height", height)):
        if value < 2 or value % 2:
            raise ValueError(f"{name}={value} is not a positive even number, as yuv420p needs; use {value + value % 2}")
    if not 0 < fps <= 240:
        raise ValueError(f"fps={fps} is outside (0, 240]; Wan models are made for fps=16")
    check_crf(crf)


def _as_fraction(fps: float | Fraction) -> Fraction:
    return Fraction(fps).limit_denominator(1001)  # 1001 holds the broadcast rates, such as 24000/1001


def _add_h264(container: Any, *, width: int, height: int, fps: Fraction, crf: int) -> Any:
    # No B-frames: frames are stored in the order shown, so a partial file needs no edit list to start at 0.
    options = {"crf": str(crf), "bf": "0", "g": str(max(1, round(fps * FRAGMENT_S)))}
    stream = container.add_stream("libx264", rate=fps, options=options)
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    stream.time_base = stream.codec_context.time_base = 1 / fps
    codec = stream.codec_context
    codec.color_primaries = codec.color_trc = codec.colorspace = BT709
    codec.color_range = ColorRange.MPEG
    return stream


def _to_yuv709(rgb_HWC: np.ndarray) -> Any:
    """Convert full-range RGB by the BT.709 matrix to limited range, which is what the tags say."""
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb_HWC), format="rgb24")
    return frame.reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU709,
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
    )


def _to_rgb(frame: Any) -> np.ndarray:
    """Convert by the frame's own tags; without any, by BT.709 as ours have."""
    known = {int(space) for space in Colorspace}
    matrix = Colorspace(int(frame.colorspace)) if int(frame.colorspace) in known else Colorspace.ITU709
    full = int(frame.color_range) == ColorRange.JPEG
    rgb = frame.reformat(
        format="rgb24",
        src_colorspace=matrix,
        src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
    )
    return rgb.to_ndarray()


def _copy_packets(source: Path, target: Path, *, metadata: Mapping[str, str]) -> None:
    """Copy the compressed video into a file with its index in front."""
    with av.open(str(source)) as reader, av.open(str(target), "w", format="mp4", options=FINISHED) as writer:
        stream = reader.streams.video[0]
        copy = writer.add_stream_from_template(stream)
        copy.time_base = stream.time_base
        writer.metadata.update(metadata)
        for packet in reader.demux(stream):
            if packet.size:  # the last, empty packet only says that the file is over
                packet.stream = copy
                writer.mux(packet)


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    try:
        container = av.open(str(path))
    except UnicodeDecodeError as error:  # PyAV reads them at once; how to be lenient differs between its versions
        remedy = "remove them: ffmpeg -i IN -map_metadata -1 -c copy OUT"
        raise ValueError(f"{path} has a title or other tags that are not UTF-8; {remedy}") from error
    except av.FFmpegError as error:
        if isinstance(error, OSError):  # missing or not ours to read; it names the file
            raise
        raise ValueError(f"{path} holds no video; use a video file") from error
    with container:
        yield container


def _video_stream(container: Any, path: str | Path) -> Any:
    if not container.streams.video:
        raise ValueError(f"{path} holds no video; use a video file")
    return container.streams.video[0]


def _tag(value: Any) -> str:
    return TAG_NAMES.get(int(value), str(int(value)))


def _is_faststart(path: Path) -> bool:
    kinds = _mp4_boxes(path)
    return b"moov" in kinds and b"moof" not in kinds and kinds.index(b"moov") < kinds.index(b"mdat")


def _mp4_boxes(path: Path) -> list[bytes]:
    """Types of an MP4's top-level boxes, in order; empty for other containers (ISO/IEC 14496-12, 4.2)."""
    kinds: list[bytes] = []
    with path.open("rb") as file:
        while len(head := file.read(16)) >= 8:
            size, kind = struct.unpack(">I4s", head[:8])
            if size == 1 and len(head) == 16:  # a 64-bit size follows
                size = struct.unpack(">Q", head[8:])[0]
            if size < 8 or (not kinds and kind != b"ftyp"):
                break
            kinds.append(kind)
            file.seek(size - len(head), 1)
    return kinds
