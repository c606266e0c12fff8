"""What block-sparse attention computes, in plain torch: the formula, and the same row by row.

The formula has every score in memory and is the tests' oracle. Row by row only the scores of one
row of blocks exist at a time, and torch differentiates it as often as one likes: it is the source
of second derivatives and of the gradients through ``log_sum``.
"""

import math

import torch
from torch import Tensor

from .layout_tiles import tiles_of
from .layouts import Layout


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
    return _softmax(scores.masked_fill(~seen, -math.inf), v)


def _softmax(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
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


def attention_by_rows(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same for a layout, with the scores of one row of its blocks in memory at a time."""
    group = q.shape[1] // max(k.shape[1], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    size = layout.block
    tiles = tiles_of(layout, size, size)
    ptr = tiles.ptr.tolist()
    table = torch.cat([tiles.table, torch.ones(1, size, size, dtype=torch.bool, device="cpu")])
    inside = torch.arange(size, device="cpu")
    outs, log_sums = [], []
    for head in range(q.shape[1]):
        # A shared layout has one pattern for any number of heads.
        pattern = layout.head_patterns[head if layout.heads > 1 else 0]
        found = []
        for row in range(layout.q_blocks):
            at = pattern * layout.q_blocks + row
            own = slice(ptr[at], ptr[at + 1])
            rows = slice(row * size, min((row + 1) * size, layout.q_len))
            keys = (tiles.others[own].long()[:, None] * size + inside).flatten()
            seen = table[tiles.masks[own].long()].transpose(0, 1).flatten(1)
            seen, keys = (x[..., keys < layout.k_len].to(q.device) for x in (seen, keys))
            scores = q[:, head, rows].to(wide) @ k[:, head, keys].mT * scale
            if bias is not None:
                part = bias[:, head if bias.shape[1] > 1 else 0].to(wide)
                part = part[:, rows] if part.shape[1] > 1 else part
                scores = scores + (part[..., keys] if part.shape[2] > 1 else part)
            seen = seen[: scores.shape[-2]]
            found.append(_softmax(scores.masked_fill(~seen, -math.inf), v[:, head, keys]))
        if found:
            outs.append(torch.cat([out for out, _ in found], 1))
            log_sums.append(torch.cat([log_sum for _, log_sum in found], 1))
    if not outs:
        return q * 1, q.to(wide).sum(-1)
    return torch.stack(outs, 1).to(q.dtype), torch.stack(log_sums, 1)
