"""Plans of large set-ups from small ones: what is affine, and what must not be taken for it."""

import dataclasses
import functools

import pytest

from zero_fn.accounting import Collective, Moment
from zero_fn.costs import search as searching
from zero_fn.costs.extrapolation import NotAffine, Span, extrapolated
from zero_fn.costs.search import search
from zero_fn.costs.setups import Setup, _over
from zero_fn.hardware import hardware
from zero_fn.models import gpt
from zero_fn.planning import Plan
from zero_fn.program import Peak

CORNERS = [(2, 3), (3, 3), (2, 4), (3, 4)]
SPANS = [Span(2, 3, 40), Span(3, 4, 100)]


def plan_of(turns: dict[str, int]) -> Plan:
    """A plan with memory alone."""
    moments = {
        (name, "line", "high"): Moment(name, size, {"activations": size})
        for name, size in turns.items()
    }
    name, size = max(turns.items(), key=lambda entry: entry[1])
    peak = Peak(size, {"activations": size}, 0, name, "line")
    return Plan("made", {}, {}, peak, {}, 0, (), 0, None, None, turns=moments)


def steady(blocks: int, parts: int) -> int:
    return 1000 + 50 * blocks + 20 * parts + 7 * blocks * parts


def test_a_turn_that_moved_at_one_corner_does_not_count() -> None:
    traced: list[tuple[int, int]] = []

    @functools.cache
    def trace(blocks: int, parts: int) -> Plan:
        traced.append((blocks, parts))
        # 2 % off at one corner: 600 times as far away 27000 more than the truth
        moved = steady(blocks, parts) - 100 - 23 * ((blocks, parts) == (2, 3))
        return plan_of({"mm": steady(blocks, parts), "gather": moved})

    found = extrapolated(trace, SPANS)
    assert found.peak.bytes == steady(40, 100)
    assert found.peak.operation == "mm"
    assert list(found.turns) == [("mm", "line", "high")]
    assert sorted(traced) == sorted([*CORNERS, (4, 5)])


def test_parts_of_a_peak_that_corners_name_differently_are_the_fifth_traces() -> None:
    def trace(blocks: int, parts: int) -> Plan:
        size = steady(blocks, parts)
        found = plan_of({"mm": size})
        # two turns as high: one of the corners has the other's parts
        held = {"gradients": size} if (blocks, parts) == (3, 3) else {"activations": size}
        turns = {turn: moment._replace(parts=held) for turn, moment in found.turns.items()}
        return dataclasses.replace(found, turns=turns)

    found = extrapolated(trace, SPANS)
    assert found.peak.bytes == steady(40, 100)
    assert found.peak.parts == {"activations": steady(40, 100)}
    assert found.most["gradients"] == 0


def test_a_peak_that_is_not_affine_is_an_error() -> None:
    def trace(blocks: int, parts: int) -> Plan:
        return plan_of({"mm": steady(blocks, parts) + blocks**3 * parts, "add": 10})

    with pytest.raises(NotAffine, match=r"made: the memory at mm, .* whole=True"):
        extrapolated(trace, SPANS)


def test_what_is_near_is_traced_itself() -> None:
    def trace(blocks: int, parts: int) -> Plan:
        return plan_of({"mm": blocks**3 * parts})

    assert extrapolated(trace, [Span(2, 3, 4), Span(3, 4, 5)]).peak.bytes == 4**3 * 5
    assert extrapolated(trace, [Span(2, 3, 2), Span(3, 4, 4)]).peak.bytes == 2**3 * 4


def test_a_search_names_set_ups_that_small_traces_do_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan_setup(setup: searching.Setup, device: object) -> Plan:
        raise NotAffine("no")

    monkeypatch.setattr(searching, "plan_setup", plan_setup)
    config = gpt.Config(5000, 64, layers=2, heads=2, width=256)
    found = search(config, dataclasses.replace(hardware("a100-80gb"), node=2), 2, 4, wanted=1)
    assert not found.ranking
    assert {reason for _, reason in found.by_trace} == {"only a whole trace could tell"}
    # of equally fast ones, which those without a pipeline are, the fewest micro-batches come first
    kinds: dict[Setup, list[int]] = {}
    for setup, _ in found.by_trace:
        if setup.pp == 1:
            kind = dataclasses.replace(setup, batch=1, microbatches=1)
            kinds.setdefault(kind, []).append(setup.microbatches)
    assert all(parts == sorted(parts) for parts in kinds.values())
    assert max(len(parts) for parts in kinds.values()) > 1


def test_what_is_summed_over_a_pipeline_counts_all_its_stages() -> None:
    setup = Setup(gpt.Config(50, 8, layers=4, heads=2, width=8), pp=4, dp=2)
    traced = Collective("all_reduce", "pp", 2, 600, 600)  # over 2 stages
    assert _over(traced, setup) == traced._replace(bytes_sent=2 * 600 * 3 // 4)
    assert _over(traced._replace(axis="dp"), setup).bytes_sent == 600
