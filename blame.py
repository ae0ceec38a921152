"""Compare two traces and say where they part, by how much, and why that may be.

Both are walked in causal order: what a step starts from, its inputs, activations, loss, gradients backwards, the
reduction, the norm, the update. The first entry whose difference exceeds the noise is where the fault shows; what lies
between it and the last entry that agreed is where the fault is. SIGNATURES at the end of the file turns the pattern of
differences into likely causes: add yours there.

Tolerances come from the runs themselves. Each trace holds its noise floor: how far every tensor moves when everything
in the pass is off by a unit in the last place (traces.py, `measure_floor`). A difference is one if it is MARGIN times
larger. From the second step on the weights themselves differ by noise; the floor then grows in proportion.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from traces import NUMBERS, PHASES, describe, listed

MARGIN = 16  # times the noise floor: one sample of noise stands for all, and a sketch has it to 10 %
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
        entries = {}
        for i, entry in enumerate(header["entries"]):
            values = dict(zip(NUMBERS, tensors["numbers"][i].tolist(), strict=True))
            values |= {"sketch": tensors["sketch"][i].to(torch.float64), "ranks": tensors["ranks"][i]}
            entries[entry["phase"], entry["name"]] = entry | values
        return {"entries": entries, "facts": header["facts"], "findings": header["findings"]}


def load(path) -> Trace:
    """The trace of a run's folder, or the trace's own folder."""
    path = Path(path)
    folder = path / "trace" if (path / "trace").is_dir() else path
    if not (folder / "about.json").is_file():
        raise ValueError(f"{path} holds no trace; was the run started with --trace?")
    floor = json.loads((folder / "floor.json").read_text()) if (folder / "floor.json").is_file() else {}
    numbers = sorted(int(file.stem[5:]) for file in folder.glob("step-*.json"))
    return Trace(folder, json.loads((folder / "about.json").read_text()), floor, numbers)


# ---------------------------------------------------------------------------------------------------------------------
# One tensor against another


@dataclass
class Row:
    """How entry (phase, name) of b differs from a's: |b - a| / |a|, the least-squares factor b ~ factor a, the cosine of
    the angle between them, and the difference that noise explains."""

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


def compare(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """(|b - a| / |a|, factor, cosine) of two sketches."""
    aa, bb, ab = a.dot(a).item(), b.dot(b).item(), a.dot(b).item()
    if aa == 0 or bb == 0:
        return (0.0, 1.0, 1.0) if aa == bb else (math.inf if aa == 0 else 1.0, 0.0, 0.0)
    return math.sqrt((b - a).square().sum().item() / aa), ab / aa, ab / math.sqrt(aa * bb)


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
        rows, weights = [], {}
        for phase, name in sorted(keys, key=lambda key: PHASES.index(key[0])):
            x, y = one.get((phase, name)), two.get((phase, name))
            if x is None or y is None:
                if phase != "partial":  # which not every sharding shows
                    rows.append(Row(number, phase, name, 1.0, 0.0, 0.0, 0.0, f"only in {'B' if x is None else 'A'}"))
                continue
            row = Row(number, phase, name, *compare(x["sketch"], y["sketch"]), self.allowed(phase, name))
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
        errors = [row.error for row in rows if row.phase == "parameter" and math.isfinite(row.error)]
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
        return last.row.error + MARGIN * (updates * noise + self.stored)


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
    """code: 0 equal, 1 different, 2 not comparable. place: where the fault lies; phase and name: where it shows first."""

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
        findings = {side: trace.step(number)["findings"] for side, trace in (("A", a), ("B", b))}
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


GROUPS = {  # of parameters: the first pattern that fits
    "patch": "patch_embedding",
    "time": "time_",
    "text": "text_embedding",
    "lora": "lora",
    "mod": "modulation|scale_shift",
    "qknorm": "norm_q|norm_k",
    "cross": "cross_attn|attn2|norm3",
    "qkv": r"attn\w*\.(to_)?(q|k|v|qkv)\b",
    "o": r"attn\w*\.(to_)?(o|out|proj)\b",
    "ffn": "ffn|mlp",
    "head": "head|proj_out",
}


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "others")


@dataclass
class Evidence:
    """All that is known at the first step that differs; what SIGNATURES judge by."""

    a: Trace
    b: Trace
    number: int
    rows: list[Row]  # of the step
    first: Row | None  # the first that differs
    suspects: list[tuple]  # (order, "A" or "B", finding), in causal order

    def __post_init__(self):
        self.finding = self.suspects[0][2] if self.suspects else None
        if self.first and self.finding and PHASES.index(self.first.phase) < self.suspects[0][0]:
            self.finding = None
        if self.finding and self.first and self.finding["phase"] == self.first.phase and self.finding["kind"] in SOFT:
            self.finding = None  # the difference says more
        self.kinds = {f["kind"] for _, _, f in self.suspects}
        self.phase = self.finding["phase"] if self.finding else self.first.phase
        self.name = self.finding["name"] if self.finding else self.first.name
        self.world, self.sp = self.b.about["world"], self.b.about["sp"]
        self.dp = self.world // self.sp
        one, two = (t.step(self.number)["entries"] for t in (self.a, self.b))
        sums = {}
        for (phase, name), x in one.items():
            if phase == "gradient" and (phase, name) in two:
                pair = sums.setdefault(group_of(name), [0.0, 0.0, 0.0])
                p, q = x["sketch"], two[phase, name]["sketch"]
                for i, value in enumerate((p.dot(p), q.dot(q), p.dot(q))):
                    pair[i] += value.item()
        self.groups = {g: (ab / aa, ab / math.sqrt(aa * bb) if bb else 0.0) for g, (aa, bb, ab) in sums.items() if aa}
        factors = [f for f, _ in self.groups.values()]
        straight = factors and all(c > 0.99999 for _, c in self.groups.values())
        alike = straight and max(factors) - min(factors) < 1e-3 * abs(factors[0])
        self.factor = factors[0] if alike and abs(factors[0] - 1) > 1e-6 else None  # one factor for every gradient
        self.off = {g for g, (f, c) in self.groups.items() if abs(f - 1) > 1e-4 or c < 0.9999}

    def same(self, phase: str, *names: str) -> bool:
        """Whether all entries of a phase (or those named) agree."""
        return not any(r.differs for r in self.rows if r.phase == phase and (not names or r.name in names))

    def has(self, phase: str) -> bool:
        return any(r.phase == phase for r in self.rows)

    def is_factor(self, *values: float) -> bool:
        return self.factor is not None and any(v != 1 and abs(self.factor / v - 1) < 2e-3 for v in values)


SOFT = ("zero gradient", "no gradient", "local length")


def place_of(e: Evidence) -> str:
    """The module or phase between the last tap that agreed and the first that did not."""
    phase, name = e.phase, e.name
    block = re.match(r"(.*?blocks?\.\d+)\.(\w+)$", name) if phase in ("forward", "backward") else None
    if phase == "start":
        return "weights at the start" if e.number == 0 else "weights after the resume"
    if phase == "input":
        return f"data: {name}"
    if phase == "forward":
        if block:
            return f"{block[1]}: {FORWARD.get(block[2], block[2])}"
        return FORWARD.get(name, name)
    if phase == "loss":
        return "loss" if name == "loss" else "reported loss"
    if phase == "backward":
        if e.first and e.first.note == "only in A":  # nothing came back to what made it
            made = FORWARD.get(block[2] if block else name, name)
            return f"{block[1]}: backward of {made}" if block else f"backward of {made}"
        if block:
            return f"{block[1]}: backward of {BACKWARD.get(block[2], block[2])}"
        return f"backward of {BACKWARD.get(name, name)}"
    if phase == "partial" or (phase == "gradient" and not e.has("partial")):
        if e.factor is not None or (e.kinds & {"no gradient"} and not e.has("partial")):
            return "gradient reduction" if e.same("backward") else "backward"
        return f"gradient of {name}"
    if phase == "gradient":
        return "gradient reduction"
    if phase == "norm":
        return "clipping: gradient norm" if "squared" not in name else "clipping"
    return {"rate": "learning rate", "parameter": "optimizer update", "moment": "optimizer state"}[phase]


# What computes the entry of that name, and what its gradient comes through.
FORWARD = {
    "q": "q projection, norm and rotation",
    "k": "k projection, norm and rotation",
    "v": "v projection",
    "attention": "self-attention",
    "cross": "cross-attention",
    "out": "residuals, modulation and feed-forward",
    "prediction": "head",
    "tokens": "patch embedding",
    "rotary": "rotary table",
    "modulation": "time embedding",
    "text": "text embedding",
    "model.latents": "latents handed to the model",
    "model.timesteps": "timesteps handed to the model",
    "model.text": "text handed to the model",
}
BACKWARD = {
    "q": "self-attention",
    "k": "self-attention",
    "v": "self-attention",
    "attention": "output projection, modulation and what follows it",
    "cross": "feed-forward and modulation",
    "out": "what follows the block",
    "prediction": "the loss",
    "tokens": "the first block's input",
    "modulation": "the modulation",
    "text": "the cross-attention",
}


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


# ---------------------------------------------------------------------------------------------------------------------
# Signatures: (whether the evidence fits, what it usually is). The first that fits is named first. Add yours here.

Signature = tuple[Callable[[Evidence], bool], str]
SIGNATURES: list[Signature] = [
    (
        lambda e: "ranks disagree" in e.kinds and e.phase == "input" and e.sp > 1,
        "data, noise or timestep is drawn per process: ranks of a sequence-parallel group must draw for the sample, so key "
        "the sampler and the generators by dp_rank or by the sample's position, not by the rank",
    ),
    (
        lambda e: "duplicate" in e.kinds and e.name == "noise",
        "every data-parallel rank (or sample) draws noise from the same seed",
    ),
    (
        lambda e: "duplicate" in e.kinds or "stream" in e.kinds,
        "the sampler splits by the wrong rank (global instead of data-parallel, or twice), or pads the last batch",
    ),
    (lambda e: "same order" in e.kinds, "the sampler's epoch is not set, so every epoch has one order"),
    (lambda e: "repeat" in e.kinds, "the epoch's end repeats samples, or ranks draw from different permutations"),
    (
        lambda e: e.phase == "start" and "ranks disagree" in e.kinds,
        "weights are initialised from a seed that depends on the rank, or were added after the broadcast (adapters)",
    ),
    (
        lambda e: e.phase == "start" and e.number > 0,
        "the checkpoint does not hold, or the resume does not restore, this",
    ),
    (
        lambda e: e.phase == "forward" and e.name == "rotary",
        "positions restart at 0 on every rank, or are built from the local grid; cut the whole pack's table instead",
    ),
    (
        lambda e: e.phase == "forward" and e.name.endswith(".attention"),
        "attention sees the wrong keys: padding attended to, a remainder dropped, samples of a pack mixed, heads and ranks "
        "interleaved in the all-to-all, or a ring's merge; vary the token count, the batch and ulysses/ring to separate them",
    ),
    (
        lambda e: e.phase == "forward" and e.name.endswith(".cross"),
        "cross-attention reads part of the text, or another sample's; text is not to be cut over the sequence-parallel ranks",
    ),
    (lambda e: e.phase == "forward" and e.name == "prediction", "head modulation broadcast over the wrong axis"),
    (
        lambda e: e.phase == "loss" and e.is_factor(1 / e.sp, e.sp, 1 / e.world, e.world, 1 / e.dp, e.dp),
        "the loss is averaged or summed over the wrong group: its denominator counts one rank's tokens, or is scaled twice",
    ),
    (
        lambda e: e.phase == "loss" and e.name == "loss" and e.same("forward"),
        "the loss's denominator: means of unequal parts averaged, padding counted, or a weight lost",
    ),
    (lambda e: e.phase == "loss" and e.name != "loss", "only the number that is printed is wrong; gradients are not"),
    (
        lambda e: e.phase in ("gradient", "partial") and e.is_factor(1 / e.world) and e.same("backward"),
        "the reduction averages over the world where a sum is due (a DDP or FSDP default)",
    ),
    (
        lambda e: e.phase in ("gradient", "partial") and e.is_factor(1 / e.sp) and e.same("backward"),
        "the reduction averages over the sequence-parallel group, or its gather's backward only slices",
    ),
    (
        lambda e: e.phase in ("gradient", "partial") and e.is_factor(e.sp, e.dp, e.world) and e.same("backward"),
        "gradients are reduced twice, or a gather's backward sums what the reduction sums again",
    ),
    (
        lambda e: e.phase == "gradient" and "ranks disagree" in e.kinds,
        "these gradients are not reduced over all ranks: reduced over the data-parallel group only, or a parameter outside "
        "the wrapper (adapters, unwrapped modules)",
    ),
    (
        lambda e: e.phase == "gradient" and e.has("partial") and e.same("partial"),
        "every rank's own gradient is right and their sum is not: the reduction's group, operation or dtype",
    ),
    (
        lambda e: (
            e.phase == "backward" and e.name.rsplit(".", 1)[-1] in "qkv" and e.first is not None and e.first.factor == 0
        ),
        "the gradient is cut off before the attention: an all-to-all without autograd, or a detach",
    ),
    (
        lambda e: e.phase == "backward" and e.name.rsplit(".", 1)[-1] in "qkv",
        "the attention's backward: a ring that uses the wrong hop's keys, a local softmax sum or row sum instead of the "
        "global one, dK and dV that do not come home, or an all-to-all whose backward is not its inverse",
    ),
    (lambda e: e.phase == "backward" and e.name == "prediction", "the loss's derivative: a factor, or a detached part"),
    (
        lambda e: e.phase == "backward" and e.first is not None and e.first.cosine > 0.9999,
        "a backward that scales: a gather or a slice whose adjoint has an extra (or lacks a) factor of the group's size",
    ),
    (lambda e: "no gradient" in e.kinds, "these parameters are not reached: a detach, a frozen flag, an unused branch"),
    (lambda e: "zero gradient" in e.kinds, "the gradient is cut off on the way to these parameters"),
    (lambda e: "not finite" in e.kinds, "overflow: exp without its maximum, a mean over no tokens, or too high a rate"),
    (
        lambda e: e.phase == "norm" and "squared" not in e.name,
        "the norm is that of this rank's shard, or counts replicated gradients more than once",
    ),
    (
        lambda e: e.phase == "norm",
        "clipping: another coefficient than max_norm / norm, or a different one on each rank",
    ),
    (
        lambda e: e.phase == "rate",
        "the schedule: counted in other units (micro-batches, or per process), or not restored",
    ),
    (
        lambda e: e.phase in ("parameter", "moment"),
        "the optimizer: moments not restored or not sharded alike, decay or betas that differ, a group left out",
    ),
]
