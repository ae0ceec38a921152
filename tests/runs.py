"""Training runs small enough to compare in float64: a tiny model, four files of odd sizes, random weights around it."""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import encode
import model
import resume
import sample
import train
import watch
from memory import WHOLE
from model import WanConfig, WanDiT
from text_encoder import UMT5_CONFIGS, UMT5Encoder
from vae import VAE_CONFIGS, WanVAE
from video import to_pixels, write_mp4, write_png

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(dim=48, ffn_dim=80, num_heads=4, num_layers=2, text_dim=64, text_len=12, freq_dim=16)
TINY = WanConfig(**SMALL)
MODELS = {  # what the demo's presets are in tests
    "demo": TINY,
    "demo-i2v": WanConfig("i2v", in_dim=36, clip_dim=32, **SMALL),
    "demo-flf2v": WanConfig("flf2v", in_dim=36, clip_dim=32, **SMALL),
    "demo-t2v-experts": TINY,
    "demo-i2v-experts": WanConfig("i2v", in_dim=36, clip_dim=0, **SMALL),
    "demo-ti2v": WanConfig("ti2v", in_dim=48, out_dim=48, **SMALL),
}
WEIGHTS = {"checkpoint": "dit", "vae": "vae", "text_encoder": "text"}
# (frames, height, width): two videos of different size and length, two images; 45 + 20 + 9 + 5 = 79 tokens, a prime
FILES = {"a": (9, 48, 80), "b": (5, 80, 32), "c": (1, 48, 48), "d": (1, 16, 80)}


def prepare(folder: Path, fill: bool = True):
    """Write files, captions and weights into `folder`, and (unless not `fill`) fill its cache by a step of training."""
    torch.manual_seed(0)
    write_files(folder / "data", FILES)
    write_dit(folder / "dit.safetensors", TINY)
    save_file(WanVAE(VAE_CONFIGS["demo"]).state_dict(), folder / "vae.safetensors")
    save_file(UMT5Encoder(UMT5_CONFIGS["demo"]).state_dict(), folder / "text.safetensors")
    return run(folder, steps=1, run="fill") if fill else None


def write_files(folder: Path, files: dict[str, tuple[int, int, int]]):
    """Captioned noise, (frames, height, width) by name: mp4, or png where it is one frame."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, (frames, height, width) in files.items():
        video = torch.from_numpy(rng.uniform(-1, 1, (3, frames, height, width)).astype(np.float32))
        file = folder / (f"{name}.mp4" if frames > 1 else f"{name}.png")
        if frames > 1:
            write_mp4(file, video, 16)
        else:
            write_png(file, to_pixels(video)[0])
        file.with_suffix(".txt").write_text(f"a {name} moves {'left' if frames > 5 else 'up'}")


def write_dit(file: Path, wan: WanConfig):
    dit = WanDiT(wan)
    torch.nn.init.normal_(dit.head.head.weight, std=0.1)  # a zero head sends no gradient into the blocks
    save_file(dit.state_dict(), file)


def config(folder: Path, **changes) -> train.Config:
    options = {name: str(folder / f"{file}.safetensors") for name, file in WEIGHTS.items()} | dict(
        tokenizer=str(ROOT / "assets" / "tokenizer.model"),
        data=(str(folder / "data"),),
        cache=str(folder / "cache"),
        max_area=80 * 80,
        frames=9,
        steps=4,
        batch_size=4,
        warmup_steps=0,
        lr=0.01,
        max_grad_norm=1.0,
        caption_dropout=0.3,
        ema=0.0,
        precision="fp64",
        sample=False,
        run="case",
    )
    return train.Config(**(options | changes))


LOADED: dict = {}  # datasets, by what they are made of
LOAD_COMPONENTS, OPEN_DATASET = sample.load_components, encode.open_dataset


class Killed(Exception):
    """Stands for a signal that ends the run in the middle of a step."""


def run(folder: Path, killed_in: int | None = None, **changes) -> dict:
    """Train in this process (and the others of its group, if any); what happened at every step, as one record.

    loss [steps], grads [steps][name] whole and before clipping, params: the final ones, whole; digests: of this rank's
    parameters before every step and at the end. killed_in: the step, from 0, in which the run dies.
    """
    os.chdir(folder)
    record = {"loss": [], "grads": [], "digests": [], "params": {}}

    def observe(step, loss, parts):
        if step == killed_in:
            raise Killed
        record["loss"].append(loss)
        record["grads"].append(whole({name: p.grad for name, p in named(parts) if p.grad is not None}))
        note(parts)

    def note(parts):
        record["params"] = whole({name: p.detach() for name, p in named(parts)})
        digest = hashlib.blake2b(b"".join(t.numpy().tobytes() for t in record["params"].values()))
        record["digests"].append(digest.hexdigest())

    if not changes.get("resume"):
        shutil.rmtree(folder / "runs" / changes.get("run", "case"), ignore_errors=True)
    with contextlib.suppress(Killed), patch.dict(model.CONFIGS, MODELS):
        note(train.main(config(folder, **changes), observe))
    return record


def named(parts: dict) -> list:
    """The parameters of all models in training, by name, an expert's behind its own."""
    pairs = ((expert, pair) for expert, part in parts.items() for pair in part.model.named_parameters())
    return [(f"{expert}.{name}" if expert else name, p) for expert, (name, p) in pairs]


def whole(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, put together from all ranks' shards (FSDP2 cuts along dim 0) in one exchange. They are views
    of one piece of memory: thousands of small ones take long to send."""
    here = flat([x.to_local() if isinstance(x, DTensor) else x for x in named.values()])
    if any(isinstance(x, DTensor) for x in named.values()):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, here)
        here = flat([torch.cat(shards) for shards in zip(*(views(*part) for part in parts), strict=True)])
    return dict(zip(named, views(*here), strict=True))


def flat(tensors: list[torch.Tensor]) -> tuple:
    return torch.cat([x.flatten() for x in tensors]), [(x.shape, x.dtype) for x in tensors]


def views(end_to_end: torch.Tensor, kinds: list[tuple]) -> list[torch.Tensor]:
    parts = end_to_end.split([shape.numel() for shape, _ in kinds])
    return [x.view(shape).to(dtype) for x, (shape, dtype) in zip(parts, kinds, strict=True)]


def run_all(folder: Path, cases: list[dict]) -> list[dict]:
    """Runs without what a run does besides training: each set of data is loaded once for all of them, no picture of the
    first batch is made, and nothing is saved where nothing is to be resumed."""
    with (
        patch.object(watch, "first_batch", lambda *_: None),
        patch.object(sample, "load_components", lambda *_: SimpleNamespace(release_text_encoder=int, decode=None)),
        patch.object(encode, "open_dataset", load_once),
    ):
        records = []
        for case in cases:
            saves = resume.Keeper.save if "save_every" in case else lambda *_: None
            with patch.object(resume.Keeper, "save", saves):
                records.append(run(folder, **case))
        return records


def load_once(config, paths, components, layout, folder=""):
    key = config.model, config.data, config.max_area, config.frames, config.cache
    if key not in LOADED:
        components = LOAD_COMPONENTS(config, paths, layout, WHOLE)
        LOADED[key] = OPEN_DATASET(config, paths, components, layout)
    return LOADED[key]


def worst(record: dict, reference: dict) -> dict[str, float]:
    """The largest relative differences from the reference run: of losses, of each gradient's norm, of parameters."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(record["loss"], reference["loss"], strict=True))
    pairs = zip(record["grads"], reference["grads"], strict=True)
    grad = max(distance(a[name], b[name]) for a, b in pairs for name in b)
    params = max(distance(record["params"][name], x) for name, x in reference["params"].items())
    return {"loss": loss, "grad": grad, "params": params}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
