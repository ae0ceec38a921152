"""The demo's clips: one coloured shape moves straight across a plain ground, and the caption says all four things.

A scene is (colour, shape, direction, ground): 6 x 3 x 4 x 3 = 216 of them. 32 are held out: never drawn for training,
their captions are the prompts that show whether a trained model combines what it has seen separately. Everything is
drawn with numpy, written as real H.264, and depends on (seed, clip number) alone.

Shapes: T frames, H height, W width; pixels are RGB, 0..1 while drawing and bytes in a file.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

COLOURS = {
    "red": (0.86, 0.14, 0.14),
    "green": (0.12, 0.70, 0.22),
    "blue": (0.16, 0.28, 0.90),
    "yellow": (0.96, 0.84, 0.12),
    "magenta": (0.84, 0.20, 0.80),
    "cyan": (0.12, 0.80, 0.86),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # (y, x), y grows downwards
GROUNDS = {"dark": (0.10, 0.10, 0.13), "grey": (0.50, 0.50, 0.50), "light": (0.90, 0.90, 0.87)}

WORDINGS = (
    "a {colour} {shape} moves {direction} over a {ground} ground",
    "a {colour} {shape} moving {direction} on a {ground} background",
    "a {ground} background, a {colour} {shape} slides {direction}",
    "the {shape} is {colour} and moves {direction}, the ground is {ground}",
    "{colour} {shape}, {ground} ground, moving {direction}",
)

FRAMES, SIZE, FPS = 17, 64, 16  # 17 frames of 64 x 64 are 5 x 4 x 4 = 80 tokens
AREA = 400.0  # pixels; every shape has the same, so a circle is 22.6 across and a square 20


@dataclass(frozen=True)
class Scene:
    """What a clip shows, and what its caption says."""

    colour: str
    shape: str
    direction: str
    ground: str

    def caption(self, wording: int = 0) -> str:
        return WORDINGS[wording % len(WORDINGS)].format(**vars(self))


def parse_caption(text: str) -> Scene:
    """The scene that a caption of any wording names; ValueError unless it holds exactly one word of each kind."""
    words = set(text.lower().replace(",", " ").split())
    found = []
    for kind, names in (("colour", COLOURS), ("shape", SHAPES), ("direction", DIRECTIONS), ("ground", GROUNDS)):
        hits = sorted(words & set(names))
        if len(hits) != 1:
            raise ValueError(
                f"{text!r} names {hits or 'no word'} as its {kind}; want exactly one of {', '.join(names)}"
            )
        found.append(hits[0])
    return Scene(*found)


def held_out_scenes() -> list[Scene]:
    """32 scenes, 8 per direction, 5 or 6 per colour. Of the 9 scenes that share a colour and a direction at most 2 are
    held out, so every pair of words occurs in training: only the combination of all four is new."""
    scenes = []
    for n in range(32):
        direction, k = n % 4, n // 4
        colour, shape, ground = (k + 2 * direction) % 6, (k + direction + direction // 3) % 3, (k // 3 + direction) % 3
        scenes.append(Scene(list(COLOURS)[colour], SHAPES[shape], list(DIRECTIONS)[direction], list(GROUNDS)[ground]))
    return scenes


HELD_OUT_SCENES = held_out_scenes()
HELD_OUT_PROMPTS = [scene.caption(n // 4) for n, scene in enumerate(HELD_OUT_SCENES)]
TRAINING_SCENES = [
    scene
    for scene in (Scene(c, s, d, g) for c in COLOURS for s in SHAPES for d in DIRECTIONS for g in GROUNDS)
    if scene not in HELD_OUT_SCENES
]


def coverage(shape: str, centre: np.ndarray, area: float, height: int = SIZE, width: int = SIZE) -> np.ndarray:
    """How much of each pixel a shape of this area covers, 0..1, anti-aliased over one pixel.

    centre (..., 2) is the centroid as (y, x) in pixels, pixel i spanning i..i+1; the result is (..., H, W).
    """
    y = np.arange(height)[:, None] + 0.5 - centre[..., 0, None, None]  # (..., H, 1)
    x = np.arange(width)[None, :] + 0.5 - centre[..., 1, None, None]  # (..., 1, W)
    if shape == "circle":
        distance = np.sqrt(y * y + x * x) - np.sqrt(area / np.pi)
    elif shape == "square":
        distance = np.maximum(np.abs(y), np.abs(x)) - np.sqrt(area) / 2
    elif shape == "triangle":  # equilateral, one corner up: the nearest of three half-planes at the inner radius
        distance = np.maximum(y, np.sqrt(0.75) * np.abs(x) - y / 2) - np.sqrt(area / np.sqrt(27.0))
    else:
        raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    return np.clip(0.5 - distance, 0.0, 1.0)


def extent(shape: str, area: float) -> np.ndarray:
    """How far a shape reaches from its centroid: ((up, down), (left, right)) in pixels."""
    if shape == "circle":
        return np.full((2, 2), np.sqrt(area / np.pi))
    if shape == "square":
        return np.full((2, 2), np.sqrt(area) / 2)
    inner = np.sqrt(area / np.sqrt(27.0))
    return np.array([[2 * inner, inner], [np.sqrt(3.0) * inner, np.sqrt(3.0) * inner]])


def draw(scene: Scene, rng: np.random.Generator, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """One clip of a scene, (T, H, W, 3) bytes. The shape stays whole and crosses the frame from edge to edge at even
    speed; its size, its track and its two end points vary a little, so that no two clips are alike."""
    pixels = size / SIZE
    area = AREA * pixels**2 * rng.uniform(0.9, 1.1)
    reach, step = extent(scene.shape, area), np.array(DIRECTIONS[scene.direction])
    along = int(np.abs(step).argmax())
    nearest, farthest = 1 + reach[along, 0], size - 1 - reach[along, 1]
    ends = np.sort([nearest + rng.uniform(0, 3 * pixels), farthest - rng.uniform(0, 3 * pixels)])
    start, end = ends if step[along] > 0 else ends[::-1]
    centre = np.empty((frames, 2))
    centre[:, along] = np.linspace(start, end, frames)
    # The middle of the shape's box, not its centroid, keeps to the middle of the frame.
    centre[:, 1 - along] = size / 2 + (reach[1 - along, 0] - reach[1 - along, 1]) / 2 + rng.uniform(-5, 5) * pixels
    cover = coverage(scene.shape, centre, area, size, size)[..., None]  # (T, H, W, 1)
    video = cover * np.array(COLOURS[scene.colour]) + (1 - cover) * np.array(GROUNDS[scene.ground])
    return np.round(video * 255).astype(np.uint8)


def demo_clips(count: int, seed: int = 0) -> list[tuple[Scene, str]]:
    """Scene and caption of each clip of a demo set. Each scene in turn, in a new order each round, so that all scenes
    occur equally often to within one; wordings are drawn."""
    rng = np.random.default_rng((seed, 0))
    order = [i for _ in range(-(-count // len(TRAINING_SCENES))) for i in rng.permutation(len(TRAINING_SCENES))]
    scenes = [TRAINING_SCENES[i] for i in order[:count]]
    return [(scene, scene.caption(int(rng.integers(len(WORDINGS))))) for scene in scenes]


def write_demo_set(folder: str | os.PathLike, count: int = 368, seed: int = 0) -> Path:
    """Write the demo set, 0000.mp4 with 0000.txt and so on, and return its folder.

    The clips appear all at once, by a rename, so a reader never meets half a set. A folder that already holds this very
    set is left as it is; FileExistsError if it holds anything else.
    """
    folder, clips = Path(folder), demo_clips(count, seed)
    if folder.exists():
        have = {path.stem: path.read_text() for path in folder.glob("*.txt") if path.with_suffix(".mp4").exists()}
        if have == {f"{i:04d}": caption for i, (_, caption) in enumerate(clips)}:
            return folder
        raise FileExistsError(
            f"{folder} exists and is not the demo set of {count} clips, seed {seed}; remove or rename it"
        )
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    for i, (scene, caption) in enumerate(clips):
        write_mp4(partial / f"{i:04d}.mp4", draw(scene, np.random.default_rng((seed, 1, i))))
        (partial / f"{i:04d}.txt").write_text(caption)
    partial.rename(folder)
    return folder


def write_mp4(path: str | os.PathLike, video: np.ndarray, fps: int = FPS) -> None:
    """Write (T, H, W, 3) bytes as H.264. With 4:2:0 colour, which every player shows; that and crf 12 leave 34 dB.

    asm=0 and one thread make the file a function of its pixels: in about one clip of a thousand, x264's vector code
    gives another stream than the time before.
    """
    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "12", "threads": "1", "x264-params": "asm=0"}
        for frame in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
