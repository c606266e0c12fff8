"""The traced program: a whole step (forward, backward, collectives, update) as one flat graph.

``trace`` runs a function once on fake tensors under ``make_fx``, which resolves every torch.func
transform and keeps collectives and kernels as nodes. A ``Program`` is that graph together with the
trees of its arguments and results: what a jaxpr is to JAX.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from . import tree
from .sharding import Sharded
from .tree import Tensor, TreeDef


class Static(NamedTuple):
    """A tree without its tensors: the structure, and the leaves that are none."""

    treedef: TreeDef
    others: tuple[Any, ...]  # TENSOR where a tensor stands


TENSOR = "<tensor>"


class Collective(NamedTuple):
    """One kind of collective in a program, over one axis or group.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        group: the process group's name; the axis' name for an abstract mesh.
        calls: how many there are.
        bytes_in: what one rank puts in, over all of them.
        bytes_sent: what one rank sends, over all of them, by the ring algorithm.
    """

    kind: str
    group: str
    calls: int
    bytes_in: int
    bytes_sent: int


class Peak(NamedTuple):
    """The most memory of a program.

    Attributes:
        bytes: what is alive at once, at most.
        inputs: how much of it are the arguments.
        operation: the operation that runs then.
    """

    bytes: int
    inputs: int
    operation: str


@dataclass(frozen=True)
class Program:
    """A traced step.

    Attributes:
        graph_module: the graph, a function of the tensors of the arguments in order.
        arguments: the tree of the arguments, without its tensors.
        results: the tree of the results, without its tensors.
        paths: the key path of each tensor of the arguments.
        donated: for each tensor of the arguments, whether its memory may be reused.
    """

    graph_module: GraphModule
    arguments: Static
    results: Static
    paths: tuple[str, ...]
    donated: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        """Run the graph as it is. Donated arguments may be overwritten."""
        tensors, _ = split(args)
        return join(self.graph_module(*tensors), self.results)

    def collectives(self, group_size: int) -> list[Collective]:
        """The collectives of a program of processes, or of an abstract rank.

        Args:
            group_size: the number of ranks of the groups.
        """
        found: dict[tuple[str, str], list[int]] = {}
        for node in self.graph_module.graph.nodes:
            # A trailing underscore is the same collective in place.
            name = getattr(node.target, "__name__", "").split(".")[0].rstrip("_")
            if node.op == "call_function" and name in _RING:
                size = nbytes(node.args[0])
                sent = _RING[name](size, group_size)
                entry = found.setdefault((name, node.args[-1]), [0, 0, 0])
                entry[:] = entry[0] + 1, entry[1] + size, entry[2] + sent
        return [
            Collective(_KIND[name], group, *counted) for (name, group), counted in found.items()
        ]

    def memory_timeline(self) -> list[tuple[str, int]]:
        """For each operation, its name and the bytes that are alive while it runs.

        Inputs are alive throughout; what the operations make, from there to its last use. Views
        count once, with what they look at.
        """
        nodes = [*self.graph_module.graph.nodes]
        last: dict[Node, int] = {}
        for place, node in enumerate(nodes):
            sent = node.args[0].all_input_nodes if node.target is _WAIT else []
            for used in [*node.all_input_nodes, *sent]:  # what travels is held until it is there
                last[base(used)] = last[used] = place
        timeline, alive = [], sum(nbytes(node) for node in nodes if node.op == "placeholder")
        ending: dict[int, int] = {}
        for place, node in enumerate(nodes):
            if node.op == "call_function" and not is_alias(node) and not _is_item(node):
                for part, size in _parts(node):
                    alive += size
                    end = last.get(part, place)
                    ending[end] = ending.get(end, 0) + size
            timeline.append((_named(node), alive))
            alive -= ending.get(place, 0)
        return timeline

    def peak(self) -> Peak:
        """The most bytes that are alive at once, and the operation that runs then."""
        operation, size = max(self.memory_timeline(), key=lambda entry: entry[1])
        inputs = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        return Peak(size, sum(map(nbytes, inputs)), operation)

    def __str__(self) -> str:
        return "\n".join(_line(node) for node in self.graph_module.graph.nodes)


_RING: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) // n,
    "all_gather_into_tensor": lambda size, n: size * (n - 1),
    "reduce_scatter_tensor": lambda size, n: size * (n - 1) // n,
    "all_to_all_single": lambda size, n: size * (n - 1) // n,
}
_KIND = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def split(value: Any) -> tuple[list[Tensor], Static]:
    """The tensors of a tree, and the rest of it."""
    leaves, treedef = tree.flatten(value)
    others = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Static(treedef, others)


def join(tensors: Sequence[Tensor], static: Static) -> Any:
    """The tree again."""
    rest = iter(tensors)
    leaves = [next(rest) if other is TENSOR else other for other in static.others]
    return tree.unflatten(static.treedef, leaves)


def trace(f: Callable[..., Any], args: tuple[Any, ...], donate: Sequence[int] = ()) -> Program:
    """Trace ``f(*args)`` into a program; the arguments' values are not used.

    Tensors that ``f`` captures become constants of the program.
    """
    tensors, arguments = split(args)
    names, donated = _describe(args, donate)
    results: list[Static] = []
    # The same tensor at two places is one input, so that ties can be seen.
    first: dict[int, int] = {}
    slots = [first.setdefault(id(x), place) for place, x in enumerate(tensors)]

    def flat(*inputs: Tensor) -> list[Tensor]:
        given = [inputs[slot] for slot in slots]
        out, static = split(f(*join(given, arguments)))
        results[:] = [static]
        return out

    graph_module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return Program(graph_module, arguments, results[0], names, donated)


def _describe(
    args: tuple[Any, ...], donate: Sequence[int]
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    names: list[str] = []
    donated: list[bool] = []
    for place, argument in enumerate(args):
        for path, leaf in zip(tree.paths(argument), tree.leaves(argument), strict=True):
            if isinstance(leaf, Tensor):
                names.append(f"argument {place}" + (f" at {path!r}" if path else ""))
                donated.append(place in donate)
    return tuple(names), tuple(donated)


def is_alias(node: Node) -> bool:
    """Whether a node's value looks at the memory of its first argument, or writes into it."""
    if node.target is operator.getitem:
        return is_alias(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return node.target in _UNDECLARED or bool(returns and returns[0].alias_info is not None)


_WAIT = torch.ops._c10d_functional.wait_tensor.default

# Aliases that their schemas do not declare.
_UNDECLARED = {
    torch.ops.aten._unsafe_view.default,
    _WAIT,
}


def base(node: Node) -> Node:
    """The node whose memory a chain of views looks at."""
    while node.op == "call_function" and is_alias(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def rebuilt(program: Program) -> Program:
    """A program after a pass changed its graph."""
    program.graph_module.graph.lint()
    program.graph_module.recompile()
    return replace(program)


def sharded_inputs(program: Program) -> dict[Node, Sharded]:
    """The inputs that are pieces of a tensor, with the nodes that say how they are cut."""
    places = iter(node for node in program.graph_module.graph.nodes if node.op == "placeholder")
    leaves = [next(places) if other is TENSOR else other for other in program.arguments.others]
    arguments = tree.unflatten(program.arguments.treedef, leaves)
    pieces = tree.leaves(arguments, lambda node: isinstance(node, Sharded))
    return {piece.local: piece for piece in pieces if isinstance(piece, Sharded)}


def nbytes(node: Any) -> int:
    """The bytes of a node's value, tuples and lists added up."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    values = value if isinstance(value, tuple | list) else [value]
    return sum(
        math.prod(x.shape) * x.element_size() if isinstance(x, Tensor) else 0 for x in values
    )


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem


def _parts(node: Node) -> list[tuple[Node, int]]:
    """What a node makes: itself, or each of its several results that is taken from it."""
    value = node.meta.get("val")
    if not isinstance(value, tuple | list):
        return [(node, nbytes(node))]
    taken = {user.args[1]: user for user in node.users if _is_item(user)}
    sizes = [x.numel() * x.element_size() if isinstance(x, Tensor) else 0 for x in value]
    return [(taken.get(place, node), size) for place, size in enumerate(sizes)]


def _named(node: Node) -> str:
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}"


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_shown(node.args[0])}"
    value = node.meta.get("val")
    kind = f": {_typed(value)}" if value is not None else ""
    if node.op == "placeholder":
        return f"input {node.name}{kind}"
    if node.op == "get_attr":
        return f"constant {node.name}{kind}"
    name = getattr(node.target, "__name__", str(node.target))
    arguments = [_shown(x) for x in node.args]
    arguments += [f"{key}={_shown(x)}" for key, x in node.kwargs.items()]
    return f"{node.name}{kind} = {name}({', '.join(arguments)})"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(x) for x in value)}]"
    return value.name if isinstance(value, Node) else str(value)


def _typed(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    return f"({', '.join(_typed(x) for x in value)})" if isinstance(value, tuple | list) else "?"
