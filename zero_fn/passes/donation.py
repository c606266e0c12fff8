"""Donation: new state in the memory of the old, and results in memory of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..graphs import WAIT, base, is_crossing, moved_input, op_name
from ..program import Program


def own_results(program: Program) -> Program:
    """Copy each result that looks at the memory of an argument that was not donated.

    Without it, a state that holds on to a batch would let a later donation overwrite that batch.
    """
    graph = program.graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    kept = {node for node, donated in zip(inputs, program.donated, strict=True) if not donated}
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        results = [
            copied(node) if isinstance(node, Node) and base(node) in kept else node
            for node in output.args[0]
        ]
    output.args = (results,)
    return program


def update_in_place(program: Program) -> Program:
    """Write new state into the memory of the donated state it replaces.

    The fused Adam updates parameters and moments in place, ops that renew a state have a twin that
    overwrites it, and ``p + u`` becomes an in-place addition, where the old value is a donated
    argument that nothing reads afterwards.
    """
    for node in list(program.graph_module.graph.nodes):
        name = op_name(node)
        if name == "zero_fn::adamw":
            _adam_in_place(program, node)
        elif name == "zero_fn::precondition":
            _precondition_in_place(program, node)
        elif name in _RENEWED:
            _renew_in_place(program, node, _RENEWED[name])
    free = Free(program, on_disk=False)
    for node in list(program.graph_module.graph.nodes):
        if node.target is torch.ops.aten.add.Tensor and not node.kwargs:
            old, added = node.args
            if free.after(old, node) and same_kind(old, node) and not _shares(added, old):
                _replaced(node, torch.ops.aten.add_.Tensor, (old, added))
    _bring_back(program)
    return program


def _bring_back(program: Program) -> None:
    """Write what was updated on another device into the memory that it came from."""
    free = Free(program, on_disk=False)
    for node in list(program.graph_module.graph.nodes):
        old = moved_input(node.args[0]) if is_crossing(node) else None
        if old is not None and same_kind(old, node) and free.after(old, node):
            with node.graph.inserting_before(node):
                node.graph.call_function(torch.ops.aten.copy_.default, (old, node.args[0]))
            node.replace_all_uses_with(old)
            node.graph.erase_node(node)


def _adam_in_place(program: Program, node: Node) -> None:
    """Split a fused Adam into one in place, where the old state is free, and the rest."""

    def in_place(arguments: tuple[Any, ...]) -> list[list[Node]]:
        node.graph.call_function(torch.ops.zero_fn.adamw_.default, arguments)
        params, _, mu, nu = arguments[:4]
        return [params, mu, nu]

    sums = adam_leaves(node, Free(program, on_disk=False))
    if sums:
        rewritten(node, sums, in_place)


def adam_leaves(node: Node, free: "Free") -> dict[int, Node]:
    """The leaves of a fused Adam whose old state is free, each with its ``p + u``."""
    leaves: list[Any] = list(zip(*node.args[:4], strict=True))
    found: dict[int, Node] = {}
    for place, new in adam_sums(node).items():
        p, _, m, v = leaves[place]
        if (
            same_kind(p, new)
            and free.after(p, node, besides=new)
            and free.after(m, node)
            and free.after(v, node)
            and len({p, m, v}) == 3
            and not any(_shares(g, x) for _, g, *_ in leaves for x in (p, m, v))
        ):
            found[place] = new
    return found


def adam_sums(node: Node) -> dict[int, Node]:
    """The ``p + u`` of each leaf of a fused Adam whose update is used for nothing else."""
    params: Any = node.args[0]
    results = results_of(node)
    sums: dict[int, Node] = {}
    for place, p in enumerate(params):
        users = [*results[place].users] if place in results else []
        if len(users) == 1 and _is_sum(users[0], p, results[place]):
            sums[place] = users[0]
    return sums


def _is_sum(node: Node, p: Node, u: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and node.args == (p, u) and not node.kwargs


def rewritten(
    node: Node, sums: dict[int, Node], emit: Callable[[tuple[Any, ...]], list[list[Node]]]
) -> None:
    """Give some leaves of a fused Adam to another op; the rest stays one.

    Args:
        node: the fused Adam.
        sums: the leaves, each with its new parameter.
        emit: makes the other op, from arguments like the fused Adam's, and returns the new
            parameters and the two new moments of its leaves.
    """
    graph, n = node.graph, len(node.args[0])  # type: ignore[arg-type]
    leaves: list[Any] = list(zip(*node.args[:4], node.args[9], strict=True))  # type: ignore[arg-type]
    results = results_of(node)
    chosen = sorted(sums)
    rest = [place for place in range(n) if place not in sums]

    def arguments(places: Sequence[int]) -> tuple[Any, ...]:
        *four, decays = (list(column) for column in zip(*[leaves[i] for i in places], strict=True))
        return (*four, *node.args[4:9], decays, *node.args[10:])

    with graph.inserting_before(node):
        new = emit(arguments(chosen))
        if rest:
            other = graph.call_function(torch.ops.zero_fn.adamw.default, arguments(rest))
    for place, user in results.items():
        part, leaf = divmod(place, n)
        if leaf not in sums:
            user.args = (other, part * len(rest) + rest.index(leaf))
        elif part:
            user.replace_all_uses_with(new[part][chosen.index(leaf)])
            graph.erase_node(user)
    for place, added in sums.items():
        added.replace_all_uses_with(new[0][chosen.index(place)])
        graph.erase_node(added)
        graph.erase_node(results[place])
    graph.erase_node(node)


def results_of(node: Node) -> dict[int, Node]:
    """What is taken of the list that an op returns, by its place there."""
    users: list[Any] = [*node.users]
    return {user.args[1]: user for user in users}


# The place of the state that an op renews; its twin in place has the same name with ``_``.
_RENEWED = {
    "zero_fn::rest_of_momentum": 2,
    "zero_fn::rest_of_average": 2,
    "zero_fn::unpack_if": 3,
}


def _twin(node: Node) -> Any:
    return getattr(torch.ops.zero_fn, op_name(node).removeprefix("zero_fn::") + "_").default


def _renew_in_place(program: Program, node: Node, place: int) -> None:
    old: Any = node.args[place]
    others = [x for x in node.all_input_nodes if x is not old]
    if Free(program, on_disk=False).after(old, node) and not any(_shares(x, old) for x in others):
        with node.graph.inserting_before(node):
            node.graph.call_function(_twin(node), node.args)
        node.replace_all_uses_with(old)
        node.graph.erase_node(node)


def _precondition_in_place(program: Program, node: Node) -> None:
    """Let the op write the new parameters, if all of them are free: ``p + u`` then is ``p``."""
    free = Free(program, on_disk=False)
    params: Any = node.args[0]
    updates: dict[Any, Node] = {user.args[1]: user for user in node.users}
    read = [x for means in node.args[1:3] for x in means]  # type: ignore[union-attr]
    sums = []
    for place, p in enumerate(params):
        users = [*updates[place].users] if place in updates else []
        (new,) = users if len(users) == 1 else (None,)
        if (
            new is None
            or new.target is not torch.ops.aten.add.Tensor
            or new.args != (p, updates[place])
            or new.kwargs
            or not same_kind(p, new)
            or not free.after(p, node, besides=new)
            or any(_shares(x, p) for x in read)
        ):
            return
        sums.append(new)
    with node.graph.inserting_before(node):
        node.graph.call_function(_twin(node), node.args)
    for place, (p, new) in enumerate(zip(params, sums, strict=True)):
        new.replace_all_uses_with(p)
        node.graph.erase_node(new)
        node.graph.erase_node(updates[place])
    node.graph.erase_node(node)


class Free:
    """Which donated arguments nothing reads after a node; those on disk only where asked for.

    An argument's copy on another device is as free as one that was donated.
    """

    def __init__(self, program: Program, on_disk: bool) -> None:
        nodes = list(program.graph_module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.donated = {
            node
            for node, donated, filed in zip(inputs, program.donated, program.on_disk, strict=True)
            if donated and (on_disk or not filed)
        }
        self.donated |= {node for node in nodes if moved_input(node)}
        self.order = {node: place for place, node in enumerate(nodes)}
        self.readers: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            # A wait ends the reading of what its collective sends; a view reads nothing itself.
            reading = node.args[0] if node.target is WAIT else node
            if base(node) is node or node.target is WAIT:
                for used in reading.all_input_nodes:
                    self.readers[base(used)].append(node)

    def after(self, old: object, node: Node, besides: Node | None = None) -> bool:
        """Whether ``old`` is donated, and read by nothing after ``node`` but ``besides``."""
        return (
            isinstance(old, Node)
            and old in self.donated
            and all(
                reader is besides or self.order[reader] <= self.order[node]
                for reader in self.readers[old]
            )
        )


def _shares(a: object, b: object) -> bool:
    return isinstance(a, Node) and isinstance(b, Node) and base(a) is base(b)


def _replaced(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def same_kind(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def copied(node: Node) -> Node:
    copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy
