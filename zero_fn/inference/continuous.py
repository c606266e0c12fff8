"""Continuous batching: sequences that are generated together, and join and leave between tokens.

One thread holds a cache with a place for each of ``slots`` sequences. Before each token, those that
were cancelled or have timed out leave and waiting ones join (their prompts are read in one batch);
after it, those that have ended leave (Orca, OSDI 2022). Nobody waits for a longer neighbour.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import random
from ..models.decoding import Cache, Decoder
from ..tree import PyTree, Tensor
from .generation import Prompt, checked_prompt, checked_stop, padded
from .requests import Closed, Meter, Metrics, QueueFull, Request, new_request
from .sampling import NOT_FINITE, Sampling, draw, sample


@dataclass(eq=False)
class _Sequence:
    """What is asked, and what has been made of it."""

    prompt: list[int]
    limit: int
    stop: frozenset[int]
    sampling: Sampling
    key: Tensor | None
    on_token: Callable[[int], None] | None
    made: list[int] = field(default_factory=list)


_Running = Request[_Sequence]


class ContinuousBatcher:
    """Generates for many callers at once.

    >>> import zero_fn as zf
    >>> from zero_fn.models import gpt, gpt_decoding
    >>> config = gpt.Config()
    >>> decoder = gpt_decoding.decoder(config)
    >>> with zf.ContinuousBatcher(decoder, gpt.init(config), slots=8) as batcher:
    ...     futures = [batcher.submit([1, 2, i], max_new_tokens=4 + i) for i in range(3)]
    ...     [len(future.result()) for future in futures]
    [4, 5, 6]

    Args:
        decoder: the model, ``gpt_decoding.decoder(config)``.
        params: its parameters, quantised or not, whole.
        slots: how many sequences are generated at once; the cache has the model's length for each.
        max_queue: how many more may wait.

    Attributes:
        decoder: the model.

    Raises:
        ValueError: for settings that mean nothing.
    """

    def __init__(
        self, decoder: Decoder, params: PyTree, *, slots: int = 32, max_queue: int = 256
    ) -> None:
        for name, value in (("slots", slots), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it is 1 or more")
        self.decoder, self._params = decoder, params
        self._slots, self._max_queue = slots, max_queue
        self._queue: deque[_Running] = deque()
        self._rows: list[_Running] = []
        self._cache: Cache | None = None
        self._next = torch.zeros(slots, dtype=torch.int64)  # the token that each row reads next
        self._closed = False
        self._meter = Meter()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="continuous batcher", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[int] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        key: Tensor | None = None,
        timeout: float | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> "Future[list[int]]":
        """Ask for a continuation, from any thread; what is generated is what ``zf.generate`` gives.

        Args:
            prompt: token ids.
            max_new_tokens: as for :func:`zero_fn.generate`, and so are the settings after it.
            stop: token ids that end it.
            temperature: 0: greedy.
            top_k: among so many.
            top_p: among those with this probability.
            key: what draws are made from.
            timeout: seconds until it is given up, waiting or under way; None: never.
            on_token: called with each new token, in the batcher's thread; it must be quick. If it
                raises, its request ends with that error.

        Returns:
            The new tokens' future. Cancelling it ends the sequence before its next token.

        Raises:
            QueueFull: if too many wait.
            Closed: after ``close``.
            ValueError: for what :func:`zero_fn.generate` refuses.
        """
        given = checked_prompt(self.decoder, prompt, max_new_tokens)
        sampling = Sampling(temperature, top_k, top_p)
        sampling.check()
        if temperature and key is None:
            raise ValueError(
                f"temperature={temperature} draws tokens at random: pass key=zf.random.key(0)"
            )
        limit = min(self.decoder.length - len(given) + 1, max_new_tokens or self.decoder.length)
        own = random.fold_in(key, 0) if key is not None and temperature else None
        request = new_request(
            _Sequence(given, limit, checked_stop(stop), sampling, own, on_token), timeout
        )
        with self._changed:
            if self._closed:
                raise Closed("the batcher is closed and takes no more requests")
            self._drop_waiting(time.monotonic())
            if len(self._queue) >= self._max_queue:
                raise QueueFull(
                    f"{len(self._queue)} requests wait, as many as the queue holds; try again "
                    "later, or make max_queue larger"
                )
            self._queue.append(request)
            self._changed.notify_all()
        return request.future

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[int]:
        """The tokens as they are made. Closing the iterator ends the sequence."""
        arrived: deque[int] = deque()
        changed = threading.Condition()

        def tell(*_: Any) -> None:
            with changed:
                changed.notify_all()

        def on_token(token: int) -> None:
            arrived.append(token)
            tell()

        future = self.submit(prompt, on_token=on_token, **settings)
        future.add_done_callback(tell)

        def tokens() -> Iterator[int]:
            try:
                while True:
                    with changed:
                        changed.wait_for(lambda: arrived or future.done())
                    while arrived:
                        yield arrived.popleft()
                    if future.done() and not arrived:
                        future.result()
                        return
            finally:
                future.cancel()

        return tokens()

    async def ask(self, prompt: Prompt, **settings: Any) -> list[int]:
        """The new tokens, from a task of asyncio; cancelling the task ends the sequence."""
        return await asyncio.wrap_future(self.submit(prompt, **settings))

    def astream(self, prompt: Prompt, **settings: Any) -> AsyncIterator[int]:
        """The tokens as they are made, in a task of asyncio. Errors of the prompt come at once."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[int | None] = asyncio.Queue()

        def tell(token: int | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, token)

        future = self.submit(prompt, on_token=tell, **settings)
        future.add_done_callback(lambda _: tell(None))

        async def tokens() -> AsyncIterator[int]:
            try:
                while (token := await arrived.get()) is not None:
                    yield token
                future.result()
            finally:
                future.cancel()

        return tokens()

    def metrics(self) -> Metrics:
        """Figures of the last requests and steps."""
        return self._meter.read(len(self._queue))

    def close(self, *, drain: bool = True) -> None:
        """End: with ``drain`` after all that was asked is answered, else with errors for it."""
        with self._changed:
            self._closed = True
            if not drain:
                for request in (*self._queue, *self._rows):
                    request.fail(Closed("the batcher was closed"))
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "ContinuousBatcher":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(drain=error[0] is None)

    # The thread. It alone touches the rows and the cache.

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            with self._changed:
                self._drop_waiting(time.monotonic())
                while not self._queue and not self._rows:
                    if self._closed:
                        return
                    self._changed.wait()
                    self._drop_waiting(time.monotonic())
                free = self._slots - len(self._rows)
                joining = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
            self._drop_running(time.monotonic())
            for request in joining:
                self._meter.started(request)
            self._join(joining)
            if self._rows:
                self._step()
            del joining

    def _drop_waiting(self, now: float) -> None:
        kept = [r for r in self._queue if not self._gone(r, now, "in the queue")]
        if len(kept) < len(self._queue):
            self._queue = deque(kept)

    def _drop_running(self, now: float) -> None:
        for row in reversed(range(len(self._rows))):
            request = self._rows[row]
            if self._gone(request, now, f"and {len(request.item.made)} tokens"):
                self._leave(row)

    def _gone(self, request: _Running, now: float, where: str) -> bool:
        if request.expired(now):
            request.waited_too_long(now, where)
        if request.future.done():
            self._meter.ended(request)
            return True
        return False

    def _join(self, requests: list[_Running]) -> None:
        """Read prompts, choose the first tokens, and give the sequences their places."""
        if not requests:
            return
        start = time.monotonic()
        try:
            tokens, lengths = padded([r.item.prompt for r in requests])
            room = int(lengths.max())
            cache, logits = self.decoder.prefill(self._params, tokens, lengths, room)
        except BaseException as error:
            if len(requests) == 1:
                self._end(requests[0], error)
            else:
                for request in requests:
                    self._join([request])
            return
        first = len(self._rows)
        held = self._room_for(cache)
        rows = slice(first, first + len(requests))
        held.keys[:, rows, :, :room] = cache.keys
        held.values[:, rows, :, :room] = cache.values
        held.lengths[rows] = lengths
        self._rows += requests
        self._choose(range(first, len(self._rows)), logits)
        self._meter.worked(len(requests), len(requests), time.monotonic() - start)

    def _step(self) -> None:
        """One token of every sequence."""
        start, count = time.monotonic(), len(self._rows)
        assert self._cache is not None
        held = self._cache
        view = Cache(held.keys[:, :count], held.values[:, :count], held.lengths[:count])
        longest = max(len(r.item.prompt) + len(r.item.made) for r in self._rows) - 1
        try:
            after, logits = self.decoder.decode(self._params, view, self._next[:count], longest)
        except BaseException as error:
            for row in reversed(range(count)):
                self._end(self._rows[row], error)
                self._leave(row)
            return
        held.lengths[:count] = after.lengths
        self._choose(range(count), logits)
        self._meter.worked(count, count, time.monotonic() - start)

    def _choose(self, rows: range, logits: Tensor) -> None:
        """The next token of some rows; those that end leave."""
        sequences = [self._rows[row].item for row in rows]
        finite = logits.isfinite().all(-1)
        draws = None
        if any(s.key is not None for s in sequences):
            zero = torch.zeros(2, dtype=torch.int64)
            keys = torch.stack([zero if s.key is None else s.key for s in sequences])
            draws = draw(keys, torch.tensor([len(s.made) for s in sequences]))
        chosen = sample(
            torch.where(finite.unsqueeze(-1), logits, 0), [s.sampling for s in sequences], draws
        )
        self._next[rows.start : rows.stop] = chosen
        good = finite.tolist()
        for row, token, fine in reversed(list(zip(rows, chosen.tolist(), good, strict=True))):
            request = self._rows[row]
            error = self._hand_over(request, token) if fine else ValueError(NOT_FINITE)
            sequence = request.item
            if error is not None:
                self._end(request, error)
            elif token in sequence.stop or len(sequence.made) >= sequence.limit:
                self._end(request, sequence.made)
            else:
                continue
            self._leave(row)

    def _hand_over(self, request: _Running, token: int) -> Exception | None:
        request.item.made.append(token)
        if request.item.on_token is not None and not request.future.done():
            try:
                request.item.on_token(token)
            except Exception as error:
                return error
        return None

    def _leave(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = self._rows.pop()
        if row == len(self._rows):
            return
        self._rows[row] = last
        assert self._cache is not None
        held, end = self._cache, len(self._rows)
        used = int(held.lengths[end])
        held.keys[:, row, :, :used] = held.keys[:, end, :, :used]
        held.values[:, row, :, :used] = held.values[:, end, :, :used]
        held.lengths[row] = used
        self._next[row] = self._next[end]

    def _room_for(self, like: Cache) -> Cache:
        """The cache of all rows, made when first needed."""
        if self._cache is None:
            layers, _, heads, _, size = like.keys.shape
            shape = (layers, self._slots, heads, self.decoder.length, size)
            keys, values = like.keys.new_zeros(shape), like.values.new_zeros(shape)
            self._cache = Cache(keys, values, like.lengths.new_zeros(self._slots))
        return self._cache

    def _end(self, request: _Running, result: Any) -> None:
        if isinstance(result, BaseException):
            request.fail(result)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled in between
                request.future.set_result(result)
        self._meter.ended(request)
