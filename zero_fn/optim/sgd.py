"""Stochastic gradient descent, with momentum."""

from typing import NamedTuple

import torch

from .. import tree
from ..tree import PyTree, Tensor
from .protocol import LearningRate, Optimizer, learning_rate_at


class SGDState(NamedTuple):
    """The number of steps made, and the momentum (None without)."""

    step: Tensor
    momentum: PyTree


def sgd(learning_rate: LearningRate, momentum: float = 0.0, nesterov: bool = False) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD`` with dampening 0.

    m = momentum * m + g; the update is -lr * m, or with Nesterov -lr * (g + momentum * m).

    Args:
        learning_rate: a number, a 0-dim tensor, or a schedule.
        momentum: the decay of the running sum; 0: no sum is kept.
        nesterov: whether to look ahead (Sutskever et al. 2013).

    Raises:
        ValueError: for ``nesterov`` without momentum.
    """
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs a momentum above 0")

    def init(params: PyTree) -> SGDState:
        step = torch.zeros((), dtype=torch.int64)
        return SGDState(step, tree.map(torch.zeros_like, params) if momentum else None)

    def update(grads: PyTree, state: SGDState, params: PyTree) -> tuple[PyTree, SGDState]:
        rate = learning_rate_at(learning_rate, state.step)
        if not momentum:
            return tree.map(lambda g: -rate.to(g.dtype) * g, grads), SGDState(state.step + 1, None)
        moved = tree.map(lambda m, g: momentum * m + g, state.momentum, grads)
        ahead = tree.map(lambda g, m: g + momentum * m, grads, moved) if nesterov else moved
        return tree.map(lambda m: -rate.to(m.dtype) * m, ahead), SGDState(state.step + 1, moved)

    return Optimizer(init, update)
