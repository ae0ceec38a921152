"""Find out why two runs differ, and where.

    python parity.py diff runs/A runs/B --plot map.html     two traced runs (train.py --trace); A is the reference
    torchrun --nproc-per-node 4 parity.py check             every layout of 4 processes against one process
    torchrun --nproc-per-node 4 parity.py check --model wan2.1-t2v-1.3b --layers 2 --data videos --checkpoint W ...

`diff` exits with 0 for equal, 1 for different, 2 for not comparable. A trainer that is not this one uses `Trace` and
`diff` from here: docs/parity.md has the ten lines. Recording is in traces.py, comparing in blame.py.
"""

import contextlib
import dataclasses
import hashlib
import math
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import batch
import parallel
from blame import Verdict, diff
from memory import Memory
from model import CONFIGS
from options import exit_with, parse
from page import write_page
from stream import Mixture
from traces import Trace, pack_rows, row_ids

__all__ = ["Trace", "Verdict", "diff", "pack_rows", "row_ids"]

# Options that say how a run is computed and kept, and not what it is.
LAYOUT_OPTIONS = {"sp", "ulysses", "ring", "shard", "precision", "recompute", "compile", "pack_tokens", "cost"}
KEEPING_OPTIONS = {
    "run",
    "steps",
    "stop_after",
    "save_every",
    "keep",
    "resume",
    "allow_change",
    "sample",
    "prompts",
    "validation",
    "validate_every",
    "validation_sigmas",
    "on_nonfinite",
    "trace",
    "trace_steps",
}
PATH_OPTIONS = {  # of these the contents count
    "checkpoint",
    "low_checkpoint",
    "vae",
    "text_encoder",
    "tokenizer",
    "image_encoder",
    "lora",
    "data",
    "cache",
    "verify_layout",
}
PRECISIONS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# picowan's own training run, traced


class RunTrace(Trace):
    """What train.py's loop calls. Taps: the noised latents, timesteps and text as the model gets them; tokens, rotary
    table, modulation and text in front of the first block; q, k, v after rotation, attention, cross-attention and
    output of every block; the prediction."""

    def __init__(self, config, run: Path, layout, part, dataset, schedule):
        what = dataclasses.asdict(config)
        identity = {k: v for k, v in what.items() if k not in LAYOUT_OPTIONS | KEEPING_OPTIONS | PATH_OPTIONS}
        identity["data"] = content_of(dataset)
        identity["weights"] = Path(config.checkpoint).name or "the demo's"
        about = {"identity": identity, "precision": PRECISIONS[config.precision]}
        about |= {"layout": {k: v for k, v in what.items() if k in LAYOUT_OPTIONS}}
        where, group, steps = run / "trace", layout.patient_group, parse_steps(config.trace_steps)
        super().__init__(part.wrapped, where, {}, part.optimizer, about, layout.sp, layout.world, steps, group)
        self.config, self.layout, self.schedule = config, layout, schedule
        self.samples = 0 if dataset.mixture.weights else len(dataset)  # of an epoch; weighted, there is none for all
        self.measures = True  # the noise floor, before the first step
        self.one = layout.sp_rank == 0  # of what a sequence-parallel group has alike, its first rank's counts
        self.model.register_forward_pre_hook(self.enter_model, with_kwargs=True)
        for i, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(lambda module, args, i=i: self.enter_block(i, *args))
            block.cross_attn.register_forward_hook(
                lambda m, args, out, i=i: self.tap(f"blocks.{i}.cross", out, "tokens")
            )
            block.register_forward_hook(lambda m, args, out, i=i: self.tap(f"blocks.{i}.out", out, "tokens"))
        modules = ("text", "samples", self.model.text_embedding), ("modulation", "times", self.model.time_projection)
        for name, rows, module in modules:
            module.register_forward_hook(
                lambda m, args, out, name=name, rows=rows: self.tap(name, out, rows, self.one, "sp")
            )
        self.model.head.register_forward_hook(lambda m, args, out: self.tap("prediction", out, "tokens"))

    def start(self, step: int, packs, numbers: list[int], wrapped, loss_of):
        """Begin a step; before the first one, measure the noise. loss_of(pack) is the share of the loss to train on,
        numbers say on which samples of the batch: one of two experts does not train on all."""
        self.begin(step)

        def passes():
            for i, pack in enumerate(packs):
                with parallel.synchronize(wrapped, last=i == len(packs) - 1), self.micro_batch(pack):
                    loss = loss_of(pack)
                    loss.backward()
                    self.scalar("loss", "loss", loss.detach(), True, "")
            super(RunTrace, self).gradients()
            wrapped.zero_grad()

        if self.measures:
            self.measure_floor(passes)
        first = step * self.config.batch_size
        self.facts = {"batch": [first, self.config.batch_size, self.samples]}
        if self.config.expert == "both":
            self.facts["trains"] = [first + i for i in numbers]

    @contextlib.contextmanager
    def micro_batch(self, pack):
        """Around the forward and backward of a train.Pack."""
        if not self.going or not pack.positions:  # the empty pack holds nothing that counts
            yield
            return
        patch = math.prod(self.model.config.patch_size)
        lengths = [math.prod(x.shape[1:]) // patch for x in pack.targets]
        here = -(-sum(lengths) // self.layout.sp)
        rows = {str(p): row_ids([p], 0, 1)[0] for p in pack.positions}
        rows["samples"] = torch.cat(list(rows.values()))
        times = zip(pack.positions, pack.timesteps, strict=True)  # one for a sample, or for each of its frames
        rows["times"] = torch.cat([row_ids([p], 0, len(t))[0] for p, t in times])
        rows["tokens"] = pack_rows(pack.positions, lengths, self.layout.sp_rank * here, here)
        self.current = pack
        with self.pack(**rows):
            self.inputs(pack)
            yield

    def inputs(self, pack):
        for i, position in enumerate(pack.positions):
            values = {"positions": position, "samples": pack.samples[i], "latents": pack.clean[i], "text": pack.text[i]}
            values |= {"timesteps": pack.timesteps[i], "noise": pack.noise[i], "noised latents": pack.latents[i]}
            values |= {"target": pack.targets[i], "weights": pack.weights[i]}
            values |= {name: getattr(pack, name)[i] for name in ("condition", "image") if getattr(pack, name)}
            for name, value in values.items():
                value = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
                self.add("input", name, value.reshape(1, -1), str(position), self.one, "sp")
            digest = hashlib.blake2b(pack.noise[i].flatten()[:64].to(torch.float32).numpy().tobytes(), digest_size=8)
            self.facts.setdefault("samples", []).append([position, pack.samples[i], digest.hexdigest()])

    def enter_model(self, model, args, kwargs):
        """What reached the model; and from here on, its seam is watched."""
        if not self.going or self.rows is None:
            return None
        latents, timesteps, text = args
        given = {"model.latents": latents, "model.timesteps": timesteps, "model.text": text}
        given |= {f"model.{name}": kwargs[name] for name in ("condition",) if kwargs.get(name) is not None}
        for name, values in given.items():
            for position, value in zip(self.current.positions, values, strict=True):
                value = torch.as_tensor(value)
                self.add("forward", name, value.reshape(1, -1), str(position), self.one, "sp")
        latents = [self.jiggle(x) for x in latents]
        return (latents, timesteps, text), kwargs | {"sp": WatchedSeam(kwargs["sp"], self)}

    def enter_block(self, i: int, x, time, text, image, rope, pack):
        if not self.going or self.rows is None or self.backward_began:
            return None
        self.block = i
        if i > 0:
            return None
        self.facts.setdefault("tokens", []).append([len(x), sum(pack.lengths)])
        self.add("forward", "rotary", torch.cat(rope, -1), "tokens")
        x = self.tap("tokens", x, "tokens")
        return x, time, text, image, rope, pack

    def gradients(self, losses: list[Tensor] = (), loss: float = 0.0):
        """losses: this rank's shares, which are differentiated; loss: what is reported."""
        for share in losses if self.going else ():
            self.scalar("loss", "loss", share, True, "")
        if self.going:
            self.scalar("loss", "reported loss", loss)
        super().gradients()

    def finish(self, norm: float):
        """After the optimizer's step."""
        if self.going:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            due = self.schedule(self.config, self.number)
            self.facts["lr"] = [max(rates, key=lambda rate: abs(rate - due)), due]
            self.updated(**{"gradient norm": norm, "learning rate": rates[0]})
            self.end()


class WatchedSeam:
    """The model's seam, with q, k, v and the attention's output recorded as they pass."""

    def __init__(self, seam, trace: RunTrace):
        self.seam, self.trace, self.shard, self.gather = seam, trace, seam.shard, seam.gather

    @torch.compiler.disable
    def attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        name = f"blocks.{self.trace.block}"
        q, k, v = (self.trace.tap(f"{name}.{what}", x, "tokens") for what, x in (("q", q), ("k", k), ("v", v)))
        return self.trace.tap(f"{name}.attention", self.seam.attention(q, k, v, lengths), "tokens")


class NoTrace:
    """What the loop calls without --trace: nothing."""

    def start(self, *args):
        pass

    gradients = finish = end = start

    def micro_batch(self, pack):
        return contextlib.nullcontext()


def trace_of(config, run: Path, layout, part, dataset, learning_rate, blocks: int):
    """Of a model in training. Rehearsals on many processes are judged by the noise that their reference measured."""
    if not config.trace:
        return NoTrace()
    trace = RunTrace(config, run, layout, part, dataset, learning_rate)
    trace.measures = not blocks or layout.world == 1
    return trace


def content_of(dataset) -> str:
    """A name for the data: the cache's keys follow from the files' contents, the clips' geometry and the encoders, and
    the weights say how often each is drawn."""
    files = [*(f for files in dataset.sample_files for f in files), *dataset.text_files]
    text = f"{dataset.mixture.sizes} {dataset.mixture.counts} " if dataset.mixture.weights else ""
    return hashlib.blake2b((text + " ".join(f.stem for f in files)).encode(), digest_size=8).hexdigest()


def parse_steps(text: str) -> set[int] | None:
    """ "0-3,100" as a set of steps; empty: all (None)."""
    if not text:
        return None
    parts = [part.split("-") for part in text.split(",")]
    if not all(len(p) <= 2 and all(n.isdigit() for n in p) for p in parts):
        raise ValueError(f"--trace-steps {text}: give steps and ranges, as in 0-3,100")
    return {n for p in parts for n in range(int(p[0]), int(p[-1]) + 1)}


# ---------------------------------------------------------------------------------------------------------------------
# Layouts against one process


def cut(model, blocks: int):
    """Keep the first blocks; and a head of zeros, which would keep every gradient from them, gets values."""
    del model.blocks[blocks:]
    head = model.head.head.weight
    if not head.is_meta and not head.any():
        torch.nn.init.normal_(model.head.head.weight, std=0.1)


class Cropped:
    """A dataset whose latents are cut to at most so many frames, rows and columns each: float64 is slow on a GPU."""

    def __init__(self, dataset, frames: int = 5, edge: int = 16):
        self.dataset, self.frames, self.edge = dataset, frames, edge
        self.sample_files, self.text_files = dataset.sample_files, dataset.text_files

    def __len__(self):
        return len(self.dataset)

    def __getattr__(self, name):
        return getattr(self.dataset, name)  # mixture, variants, text, empty_text

    def shape(self, index: int, variant: int):
        c, f, h, w = self.dataset.shape(index, variant)
        return c, min(f, self.frames), min(h, self.edge), min(w, self.edge)

    def sample(self, index: int, variant: int) -> dict[str, Tensor]:
        _, f, h, w = self.shape(index, variant)
        tensors = self.dataset.sample(index, variant)
        large = tensors.keys() & {"latents", "condition"}
        return tensors | {name: tensors[name][:, :f, :h, :w].contiguous() for name in large}


class MadeUp:
    """Random latents of sizes that nothing divides, images among them: 45, 20, 9, 5 and 14 tokens, with prompts."""

    SHAPES = ((3, 6, 10), (2, 10, 4), (1, 6, 6), (1, 2, 10), (1, 4, 14))

    def __init__(self, wan, shapes=SHAPES):
        pt, g = wan.patch_size[0], torch.Generator().manual_seed(0)
        self.items = []
        for f, h, w in shapes:
            item = {"latents": torch.randn(wan.out_dim, f * pt, h, w, generator=g)}
            if wan.in_dim > wan.out_dim:
                item["condition"] = torch.randn(wan.in_dim - wan.out_dim, f * pt, h, w, generator=g)
            if wan.reads_clip:
                item["image"] = torch.randn(1 + (wan.model_type == "flf2v"), 257, wan.clip_dim, generator=g)
            self.items.append(item)
        self.texts = [torch.randn(2 + i % 8, wan.text_dim, generator=g) for i in range(len(self.items))]
        self.empty_text = torch.randn(1, wan.text_dim, generator=g)
        self.sample_files, self.text_files = [[Path(f"made up {shapes}")]], []
        self.mixture = Mixture((len(self.items),))

    def __len__(self):
        return len(self.items)

    def shape(self, index: int, variant: int):
        return self.items[index]["latents"].shape

    def variants(self, index: int) -> int:
        return 1

    def sample(self, index: int, variant: int) -> dict[str, Tensor]:
        return dict(self.items[index])

    def text(self, index: int) -> Tensor:
        return self.texts[index]


def rehearse(fit, config, layout, dataset, layers: int, stops=()):
    """Run config traced on a layout, which may be that of one process; stopped and resumed after each step in stops."""
    layout.on_rank_0(partial(shutil.rmtree, ignore_errors=True), Path("runs") / config.run)
    for i, steps in enumerate((*stops, config.steps)):
        part = dataclasses.replace(config, resume="latest" if i else "", steps=steps, save_every=steps if stops else 0)
        fit(part, layout, dataset, blocks=layers)


def verify_layout(fit, config, layout, dataset, layers: int = 2):
    """Raise ValueError with diff's verdict unless this layout computes what one process does: two blocks of the run's
    model, its first samples (large ones cropped), forward, backward and one update in float64."""
    if layout.world == 1:
        return
    few = max(4, 2 * layout.dp)  # of four, some are for each of two experts
    small = dataclasses.replace(
        config,
        steps=1,
        precision="fp64",
        batch_size=few if config.expert == "both" else min(config.batch_size, few),
        trace=True,
        trace_steps="",
        verify_layout=False,
        sample=False,
        resume="",
        save_every=0,
        compile=False,
        cost="flops",
        ema=0.0,
    )
    names = [f"{config.run}/verify/{name}" for name in ("one-process", "this-layout")]
    one = dataclasses.replace(small, run=names[0], pack_tokens=0, shard="none", recompute="none")
    layout.on_rank_0(lambda: rehearse(fit, one, parallel.Layout(device=layout.device), Cropped(dataset), layers))
    rehearse(fit, dataclasses.replace(small, run=names[1]), layout, Cropped(dataset), layers)
    for expert in batch.experts_of(config):
        pair, which = [Path("runs") / name / expert for name in names], f", {expert}-noise expert" if expert else ""
        if not layout.on_rank_0(lambda pair=pair: any([*path.glob("trace/step-*.json")] for path in pair)):
            if layout.rank == 0:
                print(f"layout not verified{which}: it has no sample in --noise-range", flush=True)
            continue
        verdict = layout.on_rank_0(diff, *pair)
        if verdict.code:
            raise ValueError(f"--verify-layout: this layout does not compute what one process does. {verdict.text}")
        if layout.rank == 0:
            worst = ", ".join(f"{phase} {verdict.worst[phase]:.0e}" for phase in ("loss", "gradient", "parameter"))
            print(f"layout verified against one process in float64{which}: {worst}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The layout matrix


@dataclass(frozen=True)
class Check:
    model: str = "demo"  # preset, see CONFIGS in model.py
    layers: int = 2  # blocks that are kept of it
    checkpoint: str = "scratch"  # its weights: a file, a folder, or "scratch"
    low_checkpoint: str = ""  # of the low-noise expert, where --checkpoint is the high-noise one's
    data: tuple[str, ...] = ()  # folders or manifests; empty: made-up latents of sizes that nothing divides
    allow_drop: bool = False  # go on without the samples that cannot be used
    vae: str = ""  # for --data: weights of the VAE; empty: the demo's
    text_encoder: str = ""  # for --data: weights of the umT5 encoder; empty: the demo's
    tokenizer: str = ""  # for --data: SentencePiece file; empty: the demo's
    image_encoder: str = ""  # for --data: weights of the CLIP vision tower; empty: the demo's
    cache: str = "cache"  # folder of encoded latents and text
    precision: Literal["fp64", "fp32", "bf16"] = "fp64"  # the others have a noise floor to be judged by
    steps: int = 4  # optimizer steps, over more than one epoch of the made-up data
    resume_after: int = 2  # every layout is stopped and resumed after this step; 0: never
    batch_size: int = 4  # samples per step
    seed: int = 0  # of weights, noise and order
    name: str = "check"  # traces stay in runs/NAME


def check(options: Check) -> int:
    """Train every layout of this world for a few steps and compare it with one process; 0 if all are equal, else 1."""
    import train  # to run it whole; nothing else in the project imports the trainer

    rank, world = parallel.world_from_torchrun()
    heads = CONFIGS[options.model].num_heads
    shared = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("layers", "resume_after", "name")}
    if not options.data:  # then these files are not read
        shared |= dict.fromkeys(("vae", "text_encoder", "tokenizer"), "scratch")
    options_given = dict(
        **shared,
        run=options.name,
        warmup_steps=0,
        lr_schedule="constant",
        max_grad_norm=0.1,
        caption_dropout=0.3,
        sample=False,
        trace=True,
    )
    base = train.settle(train.Config(**options_given))
    everyone = parallel.start()
    dataset = MadeUp(CONFIGS[options.model])
    if options.data:
        paths = train.check(base)
        components = train.sample.load_components(base, paths, everyone, Memory(device=everyone.device))
        whole = train.encode.open_dataset(base, paths, components, everyone)
        train.encode.fill(whole, everyone)
        dataset = Cropped(whole)
    compare = Comparison(train.fit, base, dataset, options.layers, everyone)
    compare.reference()
    longest = batch.longest(dataset, CONFIGS[options.model])
    stops = (options.resume_after,) if 0 < options.resume_after < options.steps else ()
    for case in cases_of(world, heads, longest):
        compare.layout(case, stops)
    parallel.stop()
    return max(verdict.code for verdict in compare.verdicts) if rank == 0 else 0


def cases_of(world: int, heads: int, longest: int) -> list[dict]:
    """Options of each layout of this world under each sharding; packs and recomputation vary over the grid."""
    splits = [
        (u, r) for u in range(1, world + 1) for r in range(1, world + 1) if world % (u * r) == 0 and heads % u == 0
    ]
    cases = []
    for i, (ulysses, ring) in enumerate(splits):
        for j, shard in enumerate(("none", "grads", "full") if world > 1 else ("none",)):
            limit = -(-longest // (ulysses * ring)) if (i + j) % 2 else 0
            recompute = "block" if (i + j) % 3 == 1 else "none"
            cases.append(dict(ulysses=ulysses, ring=ring, shard=shard, pack_tokens=limit, recompute=recompute))
    return cases


class Comparison:
    """Runs cases against one reference, which rank 0 computes alone, and prints a line for each."""

    def __init__(self, fit, base, dataset, layers: int, everyone: parallel.Layout):
        self.fit, self.base, self.dataset, self.layers, self.everyone = fit, base, dataset, layers, everyone
        self.verdicts = []

    def rehearse(self, run: str, layout, stops=(), **changes):
        config = dataclasses.replace(self.base, run=f"{self.base.run}/{run}", **changes)
        rehearse(self.fit, config, layout, self.dataset, self.layers, stops)

    def reference(self):
        alone = parallel.Layout(device=self.everyone.device)
        self.everyone.on_rank_0(partial(self.rehearse, "one-process", alone))

    def layout(self, case: dict, stops) -> None:
        layout = parallel.start(case["ulysses"], case["ring"])
        name = f"dp{layout.dp}-u{case['ulysses']}-r{case['ring']}-{case['shard']}"
        name += "-packs" * bool(case["pack_tokens"]) + "-recompute" * (case["recompute"] == "block")
        self.rehearse(name, layout, stops, **case)
        folder = Path("runs") / self.base.run
        for expert in batch.experts_of(self.base) if self.everyone.rank == 0 else ():
            verdict = diff(folder / "one-process" / expert, folder / name / expert)
            self.verdicts.append(verdict)
            if verdict.code:
                print(f"{name:36} {expert:4} {verdict}", flush=True)
            else:
                errors = "  ".join(f"{p} {verdict.worst[p]:.1e}" for p in ("loss", "gradient", "parameter"))
                print(f"{name:36} {expert:4} equal       {errors}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diff:
    plot: str = ""  # write a page (.html, or a .png without words) with both loss curves and a map of the differences


def command(argv: list[str]) -> int:
    if argv[:1] == ["check"]:
        return check(parse(Check, argv[1:], __doc__))
    if argv[:1] == ["diff"] and len(argv) > 2:
        options = parse(Diff, argv[3:], __doc__)
        verdict = diff(argv[1], argv[2], everything=bool(options.plot))
        if options.plot:
            write_page(Path(options.plot), verdict, argv[1], argv[2])
        print(verdict)
        return verdict.code
    raise ValueError(
        "usage: parity.py diff RUN_A RUN_B [--plot FILE], or torchrun ... parity.py check; --help after these"
    )


if __name__ == "__main__":
    try:
        sys.exit(command(sys.argv[1:]))
    except (ValueError, RuntimeError, OSError) as error:
        exit_with("parity.py", error, parallel.first_on_this_machine())
