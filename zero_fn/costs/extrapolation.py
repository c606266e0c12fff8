"""Plans of large set-ups from traces of small ones.

A model repeats one block, and a step one micro-batch. So what a step allocates, sends and computes
is affine in the number of blocks, affine in the number of micro-batches, and its mixed term is
their product: four traces at the corners of a rectangle determine it. Memory is so at the first
and at the last turn of each operation of a line; the peak is the highest of these. Collectives so
small that some travel together change the number of calls. ``tests/costs`` holds extrapolated plans
against whole traces.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..accounting import Collective, Moment
from ..planning import Estimate, Plan
from ..planning.residing import most_of, states_of
from ..program import Peak


class Span(NamedTuple):
    """One number of a set-up: the two values that are traced, and the one that is asked for."""

    low: int
    high: int
    wanted: int

    def weights(self) -> dict[int, float]:
        """The values to trace, and how much each counts."""
        if self.wanted <= self.high:
            return {self.wanted: 1.0}
        share = (self.wanted - self.low) / (self.high - self.low)
        return {self.low: 1 - share, self.high: share}


def extrapolated(traced: Callable[..., Plan], spans: Sequence[Span]) -> Plan:
    """The plan at the wanted values, from ``traced(*values)`` at the corners.

    What is wanted at or below a span's high value is traced itself.
    """
    corners = []
    for corner in product(*[span.weights().items() for span in spans]):
        weight = 1.0
        for _, share in corner:
            weight *= share
        corners.append((traced(*[value for value, _ in corner]), weight))
    return combined(corners)


def combined(corners: Sequence[tuple[Plan, float]]) -> Plan:
    """The weighted sum of plans; what is no number is the last one's."""
    if len(corners) == 1:
        return corners[0][0]
    plans, weights = zip(*corners, strict=True)
    last: Plan = plans[-1]

    def number(read: Callable[[Plan], float]) -> float:
        return max(0.0, sum(w * read(plan) for plan, w in zip(plans, weights, strict=True)))

    def whole(read: Callable[[Plan], float]) -> int:
        return round(number(read))

    def numbers(read: Callable[[Plan], Mapping[str, Any]]) -> dict[str, int]:
        names = dict.fromkeys(name for plan in plans for name in read(plan))
        return {
            name: whole(lambda plan, name=name: read(plan).get(name, 0))  # type: ignore[misc]
            for name in names
        }

    def of_collective(kind: str, axis: str, field: int) -> int:
        def read(plan: Plan) -> int:
            found = [c for c in plan.collectives if (c.kind, c.axis) == (kind, axis)]
            return int(found[0][field]) if found else 0

        return whole(read)

    estimate = None
    if last.estimate is not None:

        def seconds(axis: str) -> float:
            return number(lambda plan: plan.estimate.communication.get(axis, 0))  # type: ignore[union-attr]

        estimate = Estimate(
            number(lambda plan: plan.estimate.compute),  # type: ignore[union-attr]
            {axis: seconds(axis) for axis in last.estimate.communication},
            offload=number(lambda plan: plan.estimate.offload),  # type: ignore[union-attr]
        )
    turns: dict[tuple[str, str, str], Moment] = {}
    for turn in last.turns:
        if all(turn in plan.turns for plan in plans):
            parts = numbers(lambda plan, turn=turn: plan.turns[turn].parts)  # type: ignore[misc]
            turns[turn] = Moment(turn[0], sum(parts.values()), parts)
    highest = max(turns, key=lambda turn: turns[turn].bytes)
    return dataclasses.replace(
        last,
        rest=numbers(lambda plan: plan.rest),
        peak=Peak(
            turns[highest].bytes,
            turns[highest].parts,
            whole(lambda plan: plan.peak.inputs),
            highest[0],
            highest[1],
        ),
        most=most_of(turns.values()),
        states=states_of(turns.values()),
        turns=turns,
        collectives=tuple(
            Collective(kind, axis, *[of_collective(kind, axis, field) for field in (2, 3, 4)])
            for kind, axis, *_ in last.collectives
        ),
        flops=whole(lambda plan: plan.flops),
        estimate=estimate,
        host=whole(lambda plan: plan.host),
        disk=whole(lambda plan: plan.disk),
    )
