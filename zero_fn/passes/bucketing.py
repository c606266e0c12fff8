"""Bucketing: small collectives of one kind, group and dtype travel as one.

A call has its price, however little it moves; large tensors travel alone, because joining them
costs a copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..graphs import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    call,
    movable,
    nbytes,
    order,
    prepared,
    readers,
    views,
    wait_of,
)
from ..program import Program

LIMIT = 4 << 20  # bytes in a bucket
LARGE = 1 << 20  # bytes of a tensor that travels alone

aten = torch.ops.aten


def bucket(program: Program) -> Program:
    """Join small neighbouring collectives of one kind up to a limit of bytes.

    Gathers are joined where the first of them stands, reductions where the last one does: between
    the members nothing may need a result, or make an input, of the others.
    """
    for target, (runs, join) in _JOIN.items():
        nodes = movable(program.graph_module.graph, {target})
        small = [node for node in nodes if _payload(node) < LARGE and wait_of(node) is not None]
        groups: dict[object, list[Node]] = {}
        for node in small:
            value = node.meta["val"]
            groups.setdefault((value.dtype, value.device, node.args[1:]), []).append(node)
        for members in groups.values():
            for run in runs(members, order(program.graph_module.graph)):
                if len(run) > 1:
                    join(run)
    return program


def _payload(node: Node) -> int:
    return max(nbytes(node), nbytes(node.args[0]))


def _gathers(members: Sequence[Node], place: dict[Node, int]) -> list[list[Node]]:
    """Runs whose inputs are all there where the first one stands."""
    runs: list[list[Node]] = []
    size = 0
    for node in members:
        chain = [*prepared(node), node]
        inputs = {used for part in chain for used in part.all_input_nodes} - set(chain)
        there = max(place[used] for used in inputs)
        if runs and size + _payload(node) <= LIMIT and there < place[runs[-1][0]]:
            runs[-1].append(node)
        else:
            runs.append([node])
            size = 0
        size += _payload(node)
    return runs


def _reductions(members: Sequence[Node], place: dict[Node, int]) -> list[list[Node]]:
    """Runs of which nothing is used before the last one stands."""
    runs: list[list[Node]] = []
    size, used = 0, 0
    for node in members:
        wait = wait_of(node)
        assert wait is not None
        users = [*readers(wait)]
        if any(user.op == "output" for user in users):
            continue  # a result has memory of its own
        first = min((place[user] for user in users), default=len(place))
        if runs and size + _payload(node) <= LIMIT and place[node] < used:
            runs[-1].append(node)
            used = min(used, first)
        else:
            runs.append([node])
            size, used = 0, first
        size += _payload(node)
    return runs


def _join_gathers(members: Sequence[Node]) -> None:
    first, graph = members[0], members[0].graph
    for node in members[1:]:
        for part in prepared(node):
            first.prepend(part)
    ranks = first.args[1]
    with graph.inserting_before(first):
        pieces = [_viewed(node.args[0], -1) for node in members]
        sent = call(graph, aten.cat.default, pieces)
        gathered = call(graph, ALL_GATHER, sent, *first.args[1:])
        rows = call(graph, aten.view.default, call(graph, WAIT, gathered), [ranks, -1])
        results, start = [], 0
        for node, piece in zip(members, pieces, strict=True):
            end = start + piece.meta["val"].numel()
            part = call(graph, aten.slice.Tensor, rows, 1, start, end)
            own = call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
            results.append(_viewed(own, *node.meta["val"].shape))
            start = end
    _replace(members, results)


def _join_scatters(members: Sequence[Node]) -> None:
    last, graph = members[-1], members[-1].graph
    ranks = last.args[2]
    with graph.inserting_before(last):
        rows = [call(graph, aten.view.default, node.args[0], [ranks, -1]) for node in members]
        sent = call(graph, aten.cat.default, rows, 1)
        flat = call(graph, aten.view.default, sent, [-1])
        reduced = call(graph, WAIT, call(graph, REDUCE_SCATTER, flat, *last.args[1:]))
        parts = _parts(members, reduced)
    _replace(members, parts)


def _join_sums(members: Sequence[Node]) -> None:
    last, graph = members[-1], members[-1].graph
    with graph.inserting_before(last):
        flat = [_viewed(node.args[0], -1) for node in members]
        sent = call(graph, aten.cat.default, flat)
        reduced = call(graph, WAIT, call(graph, ALL_REDUCE, sent, *last.args[1:]))
        parts = _parts(members, reduced)
    _replace(members, parts)


def _viewed(node: Any, *shape: int) -> Node:
    """A view of another shape; the node itself where that is its shape, or both are flat."""
    have = tuple(node.meta["val"].shape)
    if shape == have or (shape == (-1,) and len(have) == 1):
        return node
    return call(node.graph, aten.view.default, node, [*shape])


def _parts(members: Sequence[Node], joined: Node) -> list[Node]:
    """Each member's part of a flat result."""
    found, start = [], 0
    for node in members:
        value = node.meta["val"]
        end = start + value.numel()
        part = call(node.graph, aten.slice.Tensor, joined, 0, start, end)
        found.append(_viewed(part, *value.shape))
        start = end
    return found


def _replace(members: Sequence[Node], results: Sequence[Node]) -> None:
    for node, result in zip(members, results, strict=True):
        wait = wait_of(node)
        assert wait is not None
        place = results[-1]
        for view in views(wait):  # they may stand before the joint result
            place.append(view)
            place = view
        wait.replace_all_uses_with(result)
        node.graph.erase_node(wait)
        node.graph.erase_node(node)


_JOIN: dict[object, tuple[Callable[..., list[list[Node]]], Callable[[Sequence[Node]], None]]] = {
    ALL_GATHER: (_gathers, _join_gathers),
    REDUCE_SCATTER: (_reductions, _join_scatters),
    ALL_REDUCE: (_reductions, _join_sums),
}
