"""Train a Wan video diffusion model.

    torchrun --nproc-per-node 2 train.py --sp 2                      the demo, on a laptop
    torchrun --nproc-per-node 8 train.py --model wan2.1-t2v-14b --sp 4 --shard full --precision bf16 \\
        --checkpoint W --vae V --text-encoder T --tokenizer S --data videos/ --height 480 --width 832 --frames 81

A run is (model, data, seed, global batch). How many processes compute it, how they are laid out, how a batch is cut
into packs and where a run was stopped and resumed change its loss curve by rounding only. `main` is the whole loop.
"""

import dataclasses
import json
import math
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

import batch
import cache
import demo
import flow
import manifests
import parallel
import parity
import resume
import sample
import weights
from clips import ClipSpec
from model import CONFIGS, WanDiT
from options import exit_with, parse


@dataclass(frozen=True)
class Config:
    # What to train
    model: str = "demo"  # preset, see CONFIGS in model.py
    checkpoint: str = ""  # weights to start from: a file, a folder, or "scratch"; empty: the demo's
    vae: str = ""  # weights of the VAE; empty: the demo's
    text_encoder: str = ""  # weights of the umT5 encoder; empty: the demo's
    tokenizer: str = ""  # SentencePiece file; empty: the demo's
    # On what
    data: str = ""  # folder or manifest (json, jsonl, csv); empty: the demo set, written on first use
    cache: str = "cache"  # folder of encoded latents and text, shared by all ranks
    height: int = 0  # pixels; with --width. Files are scaled to cover the size and cut at the centre
    width: int = 0  # pixels
    max_area: int = 0  # instead of height and width: keep each file's aspect, at most so many pixels
    frames: int = 17  # at most so many frames of a video, 4n + 1
    fps: int = 16  # videos are brought to this rate
    clips: int = 4  # at most so many clips of one video
    # How long, and from which random numbers
    steps: int = 400  # optimizer steps
    batch_size: int = 32  # samples per optimizer step, over the whole job
    pack_tokens: int = 0  # most tokens a rank takes in one pack (micro-batch); 0: its whole share of the batch in one
    seed: int = 0  # of the order of samples, their clips, noise and timesteps, and of weights made from scratch
    # Optimizer
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd (without momentum) shows errors that AdamW hides
    lr: float = 5e-4  # peak learning rate
    warmup_steps: int = 20  # linear warm-up
    lr_schedule: Literal["constant", "cosine", "linear"] = "cosine"  # after the warm-up; the last two end at 0
    weight_decay: float = 0.01  # decoupled
    betas: tuple[float, float] = (0.9, 0.99)  # of AdamW
    eps: float = 1e-8  # of AdamW
    max_grad_norm: float = 1.0  # clip the gradient's global norm; 0: never
    ema: float = 0.99  # decay of a moving average of the weights, which the samples are then made with; 0: none
    # Processes
    sp: int = 0  # sequence-parallel processes per sample; 0: what --ulysses and --ring say, or 1
    ulysses: int = 0  # of which by all-to-all over heads; 0: the largest number that divides sp and the heads
    ring: int = 0  # of which by a ring of keys and values; 0: the rest
    shard: Literal["none", "grads", "full"] = "none"  # none: DDP; grads, full: FSDP2 (ZeRO-2, ZeRO-3)
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"  # bf16: float32 weights, bfloat16 pass
    recompute: Literal["none", "block"] = "none"  # block: save a block's input only, and run it again in the backward
    compile: bool = False  # torch.compile the blocks
    # Flow matching
    shift: float = 3.0  # of the training schedule towards noise
    timestep_sampling: Literal["uniform", "logit-normal"] = "uniform"  # of sigma before the shift
    noise_range: tuple[float, float] = (0.0, 1.0)  # train on sigmas in this range only, e.g. 0.875 1 for an expert
    loss_weight: Literal["none", "bell"] = "none"  # bell: the reference trainer's weight, small at both ends of sigma
    caption_dropout: float = 0.1  # share of samples that train on the empty prompt, for guidance
    # What is kept
    run: str = field(default="demo", metadata={"alias": "name"})  # everything goes to runs/RUN. Under torchrun spell it
    # --name: in Python 3.11 its own parser takes a --run for its --run-path and stops
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep: int = 2  # so many newest checkpoints stay; 0: all
    resume: str = ""  # "latest", or a checkpoint folder: go on from there
    sample: bool = True  # write sample videos at the end
    prompts: str = ""  # a file with one prompt per line to sample; empty: the demo's held-out prompts
    # Proof
    verify_layout: bool | None = None  # before the first step, compare this layout with one process on two blocks and
    # the first samples, in float64, and refuse one that differs; default: only on the demo's data
    trace: bool = False  # record sketches of every tensor in runs/RUN/trace, for parity.py diff
    trace_steps: str = ""  # of these steps only, as in 0-3,100


MASTER = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}  # dtype of weights and optimizer


def main(config: Config, observe=None) -> WanDiT:
    """Train, and sample what was learned; returns the model. For observe see `fit`."""
    # -- Who are we. Everything that can be wrong with the options is found before anything is done.
    paths, wan = check(config), CONFIGS[config.model]
    _, world = parallel.world_from_torchrun()
    layout = parallel.start(*parallel.split_sp(world, wan.num_heads, config.sp, config.ulysses, config.ring))

    # -- Data: files become latents and text states, each encoded once per job.
    components = sample.load_components(config, paths, layout.device)
    dataset = load_dataset(config, paths, components, layout)
    components.release_text_encoder()

    # -- Training, if this layout computes what one process does.
    if config.verify_layout or (config.verify_layout is None and not config.data):
        parity.verify_layout(fit, config, layout, dataset)
    model, ema = fit(config, layout, dataset, observe)

    # -- A look at what was learned.
    if config.sample and (config.prompts or config.model == "demo"):
        for name, parameter in model.named_parameters():
            if ema:
                parameter.data.copy_(ema[name])
        how, prompts = sample.SAMPLING[config.model], sample.prompts_of(SamplePrompts(config.model, config.prompts))
        folder, dtype = Path("runs") / config.run / "samples", sample.DTYPES[config.precision]
        sheet = sample.sample_videos(model.eval(), components, prompts, how, config.seed, folder, layout, dtype)
        if layout.rank == 0:
            print(f"{len(prompts)} videos in {folder}, all on one page in {sheet}")
    return model


def fit(config: Config, layout, dataset, observe=None, blocks: int = 0) -> tuple[WanDiT, dict[str, Tensor]]:
    """The training loop; returns the model and the moving average of its weights, by name (empty without --ema).

    `observe(step, loss, model)` is called with each step's gradients in place, before they are clipped, loss being the
    global one: tests look through it. blocks: keep so many of the model's blocks, a rehearsal of which only the trace
    stays (parity.py); 0: all.
    """
    run, master, dtype = Path("runs") / config.run, MASTER[config.precision], sample.DTYPES[config.precision]

    # -- Model and optimizer: the same weights on every rank, then split as --shard says.
    torch.manual_seed(config.seed)
    model = WanDiT(CONFIGS[config.model])
    start = sample.paths_for(config)["checkpoint"]
    if start != "scratch":
        weights.load_weights(model, start, config.model)
    if blocks:
        parity.cut(model, blocks)
    model = model.to(layout.device, master).train()
    wrapped = parallel.parallelize(model, layout, config.shard, config.precision, config.recompute, config.compile)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, config)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()} if config.ema else {}

    first = 0
    if config.resume:
        first = resume.load(resume.find(run, config.resume), model, optimizer, ema, layout)
    layout.on_rank_0(open_run, run, config, layout, first)
    trace = parity.trace_of(config, run, layout, wrapped, optimizer, dataset, learning_rate, blocks)

    # -- The loop.
    clock = Stopwatch(layout.device)
    ahead = ThreadPoolExecutor(1)  # reads and noises the next step's samples meanwhile
    coming = ahead.submit(batch.step_packs, config, dataset, layout, first)
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=bool(layout.rank or blocks))
    for step in bar:
        clock.start()
        packs, tokens = coming.result()
        coming = ahead.submit(batch.step_packs, config, dataset, layout, step + 1)
        clock.lap("data")
        trace.start(step, packs, wrapped, lambda pack: batch.pack_loss(wrapped, pack, layout, dtype))

        losses = []
        for i, pack in enumerate(packs):
            with parallel.synchronize(wrapped, last=i == len(packs) - 1), trace.micro_batch(pack):
                loss = batch.pack_loss(wrapped, pack, layout, dtype)
                clock.lap("forward")
                loss.backward()
                clock.lap("backward")
            losses.append(loss.detach())
        loss = layout.sum(torch.stack(losses).sum()).item()  # each rank's is its share; the shares add up to the loss
        trace.gradients(losses, loss)
        if observe is not None:
            observe(step, loss, model)
        norm = parallel.clip_gradients(parameters, config.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            trace.end()
            raise FloatingPointError(describe_non_finite(step, loss, norm, losses, packs, config, layout))

        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        trace.finish(norm)
        update_average(ema, model, config.ema)
        clock.lap("optimizer")

        seconds = clock.read()
        if layout.rank == 0:
            record = {"step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm, "seconds": seconds}
            record |= {"tokens_per_second": tokens / sum(seconds.values()), "memory": peak_memory(layout.device)}
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
            bar.set_postfix_str(f"loss {loss:.4f} lr {lr:.1e} norm {norm:.2f} " + spell(seconds), refresh=False)
        if (step + 1 == config.steps and not blocks) or (config.save_every and (step + 1) % config.save_every == 0):
            record = describe_run(config, layout)
            resume.save(run, step + 1, model, optimizer, ema, record, layout, config.keep)
    coming.cancel()
    ahead.shutdown()
    return model, ema


# ---------------------------------------------------------------------------------------------------------------------
# One step


def learning_rate(config: Config, step: int) -> float:
    """Of step 0, 1, ...: warm-up from lr / warmup_steps to lr, then the schedule, which ends a step after the last."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.lr * falling[config.lr_schedule]


def update_average(ema: dict[str, Tensor], model, decay: float):
    for name, parameter in model.named_parameters():
        if ema:
            ema[name].lerp_(parameter.detach(), 1 - decay)


def describe_non_finite(step, loss, norm, losses, packs, config, layout) -> str:
    """Names the step and, where the loss itself is at fault, the positions of the packs that gave it."""
    mine = [p for x, pack in zip(losses, packs, strict=True) if not torch.isfinite(x) for p in pack.positions]
    everyones = [mine]
    if layout.world > 1:
        everyones = [None] * layout.world
        torch.distributed.all_gather_object(everyones, mine)
    positions = sorted({p for part in everyones for p in part})
    if not positions:
        positions = list(range(step * config.batch_size, (step + 1) * config.batch_size))
    listed = ", ".join(map(str, positions[:16])) + (", ..." if len(positions) > 16 else "")
    return (
        f"step {step + 1}: loss {loss}, gradient norm {norm}; the step was not applied. Positions: {listed}. "
        "Lower --lr or --max-grad-norm, or look at these samples"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Before and around the loop


def check(config: Config) -> dict[str, str]:
    """Refuse what cannot work, in one line, before any process group or file; returns the paths of the weights."""
    paths = sample.paths_for(config)
    wan = CONFIGS[config.model]
    if wan.in_dim != wan.out_dim or wan.model_type != "t2v":
        raise ValueError(f"--model {config.model} reads an image condition, which this trainer does not make yet")
    if config.steps < 1 or config.batch_size < 1 or config.pack_tokens < 0:
        raise ValueError("--steps and --batch-size must be at least 1, --pack-tokens at least 0")
    if config.data and not Path(config.data).expanduser().exists():
        raise ValueError(f"--data {config.data}: no such file or folder")
    if not 0 <= config.ema < 1 or not 0 <= config.caption_dropout <= 1:
        raise ValueError(f"--ema {config.ema} must be in [0, 1), --caption-dropout {config.caption_dropout} in [0, 1]")
    parity.parse_steps(config.trace_steps)
    if config.resume:
        resume.find(Path("runs") / config.run, config.resume)
    flow.training_sigmas(torch.zeros(1), config.shift, config.timestep_sampling, *config.noise_range)
    if config.sample and config.prompts:
        sample.prompts_of(SamplePrompts(config.model, config.prompts))
        if config.model not in sample.SAMPLING:
            raise ValueError(f"--prompts: sampling --model {config.model} needs more than text; add --no-sample")
    clip_spec(config)
    return paths


@dataclass(frozen=True)
class SamplePrompts:
    """The part of sample.py's options that says which prompts."""

    model: str
    prompts: str
    prompt: tuple[str, ...] = ()


def clip_spec(config: Config) -> ClipSpec:
    height, width = config.height, config.width
    if not (height or width or config.max_area):
        default = sample.SAMPLING.get(config.model, sample.Sampling())
        height, width = default.height, default.width
    return ClipSpec(height, width, config.max_area, config.frames, config.fps, config.clips)


def load_dataset(config: Config, paths: dict[str, str], components, layout) -> cache.LatentDataset:
    """Look into every file (rank 0, once), then encode what the cache lacks (all ranks, each its part)."""
    folder = config.data or layout.on_rank_0(demo.write_demo_set, Path("demo_data"))
    items, spec = manifests.read_items(folder), clip_spec(config)
    survey = layout.on_rank_0(cache.survey, items, spec)
    text_files = [*weights.weight_files(Path(paths["text_encoder"]).expanduser()), Path(paths["tokenizer"])]
    text_key = " ".join(layout.on_rank_0(cache.digests, text_files))
    dataset = cache.LatentDataset(items, spec, survey, components.vae, components.encode_text, text_key, config.cache)
    dataset.fill(layout.rank, layout.world, layout.barrier)
    return dataset


def make_optimizer(parameters, config: Config) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


def open_run(run: Path, config: Config, layout, first: int):
    """Write config.json; keep of an older metrics.jsonl the steps that this run goes on from."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(describe_run(config, layout), indent=2))
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    metrics.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first))


def describe_run(config: Config, layout) -> dict:
    git = None
    if shutil.which("git"):
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "options": dataclasses.asdict(config),
        "layout": {name: getattr(layout, name) for name in ("world", "dp", "sp", "ulysses", "ring")},
        "device": str(layout.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "git": git and git.stdout.strip() or "not a git checkout",
    }


class Stopwatch:
    """Seconds per phase of a step. On a GPU by events, so that nothing waits for the device before the step's end."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self):
        self.marks = [("", self.mark())]

    def lap(self, phase: str):
        """What was done since the last mark was `phase`."""
        self.marks.append((phase, self.mark()))

    def read(self) -> dict[str, float]:
        if self.cuda:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] += before.elapsed_time(after) / 1000 if self.cuda else after - before
        return seconds


def peak_memory(device: torch.device) -> float:
    """GiB: the device's peak so far, or this process's resident peak on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on Windows, where there is no such figure

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def spell(seconds: dict[str, float]) -> str:
    return " ".join(f"{phase} {value:.2f}s" for phase, value in seconds.items())


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:], __doc__))
        parallel.stop()
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        exit_with("train.py", error, parallel.world_from_torchrun()[0])
