"""Plans of large set-ups from traces of small ones.

A model repeats one block, and a step one micro-batch. So what a step allocates, sends and computes
is affine in the number of blocks, affine in the number of micro-batches, and its mixed term is
their product: four traces at the corners of a rectangle determine it. Memory is so at the first
and at the last turn of most operations of a line; where a gather or a sum moved from one operation
to another between the corners it is not, and a fifth trace, outside the rectangle, tells those
apart. The peak is the highest of the others. Collectives so small that some travel together change
the number of calls. ``tests/costs`` holds extrapolated plans against whole traces.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..accounting import Collective, Moment
from ..planning import Estimate, Plan
from ..planning.residing import Turn, Turns, most_of, states_of
from ..program import Peak

NEAR = 1e-3  # of a turn's bytes: what is off by more at the fifth trace is not affine


class NotAffine(ValueError):
    """Small traces of this set-up do not tell its memory."""


class Span(NamedTuple):
    """One number of a set-up: the two values that are traced, and the one that is asked for."""

    low: int
    high: int
    wanted: int

    @property
    def beyond(self) -> int:
        """The value that the traced ones are tried on, or what is asked for if it comes first."""
        return min(self.wanted, self.high + 1)

    def weights(self, value: int) -> dict[int, float]:
        """The values to trace for one, and how much each counts."""
        if value <= self.high:
            return {value: 1.0}
        share = (value - self.low) / (self.high - self.low)
        return {self.low: 1 - share, self.high: share}


def extrapolated(traced: Callable[..., Plan], spans: Sequence[Span]) -> Plan:
    """The plan at the wanted values, from ``traced(*values)`` at the corners.

    What is wanted at or right above a span's high value is traced itself. The corners are traced
    more than once, so ``traced`` should remember them.

    Raises:
        NotAffine: if the peak of the fifth trace is at a turn that is not affine.
    """
    wanted = [span.wanted for span in spans]
    beyond = [span.beyond for span in spans]
    fifth = traced(*beyond)
    if wanted == beyond:
        return fifth
    tried = summed(traced, spans, beyond)
    affine = [turn for turn in fifth.turns if turn in tried.turns and _agree(tried, fifth, turn)]
    if max([fifth.turns[turn].bytes for turn in affine], default=0) < fifth.peak.bytes:
        raise NotAffine(
            f"{fifth.label}: the memory at {fifth.peak.operation}, where most is alive, is not "
            "affine in the numbers of blocks and of micro-batches; trace the whole program: "
            "plan_setup(setup, hardware, whole=True), or zero-fn plan --whole"
        )
    found = summed(traced, spans, wanted)
    turns = {
        turn: found.turns[turn]
        if _agree_in_parts(tried, fifth, turn)
        else _divided_like(fifth.turns[turn], found.turns[turn])
        for turn in affine
    }
    return _highest_of(found, turns)


def summed(traced: Callable[..., Plan], spans: Sequence[Span], values: Sequence[int]) -> Plan:
    """The weighted sum of the corners that stands for some values, whether or not it is affine."""
    parts = [span.weights(value).items() for span, value in zip(spans, values, strict=True)]
    return _combined(
        [
            (traced(*[value for value, _ in corner]), math.prod(share for _, share in corner))
            for corner in product(*parts)
        ]
    )


def _agree(tried: Plan, real: Plan, turn: Turn) -> bool:
    """Whether the fifth trace's memory is what the four say."""
    size = real.turns[turn].bytes
    return abs(tried.turns[turn].bytes - size) <= NEAR * size


def _agree_in_parts(tried: Plan, real: Plan, turn: Turn) -> bool:
    """The same of what it consists of: of two turns that are as high, corners may name either."""
    a, b = tried.turns[turn].parts, real.turns[turn].parts
    apart = max(abs(a.get(name, 0) - b.get(name, 0)) for name in {*a, *b})
    return apart <= NEAR * real.turns[turn].bytes


def _divided_like(known: Moment, moment: Moment) -> Moment:
    """The moment, its parts in another's proportions."""
    share = moment.bytes / max(known.bytes, 1)
    return moment._replace(parts={name: round(share * n) for name, n in known.parts.items()})


def _combined(corners: Sequence[tuple[Plan, float]]) -> Plan:
    """The weighted sum of plans; what is no number, and the peak, is the last one's."""
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
    turns: dict[Turn, Moment] = {}
    for turn in last.turns:
        if all(turn in plan.turns for plan in plans):
            size = whole(lambda plan, turn=turn: plan.turns[turn].bytes)  # type: ignore[misc]
            parts = numbers(lambda plan, turn=turn: plan.turns[turn].parts)  # type: ignore[misc]
            turns[turn] = Moment(turn[0], size, parts)
    return dataclasses.replace(
        last,
        rest=numbers(lambda plan: plan.rest),
        peak=last.peak._replace(inputs=whole(lambda plan: plan.peak.inputs)),
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


def _highest_of(plan: Plan, turns: Turns) -> Plan:
    """The plan with its memory at the highest of these turns."""
    (operation, line, _), highest = max(turns.items(), key=lambda entry: entry[1].bytes)
    return dataclasses.replace(
        plan,
        peak=Peak(highest.bytes, highest.parts, plan.peak.inputs, operation, line),
        most=most_of(turns.values()),
        states=states_of(turns.values()),
        turns=turns,
    )
