"""Decoding processes: what one of them suffers is told by file name, and the run goes on."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_video import number_of, numbered, write_image, write_video

import decode
from manifests import DataError
from workers import Decoders

BAD = str(Path(__file__).with_name("bad_worker.py"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("clip") / "good.mp4", [numbered(i) for i in range(40)], g=10)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_same_as_in_process(clip, tmp_path):
    """Workers give what the decoder gives in this process: frames, pictures, findings and complaints."""
    picture = write_image(tmp_path / "p.png", numbered(5))
    with Decoders(2) as decoders:
        found = decoders.inspect(clip, "video")
        assert found == decode.inspect(clip, "video")
        assert [number_of(frame) for frame in decoders.frames(clip, [0, 7, 7, 33], found.timeline)] == [0, 7, 7, 33]
        assert np.array_equal(decoders.picture(picture), decode.picture(picture))
        decoders.prove(clip, [(0, 9), (30, 39)], found.timeline)
        with pytest.raises(DataError, match=r"good\.mp4: frame 40 is needed"):
            decoders.prove(clip, [(35, 40)], found.timeline)
        with pytest.raises(DataError, match=r"gone\.mp4: cannot be read: .*No such file"):
            decoders.inspect(clip.with_name("gone.mp4"), "video")
        pids = {worker.process.pid for worker in decoders.started}
        assert len(pids) == 1  # a complaint costs no worker, and a second one was never needed
    assert not any(map(alive, pids))


def test_hang_and_death(clip, tmp_path):
    """A decoder that crashes, quits or hangs costs its own file and nothing else, also while others work; one that is
    slow but gets on is let be. In a process of its own that would be the end of the run, or its silent standstill."""
    names = ["segfaults.mp4", "a.mp4", "quits.mp4", "b.mp4", "hangs.mp4", "c.mp4", "slow.mp4"]
    for name in names:
        (tmp_path / name).write_bytes(clip.read_bytes())

    def inspect(name):
        try:
            return decoders.inspect(tmp_path / name, "video").timeline.frames
        except DataError as error:
            return str(error).removeprefix(f"{tmp_path}/")

    start = time.monotonic()
    with Decoders(2, deadline=1.5, program=BAD) as decoders, ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(inspect, names), strict=True))
        pids = {worker.process.pid for worker in decoders.started}
    assert found == {
        "segfaults.mp4": "segfaults.mp4: its decoder died by SIGSEGV",
        "quits.mp4": "quits.mp4: its decoder died with status 3",
        "hangs.mp4": "hangs.mp4: its decoder was stopped: it did nothing for 1.5 seconds",
        **dict.fromkeys(["a.mp4", "b.mp4", "c.mp4", "slow.mp4"], 40),
    }
    assert time.monotonic() - start < 20 and not any(map(alive, pids))


def test_pipe_without_a_writer(tmp_path):
    """A FIFO in place of a file is refused, where opening it would wait for ever."""
    os.mkfifo(tmp_path / "a.mp4")
    with Decoders(1, deadline=5) as decoders, pytest.raises(DataError, match=r"a\.mp4: is no regular file"):
        decoders.inspect(tmp_path / "a.mp4", "video")


def test_bug_is_no_bad_file(clip, tmp_path):
    """What is wrong with the program stops the run, with the worker's own traceback; --allow-drop must not drop files
    for it."""
    (tmp_path / "bug.mp4").write_bytes(clip.read_bytes())
    with Decoders(1, program=BAD) as decoders, pytest.raises(RuntimeError, match="(?s)bug.mp4: .*TypeError: no such"):
        decoders.inspect(tmp_path / "bug.mp4", "video")


def test_abandoned_job(clip):
    """Frames that nobody takes end with their worker, and the next job gets a fresh one."""
    timeline = decode.scan(clip)[0]
    with Decoders(1) as decoders:
        frames = decoders.frames(clip, range(40), timeline)
        next(frames)
        [worker] = decoders.started
        frames.close()
        assert not alive(worker.process.pid)
        assert len(list(decoders.frames(clip, range(40), timeline))) == 40
