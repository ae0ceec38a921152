"""Pixels out: mp4 files, pictures and contact sheets; and back, for files written here.

Letters: T frames, H and W height and width in pixels, 3 the colours R, G, B. Clips are float32 in [-1, 1].
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate


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
