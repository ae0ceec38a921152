"""Train a Wan video diffusion model.

    torchrun --nproc-per-node 2 train.py --sp 2                      the demo, on a laptop
    torchrun --nproc-per-node 8 train.py --model wan2.1-t2v-14b --sp 4 --shard full --precision bf16 \\
        --checkpoint W --vae V --text-encoder T --tokenizer S --data videos/ --height 480 --width 832 --frames 81

A run is (model, data, seed, global batch). How many processes compute it, how they are laid out, how a batch is cut
into packs and where a run was stopped and resumed change its loss curve by rounding only. `fit` is the whole loop.
"""

import dataclasses
import math
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

import batch
import cache
import encode
import flow
import lora
import parallel
import parity
import prompts
import resume
import sample
import stream
import survey
import watch
import weights
from lora_formats import read_lora
from memory import Memory
from model import CONFIGS, WanDiT
from options import exit_with, parse
from presets import PRESETS


@dataclass(frozen=True)
class Config(encode.EncodeOptions):  # which model, on which data, encoded with what: see there and in survey.py
    # The model's weights
    checkpoint: str = ""  # weights to start from: a file, a folder, or "scratch"; empty: the demo's, or scratch
    low_checkpoint: str = ""  # of the low-noise expert, where --checkpoint is the high-noise one's
    expert: Literal["", "high", "low", "both"] = ""  # of Wan 2.2's two: one, on its own range of noise, or both, each
    # sample going to the one whose noise it drew; empty: both. It takes both to make sample videos
    trainable: str = ""  # regular expression: train the parameters whose names it finds, freeze the others
    lora_rank: int = 0  # train low-rank adapters of this rank instead of weights; 0: no adapters
    lora_alpha: float = 0.0  # an adapter counts alpha / rank times; 0: alpha is the rank
    lora_targets: str = lora.TARGETS  # the blocks' linear layers whose names end so, separated by commas
    lora: str = ""  # adapters to go on from: a LoRA file of the same rank, alpha and targets
    lora_low: str = ""  # the low-noise expert's, where --lora is the high-noise one's
    lora_dropout: float = 0.0  # share of an adapter's inner numbers that a token trains without
    # How long, and from which random numbers
    steps: int = 400  # optimizer steps
    batch_size: int = 32  # samples per optimizer step, over the whole job
    pack_tokens: int = 0  # most tokens a rank takes in one pack (micro-batch); 0: its whole share of the batch in one
    cost: Literal["flops", "fit"] = "flops"  # by which a step is divided evenly over ranks: flops: counted operations;
    # fit: what passes of one block take on rank 0, timed at the start and kept with the run
    seed: int = 0  # of the order of samples, their clips, noise and timesteps, and of weights made from scratch
    # Optimizer
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd (without momentum) shows errors that AdamW hides
    lr: float = 5e-4  # peak learning rate
    warmup_steps: int = 20  # linear warm-up
    lr_schedule: Literal["constant", "cosine", "linear"] = "cosine"  # after the warm-up; the last two end at 0
    weight_decay: float = 0.01  # decoupled
    betas: tuple[float, float] = (0.9, 0.99)  # of AdamW
    eps: float = 1e-8  # of AdamW
    max_grad_norm: float = 1.0  # clip the gradient's global norm, each expert's on its own; 0: never
    ema: float = 0.99  # decay of a moving average of the weights, which the samples are then made with; 0: none
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient that is no number: end the run, or leave the
    # step out and go on. Either way its samples are named
    # Processes
    sp: int = 0  # sequence-parallel processes per sample; 0: what --ulysses and --ring say, or 1
    ulysses: int = 0  # of which by all-to-all over heads; 0: the largest number that divides sp and the heads
    ring: int = 0  # of which by a ring of keys and values; 0: the rest
    shard: Literal["none", "grads", "full"] = "none"  # none: DDP; grads, full: FSDP2 (ZeRO-2, ZeRO-3)
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"  # bf16: float32 weights, bfloat16 pass
    recompute: Literal["none", "block"] = "none"  # block: save a block's input only, and run it again in the backward
    compile: bool = False  # torch.compile the blocks
    # Flow matching
    shift: float = 0.0  # of the training schedule towards noise; 0: the one that the model is sampled with
    timestep_sampling: Literal["uniform", "logit-normal"] = "uniform"  # of sigma before the shift
    noise_range: tuple[float, float] = (0.0, 1.0)  # train on sigmas in this range only
    loss_weight: Literal["none", "bell"] = "none"  # bell: the reference trainer's weight, small at both ends of sigma
    caption_dropout: float = 0.1  # share of samples that train on the empty prompt, for guidance
    image_condition: float = 1.0  # share of samples that an image-to-video model is given frames of; the others train
    # as text to video
    # What is kept
    run: str = field(default="demo", metadata={"alias": "name"})  # everything goes to runs/RUN. Under torchrun spell it
    # --name: in Python 3.11 its own parser takes a --run for its --run-path and stops
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep: int = 2  # so many newest checkpoints stay; 0: all
    resume: str = ""  # "latest", or a checkpoint folder: go on from there
    allow_change: bool = False  # go on although options, data or start weights changed that change the loss curve
    sample: bool = True  # write sample videos at the end, and with each validation
    prompts: str = ""  # a file of what to sample, see sample.py; empty: the demo's held-out prompts
    validation: str = ""  # held-out data, as --data: its loss, with fixed noise, goes into the metrics
    validate_every: str = "0"  # steps, or epochs as in 2ep, between validations; 0: only at the end
    validation_sigmas: int = 4  # at so many places of the schedule each held-out item is tried
    # Proof
    verify_layout: bool | None = None  # before the first step, compare this layout with one process on two blocks and
    # the first samples, in float64, and refuse one that differs; default: only on the demo's data
    trace: bool = False  # record sketches of every tensor in runs/RUN/trace, for parity.py diff
    trace_steps: str = ""  # of these steps only, as in 0-3,100


MASTER = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}  # dtype of weights and optimizer


def main(config: Config, observe=None) -> dict[str, "Part"]:
    """Train, and sample what was learned; returns what `fit` does. For observe see there."""
    # -- Who are we. Everything that can be wrong with the options is found before anything is done.
    config = settle(config)
    paths = check(config)
    _, world = parallel.world_from_torchrun()
    heads = CONFIGS[config.model].num_heads
    layout = parallel.start(*parallel.split_sp(world, heads, config.sp, config.ulysses, config.ring))
    layout.check_shared(Path("runs"), "runs/")
    layout.on_rank_0(resume.claim, Path("runs") / config.run)

    # -- Data: every file is looked into before any is encoded; then they become latents and text states, once per job.
    components = sample.load_components(config, paths, layout, Memory(device=layout.device))
    dataset = encode.open_dataset(config, paths, components, layout)
    held_out = encode.open_dataset(config, paths, components, layout, config.validation) if config.validation else None
    datasets = [dataset, held_out] if held_out else [dataset]
    for x in datasets:
        stream.check_fits(batch.longest(x, CONFIGS[config.model]), config.pack_tokens, layout.sp)
    for x in datasets:
        encode.fill(x, layout)
    components.release_text_encoder()

    # -- Training, if this layout computes what one process does.
    if config.verify_layout or (config.verify_layout is None and not config.data):
        parity.verify_layout(fit, config, layout, dataset)
    run = Path("runs") / config.run
    look = watch.Validation(config, len(dataset), held_out, components, layout, run)
    layout.on_rank_0(watch.first_batch, config, dataset, components.decode, run)
    return fit(config, layout, dataset, observe, look)


@dataclass
class Part:
    """A model in training, with all that belongs to it: the whole of a run, or one of its two experts."""

    model: WanDiT
    wrapped: torch.nn.Module  # what the training step calls
    parameters: list[torch.nn.Parameter]  # the trainable ones
    optimizer: torch.optim.Optimizer
    ema: dict[str, Tensor]  # moving average of the trainable weights by name; empty without --ema
    trace: object = None


def fit(config: Config, layout, dataset, observe=None, look=None, blocks: int = 0) -> dict[str, Part]:
    """The training loop; returns {"": Part}, or the experts' by name.

    `observe(step, loss, parts)` is called with each step's gradients in place, before they are clipped, loss being the
    global one: tests look through it. `look(step, parts)` is called after each step, and what it returns becomes a line
    of its own in metrics.jsonl: validation. blocks: keep so many of each model's blocks, a rehearsal of which only the
    trace stays (parity.py); 0: all.
    """
    # -- Models, and where they were when the run was stopped.
    run = Path("runs") / config.run
    cost = cost_of(config, run, dataset, layout)
    parts = {expert: build(config, expert, layout, blocks) for expert in batch.experts_of(config)}
    warm_up(config, parts, layout, dataset)
    about = describe_run(config, layout) | {"cost": cost and dataclasses.asdict(cost)}
    about["content"] = {} if blocks else content(config, dataset, layout)
    first = resume.begin(run, parts, about, layout)
    log = layout.on_rank_0(watch.Log, run, first)
    for expert, part in parts.items():
        part.trace = parity.trace_of(config, run / expert, layout, part, dataset, learning_rate, blocks)

    # -- Step by step.
    clock = watch.Stopwatch(layout.device)
    ahead = ThreadPoolExecutor(1)  # reads and noises the next step's samples meanwhile
    coming = ahead.submit(batch.step_packs, config, dataset, layout, first, cost)
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=bool(layout.rank or blocks))
    with resume.Keeper(run, parts, layout, config.keep) as keeper:
        for step in bar:
            clock.start()
            now = coming.result()
            coming = ahead.submit(batch.step_packs, config, dataset, layout, step + 1, cost)
            clock.lap("data")
            record = train_step(step, now, parts, config, layout, keeper, clock, observe)
            if layout.rank == 0:  # before the save: a kill between the two must not leave a saved step without its line
                log.write(record | keeper.news())
                bar.set_postfix_str(watch.spell(record), refresh=False)
            last = (keeper.stopping or step + 1 == config.steps) and not blocks
            if last or (config.save_every and (step + 1) % config.save_every == 0):
                keeper.save(step + 1, about)
            if keeper.stopping:
                break
            seen = look(step + 1, parts) if look else {}
            if seen and layout.rank == 0:
                log.write({"step": step + 1} | seen)
    coming.cancel()
    ahead.shutdown()
    return parts


def train_step(step: int, now: batch.Step, parts, config: Config, layout, keeper, clock, observe) -> dict:
    """Gradients of a step's packs, and the update; returns what metrics.jsonl says of it."""
    # -- Gradients: of each model that has samples in this step, pack by pack.
    losses, dtype = {expert: [] for expert in now.packs}, sample.DTYPES[config.precision]
    for expert, packs in now.packs.items():
        part = parts[expert]

        def loss_of(pack: batch.Pack, wrapped=part.wrapped) -> Tensor:
            return batch.pack_loss(wrapped, pack, layout, dtype)

        part.trace.start(step, packs, now.experts[expert], part.wrapped, loss_of)
        for i, pack in enumerate(packs):
            with parallel.synchronize(part.wrapped, last=i == len(packs) - 1), part.trace.micro_batch(pack):
                loss = loss_of(pack)
                clock.lap("forward")
                loss.backward()
                clock.lap("backward")
            losses[expert].append(loss.detach())

    # -- The loss: each rank's is its share; the shares add up, each model's and, for the record, each sample's.
    totals = torch.zeros(len(losses) + config.batch_size, dtype=torch.float64, device=layout.device)
    for i, expert in enumerate(losses):
        totals[i] = torch.stack(losses[expert]).sum()
        for pack in now.packs[expert]:
            watch.gather_shares(totals[len(losses) :], pack, lambda position: position % config.batch_size)
    totals = keeper.agree(totals)
    loss = sum(totals[: len(losses)])
    for expert, total in zip(losses, totals, strict=False):
        parts[expert].trace.gradients(losses[expert], total)
    if observe is not None:
        observe(step, loss, parts)
    norms = {
        expert: parallel.clip_gradients(parts[expert].parameters, config.max_grad_norm).item() for expert in losses
    }

    # -- The update, of the same models; one without samples stays as it is, on every rank.
    lr, fault = learning_rate(config, step), ""
    if not all(map(math.isfinite, (loss, *norms.values()))):
        fault = describe_non_finite(step, loss, norms, losses, now.packs, config, layout)
        if config.on_nonfinite == "stop":
            for part in parts.values():
                part.trace.end()
            raise FloatingPointError(fault)
        if layout.rank == 0:
            tqdm.write(fault, sys.stderr)
    for expert, norm in norms.items():
        if fault:
            parts[expert].optimizer.zero_grad()
        else:
            update(parts[expert], lr, config.ema)
        parts[expert].trace.finish(norm)
    clock.lap("optimizer")
    record = record_of(step, loss, norms, lr, now, clock.read(), layout)
    return record | watch.losses_of(now, totals[len(losses) :], config) | ({"skipped": fault} if fault else {})


def warm_up(config: Config, parts: dict[str, Part], layout, dataset):
    """One backward of a blank pack. DDP moves gradients to other buckets after its first backward, and the order in
    which ranks are added up depends on the place in a bucket: so a resumed run's first step adds up like any other."""
    for part in parts.values() if layout.world > 1 and config.shard == "none" else ():
        blank = batch.empty_pack(CONFIGS[config.model], dataset)
        batch.pack_loss(part.wrapped, blank, layout, sample.DTYPES[config.precision]).backward()
        part.optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------------------------------
# One model


def build(config: Config, expert: str, layout, blocks: int) -> Part:
    """The same weights on every rank, split as --shard says; and an optimizer of what is trained.

    A model to be loaded has no memory until then: a rank that keeps a shard reads no more than that.
    """
    path = sample.expert_checkpoint(config, expert)
    torch.manual_seed(config.seed)
    with torch.device("cpu" if path == "scratch" else "meta"):
        model = WanDiT(CONFIGS[config.model])
    if blocks:
        parity.cut(model, blocks)
    model = model.to(dtype=MASTER[config.precision]).train()
    freeze(model, config)

    def load():
        if path == "scratch":
            model.to(layout.device)
        else:
            absent = partial(not_in_checkpoint, blocks=len(model.blocks))
            weights.load_weights(model, path, config.model, layout.device, skip=absent)
        if config.lora_rank:
            start_adapters(model, config, expert)

    how = model, layout, config.shard, config.precision, config.recompute, config.compile
    if config.shard == "none":  # DDP wants the weights, and they are wanted whole
        load()
        wrapped = parallel.parallelize(*how)
    else:
        wrapped = parallel.parallelize(*how)
        load()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(trained.values())
    ema = {name: p.detach().clone() for name, p in trained.items()} if config.ema else {}
    return Part(model, wrapped, parameters, make_optimizer(parameters, config), ema)


def not_in_checkpoint(name: str, blocks: int) -> bool:
    """Parameters that only the model has, its adapters, or only the file: blocks that a rehearsal cuts off."""
    deep = re.match(r"blocks\.(\d+)\.", name)
    return "lora_" in name or bool(deep) and int(deep[1]) >= blocks


def start_adapters(model, config: Config, expert: str):
    lora.reset_adapters(model, config.seed)
    path = expert == "low" and config.lora_low or config.lora
    if path:
        lora.adapters_into(model, read_lora(path, expert))


def freeze(model, config: Config):
    """Leave trainable what the options say."""
    if config.lora_rank:
        alpha = config.lora_alpha or config.lora_rank
        lora.attach(model, config.lora_rank, alpha, config.lora_targets, config.lora_dropout, config.seed)
    elif config.trainable:
        freeze_others(model, config.trainable)


def freeze_others(model, pattern: str):
    """Train the parameters whose names the regular expression finds."""
    found = {name for name, _ in model.named_parameters() if re.search(pattern, name)}
    if not found:
        names = ", ".join(name for name, _ in model.blocks[0].named_parameters("blocks.0"))
        raise ValueError(f"--trainable {pattern} finds no parameter; names are {names}, ...")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in found)


def make_optimizer(parameters, config: Config) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


def update(part: Part, lr: float, decay: float):
    """One optimizer step, and the moving average after it."""
    for group in part.optimizer.param_groups:
        group["lr"] = lr
    part.optimizer.step()
    part.optimizer.zero_grad()
    for name, parameter in part.model.named_parameters():
        if name in part.ema:
            part.ema[name].lerp_(parameter.detach(), 1 - decay)


def learning_rate(config: Config, step: int) -> float:
    """Of step 0, 1, ...: warm-up from lr / warmup_steps to lr, then the schedule, which ends a step after the last."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.lr * falling[config.lr_schedule]


def record_of(step, loss, norms, lr, now: batch.Step, seconds, layout) -> dict:
    """The step's line in metrics.jsonl, but for the losses in detail (watch.losses_of)."""
    norm = math.sqrt(sum(x * x for x in norms.values()))
    record = {"step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm}
    record |= {f"grad_norm_{expert}": x for expert, x in norms.items() if expert}
    record |= {"seconds": seconds, "tokens_per_second": now.tokens / sum(seconds.values()), "idle": now.idle}
    return record | {"memory": watch.peak_memory(layout.device)}


def describe_non_finite(step, loss, norms, losses, packs, config, layout) -> str:
    """Names the step and, where the loss itself is at fault, the positions of the packs that gave it."""
    mine = [
        position
        for expert in packs
        for x, pack in zip(losses[expert], packs[expert], strict=True)
        for position in pack.positions
        if not torch.isfinite(x)
    ]
    positions = sorted(set(layout.gather_objects(mine)))
    if not positions:
        positions = list(range(step * config.batch_size, (step + 1) * config.batch_size))
    listed = ", ".join(map(str, positions[:16])) + (", ..." if len(positions) > 16 else "")
    norm = ", ".join(f"{expert} {x}".strip() for expert, x in norms.items())
    return (
        f"step {step + 1}: loss {loss}, gradient norm {norm}; the step was not applied. Positions: {listed}. "
        "Lower --lr or --max-grad-norm, or look at these samples"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Before and around the loop


def settle(config: Config) -> Config:
    """The options with what follows from the model in place of what was not given."""
    given = survey.settled(config)
    preset = PRESETS[config.model]
    given["shift"] = config.shift or preset.sampling.shift
    if preset.demo and config.model != "demo":
        given["checkpoint"] = config.checkpoint or "scratch"
    if preset.boundary:
        given["expert"] = config.expert or "both"
        low, high = {"high": (preset.boundary, 1.0), "low": (0.0, preset.boundary)}.get(given["expert"], (0.0, 1.0))
        given["noise_range"] = max(low, config.noise_range[0]), min(high, config.noise_range[1])
    elif config.expert:
        raise ValueError(f"--expert {config.expert}: --model {config.model} is one model; leave the option out")
    return dataclasses.replace(config, **given)


def check(config: Config) -> dict[str, str]:
    """Refuse what cannot work, in one line, before any process group or file; returns the paths of the weights."""
    paths = sample.paths_for(config)
    if config.steps < 1 or config.batch_size < 1 or config.pack_tokens < 0:
        raise ValueError("--steps and --batch-size must be at least 1, --pack-tokens at least 0")
    survey.check(config)
    if config.validation and not Path(config.validation).expanduser().exists():
        raise ValueError(f"--validation {config.validation}: no such file or folder")
    if config.validation_sigmas < 1:
        raise ValueError(f"--validation-sigmas {config.validation_sigmas} must be at least 1")
    if not 0 <= config.ema < 1 or not 0 <= config.caption_dropout <= 1 or not 0 <= config.image_condition <= 1:
        raise ValueError(
            f"--ema {config.ema} must be in [0, 1), --caption-dropout {config.caption_dropout} and --image-condition "
            f"{config.image_condition} in [0, 1]"
        )
    if config.image_condition < 1 and not PRESETS[config.model].condition:
        raise ValueError(f"--image-condition {config.image_condition}: --model {config.model} takes no image")
    parity.parse_steps(config.trace_steps)
    resume.check(Path("runs") / config.run, {"options": dataclasses.asdict(config)})
    flow.training_sigmas(torch.zeros(1), config.shift, config.timestep_sampling, *config.noise_range)
    watch.steps_between(config.validate_every, 1, 1)
    prompts.requests_for_training(config)
    if config.trainable and config.lora_rank:
        raise ValueError("--trainable trains weights and --lora-rank adapters beside them; leave one out")
    if config.lora and not config.lora_rank:
        raise ValueError(f"--lora {config.lora} goes on from adapters: give their rank with --lora-rank")
    if config.lora_low and not (config.lora and config.expert == "both"):
        raise ValueError("--lora-low is the low-noise expert's where both are trained, beside --lora for the other")
    if config.trainable or config.lora_rank:
        with torch.device("meta"):
            freeze(WanDiT(CONFIGS[config.model]), config)
    return paths


def content(config: Config, dataset, layout) -> dict[str, str]:
    """What a run is made of besides its options: hashes of the data and of the weights it starts from."""
    hashes = {"data": parity.content_of(dataset)}
    for expert in batch.experts_of(config):
        path = sample.expert_checkpoint(config, expert)
        if path != "scratch":
            path = " ".join(layout.on_rank_0(cache.digests, weights.weight_files(Path(path).expanduser())))
        hashes[f"{expert} weights".strip()] = path
    return hashes


def cost_of(config: Config, run: Path, dataset, layout) -> stream.Cost | None:
    """What a sample costs as rank 0 measures it, or None, by its operations. Clocks differ from run to run, and the
    order of additions follows from the division of a step: so a resumed run goes on with what its checkpoint says."""
    if config.cost == "flops":
        return None
    if kept := layout.on_rank_0(resume.kept_cost, run, config.resume):
        return stream.Cost(**kept)
    wan, dtype = CONFIGS[config.model], sample.DTYPES[config.precision]
    packs = stream.trial_packs(batch.longest(dataset, wan))
    return layout.on_rank_0(lambda: stream.measure_cost(batch.block_pass(wan, layout.device, dtype), packs))


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


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:], __doc__))
        parallel.stop()
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        exit_with("train.py", error, parallel.first_on_this_machine())
