"""A skipped step: a fused Adam whose results are selected keeps the old state by itself."""

from typing import Any

import torch
from torch.fx import Node

from ..graphs import call, is_crossing, moved_input, op_name, order
from ..program import Program
from .donation import adam_sums, results_of, same_kind

_SELECT = torch.ops.aten.where.self


def skip_in_update(program: Program) -> Program:
    """Give a fused Adam the condition by which all it computes is taken or left.

    ``zf.select(finite, new, old)`` reads the old state after the new one exists, so neither could
    have the other's memory. With the condition known to the op nothing is read afterwards, and a
    donated state is updated in place. The op moves behind the condition.
    """
    graph = program.graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    donated = {node for node, free in zip(inputs, program.donated, strict=True) if free}
    donated |= {node for node in graph.nodes if moved_input(node)}
    for node in [node for node in graph.nodes if op_name(node) == "zero_fn::adamw"]:
        selects = _selects(node, donated)
        conditions = {_elsewhere(select.args[0]) for select in selects}
        if len(conditions) != 1 or node.args[-1] is not None:
            continue
        (condition,) = conditions
        if not isinstance(condition, Node) or condition.meta["val"].ndim:
            continue
        places = order(graph)
        first = min(selects, key=places.__getitem__)
        computed = [node, *node.users, *adam_sums(node).values()]
        for moved in computed:
            first.prepend(moved)
        with graph.inserting_before(node):
            skip = call(graph, torch.ops.aten.logical_not.default, condition)
        node.args = (*node.args[:-1], skip)
        for select in selects:
            select.replace_all_uses_with(select.args[1])  # type: ignore[arg-type]
            graph.erase_node(select)
    return program


def _elsewhere(condition: Any) -> Any:
    """The condition of which another is the copy on another device."""
    moved = isinstance(condition, Node) and is_crossing(condition)
    return condition.args[0] if moved else condition


def _selects(node: Node, donated: set[Node]) -> list[Node]:
    """What selects between the old and the new of each parameter and moment; empty if not all."""
    params, _, *moments = node.args[:4]
    results, sums = results_of(node), adam_sums(node)
    n = len(params)  # type: ignore[arg-type]
    news: list[Any] = [sums.get(place) for place in range(n)]
    news += [results.get(place) for place in range(n, 3 * n)]
    olds: list[Any] = [old for column in (params, *moments) for old in column]  # type: ignore[union-attr]
    found = []
    for old, new in zip(olds, news, strict=True):
        users = [] if new is None else [*new.users]
        if len(users) != 1 or old not in donated:
            return []
        (select,) = users
        if select.target is not _SELECT or select.args[1:] != (new, old):
            return []
        if not same_kind(old, select):
            return []
        found.append(select)
    return found
