"""Graphs of operations: memory and views, collectives and their waits, who reads what.

A collective only starts where its node stands; its input is read, and its result there, at its
``wait_tensor``.
"""

import math
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .tree import Tensor

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default
ALL_GATHER = c10d.all_gather_into_tensor.default
ALL_GATHER_OUT = c10d.all_gather_into_tensor_out.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
REDUCTIONS = {REDUCE_SCATTER, ALL_REDUCE}
ADAM = ("zero_fn::adamw", "zero_fn::adamw_")

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


def op_name(node: Node) -> str:
    """The name of an operation without its overload, ``aten::add``; empty for other nodes."""
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._schema.name) if is_op else ""  # type: ignore[union-attr]


def order(graph: Graph) -> dict[Node, int]:
    """The place of each node."""
    return {node: place for place, node in enumerate(graph.nodes)}


def is_alias(node: Node) -> bool:
    """Whether a node's value looks at the memory of its first argument, or writes into it."""
    if node.target is operator.getitem:
        return is_alias(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return node.target in _UNDECLARED or bool(returns and returns[0].alias_info is not None)


# Aliases that their schemas do not declare.
_UNDECLARED = {
    torch.ops.aten._unsafe_view.default,
    WAIT,
}


def base(node: Node) -> Node:
    """The node whose memory a chain of views looks at."""
    while node.op == "call_function" and is_alias(node):
        node = _looked_at(node)
    return node


def _looked_at(node: Node) -> Any:
    """The argument whose memory a node's value is."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target not in _UNDECLARED:
        returned = node.target._schema.returns[0].alias_info
        shared = set() if returned is None else returned.before_set
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.before_set & shared:
                return _given(node, place, argument.name)
    return node.args[0]


def _given(node: Node, place: int, name: str) -> Any:
    """What a node is given for an argument of its operation."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def nbytes(node: Any) -> int:
    """The bytes of a node's value, tuples and lists added up."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    values = value if isinstance(value, tuple | list) else [value]
    return sum(
        math.prod(x.shape) * x.element_size() if isinstance(x, Tensor) else 0 for x in values
    )


def is_item(node: Node) -> bool:
    """Whether a node takes one of several results."""
    return node.target is operator.getitem


def parts(node: Node) -> list[tuple[Node, int]]:
    """What a node makes: itself, or each of its several results that is taken from it."""
    value = node.meta.get("val")
    if not isinstance(value, tuple | list):
        return [(node, nbytes(node))]
    taken = {user.args[1]: user for user in node.users if is_item(user)}
    sizes = [x.numel() * x.element_size() if isinstance(x, Tensor) else 0 for x in value]
    return [(taken.get(place, node), size) for place, size in enumerate(sizes)]


def arrivals(nodes: Iterable[Node]) -> list[Node]:
    """Where what lay on the host is on the device, cast for its use, and no gather reads it."""
    found = []
    for node in nodes:
        if _crossing(node) == "there" and origin(node).op == "placeholder":
            end = step = node
            while len(step.users) == 1 and (is_view(*step.users) or _is_copy(*step.users)):
                (step,) = step.users
                end = step if _is_copy(step) else end
            if not any(user.target is ALL_GATHER for user in readers(end)):
                found.append(end)
    return found


def departures(nodes: Iterable[Node]) -> list[Node]:
    """The copies of what was computed on a device to the host."""
    return [x for x in nodes if _crossing(x) == "back" and origin(x).op != "placeholder"]


def moved_input(node: object) -> Node | None:
    """The argument of which a node is the copy on another device."""
    if not isinstance(node, Node) or not is_crossing(node):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    return source if source.op == "placeholder" else None


def _is_copy(node: Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default


def is_crossing(node: Node) -> bool:
    """Whether a node copies from the host to a device, or back."""
    return bool(_crossing(node))


def _crossing(node: Node) -> str:
    """Whether a copy goes from the host to a device, or back."""
    source = node.args[0] if _is_copy(node) else None
    if not isinstance(source, Node):
        return ""
    before, after = (x.meta["val"].device.type == "cpu" for x in (source, node))
    return {(True, False): "there", (False, True): "back"}.get((before, after), "")


def movable(graph: Graph, targets: Collection[Any]) -> list[Node]:
    """The collectives of these kinds that a pass may move.

    Those over a group whose ranks run different programs, the stages of a pipeline, keep their
    order, which each rank's passes would choose by itself.
    """
    messages = ("zero_fn::send", "zero_fn::receive")
    unlike = {node.args[-1] for node in graph.nodes if op_name(node) in messages}
    nodes = [node for node in graph.nodes if node.target in targets]
    return [node for node in nodes if node.args[-1] not in unlike]


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
            map_arg(_given(node, place, argument.name), found.append)
    return found


def product(node: Node) -> list[Node]:
    """The way from a value to the matrix product that it is, past transposes there and back.

    Empty if it is something else, or if any of it is read by more than one node.
    """
    chain = [node]
    while _transposes(node):
        node = node.all_input_nodes[0]
        chain.append(node)
    alone = all(len(x.users) == 1 for x in chain)
    upright = len(chain) % 2 == 1
    return chain if node.target is torch.ops.aten.mm.default and alone and upright else []


def _transposes(node: Node) -> bool:
    """Whether a node is a matrix, transposed."""
    if node.target is torch.ops.aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is torch.ops.aten.t.default


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
