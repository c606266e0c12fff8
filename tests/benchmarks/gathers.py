"""How often torch's all-gathers on Gloo end in a crash, with many under way: plain torch alone.

    python -m tests.benchmarks.gathers

Two processes gather small tensors, 60 under way at a time, into memory that torch allocates and
into memory that is given. ``zero_fn.passes.gather_on_gloo`` is there because of the first.
"""

import argparse
import signal
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tests.processes import ProcessPool, RankError

from .timing import where

_c10d = torch.ops._c10d_functional
UNDER_WAY = 60


def gathers(count: int, given: bool) -> int:
    """Gather that many times; how many there were."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD.group_name
    tensors = [torch.randn(1000 + 2 * place) for place in range(UNDER_WAY)]
    for _ in range(count // UNDER_WAY):
        flying = []
        for x in tensors:
            sent = x * 2
            if given:
                out = sent.new_empty(2 * len(sent))
                flying.append(_c10d.all_gather_into_tensor_out(sent, 2, group, out=out))
            else:
                flying.append(_c10d.all_gather_into_tensor(sent, 2, group))
        while flying:
            _c10d.wait_tensor(flying.pop(0)).add(1)
    return count


def ended(count: int, given: bool) -> str:
    """How one run of two processes ended."""
    pool = ProcessPool(2, time_limit=300)
    processes = list(pool.processes)
    try:
        pool.run(gathers, count, given)
    except RankError:
        codes = [process.exitcode for process in processes]
        crashed = [code for code in codes if code in (-signal.SIGABRT, -signal.SIGSEGV)]
        return "crashed" if crashed else "no end in time"
    finally:
        pool.close()
    return "fine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--count", type=int, default=90_000, help="gathers a run")
    options = parser.parse_args()
    table = Table("memory", "fine", "crashed", "no end in time", title=f"{options.count} gathers")
    ends: dict[bool, list[str]] = {False: [], True: []}
    for _ in range(options.runs):
        for given, found in ends.items():
            found.append(ended(options.count, given))
    for given, found in ends.items():
        counts = [str(found.count(how)) for how in ("fine", "crashed", "no end in time")]
        table.add_row("given" if given else "torch's", *counts)
    console = Console(width=100)
    console.print(table)
    console.print(f"python -m tests.benchmarks.gathers {' '.join(sys.argv[1:])}; {where()}")


if __name__ == "__main__":
    main()
