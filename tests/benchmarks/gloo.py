"""Reduce-scatter on Gloo, as Gloo does it and as ``exchange_on_gloo`` does, on two processes.

    python -m tests.benchmarks.gloo

Bytes are those of the loopback interface, both ranks together: nothing else may use it meanwhile.
"""

import statistics
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tests.processes import ProcessPool

from .timing import where

RANKS = 2
MIB = (1, 4, 16)
_c10d = torch.ops._c10d_functional


def measured(length: int, exchange: bool, repeats: int = 15) -> tuple[float, float]:
    """Median seconds, and bytes on the wire for one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.group.WORLD.group_name
    x, parts = torch.randn(length), [length // RANKS] * RANKS

    def run() -> torch.Tensor:
        if not exchange:
            return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", RANKS, group))
        rows = _c10d.wait_tensor(_c10d.all_to_all_single(x, parts, parts, group))
        return rows.view(RANKS, -1).sum(0)

    run()
    times, before = [], _loopback()
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    dist.barrier()
    return statistics.median(times), (_loopback() - before) / repeats


def _loopback() -> int:
    with open("/proc/net/dev") as lines:
        return next(int(line.split(":")[1].split()[0]) for line in lines if "lo:" in line)


def main() -> None:
    table = Table("MiB a rank", "Gloo's, ms", "exchange, ms", "Gloo's, MiB", "exchange, MiB")
    pool = ProcessPool(RANKS)
    try:
        for size in MIB:
            length = size * 2**20 // 4
            own, other = (pool.run(measured, length, exchange)[0] for exchange in (False, True))
            table.add_row(
                str(size),
                *[f"{found[0] * 1e3:.1f}" for found in (own, other)],
                *[f"{found[1] / 2**20:.1f}" for found in (own, other)],
            )
    finally:
        pool.close()
    console = Console()
    console.print(table)
    console.print(f"python -m tests.benchmarks.gloo; {where()}; one thread a process")


if __name__ == "__main__":
    main()
