"""Frozen leaves: a tree of parameters as two, one that is trained and one that is not.

Both have the shape of the whole; where a leaf is in the other, they have ``None``, which is no
leaf. So an optimizer makes no moments for what is frozen, no gradient of it is computed, reduced or
counted in a norm, and nothing above needs to know.
"""

from typing import Any

from . import tree
from .collectives import AxisName, agreed
from .placed import is_placed
from .sharding import Scheme, Sharded, Tied, scheme_of, shard
from .tree import PyTree, Where


def freeze(params: PyTree, frozen: Where) -> tuple[PyTree, PyTree]:
    """The leaves that are trained, and those that are not, as two trees of the same shape.

    Args:
        params: a tree of tensors, pieces or slices. The same tensor at two places goes where its
            first place goes.
        frozen: patterns of key paths as in ``fnmatch`` (``["embed.*"]``), or a function of (key
            path, shape) that says which leaves are frozen.

    Returns:
        ``(trained, frozen)``, each with None where the leaf is in the other; :func:`merge` puts
        them together.

    Raises:
        ValueError: for a pattern that matches no leaf, or if nothing is left to train.
    """
    nodes = tree.leaves(params, _is_unit)
    paths = tree.paths(params, _is_unit)
    held = tree.chosen(frozen, paths, nodes, "frozen")
    first: dict[Any, bool] = {}
    for i, (path, node) in enumerate(zip(paths, nodes, strict=True)):
        held[i] = first.setdefault(id(node), held[i])
        held[i] = first.setdefault(node.to if isinstance(node, Tied) else path, held[i])
    if nodes and all(held):
        raise ValueError("every leaf is frozen, and none is left to train")

    def side(wanted: bool) -> PyTree:
        return _rebuilt(
            params, [node if h is wanted else None for node, h in zip(nodes, held, strict=True)]
        )

    return side(False), side(True)


def merge(trained: PyTree, *others: PyTree) -> PyTree:
    """The tree that :func:`freeze` took apart."""

    def first(*nodes: Any) -> Any:
        return next((node for node in nodes if node is not None), None)

    return tree.map(first, trained, *others, is_leaf=lambda x: x is None or _is_unit(x))


def shard_frozen(frozen: PyTree, stage: int | Scheme, axis: AxisName) -> PyTree:
    """What is frozen, at rest: whole on each rank, or pieces where a stage cuts parameters too.

    So it costs no communication, but for a stage that gathers at each use (3).
    """
    return shard(frozen, _frozen_stage(stage), axis)


def shard_frozen_again(frozen: PyTree, stage: int | Scheme) -> PyTree:
    """Pieces, cut as :func:`shard_frozen` cuts; inside ``spmd``."""
    return cut_again(frozen, _frozen_stage(stage))


def _frozen_stage(stage: int | Scheme) -> int | Scheme:
    return stage if scheme_of(stage).gather_at == "use" else 0


def cut_again(params: PyTree, stage: int | Scheme) -> PyTree:
    """The tree with each piece cut as the stage says; inside ``spmd``."""
    scheme = scheme_of(stage)

    def cut(node: Any) -> Any:
        if not isinstance(node, Sharded) or node.scheme == scheme:
            return node
        whole = agreed(node.whole(node.local), node.axis) if node.axes else node.local
        return Sharded(scheme.scatter(whole, node.axis), node.shape, node.axis, scheme, node.parts)

    return tree.map(cut, params, is_leaf=lambda x: isinstance(x, Sharded | Tied))


def overlaid(new: PyTree, old: PyTree) -> PyTree:
    """The tree ``new``, with the leaf of ``old`` wherever that has one of the same key path."""
    known = dict(zip(tree.paths(old), tree.leaves(old), strict=True))
    return tree.map_with_path(lambda path, leaf: known.get(path, leaf), new)


def _is_unit(node: Any) -> bool:
    return (is_placed(node) and hasattr(node, "shape")) or isinstance(node, Tied)


def _rebuilt(params: PyTree, nodes: list[Any]) -> PyTree:
    rest = iter(nodes)
    return tree.map(lambda _: next(rest), params, is_leaf=_is_unit)
