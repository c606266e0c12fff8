"""Placement: each collective where its result is wanted, or its input complete.

torch's backward runs the reductions of parameters that were gathered first, last: all gradients
would be whole at the end of it. And a parameter that is gathered in the forward would stay whole
until the backward. These passes move and repeat collectives, and copies between the host and a
device, which are to offloaded pieces what gathers and reductions are; they change no number.
"""

from torch.fx import Node

from ..graphs import (
    ALL_GATHER,
    REDUCTIONS,
    WAIT,
    arrivals,
    base,
    departures,
    movable,
    nbytes,
    order,
    origin,
    prepared,
    readers,
)
from ..program import Program, sharded_inputs

SMALL = 1 << 16  # bytes of a whole leaf that is not worth gathering twice


def reduce_early(program: Program) -> Program:
    """Reduce each gradient, and send it to its host, when it is complete: few are whole at once."""
    graph = program.graph_module.graph
    # Where a node stands: the places of those that moved lie between those of their neighbours.
    place: dict[Node, tuple[int, ...]] = {node: (n,) for n, node in enumerate(graph.nodes)}
    start = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for number, node in enumerate([*movable(graph, REDUCTIONS), *departures(graph.nodes)]):
        chain = [*prepared(node), node, *_waits(node)]
        inputs = {used for part in chain for used in part.all_input_nodes} - set(chain)
        spot = max([*start, *inputs], key=place.__getitem__)
        at = place[spot]
        for step, part in enumerate(chain):
            spot.append(part)
            spot = part
            # behind the node there, and before what an earlier reduction put behind it
            place[part] = (*at, -number, step)
    return program


def gather_late(program: Program) -> Program:
    """Gather parameters where they are used; stage 3's again where they are used again.

    A leaf whose scheme gathers at each use is whole from a use to the next only while no more than
    two leaves of the largest size are; other leaves are gathered at their first use, once.
    """
    graph = program.graph_module.graph
    again = {
        node for node, piece in sharded_inputs(program).items() if piece.scheme.gather_at == "use"
    }
    place = order(graph)
    uses: list[tuple[int, Node, Node]] = []
    repeated: dict[Node, bool] = {}
    for gather in [*movable(graph, {ALL_GATHER}), *arrivals(graph.nodes)]:
        source = origin(gather)
        if source.op == "placeholder":
            repeated[gather] = source in again and nbytes(gather) >= SMALL
            uses += [(place[use], use, gather) for use in readers(gather)]
    room = 2 * max((nbytes(gather) for gather, often in repeated.items() if often), default=0)
    held: dict[Node, dict[Node, Node]] = {}  # gather to what stands for its nodes now
    for _, use, gather in sorted(uses, key=lambda entry: entry[0]):
        if gather in held:
            held[gather] = held.pop(gather)  # used last
        else:
            held[gather] = _copy_before(use, gather)
            _let_go(held, repeated, room)
        _redirect(use, gather, held[gather])
    for gather in repeated:
        chain = prepared(gather)
        _erase(gather)
        for node in reversed(chain):
            graph.erase_node(node)
    return program


def _erase(node: Node) -> None:
    """Remove a gather that nothing uses any more; waits count as effects, and would keep it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _let_go(held: dict[Node, dict[Node, Node]], repeated: dict[Node, bool], room: int) -> None:
    """Forget the leaves that were not used for longest, until the rest have room."""
    kept = [gather for gather in held if repeated[gather]]
    while sum(nbytes(gather) for gather in kept) > room and len(kept) > 1:
        del held[kept.pop(0)]


def _copy_before(use: Node, gather: Node) -> dict[Node, Node]:
    """A copy of a gather, with what prepares it, in front of a use."""
    copies: dict[Node, Node] = {}
    with use.graph.inserting_before(use):
        for node in [*prepared(gather), gather]:
            copies[node] = _copy(node, copies)
    return copies


def _copy(node: Node, copies: dict[Node, Node]) -> Node:
    def of(argument: Node) -> Node:
        return copies.get(argument, argument)

    return node.graph.node_copy(node, of)


def _redirect(use: Node, gather: Node, copies: dict[Node, Node]) -> None:
    """Let a use read the copy, through copies of the views between."""

    def copied(node: Node) -> Node:
        if node not in copies:
            parent: Node = node.args[0]  # type: ignore[assignment]
            copies[parent] = copied(parent)
            with use.graph.inserting_before(use):
                copies[node] = _copy(node, copies)
        return copies[node]

    for argument in use.all_input_nodes:
        if base(argument) is gather:
            use.replace_input_with(argument, copied(argument))


def _waits(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is WAIT]
