"""The command line in processes of its own, which a test may kill. They are forked from one that has torch loaded
already, so that a start costs little."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "matplotlib.backends.backend_agg", "tyro", "spanformer.cli.train", "spanformer.train.run"]
)


def start(arguments: list[str], screen: Path, *, die_in_saving: int = 0, most_bytes: int = 0) -> ForkServerProcess:
    """`spanformer ARGUMENTS`, what it prints going to the file `screen`.

    die_in_saving: killed at this many calls of fsync by a checkpoint, 6 of which make one; most_bytes: no file may grow
    longer, as if the disk were full.
    """
    process = _CONTEXT.Process(target=_run, args=(arguments, screen, die_in_saving, most_bytes))
    process.start()
    return process


def _run(arguments: list[str], screen: Path, die_in_saving: int, most_bytes: int) -> None:
    import resource

    from spanformer.cli.main import main

    with screen.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    if die_in_saving:
        real, calls = os.fsync, iter(range(1, 1_000_000))

        def fsync(descriptor: int) -> None:
            of_checkpoint = "/checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}")
            if of_checkpoint and next(calls) == die_in_saving:
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor)

        os.fsync = fsync
    main(arguments)
    sys.exit(0)
