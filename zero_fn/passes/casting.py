"""Casting: what is widened and narrowed again is used as it was.

A parameter that travels in low precision arrives in its own dtype, for its gradient's sake, and is
cast to the dtype of the computation. Between the two a copy in float32 would be alive, and hide
from other passes that a gather is read. And what crosses between the host and a device crosses in
the narrower dtype.
"""

from typing import Any

import torch
from torch.fx import Node

from ..graphs import call, is_crossing, is_view, readers
from ..program import Program

_CAST = torch.ops.aten._to_copy.default


def cast_directly(program: Program) -> Program:
    """Let a cast back to the dtype that a value came from read that value, through views."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if _is_cast(node)]:
        source = node.args[0]
        while isinstance(source, Node) and is_view(source) and len(source.all_input_nodes) == 1:
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
            narrow = _again(_views_to(node.args[0], source), narrow)
        node.replace_all_uses_with(narrow)
        _erase(node)
    return program


def cross_narrow(program: Program) -> Program:
    """Let values cross between the host and a device in the narrower of two dtypes.

    A parameter is cast for its use before it goes to the device, and a gradient that was widened
    for its sum, and summed over no ranks, after it came to the host (arXiv 2101.06840).
    """
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if is_crossing(node)]:
        if not _cast_before(node):
            _widen_after(node)
    return program


def _cast_before(node: Node) -> bool:
    """Where all that reads a copy casts it to one narrower dtype, cast what is copied."""
    graph, value = node.graph, node.meta["val"]
    casts = [*readers(node)]
    dtypes = {cast.meta["val"].dtype for cast in casts if _is_cast(cast)}
    if len(dtypes) != 1 or not all(map(_is_cast, casts)):
        return False
    (dtype,) = dtypes
    if dtype.itemsize >= value.dtype.itemsize:
        return False
    with graph.inserting_before(node):
        narrow = call(graph, _CAST, node.args[0], dtype=dtype)
        there = call(graph, _CAST, narrow, device=value.device)
    for cast in casts:
        with graph.inserting_before(cast):
            cast.replace_all_uses_with(_again(_views_to(cast.args[0], node), there))
        _erase(cast)
    return True


def _widen_after(node: Node) -> None:
    """Copy what a value was widened from, and widen the copy."""
    graph, value = node.graph, node.meta["val"]
    source: Any = node.args[0]
    while is_view(source) and len(source.users) == 1 and len(source.all_input_nodes) == 1:
        source = source.args[0]
    if not _is_cast(source) or len(source.users) > 1:
        return
    narrow = source.args[0]
    dtype = narrow.meta["val"].dtype
    lossless = torch.promote_types(dtype, value.dtype) == value.dtype
    if dtype == value.dtype or not lossless or dtype.itemsize >= value.dtype.itemsize:
        return
    with graph.inserting_before(node):
        narrow = _again(_views_to(node.args[0], source), narrow)
        there = call(graph, _CAST, narrow, device=value.device)
        wide = call(graph, _CAST, there, dtype=value.dtype)
    node.replace_all_uses_with(wide)
    _erase(node)


def _views_to(node: Any, source: Node) -> list[Node]:
    """The views between two nodes, the last of which is ``node``."""
    chain: list[Node] = []
    while node is not source:
        chain.insert(0, node)
        node = node.args[0]
    return chain


def _again(chain: list[Node], start: Node) -> Node:
    """The same views of another node."""
    for view in chain:
        start = call(view.graph, view.target, start, *view.args[1:], **view.kwargs)
    return start


def _erase(node: Node) -> None:
    """Remove a node, and what only it used."""
    used = node.all_input_nodes
    node.graph.erase_node(node)
    for source in used:
        if not source.users and source.op != "placeholder":
            _erase(source)


def _is_cast(node: Node) -> bool:
    """Whether a node changes the dtype and nothing else."""
    source = node.args[0] if node.target is _CAST else None
    if not isinstance(source, Node) or set(node.kwargs) - {"dtype", "layout", "device"}:
        return False
    before, after = source.meta["val"], node.meta["val"]
    return before.device == after.device and before.layout == after.layout
