"""Block-sparse attention on a CPU: one call of torch's flash attention for each row of tiles.

The keys of a row are gathered, so that the work is that of the blocks that are seen. Half
precision is computed in float32: most CPUs have no fast product of anything smaller.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .layout_tiles import tiles_of
from .layouts import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# What a row of tiles costs besides its rows × keys scores, in scores: the gathering of a key as
# much as about 16 rows of scores, the calls as much as a few thousand scores.
_GATHER, _CALL = 16, 4096
_MOST_ROWS = 256


class _Row(NamedTuple):
    """A row of tiles: queries ``start`` to ``stop``, blocks of keys, and what of them is hidden."""

    start: int
    stop: int
    blocks: Tensor  # numbers of the blocks of keys
    run: slice | None  # the same, if they follow each other
    masks: Tensor | None  # for each block a row of the table, -1: all seen; None: all are


class _Plan(NamedTuple):
    rows: list[list[_Row]]  # of each pattern
    table: Tensor  # float32 (masks + 1, rows, block): 0 or -inf; the last is all 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """The result like ``q``, and the logarithm of the sum of exponentials (batch, heads, queries).

    Args:
        q: (batch, heads, queries, size).
        k: (batch, heads or a divisor of them, keys, size).
        v: like ``k``.
        bias: (1 or batch, 1 or heads, 1 or queries, 1 or keys), or None.
        layout: what is seen.
        scale: the factor of the scores.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    plan = _plan(layout)
    out = torch.zeros(q.shape, dtype=q.dtype)
    log_sum = torch.full(q.shape[:-1], -math.inf, dtype=wide)
    k_blocks, v_blocks = (_in_blocks(x.to(wide), layout) for x in (k, v))
    for heads, group, kv_heads, rows in _parts(layout, plan, q.shape[1], k.shape[1]):
        own_k, own_v = (x if kv_heads is None else x[:, kv_heads] for x in (k_blocks, v_blocks))
        own_q = q if heads is None else q[:, heads]
        for row in rows:
            keys, values = _gathered(own_k, row), _gathered(own_v, row)
            queries = _folded(own_q[:, :, row.start : row.stop], group).to(wide)
            mask = _mask(plan, row, bias, heads, group, layout, wide)
            found, total = _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
            if mask is not None:  # where nothing is seen, torch has 0
                total = total.masked_fill(mask.amax(-1) == -math.inf, -math.inf)
            place = slice(None) if heads is None else heads
            out[:, place, row.start : row.stop] = _unfolded(found, group).to(q.dtype)
            log_sum[:, place, row.start : row.stop] = _unfolded(total[..., None], group)[..., 0]
    return out, log_sum


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the gradient of the result and what forward returned."""
    wide = torch.promote_types(q.dtype, torch.float32)
    plan = _plan(layout)
    k_blocks, v_blocks = (_in_blocks(x.to(wide), layout) for x in (k, v))
    grad_q = torch.zeros(q.shape, dtype=q.dtype)
    grad_k, grad_v = torch.zeros_like(k_blocks), torch.zeros_like(v_blocks)
    # exp(-inf - 0) is 0 for what sees nothing.
    log_sum = log_sum.masked_fill(log_sum == -math.inf, 0)
    by_query = grad, q, out, log_sum[..., None]
    for heads, group, kv_heads, rows in _parts(layout, plan, q.shape[1], k.shape[1]):
        own_k, own_v = (x if kv_heads is None else x[:, kv_heads] for x in (k_blocks, v_blocks))
        own = by_query if heads is None else tuple(x[:, heads] for x in by_query)
        sums = grad_k, grad_v
        if kv_heads is not None:
            sums = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for row in rows:
            keys, values = _gathered(own_k, row), _gathered(own_v, row)
            of_row = [_folded(x[:, :, row.start : row.stop], group).to(wide) for x in own]
            grad_row, queries, out_row, total = of_row
            mask = _mask(plan, row, bias, heads, group, layout, wide)
            found = _flash_backward(
                grad_row,
                queries,
                keys,
                values,
                out_row,
                total[..., 0],
                0.0,
                False,
                attn_mask=mask,
                scale=scale,
            )
            place = slice(None) if heads is None else heads
            grad_q[:, place, row.start : row.stop] = _unfolded(found[0], group).to(q.dtype)
            for total_grad, part in zip(sums, found[1:], strict=True):
                part = part.unflatten(2, (-1, layout.block))
                if row.run is not None:
                    total_grad[:, :, row.run] += part
                else:
                    total_grad.index_add_(2, row.blocks, part)
        if kv_heads is not None:
            for all_heads, some in zip((grad_k, grad_v), sums, strict=True):
                all_heads.index_add_(1, kv_heads, some)
    grad_k, grad_v = (
        x.flatten(2, 3)[:, :, : layout.k_len].to(k.dtype).contiguous() for x in (grad_k, grad_v)
    )
    return grad_q, grad_k, grad_v


def _plan(layout: Layout) -> _Plan:
    def made() -> _Plan:
        return _made(layout, _best_rows(layout))

    plan: _Plan = layout.derived("cpu", made)
    return plan


def _made(layout: Layout, rows: int) -> _Plan:
    tiles = tiles_of(layout, rows, layout.block)
    count = -(-layout.q_len // rows)
    ptr = tiles.ptr.tolist()
    patterns = []
    for pattern in range(layout.patterns):
        found = []
        for number in range(count):
            own = slice(ptr[pattern * count + number], ptr[pattern * count + number + 1])
            blocks, masks = tiles.others[own].long(), tiles.masks[own].long()
            if not len(blocks):
                continue  # sees nothing
            first, last = int(blocks[0]), int(blocks[-1])
            run = slice(first, last + 1) if last - first + 1 == len(blocks) else None
            stop = min((number + 1) * rows, layout.q_len)
            hidden = masks if bool((masks >= 0).any()) else None
            found.append(_Row(number * rows, stop, blocks, run, hidden))
        patterns.append(found)
    seen = torch.cat([tiles.table, torch.ones(1, rows, layout.block, dtype=torch.bool)])
    return _Plan(patterns, torch.zeros(seen.shape).masked_fill_(~seen, -math.inf))


def _best_rows(layout: Layout) -> int:
    """How many queries to a row of tiles: more share the gathered keys, but see more in vain."""

    def cost(rows: int) -> float:
        total = 0
        for keys, _ in layout.blocks():
            row, column = keys // max(layout.k_blocks, 1), keys % max(layout.k_blocks, 1)
            together = row * layout.block // rows * layout.k_blocks + column
            total += len(together.unique()) * layout.block * (rows + _GATHER)
        return total + layout.patterns * -(-layout.q_len // rows) * _CALL

    sizes = [layout.block * 2**i for i in range(5) if layout.block * 2**i <= _MOST_ROWS]
    return min(sizes, key=cost)


def _parts(
    layout: Layout, plan: _Plan, heads: int, kv_heads: int
) -> Iterator[tuple[Tensor | None, int, Tensor | None, list[_Row]]]:
    """For each pattern: its heads, how many share keys, the heads of the keys, and the rows.

    None stands for all heads.
    """
    group = heads // max(kv_heads, 1)
    if layout.patterns == 1:
        yield None, group, None, plan.rows[0]
        return
    for pattern, rows in enumerate(plan.rows):
        own = torch.tensor([h for h, p in enumerate(layout.head_patterns) if p == pattern])
        yield own, 1, own // group, rows


def _in_blocks(x: Tensor, layout: Layout) -> Tensor:
    """(batch, heads, keys, size) as (batch, heads, blocks, block, size), with zeros at the end."""
    more = layout.k_blocks * layout.block - layout.k_len
    return torch.nn.functional.pad(x, (0, 0, 0, more)).unflatten(2, (layout.k_blocks, layout.block))


def _gathered(blocks: Tensor, row: _Row) -> Tensor:
    own = blocks.index_select(2, row.blocks) if row.run is None else blocks[:, :, row.run]
    return own.flatten(2, 3)


def _folded(x: Tensor, group: int) -> Tensor:
    """Heads that share keys, one after the other in one sequence of queries."""
    return x.unflatten(1, (-1, group)).flatten(2, 3)


def _unfolded(x: Tensor, group: int) -> Tensor:
    return x.unflatten(2, (group, -1)).flatten(1, 2)


def _mask(
    plan: _Plan,
    row: _Row,
    bias: Tensor | None,
    heads: Tensor | None,
    group: int,
    layout: Layout,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the scores of a row: (1 or batch, 1 or heads, queries, keys), or None."""
    mask = None
    if row.masks is not None:
        mask = plan.table[row.masks].transpose(0, 1).flatten(1)[: row.stop - row.start]
        mask = mask.to(dtype).repeat(group, 1)[None, None]
    if bias is None:
        return mask
    bias = bias.to(dtype)
    if heads is not None and bias.shape[1] > 1:
        bias = bias[:, heads]
    if bias.shape[2] > 1:
        bias = bias[:, :, row.start : row.stop]
    if bias.shape[3] > 1:
        keys = (row.blocks[:, None] * layout.block + torch.arange(layout.block)).flatten()
        bias = bias[..., keys.clamp_max(layout.k_len - 1)]
    queries = row.stop - row.start
    bias = bias.expand(-1, -1, queries, len(row.blocks) * layout.block)
    bias = bias.repeat(1, 1, group, 1) if bias.shape[1] == 1 else _folded(bias, group)
    return bias if mask is None else bias + mask
