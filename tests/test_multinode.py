"""Two machines, as far as one can be two: each has its own torchrun and working folder. What they share is what
docs/multinode.md says that they must."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runs

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "--steps 2 --batch-size 4 --warmup-steps 0 --frames 9 --max-area 2304 --precision fp64 --no-sample".split()


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """The network disk: data, and the cache and runs to be."""
    disk = tmp_path_factory.mktemp("disk")
    runs.write_files(disk / "data", {"a": (9, 32, 48), "b": (5, 48, 32), "c": (1, 48, 48)})
    (disk / "runs").mkdir()
    return disk


def machine(disk: Path, name: str, shared: bool = True) -> Path:
    """A machine's own working folder, in which runs/ leads to the network disk."""
    home = disk / name
    home.mkdir()
    if shared:
        (home / "runs").symlink_to(disk / "runs")
    return home


def start(home: Path, launcher: list[str], *options: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train.py"), *TRAIN, *options],
        cwd=home,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def two_machines(homes: list[Path], options: list[list[str]]) -> list[tuple[int, str]]:
    """(exit status, output) of each machine's torchrun of one process; a machine that does not end is a failure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = []
    for i, home in enumerate(homes):
        launcher = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank {i}".split()
        launcher += f"--master-addr 127.0.0.1 --master-port {port}".split()
        jobs.append(start(home, launcher, *options[i]))
    try:
        said = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, text) for job, text in zip(jobs, said, strict=True)]


def losses(disk: Path, run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (disk / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def test_two_machines_train_one_run(disk):
    """If this goes, a run over two machines is another run than one process's, or does not start at all."""
    data = ["--data", str(disk / "data"), "--cache", str(disk / "cache")]
    one = start(machine(disk, "alone"), [], *data, "--name", "one")
    said, _ = one.communicate(timeout=100)
    assert one.returncode == 0, said
    options = [*data, "--name", "two", "--sp", "2"]
    results = two_machines([machine(disk, "first"), machine(disk, "second")], [options] * 2)
    assert [status for status, _ in results] == [0, 0], results
    assert losses(disk, "two") == pytest.approx(losses(disk, "one"), rel=1e-9)
    assert json.loads((disk / "runs" / "two" / "config.json").read_text())["layout"]["sp"] == 2
    assert {path.name for path in (disk / "second").iterdir()} == {"runs"}  # nothing strays onto a machine's own disk


@pytest.mark.parametrize("which", ["--cache", "runs/"])
def test_a_folder_that_is_not_shared_is_found_at_the_start(disk, which):
    """If this goes, machines with a cache or runs of their own encode for hours before they stop, wait for each other
    forever, or leave a run of which each has a part."""
    number = ["--cache", "runs/"].index(which)
    homes = [machine(disk, f"{name}-{number}", shared=which == "--cache") for name in ("third", "fourth")]
    cache = "own-cache" if which == "--cache" else str(disk / "cache")
    options = ["--data", str(disk / "data"), "--cache", cache, "--name", f"lost-{number}"]
    for status, said in two_machines(homes, [options] * 2):
        assert status != 0
        (line,) = [line for line in said.splitlines() if line.startswith("train.py:")]
        assert f"{which} must be one folder that all machines share: rank 1 on " in line
        assert str(homes[0]) in line
