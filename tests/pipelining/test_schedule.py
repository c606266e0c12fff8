"""Actions and schedules as values and as text, and what torch's own lists look like in them."""

import csv
import doctest
import importlib
import io
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from zero_fn.pipelining.builders import SCHEDULES, pipeline_schedule
from zero_fn.pipelining.checking import ScheduleError, check_schedule
from zero_fn.pipelining.schedule import Action, Schedule, parse_action, parse_schedule, peer
from zero_fn.pipelining.timeline import timeline, with_communication

ROOMS = ["schedule", "checking", "builders", "timeline", "drawing", "partition"]


@pytest.mark.parametrize("room", ROOMS)
def test_the_examples_in_the_docstrings_run(room):
    result = doctest.testmod(importlib.import_module(f"zero_fn.pipelining.{room}"))
    assert result.failed == 0


def test_importing_the_rooms_loads_neither_torch_nor_anything_that_draws():
    # torch comes with zero_fn itself one day, so only what these rooms load themselves counts
    code = (
        "import sys, importlib, zero_fn; before = set(sys.modules)\n"
        f"for room in {ROOMS}: importlib.import_module('zero_fn.pipelining.' + room)\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new & {'torch', 'matplotlib', 'rich', 'optree', 'numpy'}))\n"
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('zero_fn.')"
        " and not m.startswith('zero_fn.pipelining')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, "F", 0)),
        ("0B13", Action(0, "B", 13)),
        ("10I1", Action(10, "I", 1)),
        (" 3W2 ", Action(3, "W", 2)),
        ("1SEND_F4", Action(1, "SEND_F", 4)),
        ("1RECV_F4", Action(1, "RECV_F", 4)),
        ("1SEND_B4", Action(1, "SEND_B", 4)),
        ("1RECV_B4", Action(1, "RECV_B", 4)),
    ],
)
def test_an_action_reads_and_prints_as_torch_does_it(text, action):
    assert parse_action(text) == action
    assert str(action) == text.strip()
    assert repr(torch_schedules._Action.from_str(text)) == str(action)


@pytest.mark.parametrize("text", ["", "F", "F0", "2F", "2X0", "-1F0", "2f0", "2F0,", "2F0 1F0"])
def test_what_is_not_an_action_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not an action") as error:
        parse_action(text)
    assert repr(text) in str(error.value)


def test_a_send_and_its_receive_are_each_other_s_peer():
    for send, receive in [("1SEND_F3", "2RECV_F3"), ("2SEND_B3", "1RECV_B3")]:
        assert peer(parse_action(send)) == parse_action(receive)
        assert peer(parse_action(receive)) == parse_action(send)
    with pytest.raises(ValueError, match="2F0 is neither"):
        peer(parse_action("2F0"))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("spelt_out", [False, True])
def test_a_schedule_reads_back_from_its_text(name, spelt_out):
    schedule = pipeline_schedule(name, 3, 4)
    if spelt_out:
        schedule = with_communication(schedule)
    assert parse_schedule(str(schedule), name=name) == schedule
    assert parse_schedule(schedule.actions, name=name) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(parse_schedule(str(schedule), name=name))


def test_rows_may_mix_text_actions_and_waits():
    schedule = parse_schedule([["0F0", None, "", Action(0, "B", 0)], [None, "1F0", "1B0"]])
    assert schedule == Schedule("custom", schedule.actions, (0, 1), 1)
    assert str(schedule) == "0F0,0B0\n1F0,1B0"


def test_a_rank_without_stages_keeps_its_line():
    schedule = parse_schedule("0F0,0B0\n\n1F0,1B0")
    assert schedule.ranks == 3
    assert schedule.placement == (0, 2)
    assert parse_schedule(str(schedule)) == schedule
    assert timeline(check_schedule(schedule)).peak_activations == (1, 0, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "has no actions"),
        ([], "has no actions"),
        ([[], [None]], "has no actions"),
        ("0F0,0B0\n2F0,2B0", "none of stage 1"),
        ("0F0,0Q0", "'0Q0' is not an action"),
        ([[("0", "F")]], "is not an action"),
    ],
)
def test_rows_that_are_no_schedule_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(rows)


def torch_rows(schedule_class, ranks, microbatches):
    """The lists that torch makes, without process groups: its methods read these attributes."""
    settings = SimpleNamespace(
        _num_stages=ranks,
        num_stages=2 * ranks,
        _n_microbatches=microbatches,
        pp_group_size=ranks,
        n_local_stages=2,
        number_of_rounds=max(1, microbatches // ranks),
        microbatches_per_round=microbatches // max(1, microbatches // ranks),
    )
    if hasattr(schedule_class, "_get_pipeline_order"):
        return list(schedule_class._get_pipeline_order(settings).values())
    make = schedule_class._calculate_single_rank_operations
    return [make(settings, rank) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 2), (4, 8), (4, 2)])
def test_torch_s_list_of_1f1b_is_refused(ranks, microbatches):
    # In torch 2.13, `Schedule1F1B._get_pipeline_order` counts the last rank's forwards from 1 and
    # not from 0, as no warm-up came before them. So the last stage never runs its F0, its B0 waits
    # for ever, and it asks for a forward of micro-batch M, which no batch has. (With fewer
    # micro-batches than ranks the warm-up has too many forwards besides.) `Schedule1F1B` itself
    # runs by a loop of its own, and not by this list.
    schedule = parse_schedule(
        torch_rows(torch_schedules.Schedule1F1B, ranks, microbatches), microbatches=microbatches
    )
    last = ranks - 1
    first_forward = next(action for action in schedule.actions[last] if action.kind == "F")
    assert first_forward == Action(last, "F", 1), "torch has mended its list: rewrite this test"
    assert Action(last, "F", microbatches) in schedule.present
    with pytest.raises(ScheduleError, match="can never run") as error:
        check_schedule(schedule)
    assert error.value.action == Action(last, "B", 0)
    assert f"{last}B0, action 1 of rank {last}" in str(error.value)
    assert f"waits for {last}F0, which is in no rank's list" in str(error.value)


@pytest.mark.parametrize(
    ("schedule_class", "name"),
    [
        (torch_schedules.ScheduleGPipe, "gpipe"),
        (torch_schedules.ScheduleInterleaved1F1B, "interleaved"),
        (torch_schedules.ScheduleZBVZeroBubble, "zbv"),
        (torch_schedules.ScheduleDualPipeV, "dualpipev"),
    ],
)
def test_torch_s_other_lists_read_and_run_no_faster_than_ours(schedule_class, name):
    theirs = parse_schedule(torch_rows(schedule_class, 4, 8), microbatches=8)
    ours = pipeline_schedule(name, 4, 8)
    assert theirs.placement == ours.placement
    assert timeline(ours).makespan <= timeline(theirs).makespan
    assert max(timeline(ours).peak_activations) <= max(timeline(theirs).peak_activations)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_our_text_and_its_sends_pass_our_check(name):
    schedule = pipeline_schedule(name, 3, 5)
    rows = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(str(schedule))))
    }
    spelt_out = torch_schedules._add_send_recv(
        rows, lambda stage: schedule.placement[stage], schedule.stages
    )
    theirs = parse_schedule(spelt_out.values(), placement=schedule.placement)
    check_schedule(theirs)
    assert theirs.present == with_communication(schedule).present
