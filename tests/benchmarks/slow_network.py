"""A training step over a slow network: compressed communication beside DDP and its hooks.

    python -m tests.benchmarks.slow_network --plot slow_network.png

Two processes of one thread each train the same GPT (29.5 million parameters) in two network
namespaces, joined by a pair of interfaces that let through 10 Gbit/s, 1 Gbit/s and 100 Mbit/s in
turn; and without a limit over the loopback of one namespace. The contestants take turns, and wait
meanwhile. It takes root and iproute2, else it says what is missing and ends. Bytes are counted at
the interface, with TCP's headers and acknowledgements, and by the traced program, without.

DeepSpeed's OneBitAdam has no row: 0.19.8 has no 1-bit optimizers any more ("OneBitAdam is not a
supported DeepSpeed Optimizer"), and 0.18.0 has them for accelerators only. On CPUs its "compressed"
backend says "This op had not been implemented on CPU backend", and "nccl" and "mpi" import cupy.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from zero_fn.models import gpt

from .network import End, Unavailable, two_hosts
from .peers import CONFIG, TINY
from .slow_network_ranks import BUILD, MARK
from .timing import where

RATES = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
OPEN = "loopback"
OURS, BASE = "zero_fn onebit_adam", "DDP"
PORT = 29431  # the first contestant's
WARM_UP = 0.15  # the share of a run's steps at full precision


class Measured(NamedTuple):
    """What came out for one contestant.

    Attributes:
        seconds: of a step, by network.
        sent: bytes that left a rank's interface in a step.
        counted: the same by the program; None where nobody counts them.
    """

    seconds: dict[str, float]
    sent: float
    counted: int | None


class Failed(Exception):
    """A contestant that does not run here, and what it said."""


class Pair:
    """Two ranks, each in a namespace."""

    def __init__(self, name: str, tiny: bool, ends: Sequence[End], alone: bool, port: int) -> None:
        self.ranks = []
        for rank, end in enumerate(ends):
            interface = "lo" if alone else end.interface
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1" if alone else ends[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            arguments = [name, "tiny" if tiny else "full", interface]
            self.ranks.append(
                subprocess.Popen(
                    [*end.prefix, sys.executable, "-m", "tests.benchmarks.slow_network_ranks",
                     *arguments],
                    env=os.environ | environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )  # fmt: skip

    def answers(self) -> list[dict[str, Any]]:
        found = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = next((line for line in rank.stdout if line.startswith(MARK)), None)
            if line is None:
                self.close()
                assert rank.stderr is not None
                said = [line for line in rank.stderr.read().splitlines() if line.strip()]
                raise Failed(said[-1] if said else "it ended without a word")
            found.append(json.loads(line.removeprefix(MARK)))
        return found

    def run(self, steps: int) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return self.answers()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(
    names: Sequence[str],
    tiny: bool,
    ends: tuple[End, End],
    rates: Sequence[str],
    steps: int,
    repeats: int,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """All contestants on every network, in turn in each repetition; why others were left out."""
    seconds: dict[str, dict[str, float]] = {}
    counted, sent, left_out = {}, {}, {}
    for networks, hosts in (((OPEN,), (ends[0], ends[0])), (tuple(rates), ends)):
        with ExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for port, name in enumerate(names, PORT):
                if name in left_out:
                    continue
                pairs[name] = Pair(name, tiny, hosts, alone=hosts[0] is hosts[1], port=port)
                stack.callback(pairs[name].close)
                try:
                    counted[name] = pairs[name].answers()[0].get("wire")
                except Failed as failure:
                    left_out[name] = str(failure)
                    del pairs[name]
            for network in networks:
                if network != OPEN:
                    for end in ends:
                        stack.callback(end.limit, None)
                        end.limit(RATES[network])
                found: dict[str, list[Any]] = {name: [] for name in pairs}
                for pair in pairs.values():
                    pair.run(1)  # empties what a faster network had left in the bucket
                for _ in range(repeats):
                    for name, pair in pairs.items():
                        found[name].append(pair.run(steps))
                for name, runs in found.items():
                    seconds.setdefault(name, {})[network] = statistics.median(
                        max(answer["seconds"] for answer in both) for both in runs
                    )
                    # over loopback an interface counts both directions
                    sent[name] = statistics.median(both[0]["sent"] for both in runs)
    measured = {name: Measured(found, sent[name], counted[name]) for name, found in seconds.items()}
    return measured, left_out


def table(found: dict[str, Measured], config: gpt.Config) -> Table:
    shown = Table(title=f"A step of a GPT of {config.parameters:,} parameters, 2 ranks")
    shown.add_column("step")
    networks = list(next(iter(found.values())).seconds)
    for network in networks:
        shown.add_column(f"{network}, ms", justify="right")
    for column in ("MB sent", "by the program", "32 bit / sent"):
        shown.add_column(column, justify="right")
    for name, measured in found.items():
        counted = "" if measured.counted is None else f"{measured.counted / 1e6:.2f}"
        shown.add_row(
            name,
            *[f"{measured.seconds[network] * 1e3:.0f}" for network in networks],
            f"{measured.sent / 1e6:.2f}",
            counted,
            f"{4 * config.parameters / measured.sent:.1f}",
        )
    return shown


def goals(found: dict[str, Measured], config: gpt.Config) -> list[str]:
    """What is wanted, and what came out."""
    if OURS not in found:
        return []
    ours, base = found[OURS], found.get(BASE)
    half = found.get("DDP, bf16 hook")
    # Like beside like: at the interface, headers and all; by the formula where DDP is left out.
    full = base.sent if base else 4 * config.parameters
    bf16 = half.sent if half else 2 * config.parameters
    lines = [
        _goal("bytes of a float32 all-reduce to what is sent", full / ours.sent, 30),
        _goal("bytes of a bf16 all-reduce to what is sent", bf16 / ours.sent, 15),
    ]
    whole = found.get("zero_fn adamw")
    if whole is not None:
        run = WARM_UP * whole.sent + (1 - WARM_UP) * ours.sent
        lines.append(_goal("the same over a run with 15 % of warm-up", full / run, 5))
    if "1 Gbit/s" in ours.seconds:
        slower = ours.seconds["1 Gbit/s"] / ours.seconds[OPEN]
        lines.append(_goal("step at 1 Gbit/s to loopback", slower, 1.1, at_most=True))
    for network, least in (("1 Gbit/s", 2), ("100 Mbit/s", 10)):
        if base is not None and network in ours.seconds:
            faster = base.seconds[network] / ours.seconds[network]
            lines.append(_goal(f"DDP's step to ours at {network}", faster, least))
    return lines


def _goal(what: str, got: float, wanted: float, at_most: bool = False) -> str:
    reached = got <= wanted if at_most else got >= wanted
    bound = "at most" if at_most else "at least"
    return f"{'reached' if reached else 'MISSED '}  {what}: {got:.2f} ({bound} {wanted})"


def draw(found: dict[str, Measured], ax: Any = None) -> Any:
    """The seconds of a step by network, one group of bars a network; returns the Axes."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(9, 4.5), layout="constrained")
    networks = list(next(iter(found.values())).seconds)
    width = 0.8 / len(found)
    for place, (name, measured) in enumerate(found.items()):
        at = [number + (place - (len(found) - 1) / 2) * width for number in range(len(networks))]
        bars = ax.bar(at, [measured.seconds[x] for x in networks], width, label=name)
        ax.bar_label(bars, fmt="%.2g", fontsize=7, padding=1)
    ax.set_yscale("log")
    ax.set_xticks(range(len(networks)), networks)
    ax.set_ylabel("seconds a step")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny GPT: whether it runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps a repetition")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--only", nargs="+", choices=list(BUILD), default=list(BUILD))
    parser.add_argument("--plot", metavar="PNG", help="where to draw it")
    options = parser.parse_args()
    # so that namespaces and ranks are cleared away
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    config = TINY if options.tiny else CONFIG
    console = Console(width=120)
    try:
        with two_hosts() as ends:
            found, left_out = measure(
                options.only, options.tiny, ends, options.rates, options.steps, options.repeats
            )
    except Unavailable as reason:
        console.print(f"skipped: {reason}", markup=False)
        return
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    if found:
        console.print(table(found, config))
        for line in [] if options.tiny else goals(found, config):
            console.print(line)
        if options.plot:
            draw(found).figure.savefig(options.plot, dpi=150)
    arguments = " ".join(sys.argv[1:])
    console.print(f"python -m tests.benchmarks.slow_network {arguments}; {where()}")


if __name__ == "__main__":
    main()
