"""Batchers: each request gets what it would have got alone, whatever the others do."""

import asyncio
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree
from zero_fn.inference.requests import Closed, QueueFull
from zero_fn.models import gpt
from zero_fn.models.gpt_decoding import decoder

WAIT = 90.0  # seconds after which a future that is not done counts as lost


def test_requests_go_together_by_buckets() -> None:
    batches: list[list[str]] = []

    def fn(items: list[str]) -> list[int]:
        batches.append(items)
        return [len(item) for item in items]

    rng = random.Random(0)
    items = ["x" * rng.randint(1, 30) for _ in range(64)]
    with zf.Batcher(fn, max_batch=8, max_wait_ms=50, bucket=[10, 20, 30]) as batcher:
        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(lambda item: batcher.submit(item).result(WAIT), items))
        assert found == [len(item) for item in items]
        for batch in batches:
            assert len(batch) <= 8
            assert len({(len(item) - 1) // 10 for item in batch}) == 1
        metrics = batcher.metrics()
        assert metrics.answered == 64
        assert metrics.batch_size > 3
        with pytest.raises(ValueError, match="length 31; the longest bucket is 30"):
            batcher.submit("x" * 31)


def test_one_failed_request_fails_alone() -> None:
    def fn(items: list[int]) -> list[Any]:
        if 13 in items:
            raise RuntimeError("thirteen")
        return [ValueError("seven") if item == 7 else item for item in items]

    with zf.Batcher(fn, max_batch=32, max_wait_ms=50) as batcher:
        futures = [batcher.submit(i) for i in range(20)]
        for i, future in enumerate(futures):
            if i in (7, 13):
                with pytest.raises((RuntimeError, ValueError), match=r"seven|thirteen"):
                    future.result(WAIT)
            else:
                assert future.result(WAIT) == i
        assert batcher.metrics()[:3] == (18, 2, 0)


def test_results_that_are_too_few_and_functions_that_end_the_thread() -> None:
    def fn(items: list[int]) -> list[int]:
        if items == [1]:
            raise SystemExit
        return []

    with zf.Batcher(fn, max_wait_ms=0) as batcher:
        with pytest.raises(SystemExit):
            batcher.submit(1).result(WAIT)
        with pytest.raises(ValueError, match="given 1 items and returned 0"):
            batcher.submit(2).result(WAIT)


class Gate:
    """A function that begins when it is let."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.seen: list[Any] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.begun.set()
        assert self.open.wait(WAIT)
        self.seen += items
        return items


def test_a_full_queue_pushes_back() -> None:
    gate = Gate()
    with zf.Batcher(gate, max_batch=1, max_wait_ms=0, max_queue=2) as batcher:
        futures = [batcher.submit(0)]
        assert gate.begun.wait(WAIT)
        futures += [batcher.submit(i) for i in (1, 2)]
        with pytest.raises(QueueFull, match="2 requests wait"):
            batcher.submit(3, block=False)
        with pytest.raises(QueueFull):
            batcher.submit(3, timeout=0.05)
        with pytest.raises(QueueFull, match=r"no room among 2 requests in 0\.05 s"):
            asyncio.run(batcher.ask(3, timeout=0.05))
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(lambda: batcher.submit(4).result(WAIT))
            time.sleep(0.05)
            assert not blocked.done()
            assert futures[1].cancel()  # makes room
            gate.open.set()
            assert blocked.result(WAIT) == 4
        assert [f.result(WAIT) for f in (futures[0], futures[2])] == [0, 2]
    assert 1 not in gate.seen
    assert 3 not in gate.seen


def test_time_outs_and_cancelled_tasks_leave_the_queue() -> None:
    gate = Gate()

    async def tasks(batcher: zf.Batcher) -> None:
        gone = asyncio.ensure_future(batcher.ask("gone"))
        late = asyncio.ensure_future(batcher.ask("late", timeout=0.05))
        kept = asyncio.ensure_future(batcher.ask("kept"))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(TimeoutError, match="in the queue"):
            await late
        assert await kept == "kept"

    with zf.Batcher(gate, max_batch=1, max_wait_ms=0) as batcher:
        first = batcher.submit("first")
        assert gate.begun.wait(WAIT)
        asyncio.run(tasks(batcher))
        assert first.result(WAIT) == "first"
    assert gate.seen == ["first", "kept"]
    assert batcher.metrics()[:3] == (2, 1, 1)


def test_closing() -> None:
    gate = Gate()
    batcher = zf.Batcher(gate, max_batch=1, max_wait_ms=0)
    running, waiting = batcher.submit(1), batcher.submit(2)
    assert gate.begun.wait(WAIT)
    threading.Timer(0.05, gate.open.set).start()
    batcher.close(drain=False)
    assert running.result(WAIT) == 1
    with pytest.raises(Closed):
        waiting.result(WAIT)
    with pytest.raises(Closed):
        batcher.submit(3)
    gate = Gate()
    gate.open.set()
    with zf.Batcher(gate, max_wait_ms=10_000) as batcher:
        last = batcher.submit(5)
    assert last.result(0) == 5  # closing does not wait for company


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1"),
        ({"bucket": [3, 2]}, "ascending"),
        ({"max_queue": 0}, "max_queue is 0"),
    ],
)
def test_settings_that_mean_nothing(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.Batcher(list, **made)


CONFIG = gpt.Config(vocabulary=53, length=48, width=32, heads=4, kv_heads=2)
MODEL = decoder(CONFIG)


def params() -> Any:
    """Float64, so that no token hangs on the order of a sum."""
    return tree.map(lambda x: x.double() * (5 if x.ndim > 1 else 1), gpt.init(CONFIG, 1))


def asked(count: int, seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and settings of every kind."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(53) for _ in range(rng.randint(1, 24))]
        settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, 16), "stop": [5]}
        if number % 3:
            settings |= {"temperature": 0.5 * (number % 3), "key": zf.random.key(number)}
            settings |= {"top_k": 10} if number % 2 else {"top_p": 0.9}
        made.append((prompt, settings))
    return made


def test_continuous_batching_gives_what_one_by_one_gives() -> None:
    weights = params()
    requests = asked(24)
    want = [zf.generate(MODEL, weights, prompt, **s) for prompt, s in requests]
    with zf.ContinuousBatcher(MODEL, weights, slots=7, max_queue=64) as batcher:
        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(lambda r: batcher.submit(r[0], **r[1]).result(WAIT), requests))
        assert found == want

        async def streams() -> list[list[int]]:
            async def one(prompt: Any, settings: Any) -> list[int]:
                return [token async for token in batcher.astream(prompt, **settings)]

            return await asyncio.gather(*[one(*request) for request in requests])

        assert asyncio.run(streams()) == want
        assert [list(batcher.stream(p, **s)) for p, s in requests[:5]] == want[:5]
        metrics = batcher.metrics()
        assert metrics[:3] == (53, 0, 0)
        assert metrics.batch_size > 1
        assert metrics.tokens_per_second > 0


def test_clients_that_vanish_free_their_places() -> None:
    weights = params()
    requests = asked(12)
    want = [zf.generate(MODEL, weights, prompt, **s) for prompt, s in requests]

    async def clients(batcher: zf.ContinuousBatcher) -> list[Any]:
        async def leaves(prompt: Any) -> None:
            async for _ in batcher.astream(prompt):
                return

        vanishing = [leaves([1, 2, i]) for i in range(12)]
        staying = [batcher.ask(prompt, **s) for prompt, s in requests]
        mixed = [x for pair in zip(vanishing, staying, strict=True) for x in pair]
        return (await asyncio.gather(*mixed))[1::2]

    with zf.ContinuousBatcher(MODEL, weights, slots=3, max_queue=64) as batcher:
        assert asyncio.run(clients(batcher)) == want
        future = batcher.submit([1])
        assert future.cancel()
        iterator = batcher.stream([1, 2])
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        assert batcher.submit(requests[0][0], **requests[0][1]).result(WAIT) == want[0]
    assert batcher.metrics().failed == 0
    assert batcher.metrics().answered == 13
    assert not batcher._rows


def test_one_sequence_fails_alone() -> None:
    weights = params()
    good, settings = asked(1)[0]

    def broken(token: int) -> None:
        raise RuntimeError("nobody listens")

    def prefill(params: Any, tokens: Any, lengths: Any, room: int) -> Any:
        if (tokens[:, 0] == 13).any():
            raise RuntimeError("thirteen")
        return MODEL.prefill(params, tokens, lengths, room)

    def decode(params: Any, cache: Any, tokens: Any, longest: Any) -> Any:
        cache, logits = MODEL.decode(params, cache, tokens, longest)
        return cache, torch.where((cache.lengths == 40)[:, None], torch.nan, logits)

    model = MODEL._replace(prefill=prefill, decode=decode)
    prompts = [[13], [1] * 36, good]
    with zf.ContinuousBatcher(model, weights, slots=8) as batcher:
        listened = batcher.submit([1, 2], on_token=broken)
        futures = [batcher.submit(prompt, **settings) for prompt in (prompts[0], good)]
        bad = batcher.submit(prompts[1])
        for future, message in ((listened, "nobody"), (futures[0], "thirteen"), (bad, "finite")):
            with pytest.raises((RuntimeError, ValueError), match=message):
                future.result(WAIT)
        assert futures[1].result(WAIT) == zf.generate(MODEL, weights, good, **settings)


def test_queue_time_outs_and_closing() -> None:
    begun, go = threading.Event(), threading.Event()

    def decode(*args: Any) -> Any:
        begun.set()
        assert go.wait(WAIT)
        return MODEL.decode(*args)

    batcher = zf.ContinuousBatcher(MODEL._replace(decode=decode), params(), slots=1, max_queue=2)
    running = batcher.submit([1], max_new_tokens=3)
    late = batcher.submit([2], timeout=0.05)
    assert begun.wait(WAIT)
    waiting = batcher.submit([3])
    time.sleep(0.06)
    batcher.submit([4], max_new_tokens=1)  # the one that is late has left
    with pytest.raises(TimeoutError, match="in the queue"):
        late.result(WAIT)
    with pytest.raises(QueueFull, match="2 requests wait"):
        batcher.submit([5])
    assert waiting.cancel()
    go.set()
    assert len(running.result(WAIT)) == 3
    slow = batcher.submit([1] * 4, timeout=0.001)
    with pytest.raises(TimeoutError):
        slow.result(WAIT)
    batcher.close(drain=False)
    with pytest.raises(Closed):
        batcher.submit([1])
    with pytest.raises(CancelledError):
        waiting.result(0)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty prompt"),
        ([53], {}, "vocabulary"),
        ([1] * 49, {}, "49 tokens is longer"),
        ([1], {"temperature": 1.0}, "pass key"),
        ([1], {"timeout": 0.0}, "timeout is 0.0"),
    ],
)
def test_bad_input_is_refused_at_once(prompt: Any, settings: Any, message: str) -> None:
    with zf.ContinuousBatcher(MODEL, params()) as batcher, pytest.raises(ValueError, match=message):
        batcher.submit(prompt, **settings)
