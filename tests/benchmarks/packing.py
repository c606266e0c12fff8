"""Packing signs on a CPU beside one pass over the values' memory.

    python -m tests.benchmarks.packing

Goal: the signs of 64 M values at 1.3 times a pass. ``sign_pack`` also adds the error, takes the
scales and makes the residual: it reads two tensors and writes one, as an addition does.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from zero_fn.kernels import sign_pack, sign_unpack

from .timing import interleaved, where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    n = int(options.millions * 2**20) // 1024 * 1024
    x, error = torch.randn(n), torch.randn(n)
    counts = torch.full((n // 1024,), 1024, dtype=torch.int32)
    bits, scales, _ = sign_pack(x, error, counts)
    out = torch.empty_like(x)
    times = interleaved(
        {
            "a copy": lambda: out.copy_(x),
            "an addition": lambda: torch.add(x, error, out=out),
            "sign_pack": lambda: sign_pack(x, error, counts),
            "sign_unpack": lambda: sign_unpack(bits, scales),
        },
        options.repeats,
    )
    table = Table("what", "ms", "to an addition")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{seconds / times['an addition']:.2f}")
    console = Console()
    console.print(table)
    console.print(f"python -m tests.benchmarks.packing; {n:,} values; {where()}")


if __name__ == "__main__":
    main()
