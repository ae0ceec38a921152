"""Peak resident memory of loading: a file with the 14B model's names, its width cut down, into FSDP2's shards.

    torchrun --nproc-per-node 4 tools/measure_loading.py /tmp/weights.safetensors --dim 1408     a 2 GB file, 4 shards
    torchrun --nproc-per-node 1 tools/measure_loading.py /tmp/weights.safetensors                one process, whole

The first call writes the file. Printed per rank: bytes it keeps, and its peak above what it had before the call.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parallel
from model import CONFIGS, WanConfig, WanDiT
from weights import load_weights, stream_weights


def cut_down(dim: int) -> WanConfig:
    """Wan 2.1's 14B T2V with another width: dim 1408 makes a bfloat16 file of 2 GB."""
    whole = CONFIGS["wan2.1-t2v-14b"]
    return dataclasses.replace(whole, dim=dim, ffn_dim=dim * whole.ffn_dim // whole.dim, num_heads=dim // 128)


def blank(config: WanConfig) -> WanDiT:
    with torch.device("meta"):
        return WanDiT(config)


def write_file(path: Path, dim: int):
    header = {name: (tuple(x.shape), torch.bfloat16) for name, x in blank(cut_down(dim)).state_dict().items()}
    stream_weights(header, lambda name: torch.full(header[name][0], 0.01, dtype=torch.bfloat16), path)


def resident(which: str) -> int:
    """This process's memory in bytes, from Linux: VmRSS now, VmHWM at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def measure(path: str, dim: int) -> tuple[int, int, float]:
    """(bytes that this rank keeps, peak bytes above the start, seconds) of loading the file, sharded if there are
    several ranks."""
    model = blank(cut_down(dim))
    if dist.is_initialized() and dist.get_world_size() > 1:
        layout = parallel.Layout(dist.get_rank(), dist.get_world_size())
        parallel.parallelize(model, layout, "full", "bf16", "none", False)
    before, start = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far begins anew
    load_weights(model, path, "the cut-down 14B", dtype=torch.bfloat16)
    peak, seconds = resident("VmHWM") - before, time.perf_counter() - start
    mine = [x.to_local() if hasattr(x, "to_local") else x for x in model.state_dict().values()]
    assert all(bool((x == torch.tensor(0.01, dtype=torch.bfloat16)).all()) for x in mine)
    return sum(math.prod(x.shape) * x.itemsize for x in mine), peak, seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dim", type=int, default=1408, help="width, a multiple of 128")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, _ = parallel.world_from_torchrun()
    dist.init_process_group("gloo")
    if rank == 0 and not options.path.exists():
        write_file(options.path, options.dim)
    dist.barrier()
    kept, peak, seconds = measure(str(options.path), options.dim)
    size = options.path.stat().st_size
    print(
        f"rank {rank}: file {size / 1e6:.0f} MB, keeps {kept / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB above the start "
        f"({peak / kept:.3f} of what it keeps), {seconds:.1f} s",
        flush=True,
    )
    dist.destroy_process_group()
