"""Packing signs on a CPU beside one pass over the values' memory.

    python -m tests.benchmarks.packing

Goal: 64 M values at 1.3 times a pass. ``sign_pack`` adds the error, takes scales and signs, and
makes the residual: it reads two tensors and writes one, as an addition does, which is the pass. A
copy reads one and writes one. Both are measured twice: into memory that is there, and into memory
that the system hands out page by page, which costs more than the work where tensors are large.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from zero_fn.kernels import sign_pack, sign_packing, sign_packing_native, sign_unpack

from .timing import interleaved, where

GOAL = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    n = max(int(options.millions * 2**20) // 1024, 1) * 1024
    x, error = torch.randn(n), torch.randn(n)
    counts = torch.full((n // 1024,), 1024, dtype=torch.int32)
    bits, scales, _ = sign_pack(x, error, counts)
    out, block = torch.empty_like(x), 1024
    there = (bits, scales, out)
    compiled = sign_packing_native.takes(x, block)
    times = interleaved(
        {
            "a copy": lambda: out.copy_(x),
            "an addition": lambda: torch.add(x, error, out=out),
            "packing": lambda: sign_packing.pack_on_cpu(x, error, counts, *there, block),
            "packing in numpy": lambda: sign_packing.pack_by_numpy(x, error, counts, *there, block),
            "unpacking": lambda: sign_packing.unpack_on_cpu(bits, scales, out),
            "an addition to new memory": lambda: x + error,
            "sign_pack to new memory": lambda: sign_pack(x, error, counts),
            "sign_unpack to new memory": lambda: sign_unpack(bits, scales),
        },
        options.repeats,
    )
    table = Table("what", "ms", "GB/s", "to an addition of its kind")
    for name, seconds in times.items():
        moved = 8 if name == "a copy" else 4.1 if "unpack" in name else 12
        base = times["an addition to new memory" if "new memory" in name else "an addition"]
        rate = f"{moved * n / seconds / 1e9:.1f}"
        table.add_row(name, f"{seconds * 1e3:.1f}", rate, f"{seconds / base:.2f}")
    console = Console(soft_wrap=True)
    console.print(table)
    ratio = times["packing"] / times["an addition"]
    console.print(
        f"goal: packing at most {GOAL} times a pass: {ratio:.2f}, "
        f"{'reached' if ratio <= GOAL else 'missed'}{'' if compiled else ' (no compiler here)'}"
    )
    console.print(f"python -m tests.benchmarks.packing; {n:,} values; {where()}")


if __name__ == "__main__":
    main()
