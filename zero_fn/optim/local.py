"""Optimizers that exchange gradients themselves, and what they share.

A ``LocalOptimizer`` takes each rank's own gradients by the whole parameters, not yet reduced. Its
state lies in flat buckets, whole on every rank. What changes between steps in a way that changes
the program (a phase) is a static field, which ``advance`` sets outside of the program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import tree
from ..feedback import Bucket, bucket_of
from ..sharding import Sharded, Tied, is_piece
from ..tree import PyTree, Tensor
from .protocol import Mask


class LocalOptimizer(NamedTuple):
    """An optimizer that takes unreduced gradients, for ``zf.train_step`` or a step of one's own.

    Attributes:
        init: params (from :func:`zero_fn.shard`) to the state; inside ``spmd``.
        update: (this rank's own gradients by the whole parameters, state, params) to (updates, new
            state); inside ``spmd``.
        advance: state to the state of the phase that its step count is in; outside of the step,
            before each one, since a traced program has one phase. It reads the count.
        view: (params, state) to the whole parameters that this rank's gradients are taken at;
            inside ``spmd``.
        finite: state to whether the last gradients of all ranks were finite, a 0-dim bool; if they
            were not, the update changed nothing.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    advance: Callable[[PyTree], PyTree]
    view: Callable[[PyTree, PyTree], PyTree]
    finite: Callable[[PyTree], Tensor]


def finite_by_feedback(state: Any) -> Tensor:
    """What the error feedback of a state says."""
    finite: Tensor = state.error.finite
    return finite


def whole_params(params: PyTree, shift: list[Tensor] | None = None) -> PyTree:
    """Each leaf whole, as this rank's own, less its shift; tied leaves stay tied."""
    shifts = iter(shift or ())

    def whole(node: Any) -> Any:
        if isinstance(node, Tied):
            return node
        value = node.whole(node.local) if isinstance(node, Sharded) else node
        return value - next(shifts).to(value.dtype) if shift is not None else value

    return tree.map(whole, params, is_leaf=is_piece)


def nodes_of(params: PyTree) -> list[Any]:
    """The leaves of a tree as they were cut, without the tied ones."""
    return [node for node in tree.leaves(params, is_piece) if not isinstance(node, Tied)]


def bucket_for(params: PyTree, axis: str) -> Bucket:
    """The bucket of the whole parameters."""
    return bucket_of(nodes_of(params), axis)


def cut_like(params: PyTree, whole: list[Tensor]) -> PyTree:
    """Whole leaves, the same on all ranks, cut as the parameters are."""
    rest = iter(whole)

    def cut(node: Any) -> Any:
        if isinstance(node, Tied):
            return node
        x = next(rest)
        if not isinstance(node, Sharded):
            return x
        return node.like(node.scheme.scatter(x, node.axis) if node.axes else x)

    return tree.map(cut, params, is_leaf=is_piece)


def own_leaves(grads: PyTree, bucket: Bucket) -> list[Tensor]:
    """The leaves of unreduced gradients, which have the whole parameters' shapes."""
    leaves = nodes_of(grads)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    if shapes != bucket.shapes or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ValueError(
            f"grads has leaves {[tuple(x.shape) for x in leaves]}, and the parameters "
            f"{list(bucket.shapes)}; this optimizer takes each rank's own gradients by the whole "
            "parameters: zf.accumulate(loss_fn, reduce=False)"
        )
    return leaves


def decays_of(params: PyTree, weight_decay: float, mask: Mask | None) -> list[float]:
    """The weight decay of each leaf of :func:`nodes_of`."""
    named = zip(tree.paths(params, is_piece), tree.leaves(params, is_piece), strict=True)
    return [
        weight_decay if mask is None or mask(path, tuple(node.shape)) else 0.0
        for path, node in named
        if not isinstance(node, Tied)
    ]


def zeros_of(bucket: Bucket, params: PyTree) -> Tensor:
    """A bucket of zeros."""
    (first, *_) = nodes_of(params)
    device = (first.local if isinstance(first, Sharded) else first).device
    return torch.zeros(bucket.length, dtype=bucket.dtype, device=device)


def check_settings(b1: float, b2: float, **counts: int) -> None:
    """Refuse what no run can use."""
    for name, beta in (("b1", b1), ("b2", b2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; it must be at least 0 and below 1")
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be an int of 1 or more")


def one_minus_power(beta: float, count: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - beta^count, computed in float64, since float32 loses most digits for small counts."""
    return (1 - torch.pow(torch.full_like(count, beta, dtype=torch.float64), count)).to(dtype)


def preconditioned(x: Tensor, nu: Tensor, unbias: Tensor, eps: float) -> Tensor:
    """x / (sqrt(nu / unbias) + eps), and exactly 0 where nu is 0: no gradient ever came there."""
    return torch.where(nu > 0, x / ((nu / unbias).sqrt() + eps), 0)
