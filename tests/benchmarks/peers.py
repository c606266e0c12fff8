"""A training step beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in one run.

    python -m tests.benchmarks.peers

Trains the same GPT (29.5 million parameters) from the same weights with the same batches on two
Gloo processes of one thread each, and on one process. All contestants of a group stay alive, and
their repetitions are interleaved; their losses must agree before anything is timed. Memory is
anonymous memory over what the process had after its imports, at its most while steps run.
DeepSpeed takes part where it is installed: ``DS_BUILD_OPS=0 pip install -e '.[peers]'``.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.processes import ProcessPool
from zero_fn.models import gpt

from . import peers_contestants as contestants
from .timing import where

CONFIG = gpt.Config(4096, 128, layers=8, heads=8, width=512, tied=False)
TINY = gpt.Config(64, 16, layers=2, heads=2, width=16, tied=False)


class Group(NamedTuple):
    """Contestants that are compared with each other."""

    title: str
    processes: int
    peers: tuple[str, ...]
    stages: tuple[int, ...]


GROUPS = (
    Group("one process", 1, ("module + fused AdamW",), (0,)),
    Group("stage 0", 2, ("DDP + fused AdamW",), (0,)),
    Group("stage 1", 2, ("ZeroRedundancyOptimizer", "DeepSpeed ZeRO 1"), (1,)),
    Group("stage 2", 2, ("FSDP2, kept", "DeepSpeed ZeRO 2"), (2,)),
    Group("stage 3", 2, ("FSDP2, resharded", "DeepSpeed ZeRO 3"), (3,)),
)
TOLERANCE = 1e-4  # of the losses: float32 sums in another order, over three steps
# DeepSpeed's part from all others' by more, the same at each of its stages; why is not known.
DEEPSPEEDS_OWN = 3e-3


class Measured(NamedTuple):
    """What came out for one contestant.

    Attributes:
        seconds: of one step.
        memory: MiB at most while steps run.
        wire: bytes sent in a step; None where nobody counts them.
        apart: the largest difference of a loss from the first peer's.
    """

    seconds: float
    memory: float
    wire: int | None
    apart: float


def measure(
    group: Group, config: gpt.Config, compilers: tuple[str, ...], repeats: int, steps: int
) -> dict[str, Measured]:
    """Run one group.

    Raises:
        AssertionError: if the losses of two contestants disagree.
    """
    ours = [f"zero_fn stage {stage}, {name}" for stage in group.stages for name in compilers]
    known = importlib.util.find_spec("deepspeed") is not None
    peers = [name for name in group.peers if known or not name.startswith("DeepSpeed")]
    losses: dict[str, list[float]] = {}
    wire: dict[str, int | None] = {}
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        # The ranks inherit it.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        pools: dict[str, ProcessPool] = {}
        for name in [*peers, *ours]:
            pool = ProcessPool(group.processes, time_limit=600)
            stack.callback(pool.close)
            answer = pool.run(contestants.build, name, config, 3)[0]
            pools[name], losses[name], wire[name] = pool, *answer
        first = losses[peers[0]]
        apart: dict[str, float] = {}
        for name, found in losses.items():
            worst = max(abs(a - b) for a, b in zip(first, found, strict=True))
            apart[name] = worst
            if worst > (DEEPSPEEDS_OWN if name.startswith("DeepSpeed") else TOLERANCE):
                raise AssertionError(f"{name} has losses {found}, and {peers[0]} has {first}")
        for place in range(repeats):
            for name, pool in pools.items():
                seconds = max(pool.run(contestants.timed, name, 3 + place * steps, steps))
                times.setdefault(name, []).append(seconds)
        memory = {
            name: max(pool.run(contestants.resident, name, 3 + repeats * steps, 3))
            for name, pool in pools.items()
        }
    return {
        name: Measured(statistics.median(times[name]), memory[name], wire[name], apart[name])
        for name in pools
    }


def table(group: Group, found: dict[str, Measured], config: gpt.Config) -> Table:
    peers = [measured for name, measured in found.items() if not name.startswith("zero_fn")]
    fastest = min(measured.seconds for measured in peers)
    leanest = min(measured.memory for measured in peers)
    shown = Table(title=f"{group.title}, {group.processes} process(es)")
    shown.add_column("step")
    columns = ("ms", "to fastest peer", "MiB", "to leanest peer", "sent / parameters", "loss off")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, measured in found.items():
        sent = "" if measured.wire is None else f"{measured.wire / (4 * config.parameters):.2f}"
        shown.add_row(
            name,
            f"{measured.seconds * 1e3:.0f}",
            f"{measured.seconds / fastest:.2f}",
            f"{measured.memory:.0f}",
            f"{measured.memory / leanest:.2f}",
            sent,
            f"{measured.apart:.0e}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny GPT: whether it runs")
    parser.add_argument("--eager", action="store_true", help="leave out Inductor")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps a repetition")
    parser.add_argument("--only", choices=[group.title for group in GROUPS], help="one group")
    options = parser.parse_args()
    config = TINY if options.tiny else CONFIG
    compilers = ("eager",) if options.eager else ("eager", "inductor")
    console = Console(width=110)
    for group in GROUPS:
        if options.only in (None, group.title):
            found = measure(group, config, compilers, options.repeats, options.steps)
            console.print(table(group, found, config))
    arguments = " ".join(sys.argv[1:])
    console.print(f"python -m tests.benchmarks.peers {arguments}; {where()}; one thread a process")


if __name__ == "__main__":
    main()
