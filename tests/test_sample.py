"""From text to files: the released pipeline's latents and video, the same video on any layout, real codecs in."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import runs
import torch
from spawn import spawn
from test_model import golden_model, relative

import model
import sample
import train
from presets import Sampling
from sample import Given, generate
from vae import VAEConfig, WanVAE
from video import read_mp4


@pytest.mark.parametrize("solver", ["unipc", "dpm++"])
def test_the_released_pipeline(golden, solver):
    """If this goes, the same weights, noise and prompt no longer give the released pipeline's video (its solver tables,
    guidance, truncated timesteps or decoding; tolerance of golden's README for the whole chain: 5e-4)."""
    dit, _ = golden_model(golden, "dit_t2v")
    case = golden("e2e_t2v")
    how = Sampling(32, 48, 9, 16, steps=6, shift=5.0, guidance=5.0, solver=solver)
    texts, negative = [case["in.context.cond"]], case["in.context.uncond"]
    noise = case["out.noise"]
    latents = generate({"": dit}, texts, negative, [Given(noise.shape)], how, [noise], torch.float32)[0]
    assert relative(latents, case[f"out.latent.{solver}"]) < 5e-4
    settings = golden.config("vae21_weights")
    weights = golden("vae21_weights")
    statistics = {name: tuple(golden.metadata("vae21_weights", name)) for name in ("latents_mean", "latents_std")}
    fields = {f.name for f in dataclasses.fields(VAEConfig)}
    vae = WanVAE(VAEConfig(**{k: v for k, v in settings.items() if k in fields}, **statistics))
    vae.load_state_dict({k.removeprefix("w."): v for k, v in weights.items()})
    with torch.no_grad():
        video = vae.decode(latents).clamp(-1, 1)
    assert relative(video, case[f"out.video.{solver}"]) < 5e-4


def sampled(folder: Path, out: str, **options) -> torch.Tensor:
    """The videos of a sampling run over the processes of this group, as read back from the files by every rank."""
    weights = {name: str(folder / f"{file}.safetensors") for name, file in runs.WEIGHTS.items()}
    config = sample.Config(
        **weights,
        tokenizer=str(runs.ROOT / "assets" / "tokenizer.model"),
        prompt=("one", "two", "three"),
        sampling_steps=3,
        frames=5,
        height=48,
        width=80,
        precision="fp64",
        out=str(folder / out),
        **options,
    )
    with patch.dict(model.CONFIGS, demo=runs.TINY):
        sample.main(config)
    return torch.stack([read_mp4(folder / out / f"{i:03d}.mp4") for i in range(3)])


def test_sampling_does_not_depend_on_the_layout(tmp_path):
    """If this goes, a video depends on how many processes made it, or prompts get lost between data-parallel groups."""
    runs.prepare(tmp_path)
    alone = sampled(tmp_path, "alone")
    for world, options in ((2, {"ulysses": 2}), (2, {"sp": 1}), (4, {"sp": 2, "ring": 2})):
        out = f"{world}-{len(options)}-{options}".replace(" ", "")
        together = spawn(sampled_with, world, tmp_path, out, options)[0]
        assert (together - alone).abs().max() < 2 / 255  # the files' own rounding at most
    assert (alone[0] - alone[1]).abs().max() > 0.1
    assert (tmp_path / "alone" / "contact_sheet.png").stat().st_size > 1000
    assert (tmp_path / "alone" / "001.txt").read_text() == "two"


def sampled_with(folder, out, options):
    return sampled(folder, out, **options)


CODECS = {"h264.mp4": "libx264", "hevc.mp4": "libx265", "vp9.webm": "libvpx-vp9", "av1.mkv": "libsvtav1"}


def write_video(path: Path, codec: str, frames: int, height: int, width: int, rate: str):
    import av
    import numpy as np

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            picture = np.full((height, width, 3), 40, np.uint8)
            picture[8:24, i : i + 16] = (200, 60, 60)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def test_real_files_train_and_sample(tmp_path, monkeypatch):
    """If this goes, somebody's folder of videos of several codecs, sizes, rates and lengths, and images, does not
    train, or leaves no checkpoint, metrics or videos behind."""
    import fractions

    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    shapes = [(30, 64, 96, "24"), (17, 96, 64, "16"), (40, 128, 128, "30000/1001"), (12, 66, 90, "12")]
    for (name, codec), (frames, height, width, rate) in zip(CODECS.items(), shapes, strict=True):
        write_video(tmp_path / "clips" / name, codec, frames, height, width, fractions.Fraction(rate))
        (tmp_path / "clips" / name).with_suffix(".txt").write_text(f"a red square, {codec}")
    picture = torch.rand(3, 1, 70, 50)
    runs.write_png(tmp_path / "clips" / "still.png", runs.to_pixels(picture)[0])
    (tmp_path / "clips" / "still.txt").write_text("noise")
    (tmp_path / "prompts.txt").write_text("a red square\n")
    config = train.Config(data=("clips",), max_area=64 * 64, steps=2, batch_size=5, run="real", prompts="prompts.txt")
    train.main(config)
    run = tmp_path / "runs" / "real"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and all(step["loss"] > 0 for step in steps)
    assert read_mp4(run / "samples" / "000.mp4").shape == (3, 17, 64, 64)
    assert (run / (run / "latest").read_text() / "model.safetensors").is_file()
