"""Sampling in every mode, by the command line's own path: the same latents on any layout, the right picture, expert and
adapter in the right place, and one line for what cannot work."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import runs
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from spawn import spawn

import memory
import model
import prompts
import sample
import train
import watch
from lora import Adapter, LoRA
from lora_formats import write_lora
from model import WanDiT
from options import parse
from presets import PRESETS
from vae import VAE_CONFIGS
from video import write_png

MODES = [name for name in runs.MODELS if name != "demo"]
PAIRS = [name for name in MODES if PRESETS[name].boundary]
PICTURES = {"square": (48, 48), "wide": (40, 90), "tall": (70, 50)}  # height, width; each video takes its aspect
HOW = dict(sampling_steps=3, frames=5, height=64, width=64, guidance=3.0, precision="fp64")
LAYOUTS = [{"sp": 1}, {"ulysses": 2}, {"ring": 2}, {"shard": "full"}, {"ring": 2, "shard": "full"}]
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights and LoRAs of tiny models, pictures, and a file of prompts for each kind of condition."""
    folder = tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    for name, wan in runs.MODELS.items():
        runs.write_dit(folder / f"{name}.safetensors", wan)
        runs.write_dit(folder / f"{name}-low.safetensors", wan)
    for name, size in PICTURES.items():
        write_png(folder / f"{name}.png", torch.randint(256, (*size, 3), dtype=torch.uint8).numpy())
    for part in ("high", "low"):
        adapters = {
            f"blocks.{i}.{module}": Adapter(torch.randn(3, 48) / 7, torch.randn(48, 3) / 7, 5.0)
            for i in range(2)
            for module in ("self_attn.q", "cross_attn.v")
        }
        write_lora(LoRA(adapters, {}), folder / f"{part}-lora.safetensors", "comfyui")
    rows = [{"prompt": f"prompt {i}", "image": f"{name}.png"} for i, name in enumerate(PICTURES)]
    write_rows(folder / "first.jsonl", rows)
    write_rows(folder / "first-last.jsonl", [row | {"last_image": "square.png"} for row in rows])
    write_rows(folder / "first-latent.jsonl", [*rows[:2], {"prompt": "prompt 2"}])
    write_rows(folder / "text.jsonl", [{"prompt": row["prompt"]} for row in rows])
    return folder


def write_rows(file: Path, rows: list[dict]):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts_of(mode: str) -> str:
    return f"{PRESETS[mode].condition or 'text'}.jsonl"


def config(folder: Path, mode: str, **changes) -> sample.Config:
    options = HOW | {"model": mode, "checkpoint": str(folder / f"{mode}.safetensors"), "out": str(folder / "out")}
    if PRESETS[mode].boundary:
        options |= {"low_checkpoint": str(folder / f"{mode}-low.safetensors"), "guidance_low": 2.0}
    return sample.Config(**(options | {"prompts": str(folder / prompts_of(mode))} | changes))


def one(folder: Path, mode: str) -> dict:
    """The options of the first prompt alone, in place of --prompts."""
    picture = (str(folder / "square.png"),)
    options = {"prompts": "", "prompt": ("prompt 0",)} | ({"image": picture} if PRESETS[mode].condition else {})
    return options | ({"last_image": picture} if PRESETS[mode].condition == "first-last" else {})


def sampled(folder: Path, mode: str, decoded: bool = False, **changes) -> dict[int, torch.Tensor]:
    """What sample.py makes over the processes of this group: the float64 latents, or videos, of every prompt."""
    with capture(decoded) as found:
        sample.main(config(folder, mode, **changes))
    return joined(found)


@contextlib.contextmanager
def capture(decoded: bool = False):
    """Inside, the tiny models are in use, and what Sampler.write would write goes into the dictionary that this gives:
    latents, or with `decoded` videos, by the number of their prompt."""
    found = {}

    def write(sampler, requests, seed, folder):
        decode = sampler.components.decode if decoded else lambda latents: latents
        with patch.object(sampler.components, "decode", decode):
            found.update(sampler.videos(requests, seed))
        return folder

    with patch.dict(model.CONFIGS, runs.MODELS), patch.object(sample.Sampler, "write", write):
        yield found


def joined(found: dict) -> dict[int, torch.Tensor]:
    """All ranks' parts; each number belongs to one rank."""
    everyones = [found]
    if dist.is_initialized():
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
    assert sum(map(len, everyones)) == len({i for part in everyones for i in part})
    return {i: x for part in everyones for i, x in part.items()}


def all_sampled(folder: Path, cases: list[tuple[str, dict]]) -> list[dict]:
    return [sampled(folder, mode, **changes) for mode, changes in cases]


def worst(a: dict, b: dict) -> float:
    assert a.keys() == b.keys() and all(a[i].shape == b[i].shape and a[i].dtype == b[i].dtype for i in a)
    return max(runs.distance(a[i], b[i]) for i in a)


@pytest.fixture(scope="module")
def alone(folder):
    """Each mode's latents, of one process."""
    return {mode: sampled(folder, mode) for mode in MODES}


def test_every_mode_samples_the_same_on_any_layout(folder, alone):
    """If this goes, a video depends on how many processes made it: a picture's condition or CLIP features that are not
    cut with the tokens or go to another prompt, an expert that some ranks leave earlier, a prompt lost between groups.
    """
    cases = [(mode, layout) for mode in MODES for layout in LAYOUTS]
    results = spawn(all_sampled, 2, folder, cases)[0]
    differences = {(mode, *how.items()): worst(x, alone[mode]) for (mode, how), x in zip(cases, results, strict=True)}
    assert max(differences.values()) < TOLERANCE, differences
    print("largest difference", max(differences.values()))
    for mode in MODES:
        assert sorted(alone[mode]) == [0, 1, 2] and all(x.dtype == torch.float64 for x in alone[mode].values())
        if PRESETS[mode].condition:
            assert len({x.shape for x in alone[mode].values()}) > 1  # of each picture's aspect


@pytest.mark.parametrize("mode", [mode for mode in MODES if PRESETS[mode].condition])
def test_the_picture_counts(folder, alone, mode):
    """If this goes, a model is not given its prompt's picture, or the model of latents does not hold it in frame 0."""
    rows = [json.loads(line) for line in (folder / prompts_of(mode)).read_text().splitlines()]
    write_rows(folder / "swapped.jsonl", [rows[0] | {"image": "wide.png"}, *rows[1:]])
    swapped = sampled(folder, mode, prompts=str(folder / "swapped.jsonl"), height=96, width=96)
    same = sampled(folder, mode, height=96, width=96)
    assert swapped[0].shape != same[0].shape or runs.distance(swapped[0], same[0]) > 1e-3
    assert all(runs.distance(swapped[i], same[i]) < TOLERANCE for i in (1, 2))  # the pack's others do not see it
    assert runs.distance(sampled(folder, mode, **one(folder, mode))[0], alone[mode][0]) < TOLERANCE
    if mode == "demo-ti2v":
        first = {i: x[:, 0] for i, x in alone[mode].items()}
        again = sampled(folder, mode, seed=1)
        assert all(torch.equal(again[i][:, 0], first[i]) for i in (0, 1)) and not torch.equal(again[2][:, 0], first[2])


# ---------------------------------------------------------------------------------------------------------------------
# Experts and LoRAs


def by_hand(folder: Path, mode: str, loras: dict[str, tuple[str, float]]) -> dict[int, torch.Tensor]:
    """The same from models put together here: weights read with safetensors, W + scale * alpha / r * B A."""
    models = {}
    for part in PRESETS[mode].experts:
        weights = load_file(folder / f"{mode}{'-low' if part == 'low' else ''}.safetensors")
        weights = {name: x.double() for name, x in weights.items()}
        file, scale = loras.get(part, ("", 0.0))
        factors = load_file(folder / file) if file else {}
        for name in (name for name in factors if name.endswith("lora_A.weight")):
            stem = name.removesuffix(".lora_A.weight")
            down, up = factors[name].double(), factors[f"{stem}.lora_B.weight"].double()
            alpha = factors[f"{stem}.alpha"].item()
            weights[stem.removeprefix("diffusion_model.") + ".weight"] += scale * alpha / len(down) * up @ down
        models[part] = WanDiT(runs.MODELS[mode]).double().eval()
        models[part].load_state_dict(weights)
    with patch.object(sample, "load_dit", lambda config, expert, layout, memory: models[expert]):
        return sampled(folder, mode)


@pytest.mark.parametrize("mode", PAIRS)
def test_each_expert_has_its_own_weights_loras_and_guidance(folder, mode):
    """If this goes, an expert works with the other's weights, LoRA, scale or guidance, or at the other's noise."""
    high, low = (str(folder / f"{part}-lora.safetensors") for part in ("high", "low"))
    ours = sampled(folder, mode, lora=(f"{high}:0.5",), lora_low=(low, f"{high}:-0.25"))
    plain = sampled(folder, mode)
    assert worst(plain, by_hand(folder, mode, {})) < TOLERANCE < worst(ours, plain)
    half = sampled(folder, mode, lora=(f"{high}:0.5",), lora_low=(low,))
    expected = by_hand(folder, mode, {"high": ("high-lora.safetensors", 0.5), "low": ("low-lora.safetensors", 1.0)})
    assert worst(half, expected) < TOLERANCE < worst(ours, half)

    calls, forward = [], WanDiT.forward

    def counted(self, latents, timesteps, *rest, **more):
        calls.append((float(torch.as_tensor(timesteps[0]).max()), id(self)))
        return forward(self, latents, timesteps, *rest, **more)

    with patch.object(WanDiT, "forward", counted):
        sampled(folder, mode, guidance=1.0, guidance_low=2.0, sampling_steps=6)
    boundary = 1000 * PRESETS[mode].boundary
    workers = [{i for t, i in calls if (t >= boundary) == above} for above in (True, False)]
    assert len(workers[0]) == len(workers[1]) == 1 and workers[0] != workers[1]
    times = sorted({t for t, _ in calls}, reverse=True)
    assert [sum(t == now for t, _ in calls) for now in times] == [1 if t >= boundary else 2 for t in times]
    assert len(times) == 6


def test_experts_in_a_repository_s_folder(folder, alone, tmp_path):
    """If this goes, --checkpoint does not find the two experts in a folder named as the official repository's."""
    for part, file in (("high_noise_model", "demo-t2v-experts"), ("low_noise_model", "demo-t2v-experts-low")):
        (tmp_path / part).mkdir()
        save_file(load_file(folder / f"{file}.safetensors"), tmp_path / part / "diffusion_pytorch_model.safetensors")
    found = sampled(folder, "demo-t2v-experts", checkpoint=str(tmp_path), low_checkpoint="")
    assert worst(found, alone["demo-t2v-experts"]) == 0


def test_a_lora_for_another_model(folder, tmp_path, capsys):
    """If this goes, a LoRA that does nothing is merged without a word, or one that fits in part is not reported."""
    lora = load_file(folder / "high-lora.safetensors")
    strange = {name.replace("self_attn.q", "k_proj").replace("cross_attn.v", "v_proj"): x for name, x in lora.items()}
    save_file(strange, tmp_path / "strange.safetensors")
    partly = {name.replace("self_attn.q", "cross_attn.k_img"): x for name, x in lora.items()}
    save_file(partly, tmp_path / "partly.safetensors")
    with pytest.raises(ValueError, match="none of the LoRA's 4 parts has a place in this model"):
        sampled(folder, "demo-ti2v", lora=(str(tmp_path / "strange.safetensors"),))
    capsys.readouterr()
    some = sampled(folder, "demo-ti2v", lora=(str(tmp_path / "partly.safetensors"),))
    assert "partly.safetensors: no place in demo-ti2v for {'cross_attn.k_img.weight': 2}" in capsys.readouterr().out
    assert worst(some, sampled(folder, "demo-ti2v")) > TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# Memory, tiles, and sampling at the end of training


@pytest.mark.parametrize("mode", MODES)
def test_memory_modes_and_tiles(folder, alone, mode):
    """If this goes, a mode does not sample with --memory idle or blocks, or with --vae-tile, or makes another video."""
    for how in memory.MODES[1:]:
        assert runs.distance(sampled(folder, mode, memory=how, **one(folder, mode))[0], alone[mode][0]) < TOLERANCE
    edge = 12 * VAE_CONFIGS[PRESETS[mode].vae].spatial
    size = one(folder, mode) | dict(height=edge, width=edge, guidance=1.0, sampling_steps=1)
    whole = sampled(folder, mode, decoded=True, **size)[0]
    tiles = sampled(folder, mode, decoded=True, vae_tile=8, vae_overlap=4, **size)[0]
    error = (tiles - whole).square().mean()
    assert 0 < error and 10 * torch.log10(4 / error) > 25


TRAINED = ["demo-i2v", "demo-i2v-experts", "demo-ti2v"]
ENDS = [{"shard": "none", "validate_every": "1"}, {"shard": "full", "ring": 2, "validate_every": "1"}]


def trained(folder: Path, cases: list[dict]) -> list[dict]:
    results = []
    for changes in cases:
        preset = PRESETS[changes["model"]]
        short = replace(preset, sampling=replace(preset.sampling, frames=5, steps=3))
        presets, pictures = (
            patch.dict(PRESETS, {changes["model"]: short}),
            patch.object(watch, "first_batch", lambda *_: None),
        )
        with capture() as found, presets, pictures:
            runs.run(folder, **changes)
        results.append(joined(found))
    return results


def test_sampling_at_the_end_of_training(folder):
    """If this goes, the videos of a run depend on its layout, made with one rank's shard or not averaged; or training
    goes on with the averaged weights that FSDP2 gathered for videos in the middle of the run."""
    runs.write_files(folder / "films", {"a": (5, 64, 64), "b": (5, 64, 96)})
    cases = [
        {
            "model": mode, "checkpoint": str(folder / f"{mode}.safetensors"), "vae": "", "ema": 0.5, "steps": 2,
            "data": (str(folder / "films"),), "text_encoder": "", "tokenizer": "",
            "sample": True, "prompts": str(folder / prompts_of(mode)), "run": "end",
        }
        | ({"low_checkpoint": str(folder / f"{mode}-low.safetensors")} if PRESETS[mode].boundary else {})
        for mode in TRAINED
    ]  # fmt: skip
    alone = trained(folder, cases)
    together = [case | end for case in cases for end in ENDS]
    for case, found in zip(together, spawn(trained, 2, folder, together)[0], strict=True):
        assert worst(found, alone[TRAINED.index(case["model"])]) < TOLERANCE, case


# ---------------------------------------------------------------------------------------------------------------------
# What cannot work


A = ["--image", "square.png"]
Z = ["--last-image", "tall.png"]
P = ["--prompt", "one", "two"]
WRONG = {  # a command line, and what its one line of error says
    "no picture": ("demo-i2v", P, "this model takes --image; the prompt 'one' has none"),
    "no last picture": ("demo-flf2v", [*P, *A], "takes --image and --last-image; the prompt 'one' has image"),
    "no first picture": ("demo-flf2v", [*P, *Z], "takes --image and --last-image; the prompt 'one' has last-image"),
    "a last picture": ("demo-i2v", [*P, *A, *Z], "takes --image; the prompt 'one' has image and last-image"),
    "a picture for text": ("demo", [*P, *A], "takes no image; the prompt 'one' has image"),
    "a last picture for ti2v": ("demo-ti2v", [*P, *Z], "takes --image; the prompt 'one' has last-image"),
    "three for two": ("demo-i2v", [*P, "--image", "a", "b", "c"], "--image: 3 pictures for 2 --prompt; give one, or"),
    "one for none": ("demo-i2v", A, "--image: 1 pictures for 0 --prompt"),
    "with a file": ("demo-i2v", ["--prompts", "first.jsonl", *A], "--image: 1 pictures for 0 --prompt"),
    "no such picture": ("demo-i2v", [*P, "--image", "none.png"], "none.png"),
    "no picture at all": ("demo-i2v", [*P, "--image", "first.jsonl"], "first.jsonl"),
    "no such file": ("demo-i2v", ["--prompts", "none.jsonl"], "none.jsonl: no such file"),
    "a row without": ("demo-i2v", ["--prompts", "text.jsonl"], "takes --image; the prompt 'prompt 0' has none"),
    "no JSON": ("demo-i2v", ["--prompts", "broken.jsonl"], "broken.jsonl, row 2: is no JSON"),
    "a strange column": ("demo-i2v", ["--prompts", "strange.jsonl"], "row 1: has prompt, picture; wanted"),
    "a number": ("demo-i2v", ["--prompts", "number.jsonl"], "row 1: its values are not all text"),
    "no row": ("demo-i2v", ["--prompts", "list.jsonl"], "row 1: has [1]; wanted"),
    "too short": ("demo-flf2v", [*P, *A, *Z, "--frames", "1"], "--frames 1 leaves nothing between"),
    "guidance": ("demo-i2v", [*P, *A, "--guidance-low", "2"], "--guidance-low: --model demo-i2v is one model"),
    "a LoRA too many": ("demo-i2v", [*P, *A, "--lora-low", "high-lora.safetensors"], "--lora-low: --model demo-i2v is"),
    "no such LoRA": ("demo-i2v", [*P, *A, "--lora", "none.safetensors:0.5"], "LoRA none.safetensors: no such file"),
    "a second model": ("demo-i2v", [*P, *A, "--low-checkpoint", "square.png"], "--low-checkpoint square.png: --model"),
    "one expert": ("demo-t2v-experts", P, "is not a folder that holds both experts; name the second with --low-ch"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_said_in_one_line(folder, monkeypatch, case):
    """If this goes, a wrong command line loads tens of gigabytes first, or dies in a traceback, or samples something
    else than was asked for."""
    monkeypatch.chdir(folder)
    Path("broken.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n')
    write_rows(Path("strange.jsonl"), [{"prompt": "one", "picture": "square.png"}])
    write_rows(Path("number.jsonl"), [{"prompt": 1}])
    Path("list.jsonl").write_text("[1]\n")
    monkeypatch.setattr(sample, "load_components", lambda *_: pytest.fail("loads already"))
    mode, words, message = WRONG[case]
    argv = ["--model", mode, "--checkpoint", f"{mode}.safetensors", *words]
    with pytest.raises((ValueError, OSError)) as error:
        sample.main(parse(sample.Config, argv, sample.__doc__))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_one_expert_makes_no_videos(folder):
    """If this goes, training one of two experts ends in an error after its last step, when it is to be sampled."""
    options = {"model": "demo-t2v-experts", "checkpoint": str(folder / "demo-t2v-experts.safetensors"), "sample": True}
    config = train.settle(train.Config(**options, expert="high"))
    assert prompts.requests_for_training(config) == []
    with pytest.raises(ValueError, match="it takes both experts to sample, --expert low trains one"):
        prompts.requests_for_training(train.settle(train.Config(**options, expert="low", prompts="text.jsonl")))
