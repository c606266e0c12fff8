"""Collectives: differentiable functions of a tensor and the name of a mesh axis.

Inside ``spmd`` a value is *varying* over an axis (ranks may hold different values) or *invariant*
(all hold the same). Each collective says which it takes and gives; its derivative follows from
that, and is JAX's current rule. The law that each obeys: ⟨f x, y⟩ = ⟨x, fᵀ y⟩.

    psum                  varying   -> invariant   transpose: pvary
    pvary                 invariant -> varying     transpose: psum
    all_gather            varying   -> varying     transpose: psum_scatter
    psum_scatter          varying   -> varying     transpose: all_gather
    all_gather_invariant  varying   -> invariant   transpose: pscatter
    pscatter              invariant -> varying     transpose: all_gather_invariant
    ppermute              varying   -> varying     transpose: ppermute by the inverse
    all_to_all            varying   -> varying     transpose: all_to_all, dims exchanged

The collectives are one ``autograd.Function``, because torch's own raise under ``torch.func.grad``
and have a silent zero tangent under ``jvp``. Its ``forward`` is what a process does, its ``vmap``
rule what the simulation does; ``transport.py`` has both. Which vmap level is the axis' own is told
by the axis' token, an input that is batched at that level and at no other. No other room moves data
between ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .mesh import Axis, bound_axis
from .transport import CARRIED, PROCESS, Static, Wire, current_wire, sent, simulate
from .tree import Tensor

AxisName = str | tuple[str, ...]

_TRANSPOSE = {
    "psum": "pvary",
    "pvary": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "all_gather_invariant": "pscatter",
    "pscatter": "all_gather_invariant",
    "ppermute": "ppermute",
    "all_to_all": "all_to_all",
}


def psum(x: Tensor, axis: AxisName) -> Tensor:
    """The sum over the ranks of an axis; varying to invariant.

    Args:
        x: this rank's summand, any shape, of a number dtype.
        axis: the name of a mesh axis, or several names: the sum over all of them.

    Raises:
        TypeError: for what is no tensor, or a tensor of a dtype that has no sum (bool, fp8).
        NameError: for an axis that is not bound.
        ValueError: for an axis that is named twice.
    """
    _check_summed(x, "psum")
    for name in _names(axis):
        x = _apply("psum", x, name, ())
    return x


def pmean(x: Tensor, axis: AxisName, weight: Tensor | None = None) -> Tensor:
    """The mean over the ranks of an axis; varying to invariant. See :func:`psum`.

    With this rank's ``weight`` (a number of tokens), sum(weight * x) / sum(weight).

    Raises:
        TypeError: for an integer tensor, whose mean is no integer.
    """
    _check_tensor(x, "pmean")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"pmean of a tensor of dtype {x.dtype}: convert it first, x.float()")
    _check_summed(x, "pmean")
    if weight is not None:
        return psum(x * weight, axis) / psum(weight, axis)
    return psum(x, axis) / axis_size(axis)


def pvary(x: Tensor, axis: AxisName) -> Tensor:
    """The same value, from here on this rank's own; invariant to varying, and moves no data.

    What all ranks share (a replicated parameter, a psum's result) becomes varying with this before
    it meets varying values, so that its gradient is summed over the ranks.

    Raises:
        ValueError: in the simulation, if the value varies over the axis already.
    """
    _check_tensor(x, "pvary")
    for name in _names(axis):
        x = _apply("pvary", x, name, ())
    return x


def all_gather(x: Tensor, axis: AxisName, dim: int = 0) -> Tensor:
    """The ranks' tensors one after the other along ``dim``; varying to varying.

    Several axes: the first changes slowest, as in the rank.
    """
    _check_tensor(x, "all_gather")
    for name in reversed(_names(axis)):
        x = _apply("all_gather", x, name, (_dim(x, dim),))
    return x


def psum_scatter(x: Tensor, axis: AxisName, dim: int = 0) -> Tensor:
    """This rank's slice, along ``dim``, of the sum over the ranks; varying to varying.

    Raises:
        TypeError: for a tensor of a dtype that has no sum (bool, fp8).
        ValueError: if the axis does not divide the dimension.
    """
    _check_summed(x, "psum_scatter")
    for name in _names(axis):
        x = _apply("psum_scatter", x, name, (_divided(x, dim, name, "psum_scatter"),))
    return x


def all_gather_invariant(x: Tensor, axis: AxisName, dim: int = 0) -> Tensor:
    """Like :func:`all_gather`, for a result that is not used with varying values again."""
    _check_tensor(x, "all_gather_invariant")
    for name in reversed(_names(axis)):
        x = _apply("all_gather_invariant", x, name, (_dim(x, dim),))
    return x


def pscatter(x: Tensor, axis: AxisName, dim: int = 0) -> Tensor:
    """This rank's slice, along ``dim``, of a value that all share, in memory of its own.

    Invariant to varying, and moves no data.

    Raises:
        ValueError: if the axis does not divide the dimension; in the simulation, if the value
            varies over the axis.
    """
    _check_tensor(x, "pscatter")
    for name in _names(axis):
        x = _apply("pscatter", x, name, (_divided(x, dim, name, "pscatter"),))
    return x


def ppermute(x: Tensor, axis: str, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Send ``x`` from rank ``source`` to rank ``target`` for each pair; varying to varying.

    A rank that nobody sends to gets zeros.

    Args:
        x: what this rank sends, any shape.
        axis: the name of a mesh axis.
        perm: pairs (source, target); each rank at most once on either side.

    Raises:
        ValueError: if a rank is outside the axis, sends twice or receives twice.
    """
    _check_tensor(x, "ppermute")
    size = bound_axis(_one(axis, "ppermute")).size
    for side, ranks in (("source", [s for s, _ in perm]), ("target", [t for _, t in perm])):
        if len(set(ranks)) != len(ranks) or any(not 0 <= rank < size for rank in ranks):
            raise ValueError(
                f"ppermute over {axis!r} of size {size}: {side}s {ranks} must be different ranks "
                f"from 0 to {size - 1}"
            )
    return _apply("ppermute", x, axis, tuple(rank for pair in perm for rank in pair))


def all_to_all(x: Tensor, axis: str, split: int = 0, concat: int = 0) -> Tensor:
    """Rank i gets everyone's i-th slice; varying to varying.

    Args:
        x: cut into equal slices along ``split``, one for each rank.
        axis: the name of a mesh axis.
        split: the dimension that is cut.
        concat: the dimension along which the received slices are put together.

    Raises:
        ValueError: if the axis does not divide the dimension ``split``.
    """
    _check_tensor(x, "all_to_all")
    _one(axis, "all_to_all")
    return _apply("all_to_all", x, axis, (_divided(x, split, axis, "all_to_all"), _dim(x, concat)))


def axis_size(axis: AxisName) -> int:
    """The number of ranks along an axis, or along several together."""
    size = 1
    for name in _names(axis):
        size *= bound_axis(name).size
    return size


def axis_index(axis: AxisName) -> Tensor:
    """This rank's place along an axis, a varying 0-dim int64 tensor.

    Several axes: the first changes slowest, as in the rank.
    """
    place = torch.zeros((), dtype=torch.int64)
    for name in _names(axis):
        bound = bound_axis(name)
        place = place * bound.size + (bound.place if bound.token is None else bound.token)
    return place


def check_invariant(x: Tensor, axis: Axis, message: str) -> Tensor:
    """``x`` itself in the simulation, batched at the axis' level.

    Raises:
        ValueError: with ``message``, if the ranks may hold different values.
    """
    return _invariant(x, axis.token, axis.size, message)


def agreed(x: Tensor, axis: AxisName) -> Tensor:
    """A value that all ranks hold the same by construction, as an invariant one; no derivative."""
    for name in _names(axis):
        bound = bound_axis(name)
        if bound.token is not None:
            x = _invariant(x, bound.token, bound.size, None)
    return x


def _names(axis: AxisName) -> tuple[str, ...]:
    if isinstance(axis, str):
        return (axis,)
    if len(set(axis)) != len(axis):
        raise ValueError(f"axis is {axis!r}, which names a mesh axis twice; name each once")
    return tuple(axis)


def _one(axis: str, what: str) -> str:
    if not isinstance(axis, str):
        raise TypeError(f"{what} goes over one mesh axis, and axis is {axis!r}; name one, 'dp' say")
    return axis


def _check_tensor(x: Tensor, what: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{what} takes a tensor, got {x!r}; for a tree of tensors map over it, "
            f"optree.tree_map(lambda x: zf.{what}(x, axis), tree), and for a number make it a "
            "tensor, torch.tensor(x)"
        )


def _check_summed(x: Tensor, what: str) -> None:
    _check_tensor(x, what)
    if x.dtype == torch.bool:
        raise TypeError(f"{what} of a bool tensor: convert it to numbers first, x.int()")
    if x.dtype in CARRIED:
        raise TypeError(
            f"{what} of a tensor of dtype {x.dtype}, which has no sum: convert it first, "
            f"{'x.float()' if x.is_floating_point() else 'x.int()'}"
        )


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        hint = "; give a 0-dim tensor a dimension first: x.reshape(1)" if x.ndim == 0 else ""
        raise ValueError(
            f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}{hint}"
        )
    return dim % x.ndim


def _divided(x: Tensor, dim: int, axis: str, what: str) -> int:
    dim, size = _dim(x, dim), bound_axis(axis).size
    if x.shape[dim] % size:
        raise ValueError(
            f"{what} over {axis!r}: dimension {dim} of shape {tuple(x.shape)} is not divisible by "
            f"the axis size {size}; pad it first"
        )
    return dim


def _apply(kind: str, x: Tensor, name: str, static: Static) -> Tensor:
    axis = bound_axis(name)
    if axis.size == 1:
        return _alone(kind, x, static)
    place = axis.size, axis.place, axis.group
    return _call(x, axis.token, kind, name, *place, static, current_wire())


def _alone(kind: str, x: Tensor, static: Static) -> Tensor:
    """Each collective over an axis of size 1: the value itself."""
    if kind == "ppermute" and not static:
        return torch.zeros_like(x)
    return x.clone() if kind == "pscatter" else x


def register_with_dynamo() -> None:
    """Make torch.compile leave the collectives as they are.

    Over torch.func it would otherwise drop a Function's backward and vmap rule without a word.
    ``spmd`` calls this before any collective can run; at import it would cost a second.
    """
    for function in (_call, _invariant):
        torch.compiler.allow_in_graph(function)


def _call(
    x: Tensor,
    token: Tensor | None,
    kind: str,
    name: str,
    size: int,
    place: int,
    group: str,
    static: Static,
    wire: Wire,
) -> Tensor:
    return _Collective.apply(x, token, kind, name, size, place, group, static, wire)


def _invariant(x: Tensor, token: Tensor | None, size: int, message: str | None) -> Tensor:
    return _Invariant.apply(x, token, size, message)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        token: Tensor | None,
        kind: str,
        name: str,
        size: int,
        place: int,
        group: str,
        static: Static,
        wire: Wire,
    ) -> Tensor:
        if token is not None:
            raise RuntimeError(f"{kind} over {name!r}: a simulated axis outlived its spmd call")
        return PROCESS[kind](sent(x, kind, wire), size, place, group, static).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, token, *ctx.rest = inputs
        ctx.save_for_backward(token)
        ctx.save_for_forward(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        kind, name, size, place, group, static, wire = ctx.rest
        # Incoming gradients can have stride 0, which no wire takes.
        grad, static = grad.contiguous(), _transposed(kind, static)
        place = size, place, group
        grad = _call(grad, token, _TRANSPOSE[kind], name, *place, static, wire[::-1])
        return grad, None, None, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (token,) = ctx.saved_tensors
        return _call(tangent, token, *ctx.rest)  # linear

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        token: Tensor | None,
        kind: str,
        name: str,
        size: int,
        place: int,
        group: str,
        static: Static,
        wire: Wire,
    ) -> tuple[Tensor, int | None]:
        batched = in_dims[0]
        if in_dims[1] is None:
            # Another level, such as a sweep around the step: the batch rides along as last
            # dimension, where it does not shift the others.
            assert batched is not None
            x = x.movedim(batched, -1)
            return _call(x, token, kind, name, size, place, group, static, wire), -1
        result, batched = simulate(kind, name, sent(x, kind, wire), batched, size, static)
        return result.to(x.dtype), batched


class _Invariant(torch.autograd.Function):
    """In the simulation: refuse what varies, with a message; without a message take rank 0's."""

    @staticmethod
    def forward(x: Tensor, token: Tensor | None, size: int, message: str | None) -> Tensor:
        raise RuntimeError("a simulated axis outlived its spmd call")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("what leaves a rank's program is not differentiated inside of it")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        token: Tensor | None,
        size: int,
        message: str | None,
    ) -> tuple[Tensor, int | None]:
        batched = in_dims[0]
        if in_dims[1] is None:
            assert batched is not None
            return _invariant(x.movedim(batched, 0), token, size, message), 0
        if message is None:
            return (x.view_as(x) if batched is None else x.select(batched, 0)), None
        if batched is not None:
            raise ValueError(message)
        return x.expand(size, *x.shape), 0


def _transposed(kind: str, static: Static) -> Static:
    if kind == "ppermute":
        pairs = zip(static[::2], static[1::2], strict=True)
        return tuple(rank for source, target in pairs for rank in (target, source))
    return static[::-1] if kind == "all_to_all" else static
