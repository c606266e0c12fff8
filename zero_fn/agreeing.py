"""Ranks compare what their programs will exchange, before they run them.

Ranks whose collectives differ wait for each other for ever. So a program that has collectives is
described line by line for each process group, the ranks of the group put that down in the store by
which they found each other, and the group's first rank compares. Programs may differ otherwise: in
what they compute, in batches of other lengths.
"""

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import accounting
from .mesh import meeting_place, ranks_of
from .naming import short_dtype
from .program import Program, line_of
from .tree import Tensor

MARGIN = 5.0  # seconds that the others wait longer than the first rank, which says who is missing
_counts: dict[tuple[int, ...], int] = {}  # comparisons so far, by the ranks that take part


class Comparison:
    """The comparisons of one function's programs; what was found alike is not compared again."""

    def __init__(self) -> None:
        self._alike: set[str] = set()

    def check(self, program: Program, name: str) -> None:
        """Compare a new program with those of the other ranks, if it has collectives of processes.

        Raises:
            RuntimeError: on every rank, for collectives that differ, with the first, and for ranks
                that have come to no such program within the mesh's timeout.
        """
        for group, lines in _described(program).items():
            ranks = ranks_of(group)
            if ranks is None:
                continue
            digest = hashlib.sha256(json.dumps([line for line, _ in lines]).encode()).hexdigest()
            key = f"{group} {digest}"
            if key not in self._alike:
                _compare(tuple(ranks), [*map(list, lines)], digest, name)
                self._alike.add(key)


def _described(program: Program) -> dict[str, list[tuple[str, str]]]:
    """For each process group its collectives in order, each with the user's line it comes from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for node in program.graph_module.graph.nodes:
        kind = accounting.kind_of(node)
        if kind is None or kind == "send":  # what one rank sends, others receive
            continue
        group = str(node.args[-1])
        values = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        looks = [_look(value.meta["val"], kind) for value in values]
        axis = program.axes.get(group, (group, 0))[0]
        line = f"{kind} over {axis!r} of {', '.join(looks)}"
        found.setdefault(group, []).append((line, line_of(node)))
    return found


def _look(value: Tensor, kind: str) -> str:
    # What one rank sends of dimension 0 in an all-to-all, another need not.
    sizes = [str(size) for size in value.shape]
    if kind == "all_to_all":
        sizes[0] = "*"
    return f"{short_dtype(value.dtype)}[{','.join(sizes)}]"


def _compare(ranks: tuple[int, ...], lines: list[list[str]], digest: str, name: str) -> None:
    store, here, limit = meeting_place()
    count = _counts[ranks] = _counts.get(ranks, -1) + 1
    base = f"zero_fn/programs/{ranks}/{count}"
    store.set(f"{base}/{here}", json.dumps([digest, name, lines]))
    if here == ranks[0]:
        _found(store.wait, [f"{base}/{rank}" for rank in ranks], limit)
        store.set(f"{base}/verdict", _verdict(store, base, ranks, limit))
    if not _found(store.wait, [f"{base}/verdict"], limit + MARGIN):
        raise RuntimeError(_missing(name, [ranks[0]], limit))
    verdict = store.get(f"{base}/verdict").decode()
    if verdict:
        raise RuntimeError(verdict)


def _found(wait: Callable[..., None], keys: list[str], seconds: float) -> bool:
    try:
        wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # which is how a store says that time is over
        return False
    return True


def _verdict(store: Any, base: str, ranks: tuple[int, ...], limit: float) -> str:
    """What is wrong, or nothing."""
    missing = [rank for rank in ranks if not store.check([f"{base}/{rank}"])]
    first, name, lines = json.loads(store.get(f"{base}/{ranks[0]}"))
    if missing:
        return _missing(name, missing, limit)
    for rank in ranks[1:]:
        other, their_name, theirs = json.loads(store.get(f"{base}/{rank}"))
        if other == first:
            continue
        place = next(
            (k for k, (x, y) in enumerate(zip(lines, theirs, strict=False)) if x[0] != y[0]),
            min(len(lines), len(theirs)),
        )
        both = "\n".join(
            f"  rank {number}, {what!r}: {_shown(found, place)}"
            for number, what, found in ((ranks[0], name, lines), (rank, their_name, theirs))
        )
        return (
            f"the programs of ranks {ranks[0]} and {rank} differ in what they exchange, and would "
            f"wait for each other for ever; collective {place + 1} is\n{both}\n"
            "every rank runs the same steps, on parameters of the same shapes and dtypes"
        )
    return ""


def _shown(lines: list[list[str]], place: int) -> str:
    if place >= len(lines):
        return "none, it has ended"
    what, where = lines[place]
    return f"{what}{f' ({where})' if where else ''}"


def _missing(name: str, ranks: list[int], limit: float) -> str:
    return (
        f"{name!r} is a new program here, and within {limit:g} seconds (the mesh's timeout) ranks "
        f"{ranks} have come to none: do they run another step, or got arguments of other shapes?"
    )
