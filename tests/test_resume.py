"""Runs that are killed, stopped, or run out of disk, and go on: real processes, real signals."""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import runs
import torch
import torch.distributed as dist

import model
import options
import train

STEPS = 8
OPTIONS = dict(steps=STEPS, save_every=1, keep=2, ema=0.9, run="run", precision="fp32")


class Job:
    """A training run of several processes, forked from a server that has imported everything: a start costs
    milliseconds, and each process can be killed like any other."""

    server = multiprocessing.get_context("forkserver")

    def __init__(self, folder: Path, world: int, hook=None, **changes):
        meet = folder / f"meet-{time.monotonic_ns()}"
        self.output = [folder / f"{meet.name}.{rank}" for rank in range(world)]
        args = [(rank, world, folder, meet, self.output[rank], hook, OPTIONS | changes) for rank in range(world)]
        self.processes = [self.server.Process(target=work, args=a) for a in args]
        for process in self.processes:
            process.start()

    def kill(self, ranks=None):
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].kill()

    def wait(self, timeout: float = 60) -> list[int]:
        """The exit codes; a process that does not end is a failure."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            self.kill()
            pytest.fail(f"processes hang: {codes}\n{self.said()}")
        return codes

    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.output if path.exists())


def work(rank: int, world: int, folder: Path, meet: Path, output: Path, hook, changes: dict):
    """One process of a job: what torchrun would start."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.chdir(folder)
    if world > 1:
        dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world)
    observe = hook(rank, folder) if hook else None
    try:
        with patch.dict(model.CONFIGS, runs.MODELS):
            train.main(runs.config(folder, **changes), observe)
    except (ValueError, RuntimeError, OSError) as error:
        options.exit_with("train.py", error, rank)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Files, weights and a filled cache; and the server that jobs are forked from."""
    folder = tmp_path_factory.mktemp("resume")
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        Job.server.set_forkserver_preload(["test_resume"])
        runs.prepare(folder)
    return folder
