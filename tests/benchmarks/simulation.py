"""What simulating ranks costs: a step of 8 simulated ranks beside the dense step of the same batch.

    python -m tests.benchmarks.simulation

Prints medians of interleaved repetitions and their ratios; goal: at most 1.5.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt


def contestants(config: gpt.Config, batch: Any, ranks: int) -> dict[str, Callable[[], None]]:
    """Each a function that makes one step."""

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return gpt.loss(params, batch, config)

    params = gpt.init(config)
    leaves = [x.requires_grad_() for x in tree.leaves(params)]
    optimizer = torch.optim.AdamW({id(x): x for x in leaves}.values(), lr=1e-3, fused=True)

    def dense() -> None:
        optimizer.zero_grad()
        loss_fn(params, batch).backward()
        optimizer.step()

    def sharded(mesh: zf.Mesh, stage: int) -> Callable[[], None]:
        init, step = zf.train_step(loss_fn, zf.adamw(1e-3), mesh, stage=stage)
        state = [init(gpt.init(config))]

        def run() -> None:
            state[0], _ = step(state[0], batch)

        return run

    found = {"dense: torch.autograd, fused AdamW": dense, "1 rank": sharded(zf.Mesh(dp=1), 3)}
    for stage in range(4):
        found[f"{ranks} ranks, stage {stage}"] = sharded(zf.Mesh(dp=ranks), stage)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rows", type=int, default=16, help="global batch")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    config = gpt.preset(options.preset)
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, config.length + 1)
    tokens = torch.randint(0, config.vocabulary, shape, generator=generator)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    runs = contestants(config, batch, options.ranks)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # traces
    for _ in range(options.repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    table = Table(title=f"GPT of {config.parameters:,} parameters, batch {options.rows}")
    for column in ("step", "median, ms", "ratio to dense"):
        table.add_column(column, justify="left" if column == "step" else "right")
    base = statistics.median(next(iter(times.values())))
    for name, taken in times.items():
        median = statistics.median(taken)
        table.add_row(name, f"{median * 1e3:.0f}", f"{median / base:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"python -m tests.benchmarks.simulation {' '.join(sys.argv[1:])}; torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
