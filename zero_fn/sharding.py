"""Sharding: how a leaf is cut over a mesh axis, put together again, and when (ZeRO's stages).

ZeRO (arXiv 1910.02054) in one sentence: parameters rest as pieces, and a stage is a policy, saying
when they are gathered and when gradients are reduced.

    stage   at rest      gathered        gradients reduced
    0       whole        never           once a step
    1       pieces       once a step     once a step
    2       pieces       once a step     every micro-batch
    3       pieces       at each use     every micro-batch

A ``Scheme`` is such a row together with how to cut one leaf. ``shard`` cuts a tree, ``unshard``
puts it together, and the gradient of ``unshard`` is the reduction. Optimizers map over pieces and
never know.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from . import tree
from .collectives import AxisName, agreed, all_gather, axis_size, pscatter, pvary
from .mesh import Mesh
from .naming import short_dtype
from .placed import is_placed
from .ranks import spmd
from .transport import wire
from .tree import PyTree, Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """How one leaf is cut, and when it is gathered and its gradient reduced.

    A new scheme is a frozen dataclass that derives from this one and has its own ``scatter`` and
    ``gather``; ``zf.testing.check_scheme`` checks the laws. Fields are static: they must be
    hashable, and schemes with equal fields are equal.

    Attributes:
        gather_at: ``"step"``, once for all micro-batches, or ``"use"``, in each of them.
        reduce_at: ``"step"``, once, or ``"microbatch"``, as soon as each one's gradients exist.
    """

    gather_at: ClassVar[Literal["step", "use"]] = "step"
    reduce_at: ClassVar[Literal["step", "microbatch"]] = "step"

    def axes(self, axis: AxisName) -> tuple[str, ...]:
        """The mesh axes over which the pieces differ; default: all that the leaf is cut over."""
        return (axis,) if isinstance(axis, str) else axis

    def scatter(self, x: Tensor, axis: AxisName) -> Tensor:
        """This rank's piece of ``x``, which is the same on all ranks; in memory of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no scatter")

    def gather(self, piece: Tensor, shape: Shape, axis: AxisName) -> Tensor:
        """The whole leaf of that shape, varying; its transpose reduces gradients to the piece."""
        raise NotImplementedError(f"{type(self).__name__} has no gather")


@dataclass(frozen=True)
class Replicated(Scheme):
    """Stage 0: every rank holds the whole leaf; gradients are summed over the axis."""

    def axes(self, axis: AxisName) -> tuple[str, ...]:
        return ()

    def scatter(self, x: Tensor, axis: AxisName) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def gather(self, piece: Tensor, shape: Shape, axis: AxisName) -> Tensor:
        return pvary(piece, axis)


@dataclass(frozen=True)
class Flat(Scheme):
    """Flattened, padded to the axis and cut evenly, so any shape works; a gather is a view.

    A piece of a leaf of n values has ceil(n / ranks) of them.
    """

    def scatter(self, x: Tensor, axis: AxisName) -> Tensor:
        flat = x.reshape(-1)
        padding = -flat.numel() % axis_size(axis)
        return pscatter(torch.nn.functional.pad(flat, (0, padding)) if padding else flat, axis)

    def gather(self, piece: Tensor, shape: Shape, axis: AxisName) -> Tensor:
        flat, length = all_gather(piece, axis), math.prod(shape)
        return (flat if flat.numel() == length else flat[:length]).view(shape)


@dataclass(frozen=True)
class ZeRO1(Flat):
    """Stage 1: optimizer state cut; gather and reduce once a step."""


@dataclass(frozen=True)
class ZeRO2(Flat):
    """Stage 2: gradients cut too; reduce every micro-batch."""

    reduce_at = "microbatch"


@dataclass(frozen=True)
class ZeRO3(Flat):
    """Stage 3: parameters cut too; gather at each use."""

    gather_at = "use"
    reduce_at = "microbatch"


STAGES: tuple[Scheme, ...] = (Replicated(), ZeRO1(), ZeRO2(), ZeRO3())


class Cut(NamedTuple):
    """How a tensor is cut: the static fields of its pieces."""

    shape: Shape
    axis: AxisName
    scheme: Scheme
    parts: int


class Sharded:
    """A pytree node: this rank's piece of one tensor.

    Outside ``spmd``, in the simulation, ``local`` holds the pieces of all ranks, stacked along a
    leading dimension for each axis they differ over.

    Attributes:
        local: the piece.
        shape: the shape of the whole tensor.
        axis: the mesh axis, or axes, it is cut over.
        scheme: how it is cut.
        parts: the number of ranks it is cut for.
    """

    __slots__ = ("cut", "local")
    __zero_fn_placed__ = True

    def __init__(
        self, local: Any, shape: Shape, axis: AxisName, scheme: Scheme, parts: int
    ) -> None:
        self.local, self.cut = local, Cut(shape, axis, scheme, parts)

    @property
    def shape(self) -> Shape:
        return self.cut.shape

    @property
    def axis(self) -> AxisName:
        return self.cut.axis

    @property
    def scheme(self) -> Scheme:
        return self.cut.scheme

    @property
    def parts(self) -> int:
        return self.cut.parts

    def whole(
        self,
        local: Tensor,
        sent: torch.dtype | None = None,
        reduced: torch.dtype | None = None,
    ) -> Tensor:
        """The whole tensor that ``local`` is a piece of, as the scheme gathers it.

        Args:
            local: the piece.
            sent: the dtype in which it travels; None: its own.
            reduced: the dtype in which its gradient is summed; None: the piece's.

        Raises:
            ValueError: if the axis has another number of ranks than the tensor was cut for.
        """
        if axis_size(self.axis) != self.parts:
            raise ValueError(
                f"{self!r} was cut for {self.parts} ranks, and axis {self.axis!r} has "
                f"{axis_size(self.axis)} here; gather it on the mesh it was cut on "
                "(zf.gather_tree) and shard it again on this one"
            )
        with wire(sent, reduced):
            return self.scheme.gather(local, self.shape, self.axis)

    def like(self, local: Tensor) -> "Sharded":
        """Another piece that is cut the same way."""
        return _piece(self.cut, (local,))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which ``local`` differs from rank to rank."""
        return self.scheme.axes(self.axis)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the piece."""
        return self.local.dtype

    def __repr__(self) -> str:
        if not isinstance(self.local, Tensor):
            return f"Sharded({self.local!r})"
        whole = f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"
        axis = self.axis if isinstance(self.axis, str) else "×".join(self.axis)
        if not self.axes:
            return f"{whole} whole on each of {axis}"
        return f"{whole} as 1/{self.parts} of {axis}"


def _piece(cut: Cut, parts: Sequence[Any]) -> Sharded:
    piece = object.__new__(Sharded)
    piece.local, piece.cut = parts[0], cut
    return piece


tree.register_node(Sharded, lambda node: ((node.local,), node.cut), _piece, ("local",))


class Tied:
    """A pytree node without leaves: here stands the same tensor as at another key path."""

    __slots__ = ("to",)

    def __init__(self, to: str) -> None:
        self.to = to

    def __repr__(self) -> str:
        return f"tied to {self.to}"


tree.register_node(Tied, lambda node: ((), node.to), lambda to, parts: Tied(to), lambda to: ())


def tied(name: str) -> Tied:
    """What stands in a tree of parameters for the same tensor as at another key path.

    Its gradient is the sum over all the places where the tensor stands. The same tensor at two
    places says the same; a name also says it of trees that are read from a file.

    Args:
        name: the key path of the tensor within the tree that is handed over; among the stages of
            a pipeline it begins with the stage's number.

    Raises:
        TypeError: if it is no text.

    >>> import torch
    >>> import zero_fn as zf
    >>> stages = [lambda p, carry, x: p["w"] * x, lambda p, carry, x: (carry * p["v"]).sum()]
    >>> params = {"w": torch.tensor(3.0)}, {"v": zf.tied("0.w")}
    >>> zf.pipeline(stages, 1)(params, torch.ones(2))  # of 2 w²
    (({'w': tensor(12.)}, {'v': tied to 0.w}), tensor(18.))
    """
    if not isinstance(name, str):
        raise TypeError(f"tied takes the key path of a leaf, '0.embedding' say; got {name!r}")
    return Tied(name)


def shard(params: PyTree, stage: int | Scheme, axis: AxisName = "dp") -> PyTree:
    """The same tree, each leaf now this rank's piece of it. Call it inside ``spmd``.

    Args:
        params: a tree of floating-point tensors, the same on all ranks of ``axis``; slices over
            other axes, too. The same tensor at two places (tied weights) stays one piece.
        stage: 0 to 3 (see this module), or a :class:`Scheme`.
        axis: the mesh axis, or axes, to cut over.

    Returns:
        The tree with a :class:`Sharded` for each leaf, in memory of its own.

    Raises:
        ValueError: for an unknown stage, or a leaf that is cut already.
        TypeError: naming the key path of a leaf that is no floating-point tensor. What a node with
            ``__zero_fn_frozen__`` holds (a quantised weight) may be of any dtype.
    """
    scheme = scheme_of(stage)
    tree.check_tensors(_trained(params), "params", floating=True)
    for path, node in zip(tree.paths(params, is_piece), tree.leaves(params, is_piece), strict=True):
        if isinstance(node, Sharded):
            raise ValueError(f"params at {path!r} is sharded already: {node!r}; unshard it first")
    first: dict[int, str] = {}

    def cut(path: str, x: Tensor) -> Sharded | Tied:
        if id(x) in first:
            return Tied(first[id(x)])
        first[id(x)] = path
        return Sharded(scheme.scatter(x, axis), tuple(x.shape), axis, scheme, axis_size(axis))

    return tree.map_with_path(cut, params)


def unshard(
    params: PyTree, dtype: torch.dtype | None = None, reduce: torch.dtype | None = None
) -> PyTree:
    """The tree that :func:`shard` cut, whole again on each rank. Call it inside ``spmd``.

    The gradient by the pieces is the sum of the ranks' gradients, cut the same way.

    Args:
        params: a tree of :class:`Sharded`; other leaves pass through as they are.
        dtype: the whole tensors' dtype; the pieces are cast before the gather, which then moves
            fewer bytes. None: the pieces' own.
        reduce: the dtype in which gradients travel and are summed; None: the pieces' own.

    Raises:
        ValueError: if a tied leaf's partner is not in this tree.
    """

    def whole(piece: Any) -> Any:
        if not isinstance(piece, Sharded):
            return piece
        if not piece.dtype.is_floating_point:  # the small integers of a quantised weight
            return piece.whole(piece.local)
        gathered = piece.whole(piece.local, dtype, reduce)
        return gathered if dtype is None else gathered.to(dtype)

    return tie_whole(tree.map(whole, params, is_leaf=is_piece))


def gather_tree(params: PyTree, mesh: Mesh) -> PyTree:
    """The whole tensors of a tree of pieces, to read results. Call it outside ``spmd``.

    Args:
        params: the tree as a step returned it, of pieces, slices, or slices that are cut again.
        mesh: the mesh it lives on.

    Returns:
        The tree with a whole tensor for each piece; on processes the same on every rank.
    """

    def is_cut(node: Any) -> bool:
        return is_placed(node) and hasattr(node, "whole")

    def whole(node: Any) -> Any:
        if not is_cut(node):
            return node
        return agreed(node.whole(whole(node.local)), node.axis)

    return tie_whole(spmd(lambda tree_: tree.map(whole, tree_, is_leaf=is_cut), mesh)(params))


def _trained(params: PyTree) -> PyTree:
    """The tree without what is not trained."""

    def frozen(node: Any) -> bool:
        return hasattr(type(node), "__zero_fn_frozen__")

    return tree.map(lambda x: None if frozen(x) else x, params, is_leaf=frozen)


def is_piece(node: Any) -> bool:
    """Whether a node stands for one leaf of the tree that was cut."""
    return isinstance(node, Sharded | Tied)


def tie_whole(whole: PyTree) -> PyTree:
    """A gathered tree, with what its partner became at each tied leaf."""

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Tied) or is_placed(node)

    nodes = tree.leaves(whole, is_leaf)
    if not any(isinstance(node, Tied) for node in nodes):
        return whole
    named = dict(zip(tree.paths(whole, is_leaf), nodes, strict=True))

    def partner(path: str, node: Any) -> Any:
        if not isinstance(node, Tied):
            return node
        if node.to not in named:
            raise ValueError(
                f"{path!r} is tied to {node.to!r}, which is not in this tree; unshard the tree "
                f"that has both: it has {list(named)}"
            )
        return named[node.to]

    return tree.map_with_path(partner, whole, is_leaf=is_leaf)


def scheme_of(stage: int | Scheme) -> Scheme:
    """The scheme of a stage.

    Raises:
        ValueError: for an unknown one.
    """
    if isinstance(stage, Scheme):
        return stage
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < len(STAGES):
        raise ValueError(
            f"stage is {stage!r}; it is 0, 1, 2, 3, or a Scheme of your own (a dataclass that "
            "derives from zf.Scheme)"
        )
    return STAGES[stage]
