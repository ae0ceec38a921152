"""Trace a training run: what every tensor of a step was, in numbers that do not depend on how the run was laid out.

A tensor is recorded as a *count sketch* (Charikar et al. 2002): each element, by its GLOBAL index, is added with a sign
to one of 256 buckets. The map is linear: sketches of shards, micro-batches and ranks add up to the sketch of the whole,
and |sketch(a) - sketch(b)| / |sketch(a)| estimates the relative error of a against b, to about 10 %. A sum hides
disagreement, so every rank's own part leaves a fingerprint as well, and what ought to be alike is compared over ranks.

    trace = Trace(model, "runs/x/trace", taps={"blocks.*": "tokens"}, optimizer=optimizer)
    with trace.step(step):
        with trace.pack(tokens=row_ids(samples, first_token, n)):      one for each micro-batch
            loss = ...; loss.backward(); trace.loss(loss)
        trace.gradients()                                             before they are clipped
        optimizer.step()
        trace.updated(grad_norm=norm, lr=lr)

On disk, under the trace's folder: about.json (what was run), floor.json (relative noise of each tensor, see `jiggle`),
and for each step step-000003.json, the entries in causal order with what was found wrong in the step itself, beside
step-000003.safetensors: sketch (E, 256), numbers (E, 6: count, sum of squares, zeros, NaNs, infinities, largest) and
ranks (E, world, 2: a projection of each rank's own sketch, and its sum of squares; NaN where a rank has none).
"""

import contextlib
import fnmatch
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from findings import check_facts, check_gradients, check_ranks

BUCKETS = 256
KEPT = 1 << 24  # elements of which the slots are kept for the next tensor
NUMBERS = ("count", "squares", "zeros", "nans", "infinities", "largest")
# A step in the order of cause and effect. "partial" is a parameter's gradient as one rank has it before the reduction.
PHASES = ("start", "input", "forward", "loss", "backward", "partial", "gradient", "norm", "rate", "parameter", "moment")

# ---------------------------------------------------------------------------------------------------------------------
# The sketch


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 that leaves no pattern: two rounds of multiplying by an odd number and folding."""
    for factor in (-7046029254386353131, -2960836687393572205):
        x = x * factor
        x = x ^ (x >> 32)
    return x


def slots(rows: Tensor, first: int, columns: int) -> Tensor:
    """(n,) row ids -> (n, columns) in 0 ... 511: bucket and, as the highest bit, sign of elements `first` onwards."""
    return (mix(mix(rows)[:, None] + torch.arange(first, first + columns, device=rows.device)) >> 40) & (
        2 * BUCKETS - 1
    )


def sketch(x: Tensor, slot: Tensor) -> Tensor:
    """(256,) float64 of x, whose element i goes to slot i."""
    sums = torch.zeros(2 * BUCKETS, dtype=torch.float64, device=x.device)
    sums.scatter_add_(0, slot.reshape(-1), x.reshape(-1).to(torch.float64))
    return sums[:BUCKETS] - sums[BUCKETS:]


def row_ids(samples: list[int], first: int, count: int) -> Tensor:
    """(samples, count) ids of the tokens first ... first + count - 1 of each sample; a sample is named by any int."""
    return (torch.tensor(samples, dtype=torch.int64)[:, None] << 32) + torch.arange(first, first + count)


def pack_rows(samples: list[int], lengths: list[int], first: int, count: int) -> Tensor:
    """(count,) ids of `count` tokens from `first` on of samples laid end to end; -1 for padding behind the last."""
    ids = torch.cat([row_ids([sample], 0, n)[0] for sample, n in zip(samples, lengths, strict=True)])
    ids = ids[first : first + count]
    return torch.cat((ids, ids.new_full((count - len(ids),), -1)))


@dataclass
class Entry:
    phase: str
    agree: str  # over which ranks it must be alike: "world", "sp" or "" (each rank holds a part of its own)
    sums: Tensor  # (256 + 5,): the sketch, then NUMBERS but the last
    largest: Tensor  # ()
    counts: bool = True  # whether this rank's part belongs in the sum over ranks


class Trace:
    """Records the steps of one run; see the module's first lines.

    model      any module, wrapped or not; its parameters may be DTensors (sharded over dim 0) or whole on each rank
    folder     where the trace goes; None keeps it in `self.steps`, [(header, tensors)], on rank 0
    taps       module names (shell patterns) -> the rows of what the module returns (the first tensor, if several): a
               name given to `pack`, or "whole" for what each rank has whole. Rows are the tensor's leading dimensions
    optimizer  to record its moments
    about      what the run is: two runs are comparable where their "identity" is equal; "precision" is its dtype
    sp         ranks of a sequence-parallel group, which are neighbours: they work on the same samples
    world      1 for a run that this process does alone, though it is a member of a process group
    steps      the numbers of the steps to record; None: all
    group      a gloo group of all ranks, if there is one
    share      what a rank's loss counts in the whole: 1 where the ranks' losses add up, 1 / dp where the trainer
               averages the gradients of data-parallel ranks
    """

    def __init__(
        self,
        model,
        folder=None,
        taps=None,
        optimizer=None,
        about=None,
        sp=1,
        world=None,
        steps=None,
        group=None,
        share=1.0,
    ):
        self.model, self.optimizer, self.sp, self.wanted = getattr(model, "module", model), optimizer, sp, steps
        grouped = dist.is_available() and dist.is_initialized()
        self.world = world or (dist.get_world_size() if grouped else 1)
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.group = group or (dist.new_group(backend="gloo") if self.world > 1 else None)  # its tensors lie on the CPU
        self.folder, self.steps = Path(folder) if folder else None, []
        self.entries, self.rows, self.facts, self.going, self.jiggling = {}, None, {}, False, False
        self.opened = False
        self.tables, self.flat, self.last, self.floor = {}, {}, None, {}
        self.share, self.updates, self.history = share, 0, {}  # steps traced; position in the stream -> sample
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        shapes = {n: list(p.shape) for n, p in self.parameters.items()}
        self.about = {"identity": {}, "precision": str(next(self.model.parameters()).dtype)[6:]} | (about or {})
        self.about |= {"world": self.world, "sp": sp, "shapes": shapes}
        for name, p in self.parameters.items():
            p.register_hook(partial(self.partial_gradient, name))
        for name, module in self.model.named_modules():
            for pattern, rows in (taps or {}).items():
                if fnmatch.fnmatchcase(name, pattern):
                    module.register_forward_hook(partial(self.tap_module, name, rows))
        if optimizer is not None:
            optimizer.register_step_pre_hook(self.before_update)
        if self.folder and self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "about.json").write_text(json.dumps(self.about, indent=1))

    # -- The frame: which step, which micro-batch

    def due(self, step: int) -> bool:
        return self.wanted is None or step in self.wanted

    @contextlib.contextmanager
    def step(self, step: int):
        self.begin(step)
        yield
        self.end()

    def begin(self, step: int):
        """From here to `end` is step `step`. Where the step before was not traced, the weights it starts from are."""
        if not self.opened and self.folder and self.rank == 0:
            for file in self.folder.glob("step-*"):  # of an older trace, what this run goes on from stays
                if int(file.stem[5:]) >= step:
                    file.unlink()
        self.opened, self.going = True, self.due(step)
        if not self.going:
            return
        self.number, self.entries, self.facts = step, {}, {}
        if self.last != step - 1:
            self.weights("start")
        self.last = step

    @contextlib.contextmanager
    def pack(self, **rows):
        """One micro-batch, forward and backward. rows: name -> int64 ids of the leading dimensions of the tensors that
        are split so, the same id for the same thing on every rank and in every run; negative ids are padding."""
        self.rows, self.backward_began = rows, False
        self.tables.clear()
        yield
        self.rows = None

    # -- What is recorded

    def tap(self, name: str, x: Tensor, rows: str, counts: bool = True, agree: str = "") -> Tensor:
        """Record an activation and, when it comes, its gradient; returns it (while the noise is measured, jiggled)."""
        if not self.going or self.rows is None or self.backward_began:  # the last: recomputed in the backward
            return x
        x = self.jiggle(x)
        self.add("forward", name, x, rows, counts, agree)
        if x.requires_grad:
            x.register_hook(partial(self.tap_gradient, name, rows))
        return x

    def tap_gradient(self, name: str, rows: str, grad: Tensor):
        self.backward_began = True
        self.add("backward", name, grad * self.share, rows)
        return self.jiggle(grad) if self.jiggling else None

    def tap_module(self, name: str, rows: str, module, args, out):
        first = out[0] if isinstance(out, tuple) else out
        first = self.tap(name, first, rows)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    def partial_gradient(self, name: str, grad: Tensor):
        if self.going and not isinstance(grad, DTensor):
            self.add("partial", name, grad * self.share)

    @torch.no_grad()
    def add(self, phase: str, name: str, x: Tensor, rows: str = "whole", counts: bool = True, agree: str = ""):
        """Add this rank's (or micro-batch's) part of a tensor to its entry. counts: whether the part belongs in the sum
        over ranks; of what several ranks have alike, one counts."""
        if not self.going:
            return
        x, ids, first = self.place(x.detach(), rows)
        shape, wide = x.shape, x.reshape(-1).to(torch.float64)
        squares = wide.dot(wide)
        zeros = wide.numel() - torch.count_nonzero(wide)
        nans = infinities = 0
        if wide.is_cuda or not math.isfinite(squares):  # a finite sum of squares has no such terms
            nans, infinities = wide.isnan().sum(), wide.isinf().sum()
            wide = wide.nan_to_num(0.0, 0.0, 0.0)
            squares = wide.dot(wide)
        numbers = torch.stack(
            [torch.as_tensor(n, device=wide.device) for n in (wide.numel(), squares, zeros, nans, infinities)]
        )
        largest = wide.abs().amax() if wide.numel() else wide.new_zeros(())
        sums = torch.cat((self.sketch_of(wide.view(shape), ids, first, rows), numbers))
        entry = self.entries.setdefault(
            (phase, name), Entry(phase, agree, torch.zeros_like(sums), torch.zeros_like(largest))
        )
        entry.sums += sums
        entry.largest = torch.maximum(entry.largest, largest)
        entry.counts = counts

    def place(self, x: Tensor, rows: str) -> tuple[Tensor, Tensor, int]:
        """The elements of x that this rank has, as (n, c), the ids of the rows and the number of the first column."""
        if rows == "whole":
            first = 0
            if isinstance(x, DTensor):  # dim 0 in equal parts, the last ranks' shorter; this rank's starts at `first`
                part = math.ceil(x.shape[0] / x.device_mesh.size()) if x.ndim else 1
                first = min(x.device_mesh.get_local_rank() * part, x.shape[0]) * math.prod(x.shape[1:])
                x = x.to_local()
            return x.reshape(1, -1), torch.zeros(1, dtype=torch.int64), first
        ids = self.rows[rows]
        n = x.shape[: ids.ndim]
        if n != ids.shape:  # not the length it should have: take what there is for what it should be
            ids = torch.cat((ids.reshape(-1), ids.new_full((n.numel(),), -1)))[: n.numel()]
        x, ids = x.reshape(n.numel(), -1), ids.reshape(-1)
        mine = ids >= 0
        return (x, ids, 0) if mine.all() else (x[mine.to(x.device)], ids[mine], 0)

    def sketch_of(self, x: Tensor, ids: Tensor, first: int, rows: str) -> Tensor:
        """(256,) of x (n, c). Slots are kept for the next tensor of the kind; of large ones they are made in parts."""
        n, c = x.shape
        if rows == "whole" and first + c <= KEPT:
            table = self.flat.get(x.device)
            if table is None or table.shape[1] < first + c:
                table = self.flat[x.device] = slots(ids.to(x.device), 0, min(KEPT, 2 * (first + c)))
            return sketch(x, table[:, first : first + c])
        if rows != "whole" and n * c <= KEPT:
            key = (rows, n, c, x.device)
            if key not in self.tables:
                self.tables[key] = slots(ids.to(x.device), 0, c)
            return sketch(x, self.tables[key])
        total, height, width = torch.zeros(BUCKETS, dtype=torch.float64, device=x.device), max(1, KEPT // c), KEPT
        for i in range(0, n, height):
            for j in range(0, c, width):
                part = x[i : i + height, j : j + width]
                total += sketch(part, slots(ids[i : i + height].to(x.device), first + j, part.shape[1]))
        return total

    def jiggle(self, x: Tensor) -> Tensor:
        """While the noise floor is measured: x with every element moved by one unit in its last place, up or down."""
        if not self.jiggling:
            return x
        ulp = torch.finfo(x.dtype).eps
        signs = torch.randint(0, 2, x.shape, generator=self.generator).to(x.device, x.dtype) * 2 - 1
        return x + x.detach() * signs * ulp

    def measure_floor(self, passes):
        """passes() does the forward and backward of the step's packs (and drops the gradients). Two runs that are equal
        on paper differ in their summation order, that is by rounding in every operation: so the pass is done twice, the
        second time with every tap and its gradient moved by a unit in the last place, and what that does to each
        tensor is its relative noise. Written once, by the first traced step."""
        if not self.going or self.floor:
            return
        kept, base = self.entries, {}
        for self.jiggling in (False, True):
            self.entries, self.generator = {}, torch.Generator().manual_seed(self.rank)
            passes()
            names, sums, _, _ = self.reduce()
            found = {name[:2]: row[:BUCKETS] for name, row in zip(names, sums, strict=True)}
            if self.jiggling:
                for key, row in found.items():
                    size = base[key].norm().item()
                    self.floor["/".join(key)] = (row - base[key]).norm().item() / size if size else 0.0
            base = found
        self.jiggling, self.entries = False, kept
        if self.folder and self.rank == 0:
            (self.folder / "floor.json").write_text(json.dumps(self.floor))

    def loss(self, loss: Tensor):
        """The number that this rank (and micro-batch) calls backward on."""
        self.scalar("loss", "loss", loss.detach().to(torch.float64) * self.share, True, "")

    def gradients(self):
        """Parameters' gradients as the optimizer will get them, before clipping."""
        for name, p in reversed(self.parameters.items()) if self.going else ():
            if p.grad is not None:
                self.add_parameter("gradient", name, p.grad)

    def before_update(self, optimizer, args, kwargs):
        """The gradients once more, as one number: what the clipping left of them."""
        for p in self.parameters.values() if self.going else ():
            if p.grad is not None:
                grad = p.grad.detach()
                squares = (grad.to_local() if isinstance(grad, DTensor) else grad).to(torch.float64).square().sum()
                split = isinstance(grad, DTensor)
                agree = "" if split else "world"
                self.scalar("norm", "squared norm after clipping", squares, split or self.rank == 0, agree)

    def updated(self, **scalars):
        """After the optimizer's step; scalars, such as grad_norm= and lr=, are compared over ranks and runs."""
        if self.going:
            for name, value in scalars.items():
                self.scalar("norm" if "norm" in name else "rate", name, value)
            self.weights("parameter")

    def scalar(self, phase: str, name: str, value, counts: bool | None = None, agree: str = "world"):
        """A number that every rank has; counts: for one that is a rank's share."""
        x = torch.as_tensor(value, dtype=torch.float64).reshape(1)
        self.add(phase, name, x, counts=self.rank == 0 if counts is None else counts, agree=agree)

    def weights(self, phase: str):
        for name, p in self.parameters.items():
            self.add_parameter(phase, name, p)
        state = self.optimizer.state if self.optimizer else {}
        for name, p in self.parameters.items():
            for key, x in state.get(p, {}).items():
                if isinstance(x, Tensor):
                    self.add_parameter("start" if phase == "start" else "moment", f"{name}.{key}", x)

    def add_parameter(self, phase: str, name: str, x: Tensor):
        """Parts of a DTensor all count, and of a whole tensor's copies one."""
        if isinstance(x, DTensor):
            self.add(phase, name, x)
        else:
            self.add(phase, name, x, counts=self.rank == 0, agree="world")

    # -- The end of a step: one reduction over ranks, one file

    def reduce(self) -> tuple[list, Tensor, Tensor, Tensor]:
        """Entries (phase, name, agree) in causal order; sums (E, 261) over ranks, largest (E,), ranks (E, world, 2)."""
        names = [(phase, name, entry.agree) for (phase, name), entry in self.entries.items()]
        if self.world > 1:
            parts = self.gather(names)
            names = list(dict.fromkeys(name for part in sorted(parts, key=len, reverse=True) for name in part))
        names.sort(key=lambda name: PHASES.index(name[0]))  # stable: as they were recorded within a phase
        if not names:
            return names, torch.zeros(0, BUCKETS + 5), torch.zeros(0), torch.zeros(0, self.world, 2)
        zero = torch.zeros(BUCKETS + 6, dtype=torch.float64)
        nothing = Entry("", "", zero[1:], zero[0])
        entries = [self.entries.get(name[:2], nothing) for name in names]
        sums = torch.stack([e.sums.cpu() for e in entries])
        largest = torch.stack([e.largest.cpu() for e in entries])
        absent = torch.tensor([[e is nothing] for e in entries])
        probe = torch.randn(BUCKETS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ranks = torch.stack((sums[:, :BUCKETS] @ probe, sums[:, BUCKETS + 1]), 1).masked_fill(
            absent, math.nan
        )  # (E, 2)
        if self.world == 1:
            return names, sums, largest, ranks[:, None]
        sums = sums * torch.tensor([[float(e.counts)] for e in entries])
        dist.all_reduce(sums, group=self.group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        everyones = [torch.empty_like(ranks) for _ in range(self.world)]
        dist.all_gather(everyones, ranks, group=self.group)
        return names, sums, largest, torch.stack(everyones, 1)

    def gather(self, thing) -> list:
        everyones = [thing] * self.world
        if self.world > 1:
            dist.all_gather_object(everyones, thing, group=self.group)
        return everyones

    def end(self):
        """Sum over ranks, look for what is wrong within the step, and write."""
        if not self.going:
            return
        names, sums, largest, ranks = self.reduce()
        facts = self.gather(self.facts)
        if self.rank == 0:
            tensors = {"sketch": sums[:, :BUCKETS].contiguous(), "ranks": ranks.contiguous()}
            tensors["numbers"] = torch.cat((sums[:, BUCKETS:], largest[:, None]), 1)
            entries = [dict(zip(("phase", "name", "agree"), name, strict=True)) for name in names]
            findings = check_facts(self, facts) + check_ranks(self, entries, ranks)
            findings += check_gradients(self, entries, tensors["numbers"])
            findings.sort(key=lambda f: PHASES.index(f["phase"]))
            self.write({"step": self.number, "entries": entries, "facts": facts, "findings": findings}, tensors)
        self.going, self.updates = False, self.updates + 1

    def write(self, header: dict, tensors: dict[str, Tensor]):
        if self.about["precision"] != "float64":  # seven digits are more than the run has
            tensors["sketch"] = tensors["sketch"].to(torch.float32)
        for finding in header["findings"]:
            print(f"trace, step {self.number}: {finding['text']}", flush=True)
        if self.folder is None:
            self.steps.append((header, tensors))
            return
        save_file(tensors, self.folder / f"step-{self.number:06d}.safetensors")
        (self.folder / f"step-{self.number:06d}.json").write_text(json.dumps(header))
