"""When each action of a schedule runs, and so its bubble, its makespan and its live activations.

A rank runs one action at a time, in the order of its list, as soon as what the action waits for
is over. What crosses ranks arrives `comm` later and takes no time of either rank: sends are
asynchronous and receives are posted ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from zero_fn.pipelining.checking import check_schedule
from zero_fn.pipelining.schedule import COMPUTE, Action, Schedule, dependencies, peer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cost = float | Sequence[float] | Callable[[int], float]


class Event(NamedTuple):
    """An action and when it runs, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each F, B, I and W of a schedule runs; prints, draws, and shows itself in a notebook.

    Args:
        schedule: The schedule.
        events: For each rank its events in the order of time; sends and receives have none.
        peak_activations: For each rank the largest sum of `activation` over the micro-batches of
            its stages that are between the start of their F and the end of their B or W.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    peak_activations: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the start to the end of the last action."""
        return max(event.end for rank in self.events for event in rank)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in which it computes."""
        return tuple(sum(event.end - event.start for event in rank) for rank in self.events)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time until the makespan, from 0 to 1."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.makespan * self.schedule.ranks)

    def text(self, width: int = 100) -> str:
        """The timeline as text, one line a rank.

        Args:
            width: The longest line, in characters. Actions are written out where that fits;
                elsewhere each character is an equal slice of time.
        """
        from zero_fn.pipelining.drawing import timeline_text

        return timeline_text(self, width)

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the timeline on matplotlib Axes; nothing is shown or written.

        Args:
            ax: Where to draw; a new figure when not given.

        Returns:
            The Axes. `ax.figure.savefig("timeline.svg")` writes them.
        """
        from zero_fn.pipelining.drawing import draw_timeline

        return draw_timeline(self, ax)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from zero_fn.pipelining.drawing import timeline_html

        return timeline_html(self)

    def __rich_console__(self, console: object, options: object) -> Iterator[object]:
        from zero_fn.pipelining.drawing import timeline_rich

        yield timeline_rich(self, options.max_width)  # type: ignore[attr-defined]


def timeline(
    schedule: Schedule,
    *,
    forward: Cost = 1,
    input_grad: Cost = 1,
    weight_grad: Cost = 1,
    comm: float = 0,
    activation: Cost = 1,
) -> Timeline:
    """Work out when each action of a schedule runs.

    A cost is a number, a sequence with one number for each stage, or a function from the stage to
    the number, all in one unit of time of the caller's choice. A whole backward costs
    `input_grad + weight_grad`.

    Args:
        schedule: The schedule, with or without sends and receives.
        forward: The cost of an F.
        input_grad: The cost of an I.
        weight_grad: The cost of a W.
        comm: The time from the end of an action, or from its send where that is spelt out, until
            what it gives can be used on another rank.
        activation: What a stage holds of one micro-batch from the start of its F to the end of
            its B or W, in any unit; 1 counts stages' micro-batches.

    Returns:
        The timeline.

    Raises:
        ScheduleError: The schedule cannot run.
        ValueError: A cost is negative or not finite, or a sequence does not fit the stages.

    >>> from zero_fn.pipelining.builders import pipeline_schedule
    >>> four = timeline(pipeline_schedule("1f1b", ranks=4, microbatches=8))
    >>> four.makespan, round(four.bubble, 4), four.peak_activations
    (33, 0.2727, (4, 3, 2, 1))
    """
    check_schedule(schedule, buffered=True)
    per_stage = {
        "F": _per_stage("forward", forward, schedule.stages),
        "I": _per_stage("input_grad", input_grad, schedule.stages),
        "W": _per_stage("weight_grad", weight_grad, schedule.stages),
    }
    per_stage["B"] = [i + w for i, w in zip(per_stage["I"], per_stage["W"], strict=True)]
    (delay,) = _per_stage("comm", comm, 1)
    sizes = _per_stage("activation", activation, schedule.stages)

    placement = schedule.placement
    over: dict[Action, float] = {}
    clocks: list[float] = [0] * schedule.ranks
    heads = [0] * schedule.ranks
    events: list[list[Event]] = [[] for _ in clocks]

    def arrival(action: Action, other: Action) -> float | None:
        if other not in over:
            return None
        implied = not schedule.communicates and placement[other.stage] != placement[action.stage]
        return over[other] + (delay if implied or action.kind.startswith("RECV") else 0)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while heads[rank] < len(actions):
                action = actions[heads[rank]]
                arrivals = [arrival(action, other) for other in dependencies(schedule, action)]
                known = [time for time in arrivals if time is not None]
                if len(known) < len(arrivals):
                    break
                if action.kind in COMPUTE:
                    start = max([clocks[rank], *known])
                    clocks[rank] = over[action] = start + per_stage[action.kind][action.stage]
                    events[rank].append(Event(action, start, over[action]))
                else:
                    # a send leaves when its rank comes to it; its way begins there, wherever the
                    # other rank is
                    over[action] = max([clocks[rank], *known])
                heads[rank] += 1
                moved = True
    peaks = tuple(_peak(rank, sizes) for rank in events)
    return Timeline(schedule, tuple(map(tuple, events)), peaks)


def with_communication(schedule: Schedule) -> Schedule:
    """Spell out the sends and receives of a schedule that leaves them implied.

    A send stands right behind the action that makes the datum, and its receive stands in the
    other rank's list where that rank is at that moment, when every action takes one unit of time.
    All lists so follow one order of all events, which is why no rank waits in a circle, even
    where a send does not return before its receive is reached.

    Args:
        schedule: A schedule of F, B, I and W.

    Returns:
        The same actions, with the sends and receives between them.

    Raises:
        ScheduleError: The schedule cannot run.
        ValueError: Sends or receives are spelt out already.

    >>> from zero_fn.pipelining.builders import pipeline_schedule
    >>> print(with_communication(pipeline_schedule("gpipe", ranks=2, microbatches=1)))
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if schedule.communicates:
        raise ValueError(f"the schedule {schedule.name!r} has sends or receives already")
    moments: list[tuple[float, bool, int, Action]] = []
    for rank, events in enumerate(timeline(schedule).events):
        for action, start, end in events:
            moments.append((start, True, rank, action))
            send = _send(schedule, action)
            if send is not None:
                # before whatever starts at the moment at which this action ends
                moments.append((end, False, rank, send))
    lists: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for _, computes, rank, action in sorted(moments):
        lists[rank].append(action)
        if not computes:
            lists[schedule.placement[peer(action).stage]].append(peer(action))
    return Schedule(
        schedule.name, tuple(map(tuple, lists)), schedule.placement, schedule.microbatches
    )


def _send(schedule: Schedule, action: Action) -> Action | None:
    stage, kind, _ = action
    if kind == "F" and stage + 1 < schedule.stages and schedule.crosses(stage):
        return action._replace(kind="SEND_F")
    if kind in ("B", "I") and stage > 0 and schedule.crosses(stage - 1):
        return action._replace(kind="SEND_B")
    return None


def _per_stage(name: str, cost: Cost, stages: int) -> list[float]:
    if callable(cost):
        costs = [cost(stage) for stage in range(stages)]
    elif isinstance(cost, Sequence):
        costs = list(cost)
        if len(costs) != stages:
            raise ValueError(f"{name} has {len(costs)} numbers, but there are {stages} stages")
    else:
        costs = [cost] * stages
    for stage, number in enumerate(costs):
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number!r} for stage {stage}: give a number of at least 0")
    return costs


def _peak(events: list[Event], sizes: list[float]) -> float:
    live: float = 0
    peak: float = 0
    for action, _, _ in events:
        if action.kind == "F":
            live += sizes[action.stage]
            peak = max(peak, live)
        elif action.kind in ("B", "W"):
            live -= sizes[action.stage]
    return peak
