"""Sums in the memory of a summand that nothing reads any more.

A gradient that adds up over micro-batches would take new memory in each of them, and be written
and read once more. Its sum moves to where the later summand is made, and a matrix product is added
where it is computed.
"""

from typing import Any

import torch
from torch.fx import Node

from ..graphs import base, is_item, is_view, op_name, order, product, readers, written
from ..program import Program
from .donation import same_kind

aten = torch.ops.aten

# Where a node stands: a number, and for what moved behind a node, more numbers after its own.
_Place = tuple[int, ...]


def sum_in_place(program: Program) -> Program:
    """Add into the memory of a summand that the sum is the last to read."""
    graph = program.graph_module.graph
    place: dict[Node, _Place] = {node: (n,) for node, n in order(graph).items()}
    touched = {base(x) for node in graph.nodes for x in written(node)}
    for number, node in enumerate([*graph.nodes]):
        summands: list[Any] = [*node.args[:2]]
        if node.kwargs or touched & {base(x) for x in summands if isinstance(x, Node)}:
            continue
        if node.target is aten.addmm.default:
            if _free(summands[0], node, [*node.args[1:]], node, place):
                node.target = aten.addmm_.default
        elif node.target is aten.add.Tensor and all(isinstance(x, Node) for x in summands):
            for total, added in (summands, reversed(summands)):
                if _added(total, added, node, place, number):
                    break
    return program


def _added(total: Node, added: Node, node: Node, place: dict[Node, _Place], number: int) -> bool:
    """Write a sum into the memory of ``total`` as early as may be; whether it could be done."""
    graph, chain = node.graph, product(added)
    if chain and added.meta["val"].dtype == node.meta["val"].dtype:
        matrices = chain[-1]
        if _free(total, node, matrices.all_input_nodes, matrices, place):
            with graph.inserting_before(matrices):
                new = graph.call_function(aten.addmm_.default, (total, *matrices.args))
            new.meta, place[new] = dict(node.meta), place[matrices]
            node.replace_all_uses_with(new)
            for old in (node, *chain):
                graph.erase_node(old)
            return True
    later = max(total, added, key=place.__getitem__)
    for spot in (later, node):
        if _free(total, node, [added], spot, place):
            node.target, node.args = aten.add_.Tensor, (total, added)
            if spot is later and later.next is not node:
                later.append(node)
                place[node] = (*place[later], -number)
            return True
    return False


def _free(
    total: Node, node: Node, others: list[Any], spot: Node, place: dict[Node, _Place]
) -> bool:
    """Whether a sum may be written into the memory of ``total`` at a spot in the graph.

    Args:
        total: the summand.
        node: the sum, which is read from there on.
        others: what else it is computed from.
        spot: the last node that may have read ``total`` before.
        place: where each node stands.
    """
    owner = total
    while is_view(owner):
        owner = owner.all_input_nodes[0]
    source = owner.all_input_nodes[0] if is_item(owner) else owner
    if not op_name(source).startswith("aten::"):
        return False  # an argument, or what a collective or a kernel may keep
    value, result = total.meta["val"], node.meta["val"]
    whole = owner.meta["val"].numel() == value.numel() and value.stride() == result.stride()
    if not whole or not same_kind(total, node) or any(base(x) is base(total) for x in others):
        return False
    if place[total] > place[spot]:
        return False
    # A collective, or a message, reads for longer than its node stands.
    return all(
        x is node or (place[x] <= place[spot] and (op_name(x).startswith("aten::") or is_item(x)))
        for x in readers(owner)
    )
