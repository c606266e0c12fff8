"""Adam and AdamW (arXiv 1412.6980, 1711.05101), through one fused kernel for the whole tree."""

from typing import NamedTuple

import torch

from .. import tree
from ..tree import PyTree, Tensor
from .protocol import LearningRate, Mask, Optimizer, decay_of_leaves, learning_rate_at


class AdamState(NamedTuple):
    """The number of steps made, and the running means of gradients and of their squares."""

    step: Tensor
    mu: PyTree
    nu: PyTree


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), as ``torch.optim.AdamW``.

    mu = b1 mu + (1 - b1) g; nu = b2 nu + (1 - b2) g²;
    p = p - lr * (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay * p).

    Args:
        learning_rate: a number, a 0-dim tensor, or a schedule.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added outside the root.
        weight_decay: the factor of the decay, itself multiplied by the learning rate.
        mask: a function of (key path, shape of the whole leaf) that says which leaves decay;
            None: all.
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, mask, decoupled=True)


def adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Adam (arXiv 1412.6980, algorithm 1), as ``torch.optim.Adam``: decay joins the gradient.

    The arguments are those of :func:`adamw`; ``weight_decay * p`` is added to the gradient.
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, mask, decoupled=False)


def _adam(
    learning_rate: LearningRate,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Mask | None,
    decoupled: bool,
) -> Optimizer:
    for name, beta in (("b1", b1), ("b2", b2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; it must be at least 0 and below 1")

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        from zero_fn.kernels import fused_adamw

        leaves, treedef = tree.flatten(params)
        step = state.step + 1
        updates, mu, nu = fused_adamw(
            leaves,
            tree.leaves(grads),
            tree.leaves(state.mu),
            tree.leaves(state.nu),
            step,
            learning_rate_at(learning_rate, state.step),
            beta1=b1,
            beta2=b2,
            eps=eps,
            weight_decay=decay_of_leaves(params, weight_decay, mask),
            decoupled=decoupled,
        )
        mu, nu = tree.unflatten(treedef, mu), tree.unflatten(treedef, nu)
        return tree.unflatten(treedef, updates), AdamState(step, mu, nu)

    return Optimizer(_init, update)


def _init(params: PyTree) -> AdamState:
    mu, nu = (tree.map(torch.zeros_like, params) for _ in range(2))
    return AdamState(torch.zeros((), dtype=torch.int64), mu, nu)


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam's direction alone, in plain torch, to chain others from: no rate, no decay, no sign.

    The update is mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps). Chained with
    ``scale_by_learning_rate`` it is Adam.
    """

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        step = state.step + 1
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        # In float64, since 1 - b2^t loses most of its digits in float32 when t is small.
        unbias1 = 1 - torch.pow(torch.full_like(step, b1, dtype=torch.float64), step)
        unbias2 = 1 - torch.pow(torch.full_like(step, b2, dtype=torch.float64), step)

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return m / unbias1.to(m.dtype) / ((v / unbias2.to(v.dtype)).sqrt() + eps)

        return tree.map(direction, mu, nu), AdamState(step, mu, nu)

    return Optimizer(_init, update)
