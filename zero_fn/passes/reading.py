"""Reading ahead: parameters on disk are on their way into memory before they are used.

A leaf in a file is read where it is used, at its gather say, and the step would wait for the disk
there. So the system is told of each such read when the one before it begins (ZeRO-Infinity, arXiv
2104.07857, section 5.2): the disk works while that is computed with.
"""

from itertools import pairwise

import torch
from torch.fx import Node

from ..graphs import op_name, order, readers
from ..program import Program

OWN = ("zero_fn::adamw_stream_", "zero_fn::next_slot")  # reads ahead itself; reads nothing


def read_ahead(program: Program) -> Program:
    """Let the disk begin with the next leaf when a leaf is read."""
    if not any(program.on_disk):
        return program
    graph = program.graph_module.graph
    place = order(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    reads: list[tuple[Node, Node]] = []
    for leaf, filed in zip(inputs, program.on_disk, strict=True):
        if filed:
            uses = {use for use in readers(leaf) if use.op != "output" and op_name(use) not in OWN}
            reads += [(use, leaf) for use in uses]
    reads.sort(key=lambda read: place[read[0]])
    for (use, leaf), (_, following) in pairwise(reads):
        if following is not leaf:
            with graph.inserting_before(use):
                graph.call_function(torch.ops.zero_fn.read_ahead.default, (following,))
    return program
