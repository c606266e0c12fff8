"""Placed nodes: nodes of a tree that say over which mesh axes their tensors vary.

Such a node (``Sharded``, say) has an attribute ``axes``, and its class ``__zero_fn_placed__``. It
stands for one tensor and has its ``shape``; or it holds a tree, and ranks have different trees.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from . import tree
from .tree import PyTree


def is_placed(node: Any) -> bool:
    """Whether a node says itself over which axes its tensors vary."""
    return hasattr(node, "axes") and hasattr(type(node), "__zero_fn_placed__")


class Leaf(NamedTuple):
    """One leaf of a tree that holds placed nodes.

    Attributes:
        path: its key path, which names the outermost placed node around it.
        value: the leaf.
        axes: the mesh axes over which it varies, those of all placed nodes around it.
        shape: the shape of the whole tensor.
        placed: whether there is a placed node around it.
        copy: whether it is a copy of a leaf that another rank holds.
    """

    path: str
    value: Any
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    placed: bool
    copy: bool = False


def placed_leaves(value: PyTree, path: str = "") -> list[Leaf]:
    """The leaves of a tree, in order, each with what the placed nodes around it say."""
    return list(_walk(value, Leaf(path, None, (), (), False), False))


def tree_axes(value: PyTree) -> tuple[str, ...]:
    """The axes along which ranks hold different leaves, as the stages of a pipeline do."""
    nodes = tree.leaves(value, _holds_tree)
    return tuple(sorted({axis for node in nodes if _holds_tree(node) for axis in node.axes}))


def _holds_tree(node: Any) -> bool:
    return is_placed(node) and not hasattr(node, "shape")


def _walk(value: PyTree, around: Leaf, named: bool) -> Iterator[Leaf]:
    """The leaves, given what the nodes around say, and whether one of them names all of them."""
    tops = tree.leaves(value, is_placed)
    for where, top in zip(tree.paths(value, is_placed), tops, strict=True):
        here = around if named else around._replace(path=tree.join_path(around.path, where))
        if not is_placed(top):
            shape = here.shape if named else tuple(getattr(top, "shape", ()))
            yield here._replace(value=top, shape=shape)
            continue
        one = not _holds_tree(top)
        here = here._replace(axes=here.axes + top.axes, placed=True)
        here = here._replace(copy=here.copy or getattr(top, "is_copy", False))
        if one and not named:
            here = here._replace(shape=tuple(top.shape))
        for child in tree.children(top):
            yield from _walk(child, here, named or one)
