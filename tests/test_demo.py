"""The demo's clips and the scorer that judges samples by them."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import demo
from image_encoder import CLIP_CONFIGS, CLIPVision
from text_encoder import UMT5_CONFIGS, Tokenizer, UMT5Encoder, encode_prompts
from vae import VAE_CONFIGS, WanVAE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import demo_score  # noqa: E402
import make_demo_assets  # noqa: E402
import overfit  # noqa: E402

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def rate(right: Counter, count: int) -> dict:
    return {kind: right[kind] / count for kind in demo_score.KINDS}


def test_held_out_scenes_are_new_combinations_of_known_pairs():
    """If it goes, the demo's score may measure memory (a prompt's scene was trained on), or ask for a pair of words
    that training never showed, or rest on few colours or directions."""
    held = demo.HELD_OUT_SCENES
    assert len(set(held)) == 32 and not set(held) & set(demo.TRAINING_SCENES)
    assert len(set(held) | set(demo.TRAINING_SCENES)) == 6 * 3 * 4 * 3
    assert set(Counter(s.direction for s in held).values()) == {8}
    assert set(Counter(s.colour for s in held).values()) == {5, 6}
    kinds = list(vars(held[0]))
    for first in kinds:
        for second in kinds:
            in_training = {(getattr(s, first), getattr(s, second)) for s in demo.TRAINING_SCENES}
            assert in_training >= {(getattr(s, first), getattr(s, second)) for s in held}


def test_captions_say_what_the_clip_shows():
    """If it goes, the prompts of samples may be scored against another scene than they name."""
    for scene in demo.HELD_OUT_SCENES + demo.TRAINING_SCENES:
        for wording in range(len(demo.WORDINGS)):
            assert demo.parse_caption(scene.caption(wording)) == scene
    assert [demo.parse_caption(prompt) for prompt in demo.HELD_OUT_PROMPTS] == demo.HELD_OUT_SCENES
    with pytest.raises(ValueError, match="colour"):
        demo.parse_caption("a circle moves left over a dark ground")
    with pytest.raises(ValueError, match=r"\['left', 'right'\]"):
        demo.parse_caption("a red circle moves left, then right, over a dark ground")


def test_shapes_have_the_area_and_centroid_they_were_asked_for():
    """If it goes, clips may be drawn off centre or cut at the frame's edge, and shapes may be told apart by size."""
    centre = np.array([[30.3, 33.8], [25.0, 40.5]])
    for shape in demo.SHAPES:
        cover = demo.coverage(shape, centre, 400.0)
        assert cover.shape == (2, 64, 64)
        np.testing.assert_allclose(cover.sum(axis=(1, 2)), 400.0, rtol=0.02)
        np.testing.assert_allclose(demo_score.centroids(cover), centre, atol=0.1)
        rows = np.flatnonzero(cover[0].max(axis=1) > 0.5)
        up, down = demo.extent(shape, 400.0)[0]
        np.testing.assert_allclose([rows[0], rows[-1] + 1], [30.3 - up, 30.3 + down], atol=1.1)


def test_the_set_is_reproducible_and_read_back_from_h264(tmp_path):
    """If it goes, two ranks or two runs may train on different demo sets, the set may be damaged on its way through the
    codec, or write_demo_set may leave or overwrite somebody's folder silently."""
    folder = demo.write_demo_set(tmp_path / "a", count=60, seed=3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(f"{i:04d}.{kind}" for i in range(60) for kind in ("mp4", "txt"))
    again = demo.write_demo_set(tmp_path / "b", count=60, seed=3)
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert demo.write_demo_set(folder, count=60, seed=3) == folder
    with pytest.raises(FileExistsError, match="remove or rename"):
        demo.write_demo_set(folder, count=60, seed=4)
    right = Counter()
    for i, (scene, caption) in enumerate(demo.demo_clips(60, seed=3)):
        assert (folder / f"{i:04d}.txt").read_text() == caption
        video = demo_score.read_mp4(folder / f"{i:04d}.mp4")
        drawn = np.moveaxis(demo.draw(scene, np.random.default_rng((3, 1, i))) / 127.5 - 1, -1, 0)
        assert video.shape == (3, 17, 64, 64) and 10 * np.log10(4 / np.square(video - drawn).mean()) > 30
        right.update(kind for kind, ok in demo_score.score(video, scene).items() if ok)
    assert {scene for scene, _ in demo.demo_clips(184, seed=3)} == set(demo.TRAINING_SCENES)
    rates = rate(right, 60)
    assert rates["colour"] >= 0.99 and rates["direction"] >= 0.99 and rates["shape"] >= 0.95


def test_the_scorer_reads_blurred_and_noisy_videos():
    """If it goes, a sample may be called wrong because it is soft, and the demo's figures understate the model."""
    rng, right, scenes = np.random.default_rng(0), Counter(), demo.TRAINING_SCENES[::3]
    for scene in scenes:
        video = np.moveaxis(demo.draw(scene, rng) / 127.5 - 1, -1, 0)
        for axis in (2, 3) * 3:
            video = (np.roll(video, 1, axis) + 2 * video + np.roll(video, -1, axis)) / 4
        video = video + 0.1 * rng.standard_normal(video.shape)
        right.update(kind for kind, ok in demo_score.score(video, scene).items() if ok)
    assert all(share >= 0.95 for share in rate(right, len(scenes)).values())


def test_the_scorer_sees_what_is_wrong():
    """If it goes, the scorer may flatter: give the expected answer for a still, an empty, a reversed or a recoloured
    video."""
    scene = demo.Scene("red", "circle", "left", "grey")
    video = np.moveaxis(demo.draw(scene, np.random.default_rng(0)) / 127.5 - 1, -1, 0)
    assert demo_score.score(video, scene) == {"colour": True, "shape": True, "direction": True}
    assert demo_score.read_scene(video[:, ::-1])["direction"] == "right"
    assert demo_score.read_scene(video[..., ::-1].swapaxes(2, 3))["direction"] == "down"
    assert demo_score.read_scene(np.repeat(video[:, 8:9], 17, axis=1))["direction"] == "none"
    assert demo_score.read_scene(np.zeros((3, 17, 64, 64))) == dict.fromkeys(demo_score.KINDS, "none")
    assert demo_score.read_scene(video[[1, 0, 2]])["colour"] == "green"
    noise = np.random.default_rng(1).uniform(-1, 1, (3, 17, 64, 64))
    assert demo_score.read_scene(noise)["direction"] == "none"


def test_the_command_line_prints_one_row_per_video_and_the_shares(tmp_path, monkeypatch, capsys):
    """If it goes, `demo_score.py FOLDER` may count wrongly or fail on what sample.py writes (000.mp4, 000.txt)."""
    for i, (shown, said) in enumerate([("left", "left"), ("up", "down")]):
        scene = demo.Scene("blue", "square", shown, "light")
        demo.write_mp4(tmp_path / f"{i:03d}.mp4", demo.draw(scene, np.random.default_rng(i)))
        (tmp_path / f"{i:03d}.txt").write_text(demo.Scene("blue", "square", said, "light").caption(i) + "\n")
    monkeypatch.setattr(sys, "argv", ["demo_score.py", str(tmp_path)])
    demo_score.main()
    lines = capsys.readouterr().out.splitlines()
    assert "ok" in lines[0] and "wrong direction" in lines[1]
    assert lines[2].startswith("colour 100.0 %  shape 100.0 %  direction 50.0 %") and "2 videos" in lines[2]


@pytest.mark.parametrize("config, file, shapes", [("demo", "vae", 7), ("demo-2.2", "vae22", 4)])
def test_the_shipped_vae_keeps_the_clips(config, file, shapes):
    """If it goes, the demo may train on latents that are not normalised, or that no longer decode to what was encoded,
    and its samples fail whatever the DiT learned; noise on the latents stands for the DiT's small errors. A first frame
    worse than the second would show as a jump in every sample. The 2.2 VAE rounds squares off: 4 shapes of 7 it is."""
    vae = WanVAE(VAE_CONFIGS[config])
    vae.load_state_dict(load_file(ASSETS / f"{file}.safetensors"))
    rng, scenes = np.random.default_rng(5), demo.HELD_OUT_SCENES[::5]
    videos = torch.from_numpy(np.stack([demo.draw(scene, rng) for scene in scenes])).movedim(-1, 1) / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(videos)  # (S, z, 5, h, w)
        decoded = vae.decode(latents + 0.2 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)))
    assert latents.mean().abs() < 0.1 and 0.85 < latents.std() < 1.15
    errors = (decoded.clamp(-1, 1) - videos).square().mean((0, 1, 3, 4))  # (T,)
    assert 10 * torch.log10(4 / errors.mean()) > 28
    assert 10 * torch.log10(errors[0] / errors[1]) < 1
    right = Counter()
    for video, scene in zip(decoded.numpy(), scenes, strict=True):
        right.update(kind for kind, ok in demo_score.score(video, scene).items() if ok)
    assert right["colour"] == right["direction"] == 7 and right["shape"] >= shapes


def test_the_shipped_image_encoder_tells_pictures_apart():
    """If it goes, image-to-video models of the demo may be fed features that hold nothing of their picture, or the file
    may no longer be the configuration's."""
    encoder = CLIPVision(CLIP_CONFIGS["demo"])
    encoder.load_state_dict(load_file(ASSETS / "clip.safetensors"))
    with torch.no_grad():
        assert encoder.encode([torch.zeros(3, 1, 64, 64)]).shape == (1, 257, 32)
    found = make_demo_assets.probe_image_encoder(encoder, seen=600, new=128)
    assert found["colour"] > 0.9 and found["ground"] > 0.9 and found["shape"] > 0.75 and found["centre"] < 4.5


def test_the_shipped_text_encoder_tells_captions_apart():
    """If it goes, the DiT's prompts may have lost a word, or say the same in states too much alike to be learnt from:
    scenes that differ in one word must be farther apart than two wordings of a scene are."""
    tokenizer, encoder = Tokenizer(ASSETS / "tokenizer.model", 32), UMT5Encoder(UMT5_CONFIGS["demo"])
    encoder.load_state_dict(load_file(ASSETS / "text_encoder.safetensors"))
    ends = {}  # the last token's state, which has seen the whole caption
    for scene in demo.HELD_OUT_SCENES[:8]:
        for kind, names in (("colour", demo.COLOURS), ("direction", demo.DIRECTIONS), ("ground", demo.GROUNDS)):
            for name in names:
                other = replace(scene, **{kind: name})
                ends[other] = torch.stack(
                    [x[-1] for x in encode_prompts(encoder, tokenizer, [other.caption(i) for i in range(5)])]
                )
    for one, x in ends.items():
        spread = torch.cdist(x, x).max()
        for other, y in ends.items():
            assert one == other or torch.cdist(x, y).min() > spread


def test_any_ascii_prompt_tokenizes():
    """If it goes, a user's own prompt may turn into unknown tokens, and captions may not fit the demo's 32 tokens."""
    model = Tokenizer(ASSETS / "tokenizer.model", 32).model
    assert model.unk_id() not in model.encode("".join(map(chr, range(32, 127))))
    assert model.encode("A RED Circle") == model.encode("a red circle")
    scenes = demo.HELD_OUT_SCENES + demo.TRAINING_SCENES
    assert max(len(model.encode(scene.caption(i))) for scene in scenes for i in range(5)) < 32


def test_overfitting_runs(tmp_path, monkeypatch):
    """If it goes, tools/overfit.py, which shows that each mode learns, fell behind the trainer that it calls."""
    monkeypatch.chdir(tmp_path)  # it changes the folder, and monkeypatch changes back
    found = overfit.overfit("demo-i2v", tmp_path, steps=2, lr=1e-3, sheet=None)
    assert found.keys() == {"video", "first frame"} and all(0 < value < 40 for value in found.values())


def test_the_shipped_weights_are_small():
    """If it goes, the repository may grow by weights that a clone has to download: 8 MB are the promise."""
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 8e6
