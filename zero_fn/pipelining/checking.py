"""Whether a pipeline schedule can run, and does all the work of a step once.

The check runs the lists with time left out: each rank takes the next action of its list as soon
as what the action waits for is over. Either every list comes to its end, or no rank can go on,
and then the chain of who waits for whom leads to the action to blame.
"""

from __future__ import annotations

from collections import defaultdict, deque

from zero_fn.pipelining.schedule import (
    COMMUNICATION,
    COMPUTE,
    Action,
    Kind,
    Schedule,
    dependencies,
    peer,
)

# A whole backward and a half of a split one, of the same micro-batch, are the same work twice.
_SAME_WORK: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W"), "I": ("B",), "W": ("B",)}


class ScheduleError(ValueError):
    """A schedule that cannot run, or leaves something out.

    Args:
        message: What is wrong.
        action: The first action that can never run, or the one that is missing or out of place;
            None where the fault is not in an action.
    """

    def __init__(self, message: str, action: Action | None = None) -> None:
        super().__init__(message)
        self.action = action


def check_schedule(schedule: Schedule, *, buffered: bool = False) -> Schedule:
    """Prove that a schedule is complete, in order, and free of deadlock.

    Each stage does each micro-batch's F once and then its B, or its I and then its W, once.
    Where sends and receives are spelt out, each datum that crosses ranks is sent once and
    received once before its use, and between two ranks messages are received in the order in
    which they are sent (NCCL knows no other way to match them).

    Args:
        schedule: The schedule.
        buffered: Whether a send returns before its receive is reached. False is the stricter
            condition: what passes it runs on any backend.

    Returns:
        The same schedule, so that the check fits in an expression.

    Raises:
        ScheduleError: It is not so; the message names the first action that can never run, what
            it waits for, and where that is. The action is the error's `.action`.
    """
    _check_places(schedule)
    _Run(schedule, buffered).to_the_end()
    _check_complete(schedule)
    return schedule


def _check_places(schedule: Schedule) -> None:
    if not schedule.ranks or not schedule.stages or schedule.microbatches < 1:
        raise ScheduleError(
            f"the schedule {schedule.name!r} has {schedule.ranks} ranks, {schedule.stages} stages "
            f"and {schedule.microbatches} micro-batches: each must be at least 1"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(
                f"the schedule {schedule.name!r} places stage {stage} on rank {rank}, but its "
                f"ranks are 0 to {schedule.ranks - 1}"
            )
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind not in COMPUTE + COMMUNICATION:
                fault = (
                    f"is of kind {action.kind!r}; kinds are {', '.join(COMPUTE + COMMUNICATION)}"
                )
            elif not 0 <= action.stage < schedule.stages:
                fault = f"is of stage {action.stage}, but the stages are 0 to {schedule.stages - 1}"
            elif schedule.placement[action.stage] != rank:
                fault = f"is on the wrong rank: stage {action.stage} lives on rank "
                fault += f"{schedule.placement[action.stage]}"
            elif action.kind in COMMUNICATION and not _has_peer(schedule, action):
                fault = "has no other rank to speak to: take it out"
            else:
                continue
            raise ScheduleError(f"{_where(schedule, rank, index)} {fault}", action)


def _has_peer(schedule: Schedule, action: Action) -> bool:
    other = peer(action).stage
    return 0 <= other < schedule.stages and schedule.crosses(min(other, action.stage))


def _check_complete(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.microbatch < schedule.microbatches:
                raise ScheduleError(
                    f"{_where(schedule, rank, index)} is of micro-batch {action.microbatch}, but "
                    f"the micro-batches are 0 to {schedule.microbatches - 1}",
                    action,
                )
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            has = {k for k in COMPUTE if Action(stage, k, microbatch) in schedule.present}
            if has in ({"F", "B"}, {"F", "I", "W"}):
                continue
            kind: Kind = "F" if "F" not in has else "W" if "I" in has else "B"
            missing = Action(stage, kind, microbatch)
            instead = f" (or {stage}I{microbatch} and {stage}W{microbatch})" if kind == "B" else ""
            raise ScheduleError(
                f"the schedule {schedule.name!r} leaves out {missing}{instead}: add it to rank "
                f"{rank}'s list",
                missing,
            )


def _where(schedule: Schedule, rank: int, index: int) -> str:
    action = schedule.actions[rank][index]
    return f"the schedule {schedule.name!r}: {action}, action {index} of rank {rank},"


class _Run:
    """The lists, run with time left out: where each rank stands and what is over."""

    def __init__(self, schedule: Schedule, buffered: bool) -> None:
        self.schedule = schedule
        self.buffered = buffered
        self.over: set[Action] = set()
        self.heads = [0] * schedule.ranks
        self.places: dict[Action, tuple[int, int]] = {}
        for rank, actions in enumerate(schedule.actions):
            for index, action in enumerate(actions):
                self.places.setdefault(action, (rank, index))
        # (sending rank, receiving rank) to what is under way between them
        self.channels: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)

    def to_the_end(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.ranks):
                while self._advance(rank):
                    moved = True
        blamed = [self._blame(rank) for rank in range(self.schedule.ranks) if self._head(rank)]
        if blamed:
            rank, fault = min(blamed, key=lambda blame: (self.heads[blame[0]], blame[0]))
            raise ScheduleError(
                f"{_where(self.schedule, rank, self.heads[rank])} can never run{fault}",
                self._head(rank),
            )

    def _head(self, rank: int) -> Action | None:
        actions, head = self.schedule.actions[rank], self.heads[rank]
        return actions[head] if head < len(actions) else None

    def _channel(self, send: Action) -> tuple[int, int]:
        placement = self.schedule.placement
        return placement[send.stage], placement[peer(send).stage]

    def _advance(self, rank: int) -> bool:
        action = self._head(rank)
        if action is None or self._repeats(action) or self._waits_for(rank) is not None:
            return False
        if action.kind.startswith("SEND"):
            self.channels[self._channel(action)].append(action)
        elif action.kind.startswith("RECV"):
            self.channels[self._channel(peer(action))].popleft()
        self.over.add(action)
        self.heads[rank] += 1
        return True

    def _repeats(self, action: Action) -> bool:
        stage, kind, microbatch = action
        if action in self.over:
            return True
        others = _SAME_WORK.get(kind, ())
        return any(Action(stage, other, microbatch) in self.over for other in others)

    def _waits_for(self, rank: int) -> Action | None:
        """The first thing that the rank's next action waits for; None if it can run now."""
        action = self._head(rank)
        assert action is not None
        for other in dependencies(self.schedule, action):
            if other not in self.over:
                return other
        if action.kind.startswith("RECV"):
            first = self.channels[self._channel(peer(action))][0]
            return None if first == peer(action) else peer(first)
        if action.kind.startswith("SEND") and not self.buffered:
            receive = peer(action)
            return None if self._head(self._channel(action)[1]) == receive else receive
        return None

    def _blame(self, rank: int) -> tuple[int, str]:
        """Follow who waits for whom from a rank that stands still to the one at fault, and why."""
        chain: list[int] = []
        while rank not in chain:
            chain.append(rank)
            action = self._head(rank)
            assert action is not None
            if self._repeats(action):
                return rank, ": its work is done already"
            other = self._waits_for(rank)
            assert other is not None
            if other not in self.places:
                return rank, f": it waits for {other}, which is in no rank's list"
            home, index = self.places[other]
            if home == rank:
                return rank, (
                    f": it waits for {other}, which comes after it, as action {index} of the same "
                    f"rank"
                )
            rank = home
        cycle = chain[chain.index(rank) :]
        first = min(cycle, key=lambda r: (self.heads[r], r))
        cycle = cycle[cycle.index(first) :] + cycle[: cycle.index(first)]
        links = [
            f"rank {r} is at {self._head(r)}, which waits for {self._waits_for(r)}" for r in cycle
        ]
        advice = ""
        if not self.buffered and self.schedule.communicates:
            advice = ". If sends return before they are received, check with buffered=True"
        return first, f", a deadlock: {'; '.join(links)}{advice}"
