"""launch: one process for each rank of a mesh, watched over until all have returned.

Each process gets the function over its standard input, which stays open: when it closes, whoever
started the ranks is gone, and they end. What a rank returns or raises comes back over a pipe, whose
end tells at once that a process is no more.
"""

import codecs
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, NamedTuple

import torch.distributed as dist

from ..mesh import Mesh

HOST = "127.0.0.1"
GRACE = 5.0  # seconds between asking a process to end and ending it
GATHER = 0.2  # seconds in which failures of several ranks count as one
HELD = 0.2  # seconds that a line waits for the end of rank 0's
# What a rank says when another one is gone.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


class RankError(RuntimeError):
    """The first rank that failed; its exception is the cause, where it could be sent.

    Attributes:
        rank: its number.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Failure(NamedTuple):
    """How a rank failed.

    Attributes:
        rank: its number.
        text: its traceback, or how its process ended.
        error: what it raised; None if the process just ended.
        time: when, by the clock that all processes of a host share.
    """

    rank: int
    text: str
    error: BaseException | None
    time: float

    @property
    def order(self) -> tuple[int, float]:
        """Causes before those who noticed: raised, then ended, then a lost connection."""
        if self.error is None:
            return 1, self.time
        return (2 if any(echo in self.text for echo in ECHOES) else 0), self.time


def launch(
    f: Callable[..., Any],
    mesh: Mesh,
    *args: Any,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[Any]:
    """Run a function on processes of this host, one for each rank of a mesh.

    Works in a notebook, too, with functions of its cells: processes are started afresh, nothing is
    forked, and a script needs no ``if __name__ == "__main__"``. What ranks print appears here, that
    of ranks above 0 with ``rank 1:`` before each line.

    Args:
        f: called as ``f(mesh, *args)`` on each rank, with the processes' own mesh. Functions that
            cannot be imported (of a notebook or a script, lambdas) take the package cloudpickle.
        mesh: the axes and their sizes; a simulated mesh, as ``zf.Mesh(dp=4)`` is outside of ranks.
        args: further arguments, sent to each rank.
        timeout: seconds that a rank waits for others, in collectives and at the start; None:
            torch's default.
        max_restarts: how often all ranks are started again when one has failed; with
            ``zf.fit(..., checkpoint=...)`` they go on from the last checkpoint.

    Returns:
        What each rank returned, tensors on the host.

    Raises:
        RankError: when a rank raised, or its process ended, and no restart is left;
            the other ranks are ended within seconds.
        ValueError: for a mesh of ranks that run already, or ``max_restarts`` below 0.
        TypeError: for a function or arguments that cannot be sent.

    >>> import zero_fn as zf
    >>> zf.launch(print, zf.Mesh(dp=1))
    Mesh(dp=1) of 1 processes
    [None]
    """
    if mesh.interpreter == "processes" and mesh.size > 1:
        raise ValueError(
            f"{mesh} is of processes that run already; call the function itself, or launch from "
            "outside of them"
        )
    if max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts}; it must be 0 or more")
    call = _sent((f, mesh.shape, timeout, args))
    for restarts in range(max_restarts + 1):
        try:
            return _Ranks(mesh.size, call, restarts).results()
        except RankError as error:
            if restarts == max_restarts:
                raise
            text = str(error).splitlines()[0]
            print(f"{text}; starting again, {restarts + 1} of {max_restarts}", file=sys.stderr)
    raise AssertionError


def _sent(call: Any) -> bytes:
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        data: bytes = pickler.dumps(call)
        if pickler is pickle and b"__main__" in data:
            raise TypeError("it is defined in a notebook or a script")
    except Exception as error:
        hint = "" if pickler is not pickle else "; pip install 'zero-fn[launch]' for cloudpickle"
        raise TypeError(
            f"{call[0]!r} and its arguments cannot be sent to processes: {error}{hint}"
        ) from error
    return data


class _Ranks:
    """The processes of one start."""

    def __init__(self, size: int, call: bytes, restarts: int) -> None:
        self.size = size
        # Kept here, as torchrun does: the ranks find each other by it, on a port that is free.
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            HOST, 0, is_master=True, wait_for_workers=False
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: dict[Connection, int] = {}
        self.readers: list[threading.Thread] = []
        self.out, self.err = _Shared(sys.stdout), _Shared(sys.stderr)
        try:
            for rank in range(size):
                self._start(rank, restarts)
            for process in self.processes:
                _tell(process, call)
        except BaseException:
            self._end()
            raise

    def _start(self, rank: int, restarts: int) -> None:
        ours, theirs = Pipe(duplex=False)
        process = subprocess.Popen(
            [sys.executable, "-m", "zero_fn.launching.rank", str(theirs.fileno())],
            env=os.environ | self._environment(rank, restarts),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that what a rank starts can be ended with it
        )
        theirs.close()
        self.processes.append(process)
        self.pipes[ours] = rank
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, to in ((process.stdout, self.out), (process.stderr, self.err)):
            reader = threading.Thread(target=_forward, args=(stream, to, rank), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _environment(self, rank: int, restarts: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }

    def results(self) -> list[Any]:
        """What the ranks return.

        Raises:
            RankError: for the first that fails; then all are ended.
        """
        found: dict[int, Any] = {}
        failures: list[Failure] = []
        try:
            while self.pipes and not failures:
                self._hear(found, failures, None)
            end = time.monotonic() + GATHER
            while failures and self.pipes and time.monotonic() < end:
                self._hear(found, failures, end - time.monotonic())
            if not failures:
                for process in self.processes:
                    process.wait()  # saves in the background are written to the end
        finally:
            self._end()
        if failures:
            first = min(failures, key=lambda failure: failure.order)
            raise RankError(self._message(first), first.rank) from first.error
        return [found[rank] for rank in range(self.size)]

    def _hear(self, found: dict[int, Any], failures: list[Failure], seconds: float | None) -> None:
        for pipe in wait(list(self.pipes), seconds):
            assert isinstance(pipe, Connection)
            rank = self.pipes.pop(pipe)
            try:
                fine, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process = self.processes[rank]
                text = _ending(process.wait(GRACE))
                failures.append(Failure(rank, text, None, time.monotonic()))
            except Exception as error:  # of classes that are not known here, say
                text = f"what it sent cannot be read: {error!r}"
                failures.append(Failure(rank, text, error, time.monotonic()))
            else:
                if fine:
                    found[rank] = answer
                else:
                    failures.append(Failure(rank, *answer))
            pipe.close()

    def _message(self, first: Failure) -> str:
        name = f"rank {first.rank} of {self.size}"
        if first.error is None:
            return f"{name}: {first.text}"
        what = f"{type(first.error).__name__}: {first.error}".rstrip(": ")
        silent = ", ".join(map(str, sorted(self.pipes.values())))
        if "imed out" in what and silent:
            what += f"\nno word from rank {silent}, for which it may have waited"
        return f"{name} raised {what}\n\n{first.text}"

    def _end(self) -> None:
        """End all processes, and what they started."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        deadline = time.monotonic() + GRACE
        self._signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join(1.0)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def _tell(process: subprocess.Popen[bytes], call: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which its pipe tells
        process.stdin.write(len(call).to_bytes(8, "little") + call)
        process.stdin.flush()


def _ending(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        often = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{often}"
    return f"its process ended with exit code {code} before the function had returned"


class _Shared:
    """A stream that all ranks write to: rank 0 as it comes, others by lines between its own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.changed = threading.Condition()
        self.within = False  # a line of rank 0, which may be a progress bar and never end

    def write(self, text: str) -> None:
        with self.changed:
            self._put(text)
            self.within = not text.endswith("\n")
            self.changed.notify_all()

    def write_line(self, line: str) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: not self.within, HELD):
                self._put("\n")
                self.within = False
            self._put(line if line.endswith("\n") else line + "\n")

    def _put(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _forward(stream: IO[bytes], to: _Shared, rank: int) -> None:
    with stream:
        if rank:
            for line in stream:
                to.write_line(f"rank {rank}: {line.decode(errors='replace')}")
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while data := os.read(stream.fileno(), 1 << 16):
            to.write(decoder.decode(data))
