"""Overfit one clip in each mode of the demo's models, sample it, and compare: can the mode learn what it is shown?

    python tools/overfit.py                     all modes, some minutes each
    python tools/overfit.py demo-i2v --steps 600

Prints the sampled video's PSNR against the VAE's own reconstruction of the clip, which is the best a model of its
latents can do, and, where the model is given a picture, that of the first sampled frame against the given picture.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import demo
import parallel
import sample
import train
from memory import Memory
from presets import PRESETS
from prompts import Request
from video import contact_sheet, to_pixels, write_mp4


def overfit(model: str, folder: Path, steps: int, lr: float, sheet: Path | None) -> dict[str, float]:
    """Train `model` from scratch on one clip of the demo; PSNR in dB of its sample, and of the sample's first frame."""
    (folder / "data").mkdir()
    scene = demo.TRAINING_SCENES[7]
    clip = torch.from_numpy(demo.draw(scene, np.random.default_rng(0))).permute(3, 0, 1, 2) / 127.5 - 1  # (3, T, H, W)
    write_mp4(folder / "data" / "clip.mp4", clip, demo.FPS)
    (folder / "data" / "clip.txt").write_text(scene.caption(0))
    os.chdir(folder)
    config = train.settle(
        train.Config(
            model=model,
            checkpoint="scratch",
            data=("data",),
            clips=1,
            steps=steps,
            batch_size=8,
            lr=lr,
            ema=0.99,
            caption_dropout=0.0,
            sample=False,
            run="overfit",
        )
    )
    layout, preset = parallel.Layout(), PRESETS[model]
    paths = train.check(config)
    components = sample.load_components(config, paths, layout, Memory())
    dataset = train.encode.open_dataset(config, paths, components, layout)
    train.encode.fill(dataset, layout)
    parts = train.fit(config, layout, dataset)
    for part in parts.values():
        for name, parameter in part.model.named_parameters():
            parameter.data.copy_(part.ema[name])
    how = replace(preset.sampling, guidance=1.0, guidance_low=1.0)
    models = {expert: part.model.eval() for expert, part in parts.items()}
    sampler = sample.Sampler(models, components, preset, how, layout, torch.float32)
    frames = to_pixels(clip)
    pictures = {"image": frames[0]} if preset.condition else {}
    pictures |= {"last_image": frames[-1]} if preset.condition == "first-last" else {}
    ((_, video),) = sampler.videos([Request(scene.caption(0), **pictures)], seed=1)
    best = components.decode(dataset.sample(0, 0)["latents"])
    if sheet:
        contact_sheet(sheet / f"{model}.png", [video, best])
    result = {"video": psnr(video, best)}
    if preset.condition:
        result["first frame"] = psnr(video[:, :1], clip[:, :1])
    return result


def psnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of pictures in [-1, 1], in dB."""
    return float(10 * torch.log10(4 / (x - y).square().mean()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[name for name in PRESETS if PRESETS[name].demo])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sheets", type=Path, help="folder for a picture of each sample above the clip as decoded")
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found = overfit(name, Path(folder), options.steps, options.lr, options.sheets)
        print(f"{name:18}", *(f"{what} {value:.1f} dB" for what, value in found.items()), flush=True)
