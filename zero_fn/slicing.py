"""Tensor slicing: parameters cut along a dimension over a mesh axis, by rules on their key paths.

Megatron's way (arXiv 1909.08053): a rank computes with its slice of a weight, and nobody gathers
it. ``slice_params`` cuts a tree by rules, ``local_slices`` hands the slices to a loss that is made
of the layers in ``sliced_layers.py``, and ``gather_tree`` puts the whole together again.

The mechanism: a ``Sliced`` is a placed node, as a ``Sharded`` is, and the two nest. ``zf.shard`` of
a sliced tree cuts each slice again, over dp. ``spmd`` stacks a leaf, and norms add over it, by what
the nodes around it say, and neither knows what slicing is. A leaf without a cut is the same on all
ranks of the axis, and stays so, since its gradient is: beside varying values it is used through
``zf.pvary``, which sums the gradient.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from . import tree
from .collectives import all_gather, axis_size, pscatter
from .naming import short_dtype
from .placed import is_placed
from .sharding import Shape, Tied, tie_whole
from .tree import PyTree, Tensor


class SliceRule(NamedTuple):
    """How a leaf is cut over the ranks of an axis.

    Attributes:
        dim: the dimension that is cut into one slice for each rank, in order.
        sections: the sizes of consecutive parts of that dimension that are cut each for itself; a
            rank's slice has its share of every one. A fused query, key and value weight of width d
            has (d, d, d). Empty: the dimension is one part.
        pad: whether a dimension that the axis does not divide is filled up with zeros at its end.
            Only for leaves whose layers leave the padding out, such as a vocabulary's.
    """

    dim: int
    sections: tuple[int, ...] = ()
    pad: bool = False


Rules = Mapping[str, int | SliceRule | None]


class _Cut(NamedTuple):
    """The static fields of a slice."""

    shape: Shape
    axis: str
    rule: SliceRule | None
    parts: int


class Sliced:
    """A pytree node: this rank's slice of one tensor, or a tensor that all ranks of the axis share.

    Outside ``spmd``, in the simulation, ``local`` holds the slices of all ranks, stacked.

    Attributes:
        local: the slice; a :class:`Sharded` where it is cut again.
        shape: the shape of the whole tensor, without padding.
        axis: the mesh axis.
        rule: how it is cut; None: it is whole on every rank.
        parts: the number of ranks it is cut for.
    """

    __slots__ = ("cut", "local")
    __zero_fn_placed__ = True

    def __init__(
        self, local: Any, shape: Shape, axis: str, rule: SliceRule | None, parts: int
    ) -> None:
        self.local, self.cut = local, _Cut(shape, axis, rule, parts)

    @property
    def shape(self) -> Shape:
        return self.cut.shape

    @property
    def axis(self) -> str:
        return self.cut.axis

    @property
    def rule(self) -> SliceRule | None:
        return self.cut.rule

    @property
    def parts(self) -> int:
        return self.cut.parts

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which ``local`` differs from rank to rank."""
        return () if self.rule is None else (self.axis,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the slice."""
        return self.local.dtype

    def check(self) -> None:
        """Refuse an axis with another number of ranks than the tensor was cut for."""
        if axis_size(self.axis) != self.parts:
            raise ValueError(
                f"{self!r} was cut for {self.parts} ranks, and axis {self.axis!r} has "
                f"{axis_size(self.axis)} here; gather it on the mesh it was cut on "
                "(zf.gather_tree) and slice it again on this one"
            )

    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor that ``local`` is a slice of."""
        self.check()
        if self.rule is None:
            return local
        n, dim = self.parts, self.rule.dim
        by_rank = all_gather(local, self.axis, dim).unflatten(dim, (n, local.shape[dim]))
        shares = [size // n for size in self.rule.sections] or [local.shape[dim]]
        sections = [x.flatten(dim, dim + 1) for x in by_rank.split(shares, dim + 1)]
        return torch.cat(sections, dim).narrow(dim, 0, self.shape[dim])

    def __repr__(self) -> str:
        if not isinstance(self.local, Tensor) and not is_placed(self.local):
            return f"Sliced({self.local!r})"
        whole = f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"
        if self.rule is None:
            text = f"{whole} whole on each of {self.axis}"
        else:
            text = f"{whole} as 1/{self.parts} of {self.axis} along dim {self.rule.dim}"
        return text if isinstance(self.local, Tensor) else f"{text}, {self.local!r}"


def _slice(cut: _Cut, parts: Sequence[Any]) -> Sliced:
    return Sliced(parts[0], *cut)


tree.register_node(Sliced, lambda node: ((node.local,), node.cut), _slice, [""])


def slice_params(params: PyTree, rules: Rules, axis: str = "tp") -> PyTree:
    """The same tree, each leaf now this rank's slice of it, or whole. Call it inside ``spmd``.

    Args:
        params: a tree of floating-point tensors, the same on all ranks. The same tensor at two
            places (tied weights) stays one slice.
        rules: key-path pattern to the dimension that is cut, a :class:`SliceRule`, or None for a
            leaf that every rank has whole. Patterns are those of ``fnmatch``, with case, over the
            whole path: ``*`` matches any characters, dots too, as in ``blocks.*.up.weight``.
        axis: the mesh axis to cut over.

    Returns:
        The tree with a :class:`Sliced` for each leaf, in memory of its own. :func:`zero_fn.shard`
        takes it.

    Raises:
        ValueError: naming the key path, for a leaf that no rule or more than one matches, that
            is cut already, whose shape the rule does not fit (with the sizes), or that is tied to
            a leaf with another rule; for a rule that matches no leaf.
        TypeError: naming the key path of a leaf that is no floating-point tensor, or whose rule
            is none of these.

    >>> import torch
    >>> import zero_fn as zf
    >>> mesh = zf.Mesh(tp=2)
    >>> rules = {"up": 0, "norm": None}
    >>> params = {"up": torch.randn(6, 4), "norm": torch.ones(4)}
    >>> zf.spmd(lambda p: zf.slice_params(p, rules), mesh)(params)
    {'up': f32[6,4] as 1/2 of tp along dim 0, 'norm': f32[4] whole on each of tp}
    """
    _check_whole(params)
    tree.check_tensors(params, "params", floating=True)
    unused, first = set(rules), {}  # type: set[str], dict[int, tuple[str, SliceRule | None]]

    def cut(path: str, x: Tensor) -> Sliced | Tied:
        pattern = _pattern(path, rules)
        unused.discard(pattern)
        rule = _rule(path, rules[pattern], x, axis)
        if id(x) not in first:
            first[id(x)] = path, rule
            local = x.clone(memory_format=torch.contiguous_format)
            local = local if rule is None else pscatter(_by_rank(x, rule, axis), axis, rule.dim)
            return Sliced(local, tuple(x.shape), axis, rule, axis_size(axis))
        partner, other = first[id(x)]
        if rule != other:
            raise ValueError(
                f"params at {path!r} is tied to {partner!r} (the same tensor), and their rules "
                f"differ: {rule} and {other}; give both the same"
            )
        return Tied(partner)

    sliced = tree.map_with_path(cut, params)
    if unused:
        raise ValueError(
            f"the rule {sorted(unused)[0]!r} matches no leaf of params; its leaves are "
            f"{tree.paths(params)}"
        )
    return sliced


def local_slices(params: PyTree) -> PyTree:
    """The tree that :func:`slice_params` cut, with this rank's slices as they are.

    What the layers of ``sliced_layers.py`` take. Call it inside ``spmd`` and inside the loss,
    before or after :func:`zero_fn.unshard`. The gradient by a slice is this rank's; a leaf that is
    whole on every rank comes out as one that all ranks share.

    Args:
        params: a tree of :class:`Sliced`; other leaves pass through as they are.

    Raises:
        ValueError: if the axis has another number of ranks than a leaf was cut for, or a tied
            leaf's partner is not in this tree.
    """

    def local(node: Any) -> Any:
        if not isinstance(node, Sliced):
            return node
        node.check()
        return node.local

    return tie_whole(tree.map(local, params, is_leaf=lambda node: isinstance(node, Sliced | Tied)))


def _check_whole(params: PyTree) -> None:
    nodes = tree.leaves(params, is_placed)
    for path, node in zip(tree.paths(params, is_placed), nodes, strict=True):
        if is_placed(node):
            raise ValueError(
                f"params at {path!r} is cut already: {node!r}; slice whole tensors, then shard the "
                "slices: zf.shard(zf.slice_params(params, rules), stage)"
            )


def _pattern(path: str, rules: Rules) -> str:
    """The one pattern that matches a key path."""
    found = [pattern for pattern in rules if fnmatchcase(path, pattern)]
    if not found:
        raise ValueError(
            f"params at {path!r} matches no rule of {list(rules)}; add one: {{{path!r}: 0}} cuts "
            f"dimension 0, and {{{path!r}: None}} leaves it whole on every rank"
        )
    if len(found) > 1:
        raise ValueError(
            f"params at {path!r} matches {len(found)} rules, {found}, and a leaf takes one: "
            "narrow the patterns"
        )
    return found[0]


def _rule(path: str, given: int | SliceRule | None, x: Tensor, axis: str) -> SliceRule | None:
    """The rule of a leaf, once it is known to fit."""
    if given is None:
        return None
    shape, n, where = tuple(x.shape), axis_size(axis), f"params at {path!r}"
    if isinstance(given, bool) or not isinstance(given, int | SliceRule):
        raise TypeError(
            f"{where}: its rule is {given!r}; it is a dimension (an int), a zf.SliceRule, or None "
            "for a leaf that every rank has whole"
        )
    rule = SliceRule(given) if isinstance(given, int) else given
    if not -x.ndim <= rule.dim < x.ndim:
        raise ValueError(f"{where}: shape {shape} has no dimension {rule.dim} to cut")
    rule = rule._replace(dim=rule.dim % x.ndim)
    size = shape[rule.dim]
    if rule.sections and sum(rule.sections) != size:
        raise ValueError(
            f"{where}: dimension {rule.dim} of shape {shape} is {size}, and the rule's sections "
            f"{rule.sections} add up to {sum(rule.sections)}"
        )
    if rule.sections and rule.pad:
        raise ValueError(f"{where}: {rule} pads sections; take pad or sections, not both")
    for part in rule.sections or (size,):
        if part % n and not rule.pad:
            what = f"a section of {part} of" if rule.sections else f"size {part} of"
            raise ValueError(
                f"{where}: {what} dimension {rule.dim} of shape {shape} is not divisible by the "
                f"{n} ranks of {axis!r}; take a multiple of {n}, leave the leaf whole "
                f"({{{path!r}: None}}), or, where the layer leaves padding out, "
                f"zf.SliceRule({rule.dim}, pad=True)"
            )
    return rule


def _by_rank(x: Tensor, rule: SliceRule, axis: str) -> Tensor:
    """The tensor padded, with all that one rank gets standing together along the dimension."""
    n, dim = axis_size(axis), rule.dim
    missing = -x.shape[dim] % n
    if missing:
        padding = x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])
        return torch.cat([x, padding], dim)
    if not rule.sections:
        return x
    parts = [part.unflatten(dim, (n, part.shape[dim] // n)) for part in x.split(rule.sections, dim)]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)
