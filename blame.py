"""Compare two traces and say where they part, by how much, and why that may be.

Both are walked in causal order: what a step starts from, its inputs, activations, loss, gradients backwards, the
reduction, the norm, the update. The first entry whose difference exceeds the noise is where the fault shows; what lies
between it and the last entry that agreed is where the fault is; causes.py turns the pattern into likely causes.

Tolerances come from the runs themselves. Each trace holds its noise floor: how far every tensor moves when everything
in the pass is off by a unit in the last place (traces.py, `measure_floor`). A difference is one if it is MARGIN times
larger. From the second step on the weights themselves differ by noise; the floor then grows in proportion.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from causes import SIGNATURES, Evidence, place_of
from findings import describe, listed
from traces import NUMBERS, PHASES

MARGIN = 8  # times the noise floor; of clean runs, the largest difference in 63 pairs was 2.6 times it
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass
class Trace:
    """A trace on disk. steps: number -> (header, tensors), read when asked for."""

    folder: Path
    about: dict
    floor: dict[str, float]
    numbers: list[int]

    def step(self, number: int) -> dict:
        """(phase, name) -> entry with sketch, numbers, ranks."""
        stem = self.folder / f"step-{number:06d}"
        tensors = load_file(stem.with_suffix(".safetensors"))
        header = json.loads(stem.with_suffix(".json").read_text())
        entries, sketches, numbers = {}, tensors["sketch"].to(torch.float64), tensors["numbers"].tolist()
        for i, entry in enumerate(header["entries"]):
            values = dict(zip(NUMBERS, numbers[i], strict=True))
            values |= {"sketch": sketches[i], "ranks": tensors["ranks"][i]}
            entries[entry["phase"], entry["name"]] = entry | values
        return {"entries": entries, "facts": header["facts"], "findings": header["findings"]}

    def findings(self, number: int) -> list[dict]:
        return json.loads((self.folder / f"step-{number:06d}.json").read_text())["findings"]


def load(path) -> Trace:
    """The trace of a run's folder, or the trace's own folder."""
    path = Path(path)
    folder = path / "trace" if (path / "trace").is_dir() else path
    if experts := [path / name for name in ("high", "low") if (path / name / "trace").is_dir()]:
        raise ValueError(f"{path} is a run of two experts with a trace each: compare {' or '.join(map(str, experts))}")
    if not (folder / "about.json").is_file():
        raise ValueError(f"{path} holds no trace; was the run started with --trace?")
    floor = json.loads((folder / "floor.json").read_text()) if (folder / "floor.json").is_file() else {}
    numbers = sorted(int(file.stem[5:]) for file in folder.glob("step-*.json"))
    return Trace(folder, json.loads((folder / "about.json").read_text()), floor, numbers)


# ---------------------------------------------------------------------------------------------------------------------
# One tensor against another


@dataclass
class Row:
    """How entry (phase, name) of b differs from a's: |b - a| / |a|, the least-squares factor b ~ factor a, the cosine
    of the angle between them, and the difference that noise explains."""

    step: int
    phase: str
    name: str
    error: float
    factor: float
    cosine: float
    allowed: float
    note: str = ""

    @property
    def differs(self) -> bool:
        return not self.error <= self.allowed  # a NaN differs


def compare(a: Tensor, b: Tensor) -> list[tuple[float, float, float]]:
    """(|b - a| / |a|, factor, cosine) of each pair of sketches; a and b (n, 256)."""
    results = []
    products = torch.stack([(b - a).square().sum(1), (a * a).sum(1), (b * b).sum(1), (a * b).sum(1)], 1)
    for dd, aa, bb, ab in products.tolist():
        if aa == 0 or bb == 0:
            results.append((0.0, 1.0, 1.0) if aa == bb else (math.inf if aa == 0 else 1.0, 0.0, 0.0))
        else:
            results.append((math.sqrt(dd / aa), ab / aa, ab / math.sqrt(aa * bb)))
    return results


class Walk:
    """Two traces side by side, step after step, and what noise explains of their difference so far."""

    def __init__(self, a: Trace, b: Trace):
        self.a, self.b = a, b
        precisions = {a.about["precision"], b.about["precision"]}
        self.eps = max(EPS[p] for p in precisions)
        self.stored = EPS["float64"] if precisions == {"float64"} else EPS["float32"]  # of weights, and of sketches
        # Of two runs in one precision the quieter says what the noise is: a fault may well be noisy itself.
        choose, floors = min if len(precisions) == 1 else max, [t.floor for t in (a, b) if t.floor]
        self.floor = {k: choose(f[k] for f in floors if k in f) for k in set().union(*floors)}
        self.usual = {}  # the median of each phase, for entries whose own noise was small by luck
        for phase in PHASES:
            values = sorted(v for k, v in self.floor.items() if k.startswith(phase + "/"))
            self.usual[phase] = max(values[len(values) // 2] if values else 8 * self.eps, self.eps)
        self.usual["loss"] = max(self.usual["loss"], self.usual["forward"])
        self.drift = 1.0  # the difference of the weights, in units in the last place
        self.weights = {}  # name -> the last known Weight

    def allowed(self, phase: str, name: str) -> float:
        if phase in ("input", "rate", "start"):
            return MARGIN * self.stored
        if phase in ("norm", "moment"):  # squares: twice the relative error
            return MARGIN * self.drift * 2 * max(self.usual["gradient"], self.usual["loss"])
        return MARGIN * self.drift * max(self.floor.get(f"{phase}/{name}", 0.0), self.usual[phase])

    def step(self, number: int) -> list[Row]:
        """The rows of a step that both have, in causal order."""
        one, two = self.a.step(number)["entries"], self.b.step(number)["entries"]
        # What a process starts from has "start" entries. The other run may have been under way: it has its last step's.
        begun = [any(phase == "start" for phase, _ in entries) for entries in (one, two)]
        for name, last in self.weights.items() if any(begun) else ():
            for entries, has, kept in ((one, begun[0], last.x), (two, begun[1], last.y)):
                if not has and last.step == number:
                    entries["start", name] = kept
        keys = list(one) + [key for key in two if key not in one]
        both = [key for key in keys if key in one and key in two]
        pairs = compare(*(torch.stack([entries[key]["sketch"] for key in both]) for entries in (one, two)))
        measured, rows, weights = dict(zip(both, pairs, strict=True)), [], {}
        for phase, name in sorted(keys, key=lambda key: PHASES.index(key[0])):
            x, y = one.get((phase, name)), two.get((phase, name))
            if x is None or y is None:
                if phase != "partial":  # which not every sharding shows
                    rows.append(Row(number, phase, name, 1.0, 0.0, 0.0, 0.0, f"only in {'B' if x is None else 'A'}"))
                continue
            row = Row(number, phase, name, *measured[phase, name], self.allowed(phase, name))
            for key in ("nans", "infinities"):
                if bool(x[key]) != bool(y[key]):
                    row.error, row.note = math.inf, f"{key} in {'A' if x[key] else 'B'}"
            if phase in ("start", "parameter", "moment"):
                step = number if phase == "start" else number + 1
                if name in self.weights and phase != "moment":
                    row.allowed = self.allowed_since(self.weights[name], step, x["sketch"])
                weights[name] = Weight(step, x, y, row)
                if phase == "start":
                    self.weights[name] = weights[name]
            rows.append(row)
        self.weights |= weights
        # A difference that is a fault excuses nothing of what comes after it.
        errors = [row.error for row in rows if row.phase == "parameter" and not row.differs]
        self.drift = max([1.0] + [error / self.eps for error in errors])
        return rows

    def allowed_since(self, last: "Weight", step: int, now: Tensor) -> float:
        """Of a weight (or moment) at `step`, relative to its size, given what it was and by how much it was off then.

        AdamW divides every element by its own size, so one that is smaller than its noise may take either sign: of
        elements spread evenly about zero a share in proportion to the noise does, and the update moves by the root of
        that share."""
        updates = step - last.step
        update = ((now - last.x["sketch"]).norm() / now.norm().clamp(min=1e-300)).item()
        noise = math.sqrt(self.usual["gradient"] * self.drift) * update if updates else 0.0
        return min(last.row.error, last.row.allowed) + MARGIN * (updates * noise + self.stored)


@dataclass
class Weight:
    step: int  # that starts from it
    x: dict  # a's entry
    y: dict  # b's
    row: Row


# ---------------------------------------------------------------------------------------------------------------------
# The verdict


@dataclass
class Verdict:
    """code: 0 equal, 1 different, 2 not comparable. place: where the fault lies; phase, name: where it shows first."""

    code: int
    text: str
    step: int = -1
    phase: str = ""
    name: str = ""
    place: str = ""
    error: float = 0.0
    factor: float = 1.0
    cosine: float = 1.0
    ranks: list[int] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # phase -> largest error, of comparable runs

    def __str__(self):
        return self.text


def diff(path_a, path_b, everything: bool = False) -> Verdict:
    """The verdict on two runs' traces; b is the one in question, a the reference. everything: go on after
    the first step that differs, for the map."""
    a, b = load(path_a), load(path_b)
    if strange := incomparable(a, b):
        return Verdict(2, f"NOT COMPARABLE: {strange}")
    common = [n for n in a.numbers if n in set(b.numbers)]
    walk, rows, verdict = Walk(a, b), [], None
    for number in common:
        new = walk.step(number)
        rows += new
        odd = next((row for row in new if row.differs), None)
        findings = {side: trace.findings(number) for side, trace in (("A", a), ("B", b))}
        suspects = [(PHASES.index(f["phase"]), side, f) for side in "AB" for f in findings[side]]
        suspects.sort(key=lambda s: s[0])
        if (odd or suspects) and verdict is None:
            verdict = judge(Evidence(a, b, number, new, odd, suspects), rows)
            if not everything:
                return verdict
    if verdict is not None:
        verdict.rows = rows
        return verdict
    precisions = [t.about["precision"] for t in (a, b)]
    worst = {phase: max((r.error for r in rows if r.phase == phase), default=0.0) for phase in PHASES}
    how = f"{len(common)} steps, {len(rows)} comparisons; largest difference: " + ", ".join(
        f"{phase} {worst[phase]:.1e}" for phase in ("forward", "loss", "gradient", "parameter") if worst[phase] > 0
    )
    text = "EQUAL up to rounding: " + how
    if precisions[0] != precisions[1]:
        text = (
            f"EQUAL up to precision: A ran in {precisions[0]}, B in {precisions[1]}; all that differs is within the "
            f"noise of the coarser. {how}"
        )
    return Verdict(0, text, rows=rows, worst=worst)


def incomparable(a: Trace, b: Trace) -> str:
    """Why the two are not runs of one thing; empty where they are."""
    if a.about["shapes"] != b.about["shapes"]:
        one, two = a.about["shapes"], b.about["shapes"]
        names = [n for n in one.keys() | two.keys() if one.get(n) != two.get(n)]
        return f"other model: {len(names)} parameters have other shapes or names, {min(names)} among them"
    one, two = a.about["identity"], b.about["identity"]
    other = [
        f"{k} is {one.get(k)} in A and {two.get(k)} in B"
        for k in sorted(one.keys() | two.keys())
        if one.get(k) != two.get(k)
    ]
    if other:
        return "other run: " + "; ".join(other)
    if not set(a.numbers) & set(b.numbers):
        return f"no step is in both: A has {listed(a.numbers)}, B {listed(b.numbers)}"
    return ""


def judge(e: Evidence, rows: list[Row]) -> Verdict:
    """The verdict in words."""
    place = place_of(e)
    ranks = e.finding["ranks"] if e.finding else []
    lines = [f"DIFFERENT from step {e.number}; the fault is in: {place}"]
    first = e.first
    if e.finding:
        lines.append(f"  seen within {e.suspects[0][1]} alone: {e.finding['text']}")
    if first:
        size = f"{first.error:.3g} of its size ({first.allowed:.1e} is noise)" if not first.note else first.note
        lines.append(f"  first difference from A: {describe(first.phase, [first.name])}, off by {size}")
        lines.append(f"    best fit B = {first.factor:.4f} A, cosine {first.cosine:.5f}")
        before = [
            r
            for r in rows
            if not r.differs and (r.step, PHASES.index(r.phase)) <= (e.number, PHASES.index(first.phase))
        ]
        agreed = list(dict.fromkeys(r.phase for r in before if r.step == e.number))
        last = before[-1] if before else None
        if last:
            at = e.rows.index(first)
            last = e.rows[at - 1] if at else last
            lines.append(f"  agreed before it: {', '.join(agreed)}; the last was {describe(last.phase, [last.name])}")
    losses = [r for r in e.rows if r.phase == "loss"]
    lines += [f"  {r.name}: B = {r.factor:.6f} A" for r in losses if r.differs][:1]
    if e.off:
        lines.append(
            "  gradients by group (factor, cosine): "
            + ", ".join(f"{g} {f:.4g} {c:.4f}" for g, (f, c) in e.groups.items() if g in e.off)
            + (f"; exact: {', '.join(sorted(set(e.groups) - e.off))}" if set(e.groups) - e.off else "")
        )
    if ranks:
        lines.append(f"  ranks that disagree: {listed(ranks)}")
    causes = [cause for fits, cause in SIGNATURES if fits(e)][:4]
    lines += [f"  {'likely' if i == 0 else 'or    '}: {cause}" for i, cause in enumerate(causes)]
    fit = first or Row(e.number, e.phase, e.name, 0.0, 1.0, 1.0, 0.0)
    factor = e.factor if e.factor is not None else fit.factor
    return Verdict(
        1, "\n".join(lines), e.number, e.phase, e.name, place, fit.error, factor, fit.cosine, ranks, causes, rows
    )
