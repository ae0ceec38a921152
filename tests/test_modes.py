"""The one idea for every way to train: the modes' loss curves do not depend on the layout either."""

import io
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import runs
import torch
from safetensors.torch import load_file
from spawn import spawn
from test_layouts import LAYOUTS as GRID
from test_layouts import SHARDS, TOLERANCE, failures_of

import lora
import model
import parallel
import parity
from lora_formats import read_lora, write_lora
from model import WanDiT

VIDEOS = {"a": (9, 64, 96), "b": (5, 96, 64), "c": (9, 64, 64), "d": (5, 64, 128)}
MIXED = {"a": (9, 64, 96), "b": (5, 96, 64), "c": (1, 64, 64), "d": (9, 64, 64)}
TARGETS = "q,k,v,o,ffn.0,ffn.2,k_img,v_img"  # each kind of row that an adapter reads: tokens, text, image
MODES = {  # options of each; the experts' batch of 4 has samples of both in some steps and of one in others
    "i2v": {"model": "demo-i2v"},
    "flf2v": {"model": "demo-flf2v", "caption_dropout": 0.0},
    "ti2v": {"model": "demo-ti2v", "image_condition": 0.5, "data": "mixed"},
    "t2v-experts": {"model": "demo-t2v-experts", "data": "mixed"},
    "i2v-experts": {"model": "demo-i2v-experts", "image_condition": 0.7, "max_grad_norm": 0.1},
    "lora": {"model": "demo-i2v", "lora_rank": 3, "lora_alpha": 5.0, "lora_dropout": 0.3, "lora_targets": TARGETS},
    "trainable": {"trainable": r"self_attn\.[qk]|blocks\.1\.ffn", "data": "mixed"},
}
LAYOUTS = {  # by (processes, how many of their layouts)
    (2, "all"): GRID[2],
    (4, "some"): [{"ulysses": 2, "ring": 2}, {"sp": 2, "ring": 2}],
    (4, "all"): GRID[4],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    runs.prepare(folder)
    runs.write_files(folder / "videos", VIDEOS)
    runs.write_files(folder / "mixed", MIXED)
    for name, wan in runs.MODELS.items():
        runs.write_dit(folder / f"{name}.safetensors", wan)
        runs.write_dit(folder / f"{name}-low.safetensors", wan)
    write_adapters(folder / "lora.safetensors")
    return folder


def write_adapters(file):
    """To go on from: with B not zero, else A has no gradient and dropout no effect."""
    with torch.device("meta"):
        wan = WanDiT(runs.MODELS["demo-i2v"])
    lora.attach(wan, 3, 5.0, TARGETS)
    adapters = {
        x.name: lora.Adapter(torch.randn(x.lora_A.shape) / 7, torch.randn(x.lora_B.shape) / 3, 5.0)
        for x in lora.layers(wan)
    }
    write_lora(lora.LoRA(adapters, {}), file, "comfyui")


def options(folder, mode: str, **changes) -> dict:
    how = {"model": "demo", "data": "videos", "steps": 3, "max_area": 96 * 96} | MODES[mode]
    if how["model"] in ("demo-ti2v",):
        how["vae"] = ""  # the demo's own
    if "experts" in how["model"]:
        how["low_checkpoint"] = str(folder / f"{how['model']}-low.safetensors")
    if "lora_rank" in how:
        how["lora"] = str(folder / "lora.safetensors")
    how["checkpoint"] = str(folder / f"{how['model']}.safetensors")
    how["data"] = (str(folder / how["data"]),)
    return how | changes


@pytest.fixture(scope="module")
def references(folder):
    """One process, one pack, nothing sharded or recomputed."""
    return dict(zip(MODES, runs.run_all(folder, [options(folder, mode) for mode in MODES]), strict=True))


def cases_of(folder, world) -> list[dict]:
    """Every layout for every mode; sharding, pack size and recomputation go around so that each meets each mode."""
    cases = []
    for m, mode in enumerate(MODES):
        for i, layout in enumerate(LAYOUTS[world]):
            shard = SHARDS[(i + m) % 3]
            recompute = ["none", "block"][(i // 3 + m) % 2]
            limit = [0, 72][(i + m // 2) % 2]
            cases.append(options(folder, mode, shard=shard, recompute=recompute, pack_tokens=limit, **layout))
    return cases


@pytest.mark.parametrize("world", [*list(LAYOUTS)[:2], pytest.param((4, "all"), marks=pytest.mark.slow)])
def test_every_mode_trains_the_same(folder, references, world):
    """If this goes, a mode's loss, gradients or weights depend on the layout: a condition that is not cut with its
    tokens, an image's features that go to another sample, an expert that some ranks skip, a frozen weight."""
    cases = cases_of(folder, world)
    results = spawn(runs.run_all, world[0], folder, cases)
    for i, case in enumerate(cases):
        mode = list(MODES)[i // len(LAYOUTS[world])]
        failures = failures_of([case], [[records[i]] for records in results], {"adamw": references[mode]})
        assert not failures, (mode, failures[:3])
    print("largest differences", largest(results, cases, references, world))


def verified(folder, cases: list[dict]) -> tuple[str, dict[str, int]]:
    """What is said of the cases, and the exit codes of `parity.py check` on one layout."""
    layout = dict(ulysses=1, ring=1, shard="full", pack_tokens=45, recompute="none")
    with redirect_stdout(io.StringIO()) as said:
        runs.run_all(folder, cases)
    with (
        redirect_stdout(io.StringIO()),
        patch.dict(model.CONFIGS, runs.MODELS),
        patch.object(parallel, "stop"),
        patch.object(parity, "cases_of", lambda *_: [layout]),
    ):
        codes = {
            name: parity.check(parity.Check(name, steps=2, resume_after=1))
            for name in ("demo-t2v-experts", "demo-ti2v")
        }
    return said.getvalue(), codes


def test_every_mode_is_verified_before_it_trains(folder):
    """If this goes, `parity.py check` or --verify-layout, which the demo's data turn on, refuses a mode: an expert does
    not take all positions of a batch, frozen weights have no gradient, a model is told a time for each frame. Samples
    are in other packs than on one process: what is not recorded by its sample differs."""
    how = dict(steps=1, verify_layout=True, pack_tokens=72, lora="")
    cases = [options(folder, mode, shard=SHARDS[m % 3], **how) for m, mode in enumerate(MODES)]
    said, codes = spawn(verified, 2, folder, cases)[0]
    assert said.count("layout verified against one process in float64") == len(MODES) + 2, said
    for expert in ("high", "low"):
        assert said.count(f"in float64, {expert}-noise expert: ") == 2
    assert codes == {"demo-t2v-experts": 0, "demo-ti2v": 0}


def largest(results, cases, references, world) -> dict[str, dict]:
    found = {}
    for i in range(len(cases)):
        mode = list(MODES)[i // len(LAYOUTS[world])]
        for name, value in runs.worst(results[0][i], references[mode]).items():
            found.setdefault(mode, {})[name] = max(value, found.get(mode, {}).get(name, 0.0))
    return found


def test_experts_train_on_their_own_noise(folder, references):
    """If this goes, an expert is trained on the other's range, or moves in a step that has no sample for it."""
    for mode in ("t2v-experts", "i2v-experts"):
        grads = references[mode]["grads"]
        trained = [{name.split(".")[0] for name in step} for step in grads]
        assert {"high", "low"} in trained
    for expert, boundary in (("high", 0.875), ("low", 0.875)):
        record = runs.run(folder, **options(folder, "t2v-experts", expert=expert, low_checkpoint=""))
        assert {name.split(".")[0] for step in record["grads"] for name in step} == {expert}, boundary


def test_frozen_weights_stay(folder, references):
    """If this goes, --trainable trains what it does not name, or not what it names."""
    before = load_file(folder / "demo.safetensors")
    moved = {name for name, x in references["trainable"]["params"].items() if not torch.equal(x, before[name].double())}
    assert moved == {n for n in before if "self_attn.q." in n or "self_attn.k." in n or n.startswith("blocks.1.ffn")}


RESUMES = {"i2v-experts": (1, {"ring": 2, "shard": "grads"}), "lora": (2, {"ulysses": 2, "shard": "full"})}


@pytest.mark.parametrize("mode", [pytest.param("i2v-experts", marks=pytest.mark.slow), "lora"])
def test_a_killed_run_goes_on_in_another_layout(folder, references, mode):
    """If this goes, a run of two experts, or of adapters, that is killed in the middle of a step does not go on as if
    it had not been: one expert's optimizer, step or weights, or an adapter's dropout, begin anew."""
    killed_in, layout = RESUMES[mode]
    how = options(folder, mode, run=f"resumed-{mode}", save_every=1)
    first = spawn(runs.run_all, 2, folder, [how | {"killed_in": killed_in, "shard": "full"}])[0][0]
    last = spawn(runs.run_all, 2, folder, [how | layout | {"resume": "latest"}])[0][0]
    record = {name: first[name] + last[name] for name in ("loss", "grads")} | {"params": last["params"]}
    assert len(first["loss"]) == killed_in and len(record["loss"]) == 3
    difference = runs.worst(record, references[mode])
    assert max(difference.values()) < TOLERANCE, difference
    saved = folder / "runs" / f"resumed-{mode}" / "step-000003"
    if mode == "lora":
        adapters = read_lora(saved / "lora.safetensors").adapters
        assert all(torch.equal(x.up, last["params"][f"{name}.lora_B"]) for name, x in adapters.items())
    else:
        for expert in ("high", "low"):
            weights = load_file(saved / f"{expert}-model.safetensors")
            assert all(torch.equal(x, last["params"][f"{expert}.{name}"]) for name, x in weights.items())


def test_adapters_alone_are_trained(folder, references):
    """If this goes, the layout tests of adapters test none: frozen weights move, or an adapter has no gradient."""
    before, reference = load_file(folder / "demo-i2v.safetensors"), references["lora"]
    moved = {name for name, x in reference["params"].items() if name not in before}
    assert all(torch.equal(reference["params"][name], x.double()) for name, x in before.items())
    for step in reference["grads"]:
        assert step.keys() == moved and all(float(x.norm()) > 1e-7 for x in step.values())
