"""Tracing and comparing: faults are found and placed, clean runs are equal, and neither depends on the layout.

The fault table of the documentation is what `python tests/test_parity.py` prints.
"""

import itertools
import os
import re
import sys
import warnings
from pathlib import Path

import faults
import pytest
import runs
import torch
from faults import FAULTS
from spawn import spawn

import model
import parallel
import parity
import train

EVEN = ((3, 6, 10),) * 5  # sizes for the faults under which ranks would stop where sizes differ
LAYOUTS: dict = {}  # process groups of a spawned world, made once
CLEAN = {  # world: layouts to compare with each other and with one process, each in every precision
    1: [{}],
    2: [{"shard": "full", "pack_tokens": 45}, {"ulysses": 2}, {"ring": 2, "shard": "grads", "recompute": "block"}],
    4: [
        {"pack_tokens": 45},
        {"ulysses": 2, "ring": 2},
        {"ulysses": 2, "shard": "full"},
        {"ring": 2, "pack_tokens": 23},
    ],
}
PRECISIONS = {"fp64": 0, "fp32": 1, "bf16": 2}  # and the seed it is tried with


def config(name: str, **options) -> train.Config:
    base = dict(checkpoint="scratch", vae="scratch", text_encoder="scratch", tokenizer="scratch", trace=True)
    base |= dict(warmup_steps=0, lr=0.01, lr_schedule="constant", max_grad_norm=0.1, caption_dropout=0.3)
    base |= dict(batch_size=4, steps=3, precision="fp64", sample=False, verify_layout=False, run=name)
    return train.Config(**(base | options))


def made_up(even: bool = False):
    return parity.MadeUp(runs.TINY, EVEN if even else parity.MadeUp.SHAPES)


def layout_of(options: dict) -> parallel.Layout:
    key = options.get("ulysses", 1), options.get("ring", 1)
    if key not in LAYOUTS:
        LAYOUTS[key] = parallel.start(*key)
    return LAYOUTS[key]


def rehearse(folder: Path, name: str, stops=(), even=False, **options):
    """A traced run of this process (and its group) on made-up data, into folder/runs/name."""
    os.chdir(folder)
    model.CONFIGS["demo"] = runs.TINY
    parity.rehearse(train.main, config(name, **options), layout_of(options), made_up(even), 2, stops)


def rehearse_clean(folder: Path, world: int):
    for (precision, seed), (i, options) in itertools.product(PRECISIONS.items(), enumerate(CLEAN[world])):
        rehearse(folder, f"{precision}-{world}-{i}", precision=precision, seed=seed, **options)


def plant_all(folder: Path, names: list[str]) -> dict[str, str]:
    """Run every fault, then --verify-layout under it; {fault: what verify_layout said, or an error of the run}."""
    warnings.simplefilter("ignore")
    said = {}
    for fault in FAULTS:
        if fault.name not in names:
            continue
        with fault.plant():
            try:
                rehearse(folder, f"fault/{fault.name}", fault.stops, fault.even, steps=fault.steps, **fault.layout)
            except FloatingPointError:
                pass  # a fault that makes NaN ends the run; its trace tells where they came from
            if fault.of_layout:
                said[fault.name] = verify(fault.layout, fault.even, f"verify/{fault.name}")
    return said


def verify(options: dict, even: bool = False, name: str = "verify") -> str:
    """What train.py --verify-layout says against this layout; empty if it passes."""
    try:
        layout = layout_of(options)
        parity.verify_layout(train.main, config(name, **options), layout, made_up(even))
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return str(error)
    return ""


def work_of_four(folder: Path, names: list[str]) -> dict:
    """Everything that needs four processes, in one set of them."""
    rehearse_clean(folder, 4)
    said = plant_all(folder, names)
    clean = [{}, {"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}, {"ulysses": 4}, {"ring": 4}]
    said |= {str(o | {"shard": s}): verify(o | {"shard": s}) for o in clean for s in ("none", "full")}
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    before = os.getcwd()
    make_references(folder)
    yield folder
    os.chdir(before)


def make_references(folder: Path):
    """One process, without a fault."""
    rehearse(folder, "reference")
    rehearse(folder, "reference-8", batch_size=8, steps=1)
    rehearse(folder, "reference-even", even=True, steps=1)
    rehearse_clean(folder, 1)


@pytest.fixture(scope="module")
def said(folder):
    """--verify-layout's words on 4 processes, after the faults and the clean layouts have been run there."""
    return spawn(work_of_four, 4, folder, [f.name for f in FAULTS])[0]


def judge(folder: Path, fault: faults.Fault) -> parity.Verdict:
    reference = "reference-even" if fault.even else "reference-8" if "batch_size" in fault.layout else "reference"
    return parity.diff(folder / "runs" / reference, folder / "runs/fault" / fault.name)


def located(fault: faults.Fault, verdict: parity.Verdict) -> bool:
    right = fault.factor is None or abs(verdict.factor - fault.factor) < 2e-3
    return bool(re.search(fault.place, verdict.place)) and right


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_and_placed(folder, said, fault):
    """If this goes, a fault that trainers really had is missed, or blamed on the wrong module, phase or factor."""
    verdict = judge(folder, fault)
    assert verdict.code == 1, verdict
    assert located(fault, verdict), verdict
    assert verdict.causes


def test_the_faults_are_many():
    """If this goes, the table above got short or lost one of its kinds."""
    sections = {f.plant.__doc__.strip().split(":")[0][0] for f in FAULTS if ":" in f.plant.__doc__[:4]}
    assert len(FAULTS) >= 40 and sections >= set("ABCDEFGHIJKLNO")


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.of_layout], ids=lambda fault: fault.name)
def test_verify_layout_refuses(said, fault):
    """If this goes, train.py --verify-layout lets a faulty layout train."""
    assert said[fault.name]


def test_verify_layout_passes(said):
    """If this goes, train.py refuses a layout that is right."""
    assert not {name: text for name, text in said.items() if name.startswith("{") and text}


@pytest.fixture(scope="module")
def clean(folder, said):
    spawn(rehearse_clean, 2, folder, 2)
    return {p: sorted((folder / "runs").glob(f"{p}-*")) for p in PRECISIONS}


def test_clean_runs_are_equal(clean):
    """If this goes, diff cries wolf: of two runs that differ in layout alone, one is called faulty."""
    pairs = [pair for paths in clean.values() for pair in itertools.combinations(paths, 2)]
    assert len(pairs) >= 60
    alarms = [f"{a.name} {b.name}: {v}" for a, b in pairs for v in [parity.diff(a, b)] if v.code]
    assert not alarms, f"{len(alarms)} of {len(pairs)}: {alarms[0]}"


def test_precision_is_no_fault(folder):
    """If this goes, a float32 and a bfloat16 run of one thing can no longer be told from runs of two things."""
    for name, precision in (("p32", "fp32"), ("p16", "bf16")):
        rehearse(folder, name, precision=precision)
    verdict = parity.diff(folder / "runs/p32", folder / "runs/p16")
    assert verdict.code == 0 and "precision" in str(verdict), verdict


def test_other_runs_are_not_compared(folder):
    """If this goes, runs of different data or options are called faulty where they are merely different."""
    rehearse(folder, "other-seed", seed=5, steps=1)
    verdict = parity.diff(folder / "runs/reference", folder / "runs/other-seed")
    assert verdict.code == 2 and "seed" in str(verdict)
    verdict = parity.diff(folder / "runs/reference", folder / "runs/reference-even")
    assert verdict.code == 2 and "data" in str(verdict)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_references(Path(name))
        spawn(work_of_four, 4, Path(name), [f.name for f in FAULTS])
        print("| section | fault | found | place | factor | first cause named |\n|---|---|---|---|---|---|")
        hits = 0
        for f in FAULTS:
            v = judge(Path(name), f)
            hits += located(f, v)
            mark = "yes" if located(f, v) else "misplaced" if v.code == 1 else "NO"
            section, _, text = (
                " ".join(f.plant.__doc__.split()).rpartition(": ")
                if ":" in f.plant.__doc__[:5]
                else ("", "", f.plant.__doc__)
            )
            print(f"| {section} | {text} | {mark} | {v.place} | {v.factor:.3g} | {(v.causes or [''])[0]} |")
        print(f"\n{len(FAULTS)} faults, {hits} found in their place", file=sys.stderr)
