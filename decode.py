"""Video files in, frames out: when each frame is on screen, and exactly the frames that were asked for.

Letters: h and w height and width of a file's own picture, in pixels. Pictures are (h, w, 3) uint8.

Everything is decoded by PyAV. Decoding begins at the last keyframe before the frames wanted, so that a clip deep in a
long file costs no more than one at its start. But what comes back is believed only where its time stamps say so: behind
a seek, decoders hand out neighbouring frames without a word (HEVC with open groups of pictures, H.264 with gradual
refresh), and some containers (AVI) have no stamps to check. There, and wherever a stamp is not the expected one, the
file is decoded from its first frame onwards. torch is not imported: this is what the workers of workers.py run.
"""

import base64
import hashlib
import io
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

import pictures
from manifests import DataError

# How much earlier than its header says a file may end; containers round durations, and audio ends on its own frames.
HEADER_SLACK = Fraction(1, 4)  # seconds
# How far stamps may lie from an even grid for the rate to count as constant: they are rounded, mostly to milliseconds.
STAMP_SLACK = Fraction(1, 1000)  # seconds
TURNS = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}  # quarter turns to the left that put an Exif orientation right, after
MIRRORED = (2, 4, 5, 7)  # these have been mirrored left to right


@dataclass(frozen=True)
class Timeline:
    """When each frame of a video is on screen. Small and of plain values, as it is kept in caches and sent about.

    `rate` in frames per second is exact where it is constant (`steady`), else the average. `stamps` are the frames'
    presentation times in units of `tick` seconds, in display order, and `keys` the numbers of those that a decoder can
    start at; both packed, and empty where the container has no stamps that can be trusted.
    """

    frames: int
    rate: Fraction
    steady: bool
    tick: Fraction
    stamps: str = ""
    keys: str = ""

    def frames_at(self, fps: Fraction) -> int:
        """How many frames the video has when brought to `fps`. A rate is a fraction, so 65 frames at 16 stay 65."""
        return max(1, self.frames * fps // self.rate)

    def indices(self, moments: Iterable[int], fps: Fraction) -> list[int]:
        """Which frame a viewer sees k / fps seconds after the first frame, for each k of `moments`."""
        if self.steady:
            return [k * self.rate // fps for k in moments]
        stamps = unpack(self.stamps)
        slack = min(Fraction(1, 2), STAMP_SLACK / self.tick)  # a frame that is due now may be stamped a little later
        due = [int(stamps[0]) + (k / (fps * self.tick) + slack) // 1 for k in moments]
        return (np.searchsorted(stamps, due, side="right") - 1).tolist()


@dataclass(frozen=True)
class Source:
    """What a file holds, whatever clips are made of it. A picture has no timeline."""

    kind: str  # "video" or "image"
    digest: str  # a hash of the file's bytes
    height: int  # of the upright picture
    width: int
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()  # what its owner should know


class Astray(Exception):
    """What a decoder gave behind a seek cannot be relied on."""


def idle():
    """Called wherever a long job gets on; a worker says then that it is alive."""


@contextmanager
def naming(path: Path):
    """Turns whatever goes wrong with reading `path` into a DataError that names it."""
    try:
        yield
    except (av.FFmpegError, OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from error


def inspect(path: Path, kind: str, alive: Callable[[], None] = idle) -> Source:
    """What a file holds, from its packets and its first frame. DataError, naming it, where it is missing or damaged."""
    with naming(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is no regular file")
    if not status.st_size:
        raise DataError(f"{path}: is empty (0 bytes)")
    digest = file_digest(path, alive)
    if kind == "image":
        height, width, _ = picture(path).shape
        return Source(kind, digest, height, width)
    try:
        timeline, notes = scan(path, alive)
        height, width, _ = next(frames(path, [0], timeline, alive=alive)).shape
    except DataError as error:
        if path.suffix.lower() == ".webp":
            raise DataError(f"{path}: this PyAV cannot decode animated WebP; make it a GIF or mp4") from error
        raise
    return Source(kind, digest, height, width, timeline, notes)


def file_digest(path: Path, alive: Callable[[], None] = idle) -> str:
    """A hash of a file's content: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with naming(path), open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            alive()
    return digest.hexdigest()


# ---- When which frame is on screen


def scan(path: Path, alive: Callable[[], None] = idle) -> tuple[Timeline, tuple[str, ...]]:
    """The timeline of a video file, and notes on it.

    Packets are read, without decoding, because headers may name no count or a wrong one. Where the packets of all
    streams end well before the header's duration, the file was cut short (an interrupted download or copy).
    """
    stamps, keys, lengths, end = [], [], [], Fraction(0)
    with naming(path), av.open(str(path.absolute())) as container:
        stream = video_stream(container, path)
        for packet in container.demux():
            alive()
            if not packet.size:
                continue  # the demuxer's end-of-stream mark
            at = packet.dts if packet.pts is None else packet.pts
            if at is not None:
                end = max(end, (at + (packet.duration or 0)) * packet.time_base)
            if packet.stream is stream and not packet.is_discard:
                stamps.append(packet.pts)
                lengths.append(packet.duration or 0)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        if "matroska" not in container.format.name:  # whose durations count from zero
            end -= Fraction(container.start_time or 0, av.time_base)
        promised = Fraction(container.duration or 0, av.time_base)
        named = [r for r in (stream.average_rate, stream.guessed_rate, stream.base_rate) if r]
        tick, notes = stream.time_base, colour_notes(stream)
        stamped = container.format.name != "avi"  # whose stamps number the packets and not the frames
    if end < promised - HEADER_SLACK:
        raise DataError(f"{path}: cut short: it ends at {float(end):.2f} of its {float(promised):.2f} seconds")
    if not stamps:
        raise DataError(f"{path}: holds no frames")
    if not stamped or None in stamps or len(set(stamps)) < len(stamps):
        if not named:
            raise DataError(f"{path}: neither its frames nor its header say how fast it runs, so it is no video")
        notes += (f"has no usable time stamps: its frames are shown at their average rate, {named[0]} fps",)
        return Timeline(len(stamps), named[0], True, tick), notes
    last = lengths[int(np.argmax(stamps))]
    stamps = np.sort(np.array(stamps, np.int64))
    rate, steady = find_rate(stamps, last, tick, named)
    numbers = np.searchsorted(stamps, np.sort(np.array(keys, np.int64)))
    return Timeline(len(stamps), rate, steady, tick, pack(stamps), pack(numbers)), notes


def find_rate(stamps: np.ndarray, last: int, tick: Fraction, named: list[Fraction]) -> tuple[Fraction, bool]:
    """The frame rate, and whether it is constant: whether the stamps lie on the grid of a rate that the header names,
    or of the first step. Else the average: so many frames by the time from the first to the end of the last, which
    is on screen for `last` ticks (0: unknown, taken as long as the one before)."""
    steps = np.diff(stamps)
    if len(stamps) == 1:
        return named[0] if named else Fraction(1), True
    for rate in [*named, 1 / (int(steps[0]) * tick)]:
        grid = np.arange(len(stamps)) * float(1 / (rate * tick))
        if np.abs(stamps - stamps[0] - grid).max() <= max(1e-6, min(1, STAMP_SLACK / tick)):
            return rate, True
    return len(stamps) / ((int(stamps[-1] - stamps[0]) + (last or int(steps[-1]))) * tick), False


def colour_notes(stream) -> tuple[str, ...]:
    notes = ()
    if stream.sample_aspect_ratio not in (None, 0, 1):
        notes += (f"has pixels of {stream.sample_aspect_ratio} aspect, which are taken as square",)
    if stream.codec_context.color_trc in (16, 18):  # PQ and HLG in ITU-T H.273
        notes += ("is HDR, which is not tone-mapped: its colours will look pale",)
    return notes


def pack(numbers: np.ndarray) -> str:
    """Ascending integers as text: their differences, which mostly repeat, compressed."""
    return base64.b64encode(zlib.compress(np.diff(numbers, prepend=0).astype("<i8").tobytes())).decode()


def unpack(text: str) -> np.ndarray:
    return np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")) if text else np.zeros(0, np.int64)


# ---- Frames


def video_stream(container, path: Path):
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        raise DataError(f"{path}: holds no video stream")
    return streams[0]


def frames(
    path: Path, indices: Sequence[int], timeline: Timeline, threads: int = 0, alive: Callable[[], None] = idle
) -> Iterator[np.ndarray]:
    """Yields the frames at `indices` (ascending, repeats allowed), upright."""
    before, picture = None, None
    for index, frame in zip(indices, decode_video(path, indices, timeline, threads, alive), strict=True):
        if index != before:
            before, picture = index, upright_rgb(frame)
        yield picture


def prove(
    path: Path, windows: Sequence[tuple[int, int]], timeline: Timeline, threads: int = 0, alive: Callable = idle
) -> None:
    """Decodes the frames of each window (first, last), both included, and keeps none. DataError where one does not."""
    if not timeline.stamps:  # no way but from the start, so once for all
        windows = [(min(first for first, _ in windows), max(last for _, last in windows))]
    for first, last in windows:
        for _ in decode_video(path, range(first, last + 1), timeline, threads, alive):
            pass


def decode_video(
    path: Path, indices: Sequence[int], timeline: Timeline, threads: int = 0, alive: Callable[[], None] = idle
) -> Iterator[av.VideoFrame]:
    """Yields the frames at `indices` (ascending, repeats allowed), in display order and counted from 0.

    First from the nearest keyframe, and if its frames are not the expected ones then from the start of the file.
    DataError where a frame is damaged or does not come.
    """
    done = 0
    for numbered in (numbered_from_key, numbered_from_start):
        with naming(path), av.open(str(path.absolute())) as container:
            stream = video_stream(container, path)
            stream.thread_type, stream.codec_context.thread_count = "AUTO", threads
            try:
                spoilt = False  # a damaged frame spoils all that are made of it, which is told of no frame but itself
                for number, frame in numbered(container, stream, timeline, indices[done]):
                    alive()
                    spoilt = frame.is_corrupt or (spoilt and not frame.key_frame)
                    if number > indices[done]:
                        break
                    while indices[done] == number:
                        if spoilt:
                            raise Astray(f"frame {number} is damaged")
                        yield frame
                        done += 1
                        if done == len(indices):
                            return
            except (Astray, av.FFmpegError) as error:
                if numbered is numbered_from_start:
                    reason = getattr(error, "strerror", None) or error
                    raise DataError(f"{path}: cannot be decoded: {reason}") from error
    raise DataError(f"{path}: frame {indices[done]} is needed, but of {timeline.frames} frames it does not decode")


def numbered_from_key(container, stream, timeline: Timeline, first: int) -> Iterator[tuple[int, av.VideoFrame]]:
    """Yields (number, frame) from the last keyframe that is not after frame `first` in display order.

    From it on every stamp must be the next one of the timeline, or the decoder lost its way and Astray is raised: so
    none of the frames may come that are stored behind a keyframe, shown before it, and made of others still earlier.
    """
    stamps, keys = unpack(timeline.stamps), unpack(timeline.keys)
    keys = keys[keys <= first]
    if len(keys) == 0 or keys[-1] == 0:
        return  # from the start, then
    packets, number = seek(container, stream, stamps, keys)
    for packet in packets:
        for frame in packet.decode():
            if number == len(stamps) or frame.pts != stamps[number]:
                raise Astray(f"frame {number} was not where it should be")
            yield number, frame
            number += 1
    raise Astray(f"frames end after {number}")


def seek(container, stream, stamps: np.ndarray, keys: np.ndarray) -> tuple[Iterator[av.Packet], int]:
    """Goes to the last of `keys` or, since demuxers land where they like, to one before: (packets from there on, the
    number of their first frame)."""
    for key in keys[:-4:-1]:
        container.seek(int(stamps[key]), stream=stream, backward=True)
        packets = container.demux(stream)
        start = next(packets)
        number = int(np.searchsorted(stamps, -1 if start.pts is None else start.pts))
        if start.size and start.is_keyframe and number <= keys[-1] and stamps[number] == start.pts:
            return chain(start, packets), number
    raise Astray("no keyframe was found")


def chain(first, rest):
    yield first
    yield from rest


def numbered_from_start(container, stream, timeline: Timeline, first: int) -> Iterator[tuple[int, av.VideoFrame]]:
    """Yields (number, frame) from the first frame on, by their stamps, or by counting where there are none."""
    stamps = {stamp: i for i, stamp in enumerate(unpack(timeline.stamps).tolist())}
    number = -1
    for frame in container.decode(stream):
        before, number = number, stamps.get(frame.pts, -1) if stamps else number + 1
        if number <= before:
            raise Astray(f"the frame after {before} has the stamp {frame.pts}, which is not the next one")
        yield number, frame


# ---- Pixels


def picture(path: Path, alive: Callable[[], None] = idle) -> np.ndarray:
    """A still, upright; transparent parts lie over white, grey becomes R = G = B, 16 bits are scaled to 8."""
    with naming(path):
        data = path.read_bytes()
        with av.open(io.BytesIO(data)) as container:  # a path with a % in it would be taken for a pattern
            if container.format.name == "apng":
                raise DataError(f"{path}: is an animated PNG, neither a still nor a video here; make it a GIF or mp4")
            for frame in container.decode(video_stream(container, path)):
                orientation = pictures.exif_orientation(data)
                pixels = over_white(frame)[:, :: -1 if orientation in MIRRORED else 1]
                return np.rot90(pixels, TURNS.get(orientation, 0))
    raise DataError(f"{path}: holds no picture")


def upright_rgb(frame: av.VideoFrame) -> np.ndarray:
    """A video's frame, turned as its display matrix asks (phones film sideways and say so there; quarter turns only,
    since PyAV does not tell of mirrored ones)."""
    return np.rot90(over_white(frame), round(frame.rotation / 90))


def over_white(frame: av.VideoFrame) -> np.ndarray:
    """The frame's pixels as they are stored: (h, w, 3) uint8; transparent parts lie over white."""
    if not (frame.format.has_palette or any(component.is_alpha for component in frame.format.components)):
        return frame.to_ndarray(format="rgb24")
    rgba = frame.to_ndarray(format="rgba")
    alpha = rgba[..., 3:] / np.float32(255)
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
