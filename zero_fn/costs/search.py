"""The set-ups that fit some hardware, the fastest first.

Formulas throw out what cannot fit and order the rest; the first ones are traced, until enough of
them fit or the time is up. What is traced is exact in bytes, and an estimate in seconds.
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from ..hardware import Hardware
from ..models import gpt
from ..naming import size_of
from ..planning import Plan
from .extrapolation import NotAffine
from .formulas import least_memory, least_seconds, why_not
from .setups import Offloaded, Setup, plan_setup

HOST: Offloaded = (
    ("parameters", "host"),
    ("gradients", "host"),
    ("optimizer state", "host"),
)


class Excluded(NamedTuple):
    """A set-up that does not fit, and why."""

    setup: Setup
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        hardware: what for.
        ranks: how many.
        sequences: of one step.
        ranking: the set-ups that fit, the fastest first, with their plans.
        by_formula: what formulas threw out.
        by_trace: what was traced and does not fit.
        left: how many may fit, and were not looked at: by formula none is faster than what was.
    """

    hardware: Hardware
    ranks: int
    sequences: int
    ranking: tuple[tuple[Setup, Plan], ...]
    by_formula: tuple[Excluded, ...]
    by_trace: tuple[Excluded, ...]
    left: int

    def table(self) -> Table:
        """The ranking, and below it what does not fit and why."""
        table = Table(
            title=f"{self.ranks} × {self.hardware.name}, {self.sequences} sequences a step"
        )
        for column in ("set-up", "peak", "step, estimated", "sent"):
            table.add_column(column, justify="left" if column == "set-up" else "right")
        for setup, plan in self.ranking:
            assert plan.estimate is not None
            seconds = f"{plan.estimate.overlapped:.3g} to {plan.estimate.serial:.3g} s"
            table.add_row(str(setup), size_of(plan.peak.bytes), seconds, size_of(plan.bytes_sent))
        table.add_section()
        for setup, reason in self.by_trace:
            table.add_row(str(setup), reason, "", "")
        nearest = sorted(self.by_formula, key=lambda entry: least_memory(entry.setup))
        for setup, reason in nearest[:3]:
            table.add_row(str(setup), reason, "", "")
        table.caption = (
            f"{len(self.by_formula):,} set-ups cannot fit by arithmetic (the nearest are shown), "
            f"{len(self.by_trace)} by trace; {self.left:,} may fit and were not traced: by "
            "arithmetic they are slower"
        )
        return table


def search(
    config: gpt.Config,
    hardware: Hardware,
    ranks: int,
    sequences: int,
    *,
    dtype: str = "bf16",
    offload: bool = False,
    loss_scale: bool = True,
    wanted: int = 3,
    seconds: float = 45.0,
) -> Found:
    """Look for the fastest set-ups that fit.

    Args:
        config: the GPT's sizes.
        hardware: what for.
        ranks: how many.
        sequences: of one step, on all ranks.
        dtype: of computing.
        offload: whether parameters, gradients and optimizer state may live on the host.
        loss_scale: whether a loss in ``"fp16"`` has a dynamic scale.
        wanted: how many to find.
        seconds: after which nothing more is traced.

    Raises:
        ValueError: if no number of data-parallel ranks divides the sequences.
    """
    start = time.perf_counter()
    excluded, candidates = [], []
    for setup in candidates_of(config, ranks, sequences, dtype, offload):
        setup = dataclasses.replace(setup, loss_scale=loss_scale)
        reason = why_not(setup, hardware)
        if reason is None:
            candidates.append(setup)
        else:
            excluded.append(Excluded(setup, reason))
    if not candidates and not excluded:
        raise ValueError(
            f"{sequences} sequences a step cannot be divided over {ranks} ranks of a model with "
            f"{config.heads} heads and {config.layers} layers; a multiple of {ranks} can"
        )
    # the fastest first; of equals what sends and recomputes least, in the fewest micro-batches
    candidates.sort(
        key=lambda s: (
            least_seconds(s, hardware), bool(s.offload), s.remat, s.stage, s.microbatches
        )
    )  # fmt: skip
    ranking: list[tuple[Setup, Plan]] = []
    failed: list[Excluded] = []
    seen, settled = 0, set()
    for setup in candidates:
        # of those that differ in the micro-batch alone the first that fits stands for all
        kind = dataclasses.replace(setup, batch=1, microbatches=1)
        if kind in settled:
            seen += 1
            continue
        if len(ranking) >= wanted or (seen and time.perf_counter() - start > seconds):
            break
        seen += 1
        try:
            plan = plan_setup(setup, hardware)
        except NotAffine:
            failed.append(Excluded(setup, "only a whole trace could tell"))
            continue
        if plan.fits:
            ranking.append((setup, plan))
            settled.add(kind)
        else:
            failed.append(Excluded(setup, f"takes {size_of(plan.peak.bytes)}"))
    ranking.sort(key=lambda entry: entry[1].estimate.overlapped)  # type: ignore[union-attr]
    return Found(
        hardware, ranks, sequences, tuple(ranking), tuple(excluded), tuple(failed),
        len(candidates) - seen,
    )  # fmt: skip


def candidates_of(
    config: gpt.Config, ranks: int, sequences: int, dtype: str, offload: bool
) -> Iterator[Setup]:
    """Every way to divide the model and the batch over the ranks."""
    places: tuple[Offloaded, ...] = ((), HOST) if offload else ((),)
    for tp in _divisors(ranks):
        if config.groups % tp:
            continue
        for pp in _divisors(ranks // tp):
            dp = ranks // tp // pp
            if pp > config.layers or sequences % dp:
                continue
            for batch in _divisors(sequences // dp):
                parts = sequences // dp // batch
                if batch & (batch - 1) or parts < pp // 2:
                    continue
                for stage in range(4) if dp > 1 else (0,):
                    for remat in (False, True):
                        for away in places:
                            yield Setup(
                                config, stage, dp, tp, pp, batch, parts, remat, dtype,
                                offload=away,
                            )  # fmt: skip


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
