"""What a run keeps on disk, and how it goes on after it was stopped or killed at any moment.

    runs/NAME/config.json                        every option, the layout, versions
    runs/NAME/metrics.jsonl                      a line for each step
    runs/NAME/latest                             the name of the newest complete checkpoint
    runs/NAME/.lock                              held by the job that trains here
    runs/NAME/step-000100/state/                 weights, optimizer and average, sharded
    runs/NAME/step-000100/model.safetensors      weights in official names, in the master dtype
    runs/NAME/step-000100/ema.safetensors        their moving average, with --ema
    runs/NAME/step-000100/lora.safetensors       instead, with --lora-rank; and ema-lora.safetensors
    runs/NAME/step-000100/config.json            the step, and the options, content, layout and cost that led to it
    runs/NAME/step-000100/manifest.json          size and hash of each of its files, written last

Of two experts each has its own state, and high-model.safetensors, high-ema.safetensors, low-model.safetensors, ... The
state is torch.distributed.checkpoint's: every tensor whole under its official name, whatever held it when it was saved;
so it loads under any number of processes and any sharding. Frozen weights are not in it: they are --checkpoint's.

What is being written has a name that ends in .partial until it is whole and was read back; a rename then gives it its
own. So whatever else is there is whole, and the next start removes what a killed run left behind.
"""

import json
import re
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import lora
from cache import digests
from lora_formats import write_lora
from parity import KEEPING_OPTIONS, LAYOUT_OPTIONS, PATH_OPTIONS
from watch import write_text
from weights import whole_weights, write_weights

# May differ from the options that wrote a checkpoint. Rounding counts as a change here; of files the content counts.
FREE_OPTIONS = (LAYOUT_OPTIONS | KEEPING_OPTIONS | PATH_OPTIONS) - {"precision"}
CLAIMED: dict[Path, TextIO] = {}  # the locks that this process holds, by the run's folder
STOPPED = 128 + signal.SIGTERM  # exit status of a run that was told to stop, and did so in good order
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# Saving


class Keeper:
    """Saves a run while it trains on, and ends it in good order.

        with Keeper(run, parts, layout, keep) as keeper:
            for step in ...:
                losses = keeper.agree(shares)           # SIGTERM or SIGINT on any rank sets keeper.stopping on all
                ...
                log.write(record | keeper.news())       # says whether a save failed
                if keeper.stopping or ...: keeper.save(step + 1, about)
                if keeper.stopping: break

    A save copies the state and returns; threads write it. One that fails (a full disk) is told in a line, and training
    goes on with the checkpoint before. On leaving, the last save is waited for: OSError (ValueError on ranks other than
    0) if that one failed, SystemExit(143) if the run was told to stop.
    """

    def __init__(self, run: Path, parts: dict, layout, keep: int):
        self.run, self.parts, self.layout, self.keep = run, parts, layout, keep
        # The writing threads meet in a group of their own: the order of their collectives is not the loop's.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if layout.world > 1 else None
        self.thread = ThreadPoolExecutor(1)
        self.written: Future | None = None  # of the save under way: all ranks' states
        self.finished: Future | None = None  # on rank 0: all else, and why it failed ("": it did not)
        self.failure = ""  # of the last save
        self.untold: list[str] = []  # failures that metrics.jsonl is to hear of
        self.told_to_stop = 0.0  # when
        self.stopping = False  # all ranks are

    def save(self, step: int, record: dict):
        """Begin to save the state after `step` steps; every rank calls. record: what config.json says of the run."""
        self.settle()
        partial = self.run / f"step-{step:06d}.partial"
        self.failure = self.layout.on_rank_0(self.prepare, partial)
        if self.failure:
            return
        state, rank = training_state(self.parts), self.layout.rank
        frozen = {expert: whole_weights(frozen_of(part), rank) for expert, part in self.parts.items()}
        state = state if rank == 0 else own_shards(state)
        alone = self.layout.world == 1
        self.written = dcp.async_save(state, checkpoint_id=partial / "state", process_group=self.group, no_dist=alone)
        if rank == 0:
            self.finished = self.thread.submit(self.finish, partial, self.written, frozen, {**record, "step": step})

    def prepare(self, partial: Path) -> str:
        """Rank 0's: an empty folder, or why there can be none."""
        try:
            shutil.rmtree(partial, ignore_errors=True)
            check_space(self.run, self.parts)
            partial.mkdir(parents=True)
        except OSError as error:
            return self.tell(partial, error)
        return ""

    def finish(self, partial: Path, written: Future, frozen: dict, record: dict) -> str:
        """Rank 0's thread: once all ranks' states are written, what is made of them; then the names under which others
        find the checkpoint."""
        try:
            written.result()
            write_files(partial, self.parts, frozen)
            write_text(partial / "config.json", json.dumps(record, indent=2))
            write_text(partial / "manifest.json", json.dumps(manifest(partial), indent=2))
            publish(partial)
            prune(self.run, record["step"], self.keep)
        except (Exception, CheckpointException) as error:  # the latter is none of the former
            failure = self.tell(partial, error)  # before it makes room
            shutil.rmtree(partial, ignore_errors=True)
            return failure
        return ""

    def tell(self, partial: Path, error: BaseException) -> str:
        free = shutil.disk_usage(self.run).free  # torch's writer does not say so where this was the reason
        failure = f"{partial.stem} was not saved: {reason(error)} ({free / 1e6:.1f} MB free); {last_good(self.run)}"
        self.untold.append(failure)
        tqdm.write(failure)
        return failure

    def news(self) -> dict[str, str]:
        """For the step's line in metrics.jsonl, on rank 0: which saves failed since the last one."""
        untold = [self.untold.pop(0) for _ in range(len(self.untold))]
        return {"save_failed": "; ".join(untold)} if untold else {}

    def settle(self):
        """Wait for the save under way; every rank calls, and then knows how it ended."""
        if self.written is None:
            return
        wait([self.written])
        error = self.written.exception()
        if error is not None and not isinstance(error, CheckpointException):
            raise error  # not the disk's, of which all ranks hear: another rank is gone
        self.failure = self.layout.on_rank_0(lambda: self.finished.result())
        self.written = None

    # -- Stopping

    def agree(self, shares: Tensor) -> list[float]:
        """This rank's shares of the losses summed over all ranks. The same all-reduce tells all ranks, in `stopping`,
        whether any of them was told to stop."""
        *losses, stop = self.layout.sum(F.pad(shares, (0, 1), value=float(self.told_to_stop > 0))).tolist()
        self.stopping = stop > 0
        return losses

    def on_signal(self, number: int, _):
        """A second SIGINT ends the run at once; within two seconds it is torchrun, which passes on the terminal's."""
        if number == signal.SIGINT and self.told_to_stop and time.monotonic() > self.told_to_stop + 2:
            raise KeyboardInterrupt
        self.told_to_stop = self.told_to_stop or time.monotonic()

    def __enter__(self):
        self.handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind, error, _):
        try:
            if kind is None or isinstance(error, ValueError | FloatingPointError):  # which every rank finds alike
                self.settle()
        finally:
            self.thread.shutdown()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        if kind is not None:
            return
        if self.group is not None:
            dist.destroy_process_group(self.group)
        if self.failure:
            raise (OSError if self.layout.rank == 0 else ValueError)(self.failure)
        if self.stopping:
            if self.layout.rank == 0:
                tqdm.write(f"stopped as told; {last_good(self.run)}")
            raise SystemExit(STOPPED)


def training_state(parts: dict) -> dict:
    """What is trained of each model, {expert: train.Part}, and all that belongs to it; of a single one without a name
    around it. The tensors are the live ones, but for numbers."""
    states = {
        expert: {
            "model": get_model_state_dict(part.model, options=TRAINED),
            "optimizer": get_optimizer_state_dict(part.model, part.optimizer, options=TRAINED),
            "ema": part.ema,
        }
        for expert, part in parts.items()
    }
    return states.get("", states)


def frozen_of(part) -> dict[str, Tensor]:
    """What a file of weights needs beside what is trained; a file of adapters nothing."""
    if lora.layers(part.model):
        return {}
    return {name: p for name, p in part.model.named_parameters() if not p.requires_grad}


def write_files(folder: Path, parts: dict, frozen: dict):
    """The files of weights for others to read, made from the state that was written: whole models, or the adapters
    alone, in the names that ComfyUI and diffusers both know."""
    for expert, part in parts.items():
        dot, dash = (f"{expert}.", f"{expert}-") if expert else ("", "")
        for what in ("model", "ema") if part.ema else ("model",):
            trained = read_back(folder / "state", f"{dot}{what}.")
            if lora.layers(part.model):
                name = "lora" if what == "model" else "ema-lora"
                write_lora(lora.adapters_of(part.model, trained), folder / f"{dash}{name}.safetensors", "comfyui")
            else:
                write_weights(frozen[expert] | trained, folder / f"{dash}{what}.safetensors")


def own_shards(state: dict) -> dict:
    """What this rank alone holds of a state. What all hold alike, rank 0 writes and nobody else needs to copy."""
    nested = {k: own_shards(v) for k, v in state.items() if isinstance(v, dict)}
    return nested | {k: v for k, v in state.items() if isinstance(v, DTensor)}


def check_space(run: Path, parts: dict):
    """OSError unless the disk has room for a checkpoint: files of weights and of the average, of what is trained the
    same again and the optimizer's moments in the state, and 4 KiB around each tensor."""
    tensors = []
    for part in parts.values():
        trained, average = part.parameters, list(part.ema.values())
        tensors += [
            *part.model.parameters(),
            *trained,
            *2 * average,
            *trained * (2 * ("betas" in part.optimizer.defaults)),
        ]
    needed, free = sum(x.numel() * x.element_size() + 4096 for x in tensors), shutil.disk_usage(run).free
    if free < needed:
        raise OSError(f"a checkpoint takes {needed / 1e6:.1f} MB and {run} has {free / 1e6:.1f} MB free")


def read_back(state: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a written state whose names begin with prefix, whole and without it."""
    entries = dcp.FileSystemReader(state).read_metadata().state_dict_metadata
    found = {name: entry for name, entry in entries.items() if name.startswith(prefix) and hasattr(entry, "size")}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    if tensors:
        dcp.load(tensors, checkpoint_id=state, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def manifest(folder: Path) -> dict[str, list]:
    """{file: [bytes, hash]} of all that is in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = zip(files, digests(files), strict=True)
    return {str(path.relative_to(folder)): [path.stat().st_size, digest] for path, digest in hashes}


def publish(partial: Path):
    """Give a complete checkpoint its name, and write that in `latest`, which never names one that is being replaced."""
    final = partial.with_suffix("")
    discard(final)
    partial.rename(final)
    write_text(final.parent / "latest", final.name)


def prune(run: Path, step: int, keep: int):
    """Of the checkpoints up to this one leave the last `keep` (0: all). Those of later steps belong to a course that
    was given up, when the run went on from an older checkpoint."""
    folders = checkpoints(run)
    kept = sorted(number for number in folders if number <= step)[-keep:]
    for number, folder in folders.items() if keep else ():
        if number not in kept:
            discard(folder)


def discard(folder: Path):
    """Remove a checkpoint, its name first: half of one is never seen."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}.old.partial")
        folder.rename(gone)
        shutil.rmtree(gone)


def checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by their step."""
    return {step_of(path): path for path in run.glob("step-*") if path.is_dir() and step_of(path)}


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint's folder says, or 0."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else 0


def reason(error: BaseException) -> str:
    """An error in one line; of those of all ranks in a CheckpointException, the first."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(first)}"
    return " ".join(str(error).split()) or repr(error)


def last_good(run: Path) -> str:
    latest = run / "latest"
    return f"the last good checkpoint is {run / latest.read_text()}" if latest.exists() else "there is none before it"


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def check(run: Path, record: dict) -> None:
    """What can be found wrong with --resume before anything is done: see `find` and `refuse_changes`."""
    which = record["options"]["resume"]
    if not which and (there := checkpoints(run)):
        raise ValueError(
            f"{run} holds {there[max(there)].name} of an earlier run: go on from it with --resume latest, or choose "
            "another --run (--name under torchrun), or remove that folder"
        )
    if folder := find(run, which):
        refuse_changes(folder, record)


def find(run: Path, which: str) -> Path | None:
    """The checkpoint that --resume names: a path, or "latest", which is none where the run was killed before its first;
    ValueError where there is no such run or checkpoint."""
    if which != "latest":
        folder = Path(which).expanduser() if which else None
    elif not run.is_dir():
        raise ValueError(f"--resume latest: {run} holds no checkpoint; start without --resume, or name one by its path")
    elif (run / "latest").is_file():
        folder = run / (run / "latest").read_text()
    else:  # killed before the first `latest`
        folder = max(checkpoints(run).items(), default=(0, None))[1]
    if folder and not (folder / "manifest.json").is_file():
        raise ValueError(f"--resume {which}: {folder} is not a complete checkpoint{whole_one_before(folder)}")
    return folder


def begin(run: Path, parts: dict, record: dict, layout) -> int:
    """Open the run's folder and restore what --resume names; returns how many steps are done. Every rank calls.

    record: {"options", "content", ...} of this run; ValueError where the checkpoint's differ in what changes the loss
    curve (unless --allow-change), where it is damaged, and where the disk has no room for another.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said of every save by one process, as meant
    folder, first = layout.on_rank_0(find, run, record["options"]["resume"]), 0
    if folder:
        layout.on_rank_0(refuse_changes, folder, record)
        layout.on_rank_0(refuse_damage, folder)
        first = load(folder, parts, layout)
    layout.on_rank_0(open_run, run, folder, record)
    layout.on_rank_0(check_space, run, parts)
    return first


def kept_cost(run: Path, which: str) -> dict[str, float] | None:
    """The stream.Cost that the checkpoint which --resume names was trained with, if it was measured (--cost fit)."""
    folder = find(run, which)
    return json.loads((folder / "config.json").read_text()).get("cost") if folder else None


def load(folder: Path, parts: dict, layout) -> int:
    """Restore weights, optimizers and averages in place; returns how many steps they have seen."""
    state = training_state(parts)  # the averages in it are the run's own: reading fills them
    try:
        dcp.load(state, checkpoint_id=folder / "state", no_dist=layout.world == 1)
    except CheckpointException as error:
        raise ValueError(f"{folder} does not fit this run: {reason(error)}") from error
    for expert, part in parts.items():
        mine = state[expert] if expert else state
        set_model_state_dict(part.model, mine["model"], options=TRAINED)
        set_optimizer_state_dict(part.model, part.optimizer, mine["optimizer"], options=TRAINED)
    return json.loads((folder / "config.json").read_text())["step"]


def open_run(run: Path, folder: Path | None, record: dict):
    """Rank 0's: remove what a killed run left behind, and say what runs here now."""
    run.mkdir(parents=True, exist_ok=True)
    for orphan in run.glob("*.partial"):
        shutil.rmtree(orphan) if orphan.is_dir() else orphan.unlink()
    write_text(run / "config.json", json.dumps(record, indent=2))
    if folder and folder.resolve().parent == run.resolve():
        write_text(run / "latest", folder.name)  # so that a kill from here on leads back to it


def claim(run: Path):
    """Make the folder of a run, which says that it was begun; ValueError if another process trains into it. The lock
    goes with the process that holds it, killed or not, so none is left behind."""
    run.mkdir(parents=True, exist_ok=True)
    if run in CLAIMED:
        CLAIMED.pop(run).close()
    CLAIMED[run] = file = open(run / ".lock", "a")
    try:
        import fcntl  # not on Windows

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"{run} is in the hands of a job that still runs: stop that one, or choose another --run (--name under "
            "torchrun)"
        ) from None
    except (OSError, ImportError) as error:  # a system, or a file system, without locks
        tqdm.write(f"{run} cannot be locked ({reason(error)}): see to it that no other job trains into it", sys.stderr)


def refuse_damage(folder: Path):
    if problem := damage(folder):
        raise ValueError(f"{folder} is damaged: {problem}{whole_one_before(folder)}")


def damage(folder: Path) -> str:
    """What is wrong with the files of a checkpoint; "" if they are what was written."""
    try:
        listed = json.loads((folder / "manifest.json").read_text())
        found = manifest(folder)
    except (OSError, ValueError) as error:
        return reason(error)
    problems = []
    for name, (size, digest) in listed.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name][0] != size:
            problems.append(f"{name} has {found[name][0]} bytes, not {size}")
        elif found[name][1] != digest:
            problems.append(f"{name} is not what was written")
    return ", ".join(problems)


def whole_one_before(folder: Path) -> str:
    """A way out, for an error's end: never taken unasked, since it costs the steps in between."""
    there = checkpoints(folder.parent)
    numbers = sorted((number for number in there if number < step_of(folder)), reverse=True)
    whole = (there[number] for number in numbers if not damage(there[number]))
    return next((f"; the one before is whole: --resume {other}" for other in whole), "")


def refuse_changes(folder: Path, record: dict):
    """ValueError that lists, old and new, what is not as it was when the checkpoint was written and changes the loss
    curve: options, and what `content` says of data and weights."""
    saved, now = json.loads((folder / "config.json").read_text()), json.loads(json.dumps(record))
    if now["options"].get("allow_change"):
        return
    free = FREE_OPTIONS
    if {saved["options"].get("lr_schedule"), now["options"].get("lr_schedule")} != {"constant"}:
        free = free - {"steps"}  # a schedule's shape depends on its length
    changed = []
    for kind, ignored in (("options", free), ("content", set())):
        old, new = saved[kind], now.get(kind, {})
        names = [name for name in new if name not in ignored and new[name] != old.get(name)]
        changed += [f"{name} {old.get(name)} is now {new[name]}" for name in names]
    if changed:
        raise ValueError(
            f"--resume: since {folder} was saved, what changes the loss curve has changed: {'; '.join(changed)}. "
            "Go back to what it was, or add --allow-change"
        )
