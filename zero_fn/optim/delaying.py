"""The one-step delayed update of ZeRO-Offload: a step applies the gradients of the step before."""

from typing import NamedTuple

import torch

from .. import tree
from ..tree import PyTree, Tensor
from .protocol import Optimizer


class DelayedState(NamedTuple):
    """What a delayed update remembers.

    Attributes:
        step: the steps so far.
        grads: the gradients of the last one.
        inner: the optimizer's own state.
    """

    step: Tensor
    grads: PyTree
    inner: PyTree


def delayed_update(optimizer: Optimizer, *, start: int) -> Optimizer:
    """The optimizer, given the gradients of the step before: its update waits for no backward.

    ZeRO-Offload (arXiv 2101.06840, section 5.2) hides the update on the CPU behind the next step's
    forward and backward in this way, from the 40th step on. With g_t the gradients at parameters
    p_t, counted from 0: p_{t+1} = p_t + u(g_t) for t < start, as without it; p_{t+1} = p_t at
    t = start; p_{t+1} = p_t + u(g_{t-1}) after that.

    It is another method, not another way to run the same one. Plain gradient descent along a
    curvature h converges for rates below 1 / h, where it did below 2 / h without the delay. The
    gradients are kept as part of the state, and each new value is selected, so that a leaf of the
    state takes twice its memory while it is updated.

    Args:
        optimizer: an ``(init, update)`` pair. Schedules inside it count its own updates, of which
            one is left out.
        start: how many steps are made as usual before.

    Raises:
        TypeError: for an optimizer that exchanges gradients itself.
        ValueError: if ``start`` is negative.
    """
    if not hasattr(optimizer, "update") or hasattr(optimizer, "advance"):
        raise TypeError(
            f"delayed_update takes an (init, update) pair, zf.adamw(...) say; got {optimizer!r}"
        )
    if start < 0:
        raise ValueError(f"start is {start}; it is a number of steps, 0 or more")

    def init(params: PyTree) -> DelayedState:
        zeros = tree.map(torch.zeros_like, params)
        return DelayedState(torch.zeros((), dtype=torch.int64), zeros, optimizer.init(params))

    def update(grads: PyTree, state: DelayedState, params: PyTree) -> tuple[PyTree, DelayedState]:
        early, pause = state.step < start, state.step == start
        applied = tree.map(lambda g, old: torch.where(early, g, old), grads, state.grads)
        updates, inner = optimizer.update(applied, state.inner, params)
        updates = tree.map(lambda u: torch.where(pause, torch.zeros_like(u), u), updates)
        inner = tree.map(
            lambda new, old: torch.where(pause, old, new) if isinstance(new, Tensor) else new,
            inner,
            state.inner,
        )
        kept = tree.map(lambda g, old: g.to(old.dtype), grads, state.grads)
        return updates, DelayedState(state.step + 1, kept, inner)

    return Optimizer(init, update)
