"""Which windows of a file, at which lengths and sizes, become samples."""

import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_video import SPEC, numbered, numbers, write_image, write_video

import survey
import train
from clips import BAND, ClipSpec, load_clip, probe, shapes, variants, windows
from manifests import DataError, Item

FILE = Path("clips/a.mp4")


@pytest.mark.parametrize("rate", [24, 30, Fraction(24000, 1001), 16, 8], ids=str)
def test_resampling(tmp_path, rate):
    """Frame k of a clip is the source frame on screen at k/16 s. A wrong rule changes the speed of all motion."""
    path = write_video(tmp_path / "a.mp4", [numbered(i) for i in range(101)], rate)
    item, spec = Item(path, "", "video"), ClipSpec(height=96, width=128, frames=33, clip="start")
    found = probe(item, spec)
    assert found.timeline.rate == rate and found.timeline.frames == 101
    assert found.frames == {24: 67, 30: 53, Fraction(24000, 1001): 67, 16: 101, 8: 202}[rate]
    assert numbers(load_clip(item, found, spec)) == [int(k * Fraction(rate) / 16) for k in range(33)]


@pytest.mark.parametrize("frames, length", [(65, 65), (64, 61), (34, 33), (4, 1), (1, 1), (90, 81)])
def test_length(tmp_path, frames, length):
    """65 frames at the model's rate stay 65, and a short file gives the largest 4n + 1 that it has, not nothing."""
    item = Item(write_video(tmp_path / "a.mkv", [numbered(i) for i in range(frames)]), "", "video")
    found = probe(item, SPEC)
    assert found.variants[0].length == length and load_clip(item, found, SPEC).shape == (3, length, 96, 128)


def test_min_frames(tmp_path):
    """A file that is too short is refused by what is left of it at the model's rate; the message has both counts, since
    the user sees only the file's. Images are never too short."""
    path = write_video(tmp_path / "a.mp4", [numbered(i) for i in range(101)], Fraction(24000, 1001))
    with pytest.raises(DataError, match=r"a\.mp4: 101 frames at 24000/1001 fps are 67 at 16, and --min-frames .* 68"):
        probe(Item(path, "", "video"), ClipSpec(height=96, width=128, min_frames=68))
    assert probe(Item(path, "", "video"), ClipSpec(height=96, width=128, min_frames=67)).frames == 67
    still = write_image(tmp_path / "p.png", numbered(3))
    assert probe(Item(still, "", "image"), ClipSpec(height=96, width=128, min_frames=68)).frames == 1


@pytest.mark.parametrize(
    "options, frames, starts",
    [
        (dict(clip="start"), 70, [0]),
        (dict(clip="center"), 70, [26]),
        (dict(clip="all"), 70, [0, 17, 34, 51]),
        (dict(clip="all"), 67, [0, 17, 34]),
        (dict(clip="all", stride=24), 65, [0, 24, 48]),
        (dict(clip="all", stride=1), 20, [0, 1, 2, 3]),
        (dict(clip="random", clips=9), 20, [0, 1, 2, 3]),
        (dict(clip="random", clips=9), 17, [0]),
    ],
)
def test_windows(options, frames, starts):
    """Each kind of --clip takes the frames that it names, to the last one that a whole window leaves room for."""
    spec = ClipSpec(height=96, width=128, frames=17, **options)
    assert windows(FILE, frames, 17, spec) == starts
    assert [v.start for v in variants(FILE, frames, 96, 128, spec)] == starts


def test_random_windows(tmp_path):
    """Random windows lie in equal parts of the file, follow from the file's name and the options alone (else the cache
    would be encoded anew on every run), and are not the same in every file."""
    spec = ClipSpec(height=96, width=128, frames=17, clip="random", clips=4)
    seen = set()
    for i in range(50):
        starts = windows(Path(f"x/{i}.mp4"), 96, 17, spec)
        assert [start // 20 for start in starts] == [0, 1, 2, 3]
        assert starts == windows(Path(f"elsewhere/{i}.mp4"), 96, 17, spec)
        seen.add(tuple(starts))
    assert len(seen) == 50
    assert windows(FILE, 96, 17, spec) == [17, 38, 56, 69]  # never to change: caches hold these
    item = Item(write_video(tmp_path / "a.mp4", [numbered(i) for i in range(96)]), "", "video")
    found = probe(item, spec)
    assert numbers(load_clip(item, found, spec, 2)) == list(range(56, 73))


def test_sizes(tmp_path):
    """Cover and centre crop keep the middle and the aspect; max_area keeps the aspect, never enlarges, and loses no row
    to rounding; shrinking is antialiased (fine lines become an even grey)."""
    stripes = np.zeros((64, 192, 3), np.uint8)
    stripes[:, 64:128] = 255
    item = Item(write_image(tmp_path / "a.png", stripes), "", "image")
    spec = ClipSpec(height=32, width=32)
    assert load_clip(item, probe(item, spec), spec)[:, :, :, 2:-2].min() > 0.99
    lines = np.zeros((64, 64, 3), np.uint8)
    lines[:, ::4] = 255
    item = Item(write_image(tmp_path / "b.png", lines), "", "image")
    spec = ClipSpec(height=16, width=16)
    assert (load_clip(item, probe(item, spec), spec)[..., 2:-2] + 0.5).abs().max() < 0.1
    for (h, w), options, size in [
        ((480, 832), dict(max_area=832 * 480), (480, 832)),
        ((1440, 2496), dict(max_area=832 * 480), (480, 832)),
        ((1024, 576), dict(max_area=832 * 480), (832, 464)),
        ((50, 100), dict(max_area=832 * 480), (48, 96)),
        ((50, 100), dict(max_area=832 * 480, upscale=True), (432, 880)),
        ((1024, 576), dict(max_area=832 * 480, multiple=32), (832, 448)),
        ((576, 1024), dict(max_area=832 * 480, multiple=32), (448, 832)),
    ]:
        assert shapes(FILE, 1, h, w, ClipSpec(**options)) == [(1, size)]
    with pytest.raises(DataError, match="leaves an edge under 16"):
        shapes(FILE, 1, 10, 100, ClipSpec(max_area=832 * 480))


def test_min_area():
    """With --min-area a file has several sizes, in equal ratios from one area to the other and of its own aspect; a
    file between the two has those up to its own, and one below is refused rather than trained on out of range."""
    spec = ClipSpec(min_area=256 * 256, max_area=1024 * 1024, sizes=3, frames=17)
    assert shapes(FILE, 17, 2048, 2048, spec) == [(17, (256, 256)), (17, (512, 512)), (17, (1024, 1024))]
    assert shapes(FILE, 17, 1080, 1920, spec) == [(17, (192, 336)), (17, (384, 672)), (17, (768, 1360))]
    assert shapes(FILE, 17, 512, 600, spec) == [(17, (224, 272)), (17, (464, 544)), (17, (512, 592))]
    assert len(variants(FILE, 96, 2048, 2048, ClipSpec(**{**vars(spec), "clip": "all"}))) == 3 * 5
    with pytest.raises(DataError, match="a.mp4: 200x300 has less than --min-area 65536; lower it or add --upscale"):
        shapes(FILE, 17, 300, 200, spec)
    upscaled = ClipSpec(min_area=256 * 256, max_area=1024 * 1024, sizes=3, frames=17, upscale=True)
    assert shapes(FILE, 17, 128, 128, upscaled) == shapes(FILE, 17, 2048, 2048, spec)


def tokens_of(length, size, multiple=16):
    return (1 + (length - 1) // 4) * (size[0] // multiple) * (size[1] // multiple)


def test_tokens():
    """Long and small, short and large clips are one length to the model: the table that users know comes out."""
    spec = ClipSpec(tokens=13824, frames=81, sizes=99)
    table = dict(shapes(FILE, 81, 1024, 1024, spec))
    assert (table[49], table[21], table[9]) == ((512, 512), (768, 768), (1024, 1024))
    few = shapes(FILE, 81, 1024, 1024, ClipSpec(tokens=13824, frames=81))
    assert few == [(9, (1024, 1024)), (21, (768, 768)), (41, (560, 560)), (81, (400, 400))]
    big = shapes(FILE, 49, 1440, 2560, ClipSpec(tokens=32760, frames=81, multiple=32, min_frames=35))
    assert [length for length, _ in big] == [37, 41, 45, 49]
    assert shapes(FILE, 1, 2000, 2000, spec) == [(1, (1872, 1872))]
    assert shapes(FILE, 1, 300, 400, spec) == [(1, (288, 400))]  # a still is never enlarged, and never too small
    up = ClipSpec(tokens=13824, upscale=True)
    assert shapes(FILE, 1, 300, 400, up) == [(1, (1616, 2160))] and len(shapes(FILE, 81, 300, 400, up)) == 4
    message = r"no clip of 5 to 81 frames of 200x100 has 11751 to 13824 tokens, 1512 is the most; change --tokens or"
    with pytest.raises(DataError, match=message):
        shapes(FILE, 81, 100, 200, spec)
    with pytest.raises(DataError, match="no clip of 1 to 1 frames"):
        shapes(FILE, 1, 10, 200, spec)


def test_tokens_of_any_file():
    """Whatever the file: every clip has 85 % of the tokens to all of them, fits its length and edges, and has its
    aspect to within one patch."""
    rng, made = random.Random(0), 0
    for _ in range(400):
        height, width, frames = rng.randint(64, 2200), rng.randint(64, 2200), rng.randint(5, 200)
        N, sizes = rng.choice([4096, 13824, 32760]), rng.randint(1, 6)
        try:
            found = shapes(FILE, frames, height, width, ClipSpec(tokens=N, frames=81, sizes=sizes))
        except DataError:
            continue
        made += 1
        assert 1 <= len(found) <= sizes and len(set(found)) == len(found)
        for length, (H, W) in found:
            assert BAND * N <= tokens_of(length, (H, W)) <= N and length % 4 == 1
            assert 5 <= length <= min(81, frames) and H <= height and W <= width
            assert (H - 1) / (W + 16) < height / width < (H + 16) / (W - 1)
    assert made > 200


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(height=100, width=128), "--height 100 is not a multiple of 16; use 96"),
        (dict(height=96), "give either --height and --width or --max-area or --tokens"),
        (dict(tokens=9999, max_area=9999), "give either"),
        (dict(height=96, width=96, max_area=9999), "give either"),
        (dict(max_area=9999, frames=80), "--frames 80 is not 4n \\+ 1; use 77"),
        (dict(max_area=9999, min_area=10000), "--min-area 10000 must lie between 256, .* and --max-area 9999"),
        (dict(max_area=9999, clip="middle"), "--clip middle is none of random, center, start, all"),
        (dict(max_area=9999, stride=8), "--stride 8 is the distance of --clip all, not of --clip random"),
        (dict(max_area=9999, sizes=0), "sizes 0 and min_frames 1 must be positive"),
    ],
)
def test_spec_errors(options, message):
    """Sizes that the VAE cannot take are refused with a number that it can."""
    with pytest.raises(ValueError, match=message):
        ClipSpec(**options)


def test_options_reach_the_spec():
    """Every option of train.py about clips and sizes is the spec's, and the 5B's patches are 32 pixels wide."""

    def spec(**options):
        return survey.clip_spec(train.settle(train.Config(**options)))

    options = dict(tokens=99, sizes=3, upscale=True, frames=33, min_frames=9, fps=20, clip="all", clips=2, stride=8)
    assert spec(model="wan2.2-ti2v-5b", **options) == ClipSpec(**options, multiple=32)
    areas = dict(max_area=500000, min_area=9000)
    assert spec(model="wan2.1-t2v-14b", **areas) == ClipSpec(**areas, frames=17, clips=4)
    assert spec() == ClipSpec(64, 64, frames=17, clips=4)  # the demo's own size
