"""What an action and a pipeline schedule are: plain immutable values, read and printed as text.

An action names a stage, a kind and a micro-batch. A schedule is one list of actions for each
rank, in the order in which the rank runs them, and the rank on which each stage lives. It says
nothing of time: how long an action takes is known to `timeline`, and when it can start follows
from what it waits for (`dependencies`). An executor walks its rank's list from left to right.

Two neighbours in a list that don't wait for each other (an F and a B of different micro-batches)
may run overlapped; the list needs no mark for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

COMPUTE: tuple[Kind, ...] = ("F", "B", "I", "W")
COMMUNICATION: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

# When parameters are gathered and gradients reduced is the sharding's decision, not the
# schedule's: these of torch's actions are read past.
_SHARDING_ACTIONS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_SHARDING = re.compile(rf"\d+(?:{'|'.join(_SHARDING_ACTIONS)})\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing a rank does. `2F0`, as torch prints it, is stage 2's forward of micro-batch 0.

    Args:
        stage: The stage, counted from 0 in the order of the model.
        kind: `F` forward; `B` whole backward; `I` the input's gradient and `W` the weights'
            gradient, the two halves of a split backward. `SEND_F` sends this stage's output to
            the next stage and `RECV_F` receives this stage's input; `SEND_B` sends the gradient
            of this stage's input to the stage before and `RECV_B` receives the gradient of this
            stage's output.
        microbatch: The micro-batch, counted from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A list of actions for each rank, and where each stage lives.

    A schedule may be wrong: `checking.check_schedule` says whether it is. `str(schedule)` is
    torch's text form, one line a rank, and `parse_schedule` reads it back.

    Args:
        name: What it is called in errors and drawings.
        actions: For each rank its actions in the order in which it runs them.
        placement: For each stage the rank on which it lives.
        microbatches: How many micro-batches a step has.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, in the order of the model."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)

    @cached_property
    def present(self) -> frozenset[Action]:
        """Every action that stands in some rank's list."""
        return frozenset(action for rank in self.actions for action in rank)

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives are spelt out. Where they aren't, they are implied."""
        return any(action.kind in COMMUNICATION for action in self.present)

    def crosses(self, stage: int) -> bool:
        """Whether what passes between `stage` and the next one goes from one rank to another."""
        return self.placement[stage] != self.placement[stage + 1]

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.actions)


def peer(action: Action) -> Action:
    """The receive that a send is for, or the send that a receive waits for.

    Raises:
        ValueError: The action is neither a send nor a receive.

    >>> str(peer(Action(2, "SEND_B", 0)))
    '1RECV_B0'
    """
    match action.kind:
        case "SEND_F":
            return Action(action.stage + 1, "RECV_F", action.microbatch)
        case "RECV_F":
            return Action(action.stage - 1, "SEND_F", action.microbatch)
        case "SEND_B":
            return Action(action.stage - 1, "RECV_B", action.microbatch)
        case "RECV_B":
            return Action(action.stage + 1, "SEND_B", action.microbatch)
    raise ValueError(f"{action} is neither a send nor a receive, so it has no peer")


def dependencies(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions that must be over before this one can start, besides those before it in its list.

    Args:
        schedule: Where the action stands; says whether a backward is whole or split, and whether
            data crosses ranks by a receive.
        action: The action.

    Returns:
        At most two actions. One that stands in no list can never be over, and then neither can
        `action`.
    """
    stage, kind, microbatch = action
    if kind == "W":
        return (Action(stage, "I", microbatch),)
    if kind == "SEND_F":
        return (Action(stage, "F", microbatch),)
    if kind == "SEND_B":
        return (_input_gradient(schedule, stage, microbatch),)
    if kind in ("RECV_F", "RECV_B"):
        return (peer(action),)
    if kind == "F":
        if stage == 0:
            return ()
        if schedule.communicates and schedule.crosses(stage - 1):
            return (Action(stage, "RECV_F", microbatch),)
        return (Action(stage - 1, "F", microbatch),)
    forward = Action(stage, "F", microbatch)
    if stage == schedule.stages - 1:
        return (forward,)
    if schedule.communicates and schedule.crosses(stage):
        return (forward, Action(stage, "RECV_B", microbatch))
    return (forward, _input_gradient(schedule, stage + 1, microbatch))


def _input_gradient(schedule: Schedule, stage: int, microbatch: int) -> Action:
    split = Action(stage, "I", microbatch)
    # a W alone says that the missing half is an I, and not a B
    if split in schedule.present or split._replace(kind="W") in schedule.present:
        return split
    return split._replace(kind="B")


def parse_action(text: str) -> Action:
    """Read one action in torch's form.

    Args:
        text: Stage, kind and micro-batch, such as `2F0` or `1SEND_B3`.

    Raises:
        ValueError: It is not of that form.

    >>> parse_action("2F0")
    Action(stage=2, kind='F', microbatch=0)
    """
    found = _ACTION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not an action: write stage, kind and micro-batch, as in '2F0' or "
            f"'1SEND_B3', with a kind of {', '.join(COMPUTE + COMMUNICATION)}"
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), cast(Kind, kind), int(microbatch))


def parse_schedule(
    rows: str | Iterable[Iterable[object]],
    *,
    microbatches: int | None = None,
    placement: Sequence[int] | None = None,
    name: str = "custom",
) -> Schedule:
    """Make a schedule of lists of actions, or of torch's text form of one.

    Torch's own lists and the files that it writes read as they are: an empty cell or None (a
    wait of fixed length there) is left out, as are `UNSHARD`, `RESHARD` and `REDUCE_GRAD`, which
    belong to the sharding of parameters and not to the schedule; the two halves of an
    `OVERLAP_F_B` follow each other.

    Args:
        rows: One list for each rank of `Action`s or anything that prints as one, or text with
            one line for each rank and commas between the actions.
        microbatches: How many micro-batches a step has; counted when not given.
        placement: The rank of each stage; when not given, the first rank in whose list the
            stage stands.
        name: What it is to be called.

    Returns:
        The schedule, not yet checked.

    Raises:
        ValueError: Something in the rows is not an action, no action is left, or a stage between
            others stands in no list.

    >>> print(parse_schedule("0F0,0B0\\n1F0,1B0"))
    0F0,0B0
    1F0,1B0
    """
    if isinstance(rows, str):
        rows = [line.split(",") for line in rows.strip("\n").split("\n")]
    actions = tuple(tuple(action for cell in row for action in _parse_cell(cell)) for row in rows)
    everything = [action for row in actions for action in row]
    if not everything:
        raise ValueError(f"the schedule {name!r} has no actions: give each rank its list")
    if placement is None:
        homes: dict[int, int] = {}
        for rank, row in enumerate(actions):
            for action in row:
                homes.setdefault(action.stage, rank)
        missing = sorted(set(range(max(homes) + 1)) - set(homes))
        if missing:
            raise ValueError(
                f"the schedule {name!r} has actions of stage {max(homes)}, but none of stage "
                f"{missing[0]}: stages are counted from 0 without gaps"
            )
        placement = [homes[stage] for stage in range(len(homes))]
    if microbatches is None:
        microbatches = 1 + max(action.microbatch for action in everything)
    return Schedule(name, actions, tuple(placement), microbatches)


def _parse_cell(cell: object) -> list[Action]:
    if cell is None:
        return []
    if isinstance(cell, Action):
        return [cell]
    text = str(cell).strip()
    if not text or _SHARDING.fullmatch(text):
        return []
    overlapped = _OVERLAP.fullmatch(text)
    if overlapped:
        return [parse_action(part) for part in overlapped.group(1).split(";")]
    return [parse_action(text)]
