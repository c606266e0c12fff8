"""Block-sparse attention in plain torch, one row of blocks at a time, on any device.

Only the scores of one head's row of blocks are in memory. It serves where nothing faster does: for
devices without a kernel, for the gradient through the log-sum, and for second derivatives.

In the formulas below, for the queries of a row and the keys that they see: S = scale Q Kᵀ + bias,
P = softmax(S), O = P V; G is the gradient of O, and l that of the log-sum.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .layout_tiles import tiles_of
from .layouts import Layout


class _Row(NamedTuple):
    """Where a row lies, and its tensors: (batch, queries or keys, size)."""

    head: int
    kv_head: int
    rows: slice
    keys: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor  # P
    log_sum: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """The result like ``q``, and the log-sum (batch, heads, queries).

    Args:
        q: (batch, heads, queries, size).
        k: (batch, heads or a divisor of them, keys, size).
        v: like ``k``.
        bias: (1 or batch, 1 or heads, 1 or queries, 1 or keys), or None.
        layout: what is seen.
        scale: the factor of the scores.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    log_sum = q.new_full(q.shape[:3], -math.inf, dtype=_wide(q))
    for row in _rows(q, k, v, bias, layout, scale):
        out[:, row.head, row.rows] = (row.weights @ row.v).to(out.dtype)
        log_sum[:, row.head, row.rows] = row.log_sum
    return out, log_sum


def backward(
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    dS = P ∘ (G Vᵀ − rowsum(G ∘ O) + l); dQ = scale dS K; dK = scale dSᵀ Q; dV = Pᵀ G.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(x), device=x.device) for x in (q, k, v))
    for row in _rows(q, k, v, bias, layout, scale):
        g = grad[:, row.head, row.rows].to(dq.dtype)
        _, _, ds = _scores(row, g, grad_log_sum)
        dq[:, row.head, row.rows] = scale * (ds @ row.k)
        dk[:, row.kv_head].index_add_(1, row.keys, scale * (ds.mT @ row.q))
        dv[:, row.kv_head].index_add_(1, row.keys, row.weights.mT @ g)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def double_backward(
    cotangents: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: Layout,
    scale: float,
) -> list[Tensor]:
    """The gradients of q, k, v, ``grad`` (and ``grad_log_sum``) through what backward returns.

    With cotangents A, B, C of dQ, dK, dV: F = ⟨A, dQ⟩ + ⟨B, dK⟩ + ⟨C, dV⟩ = ⟨dS, W⟩ + ⟨P, G Cᵀ⟩,
    where W = scale (A Kᵀ + Q Bᵀ). By the chain rule, with w = rowsum(P ∘ W), D = rowsum(G ∘ O):

    - ∂F/∂(G Vᵀ) = E = P ∘ (W − w), so ∂F/∂G = E V + P C, ∂F/∂V = Eᵀ G, and ∂F/∂l = w;
    - ∂F/∂P = H = G Vᵀ ∘ (W − w) + (l − D) ∘ W + G Cᵀ, and ∂F/∂S = T = P ∘ (H − rowsum(P ∘ H));
    - ∂F/∂Q = scale (T K + dS B), and ∂F/∂K = scale (Tᵀ Q + dSᵀ A).
    """
    inputs = (q, k, v, grad) if grad_log_sum is None else (q, k, v, grad, grad_log_sum)
    found = [torch.zeros(x.shape, dtype=_wide(x), device=x.device) for x in inputs]
    wide = found[0].dtype
    for row in _rows(q, k, v, bias, layout, scale):
        p = row.weights
        g, a = (x[:, row.head, row.rows].to(wide) for x in (grad, cotangents[0]))
        b, c = (x[:, row.kv_head, row.keys].to(wide) for x in cotangents[1:])
        gv, shift, ds = _scores(row, g, grad_log_sum)
        w = scale * (a @ row.k.mT + row.q @ b.mT)
        mean = (p * w).sum(-1, keepdim=True)
        e = p * (w - mean)
        h = gv * (w - mean) + shift * w + g @ c.mT
        t = p * (h - (p * h).sum(-1, keepdim=True))
        found[0][:, row.head, row.rows] = scale * (t @ row.k + ds @ b)
        found[1][:, row.kv_head].index_add_(1, row.keys, scale * (t.mT @ row.q + ds.mT @ a))
        found[2][:, row.kv_head].index_add_(1, row.keys, e.mT @ g)
        found[3][:, row.head, row.rows] = e @ row.v + p @ c
        if grad_log_sum is not None:
            found[4][:, row.head, row.rows] = mean[..., 0]
    return [x.to(like.dtype) for x, like in zip(found, inputs, strict=True)]


def _scores(row: _Row, g: Tensor, grad_log_sum: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """G Vᵀ, l − rowsum(G ∘ O), and dS of a row."""
    gv = g @ row.v.mT
    shift = -(row.weights * gv).sum(-1, keepdim=True)  # rowsum(G ∘ P V)
    if grad_log_sum is not None:
        shift = shift + grad_log_sum[:, row.head, row.rows, None]
    return gv, shift, row.weights * (gv + shift)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: Layout, scale: float
) -> Iterator[_Row]:
    group = q.shape[1] // k.shape[1]
    size, wide = layout.block, _wide(q)
    tiles = tiles_of(layout, size, size)
    ptr = tiles.ptr.tolist()
    table = torch.cat([tiles.table, tiles.table.new_ones(1, size, size)])
    for head in range(q.shape[1]):
        # A shared layout has one pattern for any number of heads.
        pattern = layout.head_patterns[head if layout.heads > 1 else 0]
        for number in range(layout.q_blocks):
            at = pattern * layout.q_blocks + number
            own = slice(ptr[at], ptr[at + 1])
            if own.start == own.stop:
                continue
            rows = slice(number * size, min((number + 1) * size, layout.q_len))
            inside = torch.arange(size, device=tiles.others.device)
            keys = (tiles.others[own].long()[:, None] * size + inside).flatten()
            seen = table[tiles.masks[own].long()].transpose(0, 1).flatten(1)
            seen = seen[: rows.stop - rows.start, keys < layout.k_len].to(q.device)
            keys = keys[keys < layout.k_len].to(q.device)
            own_q = q[:, head, rows].to(wide)
            own_k, own_v = (x[:, head // group, keys].to(wide) for x in (k, v))
            scores = own_q @ own_k.mT * scale
            if bias is not None:
                part = bias[:, head if bias.shape[1] > 1 else 0].to(wide)
                part = part[:, rows] if part.shape[1] > 1 else part
                scores = scores + (part[..., keys] if part.shape[2] > 1 else part)
            scores = scores.masked_fill(~seen, -math.inf)
            log_sum = scores.logsumexp(-1)
            # Of what sees nothing, the weights are 0, not exp(-inf + inf).
            weights = (scores - log_sum.masked_fill(log_sum == -math.inf, 0)[..., None]).exp()
            yield _Row(head, head // group, rows, keys, own_q, own_k, own_v, weights, log_sum)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
