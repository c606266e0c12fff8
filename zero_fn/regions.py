"""Where the tensors of a state lie in the whole ones, as boxes: ranges along each dimension.

A piece of a flattened tensor, a slice with sections or padding, a piece of such a slice: each is a
few boxes of the whole tensor, views of this rank's memory. Whoever knows the boxes needs neither
the mesh nor the stage that cut them, which is how a checkpoint of one is read on another.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import tree
from .feedback import PerRank
from .mesh import Mesh
from .pipelining.staging import Copy, Staged
from .placed import is_placed
from .sharding import Flat, Replicated, Sharded
from .slicing import Sliced
from .tree import PyTree, Tensor

Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A part of a whole tensor.

    Attributes:
        offsets: where it starts along each dimension.
        sizes: how long it is there.
        local: its values, a view of the state's memory where that is contiguous.
    """

    offsets: Sizes
    sizes: Sizes
    local: Tensor


class Whole(NamedTuple):
    """A tensor of the state: its whole shape, and the boxes of it that are here."""

    shape: Sizes
    dtype: torch.dtype
    boxes: list[Box]


class _Leaf(NamedTuple):
    path: str
    value: Any
    nodes: tuple[Any, ...]  # the placed nodes around it, from the outermost


def find_wholes(state: PyTree, mesh: Mesh) -> dict[str, Whole | Any]:
    """The leaves of a state by key path: a :class:`Whole` for each tensor, others as they are.

    Args:
        state: as a step returns it, outside ``spmd``.
        mesh: the mesh it lives on.

    Raises:
        TypeError: for a placed node of a class that nothing is known about.
    """
    return {leaf.path: _whole(leaf, mesh) for leaf in _leaves(state, "", ())}


def leaf_names(state: PyTree) -> list[str]:
    """The key path of each leaf, in the order of ``tree.leaves``; copies have the same."""
    return [leaf.path for leaf in _leaves(state, "", ())]


def flat_boxes(shape: Sizes, start: int, stop: int) -> list[tuple[Sizes, Sizes]]:
    """The values from ``start`` to ``stop`` of a flattened tensor, as (offsets, sizes) in order.

    >>> flat_boxes((3, 4), 2, 9)
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row, boxes = math.prod(shape[1:]), []
    while start < stop:
        place, inside = divmod(start, row)
        rows = 0 if inside else (stop - start) // row
        if rows:
            boxes.append(((place, *(0 for _ in shape[1:])), (rows, *shape[1:])))
            start += rows * row
            continue
        end = min(stop - place * row, row)
        boxes += [
            ((place, *offsets), (1, *sizes))
            for offsets, sizes in flat_boxes(shape[1:], inside, end)
        ]
        start = place * row + end
    return boxes


def is_general(node: Any) -> bool:
    """Whether a node is cut by a scheme that promises no more than to gather what it scatters."""
    return isinstance(node, Sharded) and not (_is_flat(node) or _is_whole(node))


def _is_flat(node: Sharded) -> bool:
    kind = type(node.scheme)
    return kind.scatter is Flat.scatter and kind.gather is Flat.gather and kind.axes is Flat.axes


def _is_whole(node: Sharded) -> bool:
    return type(node.scheme).scatter is Replicated.scatter


def _leaves(value: PyTree, path: str, nodes: tuple[Any, ...], stages: str = "") -> Iterator[_Leaf]:
    """The leaves under ``path``; ``stages`` is the key path of the stages around them."""
    named = any(not isinstance(node, Staged) for node in nodes)  # one stands for the leaf
    tops = tree.leaves(value, is_placed)
    for where, top in zip(tree.paths(value, is_placed), tops, strict=True):
        here = path if named else tree.join_path(path, where)
        if not is_placed(top):
            yield _Leaf(here, top, nodes)
            continue
        if isinstance(top, Staged):
            stages = here.rpartition(".")[0]
        if isinstance(top, Copy):  # goes by the name of the leaf that it equals
            here = tree.join_path(stages, top.of)
        for child in tree.children(top):
            yield from _leaves(child, here, (*nodes, top), stages)


def _whole(leaf: _Leaf, mesh: Mesh) -> Whole | Any:
    if not isinstance(leaf.value, Tensor):
        return leaf.value
    known = Staged | Copy | PerRank | Sliced | Sharded
    for node in leaf.nodes:
        if not isinstance(node, known):
            raise TypeError(
                f"{leaf.path!r} is in a {type(node).__name__}, of which is not known how it lies "
                "in the whole tensor; gather it first, zf.gather_tree(state, mesh)"
            )
    axes = [name for node in leaf.nodes for name in node.axes]
    if mesh.interpreter == "processes":
        ranks = [({name: axis.place for name, axis in mesh.axes.items()}, leaf.value)]
    else:
        stacked = [name for name, size in mesh.shape.items() if name in axes and size > 1]
        ranks = [
            (dict(zip(stacked, place, strict=True)), leaf.value[place] if place else leaf.value)
            for place in itertools.product(*(range(mesh.shape[name]) for name in stacked))
        ]
    outer = [node for node in leaf.nodes if isinstance(node, PerRank | Sliced | Sharded)]
    shape = tuple(outer[0].shape) if outer else tuple(leaf.value.shape)
    if outer and isinstance(outer[0], PerRank):
        shape = (mesh.shape[outer[0].axis], *shape)
    if 0 in shape:
        empty = Box((0,) * len(shape), shape, leaf.value.new_empty(shape))
        return Whole(shape, leaf.value.dtype, [empty])
    boxes = [box for places, local in ranks for box in _boxes(outer, shape, local, places, mesh)]
    return Whole(shape, leaf.value.dtype, boxes)


def _boxes(
    nodes: Sequence[Any], shape: Sizes, local: Tensor, places: Mapping[str, int], mesh: Mesh
) -> list[Box]:
    """The boxes of one rank's tensor."""
    if not nodes:
        return [Box((0,) * len(shape), shape, local)]
    node, inner = nodes[0], nodes[1:]
    if isinstance(node, PerRank):
        corner = (places.get(node.axis, 0), *(0 for _ in node.shape))
        return [Box(corner, (1, *node.shape), local.unsqueeze(0))]
    if isinstance(node, Sliced):
        part = tuple(inner[0].shape) if inner else tuple(local.shape)
        boxes = _boxes(inner, part, local, places, mesh)
        if node.rule is None:
            return boxes
        return [b for box in boxes for b in _of_slice(box, node, part, places.get(node.axis, 0))]
    if _is_whole(node):
        return [Box((0,) * len(shape), shape, local)]
    axes = (node.axis,) if isinstance(node.axis, str) else node.axis
    place = 0
    for name in axes:
        place = place * mesh.shape[name] + places.get(name, 0)
    flat, total = local.reshape(-1), math.prod(shape)
    start, boxes, done = place * flat.numel(), [], 0
    for offsets, sizes in flat_boxes(shape, start, min(start + flat.numel(), total)):
        length = math.prod(sizes)
        boxes.append(Box(offsets, sizes, flat[done : done + length].view(sizes)))
        done += length
    return boxes


def _of_slice(box: Box, node: Sliced, part: Sizes, place: int) -> Iterator[Box]:
    """A box of a slice, as boxes of the whole tensor: one a section, none of padding."""
    assert node.rule is not None
    dim = node.rule.dim
    sections = node.rule.sections or (part[dim] * node.parts,)
    before = start = 0  # where the section starts in the slice, and in the whole tensor
    for size in sections:
        share = size // node.parts
        low = max(box.offsets[dim], before)
        high = min(box.offsets[dim] + box.sizes[dim], before + share)
        to = start + place * share + low - before
        length = min(high - low, node.shape[dim] - to)
        if length > 0:
            local = box.local.narrow(dim, low - box.offsets[dim], length)
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = to, length
            yield Box(tuple(offsets), tuple(sizes), local)
        before, start = before + share, start + size
