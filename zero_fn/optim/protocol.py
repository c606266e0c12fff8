"""The protocol of an optimizer, and the pieces that others are chained from.

An optimizer is a pair ``(init, update)``, as in optax: ``update(grads, state, params)`` gives
``(updates, state)``, and the new parameters are ``params + updates``. Any pair of this form works,
from whatever library; it maps over pieces and need not know that they are pieces.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import tree
from ..collectives import psum, pvary
from ..placed import placed_leaves, tree_axes
from ..tree import PyTree, Tensor


class Optimizer(NamedTuple):
    """An optimizer as a pair of pure functions.

    Attributes:
        init: params to the initial state.
        update: (grads, state, params) to (updates, new state).
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


Mask = Callable[[str, tuple[int, ...]], bool]  # (key path, shape of the whole leaf)
Schedule = Callable[[Tensor], Tensor]
LearningRate = float | Tensor | Schedule


def learning_rate_at(learning_rate: LearningRate, count: Tensor) -> Tensor:
    """The rate, a 0-dim tensor, when ``count`` steps have been made."""
    if isinstance(learning_rate, Tensor):
        return learning_rate
    if callable(learning_rate):
        return learning_rate(count)
    return torch.full_like(count, learning_rate, dtype=torch.float64)


def scale_by_learning_rate(learning_rate: LearningRate) -> Optimizer:
    """Multiply by minus the learning rate, which turns a direction into an update."""

    def update(grads: PyTree, count: Tensor, params: PyTree) -> tuple[PyTree, Tensor]:
        rate = learning_rate_at(learning_rate, count)
        return tree.map(lambda g: -rate.to(g.dtype) * g, grads), count + 1

    return Optimizer(lambda params: torch.zeros((), dtype=torch.int64), update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates``, leaf by leaf, in the parameters' dtypes."""
    return tree.map(lambda p, u: p + u.to(p.dtype), params, updates)


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply several in turn: the updates of one are the gradients of the next.

    Raises:
        TypeError: for an optimizer that exchanges gradients itself.
    """
    for optimizer in optimizers:
        if hasattr(optimizer, "advance"):
            raise TypeError(
                "chain takes (init, update) pairs, and got an optimizer that exchanges gradients "
                "itself (onebit_adam, say); clip with zf.train_step(..., clip=...)"
            )

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        states = []
        for optimizer, inner in zip(optimizers, state, strict=True):
            grads, inner = optimizer.update(grads, inner, params)
            states.append(inner)
        return grads, tuple(states)

    return Optimizer(init, update)


def stateless(f: Callable[[PyTree, PyTree], PyTree]) -> Optimizer:
    """An optimizer without state from a function (grads, params) to updates."""
    return Optimizer(lambda params: (), lambda grads, state, params: (f(grads, params), state))


def global_norm(grads: PyTree) -> Tensor:
    """The Euclidean norm of all leaves as one vector, the same on all ranks; 0-dim.

    Pieces add over the axes they are cut on, and over those only; a copy of what another rank
    holds does not count. Sums are in float32, or in float64 if a leaf is, or if ranks hold
    different leaves and cannot know.
    """
    leaves, outer = placed_leaves(grads), tree_axes(grads)
    wide = bool(outer) or any(leaf.value.dtype == torch.float64 for leaf in leaves)
    dtype = torch.float64 if wide else torch.float32
    sums: dict[tuple[str, ...], Tensor] = {}
    for leaf in leaves:
        if not leaf.copy:
            square = leaf.value.to(dtype).square().sum()
            sums[leaf.axes] = sums[leaf.axes] + square if leaf.axes in sums else square
    total = own = torch.zeros((), dtype=dtype)
    for axes, square in sums.items():
        inner = tuple(axis for axis in axes if axis not in outer)
        square = psum(square, inner) if inner else square
        if inner == axes:
            total = total + square
        else:  # ranks sum the same axes in the same order, whatever leaves they hold
            own = own + square
    return (total + psum(own, outer) if outer else total).sqrt()


def scale_by_factor(grads: PyTree, factor: Tensor) -> PyTree:
    """Each leaf times a 0-dim factor that all ranks share."""
    leaves = placed_leaves(grads)
    # Where what all ranks share meets what varies, its gradient is a sum over the ranks.
    factors = {axes: pvary(factor, axes) for axes in {leaf.axes for leaf in leaves}}
    scaled = []
    for leaf in leaves:
        own = tree.on_device_of(leaf.value, factors[leaf.axes])
        scaled.append(leaf.value * own.to(leaf.value.dtype))
    return tree.unflatten(tree.flatten(grads)[1], scaled)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of that global norm are multiplied by to bring it to ``max_norm`` at most.

    As in ``torch.nn.utils.clip_grad_norm_``: min(1, max_norm / (norm + 1e-6)).
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale the gradients so that their global norm is at most ``max_norm``.

    Raises:
        ValueError: if ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive. To clip nothing, leave out")
    return stateless(
        lambda grads, params: scale_by_factor(grads, clip_factor(global_norm(grads), max_norm))
    )


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> Optimizer:
    """Add ``weight_decay * param`` to each gradient.

    Args:
        weight_decay: the factor.
        mask: a function of (key path, shape of the whole leaf) that says which leaves decay;
            None: all.
    """

    def update(grads: PyTree, params: PyTree) -> PyTree:
        decays = decay_of_leaves(params, weight_decay, mask)
        leaves, treedef = tree.flatten(grads)
        pairs = zip(leaves, tree.leaves(params), decays, strict=True)
        return tree.unflatten(treedef, [g + decay * p if decay else g for g, p, decay in pairs])

    return stateless(update)


def decay_of_leaves(params: PyTree, weight_decay: float, mask: Mask | None) -> list[float]:
    """The weight decay of each leaf, in order."""
    leaves = placed_leaves(params)
    return [weight_decay if mask is None or mask(x.path, x.shape) else 0.0 for x in leaves]
