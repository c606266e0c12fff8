"""Lowering: collectives as their backend does them best. These passes come last."""

import torch

from ..graphs import (
    ALL_GATHER,
    ALL_GATHER_OUT,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    base,
    c10d,
    call,
    readers,
    wait_of,
    written,
)
from ..mesh import is_gloo
from ..program import Program

aten = torch.ops.aten


def reduce_in_place(program: Program) -> Program:
    """Reduce into the memory of the summand, where nothing else reads it."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target is ALL_REDUCE]:
        source = base(node.args[0])
        own = source.op == "call_function" and not written(source)
        if own and [*readers(source)] == [node] and node.args[0].meta["val"].is_contiguous():
            node.target = c10d.all_reduce_.default
    return program


def exchange_on_gloo(program: Program) -> Program:
    """On Gloo, reduce-scatter as an exchange of summands that each rank adds up by itself.

    Gloo's own reduces everything on every rank and throws most of it away: twice the bytes.
    """
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target is REDUCE_SCATTER]:
        x, operation, ranks, group = node.args
        wait = wait_of(node)
        if operation != "sum" or wait is None or not is_gloo(group, x.meta["val"].device):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            parts = [value.shape[0]] * ranks
            sent = call(graph, ALL_TO_ALL, x, parts, parts, group)
        with graph.inserting_before(wait):
            rows = call(graph, aten.view.default, call(graph, WAIT, sent), [ranks, *value.shape])
            total = call(graph, aten.sum.dim_IntList, rows, [0], dtype=value.dtype)
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(node)
    return program


def gather_on_gloo(program: Program) -> Program:
    """On Gloo, gather into memory that is given.

    Where torch allocates the result, it takes Gloo's path for several tensors at once, and with
    more than one gather under way that corrupts the heap (torch 2.13;
    ``tests/benchmarks/gathers.py`` counts the crashes).
    """
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target is ALL_GATHER]:
        x, ranks, group = node.args
        if is_gloo(group, x.meta["val"].device):
            with graph.inserting_before(node):
                shape = [*node.meta["val"].shape]
                out = call(graph, aten.new_empty.default, x, shape)
                gathered = call(graph, ALL_GATHER_OUT, x, ranks, group, out=out)
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)
    return program
