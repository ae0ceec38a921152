"""Which frames of a file, at which size, become a sample: sizes, lengths, rates, windows.

Letters: T frames, H and W height and width in pixels, 3 the colours R, G, B. Clips are float32 in [-1, 1].
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from tqdm import tqdm

from manifests import DataError, Item
from video import count_frames, decode_image, decode_video, upright_rgb


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


def load_picture(path: Path, size: tuple[int, int]) -> Tensor:
    """A picture file, scaled to cover size = (H, W) and cut at its centre: (3, 1, H, W) in [-1, 1]."""
    return fit(decode_image(path), size)[:, None]


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
