"""What the batchers share: requests that wait, their deadlines, and figures of what was done."""

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

REMEMBERED = 4096  # of how many of the last requests and batches figures are kept


class QueueFull(RuntimeError):
    """There are as many requests waiting as the queue holds."""


class Closed(RuntimeError):
    """The batcher takes no more requests, or was closed before this one was answered."""


@dataclass(eq=False)
class Request(Generic[T]):
    """One request.

    Attributes:
        item: what was asked.
        future: where the answer goes.
        arrived: when it came, in seconds of ``time.monotonic``.
        deadline: when it is given up, or None.
    """

    item: T
    future: "Future[Any]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    deadline: float | None = None

    def expired(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless somebody has answered or cancelled."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def waited_too_long(self, now: float, where: str) -> None:
        self.fail(TimeoutError(f"given up after {now - self.arrived:.3f} s {where}"))


def new_request(item: T, timeout: float | None) -> Request[T]:
    """A request that arrives now and is given up ``timeout`` seconds later.

    Raises:
        ValueError: for a time-out that is not above 0.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it is a number of seconds above 0, or None")
    return Request(item, deadline=None if timeout is None else time.monotonic() + timeout)


class Metrics(NamedTuple):
    """Figures of a batcher, over its last requests and batches.

    Attributes:
        answered: requests that got a result, in all.
        failed: requests that got an error, time-outs included, in all.
        cancelled: requests that were cancelled, in all.
        waiting: requests that wait now.
        queue_p50: seconds from arrival to the start of work, the median.
        queue_p99: the same, the 99th percentile.
        batch_size: the mean number of requests in a batch, or in a step.
        tokens_per_second: tokens over the time that was spent working; 0 where none are counted.
    """

    answered: int
    failed: int
    cancelled: int
    waiting: int
    queue_p50: float
    queue_p99: float
    batch_size: float
    tokens_per_second: float


class Meter:
    """Counts what a batcher does; of bounded size, and safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"answered": 0, "failed": 0, "cancelled": 0}
        self._waits: deque[float] = deque(maxlen=REMEMBERED)
        self._work: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)

    def started(self, request: Request[Any]) -> None:
        with self._lock:
            self._waits.append(time.monotonic() - request.arrived)

    def worked(self, size: int, tokens: int, seconds: float) -> None:
        with self._lock:
            self._work.append((size, tokens, seconds))

    def ended(self, request: Request[Any]) -> None:
        future = request.future
        if future.cancelled():
            kind = "cancelled"
        else:
            kind = "failed" if future.exception() is not None else "answered"
        with self._lock:
            self._counts[kind] += 1

    def read(self, waiting: int) -> Metrics:
        with self._lock:
            waits, work, counts = sorted(self._waits), list(self._work), dict(self._counts)
        seconds = sum(s for _, _, s in work)
        return Metrics(
            **counts,
            waiting=waiting,
            queue_p50=_percentile(waits, 0.5),
            queue_p99=_percentile(waits, 0.99),
            batch_size=sum(n for n, _, _ in work) / len(work) if work else 0.0,
            tokens_per_second=sum(t for _, t, _ in work) / seconds if seconds else 0.0,
        )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
