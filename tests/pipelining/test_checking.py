"""The checker against an independent one, and against every way to break a schedule.

The independent one builds the graph of what must come before what, with rules written down here
once more, and asks `graphlib` whether it has a circle.
"""

import graphlib
import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zero_fn.pipelining.builders import SCHEDULES, pipeline_schedule
from zero_fn.pipelining.checking import ScheduleError, check_schedule
from zero_fn.pipelining.schedule import Action, Schedule, parse_action, parse_schedule
from zero_fn.pipelining.timeline import with_communication

# no deadline: the machine that runs the tests may be busy with other things
thorough = settings(deadline=None, max_examples=150)

schedules = st.builds(
    lambda name, ranks, microbatches, spelt_out: (
        with_communication(pipeline_schedule(name, ranks, microbatches))
        if spelt_out
        else pipeline_schedule(name, ranks, microbatches)
    ),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)


def can_run(schedule, buffered):
    """Whether a schedule with all its actions, each once, runs to the end."""
    sends = [a for row in schedule.actions for a in row if a.kind.startswith("SEND")]
    receive_of = {}
    for stage, kind, m in sends:
        receive_of[stage, kind, m] = (
            (stage + 1, "RECV_F", m) if kind == "SEND_F" else (stage - 1, "RECV_B", m)
        )
    send_of = {receive: send for send, receive in receive_of.items()}
    everything = {tuple(a) for row in schedule.actions for a in row}
    # a send that does not return before its receive is reached is one event with it
    node = (lambda a: a) if buffered else (lambda a: send_of.get(a, a))

    graph = graphlib.TopologicalSorter()
    for row in schedule.actions:
        for before, after in itertools.pairwise(row):
            graph.add(node(tuple(after)), node(tuple(before)))
    for stage, kind, m in everything:
        needs = []
        if kind == "F" and stage > 0:
            crossing = (stage, "RECV_F", m) in everything
            needs = [(stage, "RECV_F", m)] if crossing else [(stage - 1, "F", m)]
        if kind in "BI":
            crossing = (stage, "RECV_B", m) in everything
            needs = [(stage, "F", m)]
            needs += [(stage, "RECV_B", m)] if crossing else []
            needs += [(stage + 1, k, m) for k in "BI"] if not crossing else []
        if kind == "W":
            needs = [(stage, "I", m)]
        if kind == "SEND_F":
            needs = [(stage, "F", m)]
        if kind == "SEND_B":
            needs = [(stage, "B", m), (stage, "I", m)]
        if kind.startswith("RECV") and buffered:
            needs = [send_of[stage, kind, m]]
        for needed in needs:
            if needed in everything:
                graph.add(node((stage, kind, m)), node(needed))
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False

    def between(source, target, actions, home):
        mine = [a for a in map(tuple, schedule.actions[actions]) if a in home]
        rank_of = schedule.placement
        return [a for a in mine if (rank_of[a[0]], rank_of[home[a][0]]) == (source, target)]

    for source in range(schedule.ranks):
        for target in range(schedule.ranks):
            sent = between(source, target, source, receive_of)
            received = between(target, source, target, send_of)
            if [receive_of[a] for a in sent] != received:
                return False
    return True


def refusal(schedule, buffered):
    try:
        check_schedule(schedule, buffered=buffered)
    except ScheduleError as error:
        return error
    return None


def with_rows(schedule, rows):
    return replace(schedule, actions=tuple(map(tuple, rows)))


@thorough
@given(schedule=schedules, data=st.data(), buffered=st.booleans())
def test_reordered_lists_are_judged_as_an_independent_checker_judges_them(schedule, data, buffered):
    rows = [list(row) for row in schedule.actions]
    for _ in range(data.draw(st.integers(0, 3))):
        row = data.draw(st.sampled_from(rows))
        take = data.draw(st.integers(0, len(row) - 1))
        put = data.draw(st.integers(max(0, take - 4), min(len(row) - 1, take + 4)))
        row.insert(put, row.pop(take))
    changed = with_rows(schedule, rows)
    error = refusal(changed, buffered)
    assert (error is None) == can_run(changed, buffered)
    if error is not None:
        assert error.action in schedule.present
        assert f"{error.action}, action" in str(error)


def test_the_independent_checker_can_say_no():
    assert can_run(parse_schedule("0F0,0B0\n1F0,1B0"), buffered=False)
    assert not can_run(parse_schedule("0B0,0F0\n1F0,1B0"), buffered=False)


def pick(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.actions[rank]) - 1))


@thorough
@given(schedule=schedules, data=st.data(), buffered=st.booleans())
def test_a_dropped_action_is_refused(schedule, data, buffered):
    rank, index = pick(schedule, data)
    rows = [list(row) for row in schedule.actions]
    dropped = rows[rank].pop(index)
    with pytest.raises(ScheduleError) as error:
        check_schedule(with_rows(schedule, rows), buffered=buffered)
    # what is left out is named
    assert str(dropped) in str(error.value)


@thorough
@given(schedule=schedules, data=st.data(), buffered=st.booleans())
def test_a_repeated_action_is_refused(schedule, data, buffered):
    rank, index = pick(schedule, data)
    rows = [list(row) for row in schedule.actions]
    repeated = rows[rank][index]
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), repeated)
    with pytest.raises(ScheduleError):
        check_schedule(with_rows(schedule, rows), buffered=buffered)


def waits_directly(kind, other):
    return (kind, other) in {
        ("B", "F"), ("I", "F"), ("W", "I"), ("SEND_F", "F"), ("SEND_B", "B"), ("SEND_B", "I"),
        ("F", "RECV_F"), ("B", "RECV_B"), ("I", "RECV_B"),
    }  # fmt: skip


@thorough
@given(schedule=schedules, data=st.data(), buffered=st.booleans())
def test_an_action_swapped_with_what_it_waits_for_is_refused(schedule, data, buffered):
    rank, index = pick(schedule, data)
    rows = [list(row) for row in schedule.actions]
    late = rows[rank][index]
    earlier = [
        i
        for i, other in enumerate(rows[rank][:index])
        if (other.stage, other.microbatch) == (late.stage, late.microbatch)
        and waits_directly(late.kind, other.kind)
    ]
    assume(earlier)
    rows[rank][earlier[0]], rows[rank][index] = late, rows[rank][earlier[0]]
    with pytest.raises(ScheduleError, match="can never run"):
        check_schedule(with_rows(schedule, rows), buffered=buffered)


@thorough
@given(schedule=schedules, data=st.data())
def test_an_action_on_another_rank_is_refused(schedule, data):
    assume(schedule.ranks > 1)
    rank, index = pick(schedule, data)
    rows = [list(row) for row in schedule.actions]
    moved = rows[rank].pop(index)
    rows[(rank + 1) % schedule.ranks].append(moved)
    with pytest.raises(ScheduleError, match=f"{moved}, action .* is on the wrong rank") as error:
        check_schedule(with_rows(schedule, rows))
    assert error.value.action == moved


@pytest.mark.parametrize(
    ("text", "first", "message"),
    [
        ("0F0,0B0\n1B0,1F0", "1B0", "waits for 1F0, which comes after it, as action 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", "1B1", "waits for 1F1, which is in no rank's list"),
        ("0F0,0B0,0F0\n1F0,1B0", "0F0", "action 2 of rank 0, can never run: its work is done"),
        ("0F0,0I0,0B0,0W0", "0B0", "its work is done already"),
        ("0F0,0B0,0I0", "0I0", "its work is done already"),
        ("0F0,0W0,0I0", "0W0", "waits for 0I0, which comes after it"),
        ("0F0,0I0", "0W0", "leaves out 0W0: add it to rank 0's list"),
        ("0F0,0F1,0B1", "0B0", r"leaves out 0B0 \(or 0I0 and 0W0\)"),
        ("0F1,0B1", "0F0", "leaves out 0F0"),
        # each rank waits for the other: rank 0 for a gradient, rank 1 for an activation
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "0B0",
            "a deadlock: rank 0 is at 0B0, which waits for 1B0; rank 1 is at 1F1, which waits for "
            "0F1$",
        ),
    ],
)
def test_the_first_action_that_can_never_run_is_named(text, first, message):
    with pytest.raises(ScheduleError, match=message) as error:
        check_schedule(parse_schedule(text))
    assert error.value.action == parse_action(first)


def test_the_blame_is_followed_through_the_ranks():
    # ranks 0 to 2 all stand still, because of the last one's missing forward
    with pytest.raises(ScheduleError, match="waits for 3F0, which is in no rank's list") as error:
        check_schedule(parse_schedule("0F0,0B0\n1F0,1B0\n2F0,2B0\n3B0"))
    assert error.value.action == Action(3, "B", 0)


@pytest.mark.parametrize(
    ("text", "first", "message"),
    [
        ("0F0,0B0\n1RECV_F0,1F0,1B0", "1RECV_F0", "waits for 0SEND_F0, which is in no rank's"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "1F0", "waits for 1RECV_F0, which is in no rank's"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "0SEND_F0", "waits for 0F0, which comes after it"),
        ("0F0,0SEND_F0\n1F0,1RECV_F0", "1F0", "waits for 1RECV_F0, which comes after it"),
        ("0F0,0SEND_B0\n1F0", "0SEND_B0", "has no other rank to speak to"),
        ("0F0,1RECV_F0,1F0", "1RECV_F0", "has no other rank to speak to"),
    ],
)
def test_sends_and_receives_that_do_not_match_are_refused(text, first, message):
    with pytest.raises(ScheduleError, match=message) as error:
        check_schedule(parse_schedule(text))
    assert error.value.action == parse_action(first)


def test_two_ranks_that_send_at_once_need_sends_that_return():
    # rank 0 sends micro-batch 1 forward while rank 1 sends micro-batch 0 back
    schedule = parse_schedule(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    check_schedule(schedule, buffered=True)
    with pytest.raises(ScheduleError, match=r"deadlock.*check with buffered=True") as error:
        check_schedule(schedule)
    assert error.value.action in {Action(0, "SEND_F", 1), Action(1, "SEND_B", 0)}


def test_messages_between_two_ranks_are_received_in_the_order_sent():
    schedule = parse_schedule(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    )
    with pytest.raises(ScheduleError, match="waits for 1RECV_F0, which comes after") as error:
        check_schedule(schedule, buffered=True)
    assert error.value.action == Action(1, "RECV_F", 1)


def test_a_send_that_nobody_receives_is_refused_where_sends_return():
    schedule = parse_schedule("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", placement=(0, 1))
    with pytest.raises(ScheduleError, match=r"1F0.* waits for 1RECV_F0"):
        check_schedule(schedule, buffered=True)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule("x", (), (), 1), "0 ranks, 0 stages and 1 micro-batches"),
        (Schedule("x", ((),), (), 1), "1 ranks, 0 stages"),
        (Schedule("x", ((),), (0,), 0), "0 micro-batches"),
        (Schedule("x", ((),), (1,), 1), "places stage 0 on rank 1, but its ranks are 0 to 0"),
        (Schedule("x", ((),), (-1,), 1), "places stage 0 on rank -1"),
        (Schedule("x", ((),), (0,), 1), "leaves out 0F0"),
        (Schedule("x", ((Action(1, "F", 0),),), (0,), 1), "is of stage 1, but the stages are 0"),
        (Schedule("x", ((Action(-1, "F", 0),),), (0,), 1), "is of stage -1"),
        (Schedule("x", ((Action(0, "Q", 0),),), (0,), 1), "is of kind 'Q'; kinds are F, B"),
        (parse_schedule("0F0,0B0,0F1,0B1", microbatches=1), "0F1, .* is of micro-batch 1, but"),
        (parse_schedule("0F0,0B0", microbatches=2), "leaves out 0F1"),
    ],
)
def test_schedules_that_are_none_are_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule)
