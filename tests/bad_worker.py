"""A decoding worker whose decoder goes wrong at files of certain names, as real ones do."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import decode  # noqa: E402
import workers  # noqa: E402

inspect = decode.inspect


def bad_inspect(path, kind, alive):
    if "segfaults" in path.name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "quits" in path.name:
        os._exit(3)
    if "hangs" in path.name:
        time.sleep(600)
    if "slow" in path.name:
        for _ in range(4):
            time.sleep(0.6)
            alive()
    if "bug" in path.name:
        raise TypeError("no such thing")
    return inspect(path, kind, alive)


workers.JOBS["inspect"] = bad_inspect
workers.serve(Connection(int(sys.argv[1])))
