"""Overlap: a collective starts as soon as it may and is waited for as late as it can be.

torch traces a collective and its wait as neighbours. Between the two, the data travels (in Gloo's
threads, on NCCL's stream) while the step goes on. What is under way takes memory, so there are
limits to it.
"""

from collections import deque

from torch.fx import Node

from ..graphs import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    base,
    movable,
    nbytes,
    order,
    prepared,
    views,
    wait_of,
    written,
)
from ..program import Program

AHEAD = 8 << 20  # bytes of gathers that may be under way; one may, whatever its size
UNDER_WAY = 16 << 20  # bytes of gradients that may be under way to their reduction


def overlap(program: Program) -> Program:
    """Let communication run beside computation."""
    _wait_late(program)
    _bound_reductions(program)
    _gather_ahead(program)
    return program


def _wait_late(program: Program) -> None:
    """Move each wait, and the views of its result, to where the result is read."""
    graph = program.graph_module.graph
    place, changed = order(graph), _written(program)
    moving = [
        node
        for node in graph.nodes
        if node.target is WAIT and node.users and base(node.args[0].args[0]) not in changed
    ]
    for wait in list(moving):
        moving += [view for view in views(wait) if view.users]
    moving.sort(key=place.__getitem__)
    wanted: dict[Node, Node] = {}  # a moving node to the first that reads it and stays
    for node in reversed(moving):
        wanted[node] = min((wanted.get(user, user) for user in node.users), key=place.__getitem__)
    for node in moving:
        wanted[node].prepend(node)


def _bound_reductions(program: Program) -> None:
    """Wait for the oldest reductions where more gradients would be under way than the limit."""
    flying: deque[Node] = deque()
    for node in list(program.graph_module.graph.nodes):
        if node.target is WAIT and node.args[0] in flying:
            flying.remove(node.args[0])
        elif node.target in (REDUCE_SCATTER, ALL_TO_ALL) and wait_of(node) is not None:
            while flying and sum(map(_sent, [*flying, node])) > UNDER_WAY:
                node.prepend(wait_of(flying.popleft()))
            flying.append(node)


def _gather_ahead(program: Program) -> None:
    """Start the next gathers when the data of the one before them is there."""
    graph = program.graph_module.graph
    changed = _written(program)
    waits = {n.args[0]: n for n in graph.nodes if n.target is WAIT}
    gathers = [n for n in movable(graph, {ALL_GATHER}) if n in waits]
    # What moves stands behind a wait, in turn: its place is the wait's with a number more.
    place = {node: (n, 0) for node, n in order(graph).items()}
    started = 0
    for number, gather in enumerate(gathers):
        started = max(started, number + 1)
        spot, moved = waits[gather], 0
        there = place[spot]
        while started < len(gathers):
            following = gathers[started]
            flying = sum(map(nbytes, gathers[number + 1 : started]))
            chain = [*prepared(following), following]
            inputs = {used for part in chain for used in part.all_input_nodes} - set(chain)
            if (
                (flying and flying + nbytes(following) > AHEAD)
                or any(place[used] > there or base(used) in changed for used in inputs)
                or place[following] < there
            ):
                break
            for part in chain:
                spot.append(part)
                spot, moved = part, moved + 1
                place[part] = (there[0], moved)
            started += 1


def _sent(collective: Node) -> int:
    return nbytes(collective.args[0])


def _written(program: Program) -> set[Node]:
    """The nodes whose memory is written into: what reads them stays where it is."""
    return {base(x) for node in program.graph_module.graph.nodes for x in written(node)}
