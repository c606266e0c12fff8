"""Times against a clock that ticks, costs of every form, and live activations by hand."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_fn.pipelining.builders import SCHEDULES, pipeline_schedule
from zero_fn.pipelining.checking import ScheduleError
from zero_fn.pipelining.schedule import parse_schedule
from zero_fn.pipelining.timeline import timeline, with_communication

# no deadline: the machine that runs the tests may be busy with other things
thorough = settings(deadline=None, max_examples=40)
whole = st.integers(1, 4)


def ticked(schedule, costs, comm):
    """When each action ends, by a clock that ticks and ranks that look whether they can go on."""
    ends, running = {}, [None] * schedule.ranks
    lists = [list(row) for row in schedule.actions]
    now = -1
    while any(lists):
        now += 1
        for rank, current in enumerate(running):
            if current is not None and ends[current] <= now:
                running[rank] = None
        for rank, actions in enumerate(lists):
            if running[rank] is not None or not actions:
                continue
            stage, kind, m = actions[0]
            needs = {
                "F": [[(stage - 1, "F", m)]] if stage else [],
                "W": [[(stage, "I", m)]],
            }.get(kind, [[(stage, "F", m)]])
            if kind in "BI" and stage + 1 < schedule.stages:
                needs = [*needs, [(stage + 1, "B", m), (stage + 1, "I", m)]]

            def arrived(other, rank=rank, now=now):
                late = comm if schedule.placement[other[0]] != rank else 0
                return other in ends and ends[other] + late <= now

            if all(any(arrived(other) for other in others) for others in needs):
                running[rank] = (stage, kind, m)
                ends[stage, kind, m] = now + costs[kind][stage]
                actions.pop(0)
    return ends


@thorough
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    comm=st.integers(0, 3),
    spelt_out=st.booleans(),
    data=st.data(),
)
def test_times_are_those_of_a_ticking_clock(name, ranks, microbatches, comm, spelt_out, data):
    schedule = pipeline_schedule(name, ranks, microbatches)
    per_stage = st.lists(whole, min_size=schedule.stages, max_size=schedule.stages)
    forward, input_grad, weight_grad = (data.draw(per_stage) for _ in range(3))
    costs = {"F": forward, "I": input_grad, "W": weight_grad}
    costs["B"] = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
    line = timeline(
        with_communication(schedule) if spelt_out else schedule,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        comm=comm,
    )
    ends = ticked(schedule, costs, comm)
    assert {tuple(e.action): e.end for row in line.events for e in row} == ends
    assert line.makespan == max(ends.values())
    for actions, events in zip(schedule.actions, line.events, strict=True):
        assert tuple(event.action for event in events) == actions
        assert all(e.end - e.start == costs[e.action.kind][e.action.stage] for e in events)
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))
    work = sum(costs[a.kind][a.stage] for row in schedule.actions for a in row)
    assert sum(line.busy) == work
    assert math.isclose(line.bubble, 1 - work / (ranks * line.makespan), abs_tol=1e-12)


def test_costs_are_numbers_sequences_or_functions_of_the_stage():
    schedule = pipeline_schedule("1f1b", 3, 4)
    numbers = timeline(schedule, forward=2, input_grad=3, weight_grad=0.5, activation=10)
    sequences = timeline(
        schedule,
        forward=[2, 2, 2],
        input_grad=(3, 3, 3),
        weight_grad=[0.5] * 3,
        activation=[10] * 3,
    )
    functions = timeline(
        schedule,
        forward=lambda stage: 2,
        input_grad=lambda stage: 3,
        weight_grad=lambda stage: 0.5,
        activation=lambda stage: 10,
    )
    assert numbers == sequences == functions
    # (M + P - 1) micro-batches of F + B = 5.5
    assert numbers.makespan == 6 * 5.5
    assert numbers.peak_activations == (30, 20, 10)


def test_whole_costs_give_whole_times():
    assert isinstance(timeline(pipeline_schedule("zbv", 2, 3)).makespan, int)


def test_a_slow_stage_sets_the_pace():
    line = timeline(pipeline_schedule("gpipe", 3, 10), forward=lambda stage: 5 if stage == 1 else 1)
    # its own ten forwards and ten backwards, and what comes before and after
    assert line.makespan >= 10 * 5 + 10 * 2
    assert line.busy == (30, 70, 30)


def test_communication_delays_only_what_crosses_ranks():
    one_way = timeline(pipeline_schedule("gpipe", 3, 1), comm=10)
    assert one_way.makespan == 3 * 3 + 4 * 10
    # the V's stages 1 and 2 lie on one rank, which does stage 2's W before stage 1's I
    assert timeline(pipeline_schedule("zbv", 2, 1), comm=10).makespan == 4 + 4 + 2 + 4 * 10
    assert timeline(pipeline_schedule("zbv", 1, 1), comm=10).makespan == 6


def test_a_late_send_is_late_where_it_is_awaited():
    early = parse_schedule(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    late = parse_schedule(str(early).replace("0SEND_F0,0F1,", "0F1,0SEND_F0,"))
    start = {line: timeline(line).events[1][0].start for line in (early, late)}
    assert (start[early], start[late]) == (1, 2)


def test_activations_are_held_until_the_weight_gradient():
    whole = parse_schedule("0F0,0F1,0B0,0F2,0B1,0B2")
    split = parse_schedule("0F0,0F1,0I0,0F2,0I1,0I2,0W0,0W1,0W2")
    assert timeline(whole).peak_activations == (2,)
    assert timeline(split).peak_activations == (3,)


def test_costs_of_zero_leave_no_bubble():
    line = timeline(pipeline_schedule("1f1b", 2, 2), forward=0, input_grad=0, weight_grad=0)
    assert (line.makespan, line.bubble, line.busy) == (0, 0, (0, 0))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, "forward is -1 for stage 0"),
        ({"input_grad": [1, math.nan]}, "input_grad is nan for stage 1"),
        ({"weight_grad": math.inf}, "weight_grad is inf"),
        ({"comm": -0.5}, r"comm is -0\.5"),
        ({"activation": lambda stage: stage - 1}, "activation is -1 for stage 0"),
        ({"forward": [1, 1, 1]}, "forward has 3 numbers, but there are 2 stages"),
    ],
)
def test_costs_that_are_none_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        timeline(pipeline_schedule("1f1b", 2, 2), **costs)


def test_a_schedule_that_cannot_run_has_no_times():
    with pytest.raises(ScheduleError, match="can never run"):
        timeline(parse_schedule("0B0,0F0"))


def test_sends_are_not_spelt_out_twice():
    spelt_out = with_communication(pipeline_schedule("1f1b", 2, 2))
    with pytest.raises(ValueError, match="has sends or receives already"):
        with_communication(spelt_out)


def test_a_send_stands_behind_what_it_sends():
    for name in SCHEDULES:
        schedule = pipeline_schedule(name, 3, 4)
        spelt_out = with_communication(schedule)
        for row in spelt_out.actions:
            for before, action in itertools.pairwise(row):
                if action.kind.startswith("SEND"):
                    made = {"SEND_F": "F", "SEND_B": "BI"}[action.kind]
                    # receives of the same moment may come between
                    if before.kind in "FBIW":
                        assert before.kind in made
                        assert before[0::2] == action[0::2]
        computes = [[a for a in row if a.kind in "FBIW"] for row in spelt_out.actions]
        assert tuple(map(tuple, computes)) == schedule.actions
