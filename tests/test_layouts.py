"""The one idea: a run does not depend on its layout. Whole training runs in float64, against one process."""

import json
import math
from unittest.mock import patch

import pytest
import runs
import torch
from safetensors.torch import load_file
from spawn import spawn

import batch

TOLERANCE = 1e-9  # the promise; what is measured is below 1e-12
LAYOUTS = {
    1: [{}],
    2: [{"sp": 1}, {"ulysses": 2}, {"ring": 2}],
    3: [{"ring": 3}],
    4: [
        {"sp": 1},
        {"ulysses": 2, "ring": 2},
        {"sp": 2, "ulysses": 2},
        {"sp": 2, "ring": 2},
        {"ulysses": 4},
        {"ring": 4},
    ],
}
SHARDS = ["none", "grads", "full"]
OPTIMIZERS = ["sgd", "adamw"]


def cases_of(world: int) -> list[dict]:
    """Every layout under every sharding and optimizer, with pack sizes and recomputation varied across the grid: each
    pack size and each recompute setting meets each layout."""
    cases, packs = [], [0, 23, 45]  # most tokens per rank: no limit; about half the batch; the largest sample
    for layout in LAYOUTS[world]:
        for i, shard in enumerate(SHARDS):
            for j, optimizer in enumerate(OPTIMIZERS):
                sp = layout.get("sp") or layout.get("ulysses", 1) * layout.get("ring", 1)
                limit = max(packs[(i + j) % 3], -(-45 // sp)) if packs[(i + j) % 3] else 0
                recompute = ["none", "block"][(i + j) % 2]
                cases.append(layout | dict(shard=shard, optimizer=optimizer, pack_tokens=limit, recompute=recompute))
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    runs.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def references(folder):
    """One process, one pack, nothing sharded or recomputed."""
    return {optimizer: runs.run(folder, optimizer=optimizer) for optimizer in OPTIMIZERS}


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_trains_the_same(folder, references, world):
    """If this goes, some layout trains something else: the loss of a step, the gradient of a parameter, or the weights
    after the run differ by more than rounding, or ranks hold different weights."""
    cases = cases_of(world)
    failures = failures_of(cases, spawn(runs.run_all, world, folder, cases), references)
    assert not failures, failures[:3]


def failures_of(cases, results, references) -> list:
    """Which ranks of which cases differ from the reference, or from rank 0; results is [rank][case]."""
    failures = []
    for i, case in enumerate(cases):
        for rank, records in enumerate(results):
            difference = runs.worst(records[i], references[case.get("optimizer", "adamw")])
            agree = records[i]["digests"] == results[0][i]["digests"]
            if not max(difference.values()) <= TOLERANCE or not agree:  # a NaN is a failure too
                failures.append((case, rank, difference, "ranks agree" if agree else "ranks disagree"))
    return failures


def test_the_batch_holds_what_the_promise_is_about(folder, references):
    """If this goes, the grid above no longer tests mixed packs: two videos, two images, tokens that nothing divides,
    a gradient for every parameter, and a loss that moves."""
    assert len(runs.FILES) == 4
    grads = references["sgd"]["grads"]
    assert all(float(g.norm()) > 1e-6 for step in grads for g in step.values())
    assert abs(references["sgd"]["loss"][0] - references["sgd"]["loss"][1]) > 0.01


def test_a_loss_that_is_no_number_stops_the_run(folder):
    """If this goes, a NaN trains on, or nobody learns which samples it came from, or it is saved."""
    whole = batch.pack_loss

    def faulty(model, pack, layout, dtype):
        return whole(model, pack, layout, dtype) * (math.nan if 5 in pack.positions else 1)

    with patch.object(batch, "pack_loss", faulty), pytest.raises(FloatingPointError) as error:
        runs.run(folder, run="nan", pack_tokens=45, save_every=1)
    assert "step 2: loss nan" in str(error.value) and "was not applied" in str(error.value)
    named = str(error.value).partition("Positions: ")[2].partition(".")[0].split(", ")
    assert "5" in named and len(named) < 4  # its pack, not the whole batch
    assert [entry.name for entry in (folder / "runs" / "nan").glob("step-*")] == ["step-000001"]


ROUGH = {  # what rounding may do to a loss of the same precision's one-process run; to float64 it does 4e-7 and 8e-4
    "fp32": (1e-5, [{"sp": 1, "shard": "grads"}, {"ulysses": 2, "shard": "full"}, {"ring": 2}]),
    "bf16": (5e-3, [{"sp": 1, "shard": "full"}, {"ulysses": 2, "shard": "grads"}, {"ring": 2}]),
}


def test_rounding_precisions_train_too(folder):
    """If this goes, the precisions that people train in fail where float64 works (FSDP2 sums them by another route), or
    differ between layouts by more than their rounding."""
    cases = [layout | {"precision": precision} for precision, (_, layouts) in ROUGH.items() for layout in layouts]
    references = {precision: runs.run(folder, precision=precision) for precision in ROUGH}
    for records in spawn(runs.run_all, 2, folder, cases):
        for case, record in zip(cases, records, strict=True):
            difference = runs.worst(record, references[case["precision"]])
            assert difference["loss"] < ROUGH[case["precision"]][0], (case, difference)


RESUMES = {  # [(world, killed in this step or None, options), ...]
    "dp2-then-sp2-full": [(2, 2, {"sp": 1}), (2, None, {"ulysses": 2, "shard": "full"})],
    "full-dp4-then-one": [(4, 1, {"shard": "full"}), (1, None, {})],
    "one-then-dp2xring2-grads": [(1, 3, {}), (4, None, {"sp": 2, "ring": 2, "shard": "grads"})],
}


@pytest.mark.parametrize("name", RESUMES)
def test_resume_on_another_layout(folder, references, name):
    """If this goes, a run that was killed does not go on as if it had not been, or only on the layout it had; or the
    weights it leaves are not those it trained."""
    joined = {"loss": [], "grads": []}
    for i, (world, killed_in, options) in enumerate(RESUMES[name]):
        options = options | dict(optimizer="adamw", run=name, save_every=1, keep=1, resume="latest" if i else "")
        record = spawn(runs.run_all, world, folder, [options | {"killed_in": killed_in}])[0][0]
        joined["loss"] += record["loss"]
        joined["grads"] += record["grads"]
    difference = runs.worst(joined | {"params": record["params"]}, references["adamw"])
    assert max(difference.values()) < TOLERANCE, difference
    saved = load_file(folder / "runs" / name / "step-000004" / "model.safetensors")
    assert saved.keys() == record["params"].keys()
    assert all(torch.equal(saved[key], value) for key, value in record["params"].items())
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert [entry.name for entry in sorted((folder / "runs" / name).glob("step-*"))] == ["step-000004"]
