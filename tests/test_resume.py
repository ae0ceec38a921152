"""Runs that are killed, stopped, or run out of disk, and go on: real processes, real signals."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import pytest
import runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from spawn import server

import cache
import model
import options
import resume
import train
import watch
from model import WanDiT

STEPS = 10
OPTIONS = dict(steps=STEPS, save_every=1, keep=2, ema=0.9, run="run", precision="fp32")


class Job:
    """A training run of several processes, each of which can be killed like any other."""

    def __init__(self, folder: Path, world: int, hook=None, **changes):
        meet = folder / f"meet-{time.monotonic_ns()}"
        self.output = [folder / f"{meet.name}.{rank}" for rank in range(world)]
        args = [(rank, world, folder, meet, self.output[rank], hook, OPTIONS | changes) for rank in range(world)]
        self.processes = [server().Process(target=work, args=a) for a in args]
        for process in self.processes:
            process.start()

    def kill(self, ranks=None):
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].kill()

    def end_after_the_first(self):
        """What torchrun does: where one process died, the others do not go on for long."""
        wait([process.sentinel for process in self.processes], 120)
        time.sleep(0.5)
        self.kill()

    def wait(self, timeout: float = 180) -> list[int]:
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
        options.exit_with("train.py", error, rank == 0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Files, weights and a filled cache."""
    folder = tmp_path_factory.mktemp("resume")
    runs.prepare(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# What a run must have left in the end


@pytest.fixture(scope="module")
def unbroken(prepared):
    """What uninterrupted runs leave, by their options."""
    made = {}

    def get(world: int, **changes):
        key = (world, *sorted(changes.items()))
        if key not in made:
            name = f"unbroken-{len(made)}"
            job = Job(prepared, world, run=name, **changes)
            began = time.monotonic()
            assert job.wait() == [0] * world, job.said()
            made[key] = prepared / "runs" / name, time.monotonic() - began
        return made[key]

    return get


def losses(run: Path) -> list[float]:
    """The loss curve; every step is there once, in order."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def files_of(run: Path) -> list[str]:
    """All that a run leaves but TensorBoard's files: every start opens one more, named by the time."""
    names = (str(path.relative_to(run)) for path in run.rglob("*"))
    return sorted(name for name in names if not name.startswith("tensorboard"))


def assert_same(run: Path, reference: Path):
    """To the bit the same curve, weights and averages, and the same files."""
    assert losses(run) == losses(reference)
    assert files_of(run) == files_of(reference)
    last = (run / "latest").read_text()
    assert last == f"step-{STEPS:06d}"
    for name in ("model.safetensors", "ema.safetensors"):
        one, other = (load_file(folder / last / name) for folder in (run, reference))
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one), name


# ---------------------------------------------------------------------------------------------------------------------
# Kills


@pytest.mark.parametrize("world, kills", [(2, 12), (4, 8)])
def test_kills_at_random(prepared, unbroken, world, kills):
    """If this goes, there is a moment at which a SIGKILL costs more than time: a run that does not resume, or whose
    curve, weights or files show that it was killed; or a process that outlives the others."""
    reference, seconds = unbroken(world)
    rng, run = random.Random(world), prepared / "runs" / f"killed-{world}"
    while kills:
        job = Job(prepared, world, run=run.name, resume="latest" if run.exists() else "")
        time.sleep(rng.uniform(0.05, 0.5) * seconds)
        if all(process.is_alive() for process in job.processes):
            if kills % 3 == 0:  # at times one, and the others a moment later, as torchrun does
                job.kill([rng.randrange(world)])
                time.sleep(0.3)
            job.kill()
            assert any(job.wait()), job.said()  # one may have been at its end
            kills -= 1
        else:
            assert job.wait() == [0] * world, job.said()
            assert_same(run, reference)
            shutil.rmtree(run)
    job = Job(prepared, world, run=run.name, resume="latest" if run.exists() else "")
    assert job.wait() == [0] * world, job.said()
    assert_same(run, reference)


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def second(function):
    """A stand-in for `function` that dies at the second call."""
    calls = []

    def stand_in(*args, **kwargs):
        calls.append(1)
        return die() if len(calls) == 2 else function(*args, **kwargs)

    return stand_in


def half_a_line(log, record):
    time.sleep(0.5)  # a save that should have waited for the line is done by now
    with open(log.path, "a") as file:
        file.write(json.dumps(record)[:20])
    if record["step"] > 1:
        die()
    os.truncate(log.path, log.path.stat().st_size - 20)
    ORIGINAL_WRITE(log, record)


def latest_not_written(path, text):
    return die() if path.name == "latest" and text > "step-000002" else watch.write_text(path, text)


def half_removed(folder, *args, **kwargs):
    if str(folder).endswith(".old.partial"):
        next(path for path in Path(folder).iterdir() if path.is_file()).unlink()
        die()
    ORIGINAL_RMTREE(folder, *args, **kwargs)


ORIGINAL_WRITE, ORIGINAL_RMTREE = watch.Log.write, shutil.rmtree
WINDOWS = {  # what is replaced by what: on rank 0, but for the first
    "another rank's state": (dcp.FileSystemWriter, "write_data", second(dcp.FileSystemWriter.write_data)),
    "the state": (dcp.FileSystemWriter, "finish", second(dcp.FileSystemWriter.finish)),
    "weights": (resume, "write_weights", second(resume.write_weights)),
    "manifest": (resume, "manifest", second(resume.manifest)),
    "name": (resume, "publish", second(resume.publish)),
    "latest": (resume, "write_text", latest_not_written),
    "removal of an old one": (shutil, "rmtree", half_removed),
    "metrics": (watch.Log, "write", half_a_line),
}


@dataclass
class KilledIn:
    """A hook that has a process killed in the midst of something."""

    window: str

    def __call__(self, rank: int, folder: Path):
        owner, name, stand_in = WINDOWS[self.window]
        if rank == (self.window == "another rank's state"):
            setattr(owner, name, stand_in)


def test_a_kill_in_every_window(prepared, unbroken):
    """If this goes, a save, a rename or a line has a moment in it that a kill does not survive: half of something is
    taken for whole."""
    run = prepared / "runs" / "windows"
    for window in WINDOWS:
        job = Job(prepared, 2, KilledIn(window), run=run.name, resume="latest" if run.exists() else "")
        job.end_after_the_first()
        assert -signal.SIGKILL in job.wait(), (window, job.said())
    job = Job(prepared, 2, run=run.name, resume="latest")
    assert job.wait() == [0, 0], job.said()
    assert_same(run, unbroken(2)[0])


@dataclass
class KilledAfter:
    """A hook: every process is killed in this step, from 0, with its gradients in place."""

    step: int

    def __call__(self, rank: int, folder: Path):
        return lambda step, loss, parts: die() if step == self.step else None


CHAIN = [  # world, options, killed in this step
    (2, dict(sp=1), 3),
    (2, dict(sp=2, shard="full"), 5),
    (1, dict(), 7),
    (4, dict(sp=2, shard="grads"), None),
]


def test_a_chain_of_layouts(prepared, unbroken):
    """If this goes, a run does not go on on another number of processes, another sharding or another sequence-parallel
    degree, with the optimizer and the moving average it had."""
    for world, changes, killed_in in CHAIN:
        run = prepared / "runs" / "chain"
        changes = changes | dict(run=run.name, precision="fp64", resume="latest" if run.exists() else "")
        job = Job(prepared, world, KilledAfter(killed_in), **changes)
        assert job.wait() == [0 if killed_in is None else -signal.SIGKILL] * world, job.said()
    reference = unbroken(1, precision="fp64")[0]
    assert losses(run) == pytest.approx(losses(reference), rel=1e-9)
    for name in ("model.safetensors", "ema.safetensors"):
        one, other = (load_file(folder / f"step-{STEPS:06d}" / name) for folder in (run, reference))
        assert max(runs.distance(one[key], other[key]) for key in other) < 1e-9


def test_two_jobs_on_one_run(prepared):
    """If this goes, a job that was started twice writes over its own checkpoints and metrics."""
    run = prepared / "runs" / "claimed"
    resume.claim(run)
    job = Job(prepared, 2, run=run.name, steps=1)
    assert all(job.wait()) and job.said().count("runs/claimed is in the hands of a job that still runs: stop") == 1
    resume.CLAIMED.pop(run).close()
    job = Job(prepared, 2, run=run.name, steps=1)
    assert job.wait() == [0, 0], job.said()


# ---------------------------------------------------------------------------------------------------------------------
# Signals that ask


def test_sigterm_and_sigint_save_and_exit(prepared, unbroken):
    """If this goes, a job whose time is up loses the steps since its last save, or one rank stops while the others
    wait for it."""
    run = prepared / "runs" / "told"
    for number, rank, after in ((signal.SIGTERM, 1, 2), (signal.SIGINT, 0, 5)):
        job = Job(prepared, 2, run=run.name, save_every=0, resume="latest" if run.exists() else "")
        end = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(losses(run)) < after:
            assert time.monotonic() < end, job.said()
            time.sleep(0.02)
        os.kill(job.processes[rank].pid, number)
        assert job.wait() == [resume.STOPPED] * 2, job.said()
        done = len(losses(run))
        assert after <= done < STEPS and (run / "latest").read_text() == f"step-{done:06d}"
        assert f"stopped as told; the last good checkpoint is runs/told/step-{done:06d}" in job.said()
    job = Job(prepared, 2, run=run.name, resume="latest")
    assert job.wait() == [0, 0], job.said()
    assert_same(run, unbroken(2)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Disks


@dataclass
class SmallFiles:
    """A hook: from step `first` to step `last` no file may grow beyond 50 kB, as if the disk were full."""

    first: int
    last: int

    def __call__(self, rank: int, folder: Path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def observe(step, loss, parts):
            if step in (self.first, self.last + 1):
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if step == self.first else soft, hard))

        return observe


def test_a_save_that_fails_is_told_and_training_goes_on(prepared, unbroken):
    """If this goes, a disk that is full for a while ends a run, or costs it its last good checkpoint, or nobody is
    told."""
    run = prepared / "runs" / "limited"
    job = Job(prepared, 2, SmallFiles(3, 5), run=run.name)
    assert job.wait() == [0, 0], job.said()
    failed = re.findall(
        r"(step-\d+) was not saved: .*; the last good checkpoint is runs/limited/step-00000[23]", job.said()
    )
    assert {"step-000004", "step-000005"} <= set(failed) <= {f"step-00000{i}" for i in (3, 4, 5, 6)}, job.said()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "step-000004" in " ".join(record.get("save_failed", "") for record in records)
    assert_same(run, unbroken(2)[0])


def test_a_full_disk_at_the_end(prepared):
    """If this goes, a run whose last save failed looks like one that succeeded; or a checkpoint that cannot fit is
    begun all the same."""
    run = prepared / "runs" / "full"
    run.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", run], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk to fill: {mounted.stderr.strip()}")
    try:
        job = Job(prepared, 1, FullDisk(), run=run.name, steps=4)
        assert job.wait() == [2], job.said()
        assert (run / "latest").read_text() == "step-000002" and not resume.damage(run / "step-000002")
        assert re.search(
            r"train.py: step-000004 was not saved: .* MB free.; the last good .*/step-000002$", job.said(), re.M
        )
        assert sorted(resume.checkpoints(run)) == [1, 2] and not list(run.glob("*.partial"))
        job = Job(prepared, 1, run=run.name, steps=4, resume="latest")
        assert job.wait() == [2] and re.search(r"a checkpoint takes .* MB and .* has .* MB free", job.said())
    finally:
        subprocess.run(["umount", run], check=True)


class FullDisk:
    """A hook: after two saves the disk is filled, but for 100 kB, after it was found to have room."""

    def __call__(self, rank: int, folder: Path):
        check, ballast = resume.check_space, folder / "runs" / "full" / "ballast"

        def stand_in(run, parts):
            if len(resume.checkpoints(run)) < 2:
                check(run, parts)
            elif not ballast.exists():
                ballast.write_bytes(bytes(shutil.disk_usage(run).free - 100_000))

        resume.check_space = stand_in


# ---------------------------------------------------------------------------------------------------------------------
# What --resume refuses


@pytest.fixture(scope="module")
def saved(prepared):
    """A run of one process that has two checkpoints."""
    runs.run(prepared, run="saved", steps=2, save_every=1, ema=0.9)
    return prepared / "runs" / "saved"


def refusal(folder: Path, **changes) -> str:
    with pytest.raises(ValueError) as error:
        runs.run(folder, **{"run": "saved", "resume": "latest", "steps": 2, "save_every": 1, "ema": 0.9} | changes)
    return str(error.value)


def test_changed_options_are_listed(prepared, saved):
    """If this goes, a resumed run silently trains something else than it began; or what only says how it is computed
    and kept is held against it."""
    said = refusal(prepared, lr=0.02, seed=1, precision="fp32", steps=3, batch_size=5, betas=(0.8, 0.9))
    for change in ("lr 0.01 is now 0.02", "seed 0 is now 1", "precision fp64 is now fp32", "steps 2 is now 3"):
        assert change in said
    assert (
        "batch_size 4 is now 5" in said and "betas [0.9, 0.99] is now [0.8, 0.9]" in said and "--allow-change" in said
    )
    record = json.loads((saved / "config.json").read_text())
    free = dict(
        shard="full", sp=4, recompute="block", pack_tokens=50, keep=9, save_every=7, resume=str(saved / "step-000001")
    )
    resume.check(saved, record | {"options": record["options"] | free})
    other = record["options"] | {"resume": "latest", "lr_schedule": "constant", "allow_change": True}
    resume.check(saved, {"options": other})


def test_changed_content_is_listed(prepared, saved):
    """If this goes, a run goes on with other data or from other weights under the same names."""
    caption = prepared / "data" / "a.txt"
    before = caption.read_text()
    caption.write_text("something else")
    try:
        assert re.search("data [0-9a-f]+ is now [0-9a-f]+. Go back", refusal(prepared))
    finally:
        caption.write_text(before)
    torch.manual_seed(1)
    runs.write_dit(prepared / "other.safetensors", runs.TINY)
    assert re.search(
        "weights [0-9a-f]+ is now [0-9a-f]+. Go back", refusal(prepared, checkpoint=str(prepared / "other.safetensors"))
    )


def test_a_damaged_checkpoint_is_named(prepared, saved):
    """If this goes, a run goes on from a file that is not what was written, or silently from an older one."""
    newest = saved / "step-000002"
    state = next(newest.glob("state/*.distcp"))
    whole = state.read_bytes()
    harms = {
        "is not what was written": lambda: state.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]),
        f"has 5000 bytes, not {len(whole)}": lambda: state.write_bytes(whole[:5000]),
        "is missing": lambda: state.unlink(),
    }
    for words, harm in harms.items():
        harm()
        said = refusal(prepared)
        assert f"{newest.name} is damaged: state/{state.name} {words}; the one before is whole: --resume" in said
        assert said.endswith("step-000001")
    record = runs.run(prepared, run="saved", resume=str(saved / "step-000001"), steps=2, ema=0.9)
    assert len(record["loss"]) == 1 and not resume.damage(newest) and losses(saved)[1:] == record["loss"]


def test_a_run_is_not_begun_over_another(prepared, saved):
    """If this goes, a forgotten --resume overwrites the checkpoints of weeks."""
    with pytest.raises(ValueError, match="runs/saved holds step-000002 of an earlier run: .* --resume latest"):
        train.main(runs.config(prepared, run="saved", resume=""))


def test_old_checkpoints_go_in_order(tmp_path):
    """If this goes, --keep removes the newest checkpoint, or files that are none; or leaves those of a course that was
    given up, to be taken for newer ones."""
    for name in ("step-000002", "step-999999", "step-1000000", "step-1000001", "step-abc", "step-000009-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000003").write_text("a file")
    resume.prune(tmp_path, 1000000, 0)
    assert len(resume.checkpoints(tmp_path)) == 4
    resume.prune(tmp_path, 1000000, 2)
    assert sorted(resume.checkpoints(tmp_path)) == [999999, 1000000] and len(list(tmp_path.iterdir())) == 5


def test_two_models_some_of_each_frozen(prepared):
    """If this goes, a run of two experts or with --trainable does not go on with both optimizers and averages as they
    were, or leaves weights that lack what was frozen."""
    runs.write_dit(prepared / "low.safetensors", runs.TINY)
    experts = dict(model="demo-t2v-experts", low_checkpoint=str(prepared / "low.safetensors"), trainable="blocks.1")
    options = experts | dict(ema=0.9, steps=3, save_every=1, shift=3.0, batch_size=6)
    reference = runs.run(prepared, run="experts", **options)
    runs.run(prepared, run="experts-2", killed_in=2, **options)
    record = runs.run(prepared, run="experts-2", resume="latest", **options)
    assert record["loss"] == reference["loss"][2:]
    folder = prepared / "runs" / "experts-2" / "step-000003"
    for expert in ("high", "low"):
        weights, average = (load_file(folder / f"{expert}-{what}.safetensors") for what in ("model", "ema"))
        assert all(torch.equal(x, record["params"][f"{expert}.{name}"]) for name, x in weights.items())
        assert average.keys() == weights.keys() == {name for name, _ in WanDiT(runs.TINY).named_parameters()}
        assert torch.equal(average["head.head.weight"], weights["head.head.weight"])
        assert not torch.equal(average["blocks.1.ffn.0.weight"], weights["blocks.1.ffn.0.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# The cache


def die_in_the_third(tensors, path, metadata):
    if len(list(path.parent.parent.glob("*/*"))) < 2:
        return ORIGINAL_SAVE(tensors, path, metadata)
    path.write_bytes(b"half")
    die()


ORIGINAL_SAVE = cache.save_file


class KilledInTheFill:
    def __call__(self, rank: int, folder: Path):
        cache.save_file = die_in_the_third


def test_a_kill_while_the_cache_is_filled_by_two_jobs(prepared, unbroken):
    """If this goes, two jobs that fill one cache spoil it for each other, or a kill leaves half an entry that is then
    trained on; or what it left behind stays for ever."""
    folder = prepared / "shared-cache"
    job = Job(prepared, 2, KilledInTheFill(), cache=str(folder), run="filled-0")
    job.end_after_the_first()
    assert -signal.SIGKILL in job.wait(), job.said()
    orphans = list(folder.glob("*/*.tmp"))
    assert orphans
    for orphan in orphans:
        os.utime(orphan, (0, 0))
    jobs = [Job(prepared, 2, cache=str(folder), run=f"filled-{i}", resume="" if i else "latest") for i in range(2)]
    for i, job in enumerate(jobs):
        assert job.wait() == [0, 0], job.said()
        assert "cache: " in job.said() and " of 9 found" in job.said()
        assert_same(prepared / "runs" / f"filled-{i}", unbroken(2)[0])
    files = list(folder.glob("*/*"))
    assert len(files) == 9 and all(cache.read_tensors(file) for file in files)


def test_damaged_entries_and_no_cache_at_all(prepared, capsys):
    """If this goes, a flipped bit in the cache is trained on; or --cache off trains on other samples."""
    runs.run(prepared, run="fill", steps=2)
    victim = next((prepared / "cache" / "samples").iterdir())
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"{victim.name} is damaged"):
        cache.read_tensors(victim)
    capsys.readouterr()
    cached = runs.run(prepared, run="cached", steps=2)
    said = capsys.readouterr().out
    assert f"{victim.name} is damaged" in said and "cache: 8 of 9 found, 1 encoded" in said
    off = runs.run(prepared, run="off", steps=2, cache="off")
    assert off["loss"] == cached["loss"] and not (prepared / "off").exists()
