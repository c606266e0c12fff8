"""Casting: what is widened and narrowed again is used as it was.

A parameter that travels in low precision arrives in its own dtype, for its gradient's sake, and is
cast to the dtype of the computation. Between the two a copy in float32 would be alive, and hide
from other passes that a gather is read.
"""

from typing import Any

import torch
from torch.fx import Node

from ..graphs import call, is_view
from ..program import Program

_CAST = torch.ops.aten._to_copy.default


def cast_directly(program: Program) -> Program:
    """Let a cast back to the dtype that a value came from read that value, through views."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if _is_cast(node)]:
        chain: list[Node] = []
        source = node.args[0]
        while isinstance(source, Node) and is_view(source) and len(source.all_input_nodes) == 1:
            chain.insert(0, source)
            source = source.args[0]
        if not (isinstance(source, Node) and _is_cast(source)):
            continue
        narrow: Any = source.args[0]
        dtype = node.meta["val"].dtype
        between = source.meta["val"].dtype
        lossless = torch.promote_types(dtype, between) == between
        if narrow.meta["val"].dtype != dtype or not lossless:
            continue
        with graph.inserting_before(node):
            for view in chain:
                narrow = call(graph, view.target, narrow, *view.args[1:], **view.kwargs)
        node.replace_all_uses_with(narrow)
        for unused in [node, *reversed(chain), source]:
            if not unused.users:
                graph.erase_node(unused)
    return program


def _is_cast(node: Node) -> bool:
    """Whether a node changes the dtype and nothing else."""
    return node.target is _CAST and set(node.kwargs) == {"dtype"}
