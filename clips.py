"""Which frames of a file, at which size, become a sample: sizes, lengths, rates, windows.

Letters: T frames, H and W height and width in pixels, 3 the colours R, G, B. Clips are float32 in [-1, 1].
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import decode
from decode import Source, Timeline
from manifests import DataError, Item
from stream import generator

CLIPS = ("random", "center", "start", "all")
BAND = 0.85  # of --tokens: the least that a clip made for it may have


@dataclass(frozen=True)
class ClipSpec:
    """Which clips of a file, at which sizes, are its variants. One of three says the size:

        height, width   this one: files are scaled to cover it and cut at the centre
        max_area        the file's own aspect, at most so many pixels; with min_area, `sizes` different areas
        tokens          the file's own aspect, at lengths and sizes whose clips have about so many tokens

    The last two enlarge no file unless `upscale`. Edges are multiples of `multiple` pixels, which is the VAE's factor
    times the model's patch, so a latent frame of H x W pixels has H / multiple x W / multiple tokens: 16 for Wan 2.1
    and the 14B models of 2.2, 32 for the 5B. Raises ValueError for what the VAE cannot take.
    """

    height: int = 0
    width: int = 0
    max_area: int = 0
    min_area: int = 0
    tokens: int = 0
    sizes: int = (
        4  # with min_area: so many areas, in equal ratios; with tokens: at most so many lengths with their size
    )
    upscale: bool = False
    frames: int = 81  # at most so many; 4n + 1, as the VAE makes a latent frame of the first and of each further four
    min_frames: int = 1  # videos with fewer (at the model's rate) are errors
    fps: Fraction = Fraction(16)  # the model's own rate: files are brought to it by dropping or repeating frames
    clip: str = "random"  # which windows of a video, see `windows`
    clips: int = 1  # how many windows, with clip = random
    stride: int = 0  # from one window's start to the next, with clip = all; 0: its length, so that they do not overlap
    multiple: int = 16

    def __post_init__(self):
        object.__setattr__(self, "fps", Fraction(self.fps))
        if bool(self.height) != bool(self.width) or sum(map(bool, (self.height, self.max_area, self.tokens))) != 1:
            raise ValueError(
                "give either --height and --width or --max-area or --tokens, not height "
                f"{self.height}, width {self.width}, max_area {self.max_area} and tokens {self.tokens}"
            )
        for name in ("height", "width"):
            edge = getattr(self, name)
            if edge < 0 or edge % self.multiple:
                lower = max(self.multiple, edge // self.multiple * self.multiple)
                raise ValueError(f"--{name} {edge} is not a multiple of {self.multiple}; use {lower}")
        if self.max_area and self.max_area < self.multiple**2:
            raise ValueError(f"--max-area {self.max_area} is less than the smallest picture, {self.multiple**2} pixels")
        if self.min_area and not self.multiple**2 <= self.min_area <= self.max_area:
            raise ValueError(
                f"--min-area {self.min_area} must lie between {self.multiple**2}, the smallest picture, and --max-area "
                f"{self.max_area}"
            )
        if self.frames < 1 or self.frames % 4 != 1:
            raise ValueError(f"--frames {self.frames} is not 4n + 1; use {max(1, whole_length(self.frames))}")
        if self.clip not in CLIPS:
            raise ValueError(f"--clip {self.clip} is none of {', '.join(CLIPS)}")
        if self.stride and self.clip != "all":
            raise ValueError(f"--stride {self.stride} is the distance of --clip all, not of --clip {self.clip}")
        if self.fps <= 0 or min(self.clips, self.sizes, self.min_frames) < 1 or min(self.stride, self.tokens) < 0:
            raise ValueError(
                f"fps {self.fps}, clips {self.clips}, sizes {self.sizes} and min_frames {self.min_frames} must be "
                f"positive, stride {self.stride} and tokens {self.tokens} not negative"
            )


@dataclass(frozen=True)
class Variant:
    """One of the clips that a file may become."""

    start: int  # its first frame, in frames of the model's rate
    length: int  # T, 4n + 1
    height: int  # H, W in pixels
    width: int


@dataclass(frozen=True)
class Probe:
    """What a file holds and which clips a ClipSpec takes of it. An image has one frame and no timeline."""

    timeline: Timeline | None
    width: int  # of the upright picture, before scaling
    height: int
    frames: int  # after bringing the file to the model's rate
    variants: tuple[Variant, ...]


def whole_length(frames: int) -> int:
    """The largest 4n + 1 that is not above `frames`."""
    return (frames - 1) // 4 * 4 + 1


def probe(item: Item, spec: ClipSpec, reader=decode) -> Probe:
    """Looks into a file and proves that the frames which `spec` needs can be decoded, by `reader`: the module decode,
    or Decoders of workers.py. Raises DataError, naming the file, where it is missing, damaged, or too small."""
    found = plan(item, reader.inspect(item.path, item.kind), spec)
    if found.timeline:
        reader.prove(item.path, needed(found, spec), found.timeline)
    return found


def plan(item: Item, source: Source, spec: ClipSpec) -> Probe:
    """Which clips `spec` takes of a file that holds `source`. Raises DataError where it is too short or too small."""
    frames = source.timeline.frames_at(spec.fps) if source.timeline else 1
    if source.timeline and frames < spec.min_frames:
        raise DataError(
            f"{item.path}: {source.timeline.frames} frames at {source.timeline.rate} fps are {frames} at {spec.fps}, "
            f"and --min-frames asks for {spec.min_frames}"
        )
    clips = variants(item.path, frames, source.height, source.width, spec)
    return Probe(source.timeline, source.width, source.height, frames, clips)


def needed(found: Probe, spec: ClipSpec) -> list[tuple[int, int]]:
    """The frames of a video that its clips need: (first, last) of stretches that do not meet, in the file's order."""
    stretches = []
    for start, end in sorted({(clip.start, clip.start + clip.length - 1) for clip in found.variants}):
        first, last = found.timeline.indices((start, end), spec.fps)
        if stretches and first <= stretches[-1][1] + 1:
            first, last = stretches[-1][0], max(last, stretches.pop()[1])
        stretches.append((first, last))
    return stretches


# ---- Variants


def variants(path: Path, frames: int, height: int, width: int, spec: ClipSpec) -> tuple[Variant, ...]:
    """Every window at every size: a pure function of the options and of the file's name, length and size, so what was
    encoded once stays valid. Raises DataError where there is none."""
    return tuple(
        Variant(start, length, *size)
        for length, size in shapes(path, frames, height, width, spec)
        for start in windows(path, frames, length, spec)
    )


def windows(path: Path, frames: int, length: int, spec: ClipSpec) -> list[int]:
    """Where clips of `length` start in a file of so many frames.

    start   at its first frame        center  in its middle
    all     every `stride` frames from the first on, as many as there are
    random  `clips` of them, or fewer if the file has no more: the possible starts are cut into so many equal parts, and
            in each one is drawn by the file's name. So they are spread over the file, and each file's are its own
    """
    last = frames - length
    if spec.clip == "all":
        return list(range(0, last + 1, spec.stride or length))
    if spec.clip == "random":
        n = min(spec.clips, last + 1)
        edges = [i * (last + 1) // n for i in range(n + 1)]
        return [
            int(torch.randint(low, high, (), generator=generator(0, i, f"window of {path.name}")))
            for i, (low, high) in enumerate(pairwise(edges))
        ]
    return [last // 2 if spec.clip == "center" else 0]


def shapes(path: Path, frames: int, height: int, width: int, spec: ClipSpec) -> list[tuple[int, tuple[int, int]]]:
    """The (T, (H, W)) of the clips of a file: one of height x width pixels with so many frames."""
    longest = min(spec.frames, whole_length(frames))
    if spec.height:
        return [(longest, (spec.height, spec.width))]
    if spec.tokens:
        return shapes_of_tokens(path, longest, height, width, spec)
    smallest = spec.min_area or spec.max_area
    if height * width < spec.min_area and not spec.upscale:
        raise DataError(f"{path}: {width}x{height} has less than --min-area {spec.min_area}; lower it or add --upscale")
    sizes = [keep_aspect(height, width, area, spec) for area in ladder(smallest, spec.max_area, spec.sizes)]
    if not all(map(math.prod, sizes)):
        raise DataError(
            f"{path}: {width}x{height} within {smallest} pixels leaves an edge under {spec.multiple}; "
            f"raise --{'min' if spec.min_area else 'max'}-area, add --upscale, or give --height and --width"
        )
    return [(longest, size) for size in dict.fromkeys(sizes)]


def shapes_of_tokens(path: Path, longest: int, height: int, width: int, spec: ClipSpec):
    """The (T, (H, W)) of clips with BAND of --tokens to all of it and at most `longest` frames: long and small ones,
    short and large ones, at most `sizes` of them, their lengths nearest to equal ratios. 512x512x49, 768x768x21 and
    1024x1024x9 are such a set, of 13312, 13824 and 12288 tokens. A video gives no clip of one frame; a still gives one
    picture, as large as fits, which need not reach the band."""
    shortest = min(longest, max(spec.min_frames, 5))
    fitting, most = [], 0
    for length in range(whole_length(shortest + 3), longest + 1, 4):
        F = 1 + length // 4
        H, W = keep_aspect(height, width, spec.tokens * spec.multiple**2 // F, spec)
        tokens = F * (H // spec.multiple) * (W // spec.multiple)
        most = max(most, tokens)
        if tokens >= BAND * spec.tokens or (tokens and longest == 1):
            fitting.append((length, (H, W)))
    if not fitting:
        low = math.ceil(BAND * spec.tokens)
        raise DataError(
            f"{path}: no clip of {shortest} to {longest} frames of {width}x{height} has {low} to {spec.tokens} tokens, "
            f"{most} is the most; change --tokens or --frames, or add --upscale"
        )
    wanted = ladder(fitting[0][0], fitting[-1][0], spec.sizes)
    nearest = [min(fitting, key=lambda shape: abs(math.log(shape[0] / length))) for length in wanted]
    return list(dict.fromkeys(nearest))


def keep_aspect(height: int, width: int, area: int, spec: ClipSpec) -> tuple[int, int]:
    """(H, W) for a file of height x width pixels: scaled by sqrt(area / (height width)), or 1 where that enlarges and
    `upscale` is off, then cut to multiples. Integer square roots keep a file that fits exactly from losing a row to
    rounding. An edge may come out as 0."""
    h, w = math.isqrt(area * height // width), math.isqrt(area * width // height)
    if not spec.upscale:
        h, w = min(h, height), min(w, width)
    return h // spec.multiple * spec.multiple, w // spec.multiple * spec.multiple


def ladder(low: int, high: int, steps: int) -> list[int]:
    """`steps` whole numbers from low to high in equal ratios; only high, if it is low too or there is but one step."""
    if low == high or steps == 1:
        return [high]
    return [round(low * (high / low) ** (i / (steps - 1))) for i in range(steps)]


# ---- Pixels


def load_clip(item: Item, found: Probe, spec: ClipSpec, variant: int = 0, reader=decode) -> Tensor:
    """Variant `variant` of a file as (3, T, H, W) float32 in [-1, 1], with `found` = probe(item, spec).

    Frame k shows what a viewer sees k / fps seconds into the clip. Each frame is scaled as soon as it is decoded, so
    memory holds the clip and not the file. Raises DataError where a frame does not decode.
    """
    clip = found.variants[variant]
    size = clip.height, clip.width
    if not found.timeline:
        return load_picture(item.path, size, reader)
    indices = found.timeline.indices(range(clip.start, clip.start + clip.length), spec.fps)
    return torch.stack([fit(picture, size) for picture in reader.frames(item.path, indices, found.timeline)], dim=1)


def load_picture(path: Path, size: tuple[int, int], reader=decode) -> Tensor:
    """A picture file, scaled to cover size = (H, W) and cut at its centre: (3, 1, H, W) in [-1, 1]."""
    return fit(reader.picture(path), size)[:, None]


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
