"""What a run says of itself: seconds per phase, metrics.jsonl, TensorBoard."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm


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


def spell(record: dict) -> str:
    """A step's record for the progress bar."""
    seconds = " ".join(f"{phase} {value:.2f}s" for phase, value in record["seconds"].items())
    return f"loss {record['loss']:.4f} lr {record['lr']:.1e} norm {record['grad_norm']:.2f} {seconds}"


class Log:
    """runs/NAME/metrics.jsonl, a line per step, written by rank 0. A run that goes on from step `first` keeps the lines
    up to there and drops those of steps that were lost, and one that was cut short."""

    def __init__(self, run: Path, first: int):
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / "metrics.jsonl"
        self.waiting: list[str] = []  # lines that could not be written yet
        lines = self.path.read_text(errors="replace").splitlines(keepends=True) if self.path.exists() else []
        write_text(self.path, "".join(line for line in lines if 0 < step_of(line) <= first))

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
