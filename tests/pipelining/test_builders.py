"""Every builder over ranks and micro-batches, and the figures its paper gives for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_fn.pipelining.builders import SCHEDULES, pipeline_schedule
from zero_fn.pipelining.checking import ScheduleError, check_schedule
from zero_fn.pipelining.timeline import timeline, with_communication

# no deadline: the machine that runs the tests may be busy with other things
thorough = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize("name", SCHEDULES)
@thorough
@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 30))
def test_every_builder_serves_any_ranks_and_microbatches(name, ranks, microbatches):
    schedule = pipeline_schedule(name, ranks, microbatches)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
    per_rank = 1 if name in ("gpipe", "1f1b", "zero_bubble") else 2
    assert [len(schedule.stages_of(rank)) for rank in range(ranks)] == [per_rank] * ranks
    spelt_out = with_communication(schedule)
    check_schedule(spelt_out)
    assert timeline(spelt_out).events == timeline(schedule).events


@thorough
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 20), chunks=st.integers(1, 4))
def test_interleaved_serves_any_number_of_chunks(ranks, microbatches, chunks):
    schedule = pipeline_schedule("interleaved", ranks, microbatches, chunks=chunks)
    assert schedule.placement == tuple(stage % ranks for stage in range(ranks * chunks))
    check_schedule(with_communication(schedule))
    if chunks == 1:
        assert schedule.actions == pipeline_schedule("1f1b", ranks, microbatches).actions


# The figures for P = 8, M = 32, F = I = W. Those of ZB-H1 (7/103) and ZB-V (7/199) are
# rounded to one place there, as is each of these.
@pytest.mark.parametrize(
    ("name", "options", "percent"),
    [
        ("gpipe", {}, 17.9),
        ("1f1b", {}, 17.9),
        ("interleaved", {"chunks": 2}, 9.9),
        ("interleaved", {"chunks": 4}, 5.2),
        ("zero_bubble", {}, 6.8),
        ("zbv", {}, 3.5),
        ("dualpipev", {}, 3.5),
    ],
)
def test_bubbles_of_eight_ranks_and_thirty_two_microbatches(name, options, percent):
    bubble = timeline(pipeline_schedule(name, 8, 32, **options)).bubble
    assert round(100 * bubble, 1) == percent


def idle(name, ranks, microbatches, cost=1, **options):
    """Makespan less the work of a rank, in forwards of a stage; whole, so compared exactly."""
    schedule = pipeline_schedule(name, ranks, microbatches, **options)
    per_rank = schedule.stages // ranks
    line = timeline(schedule, forward=cost, input_grad=cost, weight_grad=cost)
    assert set(line.busy) == {3 * cost * per_rank * microbatches}
    return line.makespan - 3 * cost * per_rank * microbatches


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16, 17])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_p_minus_1_microbatches(name, ranks, microbatches):
    # each of the P-1 waits is an F and a B, three units, whatever M is
    assert idle(name, ranks, microbatches) == 3 * (ranks - 1)
    line = timeline(pipeline_schedule(name, ranks, microbatches))
    assert line.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
    expected = [min(microbatches, ranks - r if name == "1f1b" else 10**9) for r in range(ranks)]
    assert list(line.peak_activations) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_divides_the_bubble_by_its_chunks(ranks, rounds, chunks):
    microbatches = rounds * ranks
    assert idle("interleaved", ranks, microbatches, chunks=chunks) == 3 * (ranks - 1)
    line = timeline(pipeline_schedule("interleaved", ranks, microbatches, chunks=chunks))
    expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
    assert line.bubble == pytest.approx(expected, abs=1e-12)
    for rank, peak in enumerate(line.peak_activations):
        assert peak <= 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 9])
def test_zero_bubble_idles_a_third_of_1f1b_and_holds_no_more(ranks, more):
    assert idle("zero_bubble", ranks, ranks + more) == ranks - 1
    line = timeline(pipeline_schedule("zero_bubble", ranks, ranks + more))
    assert max(line.peak_activations) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 9])
@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_shaped_schedules_idle_only_until_their_first_input(name, ranks, more):
    # the last rank's first input comes after P-1 forwards, so that no schedule does better
    assert idle(name, ranks, 2 * ranks + more) == ranks - 1
    line = timeline(pipeline_schedule(name, ranks, 2 * ranks + more))
    assert max(line.peak_activations) <= 2 * ranks + (name == "dualpipev")


@pytest.mark.parametrize(
    ("ranks", "microbatches", "makespan"), [(2, 2, 13), (4, 4, 30), (8, 8, 63), (8, 15, 97)]
)
def test_dualpipev_does_not_wait_for_microbatches_that_do_not_exist(ranks, microbatches, makespan):
    # 2P micro-batches with those beyond M left out would end at 15, 33, 69 and 99
    assert timeline(pipeline_schedule("dualpipev", ranks, microbatches)).makespan == makespan


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 1), (4, 3), (4, 6), (8, 5), (8, 12)])
def test_few_microbatches_hold_no_more_than_they_are(name, ranks, microbatches):
    line = timeline(pipeline_schedule(name, ranks, microbatches))
    per_rank = line.schedule.stages // ranks
    assert max(line.peak_activations) <= microbatches * per_rank
    # a pipeline is never slower than one micro-batch after the other
    assert line.makespan <= 3 * line.schedule.stages * microbatches


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="'zvb'; did you mean 'zbv'"):
        pipeline_schedule("zvb", 2, 2)
    with pytest.raises(ValueError, match="'nothing like it'; there are 'gpipe', '1f1b'"):
        pipeline_schedule("nothing like it", 2, 2)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="'interleaved' has no option 'chunk'; it has chunks"):
        pipeline_schedule("interleaved", 2, 2, chunk=2)
    with pytest.raises(TypeError, match="'1f1b' has no option 'chunks'; it has none"):
        pipeline_schedule("1f1b", 2, 2, chunks=2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 2), {}, ValueError, "ranks is 0"),
        ((2, 0), {}, ValueError, "microbatches is 0"),
        ((-1, 2), {}, ValueError, "ranks is -1"),
        ((2, 2.0), {}, TypeError, r"microbatches .* not 2\.0"),
        ((True, 2), {}, TypeError, "ranks .* not True"),
        ((2, 2), {"chunks": 0}, ValueError, "chunks is 0"),
        ((2, 2), {"chunks": "2"}, TypeError, "chunks .* not '2'"),
    ],
)
def test_numbers_that_make_no_pipeline_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        pipeline_schedule("interleaved", *arguments, **options)


def one_after_the_other(ranks, microbatches, backward="B"):
    return [
        [f"{rank}{kind}{m}" for m in range(microbatches) for kind in ("F", backward)]
        for rank in range(ranks)
    ]


def test_a_function_s_lists_take_a_name_s_place():
    schedule = pipeline_schedule(one_after_the_other, 3, 2)
    assert schedule.name == "one_after_the_other"
    assert timeline(schedule).makespan == 2 * 3 * 3
    assert timeline(schedule).peak_activations == (1, 1, 1)


def test_a_function_s_lists_are_checked():
    with pytest.raises(ScheduleError, match="'one_after_the_other' leaves out 0W0"):
        pipeline_schedule(one_after_the_other, 1, 2, backward="I")
