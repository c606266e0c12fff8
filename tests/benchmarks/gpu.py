"""All measurements that need a GPU, in one run of a few minutes.

    python -m tests.benchmarks.gpu --json results.json
    TRITON_INTERPRET=1 python -m tests.benchmarks.gpu --tiny     # no GPU: runs, measures nothing

Each section is a function that returns results; a table and a JSON file hold all of them. A
result's floor is the time that its bytes take at the copy bandwidth measured in the same run, or
its arithmetic at the rate of a product of bfloat16 matrices, whichever is longer.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks import gpu_adam, gpu_attention
from tests.benchmarks.gpu_results import Result, Setting
from tests.benchmarks.timing import interleaved, where

Section = Callable[[Setting], list[Result]]

SECTIONS: dict[str, Section] = {"adam": gpu_adam.section, "attention": gpu_attention.section}


def copy_bandwidth(setting: Setting) -> float:
    """Bytes a second, read and written, of the device's own copy."""
    source = torch.zeros(1 << (12 if setting.tiny else 30), device=setting.device)
    target = torch.empty_like(source)
    taken = interleaved({"copy": lambda: target.copy_(source)}, 10, setting.device)["copy"]
    return 2 * source.nbytes / taken


def product_rate(setting: Setting) -> float:
    """Floating-point operations a second of torch's product of bfloat16 matrices."""
    n = 64 if setting.tiny else 8192
    x = torch.randn(n, n, device=setting.device, dtype=torch.bfloat16)
    return 2 * n**3 / interleaved({"product": lambda: x @ x}, 10, setting.device)["product"]


class Rates(NamedTuple):
    """Of the device, as measured."""

    bandwidth: float  # bytes a second
    products: float  # floating-point operations a second

    def floor(self, result: Result) -> float:
        return result.floor.seconds(*self)


def show(name: str, results: list[Result], rates: Rates) -> Table:
    table = Table(title=name)
    for column in ("case", "what", "median, ms", "floor, ms", "% of floor", "times first", "error"):
        table.add_column(column, justify="left" if column in ("case", "what") else "right")
    first: dict[str, float] = {}
    for result in results:
        base = first.setdefault(result.case, result.seconds)
        floor = rates.floor(result)
        table.add_row(
            result.case,
            result.what,
            f"{result.seconds * 1e3:.3f}",
            f"{floor * 1e3:.3f}",
            f"{100 * floor / result.seconds:.0f}",
            f"{base / result.seconds:.2f}",
            "" if result.error is None else f"{result.error:.1e}",
        )
    return table


def as_json(result: Result, rates: Rates) -> dict[str, Any]:
    row = result._asdict() | {"floor": result.floor._asdict()}
    return row | {"floor_seconds": rates.floor(result)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="smallest shapes, also without a GPU")
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (options.tiny and interpreted):
        parser.error("there is no GPU: run it as TRITON_INTERPRET=1 ... --tiny to see that it runs")
    setting = Setting("cpu" if interpreted else "cuda", options.tiny)
    rates = Rates(copy_bandwidth(setting), product_rate(setting))
    console = Console(width=120)
    found = {}
    for name in options.sections:
        found[name] = SECTIONS[name](setting)
        console.print(show(name, found[name], rates))
    if "attention" in found:
        console.print("\n".join(gpu_attention.summary(found["attention"])), soft_wrap=True)
    command = f"python -m tests.benchmarks.gpu {' '.join(sys.argv[1:])}"
    console.print(
        f"copy: {rates.bandwidth / 1e12:.3f} TB/s; products: {rates.products / 1e12:.3f} TFLOP/s; "
        f"{command}; {where(setting.device)}"
    )
    if options.json:
        sections = {
            name: [as_json(result, rates) for result in results] for name, results in found.items()
        }
        whole = {
            "command": command,
            "where": where(setting.device),
            "copy_bandwidth": rates.bandwidth,
            "product_rate": rates.products,
            "sections": sections,
        }
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
