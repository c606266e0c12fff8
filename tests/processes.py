"""Real ranks for tests: a pool of processes, started once, that run a function on every rank.

A test hands over a module-level function ``f(*args)``; every process calls it (it makes its own
``zf.Mesh``) and sends back what it returns. A rank that raises or hangs fails the test and closes
the pool; the next test gets a new one. This process keeps the store by which the ranks find each
other, as torchrun does, so that its port is never free for others in between.
"""

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

TIME_LIMIT = 120.0  # seconds a call may take before its ranks count as hanging
HOST = "127.0.0.1"
GRACE = 5.0  # seconds that the others get when a rank has failed


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


class ProcessPool:
    """``size`` processes, one thread each, joined in one Gloo group when a mesh first asks."""

    def __init__(self, size: int, time_limit: float = TIME_LIMIT) -> None:
        self.size = size
        self.time_limit = time_limit
        context = get_context("spawn")
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, self.store.port, theirs),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, f: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``f(*args)`` returns on each rank.

        Raises:
            RankError: if a rank raises, ends, or takes longer than the time limit.
        """
        for pipe in self.pipes:
            pipe.send((f, args))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self.pipes))
        deadline = time.monotonic() + self.time_limit
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting, "no answer in time")
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    fine, answer = waiting.pop(rank).recv()
                except EOFError:
                    fine, answer = False, "the process ended"
                (answers if fine else failures)[rank] = answer
                if not fine:  # the others wait for it in vain
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        return [answers[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return bool(self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


_pools: dict[int, ProcessPool] = {}


def run_on_processes(size: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``f(*args)`` returns on each of ``size`` processes."""
    if size not in _pools or not _pools[size].alive:
        _pools[size] = ProcessPool(size)
    return _pools[size].run(f, *args)


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 makes no store of its own
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    while True:
        try:
            f, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, f(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
