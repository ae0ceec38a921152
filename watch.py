"""What a run shows of itself: seconds per phase, metrics.jsonl and TensorBoard, the first batch, validation."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import time
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import batch
import parallel
import prompts
import sample
import stream
from presets import PRESETS
from video import contact_sheet

SIGMA_BINS = 10  # of equal width in sigma


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


# ---------------------------------------------------------------------------------------------------------------------
# The record of a step


class Log:
    """runs/NAME/metrics.jsonl, a line per step, and the same in TensorBoard where that is installed; rank 0's. A run
    that goes on from step `first` keeps the lines up to there and drops those of steps that were lost, and one that was
    cut short."""

    def __init__(self, run: Path, first: int):
        run.mkdir(parents=True, exist_ok=True)
        self.path, self.first = run / "metrics.jsonl", first
        self.waiting: list[str] = []  # lines that could not be written yet
        lines = self.path.read_text(errors="replace").splitlines(keepends=True) if self.path.exists() else []
        write_text(self.path, "".join(line for line in lines if 0 < step_of(line) <= first))

    @cached_property
    def board(self):
        """TensorBoard's writer, opened when first written to; None where it is not installed."""
        if not importlib.util.find_spec("tensorboard"):
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.path.parent / "tensorboard", purge_step=self.first + 1)

    def write(self, record: dict):
        """Append a line. What a full disk does not take waits for the next step: training is worth more."""
        self.waiting.append(json.dumps(record) + "\n")
        size = self.path.stat().st_size
        try:
            with open(self.path, "a") as file:
                file.write("".join(self.waiting))
            self.waiting.clear()
        except OSError as error:
            os.truncate(self.path, size)
            if len(self.waiting) == 1:
                tqdm.write(f"{self.path} has to wait from step {record['step']} on: {error}", sys.stderr)
        if self.board is not None:
            for name, value in flat(record):
                self.board.add_scalar(name, value, record["step"])


def step_of(line: str) -> int:
    """The step of a line of metrics.jsonl; 0 for one that was cut short."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else 0
    except ValueError:
        return 0


def write_text(path: Path, text: str):
    """Replace a file as a whole: whoever reads it, and whenever this process is killed, finds the old or the new."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def flat(record: dict, prefix: str = ""):
    """(name, number) of all numbers in a record, those of a part under its name: seconds/forward."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, value


def losses_of(now: batch.Step, shares: list[float], config) -> dict:
    """The step's losses taken apart. shares: what each sample of the global batch adds to the loss.

    "loss_raw" is the mean without --loss-weight, "loss_sigma" the raw means of the samples in each tenth of sigma,
    "loss_high" and "loss_low" each expert's own weighted mean, over its samples alone.
    """
    weights = batch.loss_weights(now.sigmas, config)
    raw = [share * config.batch_size / w if w else 0.0 for share, w in zip(shares, weights, strict=True)]
    bins: dict[str, list[float]] = {}
    for sigma, value in zip(now.sigmas, raw, strict=True):
        bins.setdefault(f"{int(sigma * SIGMA_BINS) / SIGMA_BINS:.1f}", []).append(value)
    record = {"loss_raw": sum(raw) / len(raw), "loss_sigma": {k: sum(v) / len(v) for k, v in sorted(bins.items())}}
    for expert, numbers in now.experts.items():
        if expert:
            record[f"loss_{expert}"] = sum(shares[i] for i in numbers) * config.batch_size / len(numbers)
            record[f"samples_{expert}"] = len(numbers)
    return record


def spell(record: dict) -> str:
    """A step's record for the progress bar."""
    seconds = " ".join(f"{phase} {value:.2f}s" for phase, value in record["seconds"].items())
    return f"loss {record['loss']:.4f} lr {record['lr']:.1e} norm {record['grad_norm']:.2f} {seconds}"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and held-out samples


def first_batch(config, dataset, decode, run: Path, most: int = 16) -> None:
    """Write runs/NAME/first_batch.png and .txt: the samples of step 0 as the model will see them, decoded again from
    their latents, with their captions. decode: latents -> video."""
    drawn = stream.draws(0, config.batch_size, config.seed, dataset, config.caption_dropout)[:most]
    run.mkdir(parents=True, exist_ok=True)
    contact_sheet(run / "first_batch.png", [decode(dataset.sample(d.index, d.variant)["latents"]) for d in drawn])
    lines = [
        f"{dataset.items[d.index].path}: {'(dropped) ' * d.dropped}{dataset.items[d.index].caption}" for d in drawn
    ]
    (run / "first_batch.txt").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def averaged(parts: dict):
    """Inside, the models hold the moving averages of their weights, where there are some, and are in eval mode."""
    kept = []
    for part in parts.values():
        for name, parameter in part.model.named_parameters():
            if name in part.ema:
                kept.append((parameter, parameter.detach().clone()))
                parameter.data.copy_(part.ema[name])
        part.model.eval()
    try:
        yield
    finally:
        for part in parts.values():
            parallel.reshard(part.model)  # else the next step computes with the averages that are still gathered
            part.model.train()
        for parameter, value in kept:
            parameter.data.copy_(value)


class Validation:
    """Every `--validate-every` steps and at the end, with the averaged weights: the loss on held-out items, and videos.

    The loss takes each item at `--validation-sigmas` evenly spaced places of the schedule with noise of its own, the
    same every time, so that its curve shows the model and not the draw.
    """

    def __init__(self, config, samples: int, held_out, components, layout, run: Path):
        """samples: of the training data; held_out: a dataset, or None."""
        self.every = steps_between(config.validate_every, samples, config.batch_size)
        self.config, self.held_out, self.layout, self.run = config, held_out, layout, run
        self.preset, self.components = PRESETS[config.model], components
        self.requests = prompts.requests_for_training(config)
        count = (len(held_out) if held_out else 0) * config.validation_sigmas
        self.options = dataclasses.replace(config, batch_size=max(1, count), image_condition=1.0, loss_weight="none")

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0 or step == self.config.steps

    def __call__(self, step: int, parts: dict) -> dict:
        """What the look at a step found, for a line of metrics.jsonl; nothing where none is due. Every rank calls."""
        if not self.due(step) or not (self.held_out or self.requests):
            return {}
        with averaged(parts), torch.no_grad():
            record = self.loss(parts) if self.held_out else {}
            if self.requests:
                self.videos(step, parts)
        return record

    def loss(self, parts: dict) -> dict:
        config, K, layout = self.options, self.config.validation_sigmas, self.layout
        drawn = [
            stream.Draw(-1 - i * K - k, i, 0, False, (k + 0.5) / K) for i in range(len(self.held_out)) for k in range(K)
        ]
        shares = torch.zeros(len(drawn), dtype=torch.float64, device=layout.device)
        for i in range(0, len(drawn), self.config.batch_size):  # so many fit into memory
            some = batch.divide(drawn[i : i + self.config.batch_size], config, self.held_out, layout)
            for expert, packs in some.packs.items():
                for pack in packs:
                    batch.pack_loss(parts[expert].wrapped, pack, layout, sample.DTYPES[config.precision])
                    gather_shares(shares, pack, lambda position: -1 - position)
        sigmas = batch.sigmas_of(drawn, config)
        whole = batch.Step({}, sigmas, batch.routed(sigmas, config), tokens=0, idle=0.0)
        losses = losses_of(whole, layout.sum(shares).tolist(), config)
        return {"validation": {"loss": losses.pop("loss_raw")} | losses}

    def videos(self, step: int, parts: dict):
        layout, folder = self.layout, self.run / "samples"
        if step != self.config.steps:
            folder = folder / f"step-{step:06d}"
        models = {expert: part.model for expert, part in parts.items()}
        how, dtype = self.preset.sampling, sample.DTYPES[self.config.precision]
        sampler = sample.Sampler(models, self.components, self.preset, how, layout, dtype)
        sheet = sampler.write(self.requests, self.config.seed, folder)
        self.components.release_text_encoder()
        if layout.rank == 0:
            print(f"{len(self.requests)} videos in {folder}, all on one page in {sheet}", flush=True)


def steps_between(text: str, samples: int, batch_size: int) -> int:
    """Steps that --validate-every means: "500", or epochs as in "2ep"."""
    number = text.removesuffix("ep")
    if not number.isdigit():
        raise ValueError(f"--validate-every {text}: give steps, as in 500, or epochs, as in 2ep")
    return -(-int(number) * samples // batch_size) if number != text else int(number)


def gather_shares(shares: Tensor, pack: batch.Pack, number) -> None:
    """Add what a pack's samples gave on this rank to the whole batch's, at number(position)."""
    if pack.positions:
        where = torch.tensor([number(p) for p in pack.positions], device=shares.device)
        shares.index_add_(0, where, pack.shares.to(shares.dtype))
