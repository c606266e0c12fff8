"""Where the stages' parameters live: each rank of the pipeline's axis holds its own stages'.

On processes ``place`` keeps of the stages' trees those that live here; of the others a ``Staged``
node has no leaves, and knows what the leaves look like there. Optimizers map over what is here. A
leaf that is tied to one on another rank is here as a ``Copy``: its gradient is the sum over the
places where the leaf stands, so that both take the same steps, and norms count it once.

In one process, and on simulated ranks, all stages are at hand and nothing is placed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import tree
from ..collectives import psum
from ..sharding import Sharded, Tied, is_piece
from ..slicing import Sliced
from ..tree import PyTree, Tensor


@dataclass(frozen=True)
class Look:
    """What a tensor looks like, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> "Look":
        """The look of a tensor."""
        return Look(tuple(x.shape), x.dtype, x.device)

    def make(self, f: Callable[..., Tensor]) -> Tensor:
        """A tensor that looks so: ``torch.zeros``, say."""
        return f(self.shape, dtype=self.dtype, device=self.device)


class Home(NamedTuple):
    """The static fields of a :class:`Staged`: its axis, and what is elsewhere; None: it is here."""

    axis: str
    elsewhere: tuple[tree.TreeDef, tuple[Look, ...]] | None


class Staged:
    """A pytree node: the parameters of one stage, on the rank where it lives; elsewhere no leaves.

    Attributes:
        local: the stage's tree; None where it lives elsewhere.
        home: the mesh axis, and how the tree looks if it is elsewhere.
    """

    __slots__ = ("home", "local")
    __zero_fn_placed__ = True

    def __init__(self, local: PyTree, home: Home) -> None:
        self.local, self.home = local, home

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axis along which ranks hold different stages."""
        return (self.home.axis,)

    @property
    def here(self) -> bool:
        """Whether the stage lives on this rank."""
        return self.home.elsewhere is None

    def looks(self) -> PyTree:
        """The stage's tree, with a :class:`Look` for each tensor."""
        if self.home.elsewhere is None:
            return tree.map(Look.of, self.local)
        return tree.unflatten(*self.home.elsewhere)

    def __repr__(self) -> str:
        return repr(self.local) if self.here else f"on another rank of {self.home.axis}"


tree.register_node(
    Staged,
    lambda node: (((node.local,) if node.here else ()), node.home),
    lambda home, parts: Staged(parts[0] if parts else None, home),
    lambda home: ("",) if home.elsewhere is None else (),
)


class Copy:
    """A pytree node: a leaf that is tied to one of another rank.

    Attributes:
        local: the leaf, this rank's own.
        of: the key path of the leaf that it equals.
    """

    __slots__ = ("local", "of")
    __zero_fn_placed__ = True
    axes: tuple[str, ...] = ()
    is_copy = True

    def __init__(self, local: Any, of: str) -> None:
        self.local, self.of = local, of

    def __repr__(self) -> str:
        return f"{self.local!r}, equal to {self.of}"


tree.register_node(
    Copy, lambda node: ((node.local,), node.of), lambda of, parts: Copy(parts[0], of), [""]
)


def without_copies(params: PyTree) -> PyTree:
    """A tree with the leaf itself for each :class:`Copy`."""
    return tree.map(lambda x: x.local if _is_copy(x) else x, params, is_leaf=_is_copy)


def tie_stages(params: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The stages' trees, a leaf that stood before replaced by what says where."""
    first: dict[int, str] = {}

    def tie(path: str, node: Any) -> Any:
        if isinstance(node, Tied):
            return node
        local = node.local if isinstance(node, Sharded) else node
        where = first.setdefault(id(local), path)
        return node if where == path else Tied(where)

    return tuple(tree.map_with_path(tie, tuple(params), is_leaf=is_piece))


def place_stages(
    params: Sequence[PyTree], homes: Sequence[int], axis: str, place: int
) -> tuple[Staged, ...]:
    """What a rank holds of the stages' trees, which are the same on all ranks.

    Args:
        params: the trees, tied by :func:`tie_stages`.
        homes: the rank of each stage.
        axis: the mesh axis.
        place: this rank.
    """
    nodes = tree.leaves(tuple(params), is_one_leaf)
    named = dict(zip(tree.paths(tuple(params), is_one_leaf), nodes, strict=True))
    seen: dict[tuple[int, str], str] = {}  # a rank and a leaf, to where the leaf first is there

    def untie(path: str, node: Any, home: int) -> Any:
        if not isinstance(node, Tied):
            seen[home, path] = path
            return node
        # within all stages' tree, or within the stage's own
        to = node.to if node.to in named else f"{path.split('.')[0]}.{node.to}"
        if (home, to) in seen:
            return Tied(seen[home, to])
        seen[home, to] = path
        return Copy(named[to], to)

    staged = []
    for stage, home in enumerate(homes):
        whole = tree.map_with_path(
            lambda path, node, s=stage, h=home: untie(tree.join_path(str(s), path), node, h),
            params[stage],
            is_leaf=is_one_leaf,
        )
        if home == place:
            # a copy has memory of its own
            own = tree.map(_own, whole, is_leaf=_is_copy)
            staged.append(Staged(own, Home(axis, None)))
        else:
            leaves, treedef = tree.flatten(whole)
            looks = tuple(map(Look.of, leaves))
            staged.append(Staged(None, Home(axis, (treedef, looks))))
    return tuple(staged)


def _own(node: Any) -> Any:
    return tree.map(torch.clone, node) if isinstance(node, Copy) else node


def is_staged(params: Sequence[PyTree]) -> bool:
    """Whether :func:`place_stages` made these.

    Raises:
        ValueError: if some are and some are not.
    """
    found = [isinstance(node, Staged) for node in params]
    if any(found) and not all(found):
        raise ValueError(
            "some of the stages' params are placed on ranks and some are not; place them together, "
            "zf.pipeline(...).place(params)"
        )
    return all(found)


def collect_stages(params: Sequence[Staged]) -> tuple[PyTree, ...]:
    """The stages' trees, whole on every rank; copies are tied again."""
    whole = []
    for node in params:
        (axis,) = node.axes
        here = node.local
        if not node.here:
            here = tree.map(lambda look: look.make(torch.zeros), node.looks())
        everywhere = tree.map(lambda x, name=axis: psum(x, name), here)
        whole.append(
            tree.map(lambda x: Tied(x.of) if _is_copy(x) else x, everywhere, is_leaf=_is_copy)
        )
    return tuple(whole)


def sum_over_ranks(
    grads: Mapping[int, PyTree], params: Sequence[Staged], axis: str
) -> dict[int, PyTree]:
    """The gradients of the stages that live here, summed where a leaf stands on several ranks.

    Args:
        grads: by stage, each a tree like the stage's.
        params: what :func:`place_stages` made.
        axis: the mesh axis.
    """
    ties: dict[str, Look] = {}
    for stage in params:
        for node in tree.leaves(stage.looks(), _is_copy):
            if isinstance(node, Copy):
                ties[node.of] = _only_leaf(node)
    if not ties:
        return dict(grads)
    nodes = tree.leaves(dict(grads), is_one_leaf)
    names = dict(zip(_names(grads), nodes, strict=True))
    totals = {}
    for name, look in sorted(ties.items()):  # in one order on all ranks
        own = _only_leaf(names[name]) if name in names else look.make(torch.zeros)
        totals[name] = psum(own, axis)

    def summed(name: str, node: Any) -> Any:
        return tree.map(lambda _: totals[name], node) if name in totals else node

    _, treedef = tree.flatten(dict(grads), is_one_leaf)
    return dict(tree.unflatten(treedef, map(summed, _names(grads), nodes)))


def _names(grads: Mapping[int, PyTree]) -> list[str]:
    """The key path of each leaf among all stages; of a copy, that of what it equals."""
    paths, nodes = tree.paths(dict(grads), is_one_leaf), tree.leaves(dict(grads), is_one_leaf)
    return [n.of if isinstance(n, Copy) else path for path, n in zip(paths, nodes, strict=True)]


def _is_copy(node: Any) -> bool:
    return isinstance(node, Copy)


def is_one_leaf(node: Any) -> bool:
    """Whether a node stands for one leaf: a slice, say, whatever cuts it again."""
    return is_piece(node) or isinstance(node, Sliced) or _is_copy(node)


def _only_leaf(node: Any) -> Any:
    (leaf,) = tree.leaves(node)
    return leaf
