"""A graph put into a trace that is under way, node by node.

A stage's programs run once for each micro-batch. In a trace they need not run again to be known:
their nodes are copied, with what they say of shapes, which takes a small part of the time.
"""

from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

from ..tree import Tensor


def spliced(graph: Graph, box: list[Tensor]) -> list[Tensor] | None:
    """What the graph gives, in the trace that is under way; None if it cannot be put in there.

    Args:
        graph: with one input, a list of tensors, from whose end it takes them one by one; and a
            list of tensors as its output.
        box: that list, which is emptied.
    """
    mode = get_proxy_mode()
    if mode is None or any(node.op == "get_attr" for node in graph.nodes):
        return None
    tracer: Any = mode.tracer
    found: list[Any] = [get_proxy_slot(x, tracer, None) for x in box]
    if any(known is None for known in found):
        return None  # a constant of the trace
    copies: dict[Node, Node] = {}
    given: dict[Node, Tensor] = {}  # what is handed on as it came
    for node in graph.nodes:
        if node.op == "call_method":
            given[node], copies[node] = box.pop(), found.pop().proxy.node
        elif node.op == "call_function":
            copies[node] = tracer.graph.node_copy(node, copies.__getitem__)
        elif node.op == "output":
            return [_value(x, copies[x], given, tracer) for x in node.args[0]]
    raise AssertionError("a graph ends in its output")


def _value(node: Node, copy: Node, given: dict[Node, Tensor], tracer: Any) -> Tensor:
    """A tensor that stands for a node of the trace."""
    if node not in given:
        val = copy.meta["val"]
        with disable_proxy_modes_tracing():
            x = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
        track_tensor_tree(x, Proxy(copy, tracer), constant=None, tracer=tracer)
        given[node] = x
    return given[node]
