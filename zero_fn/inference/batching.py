"""Dynamic batching: requests of many threads and asyncio tasks, answered together.

One thread takes requests from a bounded queue. Those of one bucket go together: as soon as there
are ``max_batch`` of them, or the oldest has waited ``max_wait_ms``. A batch whose function raises
is run again one by one, so that only the requests that raise on their own fail.
"""

import asyncio
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from .requests import Closed, Meter, Metrics, QueueFull, Request, new_request

Bucket = Callable[[Any], Hashable] | Sequence[int] | None


class Batcher:
    """Makes a function of many items answer single requests.

    >>> import zero_fn as zf
    >>> with zf.Batcher(lambda items: [2 * item for item in items], max_batch=8) as batcher:
    ...     futures = [batcher.submit(i) for i in range(3)]
    ...     [future.result() for future in futures]
    [0, 2, 4]

    Args:
        fn: a list of items to a list of as many results, in order. A result that is an exception
            is its request's error.
        max_batch: how many items go together at most.
        max_wait_ms: how long the oldest of them waits for others, in milliseconds.
        bucket: which items may go together: those of which this function gives the same; or
            lengths, in ascending order: an item goes with those whose ``len`` rounds up to the
            same one, and longer ones than the last are refused. None: all of them.
        max_queue: how many requests may wait.
        name: the thread's.

    Raises:
        ValueError: for settings that mean nothing.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        max_batch: int = 32,
        max_wait_ms: float = 5.0,
        bucket: Bucket = None,
        max_queue: int = 1024,
        name: str = "batcher",
    ) -> None:
        for key, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{key} is {value}; it is 1 or more")
        if not max_wait_ms >= 0:
            raise ValueError(f"max_wait_ms is {max_wait_ms}; it is 0 or more")
        self._fn, self._max_batch, self._max_wait = fn, max_batch, max_wait_ms / 1000
        self._bucket, self._max_queue = _bucket(bucket), max_queue
        self._queues: dict[Hashable, deque[Request[Any]]] = {}
        self._waiting = 0
        self._closed = False
        self._meter = Meter()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, item: Any, *, timeout: float | None = None, block: bool = True
    ) -> "Future[Any]":
        """Ask for one item's result, from any thread.

        Args:
            item: what ``fn`` takes a list of.
            timeout: seconds until the request is given up, from now; None: never. Work on it that
                has begun goes on.
            block: whether to wait, up to the time-out, while the queue is full.

        Returns:
            The result's future. Cancelling it takes the request out of the queue.

        Raises:
            QueueFull: if there is no room in the queue.
            Closed: after ``close``.
            ValueError: for an item that no bucket takes.
        """
        key = self._bucket(item)
        request = new_request(item, timeout)
        with self._changed:
            while not self._closed and self._waiting >= self._max_queue and block:
                left = None if request.deadline is None else request.deadline - time.monotonic()
                if not self._changed.wait(left) and left is not None:
                    break
            self._admit(key, request)
        return request.future

    async def ask(self, item: Any, *, timeout: float | None = None) -> Any:
        """The same from a task of asyncio: the item's result, without stopping the loop.

        While the queue is full the task waits for room. Cancelling the task cancels the request.
        """
        key = self._bucket(item)
        request = new_request(item, timeout)
        while True:
            with self._changed:
                if self._closed or self._waiting < self._max_queue:
                    self._admit(key, request)
                    break
            if request.expired(time.monotonic()):
                raise QueueFull(f"no room among {self._max_queue} requests in {timeout} s")
            await asyncio.sleep(0.002)
        return await asyncio.wrap_future(request.future)

    def metrics(self) -> Metrics:
        """Figures of the last requests and batches."""
        return self._meter.read(self._waiting)

    def close(self, *, drain: bool = True) -> None:
        """End: with ``drain`` after all that waits is answered, else with errors for it."""
        with self._changed:
            self._closed = True
            if not drain:
                for queue in self._queues.values():
                    for request in queue:
                        self._end(request, Closed("the batcher was closed"))
                self._queues.clear()
                self._waiting = 0
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Batcher":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(drain=error[0] is None)

    def _admit(self, key: Hashable, request: Request[Any]) -> None:
        if self._closed:
            raise Closed("the batcher is closed and takes no more requests")
        if self._waiting >= self._max_queue:
            raise QueueFull(
                f"{self._waiting} requests wait, as many as the queue holds; try again later, or "
                "make max_queue larger"
            )
        self._queues.setdefault(key, deque()).append(request)
        self._waiting += 1
        request.future.add_done_callback(self._wake)
        self._changed.notify_all()

    def _wake(self, future: "Future[Any]") -> None:
        """What was cancelled leaves its place at once."""
        if future.cancelled():
            with self._changed:
                self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                batch = self._next_batch()
                while batch is None:
                    batch = self._next_batch()
            if not batch:
                return
            self._answer(batch)
            del batch  # nobody keeps a request that is answered

    def _next_batch(self) -> list[Request[Any]] | None:
        """The next requests to answer; none at the end; None after a wait. Holds the lock."""
        now = time.monotonic()
        self._drop(now)
        ready, soonest = None, None
        for key, queue in self._queues.items():
            due = queue[0].arrived + self._max_wait
            if len(queue) >= self._max_batch or self._closed:
                due = min(due, now)
            if soonest is None or due < soonest:
                ready, soonest = key, due
        if soonest is None and self._closed:
            return []
        if soonest is None or soonest > now:
            deadlines = [
                r.deadline for q in self._queues.values() for r in q if r.deadline is not None
            ]
            wake = min([x for x in (soonest, *deadlines) if x is not None], default=None)
            self._changed.wait(None if wake is None else max(wake - now, 0))
            return None
        queue = self._queues[ready]
        batch = [queue.popleft() for _ in range(min(self._max_batch, len(queue)))]
        if not queue:
            del self._queues[ready]
        self._waiting -= len(batch)
        self._changed.notify_all()
        # From here on a request can no longer be cancelled.
        running = [r for r in batch if r.future.set_running_or_notify_cancel()]
        for request in set(batch) - set(running):
            self._meter.ended(request)
        for request in running:
            self._meter.started(request)
        return running or None

    def _drop(self, now: float) -> None:
        """Take out what was cancelled and what has waited too long."""
        for key in list(self._queues):
            kept: deque[Request[Any]] = deque()
            for request in self._queues[key]:
                if request.future.cancelled():
                    self._meter.ended(request)
                elif request.expired(now):
                    request.waited_too_long(now, "in the queue")
                    self._meter.ended(request)
                else:
                    kept.append(request)
            if len(kept) < len(self._queues[key]):
                self._waiting -= len(self._queues[key]) - len(kept)
                self._queues[key] = kept
                self._changed.notify_all()
            if not kept:
                del self._queues[key]

    def _answer(self, batch: list[Request[Any]]) -> None:
        start = time.monotonic()
        try:
            results = self._call([request.item for request in batch])
        except BaseException as error:  # whatever it is, it is the requests' and not the thread's
            if len(batch) == 1:
                self._end(batch[0], error)
                return
            for request in batch:
                self._answer([request])
            return
        tokens = sum(len(r) for r in results if isinstance(r, list | tuple))
        self._meter.worked(len(batch), tokens, time.monotonic() - start)
        for request, result in zip(batch, results, strict=True):
            self._end(request, result)

    def _call(self, items: list[Any]) -> Sequence[Any]:
        results = self._fn(items)
        if len(results) != len(items):
            raise ValueError(f"fn was given {len(items)} items and returned {len(results)} results")
        return results

    def _end(self, request: Request[Any], result: Any) -> None:
        if isinstance(result, BaseException):
            request.fail(result)
        else:
            request.future.set_result(result)
        self._meter.ended(request)


def _bucket(bucket: Bucket) -> Callable[[Any], Hashable]:
    if bucket is None:
        return lambda item: None
    if callable(bucket):
        return bucket
    lengths = list(bucket)
    if not lengths or lengths != sorted(set(lengths)):
        raise ValueError(f"bucket is {bucket!r}; lengths stand in ascending order, [64, 256]")

    def of_length(item: Any) -> int:
        if len(item) > lengths[-1]:
            raise ValueError(f"an item of length {len(item)}; the longest bucket is {lengths[-1]}")
        return lengths[bisect_left(lengths, len(item))]

    return of_length
