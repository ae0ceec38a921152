"""Run a function in several gloo processes, as torchrun would start them."""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Everything that a process would spend its first seconds on; _dynamo is what the first optimizer step imports.
PRELOADED = ["pytest", "runs", "parity", "sample", "torch._dynamo", "torch.distributed.checkpoint"]


def server():
    """The context of processes forked from one that has imported everything: a start costs milliseconds. They see the
    environment as it was at the first call."""
    context = multiprocessing.get_context("forkserver")
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    return context


def spawn(function, world: int, *args, timeout: float = 120):
    """function(*args) in `world` processes with a process group; returns [its result on each rank].

    A file is the meeting point, so there is no port to lose a race for; every collective is under a timeout.
    """
    server()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_child, (function, world, folder, timeout, args), nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _child(rank: int, function, world: int, folder: str, timeout: float, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    torch.save(function(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
