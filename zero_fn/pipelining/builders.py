"""The pipeline schedules by name, and the way to bring one's own.

A builder is a function from (ranks, micro-batches) to a list of actions for each rank. Most are
written as phases: how often a rank repeats which pattern, where `F0` is the next forward of the
rank's first stage, `I1` the next input gradient of its second, and `W` the oldest weight gradient
that is still due. Each kind counts its micro-batches upwards, so the phases are the schedule.

Some schedules are defined from some number of micro-batches on only. Below it the larger schedule
is built and the micro-batches that don't exist are left out: what waits for what never joins two
micro-batches, so what is left runs as it stands and holds no more activations.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import cast

from zero_fn.pipelining.checking import check_schedule
from zero_fn.pipelining.schedule import Action, Kind, Schedule, parse_schedule

from ..naming import suggestion

Builder = Callable[..., Schedule | Iterable[Iterable[object]]]

# How often (not at all where that is below 1), and what.
Phase = tuple[int, str]


def pipeline_schedule(
    schedule: str | Builder, ranks: int, microbatches: int, **options: object
) -> Schedule:
    """Build a pipeline schedule and check it.

    Args:
        schedule: A name of `SCHEDULES`, or a function of (ranks, microbatches) that returns a
            `Schedule`, or a list for each rank of actions or of their text (`"2F0"`).
        ranks: How many ranks the pipeline has.
        microbatches: How many micro-batches a step has.
        **options: Handed to the builder, such as `chunks=4` for `"interleaved"`.

    Returns:
        The schedule. It has passed `check_schedule`.

    Raises:
        ValueError: There is no schedule of that name, or the numbers don't suit it.
        TypeError: The builder has no such option, or a number is not an int.
        ScheduleError: A builder of one's own returned a schedule that cannot run.

    >>> print(pipeline_schedule("1f1b", ranks=2, microbatches=3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        _at_least_one(what, number)
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"no schedule is called {schedule!r}; {suggestion(schedule, SCHEDULES)}, and a "
                "function of (ranks, microbatches) goes in its place"
            )
        builder: Builder = SCHEDULES[schedule]
        name = schedule
        known = list(inspect.signature(builder).parameters)[2:]
        for option in options:
            if option not in known:
                raise TypeError(
                    f"the schedule {name!r} has no option {option!r}; it has "
                    f"{', '.join(known) or 'none'}"
                )
    else:
        builder, name = schedule, getattr(schedule, "__name__", "custom")
    built = builder(ranks, microbatches, **options)
    if not isinstance(built, Schedule):
        built = parse_schedule(built, microbatches=microbatches, name=name)
    return check_schedule(built)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Bubble (P-1)/(M+P-1) for P ranks and M micro-batches; every rank holds M activations.
    """
    phases: list[Phase] = [(microbatches, "F0"), (microbatches, "B0")]
    return _schedule("gpipe", [phases] * ranks, _looped(ranks, 1), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forwards and backwards in turn after a warm-up (PipeDream-Flush, arXiv 2006.09503).

    Bubble (P-1)/(M+P-1), as GPipe's, but rank r holds at most P-r activations.
    """
    phases = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, microbatches)
        phases.append([(warmup, "F0"), (microbatches - warmup, "F0 B0"), (warmup, "B0")])
    return _schedule("1f1b", phases, _looped(ranks, 1), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages a rank (Megatron-LM, arXiv 2104.04473, section 2.2.2).

    Stage s lives on rank s mod P. Bubble (P-1)/(vM+P-1) for v chunks when M is a multiple of P;
    rank r holds at most 2(P-r-1) + (v-1)P + 1 activations of a chunk.

    Args:
        ranks: P.
        microbatches: M, any number.
        chunks: v, the stages of each rank. One is 1F1B.

    Raises:
        ValueError: `chunks` is less than 1.
    """
    _at_least_one("chunks", chunks)
    rounds = -(-microbatches // ranks)
    total = rounds * ranks * chunks
    actions = []
    for rank in range(ranks):
        warmup = ranks - 1 - rank
        if chunks > 1:
            warmup = min(2 * warmup + (chunks - 1) * ranks, total)
        order: list[Action] = []
        for step in range(total + warmup):
            for kind, index in (("F", step), ("B", step - warmup)):
                if 0 <= index < total:
                    # P micro-batches go through one chunk before the next chunk has its turn
                    turn, within = divmod(index, ranks)
                    around, chunk = divmod(turn, chunks)
                    if kind == "B":
                        chunk = chunks - 1 - chunk
                    microbatch = around * ranks + within
                    order.append(Action(chunk * ranks + rank, cast(Kind, kind), microbatch))
        actions.append(tuple(action for action in order if action.microbatch < microbatches))
    return Schedule("interleaved", tuple(actions), _looped(ranks, chunks), microbatches)


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """1F1B with split backwards whose second halves fill the bubble (ZB-H1, arXiv 2401.10241).

    With F = I = W the bubble is (P-1)/(3M+P-1), a third of 1F1B's, and no rank holds more than
    P activations (held until W): rank r puts its weight gradients off by r micro-batches.
    """
    full = max(microbatches, ranks)
    phases = [
        [
            (ranks - 1 - rank, "F0"),
            (rank, "F0 I0"),
            (full - ranks + 1, "F0 I0 W"),
            (ranks - 1 - rank, "I0 W"),
            (rank, "W"),
        ]
        for rank in range(ranks)
    ]
    return _schedule("zero_bubble", phases, _looped(ranks, 1), microbatches)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, placed in a V, backwards split (ZB-V, arXiv 2401.10241, section 6).

    Stages r and 2P-1-r live on rank r, so the last stage's loss is at hand on rank 0 and the
    backward starts where the forward did. With F = I = W and M of at least 2P the only idle time
    is the wait of each rank for its first input: bubble (P-1)/(6M+P-1). A rank holds at most 2P
    activations of a stage, which are 1F1B's P of a rank.
    """
    full = max(microbatches, 2 * ranks - 1)
    phases = [
        [
            (2 * (ranks - rank) - 1, "F0"),
            (rank, "F1 F0"),
            (ranks - rank, "F1 I1 W"),
            (full - ranks, "F0 I0 W F1 I1 W"),
            (rank, "I0 I1"),
            (ranks - rank, "I0 W"),
            (2 * rank, "W"),
        ]
        for rank in range(ranks)
    ]
    return _schedule("zbv", phases, _v_shaped(ranks), microbatches)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half, two stages a rank placed in a V (DeepSeek-V3, arXiv 2412.19437).

    In the steady state each forward stands beside a whole backward of another micro-batch, for
    an executor to hide the communication of one behind the other; the split backwards are at
    both ends. A rank holds at most 2P+1 activations of a stage.
    """
    phases = []
    for rank in range(ranks):
        after = ranks - 1 - rank
        half, odd = divmod(rank + 1, 2)
        phases.append(
            [
                (2 * after, "F0"),
                (rank + 1, "F0 F1"),
                (after, "I1 W F1"),
                # with M below 2P some ranks have none of these; to leave micro-batches out of
                # the schedule for 2P, as zbv does, makes a later end
                (microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
                (after, "B1 F1 B0"),
                # from the middle of these on the backwards are split, to fill the end
                (half, "B1 B0"),
                (odd, "B1 I0"),
                (half, "I1 I0"),
                (after, "W I0"),
                (rank + 1, "W"),
            ]
        )
    return _schedule("dualpipev", phases, _v_shaped(ranks), microbatches)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "dualpipev": dualpipev,
}


def _at_least_one(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{what} is a number of things, an int; not {number!r}")
    if number < 1:
        raise ValueError(f"{what} is {number}; there must be at least 1")


def _looped(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(ranks)) * chunks


def _v_shaped(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def _schedule(
    name: str, phases: list[list[Phase]], placement: tuple[int, ...], microbatches: int
) -> Schedule:
    """Write the phases of each rank out; micro-batches beyond the last are left out."""
    actions = []
    for rank, of_rank in enumerate(phases):
        stages = [stage for stage, home in enumerate(placement) if home == rank]
        actions.append(tuple(a for a in _expand(of_rank, stages) if a.microbatch < microbatches))
    return Schedule(name, tuple(actions), placement, microbatches)


def _expand(phases: list[Phase], stages: list[int]) -> Iterable[Action]:
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    due: deque[Action] = deque()
    for times, pattern in phases:
        for token in pattern.split() * times:
            if token == "W":
                yield due.popleft()
                continue
            stage = stages[int(token[1:])]
            counter = forwards if token[0] == "F" else backwards
            action = Action(stage, cast(Kind, token[0]), counter[stage])
            counter[stage] += 1
            yield action
            if action.kind == "I":
                due.append(action._replace(kind="W"))
