"""Files in, pixels out, and back: decoding of videos and images, mp4 files, pictures and contact sheets.

Letters: T frames, H and W height and width in pixels, 3 the colours R, G, B. Clips are float32 in [-1, 1].

Everything is decoded by PyAV, from the first frame onwards and never after a seek: behind a seek, or a skip that is
carried out as one, decoders count wrongly in ordinary files (HEVC with open groups of pictures, AVI without time
stamps) and hand out neighbouring frames without a word.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from manifests import DataError

# How much earlier than its header says a file may end; containers round durations, and audio ends on its own frames.
HEADER_SLACK = Fraction(1, 4)  # seconds


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
