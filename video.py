"""Files in, pixels out, and back: what a video or image file holds, its clips as tensors, mp4 files and contact sheets.

Letters: T frames, H and W height and width in pixels, 3 the colours R, G, B. Clips are float32 in [-1, 1].

Everything is decoded by PyAV, from the first frame onwards and never after a seek: behind a seek, or a skip that is
carried out as one, decoders count wrongly in ordinary files (HEVC with open groups of pictures, AVI without time
stamps) and hand out neighbouring frames without a word.
"""

import io
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from tqdm import tqdm

# How much earlier than its header says a file may end; containers round durations, and audio ends on its own frames.
HEADER_SLACK = Fraction(1, 4)  # seconds


class DataError(ValueError):
    """Something is wrong with the user's data; the message names the file or row."""


@dataclass(frozen=True)
class Item:
    """One captioned file. `kind` is "video" or "image"."""

    path: Path
    caption: str
    kind: str


@dataclass(frozen=True)
class ClipSpec:
    """How a file becomes a tensor: either a fixed height x width (scaled to cover it, cut at the centre), or the
    file's own aspect with at most `max_area` pixels and no enlarging. Edges are multiples of `multiple`: 8 of the
    VAE times 2 of the model's patches. Raises ValueError for sizes and lengths that the VAE cannot take."""

    height: int = 0
    width: int = 0
    max_area: int = 0
    frames: int = 81  # at most so many; 4n + 1, as the VAE makes a latent frame of the first and of each further four
    fps: Fraction = Fraction(16)  # the model's own rate: files are brought to it by dropping or repeating frames
    clips: int = 1  # at most so many windows of one video, evenly spread and not overlapping
    multiple: int = 16

    def __post_init__(self):
        if bool(self.max_area) == bool(self.height or self.width) or bool(self.height) != bool(self.width):
            raise ValueError(
                f"give either --height and --width or --max-area, not height {self.height}, width {self.width} "
                f"and max_area {self.max_area}"
            )
        for name in ("height", "width"):
            edge = getattr(self, name)
            if edge < 0 or edge % self.multiple:
                lower = max(self.multiple, edge // self.multiple * self.multiple)
                raise ValueError(f"--{name} {edge} is not a multiple of {self.multiple}; use {lower}")
        if self.max_area and self.max_area < self.multiple**2:
            raise ValueError(f"--max-area {self.max_area} is less than the smallest picture, {self.multiple**2} pixels")
        if self.frames < 1 or self.frames % 4 != 1:
            raise ValueError(f"--frames {self.frames} is not 4n + 1; use {max(1, whole_length(self.frames))}")
        if self.fps <= 0 or self.clips < 1:
            raise ValueError(f"fps {self.fps} and clips {self.clips} must be positive")
        object.__setattr__(self, "fps", Fraction(self.fps))


@dataclass(frozen=True)
class Probe:
    """What a file holds and which clips a ClipSpec takes of it. An image has one frame and no rates."""

    source_frames: int
    source_fps: Fraction | None
    width: int  # of the upright picture, before scaling
    height: int
    frames: int  # after bringing the file to the model's rate
    length: int  # T of each clip, 4n + 1
    starts: tuple[int, ...]  # where each variant starts, in frames of the model's rate
    clip_height: int
    clip_width: int


def whole_length(frames: int) -> int:
    """The largest 4n + 1 that is not above `frames`."""
    return (frames - 1) // 4 * 4 + 1


def probe(item: Item, spec: ClipSpec) -> Probe:
    """Looks into a file and proves that the frames which `spec` needs can be decoded.

    A rate is an exact fraction, so 65 frames at 16 fps stay 65. Raises DataError, naming the file, where it is
    missing, damaged, cut short, or too small.
    """
    if not item.path.is_file():
        raise DataError(f"{item.path}: no such file")
    if item.kind == "image":
        height, width, _ = decode_image(item.path).shape
        clip = clip_size(item.path, height, width, spec)
        return Probe(1, None, width, height, 1, 1, (0,), *clip)

    source_frames, source_fps = count_frames(item.path)
    frames = max(1, math.floor(source_frames * spec.fps / source_fps))
    length = min(spec.frames, whole_length(frames))
    variants = min(spec.clips, max(1, frames // spec.frames))
    starts = tuple(i * (frames - length) // max(1, variants - 1) for i in range(variants))
    last = source_index(starts[-1] + length - 1, source_fps, spec.fps)
    first, *_ = (upright_rgb(frame) for frame in decode_video(item.path, [0, last]))
    height, width, _ = first.shape
    clip = clip_size(item.path, height, width, spec)
    return Probe(source_frames, source_fps, width, height, frames, length, starts, *clip)


def probe_all(items: Sequence[Item], spec: ClipSpec, threads: int = 8, progress: bool = False) -> list[Probe]:
    """Probes every item. Raises one DataError that lists all the files at fault, so they are mended in one go."""

    def attempt(item):
        try:
            return probe(item, spec)
        except DataError as error:
            return error

    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(attempt, items)
        found = list(tqdm(found, "reading files", len(items), disable=not progress))
    if errors := list(dict.fromkeys(str(error) for error in found if isinstance(error, DataError))):
        raise DataError("\n  ".join([f"{len(errors)} of the data's files cannot be used:", *errors]))
    return found


def load_clip(item: Item, found: Probe, spec: ClipSpec, variant: int = 0) -> Tensor:
    """Variant `variant` of a file as (3, T, H, W) float32 in [-1, 1], with `found` = probe(item, spec).

    Frame k shows what a viewer sees k / fps seconds into the clip. Each frame is scaled as soon as it is decoded, so
    memory holds the clip and not the file. Raises DataError where a frame does not decode.
    """
    size = found.clip_height, found.clip_width
    if item.kind == "image":
        return fit(decode_image(item.path), size)[:, None]
    start = found.starts[variant]
    indices = [source_index(k, found.source_fps, spec.fps) for k in range(start, start + found.length)]
    return torch.stack([fit(upright_rgb(frame), size) for frame in decode_video(item.path, indices)], dim=1)


def source_index(k: int, source_fps: Fraction, fps: Fraction) -> int:
    """The source frame on screen when frame k of the model's rate is due, at k / fps seconds."""
    return math.floor(k * source_fps / fps)


def clip_size(path: Path, height: int, width: int, spec: ClipSpec) -> tuple[int, int]:
    """(H, W) of the clips of a height x width file. With max_area the scale is sqrt(max_area / (height width)) or 1;
    integer square roots keep a file that fits exactly from losing a row to rounding."""
    if not spec.max_area:
        return spec.height, spec.width
    h = min(height, math.isqrt(spec.max_area * height // width)) // spec.multiple * spec.multiple
    w = min(width, math.isqrt(spec.max_area * width // height)) // spec.multiple * spec.multiple
    if not h or not w:
        raise DataError(
            f"{path}: {width}x{height} within {spec.max_area} pixels leaves an edge under {spec.multiple}; "
            "raise --max-area, or give --height and --width, which enlarge small files"
        )
    return h, w


def fit(picture: np.ndarray, size: tuple[int, int]) -> Tensor:
    """A (h, w, 3) uint8 picture, scaled to cover `size` = (H, W) and cut at its centre: (3, H, W) in [-1, 1].
    Bicubic with antialiasing, so shrinking does not leave aliases for the model to learn."""
    (h, w, _), (H, W) = picture.shape, size
    if H * w >= W * h:
        scaled = H, (2 * w * H + h) // (2 * h)
    else:
        scaled = (2 * h * W + w) // (2 * w), W
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).to(torch.float32)  # (3, h, w)
    if scaled != (h, w):
        pixels = interpolate(pixels[None], scaled, mode="bicubic", antialias=True)[0].clamp(0, 255)
    top, left = (scaled[0] - H) // 2, (scaled[1] - W) // 2
    return pixels[:, top : top + H, left : left + W] / 127.5 - 1  # (3, H, W)


@contextmanager
def naming(path: Path):
    """Turns whatever goes wrong with reading `path` into a DataError that names it."""
    try:
        yield
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def video_stream(container, path: Path):
    if not container.streams.video:
        raise DataError(f"{path}: holds no video stream")
    return container.streams.video[0]


def count_frames(path: Path) -> tuple[int, Fraction]:
    """The frames in a video file and their exact average rate.

    Packets are counted, without decoding, because headers may name no count or a wrong one. Where the packets of all
    streams end well before the header's duration, the file was cut short (an interrupted download or copy).
    """
    count, end = 0, Fraction(0)
    with naming(path), av.open(str(path)) as container:
        stream = video_stream(container, path)
        for packet in container.demux():
            if not packet.size:
                continue  # the demuxer's end-of-stream mark
            at = packet.dts if packet.pts is None else packet.pts
            if at is not None:
                end = max(end, (at + (packet.duration or 0)) * packet.time_base)
            count += packet.stream is stream and not packet.is_discard
        rate = stream.average_rate
        end -= Fraction(container.start_time or 0, av.time_base)
        promised = Fraction(container.duration or 0, av.time_base)
    if end < promised - HEADER_SLACK:
        raise DataError(f"{path}: cut short: it ends at {float(end):.2f} of its {float(promised):.2f} seconds")
    if not count or not rate:
        raise DataError(f"{path}: {count} frames at rate {rate}, so it is no video")
    return count, rate


def decode_video(path: Path, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
    """Yields the frames at `indices` (ascending, repeats allowed), in display order and counted from 0."""
    decoded, wanted = 0, 0
    with naming(path), av.open(str(path)) as container:
        stream = video_stream(container, path)
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            while indices[wanted] == decoded:
                if frame.is_corrupt:
                    raise DataError(f"{path}: frame {decoded} is damaged")
                yield frame
                wanted += 1
                if wanted == len(indices):
                    return
            decoded += 1
    raise DataError(f"{path}: frame {indices[wanted]} is needed, but only {decoded} frames decode")


def upright_rgb(frame: av.VideoFrame) -> np.ndarray:
    """(h, w, 3) uint8, turned as the file's display matrix asks (phones film sideways and say so there). Only
    quarter turns: PyAV does not say whether a picture is mirrored, so the rare JPEG with such an EXIF orientation is
    not put right."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def decode_image(path: Path) -> np.ndarray:
    """A still picture as upright (h, w, 3) uint8; transparent parts lie over white, grey becomes R = G = B."""
    with naming(path), av.open(io.BytesIO(path.read_bytes())) as container:  # of a path, %d would be a pattern
        video_stream(container, path)
        for frame in container.decode(video=0):
            rgba = frame.to_ndarray(format="rgba")
            alpha = rgba[..., 3:] / np.float32(255)
            flat = np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
            return np.rot90(flat, round(frame.rotation / 90))
    raise DataError(f"{path}: holds no picture")


def to_pixels(video: Tensor) -> np.ndarray:
    """(3, T, H, W) in [-1, 1], clamped, to (T, H, W, 3) uint8."""
    levels = (video.detach().to("cpu", torch.float32).clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8).permute(1, 2, 3, 0).contiguous().numpy()


def write_mp4(path: Path | str, video: Tensor, fps: Fraction | int) -> None:
    """Writes (3, T, H, W) in [-1, 1] as H.264, with BT.709 colours that the file is tagged with, for a player would
    otherwise guess by the size. Raises ValueError for odd edges, which 4:2:0 cannot hold."""
    _, _, height, width = video.shape
    if height % 2 or width % 2:
        raise ValueError(f"{width}x{height} has an odd edge, which yuv420p video cannot hold")
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "16"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        bt709, limited = 1, 1  # their numbers in ITU-T H.273, which FFmpeg's enumerations follow
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = bt709
        context.color_range = limited
        for picture in to_pixels(video):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=bt709, dst_color_range=limited)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_png(path: Path | str, pixels: np.ndarray) -> None:
    """Writes (H, W, 3) uint8."""
    encoder = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = pixels.shape[:2]
    encoder.pix_fmt, encoder.time_base = "rgb24", Fraction(1)
    packets = encoder.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")) + encoder.encode(None)
    Path(path).write_bytes(b"".join(map(bytes, packets)))


def read_mp4(path: Path | str) -> Tensor:
    """A whole file as (3, T, H, W) in [-1, 1], frame by frame as stored."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2) / 127.5 - 1


def contact_sheet(path: Path | str, videos: Sequence[Tensor], columns: int = 8, edge: int = 256, gap: int = 4) -> None:
    """Writes a PNG with one row per (3, T, H, W) video: up to `columns` evenly spaced frames, the first and the last
    among them, at most `edge` pixels wide and high, on white."""
    rows = []
    for video in videos:
        T, H, W = video.shape[1:]
        shown = torch.linspace(0, T - 1, min(columns, T)).round().to(torch.long)
        frames = video.detach().to("cpu", torch.float32)[:, shown].transpose(0, 1)  # (columns, 3, H, W)
        if max(H, W) > edge:
            small = max(1, H * edge // max(H, W)), max(1, W * edge // max(H, W))
            frames = interpolate(frames, small, mode="bicubic", antialias=True)
        rows.append(to_pixels(frames.transpose(0, 1)))  # (columns, h, w, 3)
    width = max(sum(cell.shape[1] + gap for cell in row) for row in rows) + gap
    height = sum(row.shape[1] + gap for row in rows) + gap
    sheet = np.full((height, width, 3), 255, np.uint8)
    top = gap
    for row in rows:
        for i, cell in enumerate(row):
            left = gap + i * (cell.shape[1] + gap)
            sheet[top : top + cell.shape[0], left : left + cell.shape[1]] = cell
        top += row.shape[1] + gap
    write_png(path, sheet)
