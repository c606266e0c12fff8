"""0/1 Adam: one bit a value at some steps, nothing at the others.

The variance is learnt at steps that lie ever farther apart; in between, and after that, updates
travel in one bit a value, and later only every few steps, while each rank walks on by itself
(arXiv 2202.06009, algorithm 1).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import torch

from .. import tree
from ..codecs import Method
from ..collectives import agreed, pmean, pvary
from ..compression import compression_state, exchange
from ..feedback import ErrorFeedback, PerRank
from ..finiteness import all_finite_in
from ..tree import PyTree, Tensor
from .local import (
    LocalOptimizer,
    bucket_for,
    check_settings,
    cut_like,
    decays_of,
    finite_by_feedback,
    one_minus_power,
    own_leaves,
    preconditioned,
    whole_params,
    zeros_of,
)
from .protocol import LearningRate, Mask, learning_rate_at

Phase = Literal["full", "sync", "local", "join"]


@dataclass(frozen=True)
class ZeroOneState:
    """The state of :func:`zero_one_adam`, in flat buckets.

    Attributes:
        step: steps made, those left out for NaN or infinity not counted.
        seen: how many gradients the variance has seen.
        mu: each rank's own mean of its gradients; equal after a synchronisation.
        ahead: how far each rank has walked by itself, before it is divided by the root.
        rate: the sum of the rates that ``ahead`` is weighted by.
        decay: the sum of the learning rates since the last synchronisation.
        nu: the mean of the squares of the mean gradients, the same on all ranks.
        error: what the codes lost.
        phase: of the next step; static. ``"full"``: the gradient travels at full precision, and the
            variance moves; ``"sync"``: one bit a value; ``"local"``: nothing travels; ``"join"``:
            one bit a value, after local steps.
    """

    step: Tensor
    seen: Tensor
    mu: PerRank
    ahead: PerRank
    rate: Tensor
    decay: Tensor
    nu: Tensor
    error: ErrorFeedback
    phase: Phase


tree.register_dataclass(ZeroOneState, static=("phase",))


def zero_one_adam(
    learning_rate: LearningRate,
    var_freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
    *,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    method: Method = "1bit",
    axis: str = "dp",
) -> LocalOptimizer:
    """0/1 Adam (arXiv 2202.06009, algorithm 1), with decoupled weight decay.

    Between synchronisations rank i has walked u_i = Σ γ m_i / (sqrt(v) + eps) by itself, and takes
    its gradients there; a synchronisation averages the u_i in one bit a value, with feedback, and
    the momentum becomes that average over Σ γ. The parameters in the state are those of the last
    synchronisation.

    The settings have the names and meaning of DeepSpeed's ZeroOneAdam. As in the paper, and unlike
    there, the exact gradient of a variance step moves the momentum too. Unlike both, means are
    corrected for their bias (γ is the rate over 1 - b1^t), and each block of 1024 values has a
    scale of its own. The decay of the parameters is applied at synchronisations. The state is whole
    on every rank, at stage 1 too: a rank walks by itself over all parameters, which takes its own
    momentum and the whole variance.

    Args:
        learning_rate: a number, a 0-dim tensor, or a schedule.
        var_freeze_step: the step from which the variance stays, and local steps may begin.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added outside the root.
        weight_decay: the factor of the decay, itself multiplied by the learning rate.
        mask: a function of (key path, shape) that says which leaves decay; None: all.
        var_update_scaler: the variance steps lie 1 apart for so many of them, then 2, 4, ...; more
            than 1 / (1 - b2) should come before ``var_freeze_step``.
        local_step_scaler: after ``var_freeze_step`` the steps between synchronisations double after
            every so many.
        local_step_clipper: the most steps between synchronisations.
        method: how updates travel, as for :func:`zero_fn.compress`.
        axis: the mesh axis.

    Raises:
        ValueError: for a beta outside [0, 1), or a count that is not positive.
    """
    check_settings(
        b1,
        b2,
        var_freeze_step=var_freeze_step,
        var_update_scaler=var_update_scaler,
        local_step_scaler=local_step_scaler,
        local_step_clipper=local_step_clipper,
    )
    phase_at = phases(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)

    def scaled(x: Tensor, nu: Tensor, seen: Tensor) -> Tensor:
        return preconditioned(x, nu, one_minus_power(b2, seen.clamp(min=1), nu.dtype), eps)

    def init(params: PyTree) -> ZeroOneState:
        bucket = bucket_for(params, axis)
        zeros = zeros_of(bucket, params)
        none, number = torch.zeros((), dtype=torch.int64), zeros.new_zeros(())
        own = PerRank(zeros, axis, (bucket.length,))
        return ZeroOneState(
            none,
            none.clone(),
            own,
            own.like(zeros.clone()),
            number,
            number.clone(),
            zeros.clone(),
            compression_state(params, method, axis),
            phase_at(0),
        )

    def update(grads: PyTree, state: ZeroOneState, params: PyTree) -> tuple[PyTree, ZeroOneState]:
        bucket = bucket_for(params, axis)
        own = bucket.pack(own_leaves(grads, bucket))
        lr = learning_rate_at(learning_rate, state.step).to(bucket.dtype)
        rate = lr / one_minus_power(b1, state.step + 1, bucket.dtype)
        error: Any = state.error
        nu, seen, decay = state.nu, state.seen, state.decay + lr
        if state.phase == "full":
            g = pmean(own, axis)
            finite = all_finite_in(g)
            mu = b1 * agreed(state.mu.local, axis) + (1 - b1) * g
            nu, seen = b2 * nu + (1 - b2) * g * g, seen + 1
            walked, total = rate * mu, rate
            error = replace(error, finite=finite)
        else:
            mu = b1 * state.mu.local + (1 - b1) * own
            ahead, total = state.ahead.local + rate * mu, state.rate + rate
            if state.phase == "local":
                # Another rank's NaN shows at the next synchronisation; this rank's waits there.
                updates = tree.map(torch.zeros_like, params)
                moved = replace(
                    state,
                    step=state.step + 1,
                    mu=state.mu.like(mu),
                    ahead=state.ahead.like(ahead),
                    rate=total,
                    decay=decay,
                )
                return updates, moved
            walked, error = exchange(ahead, bucket, method, error, axis)
            finite = error.finite
            mu = walked / total
        step = scaled(walked, torch.where(finite, nu, state.nu), seen)
        pieces = cut_like(params, bucket.unpack(torch.where(finite, step, 0)))
        shrink = torch.where(finite, decay, 0)
        decays = decays_of(params, weight_decay, mask)
        pairs = zip(tree.leaves(pieces), tree.leaves(params), decays, strict=True)
        updates = tree.unflatten(
            tree.flatten(params)[1],
            [-d.to(p.dtype) - shrink.to(p.dtype) * w * p for d, p, w in pairs],
        )
        # A rank whose local walk was spoilt starts over from the last synchronisation.
        calm = agreed(state.mu.local, axis) if state.phase != "join" else torch.zeros_like(nu)
        mu = torch.where(finite, mu, calm)
        zero = torch.zeros_like(nu)
        return updates, replace(
            state,
            step=state.step + finite.to(state.step.dtype),
            seen=torch.where(finite, seen, state.seen),
            mu=state.mu.like(mu),
            ahead=state.ahead.like(zero),
            rate=torch.zeros_like(state.rate),
            decay=torch.zeros_like(state.decay),
            nu=torch.where(finite, nu, state.nu),
            error=error,
        )

    def view(params: PyTree, state: ZeroOneState) -> PyTree:
        if state.phase in ("full", "sync"):
            return whole_params(params)
        nu, seen = pvary(state.nu, axis), pvary(state.seen, axis)
        return whole_params(params, bucket_for(params, axis).unpack(
            scaled(state.ahead.local, nu, seen)))  # fmt: skip

    return LocalOptimizer(
        init,
        update,
        lambda state: replace(state, phase=phase_at(int(state.step))),
        view,
        finite_by_feedback,
    )


def phases(
    var_freeze_step: int, var_update_scaler: int, local_step_scaler: int, local_step_clipper: int
) -> Callable[[int], Phase]:
    """The phase of each step, counted from 0; see :func:`zero_one_adam`."""
    known: list[Phase] = []
    endless = _endless(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)

    def phase_at(step: int) -> Phase:
        while len(known) <= step:
            known.append(next(endless))
        return known[step]

    return phase_at


def _endless(freeze: int, var_scaler: int, local_scaler: int, clipper: int) -> Iterator[Phase]:
    next_full = updates = 0
    for step in range(freeze):
        if step == next_full:
            updates += 1
            next_full += 2 ** ((updates - 1) // var_scaler)
            yield "full"
        else:
            yield "sync"
    since = 0
    for step in count():
        # min() first, so that no power grows without end
        interval = min(2 ** min(step // local_scaler, 30), clipper)
        since += 1
        if since >= interval:
            yield "sync" if since == 1 else "join"
            since = 0
        else:
            yield "local"
