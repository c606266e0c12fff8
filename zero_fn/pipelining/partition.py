"""Layers cut into contiguous parts, one a stage, with the largest part as small as can be.

The smallest possible largest part comes first. Among the cuts that reach it, the one with the
least sum of squared parts is taken, so that the parts below the largest are even too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from ..naming import suggestion

By = str | re.Pattern[str] | Callable[[Any], float]


def partition(layers: Sequence[Any], ranks: int, by: By = "cost") -> tuple[range, ...]:
    """Cut layers into `ranks` contiguous parts, optimally balanced.

    Args:
        layers: The layers in order, or their costs.
        ranks: The number of parts.
        by: What a layer costs.
            `"cost"`: the layer is its cost, a number of at least 0, such as measured seconds.
            `"uniform"`: every layer costs the same.
            `"parameters"`: the number of values in its tensors: the layer is a tensor, a module,
            or any nesting of dicts, lists, tuples and dataclasses of them.
            A compiled pattern (`re.compile("block")`): 1 for each layer whose name has a match
            and 0 for the others; a layer's name is itself if it is a string, a function's name,
            or the name of its class.
            A function: what it returns for the layer.

    Returns:
        For each part the indices of its layers, so that `[layers[i] for i in part]` are they. No
        part is empty unless there are fewer layers than parts; then the last ones are.

    Raises:
        ValueError: There is no part to fill, a cost is negative or not finite, or `by` is unknown.
        TypeError: A layer has no such cost, or `ranks` is not an int.

    >>> partition([5, 1, 1, 1, 4], 3)
    (range(0, 1), range(1, 4), range(4, 5))
    >>> [len(part) for part in partition(range(10), 4, by="uniform")]
    [3, 3, 2, 2]
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"ranks is a number of parts, an int; not {ranks!r}")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; there must be at least 1")
    measure = _measure(by)
    costs = [_exact(index, measure(layer)) for index, layer in enumerate(layers)]
    # over one denominator, sums are exact: the same layers weigh the same wherever a sum starts
    scale = math.lcm(*(cost.denominator for cost in costs))
    before = [0, *accumulate(int(cost * scale) for cost in costs)]
    count = len(costs)
    parts = min(ranks, count)
    bounds = _most_even(before, parts, _smallest_largest(before, parts)) if parts else [0]
    bounds += [count] * (ranks - parts)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def _smallest_largest(before: list[int], parts: int) -> int:
    """The least possible cost of the most expensive part.

    Best over one more part is the least over the last cut of max(best up to the cut, rest); the
    first grows with the cut and the second falls, so the least lies where they meet.
    """
    count = len(before) - 1
    best = list(before)
    for _ in range(parts - 1):
        following: list[int] = []
        cut = 0
        for stop in range(count + 1):
            # the meeting point only moves to the right as the end does
            while cut < stop and best[cut] < before[stop] - before[cut]:
                cut += 1
            candidates = [max(best[cut], before[stop] - before[cut])]
            if cut:
                candidates.append(max(best[cut - 1], before[stop] - before[cut - 1]))
            following.append(min(candidates))
        best = following
    return best[count]


def _most_even(before: list[int], parts: int, largest: int) -> list[int]:
    """The bounds of non-empty parts of at most `largest` with the least sum of squares.

    Splitting a part never makes the largest one larger, so non-empty parts always exist.
    """
    count = len(before) - 1
    # least[i]: the best sum for the layers from i on in the parts that remain
    least: list[int | None] = [None] * count + [0]
    cuts: list[list[int]] = []
    for remaining in range(1, parts + 1):
        following: list[int | None] = [None] * (count + 1)
        cut = [count] * (count + 1)
        for start in range(parts - remaining, count - remaining + 1):
            # among equals the larger part comes first, as when ten layers go to four ranks
            for stop in range(start + 1, count - remaining + 2):
                size = before[stop] - before[start]
                if size > largest:
                    break
                rest = least[stop]
                here = following[start]
                if rest is not None and (here is None or rest + size * size <= here):
                    following[start] = rest + size * size
                    cut[start] = stop
        cuts.append(cut)
        least = following
    bounds = [0]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return bounds


def _measure(by: By) -> Callable[[Any], float]:
    named: dict[str, Callable[[Any], float]] = {
        "cost": lambda layer: layer,
        "uniform": lambda layer: 1,
        "parameters": _parameters,
    }
    if isinstance(by, re.Pattern):
        return lambda layer: int(by.search(_name(layer)) is not None)
    if callable(by):
        return by
    if by in named:
        return named[by]
    raise ValueError(
        f"by is {by!r}; {suggestion(by, named)}; or give a compiled pattern such as "
        "re.compile('block'), or a function from a layer to its cost"
    )


def _exact(index: int, cost: Any) -> Fraction:
    try:
        finite = math.isfinite(cost)
    except TypeError:
        raise TypeError(
            f"layer {index} is a {type(cost).__name__}, not a number: give costs, or say by what "
            f"a layer is measured, as in by='parameters'"
        ) from None
    if not finite or cost < 0:
        raise ValueError(f"layer {index} costs {cost!r}: a cost is finite and at least 0")
    return Fraction(cost)


def _parameters(layer: Any) -> int:
    """The values in a layer's tensors; what has none, such as a function or a setting, counts 0."""
    if hasattr(layer, "numel"):
        return int(layer.numel())
    if callable(getattr(layer, "parameters", None)):
        return sum(int(tensor.numel()) for tensor in layer.parameters())
    children: Iterable[Any]
    if isinstance(layer, Mapping):
        children = layer.values()
    elif isinstance(layer, list | tuple):
        children = layer
    elif dataclasses.is_dataclass(layer) and not isinstance(layer, type):
        children = (getattr(layer, field.name) for field in dataclasses.fields(layer))
    elif layer is None or callable(layer) or isinstance(layer, str | bytes | int | float):
        return 0
    else:
        raise TypeError(
            f"don't know how to count the parameters of a {type(layer).__name__}: give "
            f"by=a function from a layer to its number of parameters"
        )
    return sum(map(_parameters, children))


def _name(layer: Any) -> str:
    if isinstance(layer, str):
        return layer
    if isinstance(layer, functools.partial):
        return _name(layer.func)
    return str(getattr(layer, "__name__", type(layer).__name__))
