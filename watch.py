"""What a run says of itself: seconds per phase, metrics.jsonl, TensorBoard."""

import json
import time
from pathlib import Path

import torch


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
    up to there and drops those of steps that were lost."""

    def __init__(self, run: Path, first: int):
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / "metrics.jsonl"
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first]
        self.path.write_text("".join(kept))

    def write(self, record: dict):
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
