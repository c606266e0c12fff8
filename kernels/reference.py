"""What the kernels compute, in plain torch: the tests' oracle, and the source of derivatives."""

import math

import torch
from torch import Tensor


def adamw_leaf(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One leaf of Adam (arXiv 1412.6980, algorithm 1) or AdamW (1711.05101, algorithm 2).

    Computed in float32, or in float64 if the parameter is; ``step`` counts from 1.

    Returns:
        The update (to be added to ``p``), and the new moments.
    """
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    # In float64: 1 - beta^t loses most of its digits in float32 while t is small.
    exponent = step.to(torch.float64)
    unbias1 = (1 - torch.pow(beta1, exponent)).to(wide)
    unbias2 = (1 - torch.pow(beta2, exponent)).to(wide)
    rate, p_, g_, m_, v_ = (x.to(wide) for x in (lr, p, g, m, v))
    if grad_scale is not None:
        g_ = g_ / grad_scale.to(wide)
    if weight_decay and not decoupled:
        g_ = g_ + weight_decay * p_
    m_ = beta1 * m_ + (1 - beta1) * g_
    v_ = beta2 * v_ + (1 - beta2) * g_ * g_
    # The root of an exact zero has an infinite slope; its update is zero whatever it is divided by.
    root = torch.where(v_ == 0, 0, torch.where(v_ == 0, 1, v_ / unbias2).sqrt())
    update = -rate * (m_ / unbias1) / (root + eps)
    if weight_decay and decoupled:
        update = update - rate * weight_decay * p_
    if skip is not None:
        keep = skip != 0
        update = torch.where(keep, torch.zeros_like(update), update)
        m_, v_ = torch.where(keep, m.to(wide), m_), torch.where(keep, v.to(wide), v_)
    return update.to(p.dtype), m_.to(m.dtype), v_.to(v.dtype)


def round_by_chance(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16, to one of the two neighbours, so that the mean over ``bits`` is ``x``.

    Args:
        x: finite values; NaN and infinities stay what they are.
        bits: random integers; their lowest 16 bits are used.
    """
    pattern = x.contiguous().view(torch.int32)
    # & drops the sign's carry into the 64-bit sum; the lower half is dropped after the addition.
    upper = (pattern.to(torch.int64) + (bits & 0xFFFF)) & 0xFFFF0000
    rounded = (upper - ((upper >> 31) << 32)).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def philox_bits(seed: Tensor, leaf: int, shape: torch.Size) -> Tensor:
    """32 random bits an element, in int64: Philox 4x32-7 (Salmon et al. 2011).

    The counter is (element's place, 0 or its upper half, leaf, 0), the key is the seed, so that the
    bits are those of the Triton kernel.
    """
    low = (1 << 32) - 1
    place = torch.arange(shape.numel(), device=seed.device)
    c0, c1 = place & low, place >> 32
    c2, c3 = torch.full_like(place, leaf), torch.zeros_like(place)
    k0, k1 = seed.to(torch.int64) & low, (seed.to(torch.int64) >> 32) & low
    for _ in range(7):
        high0, low0 = _wide_product(0xD2511F53, c0)
        high1, low1 = _wide_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0.reshape(shape)


def _wide_product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of the product of two 32-bit numbers."""
    upper, lower = b >> 16, b & 0xFFFF
    first = a * lower  # below 2^48
    second = a * upper + (first >> 16)  # below 2^49
    return second >> 16, ((second & 0xFFFF) << 16) | (first & 0xFFFF)


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q kᵀ + bias) v over the keys that are seen, with all scores in memory.

    Args:
        q: (batch, heads, queries, size).
        k: (batch, heads or a divisor of them, keys, size).
        v: like ``k``.
        seen: bool, broadcast to (batch, heads, queries, keys).
        scale: the factor.
        bias: added to the scores, broadcast likewise.

    Returns:
        The result, and the logarithm of the sum of exponentials (batch, heads, queries). A query
        that sees nothing has 0 and -inf.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    if not scores.shape[-1]:
        return (scores @ v), scores.sum(-1) - math.inf
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1, total)
    log_sum = torch.where(nothing, -math.inf, total.log() + top)
    return weights @ v / total, log_sum.squeeze(-1)
