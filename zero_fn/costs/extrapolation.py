"""Plans of large set-ups from traces of small ones.

A model repeats one block, and a step one micro-batch. So what a step allocates, sends and computes
is affine in the number of blocks, affine in the number of micro-batches, and its mixed term is
their product: four traces at the corners of a rectangle determine it. Exactly so where the same
operation is at the peak at all corners; collectives so small that some travel together change the
number of calls. ``tests/costs`` holds extrapolated plans against whole traces.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..planning import Estimate, Plan


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
        return {name: whole(lambda plan: read(plan).get(name, 0)) for name in names}

    def collective(plan: Plan, key: tuple[str, str], field: str) -> int:
        found = [c for c in plan.collectives if (c.kind, c.axis) == key]
        return getattr(found[0], field) if found else 0

    estimate = None
    if last.estimate is not None:

        def seconds(axis: str) -> float:
            return number(lambda plan: plan.estimate.communication.get(axis, 0))  # type: ignore[union-attr]

        estimate = Estimate(
            number(lambda plan: plan.estimate.compute),  # type: ignore[union-attr]
            {axis: seconds(axis) for axis in last.estimate.communication},
            offload=number(lambda plan: plan.estimate.offload),  # type: ignore[union-attr]
        )
    parts = numbers(lambda plan: plan.peak.parts)
    return dataclasses.replace(
        last,
        rest=numbers(lambda plan: plan.rest),
        peak=last.peak._replace(
            bytes=sum(parts.values()), parts=parts, inputs=whole(lambda plan: plan.peak.inputs)
        ),
        most=numbers(lambda plan: plan.most),
        states=whole(lambda plan: plan.states),
        collectives=tuple(
            c._replace(
                **{
                    field: whole(lambda plan, k=(c.kind, c.axis), f=field: collective(plan, k, f))
                    for field in ("calls", "bytes_in", "bytes_sent")
                }
            )
            for c in last.collectives
        ),
        flops=whole(lambda plan: plan.flops),
        estimate=estimate,
        host=whole(lambda plan: plan.host),
        disk=whole(lambda plan: plan.disk),
    )
