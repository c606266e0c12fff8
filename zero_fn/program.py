"""The traced program: a whole step (forward, backward, collectives, update) as one flat graph.

``trace`` runs a function once on fake tensors under ``make_fx``, which resolves every torch.func
transform and keeps collectives and kernels as nodes. A ``Program`` is that graph together with the
trees of its arguments and results: what a jaxpr is to JAX.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.fx.traceback as fx_traceback
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from . import accounting, disk, tree
from .accounting import Collective, Moment, Work
from .graphs import ADAM, nbytes, op_name
from .mesh import seen_axes
from .naming import size_of
from .sharding import Sharded
from .tree import Tensor, TreeDef


class Static(NamedTuple):
    """A tree without its tensors: the structure, and the leaves that are none."""

    treedef: TreeDef
    others: tuple[Any, ...]  # TENSOR where a tensor stands


TENSOR = "<tensor>"


class Peak(NamedTuple):
    """The most memory of a program.

    Attributes:
        bytes: what is alive at once, at most.
        parts: the same, split into parameters, gathered parameters, gradients, optimizer state,
            activations and other.
        inputs: how much of it are the arguments.
        operation: the operation that runs then.
        line: the line of the user's program that it came from; empty where torch does not know.
    """

    bytes: int
    parts: Mapping[str, int]
    inputs: int
    operation: str
    line: str

    def __str__(self) -> str:
        split = ", ".join(f"{part} {size_of(n)}" for part, n in self.parts.items() if n)
        line = f" ({self.line})" if self.line else ""
        return f"{size_of(self.bytes)} at {self.operation}{line}: {split}"


@dataclass(frozen=True)
class Program:
    """A traced step.

    Attributes:
        graph_module: the graph, a function of the tensors of the arguments in order.
        arguments: the tree of the arguments, without its tensors.
        results: the tree of the results, without its tensors.
        paths: the key path of each tensor of the arguments.
        donated: for each tensor of the arguments, whether its memory may be reused.
        axes: for each process group, the mesh axis' name and size.
        on_disk: for each tensor of the arguments, whether its memory is a file.
    """

    graph_module: GraphModule
    arguments: Static
    results: Static
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    axes: Mapping[str, tuple[str, int]]
    on_disk: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        """Run the graph as it is. Donated arguments may be overwritten."""
        self.graph_module.recompile()
        tensors, _ = split(args)
        return join(self.graph_module(*tensors), self.results)

    def collectives(self) -> list[Collective]:
        """The collectives of a program of processes, or of an abstract rank, by kind and axis."""
        return accounting.collectives(self.graph_module.graph, self.axes)

    def flops(self) -> int:
        """The floating-point operations of matrix products, convolutions and attention."""
        return accounting.flops(self.graph_module.graph)

    def work(self) -> list[Work]:
        """What each operation has to do: floating-point operations, and bytes read and written."""
        return accounting.work(self.graph_module.graph)

    def at_rest(self) -> dict[str, int]:
        """The bytes of the arguments by what they are: parameters, optimizer state, other."""
        found: dict[str, int] = {}
        for node, part in self._inputs().items():
            found[part] = found.get(part, 0) + nbytes(node)
        return found

    def memory_timeline(self) -> list[Moment]:
        """What is alive while each operation runs, in bytes.

        Inputs are alive throughout; what the operations make, from there to its last use, and what
        a collective sends, until it is waited for. Views count once, with what they look at.
        """
        return accounting.timeline(self.graph_module.graph, self._inputs())

    def peak(self) -> Peak:
        """The most bytes that are alive at once, what they are, and the operation that runs."""
        moments = self.memory_timeline()
        place = max(range(len(moments)), key=lambda place: moments[place].bytes)
        node = [*self.graph_module.graph.nodes][place]
        inputs = sum(nbytes(node) for node in self._inputs())
        moment = moments[place]
        return Peak(moment.bytes, moment.parts, inputs, moment.operation, _line_of(node))

    def _inputs(self) -> dict[Node, str]:
        """The part of memory that each input belongs to: by its key path, else by its use."""
        nodes = [node for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        found = {}
        for node, path in zip(nodes, self.paths, strict=True):
            named = next((part for name, part in _NAMED.items() if f"'{name}" in path), None)
            found[node] = named or _used_as(node)
        return found

    def __str__(self) -> str:
        return "\n".join(_shown_line(node, self.axes) for node in self.graph_module.graph.nodes)


# The fields of zf.TrainState.
_NAMED = {"params": "parameters", "opt_state": "optimizer state"}
_ADAM = (  # the lists that zero_fn::adamw takes
    (0, "parameters"),
    (2, "optimizer state"),
    (3, "optimizer state"),
)


def _used_as(node: Node) -> str:
    """What an input is to the optimizer."""
    for user in node.users:
        if op_name(user) in ADAM:
            for place, part in _ADAM:
                if node in user.args[place]:  # type: ignore[operator]
                    return part
    return "other"


def split(value: Any) -> tuple[list[Tensor], Static]:
    """The tensors of a tree, and the rest of it."""
    leaves, treedef = tree.flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) == len(leaves):  # every step comes by here
        return tensors, Static(treedef, (TENSOR,) * len(leaves))
    others = tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return tensors, Static(treedef, others)


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
    kept = [place for place, other in enumerate(arguments.others) if other is TENSOR]
    paths = describe(args)
    names = tuple(paths[place] for place in kept)
    owners = [place for place, argument in enumerate(args) for _ in tree.leaves(argument)]
    donated = tuple(owners[place] in donate for place in kept)
    results: list[Static] = []
    # The same tensor at two places is one input, so that ties can be seen.
    first: dict[int, int] = {}
    slots = [first.setdefault(id(x), place) for place, x in enumerate(tensors)]

    def flat(*inputs: Tensor) -> list[Tensor]:
        given = [inputs[slot] for slot in slots]
        with _Lines():
            out, static = split(f(*join(given, arguments)))
        results[:] = [static]
        return out

    with seen_axes() as axes, fx_traceback.preserve_node_meta():
        graph_module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    sizes = {group: (axis.name, axis.size) for group, axis in axes.items()}
    on_disk = tuple([disk.is_on_disk(x) for x in tensors])
    return Program(graph_module, arguments, results[0], names, donated, sizes, on_disk)


class _Lines(TorchDispatchMode):
    """Notes with each operation the innermost line of a model, or of the user's own code."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta, frame = fx_traceback.get_current_meta(), sys._getframe(1)
        meta["stack_trace"] = ""
        while frame is not None:
            code = frame.f_code
            if code.co_filename == __file__ and code.co_name == "flat":
                break  # what called the traced function made nothing
            if _is_users(frame.f_globals.get("__name__", "")):
                name = Path(code.co_filename).name
                meta["stack_trace"] = f"{name}:{frame.f_lineno} {code.co_name}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))


_LIBRARIES = ("torch", "optree", "einops", "functools", "contextlib", "zero_fn")


@functools.cache
def _is_users(module: str) -> bool:
    return module.startswith("zero_fn.models.") or module.split(".")[0] not in _LIBRARIES


def describe(args: tuple[Any, ...]) -> list[str]:
    """What to call each leaf of the arguments in a message."""
    return [
        f"argument {place}" + (f" at {path!r}" if path else "")
        for place, argument in enumerate(args)
        for path in tree.paths(argument)
    ]


def sharded_inputs(program: Program) -> dict[Node, Sharded]:
    """The inputs that are pieces of a tensor, with the nodes that say how they are cut."""
    places = iter(node for node in program.graph_module.graph.nodes if node.op == "placeholder")
    leaves = [next(places) if other is TENSOR else other for other in program.arguments.others]
    arguments = tree.unflatten(program.arguments.treedef, leaves)
    pieces = tree.leaves(arguments, lambda node: isinstance(node, Sharded))
    return {piece.local: piece for piece in pieces if isinstance(piece, Sharded)}


def _shown_line(node: Node, axes: Mapping[str, tuple[str, int]]) -> str:
    if node.op == "output":
        return f"return {_shown(node.args[0])}"
    value = node.meta.get("val")
    kind = f": {_typed(value)}" if value is not None else ""
    if node.op == "placeholder":
        return f"input {node.name}{kind}"
    if node.op == "get_attr":
        return f"constant {node.name}{kind}"
    name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    arguments = [_shown(x) for x in node.args]
    collective = accounting.kind_of(node)
    notes = [_line_of(node)]
    if collective is not None:
        axis, ranks = axes.get(str(node.args[-1]), (node.args[-1], 1))
        name, arguments = collective, [_shown(node.args[0]), f"{axis}={ranks}"]
        sent = accounting.RING[collective](nbytes(node.args[0]), ranks)
        notes.insert(0, f"sends {size_of(sent)}")
    arguments += [f"{key}={_shown(x)}" for key, x in node.kwargs.items()]
    note = "; ".join(filter(None, notes))
    return f"{node.name}{kind} = {name}({', '.join(arguments)})" + (f"  # {note}" if note else "")


def _line_of(node: Node) -> str:
    return node.meta.get("stack_trace", "")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(x) for x in value)}]"
    return value.name if isinstance(value, Node) else str(value)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def _typed(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        word = re.match(r"(bfloat|float|uint|int)(?=\d+$)", dtype)
        dtype = _SHORT[word[0]] + dtype[word.end() :] if word else dtype
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    return f"({', '.join(_typed(x) for x in value)})" if isinstance(value, tuple | list) else "?"
