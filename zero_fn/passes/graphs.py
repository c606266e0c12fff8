"""What the passes share: new nodes with their values, collectives and their waits, who reads what.

A collective only starts where its node stands; its input is read, and its result there, at its
``wait_tensor``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..program import is_alias

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default
ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
REDUCTIONS = {REDUCE_SCATTER, ALL_REDUCE}
COLLECTIVES = {ALL_GATHER, ALL_TO_ALL, *REDUCTIONS}

# What stands between a gradient and its reduction, or between a piece and its gather.
_PREPARING = {
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.slice_backward.default,  # padding's own
}


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node at the graph's point of insertion, with the value that it has in a trace."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, _value), **map_arg(kwargs, _value))
    return node


def _value(node: Node) -> Any:
    return node.meta["val"]


def order(graph: Graph) -> dict[Node, int]:
    """The place of each node."""
    return {node: place for place, node in enumerate(graph.nodes)}


def wait_of(collective: Node) -> Node | None:
    """The wait for a collective; None if anything else reads its result."""
    users = [*collective.users]
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def readers(node: Node) -> Iterator[Node]:
    """The nodes that read a node's memory, past the views of it."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def views(node: Node) -> list[Node]:
    """The views of a node's memory, each after what it looks at."""
    found: list[Node] = []
    for user in node.users:
        if is_view(user):
            found += [user, *views(user)]
    return found


def is_view(node: Node) -> bool:
    """Whether a node only looks at its argument's memory."""
    return node.op == "call_function" and is_alias(node) and not written(node)


def written(node: Node) -> list[Node]:
    """The arguments whose memory a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is WAIT:
        return []
    found: list[Node] = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            map_arg(given, found.append)
    return found


def prepared(collective: Node) -> list[Node]:
    """What prepares the input of a collective and is used by nothing else, in order."""
    found: list[Node] = []
    source = collective.args[0]
    while (
        isinstance(source, Node)
        and (source.target in _PREPARING or is_alias(source))
        and len(source.users) == 1
    ):
        found.insert(0, source)
        source = source.args[0]
    return found


def origin(collective: Node) -> Node:
    """The node that what a collective sends was prepared from, used elsewhere or not."""
    source = collective.args[0]
    while isinstance(source, Node) and (source.target in _PREPARING or is_alias(source)):
        source = source.args[0]
    assert isinstance(source, Node)
    return source
