"""Tracing and comparing: faults are found and placed, clean runs are equal, and neither depends on the layout.

The fault table of docs/parity.md is what `PYTHONPATH=. python tests/test_parity.py` prints.
"""

import itertools
import os
import re
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import faults
import foreign_trainer
import pytest
import runs
import torch
from faults import FAULTS
from spawn import spawn

import model
import parallel
import parity
import traces
import train

EVEN = ((3, 6, 10),) * 5  # sizes for the faults under which ranks would stop where sizes differ
LAYOUTS: dict = {}  # process groups of a spawned world, made once
CLEAN = {  # world: layouts to compare with each other and with one process, each in every precision
    1: [{}],
    2: [{"shard": "full", "pack_tokens": 45}, {"ulysses": 2}, {"ring": 2, "shard": "grads", "recompute": "block"}],
    4: [{"pack_tokens": 45}, {"ulysses": 2, "shard": "full"}, {"ulysses": 2, "ring": 2, "pack_tokens": 23}],
}
PRECISIONS = {"fp64": 0, "fp32": 1, "bf16": 2}  # and the seed it is tried with


def config(name: str, **options) -> train.Config:
    base = dict(checkpoint="scratch", vae="scratch", text_encoder="scratch", tokenizer="scratch", trace=True)
    base |= dict(warmup_steps=0, lr=0.01, lr_schedule="constant", max_grad_norm=0.1, caption_dropout=0.3)
    base |= dict(batch_size=4, steps=3, precision="fp64", sample=False, verify_layout=False, run=name)
    return train.settle(train.Config(**(base | options)))


def made_up(even: bool = False):
    return parity.MadeUp(runs.TINY, EVEN if even else parity.MadeUp.SHAPES)


def layout_of(options: dict) -> parallel.Layout:
    key = options.get("ulysses", 1), options.get("ring", 1)
    if key not in LAYOUTS:
        LAYOUTS[key] = parallel.start(*key)
    return LAYOUTS[key]


@patch.dict(model.CONFIGS, demo=runs.TINY)
def rehearse(folder: Path, name: str, stops=(), even=False, **options):
    """A traced run of this process (and its group) on made-up data, into folder/runs/name."""
    os.chdir(folder)
    parity.rehearse(train.fit, config(name, **options), layout_of(options), made_up(even), 2, stops)


def rehearse_clean(folder: Path, world: int):
    for (precision, seed), (i, options) in itertools.product(PRECISIONS.items(), enumerate(CLEAN[world])):
        rehearse(folder, f"{precision}-{world}-{i}", precision=precision, seed=seed, **options)


def plant_all(folder: Path, names: list[str]) -> dict[str, str]:
    """Run every fault: those that a layout can have under --verify-layout, whose two traces stay, the others for as
    many steps as they need. {fault: what verify_layout said}."""
    warnings.simplefilter("ignore")
    said = {}
    for fault in (f for f in FAULTS if f.name in names):
        with fault.plant(), patch.object(parity, "rehearse", faults.rehearse):
            if fault.of_layout:
                said[fault.name] = verify(folder, fault.name, fault.layout, fault.even)
            else:
                rehearse(folder, fault.name, fault.stops, fault.even, steps=fault.steps, **fault.layout)
    return said


@patch.dict(model.CONFIGS, demo=runs.TINY)
def verify(folder: Path, name: str, options: dict, even: bool = False) -> str:
    """What train.py --verify-layout says against this layout; empty if it passes."""
    os.chdir(folder)
    try:
        layout = layout_of(options)
        parity.verify_layout(train.fit, config(name, **options), layout, made_up(even))
    except (ValueError, FloatingPointError) as error:
        return str(error)
    return ""


def work_of_four(folder: Path, names: list[str]) -> dict:
    """Everything that needs four processes, in one set of them."""
    rehearse_clean(folder, 4)
    said = plant_all(folder, names)
    layouts = [{}, {"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}, {"ulysses": 4}, {"ring": 4}]
    for i, layout in enumerate(layouts):
        options = layout | {"shard": ("none", "full", "grads")[i % 3]}
        said[str(options)] = verify(folder, "clean", options)
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
    rehearse_clean(folder, 1)


@pytest.fixture(scope="module")
def said(folder):
    """--verify-layout's words on 4 processes, after the faults and the clean layouts have been run there."""
    return spawn(work_of_four, 4, folder, [f.name for f in FAULTS])[0]


def judge(folder: Path, fault: faults.Fault) -> parity.Verdict:
    run = folder / "runs" / fault.name
    if fault.of_layout:
        return parity.diff(run / "verify/one-process", run / "verify/this-layout")
    return parity.diff(folder / "runs/reference", run)


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
def found(folder):
    return spawn(work_of_two, 2, folder)[0]


@pytest.fixture(scope="module")
def clean(folder, said, found):
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
    rehearse(folder, "other-data", even=True, steps=1)
    verdict = parity.diff(folder / "runs/reference", folder / "runs/other-data")
    assert verdict.code == 2 and "data" in str(verdict)


def test_sketch_adds_up_and_measures(monkeypatch):
    """If this goes, sketches of parts no longer add up to that of the whole, or no longer measure differences."""
    x = torch.randn(37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = parity.pack_rows([7, 3], [20, 17], 0, 40)

    def of(tensor, first, count):
        trace = parity.Trace(torch.nn.Linear(2, 2))
        trace.going, trace.rows = True, {"tokens": parity.pack_rows([7, 3], [20, 17], first, count)}
        trace.add("forward", "x", tensor, "tokens")
        return trace.entries["forward", "x"].sums[:256]

    whole = of(x, 0, 37)
    padded = torch.cat((x[20:], torch.ones(3, 24, dtype=torch.float64)))
    assert torch.allclose(of(x[:20], 0, 20) + of(padded, 20, 20), whole, atol=1e-12) and ids[-1] == -1
    estimate = (of(x + 0.01 * noise, 0, 37) - whole).norm() / whole.norm()
    assert abs(estimate / (0.01 * noise.norm() / x.norm()) - 1) < 0.25
    monkeypatch.setattr(traces, "KEPT", 100)  # a large tensor goes in parts
    assert torch.allclose(of(x, 0, 37), whole, atol=1e-12)


DECOYS = {  # what a lesser grid does not show: found by the default cases of `parity.py check` on two processes?
    "row_sum_per_block": "a fix that is a bug where a ring has two ranks",
    "gradients_averaged_over_sp": "a factor that AdamW hides in the weights",
    "packed_samples_mixed": "needs two samples in a pack",
    "padding_attended": "needs a token count that the ranks do not divide",
    "gradients_not_cleared": "needs a second step",
    "same_order_every_epoch": "needs a second epoch",
    "moments_not_restored": "needs a resume",
}


@patch.dict(model.CONFIGS, demo=runs.TINY)
def check_decoys(folder: Path) -> dict:
    """{decoy: cases of the default grid until it is found}, and under "clean" the verdicts of the whole grid."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    base = config("check", steps=4)
    compare = parity.Comparison(train.fit, base, made_up(), 2, layout_of({}))
    compare.reference()
    cases = parity.cases_of(2, runs.TINY.num_heads, 45)
    for case in cases[::4]:  # one of each layout and sharding; test_clean_runs_are_equal has more
        compare.layout(case, (2,))
    cases = [case for case in cases if case["shard"] == "none"]
    found = {"clean": [verdict.code for verdict in compare.verdicts]}
    for fault in (f for f in FAULTS if f.name in DECOYS):
        compare.verdicts = []
        with fault.plant(), patch.object(parity, "rehearse", faults.rehearse):
            for i, case in enumerate(cases):
                compare.layout(case, (2,))
                if compare.everyone.on_rank_0(lambda: any(v.code for v in compare.verdicts)):
                    found[fault.name] = i + 1
                    break
    return found


def work_of_two(folder: Path) -> dict:
    rehearse_clean(folder, 2)
    for name in ("", *foreign_trainer.FAULTS):
        foreign_trainer.train(folder / f"foreign-{name}", sp=2, fault=name)
    return check_decoys(folder)


def test_check_passes_and_finds_decoys(found):
    """If this goes, `parity.py check` fails on clean code, or its default grid is too small for a fault that hides."""
    assert set(found["clean"]) == {0}
    assert found.keys() >= DECOYS.keys(), found


FOREIGN = {  # fault -> (entry where it shows, factor)
    "rope_restarts": ("forward", "rotary", None),
    "gather_without_backward": ("backward", "layers.1.attn|layers.0", None),
    "averaged_over_sp": ("gradient", "", 0.5),
    "noise_per_rank": ("input", "noise", None),
    "head_detached": ("backward", "layers.1", None),
}


@pytest.mark.parametrize("name", ["", *foreign_trainer.FAULTS])
def test_foreign_trainer(folder, found, name):
    """If this goes, Trace and diff work for picowan only."""
    if not name:
        foreign_trainer.train(folder / "foreign-reference", alone=True)
    verdict = parity.diff(folder / "foreign-reference", folder / f"foreign-{name}")
    assert verdict.code == (1 if name else 0), verdict
    if name:
        phase, entry, factor = FOREIGN[name]
        assert verdict.phase == phase and re.match(entry, verdict.name), verdict
        assert factor is None or abs(verdict.factor - factor) < 1e-6


def test_page_and_exit_codes(folder, said, capsys):
    """If this goes, the command's exit codes or its page are broken."""
    runs_of = folder / "runs"
    page = folder / "map.html"
    fault = str(runs_of / "stale_keys/verify/this-layout")
    code = parity.command(["diff", str(runs_of / "stale_keys/verify/one-process"), fault, "--plot", str(page)])
    assert code == 1 and "backward of self-attention" in capsys.readouterr().out
    assert "<canvas" in page.read_text() and "polyline" in page.read_text()
    assert parity.command(["diff", str(runs_of / "reference"), str(runs_of / "reference")]) == 0
    with pytest.raises(ValueError, match="no trace"):
        parity.command(["diff", str(folder), str(folder)])
    (folder / "two" / "low" / "trace").mkdir(parents=True)
    with pytest.raises(ValueError, match="two is a run of two experts with a trace each: compare .*two/low"):
        parity.command(["diff", str(folder / "two"), str(folder)])


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_references(Path(name))
        spawn(work_of_four, 4, Path(name), [f.name for f in FAULTS])
        print("| section | fault | found | place named | factor |\n|---|---|---|---|---|")
        hits = 0
        for f in FAULTS:
            v = judge(Path(name), f)
            hits += located(f, v)
            mark = "yes" if located(f, v) else "misplaced" if v.code == 1 else "NO"
            text = " ".join(f.plant.__doc__.split()).rstrip(".")
            section, text = text.split(": ", 1) if ":" in text[:4] else ("", text)
            print(f"| {section} | {text} | {mark} | {v.place} | {v.factor:.3g} |")
        print(f"\n{len(FAULTS)} faults, {hits} found in their place", file=sys.stderr)
