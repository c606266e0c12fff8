"""Adam on a CPU: one step of the GPT-2 leaf list, against torch's fused and foreach optimizers.

    python -m tests.benchmarks.adam

Prints medians of interleaved repetitions and their ratios to torch's fused optimizer; goal for the
step in place: at least 1.0. All contestants work on the same memory.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.leaves import gpt2_shapes
from tests.benchmarks.timing import interleaved, where
from zero_fn.kernels import fused_adamw, fused_adamw_

LR, DECAY = 1e-4, 0.1


def contestants(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    params, grads, m, v = ([torch.rand(s) for s in shapes] for _ in range(4))
    half = [g.bfloat16() for g in grads]
    decays = [DECAY if p.ndim == 2 else 0.0 for p in params]
    count, scale = torch.tensor(10), torch.tensor(1.0)

    def optimizer(**options: Any) -> Callable[[], object]:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        matrices = {"params": [p for p in params if p.ndim == 2], "weight_decay": DECAY}
        others = {"params": [p for p in params if p.ndim != 2], "weight_decay": 0.0}
        made = torch.optim.AdamW([matrices, others], lr=LR, **options)
        for p, one, other in zip(params, m, v, strict=True):
            made.state[p] = {"step": torch.tensor(9.0), "exp_avg": one, "exp_avg_sq": other}
        return made.step

    def in_place(grads: list[torch.Tensor], **more: Any) -> Callable[[], object]:
        return lambda: fused_adamw_(params, grads, m, v, count, LR, weight_decay=decays, **more)

    def pure() -> None:
        updates, *_ = fused_adamw(params, grads, m, v, count, LR, weight_decay=decays)
        for p, update in zip(params, updates, strict=True):
            p + update

    return {
        "torch.optim.AdamW(fused=True)": optimizer(fused=True),
        "torch.optim.AdamW(foreach=True)": optimizer(foreach=True),
        "fused_adamw_": in_place(grads),
        "fused_adamw_, gradient scale": in_place(grads, grad_scale=scale),
        "fused_adamw_, bf16 gradients": in_place(half),
        "fused_adamw and p + update": pure,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", choices=["tiny", "small", "xl"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = gpt2_shapes(options.model)
    times = interleaved(contestants(shapes), options.repeats)
    count = sum(math.prod(shape) for shape in shapes)
    table = Table(title=f"one step of Adam, {len(shapes)} leaves, {count:,} values")
    for column in ("step", "median, ms", "times torch's fused"):
        table.add_column(column, justify="left" if column == "step" else "right")
    base = next(iter(times.values()))
    for name, taken in times.items():
        table.add_row(name, f"{taken * 1e3:.1f}", f"{base / taken:.2f}")
    console = Console()
    console.print(table)
    console.print(f"python -m tests.benchmarks.adam {' '.join(sys.argv[1:])}; {where()}")


if __name__ == "__main__":
    main()
