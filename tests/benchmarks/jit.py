"""What jit costs: tracing a GPT of 8 layers, and a call whose program is known.

    python -m tests.benchmarks.jit

Goals: under 3 s, and under 1 ms for about 150 leaves (what is not the program itself).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zero_fn as zf
from zero_fn.models import gpt

from .peers import CONFIG
from .timing import where

LEAVES = 50  # and two moments for each


def traced(stage: int) -> float:
    """Seconds to trace one rank's step and pass it through the passes."""
    mesh = zf.Mesh(dp=2).abstract()
    init, step = zf.train_step(
        lambda params, batch: gpt.loss(params, batch, CONFIG), zf.adamw(1e-3), mesh, stage=stage
    )
    state = init(gpt.init(CONFIG))
    tokens = torch.zeros(4, CONFIG.length, dtype=torch.int64)
    return _median(lambda: step.trace(state, (tokens, tokens)), 3)  # type: ignore[attr-defined]


def hit() -> float:
    """Seconds of a call, less those of its program."""
    params = {f"w{place}": torch.randn(4) for place in range(LEAVES)}
    init, step = zf.train_step(
        lambda params, batch: (torch.stack([*params.values()]) * batch).sum(),
        zf.adamw(1e-3),
        zf.Mesh(dp=1),
    )
    state, batch = [init(params)], torch.ones(4)

    def call() -> None:
        state[0], _ = step(state[0], batch)

    call()
    jitted: Any = step
    ((_, run),) = jitted.programs.values()
    inputs = [x.clone() for x in zf.tree.leaves((state[0], batch))]
    with torch.no_grad():
        alone = _median(lambda: run(*inputs), 300)
    return _median(call, 300) - alone


def _median(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    table = Table("what", "takes")
    for stage in range(4):
        table.add_row(f"tracing {CONFIG.layers} layers, stage {stage}", f"{traced(stage):.2f} s")
    table.add_row(f"a hit of the cache, {3 * LEAVES + 2} leaves", f"{hit() * 1e3:.2f} ms")
    console = Console()
    console.print(table)
    console.print(f"python -m tests.benchmarks.jit; {where()}")


if __name__ == "__main__":
    main()
