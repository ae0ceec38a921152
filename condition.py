"""What image-to-video models are given besides text, and pictures brought into the form in which they are given.

Letters: T frames of video, F latent frames, H and W pixels, h and w latent rows and columns, all pictures in [-1, 1].

Sources: wan/image2video.py and wan/first_last_frame2video.py (Wan2.1), wan/image2video.py and wan/textimage2video.py
(Wan2.2). Training takes pictures from the clips, which have their final size; sampling from files of any size.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

# ---------------------------------------------------------------------------------------------------------------------
# Condition channels


def padded(first: Tensor, frames: int, last: Tensor | None = None) -> Tensor:
    """The video that is encoded as condition: `first` (3, 1, H, W), grey (zeros), and `last` at the end if there is
    one; (3, T, H, W), T = frames."""
    ends = 1 + (last is not None)
    grey = first.new_zeros(3, frames - ends, *first.shape[2:])
    return torch.cat([first, grey, *([] if last is None else [last])], dim=1)


def with_mask(latents: Tensor, kind: str) -> Tensor:
    """Encoded condition (16, F, h, w) behind its mask: (20, F, h, w), in the order in which the model reads them.

    The mask's four channels are the four video frames of a latent frame, 1 where they are given. Latent frame 0 is one
    video frame, repeated in all four; of the last latent frame only the last video frame is given ("first-last").
    """
    mask = latents.new_zeros(4, *latents.shape[1:])
    mask[:, 0] = 1
    if kind == "first-last":
        mask[3, -1] = 1
    return torch.cat([mask, latents])


def frame_sigmas(sigma: float, frames: int) -> Tensor:
    """(F,) float64: the noise of each latent frame where the first is given clean, 0 for it and sigma for the rest."""
    sigmas = torch.full((frames,), sigma, dtype=torch.float64)
    sigmas[0] = 0
    return sigmas


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and pictures, for sampling


def size_for(kind: str, height: int, width: int, max_area: int, multiple: int) -> tuple[int, int]:
    """(H, W) of the video made from a height x width picture: about max_area pixels, about the picture's aspect.

    multiple: pixels per token edge (16, or 32 for Wan 2.2's 5B). The official floating-point arithmetic, which may
    round a picture of exactly max_area down.
    """
    if kind == "first-latent":
        return best_output_size(height, width, max_area, multiple)
    aspect = height / width
    h, w = (math.sqrt(area) // (multiple // 2) // 2 * 2 for area in (max_area * aspect, max_area / aspect))
    return round(h) * multiple // 2, round(w) * multiple // 2


def best_output_size(height: int, width: int, max_area: int, multiple: int) -> tuple[int, int]:
    """Of two candidates, one that keeps the width's and one that keeps the height's rounding, the one whose aspect is
    nearer to the picture's (wan/utils/utils.py)."""
    ratio = width / height
    ideal_w = math.sqrt(max_area * ratio)
    ideal_h = max_area / ideal_w
    w1 = ideal_w // multiple * multiple
    h1 = max_area / w1 // multiple * multiple
    h2 = ideal_h // multiple * multiple
    w2 = max_area / h2 // multiple * multiple
    first, second = w1 / h1, w2 / h2
    if max(ratio / first, first / ratio) < max(ratio / second, second / ratio):
        return int(h1), int(w1)
    return int(h2), int(w2)


def to_unit(picture: np.ndarray) -> Tensor:
    """(H, W, 3) uint8 -> (3, H, W) float32 in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).to(torch.float32).div(255).sub(0.5).div(0.5)


def prepared(picture: np.ndarray, kind: str, size: tuple[int, int]) -> Tensor:
    """A picture (H, W, 3) uint8 as the frame that a model of this kind is given: (3, 1, *size).

    "first" and "first-last": stretched, bicubic without antialiasing, which may overshoot [-1, 1]. "first-latent":
    scaled to cover the size with a Lanczos filter, and cut at the centre.
    """
    if kind != "first-latent":
        return interpolate(to_unit(picture)[None], size, mode="bicubic").transpose(0, 1)
    (height, width, _), (H, W) = picture.shape, size
    scale = max(W / width, H / height)
    covering = lanczos(picture, round(height * scale), round(width * scale))
    top, left = (covering.shape[0] - H) // 2, (covering.shape[1] - W) // 2
    return to_unit(covering[top : top + H, left : left + W])[:, None]


def lanczos(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """(h, w, 3) uint8 resized with Lanczos-3, widened when shrinking, rounded to uint8 after each of the two passes,
    columns first: what Pillow's resize(LANCZOS) does, which the released pipeline was written with."""
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).to(torch.float64)  # whole numbers: sums are exact
    for axis, size in ((1, width), (0, height)):
        weights = (lanczos_weights(pixels.shape[axis], size) * 2**22).round()  # in fixed point, as there
        resized = torch.tensordot(weights, pixels, ([1], [axis])).movedim(0, axis) + 2**21
        pixels = (resized / 2**22).floor().clamp(0, 255)
    return pixels.to(torch.uint8).numpy()


def lanczos_weights(old: int, new: int) -> Tensor:
    """(new, old) float64: the share of each old pixel in each new one."""
    scale = old / new
    stretch = max(scale, 1.0)
    centre = ((torch.arange(new, dtype=torch.float64) + 0.5) * scale).unsqueeze(1)
    pixel = torch.arange(old, dtype=torch.float64)
    first, last = (torch.floor((centre + side * 3 * stretch + 0.5).clamp(0, old)) for side in (-1, 1))
    distance = (pixel + 0.5 - centre) / stretch
    weights = torch.sinc(distance) * torch.sinc(distance / 3) * (distance.abs() < 3)
    weights = weights * ((pixel >= first) & (pixel < last))
    return weights / weights.sum(1, keepdim=True)
