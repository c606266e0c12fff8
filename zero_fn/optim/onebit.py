"""1-bit Adam and 1-bit LAMB: a warm-up at full precision, then momenta of one bit a value.

Adam is not linear in the gradient, so that feedback cannot make up for compressed gradients. But
its variance settles early; once it is frozen, the rest is linear in the momentum, which is then
exchanged in one bit a value (arXiv 2102.02888).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .. import tree
from ..codecs import Method
from ..collectives import pmean, psum
from ..compression import compression_state, exchange_momentum
from ..feedback import Bucket, ErrorFeedback
from ..finiteness import all_finite_in
from ..placed import placed_leaves
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

Phase = Literal["warmup", "compressed"]


@dataclass(frozen=True)
class OneBitState:
    """The state of :func:`onebit_adam` and :func:`onebit_lamb`, in flat buckets.

    Attributes:
        step: steps made, those left out for NaN or infinity not counted.
        mu: the mean of the gradients, the same on all ranks.
        nu: the mean of their squares, as it was when the warm-up ended.
        error: what the codes lost.
        lamb: LAMB's own: the fresh mean of squares, and for each leaf the average trust ratio and
            the last factor; else an empty tuple.
        phase: ``"warmup"`` or ``"compressed"``; static.
    """

    step: Tensor
    mu: Tensor
    nu: Tensor
    error: ErrorFeedback
    lamb: tuple[Tensor, ...]
    phase: Phase


tree.register_dataclass(OneBitState, static=("phase",))


def onebit_adam(
    learning_rate: LearningRate,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
    *,
    method: Method = "1bit",
    axis: str = "dp",
) -> LocalOptimizer:
    """1-bit Adam (arXiv 2102.02888, algorithm 1), with decoupled weight decay.

    For ``freeze_step`` steps it is AdamW, with one all-reduce of full precision. Then the variance
    stays, each rank forms b1 mu + (1 - b1) g from its own gradient, and the mean of these travels
    compressed, with error feedback.

    As in the paper, the momentum is compressed as it is, and the variance is that of the last
    warm-up step. Unlike DeepSpeed's OnebitAdam, means are corrected for their bias as in Adam (the
    variance by the number of steps it saw), each block of 1024 values has a scale of its own in
    place of each tensor, and a parameter that had no gradient in the warm-up (nu = 0) stays.

    Both means are whole on every rank, at stage 1 too. The momentum has to be: each rank adds its
    own gradient to all of it before it is encoded, and gathering pieces at full precision would
    send what the code saves. The variance could be cut once it is frozen, and is not.

    Args:
        learning_rate: a number, a 0-dim tensor, or a schedule.
        freeze_step: the steps of the warm-up; 15 to 20 % of a run are usual.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares; they should have settled: 1 / (1 - b2) is not far
            above ``freeze_step``.
        eps: added outside the root.
        weight_decay: the factor of the decay, itself multiplied by the learning rate.
        mask: a function of (key path, shape) that says which leaves decay; None: all.
        method: how the momentum travels, as for :func:`zero_fn.compress`.
        axis: the mesh axis.

    Raises:
        ValueError: for a beta outside [0, 1), or a ``freeze_step`` that is not positive.
    """
    check_settings(b1, b2, freeze_step=freeze_step)

    def update(grads: PyTree, state: OneBitState, params: PyTree) -> tuple[PyTree, OneBitState]:
        from zero_fn.kernels import precondition

        new = _moved(grads, state, params, b1, b2, method, axis)
        bucket = bucket_for(params, axis)
        rate = learning_rate_at(learning_rate, state.step).to(bucket.dtype)
        pieces, treedef = tree.flatten(params)
        updates = precondition(
            pieces,
            *[tree.leaves(cut_like(params, bucket.unpack(x))) for x in (new.mu, new.nu)],
            torch.where(new.error.finite, rate, 0),
            *_unbias(new, b1, b2, freeze_step),
            eps,
            decays_of(params, weight_decay, mask),
        )
        return tree.unflatten(treedef, updates), new

    return LocalOptimizer(
        lambda params: _init(params, method, axis, lamb=False),
        update,
        lambda state: _advance(state, freeze_step),
        lambda params, state: whole_params(params),
        finite_by_feedback,
    )


def onebit_lamb(
    learning_rate: LearningRate,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
    *,
    coeff_beta: float = 0.9,
    coeff_range: tuple[float, float] = (0.01, 10.0),
    factor_range: tuple[float, float] = (0.5, 4.0),
    factor_threshold: float = 0.1,
    method: Method = "1bit",
    axis: str = "dp",
) -> LocalOptimizer:
    """1-bit LAMB (arXiv 2104.06069, algorithm 1).

    The warm-up is LAMB: Adam's direction and the decay, times a trust ratio for each leaf,
    ‖p‖ / ‖direction‖, whose average over steps is kept. Then the variance stays and the momentum
    travels compressed as in :func:`onebit_adam`; the trust ratio is that average times a factor,
    the largest root of frozen over fresh variance, where the fresh one is made from the gradients
    that the momenta imply.

    Followed as in DeepSpeed's OnebitLamb: the factor's mix by the decay's share, its limits, and
    its largest change in a step. Unlike there, means are corrected for their bias. The paper's
    common scale of all leaves' momenta is not needed, since each block has a scale of its own.

    Args:
        learning_rate: a number, a 0-dim tensor, or a schedule.
        freeze_step: the steps of the warm-up.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added outside the root.
        weight_decay: the factor of the decay, which joins the direction.
        mask: a function of (key path, shape) that says which leaves decay; None: all.
        coeff_beta: decay of the average trust ratio.
        coeff_range: the smallest and largest trust ratio.
        factor_range: the smallest and largest factor.
        factor_threshold: the largest relative change of a factor in one step.
        method: how the momentum travels, as for :func:`zero_fn.compress`.
        axis: the mesh axis.

    Raises:
        ValueError: for a beta outside [0, 1), or a ``freeze_step`` that is not positive.
    """
    check_settings(b1, b2, freeze_step=freeze_step)

    def update(grads: PyTree, state: OneBitState, params: PyTree) -> tuple[PyTree, OneBitState]:
        new = _moved(grads, state, params, b1, b2, method, axis)
        bucket, finite = bucket_for(params, axis), new.error.finite
        fresh, average, last = state.lamb
        of_mu, of_nu = _unbias(new, b1, b2, freeze_step)
        direction = bucket.unpack(preconditioned(new.mu / of_mu, new.nu, of_nu, eps))
        decays = decays_of(params, weight_decay, mask)
        pieces = tree.leaves(params)
        steps = tree.leaves(cut_like(params, direction))
        whole = [d.to(p.dtype) + decay * p for d, p, decay in
                 zip(steps, pieces, decays, strict=True)]  # fmt: skip
        norm_p, norm_d, norm_plain = _norms(params, [pieces, whole, steps])
        if state.phase == "warmup":
            ratio = (norm_p / norm_d).clamp(*coeff_range)
            ratio = torch.where((norm_p > 0) & (norm_d > 0), ratio, 1)
            average = torch.where(
                state.step == 0, ratio, coeff_beta * average + (1 - coeff_beta) * ratio
            )
            fresh, factor = new.nu, last
        else:
            implied = (new.mu - b1 * state.mu) / (1 - b1)
            fresh = b2 * fresh + (1 - b2) * implied.square()
            grown = (new.nu.sqrt() + eps) / (fresh.sqrt() + eps)
            factor = torch.stack([x.max() if x.numel() else x.sum() + 1
                                  for x in bucket.unpack(grown)])  # fmt: skip
            share = (norm_plain / norm_d).nan_to_num(1.0).clamp(max=1)
            factor = (factor * share + 1 - share).clamp(*factor_range)
            factor = factor.clamp(last * (1 - factor_threshold), last * (1 + factor_threshold))
            ratio = average * factor
        rate = learning_rate_at(learning_rate, state.step).to(bucket.dtype)
        rates = torch.where(finite, rate * ratio, 0)
        updates = [
            -r.to(p.dtype) * torch.where(finite, d, 0)
            for r, d, p in zip(rates, whole, pieces, strict=True)
        ]
        kept = zip((fresh, average, factor), state.lamb, strict=True)
        lamb = tuple(torch.where(finite, a, b) for a, b in kept)
        return tree.unflatten(tree.flatten(params)[1], updates), replace(new, lamb=lamb)

    return LocalOptimizer(
        lambda params: _init(params, method, axis, lamb=True),
        update,
        lambda state: _advance(state, freeze_step),
        lambda params, state: whole_params(params),
        finite_by_feedback,
    )


def _init(params: PyTree, method: Method, axis: str, lamb: bool) -> OneBitState:
    bucket = bucket_for(params, axis)
    zeros = zeros_of(bucket, params)
    ones = zeros.new_ones(len(bucket.shapes))
    return OneBitState(
        torch.zeros((), dtype=torch.int64),
        zeros,
        zeros.clone(),
        compression_state(params, method, axis),
        (zeros.clone(), ones, ones.clone()) if lamb else (),
        "warmup",
    )


def _moved(
    grads: PyTree,
    state: OneBitState,
    params: PyTree,
    b1: float,
    b2: float,
    method: Method,
    axis: str,
) -> OneBitState:
    """The state with its means moved on, or as it was if a gradient is not finite."""
    bucket: Bucket = bucket_for(params, axis)
    own = own_leaves(grads, bucket)
    error: Any = state.error
    if state.phase == "warmup":
        g = pmean(bucket.pack(own), axis)
        mu, nu = b1 * state.mu + (1 - b1) * g, b2 * state.nu + (1 - b2) * g * g
        error = replace(error, finite=all_finite_in(g))
        mu = torch.where(error.finite, mu, state.mu)
        nu = torch.where(error.finite, nu, state.nu)
    else:
        mu, error = exchange_momentum(own, state.mu, b1, bucket, method, error, axis)
        nu = state.nu
    step = state.step + error.finite.to(state.step.dtype)
    return replace(state, step=step, mu=mu, nu=nu, error=error)


def _unbias(state: OneBitState, b1: float, b2: float, freeze_step: int) -> tuple[Tensor, Tensor]:
    """What mu and nu are divided by."""
    dtype, seen = state.mu.dtype, state.step.clamp(min=1)
    of_mu = one_minus_power(b1, seen, dtype)
    return of_mu, one_minus_power(b2, seen.clamp(max=freeze_step), dtype)


def _advance(state: OneBitState, freeze_step: int) -> OneBitState:
    if state.phase == "warmup" and int(state.step) >= freeze_step:
        return replace(state, phase="compressed")
    return state


def _norms(params: PyTree, lists: list[list[Tensor]]) -> list[Tensor]:
    """For each list of pieces, the norms of the whole leaves, (leaves,); one sum over ranks."""
    squares = torch.stack([torch.stack([x.square().sum() for x in xs]) for xs in lists])
    axes = {leaf.axes for leaf in placed_leaves(params)}
    if len(axes) > 1:
        raise ValueError(
            f"the parameters are cut over {sorted(axes)}, and onebit_lamb takes leaves that are "
            "all cut alike: shard them in one call, zf.shard(params, stage)"
        )
    (over,) = axes
    return list((psum(squares, over) if over else squares).sqrt())
