"""Partitions against every possible one, and against the figures DeepSpeed's own give."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_fn.pipelining.partition import partition

FIGURES = json.loads((Path(__file__).parents[1] / "data/deepspeed_figures.json").read_text())


def sizes(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


@pytest.mark.parametrize("case", FIGURES["partition_balanced"], ids=lambda c: f"{c['parts']}parts")
def test_the_largest_part_is_never_larger_than_deepspeed_s(case):
    parts = partition(case["weights"], case["parts"])
    assert len(parts) == case["parts"]
    assert max(sizes(case["weights"], parts)) <= case["largest"]


# no deadline: the machine that runs the tests may be busy with other things
@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 5, 30, 0.1, 0.3, 1e-9, 1e9]), max_size=8),
    st.integers(1, 5),
)
def test_no_partition_at_all_is_better(costs, ranks):
    parts = partition(costs, ranks)
    assert len(parts) == ranks
    assert list(itertools.chain(*parts)) == list(range(len(costs)))
    exact = [Fraction(cost) for cost in costs]

    def badness(bounds):
        of = [sum(exact[i:j]) for i, j in itertools.pairwise(bounds)]
        return max(of), sum(size * size for size in of)

    found = badness([0, *(part.stop for part in parts)])
    inner = range(len(costs) + 1)
    every = itertools.combinations_with_replacement(inner, ranks - 1)
    largest = min(badness([0, *cuts, len(costs)])[0] for cuts in every)
    assert found[0] == largest
    if len(costs) < ranks:
        assert [len(part) for part in parts] == [1] * len(costs) + [0] * (ranks - len(costs))
        return
    assert all(parts), "no rank without a layer where there are enough"
    filled = itertools.combinations(range(1, len(costs)), ranks - 1)
    assert found == min(badness([0, *cuts, len(costs)]) for cuts in filled)


def test_one_layer_and_none():
    assert partition([], 2) == (range(0), range(0))
    assert partition([3], 1) == (range(1),)
    assert partition([3], 3) == (range(1), range(1, 1), range(1, 1))
    assert partition([0, 0, 0], 3) == (range(1), range(1, 2), range(2, 3))


@pytest.mark.parametrize(
    ("costs", "largest"), [([2, 8, 6, 3], 9), ([3, 9, 6, 5], 11), ([0, 1, 9, 6, 3], 9)]
)
def test_the_largest_part_comes_before_evenness(costs, largest):
    # [2], [8], [6, 3] has the larger sum of squares than [2, 8], [6], [3], but none of 10
    assert max(sizes(costs, partition(costs, 3))) == largest


def test_the_parts_below_the_largest_are_even_too():
    # any cut of the ones has the largest part 9
    assert sizes([9] + [1] * 6, partition([9] + [1] * 6, 3)) == [9, 3, 3]


def test_a_trillion_parameters_stay_exact():
    costs = [10**12 + 1, 10**12, 10**12, 10**12]
    assert sizes(costs, partition(costs, 2)) == [2 * 10**12 + 1, 2 * 10**12]


@pytest.mark.parametrize(
    ("layers", "ranks", "lengths"),
    [(10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (128, 1, [128])],
)
def test_uniform_counts_layers(layers, ranks, lengths):
    parts = partition([object()] * layers, ranks, by="uniform")
    assert [len(part) for part in parts] == lengths


@dataclasses.dataclass
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    eps: float = 1e-5


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_parameters_are_counted_in_any_nesting():
    ten = torch.zeros(2, 5)
    layers = [
        ten,
        {"a": ten[:1], "b": [torch.zeros(()), None, torch.zeros(4)]},
        Pair(torch.zeros(5), (torch.zeros(0), torch.zeros(5))),
        Layer(torch.zeros(7), torch.zeros(3)),
        torch.nn.Linear(4, 2),
        torch.nn.functional.gelu,
        {},
        torch.zeros(1, 10),
    ]
    parts = partition(layers, 6, by="parameters")
    counts = [10, 10, 10, 10, 10, 0, 0, 10]
    assert parts == partition(counts, 6)
    assert sizes(counts, parts) == [10] * 6


def embed_tokens(): ...


def block(width): ...


def test_a_pattern_counts_the_layers_it_matches():
    layers = [embed_tokens, *(functools.partial(block, width) for width in range(4)), "norm"]
    parts = partition(layers, 2, by=re.compile("block"))
    names = ["embed", "block", "block", "block", "block", "norm"]
    assert parts == partition(names, 2, by=re.compile("^block$"))
    for part in parts:
        assert sum(1 <= i <= 4 for i in part) == 2
    modules = [torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1), torch.nn.ReLU()]
    first, second = partition(modules, 2, by=re.compile("Linear"))
    assert 0 in first
    assert 2 in second


def test_a_function_says_what_a_layer_costs():
    seconds = {"embed": 0.5, "block": 2.0, "head": 1.5}
    assert partition(["embed", "block", "head"], 2, by=seconds.get) == (range(2), range(2, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1], 0), ValueError, "ranks is 0"),
        (([1], 1.0), TypeError, r"ranks .* not 1\.0"),
        (([1], True), TypeError, "ranks .* not True"),
        (([1, -2], 1), ValueError, "layer 1 costs -2"),
        (([math.nan], 1), ValueError, "layer 0 costs nan"),
        (([math.inf], 1), ValueError, "layer 0 costs inf"),
        ((["block"], 1), TypeError, "layer 0 is a str, not a number.*by='parameters'"),
        (([1], 1, "parameter"), ValueError, "'parameter'; did you mean 'parameters'"),
        (([1], 1, "xyzzy"), ValueError, "'xyzzy'; there are 'cost', 'uniform'"),
        (([1], 1, 3), ValueError, "by is 3"),
        (([object()], 1, "parameters"), TypeError, "parameters of a object: give by="),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        partition(*arguments)
