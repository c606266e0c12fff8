"""Rounds of a compressed exchange: each begins when its gradients are there.

A trace has them one after the other behind the backward. This pass puts a round's first phase, from
packing to the all-to-all, to where the last of its gradients is made, and its second phase, from
the average to the all-gather, behind the first phase of the round that begins next: what waits
for the network does so while something is under way.
"""

import torch
from torch.fx import Node

from ..graphs import (
    ALL_GATHER,
    ALL_TO_ALL,
    WAIT,
    base,
    is_alias,
    is_item,
    movable,
    op_name,
    order,
    written,
)
from ..program import Program

aten = torch.ops.aten
_BETWEEN = {  # what stands between the kernels and the collectives, all of it small
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.lift_fresh_copy.default,
    aten.split_with_sizes.default,
    WAIT,
    ALL_TO_ALL,
}
_KERNELS = ("zero_fn::pack_momentum", "zero_fn::pack_average")


def exchange_early(program: Program) -> Program:
    """Begin each round of signs as soon as may be, and its second phase during the next round."""
    graph = program.graph_module.graph
    begun = []
    for node in movable(graph, {ALL_TO_ALL}):
        chain = _chain(node)
        if _has(chain, "zero_fn::pack_momentum"):
            _hoist(chain, after=[])
            begun.append(node)
    begun.sort(key=order(graph).__getitem__)
    seconds: dict[Node, tuple[Node, set[Node]]] = {}
    for node in movable(graph, {ALL_GATHER}):
        chain = _chain(node)
        if _has(chain, "zero_fn::pack_average"):
            seconds |= {first: (node, chain) for first in begun if first in chain}
    last: list[Node] = []
    for number, first in enumerate(begun):
        if first in seconds:
            node, chain = seconds[first]
            _hoist(chain - _chain(first), after=[*last, *begun[number + 1 : number + 2]])
            last = [node]
    return program


def _chain(node: Node) -> set[Node]:
    """A collective, and what makes its input from gradients and states."""
    found: set[Node] = set()
    rest = [node]
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += [used for used in node.all_input_nodes if _joins(used)]
    return found


def _joins(node: Node) -> bool:
    known = node.op == "get_attr" or node.target in _BETWEEN or op_name(node) in _KERNELS
    return known or is_item(node) or is_alias(node)


def _has(chain: set[Node], name: str) -> bool:
    return any(op_name(node) == name for node in chain)


def _hoist(chain: set[Node], after: list[Node]) -> None:
    """Move what stands behind the last of the chain's inputs, and of ``after``, up to there."""
    (graph,) = {node.graph for node in chain}
    place = order(graph)
    end = max(place[node] for node in chain)
    inputs = {used for node in chain for used in node.all_input_nodes} - chain
    read = {base(used) for used in inputs}
    writing = [
        node for node in graph.nodes if place[node] < end and read & {*map(base, written(node))}
    ]
    spot = max([*inputs, *writing, *after], key=place.__getitem__)
    behind = [node for node in chain if place[node] > place[spot]]
    for node in sorted(behind, key=place.__getitem__):
        spot.append(node)
        spot = node
