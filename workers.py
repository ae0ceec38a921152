"""Decoding in processes of its own: a decoder that hangs or dies takes a worker with it, and not the run.

    with Decoders(8) as decoders:
        source = decoders.inspect(path, "video")
        for picture in decoders.frames(path, [0, 5, 9], source.timeline): ...

The methods are those of decode.py, under the same names. Any thread may call them. A worker is started when it is first
needed and kept; it is a plain Python process that imports PyAV and numpy alone, so it is there in a third of a second.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue

import numpy as np

import decode
from manifests import DataError

# ---- In the worker


JOBS = {"inspect": decode.inspect, "prove": decode.prove, "frames": decode.frames, "picture": decode.picture}


def serve(connection: Connection):
    """Does one job after another until the other end is closed. A job's answer is any number of ("value", x), between
    them ("alive", None) at most once a second, and at last ("end", None), ("refused", why) or ("failed", traceback)."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    told = time.monotonic()

    def alive():
        nonlocal told
        if time.monotonic() > told + 1:
            told = time.monotonic()
            connection.send(("alive", None))

    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = JOBS[name](*arguments, alive=alive)
            for value in result if isinstance(result, Iterator) else [result]:
                connection.send(("value", value))
            connection.send(("end", None))
        except DataError as error:
            connection.send(("refused", str(error)))
        except ConnectionError:
            return
        except Exception:
            connection.send(("failed", traceback.format_exc()))


def end_with_parent(parent: int):
    """A worker that hangs in a decoder does not see that the run has ended; this thread does."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


# ---- In the run


class Worker:
    def __init__(self, program: str):
        self.connection, theirs = Pipe()
        command = [sys.executable, program, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def end(self):
        """At once, and without a trace: it holds nothing but what it was decoding."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Decoders:
    """At most `workers` decoding processes, of `threads` each. A worker that says nothing for `deadline` seconds (it
    speaks with every frame) is killed, and DataError names the file; so it does where a worker dies."""

    def __init__(self, workers: int, threads: int = 1, deadline: float = 60, program: str = __file__):
        self.threads, self.deadline, self.program = threads, deadline, program
        self.started: set[Worker] = set()
        self.idle: LifoQueue[Worker | None] = LifoQueue()  # None: one that is yet to be started
        for _ in range(workers):
            self.idle.put(None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for worker in self.started:
            worker.end()

    def inspect(self, path: Path, kind: str) -> decode.Source:
        [source] = self.run(path, "inspect", kind)
        return source

    def prove(self, path: Path, windows: Sequence[tuple[int, int]], timeline: decode.Timeline) -> None:
        list(self.run(path, "prove", windows, timeline, self.threads))

    def frames(self, path: Path, indices: Sequence[int], timeline: decode.Timeline) -> Iterator[np.ndarray]:
        return self.run(path, "frames", indices, timeline, self.threads)

    def picture(self, path: Path) -> np.ndarray:
        [pixels] = self.run(path, "picture")
        return pixels

    def run(self, path: Path, job: str, *arguments) -> Iterator:
        """Yields the values of a job. DataError where the file is at fault, RuntimeError where this program is."""
        worker, ended = self.idle.get(), False
        try:
            worker = worker or Worker(self.program)
            self.started.add(worker)
            worker.connection.send((job, (path, *arguments)))
            while True:
                if not worker.connection.poll(self.deadline):
                    raise DataError(f"{path}: its decoder was stopped: it did nothing for {self.deadline} seconds")
                kind, value = worker.connection.recv()
                if kind == "value":
                    yield value
                    continue
                ended = kind != "alive"
                if kind == "refused":
                    raise DataError(value)
                if kind == "failed":
                    raise RuntimeError(f"{path}: the decoding worker failed:\n{value}")
                if ended:
                    return
        except (EOFError, ConnectionError) as error:
            code = worker.process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            raise DataError(f"{path}: its decoder died {how}") from error
        finally:
            if worker and not ended:
                worker.end()
                self.started.discard(worker)
            self.idle.put(worker if ended else None)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
