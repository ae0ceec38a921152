"""Read colour, shape and direction back from the pixels of demo videos, and compare them with the prompts.

    python tools/demo_score.py FOLDER        FOLDER holds 000.mp4 with its prompt in 000.txt, and so on

The reading knows nothing of the model: the ground is the median pixel, the shape is what differs from it. It is meant
for samples, which are blurred and spotted: every decision uses weighted sums over many pixels and frames, and a video
without a clear shape or motion reads as "none" rather than as the nearest guess.

Shapes: T frames, H height, W width; RGB in 0..1.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import COLOURS, DIRECTIONS, SHAPES, Scene, coverage, parse_caption
from video import read_mp4

KINDS = ("colour", "shape", "direction")
CONTRAST = 0.2  # least RGB distance between shape and ground; the nearest pair, green on grey, has 0.5
TRAVEL = 0.15  # least way of the centroid, in frame sizes; the demo's shapes travel 0.3 or more


def read_scene(video: np.ndarray) -> dict[str, str]:
    """{"colour", "shape", "direction"} of a video (3, T, H, W) in [-1, 1]; "none" where there is nothing to read."""
    pixels = np.moveaxis(np.clip(np.asarray(video, dtype=np.float64) / 2 + 0.5, 0, 1), 0, -1)  # (T, H, W, 3)
    ground = np.median(pixels, axis=(0, 1, 2))
    contrast = np.linalg.norm(pixels - ground, axis=-1)  # (T, H, W)
    # The contrast of the shape itself: what its inner pixels have, of which a 64 x 64 frame holds a good 200.
    peak = np.quantile(contrast, 0.95)
    if peak < CONTRAST:
        return dict.fromkeys(KINDS, "none")
    # Half of the peak's contrast, where the edge lies also if it is blurred, becomes 0.5.
    mask = np.clip(contrast / peak * 2 - 0.5, 0, 1)
    area = mask.sum(axis=(1, 2))  # (T,)
    present = area > 0.2 * np.median(area)
    colour = np.average(pixels, axis=(0, 1, 2), weights=contrast > 0.75 * peak)
    centre = centroids(mask)[present]
    return {
        "colour": min(COLOURS, key=lambda name: np.linalg.norm(colour - COLOURS[name])),
        "shape": match_shape(mask[present], centre, area[present]),
        "direction": match_direction(centre, pixels.shape[1:3]),
    }


def centroids(mask: np.ndarray) -> np.ndarray:
    """(T, H, W) -> (T, 2) as (y, x)."""
    area = np.maximum(mask.sum(axis=(1, 2)), 1e-9)
    y = (mask.sum(axis=2) * (np.arange(mask.shape[1]) + 0.5)).sum(axis=1) / area
    x = (mask.sum(axis=1) * (np.arange(mask.shape[2]) + 0.5)).sum(axis=1) / area
    return np.stack([y, x], axis=-1)


def match_direction(centre: np.ndarray, size: tuple[int, int]) -> str:
    """The axis direction nearest to the centroid's way from the first quarter of the frames to the last; "none" where
    the way is short, or so oblique that it is no axis direction."""
    quarter = max(1, len(centre) // 4)
    way = (centre[-quarter:].mean(axis=0) - centre[:quarter].mean(axis=0)) / np.array(size)
    along = {name: float(way @ np.array(step)) for name, step in DIRECTIONS.items()}
    best = max(along, key=along.get)
    return best if along[best] > max(TRAVEL, 0.8 * np.linalg.norm(way)) else "none"


def match_shape(mask: np.ndarray, centre: np.ndarray, area: np.ndarray) -> str:
    """The shape whose ideal, at each frame's centroid and area, overlaps the masks best (intersection over union)."""
    overlap = dict.fromkeys(SHAPES, 0.0)
    for name in SHAPES:
        for frame, at, size in zip(mask, centre, area, strict=True):
            ideal = coverage(name, at, size, *frame.shape)
            overlap[name] += np.minimum(frame, ideal).sum() / np.maximum(frame, ideal).sum()
    return max(overlap, key=overlap.get)


def score(video: np.ndarray, expected: Scene) -> dict[str, bool]:
    """Which of colour, shape and direction the video (3, T, H, W) in [-1, 1] shows as expected."""
    seen = read_scene(video)
    return {kind: seen[kind] == getattr(expected, kind) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the demo's videos against their prompts.")
    parser.add_argument("folder", type=Path, help="videos NAME.mp4, each with its prompt in NAME.txt")
    videos = sorted(parser.parse_args().folder.glob("*.mp4"))
    if not videos:
        parser.error("the folder holds no .mp4 file")
    right = dict.fromkeys(KINDS, 0)
    for path in videos:
        prompt = path.with_suffix(".txt").read_text().strip()
        expected, seen = parse_caption(prompt), read_scene(read_mp4(path).numpy())
        wrong = [kind for kind in KINDS if seen[kind] != getattr(expected, kind)]
        for kind in set(KINDS) - set(wrong):
            right[kind] += 1
        verdict = "wrong " + ", ".join(wrong) if wrong else "ok"
        print(f"{path.name:12} {' '.join(f'{seen[kind]:9}' for kind in KINDS)} {verdict:30} {prompt}")
    print("  ".join(f"{kind} {100 * right[kind] / len(videos):.1f} %" for kind in KINDS), f" of {len(videos)} videos")


if __name__ == "__main__":
    main()
