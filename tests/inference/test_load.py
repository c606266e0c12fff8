"""Batchers under load: how long requests wait, how much is done, and what memory it takes."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import zero_fn as zf
from tests.benchmarks.inference import CLIENTS, load
from zero_fn.models import gpt
from zero_fn.models.gpt_decoding import decoder


def test_a_request_waits_for_one_batch_and_max_wait_at_most() -> None:
    """As long as the clients are no more than a batch holds."""
    taken = []

    def fn(items: list[int]) -> list[int]:
        start = time.monotonic()
        time.sleep(0.05)
        taken.append(time.monotonic() - start)
        return items

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(12):
            time.sleep(rng.uniform(0, 0.02))
            assert batcher.submit(number).result(60) == number

    with zf.Batcher(fn, max_batch=16, max_wait_ms=20) as batcher:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(client, range(16)))
        metrics = batcher.metrics()
    assert metrics.answered == 16 * 12
    # The last: threads that wait for a core on a busy machine.
    assert metrics.queue_p99 < 0.02 + max(taken) + 0.05
    assert metrics.batch_size > 4


@pytest.mark.slow
def test_a_minute_of_clients() -> None:
    """The same tokens as alone, four times as many a second, and memory that stays."""
    config = gpt.preset("small")
    params, made, rng = gpt.init(config), decoder(config), random.Random(0)
    asked = [
        ([rng.randrange(256) for _ in range(rng.randint(1, 64))], rng.randint(1, 64))
        for _ in range(2 * CLIENTS)
    ]
    start = time.perf_counter()
    want = [zf.generate(made, params, prompt, max_new_tokens=n) for prompt, n in asked]
    alone = sum(map(len, want)) / (time.perf_counter() - start)
    with zf.ContinuousBatcher(made, params, slots=CLIENTS) as batcher:
        rate, requests, wrong, memory = load(
            lambda prompt, n: batcher.submit(prompt, max_new_tokens=n).result(),
            asked,
            want,
            seconds=60,
        )
        metrics = batcher.metrics()
    assert wrong == 0
    assert metrics[:3] == (requests, 0, 0)
    assert rate > 4 * alone
    # The allocator's own: what is kept of freed blocks comes and goes.
    assert memory[-1] - memory[len(memory) // 4] < 16 * 2**20
