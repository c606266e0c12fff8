"""Pipelines on two processes: idle shares beside the predicted ones, and steps beside torch's.

    python -m tests.benchmarks.pipeline

First, each schedule with stages that rest instead of computing, for the same time in F, I and W of
a rank: predicted is the timeline of what the actions took, and what is idle beyond that is what
the executor costs. Then a GPT of 8.4 million parameters, two Gloo processes of one thread each,
eager, beside ``torch.distributed.pipelining`` with the same schedule, weights, batches and fused
AdamW; steps are interleaved and losses must agree. Memory is anonymous memory over what the process
had after its imports, at its most while steps run.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import zero_fn as zf
from tests.processes import ProcessPool
from zero_fn.models import gpt
from zero_fn.pipelining.schedule import Schedule

from . import peers_contestants, pipeline_contestants
from .timing import where

CONFIG = gpt.Config(4096, 128, layers=8, heads=8, width=256, tied=False)
TINY = gpt.Config(64, 16, layers=2, heads=2, width=16, tied=False)
RANKS, MICROBATCHES = 2, 8
STAGES = {"gpipe": 2, "1f1b": 2, "zero_bubble": 2, "interleaved": 4, "zbv": 4, "dualpipev": 4}
TOLERANCE = 1e-4  # of the losses: float32 sums in another order, over three steps


def idle(names: list[str], seconds: float, repeats: int) -> Table:
    """Each schedule's idle share."""
    shown = Table(title=f"idle share, {RANKS} ranks, {MICROBATCHES} micro-batches")
    shown.add_column("schedule")
    for column in ("predicted, %", "measured, %", "apart, points"):
        shown.add_column(column, justify="right")
    pool = ProcessPool(RANKS, time_limit=600)
    try:
        for name in names:
            # the stages of a rank together rest for the same time under each schedule
            rest = seconds * RANKS / STAGES[name]
            args = (name, STAGES[name], MICROBATCHES, rest, repeats)
            spans = pool.run(pipeline_contestants.rest_spans, *args)
            schedule = zf.pipeline_schedule(name, RANKS, MICROBATCHES)
            found = [_shares(schedule, step) for step in zip(*spans, strict=True)]
            predicted, measured = (statistics.median(x) for x in zip(*found, strict=True))
            shown.add_row(
                name,
                f"{100 * predicted:.1f}",
                f"{100 * measured:.1f}",
                f"{100 * (measured - predicted):+.1f}",
            )
    finally:
        pool.close()
    return shown


def _shares(schedule: Schedule, ranks: Sequence[pipeline_contestants.Span]) -> tuple[float, float]:
    """One step's idle share as predicted from what its actions took, and as it was."""
    taken: dict[tuple[str, int], list[float]] = {}
    for rank in ranks:
        for action, seconds in rank.actions:
            taken.setdefault((action.kind, action.stage), []).append(seconds)

    def mean(kind: str, stage: int) -> float:
        return statistics.mean(taken.get((kind, stage), [0.0]))

    stages = range(schedule.stages)
    # timeline adds I and W up for a B; where a schedule has both, a B is what its halves are
    whole = all(("I", stage) not in taken for stage in stages)
    predicted = zf.timeline(
        schedule,
        forward=[mean("F", stage) for stage in stages],
        input_grad=[mean("B" if whole else "I", stage) for stage in stages],
        weight_grad=[0.0 if whole else mean("W", stage) for stage in stages],
    ).bubble
    seconds = max(rank.seconds for rank in ranks)
    return predicted, 1 - statistics.mean(rank.busy for rank in ranks) / seconds


def steps(config: gpt.Config, name: str, repeats: int, count: int) -> Table:
    """The GPT's step under one schedule, ours and torch's."""
    shown = Table(title=f"a GPT's step, {RANKS} processes, {MICROBATCHES} micro-batches")
    shown.add_column("step")
    for column in ("ms", "to torch's", "MiB", "to torch's", "loss off"):
        shown.add_column(column, justify="right")
    contestants = [f"torch {name}", f"zero_fn {name}", f"zero_fn {name}, jit"]
    pools: dict[str, ProcessPool] = {}
    losses: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    with contextlib.ExitStack() as stack:
        for contestant in contestants:
            pools[contestant] = pool = ProcessPool(RANKS, time_limit=600)
            stack.callback(pool.close)
            args = (contestant, config, STAGES[name], MICROBATCHES, 3)
            losses[contestant] = pool.run(pipeline_contestants.build, *args)[0]
        for place in range(repeats):
            for contestant, pool in pools.items():
                first = 3 + place * count
                seconds = pool.run(peers_contestants.timed, contestant, first, count)
                times[contestant].append(max(seconds))
        memory = {
            contestant: max(pool.run(peers_contestants.resident, contestant, 0, 3))
            for contestant, pool in pools.items()
        }
    seconds_of = {name: statistics.median(taken) for name, taken in times.items()}
    peer = contestants[0]
    for contestant in contestants:
        pairs = zip(losses[peer], losses[contestant], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        if apart > TOLERANCE:
            raise AssertionError(f"the losses disagree: {losses}")
        shown.add_row(
            contestant,
            f"{seconds_of[contestant] * 1e3:.0f}",
            f"{seconds_of[contestant] / seconds_of[peer]:.2f}",
            f"{memory[contestant]:.0f}",
            f"{memory[contestant] / memory[peer]:.2f}",
            f"{apart:.0e}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny GPT, short rests")
    parser.add_argument("--rest", type=float, default=30.0, help="ms in each F, I and W of a rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps a repetition")
    parser.add_argument("--only", choices=("idle", "steps"), help="one of the tables")
    options = parser.parse_args()
    console = Console(width=100)
    if options.only != "steps":
        names = [*STAGES] if not options.tiny else ["1f1b"]
        console.print(idle(names, options.rest / 1e3, options.repeats))
    if options.only != "idle":
        config = TINY if options.tiny else CONFIG
        for name in ["1f1b"] if options.tiny else ["gpipe", "1f1b", "interleaved", "zbv"]:
            console.print(steps(config, name, options.repeats, options.steps))
    arguments = " ".join(sys.argv[1:])
    console.print(f"python -m tests.benchmarks.pipeline {arguments}; {where()}; one thread each")


if __name__ == "__main__":
    main()
