"""Run a function in several gloo processes, as torchrun would start them."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function, world: int, *args, timeout: float = 120):
    """function(*args) in `world` processes with a process group; returns [its result on each rank].

    A file is the meeting point, so there is no port to lose a race for; every collective is under a timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_child, (function, world, folder, timeout, args), nprocs=world, start_method="spawn")
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
