"""The update follows the data: new values of leaves on disk are written to their files.

Every donated leaf on disk has its counterpart among the results, at the same place of the state.
Where that is the fused Adam's, the op is replaced by one that streams through the files by chunks;
any other value is written as soon as it exists, one whole leaf in memory at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .. import streaming, tree
from ..graphs import base, op_name
from ..program import TENSOR, Program, Static
from .donation import Free, adam_leaves, copied, rewritten

assert streaming  # whose ops the pass puts into graphs


def write_to_disk(program: Program) -> Program:
    """Write the new values of donated leaves on disk into their files.

    Raises:
        ValueError: if a state on disk is not donated, or comes back with another structure.
    """
    if not any(program.on_disk):
        return program
    graph = program.graph_module.graph
    slots: dict[Node, Node] = {}

    def slot_of(old: Node) -> Node:
        if old not in slots:
            slots[old] = graph.call_function(torch.ops.zero_fn.next_slot.default, (old,))
            slots[old].meta = dict(old.meta)
        return slots[old]

    pairs = dict(_pairs(program))
    for node in list(graph.nodes):
        if op_name(node) == "zero_fn::adamw":
            _stream_adam(program, node, set(pairs), slot_of)
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    for old, place in pairs.items():
        new = results[place]
        if new is old or new is slots.get(old):
            continue
        with graph.inserting_before(output if new.op == "placeholder" else new.next):
            slot = slot_of(old)
            graph.call_function(torch.ops.zero_fn.store_.default, (slot, new))
        results[place] = slot
    with graph.inserting_before(output):
        for place in set(range(len(results))) - set(pairs.values()):
            # A file is overwritten by the step after the next: what is no leaf of it is a copy.
            if isinstance(results[place], Node) and base(results[place]) in pairs:
                results[place] = copied(results[place])
    output.args = (results,)
    return program


def _stream_adam(program: Program, node: Node, on_disk: set[Node], slot_of: Any) -> None:
    """Stream those leaves of a fused Adam of which some part is on disk and no part is kept."""
    free = Free(program, on_disk=True)
    sums = {
        place: new
        for place, new in adam_leaves(node, free).items()
        if on_disk & {node.args[i][place] for i in (0, 2, 3)}  # type: ignore[index]
    }
    if not sums:
        return

    def streamed(arguments: tuple[Any, ...]) -> list[list[Node]]:
        params, grads, *moments = arguments[:4]
        states = [params, *moments]
        old = [x for column in states for x in column if x in on_disk]
        new = [[slot_of(x) if x in on_disk else x for x in column] for column in states]
        flat = [x for column in new for x in column]
        node.graph.call_function(
            torch.ops.zero_fn.adamw_stream_.default, (flat, grads, old, *arguments[4:])
        )
        return new

    rewritten(node, sums, streamed)


def _pairs(program: Program) -> Iterator[tuple[Node, int]]:
    """The donated inputs on disk, each with the place of its new value among the results."""
    graph = program.graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    out = _numbered(program.results)
    first = out[0] if isinstance(out, tuple | list) and len(out) else out
    for argument in _numbered(program.arguments):
        before, treedef = tree.flatten(argument)
        here = [i for i in before if i is not _None and program.on_disk[i]]
        if not here:
            continue
        same = [new for new in (out, first) if tree.flatten(new)[1] == treedef]
        donated = program.donated[here[0]]
        path = program.paths[here[0]]
        if same and not donated:
            raise ValueError(
                f"{path} is on disk, and its new value would be in memory: donate the state, "
                "zf.jit(step, donate=0) or zf.train_step(..., donate=True), and it goes to its file"
            )
        if donated and not same:
            raise ValueError(
                f"{path} is on disk, and the step does not return such a state: a donated argument "
                "comes back with the same structure, as the result or the first of a tuple"
            )
        if donated:
            after = tree.leaves(same[0])
            for old, new in zip(before, after, strict=True):
                if old is not _None and new is not _None and program.on_disk[old]:
                    _check_same(program, inputs[old], new, program.paths[old])
                    yield inputs[old], new


def _check_same(program: Program, old: Node, place: int, path: str) -> None:
    x = old.meta["val"]
    y = next(iter(reversed(program.graph_module.graph.nodes))).args[0][place].meta["val"]
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
            f"{path} is on disk as {x.dtype} of shape {tuple(x.shape)}, and its new value is "
            f"{y.dtype} of shape {tuple(y.shape)}"
        )


class _None:
    """Stands for a leaf that is no tensor."""


def _numbered(static: Static) -> Any:
    """A tree with the number of each tensor in its place, and _None at other leaves."""
    count = iter(range(len(static.others)))
    leaves = [next(count) if other is TENSOR else _None for other in static.others]
    return tree.unflatten(static.treedef, leaves)
