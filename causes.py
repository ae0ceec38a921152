"""From where two traces part to what is likely to be at fault: the evidence, the place, and the table of SIGNATURES.

Add a cause of yours to the table at the end: (does the evidence fit?, what it usually is). The first that fits is named
first.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from traces import PHASES

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

    a: object  # a blame.Trace
    b: object
    number: int
    rows: list  # of blame.Row: of the step
    first: object  # the blame.Row the first that differs
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


# ---------------------------------------------------------------------------------------------------------------------
# Signatures: (whether the evidence fits, what it usually is). The first that fits is named first. Add yours here.

Signature = tuple[Callable[[Evidence], bool], str]
SIGNATURES: list[Signature] = [
    (
        lambda e: "ranks disagree" in e.kinds and e.phase == "input" and e.sp > 1,
        "data, noise or timestep is drawn per process: ranks of a sequence-parallel group must draw for the sample, "
        "so key "
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
        lambda e: e.phase == "start",
        "weights are made or loaded differently: a seed that depends on the rank or on the order of creation",
    ),
    (
        lambda e: e.phase == "input" and e.name == "noise",
        "noise is drawn from another generator, or in another shape, order or dtype",
    ),
    (
        lambda e: e.phase == "input" and e.name in ("noised latents", "target"),
        "clean latents, noise and timestep agree, so the mixing is off: sigma broadcast over the wrong axis or shared "
        "by the batch, a sign, or the schedule's shift applied twice",
    ),
    (
        lambda e: e.phase == "input" and e.name == "weights",
        "the loss's weights: averaged over a pack or a rank's share and not over the global batch",
    ),
    (
        lambda e: e.phase == "input" and not e.kinds & {"same order", "repeat", "duplicate", "stream"},
        "what is read or drawn for a sample depends on the rank, the number of workers or an earlier state",
    ),
    (
        lambda e: e.phase == "forward" and e.name.startswith("model."),
        "between the batch and the model: one value used for the whole batch, or another order, unit or dtype",
    ),
    (
        lambda e: e.phase == "forward" and e.name == "tokens",
        "the cut of the tokens: a remainder dropped, or another rank's slice (rank in place of its index in the group)",
    ),
    (
        lambda e: e.phase == "forward" and e.name == "rotary",
        "positions restart at 0 on every rank, or are built from the local grid; cut the whole pack's table instead",
    ),
    (
        lambda e: e.phase == "forward" and e.name.endswith(".attention"),
        "attention sees the wrong keys: padding attended to, a remainder dropped, samples of a pack mixed, heads "
        "and ranks "
        "interleaved in the all-to-all, or a ring's merge; vary the token count, the batch and ulysses/ring to "
        "separate them",
    ),
    (
        lambda e: e.phase == "forward" and e.name.endswith(".cross"),
        "cross-attention reads part of the text, or another sample's; text is not to be cut over the "
        "sequence-parallel ranks",
    ),
    (lambda e: e.phase == "forward" and e.name == "prediction", "head modulation broadcast over the wrong axis"),
    (
        lambda e: e.phase == "loss" and e.is_factor(1 / e.sp, e.sp, 1 / e.world, e.world, 1 / e.dp, e.dp),
        "the loss is averaged or summed over the wrong group: its denominator counts one rank's tokens, or is "
        "scaled twice",
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
        "these gradients are not reduced over all ranks: reduced over the data-parallel group only, or a parameter "
        "outside "
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
        "the attention's backward: a ring that uses the wrong hop's keys, a local softmax sum or row sum instead of "
        "the "
        "global one, dK and dV that do not come home, or an all-to-all whose backward is not its inverse",
    ),
    (lambda e: e.phase == "backward" and e.name == "prediction", "the loss's derivative: a factor, or a detached part"),
    (
        lambda e: e.phase == "backward" and e.first is not None and e.first.cosine > 0.9999,
        "a backward that scales: a gather or a slice whose adjoint has an extra (or lacks a) factor of the group's "
        "size",
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
