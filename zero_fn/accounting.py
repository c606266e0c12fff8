"""Accounting: what a graph of operations sends, computes and holds in memory."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, Node

from .graphs import (
    ADAM,
    WAIT,
    arrivals,
    base,
    departures,
    is_alias,
    is_item,
    is_view,
    nbytes,
    op_name,
    origin,
    parts,
    prepared,
    views,
)

Place = Literal["device", "host"]
# The ring algorithm's bytes that a rank sends, from the bytes it puts in and the number of ranks.
RING: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) // n,
    "all_gather": lambda size, n: size * (n - 1),
    "reduce_scatter": lambda size, n: size * (n - 1) // n,
    "all_to_all": lambda size, n: size * (n - 1) // n,
    "send": lambda size, n: size,
}
_KIND = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
PARTS = (
    "parameters",
    "gathered parameters",
    "gradients",
    "optimizer state",
    "activations",
    "other",
)


class Collective(NamedTuple):
    """The collectives of one kind over one axis.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; ``send`` for
            the messages of a pipeline.
        axis: the mesh axis' name.
        calls: how many there are.
        bytes_in: what one rank puts in, over all of them.
        bytes_sent: what one rank sends, over all of them, by the ring algorithm.
    """

    kind: str
    axis: str
    calls: int
    bytes_in: int
    bytes_sent: int


class Work(NamedTuple):
    """What one operation has to do.

    Attributes:
        flops: floating-point operations of a matrix product, convolution or attention; else 0.
        bytes: what it reads and writes.
        dtype: of what it reads first; None if it reads no tensor.
    """

    flops: int
    bytes: int
    dtype: torch.dtype | None


class Moment(NamedTuple):
    """What is alive while one operation runs.

    Attributes:
        operation: its name in the program.
        bytes: what is alive.
        parts: the same, split into :data:`PARTS`.
    """

    operation: str
    bytes: int
    parts: Mapping[str, int]


def kind_of(node: Node) -> str | None:
    """The kind of a collective or message; None for other operations."""
    if op_name(node) == "zero_fn::send":
        return "send"
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "_c10d_functional":
        return None
    return _KIND.get(node.target.__name__.split(".")[0])  # type: ignore[union-attr]


def collectives(graph: Graph, axes: Mapping[str, tuple[str, int]]) -> list[Collective]:
    """The collectives of a graph.

    Args:
        graph: the graph of one rank.
        axes: for each process group, the axis' name and size.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for node in graph.nodes:
        kind = kind_of(node)
        if kind is not None:
            axis, ranks = axes[node.args[-1]]
            size = nbytes(node.args[0])
            entry = found.setdefault((kind, axis), [0, 0, 0])
            entry[:] = entry[0] + 1, entry[1] + size, entry[2] + RING[kind](size, ranks)
    return [Collective(kind, axis, *counted) for (kind, axis), counted in found.items()]


def flops(graph: Graph) -> int:
    """The floating-point operations of matrix products, convolutions and attention."""
    return sum(_flops(node) for node in graph.nodes if node.op == "call_function")


def work(graph: Graph) -> list[Work]:
    """What each operation has to do; views and collectives have nothing to do."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or kind_of(node) or is_item(node):
            continue
        read = sum(nbytes(used) for used in node.all_input_nodes)
        made = sum(size for _, size in parts(node))
        if op_name(node) in ADAM and not made:  # writes where it reads, all but the gradients
            made = read - sum(nbytes(x) for x in node.args[1])
        values = (used.meta.get("val") for used in node.all_input_nodes)
        dtypes = [x.dtype for x in values if isinstance(x, torch.Tensor)]
        found.append(Work(_flops(node), read + made, dtypes[0] if dtypes else None))
    return found


def _counter() -> Any:
    """torch's formulas; imported when they are used, because they bring torch._dynamo."""
    return importlib.import_module("torch.utils.flop_counter")


def _added_product(_: Any, a: Any, b: Any, **__: Any) -> int:
    return int(_counter().mm_flop(a.shape, b.shape))


def _attention_on_cpu(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(_counter().sdpa_flop_count(q.shape, k.shape, v.shape))


def _attention_backward_on_cpu(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(_counter().sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))


_aten = torch.ops.aten
# Values in, FLOPs out; torch's own registry does not know these.
FLOPS: dict[Any, Callable[..., int]] = {
    _aten.addmm_: _added_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_on_cpu,
}


def _flops(node: Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    if packet in FLOPS:
        return FLOPS[packet](*args, **kwargs)
    registry = _counter().flop_registry
    if packet in registry:
        return int(registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return 0


def on_host(graph: Graph) -> set[Node]:
    """What lives in the host's memory: what is moved there, and beside a device all on a CPU."""
    nodes = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    cpu = {node for node in nodes if node.meta["val"].device.type == "cpu"}
    moved = {node for node in cpu if op_name(node) == "zero_fn::to_host"}
    return cpu if len(cpu) < len(nodes) else moved


def timeline(
    graph: Graph,
    inputs: Mapping[Node, str],
    at: Place = "device",
    filed: Set[Node] = frozenset(),
) -> list[Moment]:
    """What is alive on the device, or in the host's memory, while each operation runs.

    Inputs are alive throughout; what an operation makes, from there to its last use, and what a
    collective sends, until its result is waited for. Views count once, with what they look at. The
    files that new state is written to are no memory.

    Args:
        graph: the graph.
        inputs: the part that each input belongs to.
        at: whose memory to count.
        filed: the inputs that are files, which count nowhere here.
    """
    nodes = [*graph.nodes]
    there, host = on_host(graph), at == "host"
    files = {*filed, *(node for node in nodes if op_name(node) == "zero_fn::next_slot")}
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        sent = node.args[0].all_input_nodes if node.target is WAIT else []
        for used in [*node.all_input_nodes, *sent]:
            last[base(used)] = last[used] = place
    belongs = _parts_of(nodes, inputs)
    alive = dict.fromkeys(PARTS, 0)
    for node, part in inputs.items():
        if (node in there) is host and node not in files:
            alive[part] += nbytes(node)
    ending: dict[int, list[tuple[str, int]]] = {}
    moments = []
    for place, node in enumerate(nodes):
        if _allocates(node):
            for result, size in parts(node):
                if (result in there) is not host or result in files:
                    continue
                part = belongs.get(node, "other")
                alive[part] += size
                ending.setdefault(last.get(result, place), []).append((part, size))
        moments.append(Moment(_named(node), sum(alive.values()), dict(alive)))
        for part, size in ending.pop(place, []):
            alive[part] -= size
    return moments


def _allocates(node: Node) -> bool:
    if node.op != "call_function" or is_alias(node) or is_item(node):
        return False
    return op_name(node) != "zero_fn::next_slot"  # a file


def _parts_of(nodes: Sequence[Node], inputs: Mapping[Node, str]) -> dict[Node, str]:
    """The part of memory that each operation's result belongs to.

    What a gather of parameters makes is a gathered parameter; what is reduced or handed to the
    optimizer as a gradient, and what prepares and follows it, is a gradient; what comes before the
    last gradient is an activation, what comes after is neither.
    """
    found: dict[Node, str] = {}
    gradients: list[Node] = []
    arriving, leaving = set(arrivals(nodes)), set(departures(nodes))
    for node in nodes:
        kind = kind_of(node)
        if node in arriving and inputs.get(origin(node)) == "parameters":
            _claim(found, "gathered parameters", [*prepared(node), node])
        elif node in leaving:
            gradients += [*prepared(node), node]
        elif kind == "all_gather" and inputs.get(_first_origin(node)) == "parameters":
            whole = [*prepared(node), base(node), node, *_copies(node)]
            _claim(found, "gathered parameters", whole)
        elif kind in ("all_reduce", "reduce_scatter", "all_to_all"):
            gradients += [node, *_sources(node)]
        elif op_name(node) in ADAM:
            gradients += [base(x) for x in node.args[1]]  # type: ignore[union-attr,arg-type]
    _claim(found, "gradients", [node for node in gradients if node.op == "call_function"])
    known = set(gradients)
    end = max((place for place, node in enumerate(nodes) if node in known), default=-1)
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            found.setdefault(node, "activations" if place <= end else "other")
    return found


def _claim(found: dict[Node, str], part: str, nodes: Iterable[Node]) -> None:
    for node in nodes:
        found.setdefault(node, part)


def _sources(collective: Node) -> list[Node]:
    """What a reduction sends, through buckets, paddings and copies."""
    found, waiting = [], [collective.args[0]]
    while waiting:
        node = base(waiting.pop())  # type: ignore[arg-type]
        found.append(node)
        if node.target in (_aten.cat.default, _aten.clone.default, _aten.constant_pad_nd.default):
            waiting += node.all_input_nodes
    return found


def _first_origin(gather: Node) -> Node:
    source = origin(gather)
    if source.target is _aten.cat.default:  # a bucket
        source = base(source.all_input_nodes[0])
    return source


def _copies(gather: Node) -> list[Node]:
    """The copies that a bucket's members are taken out by."""
    return [
        user for view in views(gather) for user in view.users if user.target is _aten.clone.default
    ]


def _named(node: Node) -> str:
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}"
