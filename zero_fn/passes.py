"""Passes: functions from a program to a program.

A pass changes how a step runs, never what it computes. ``zf.jit(step, passes=[...])`` runs a user's
own after the built-in ones.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from .program import Program, base

Pass = Callable[[Program], Program]


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
            _copied(node) if isinstance(node, Node) and base(node) in kept else node
            for node in output.args[0]
        ]
    output.args = (results,)
    return _rebuilt(program)


def update_in_place(program: Program) -> Program:
    """Write new state into the memory of the donated state it replaces.

    The fused Adam updates parameters and moments in place, and ``p + u`` becomes an in-place
    addition, where the old value is a donated argument that nothing reads afterwards.
    """
    graph = program.graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    donated = {node for node, free in zip(inputs, program.donated, strict=True) if free}
    order = {node: place for place, node in enumerate(graph.nodes)}
    readers = _readers(program)

    def free_after(old: object, user: Node) -> bool:
        return (
            isinstance(old, Node)
            and old in donated
            and all(order[reader] <= order[user] for reader in readers[old])
        )

    for node in list(graph.nodes):
        if node.target is torch.ops.aten.add.Tensor and not node.kwargs:
            old, added = node.args
            apart = not isinstance(added, Node) or base(added) is not old
            if free_after(old, node) and _same(old, node) and apart:
                with graph.inserting_before(node):
                    new = graph.call_function(torch.ops.aten.add_.Tensor, (old, added))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                donated.discard(old)
    return _rebuilt(program)


def _readers(program: Program) -> dict[Node, list[Node]]:
    """For each node, the nodes that read its memory, itself or through views."""
    readers: dict[Node, list[Node]] = {node: [] for node in program.graph_module.graph.nodes}
    for node in program.graph_module.graph.nodes:
        for used in node.all_input_nodes:
            if base(node) is node:
                readers[base(used)].append(node)
    return readers


def _same(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def _copied(node: Node) -> Node:
    copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _rebuilt(program: Program) -> Program:
    program.graph_module.graph.lint()
    program.graph_module.recompile()
    return dataclasses.replace(program)
