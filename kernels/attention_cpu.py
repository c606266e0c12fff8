"""Block-sparse attention on a CPU: C where it is compiled, else torch's flash attention.

The latter takes some rows of tiles at a time; also float64 and biases, which the C does not. The
keys of a row are gathered, so that the work is that of the blocks that are seen. In the
forward, rows that see equally many blocks share a call, in which they stand as heads do: threads
wait for each other at the end of each call. Half precision is computed in float32.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import attention_native as native
from .layout_tiles import best_rows, tiles_of
from .layouts import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# What a row of tiles costs besides its rows × keys scores, in scores: the gathering of a key as
# much as about 16 rows of scores, the calls as much as a few thousand scores.
_GATHER, _CALL = 16, 4096
_MOST_ROWS = 256


class _Rows(NamedTuple):
    """Rows of tiles, one after the other, of queries ``start`` to ``stop``."""

    start: int
    stop: int
    blocks: Tensor  # (rows, blocks): numbers of the blocks of keys
    run: slice | None  # the same, if it is one row and they follow each other
    masks: Tensor | None  # like blocks: a row of the table, -1: all seen; None: all are


class _Plan(NamedTuple):
    single: list[list[_Rows]]  # of each pattern, a row of tiles each
    together: list[list[_Rows]]  # the same, where they share calls
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
    if native.takes(q, bias):
        return native.forward(q, k, v, layout, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    plan = _plan(layout)
    out = torch.zeros(q.shape, dtype=q.dtype)
    log_sum = torch.full(q.shape[:-1], -math.inf, dtype=wide)
    k_blocks, v_blocks = (_in_blocks(x.to(wide), layout) for x in (k, v))
    for heads, group, kv_heads, rows in _parts(layout, plan.together, q.shape[1], k.shape[1]):
        own_k, own_v = (x if kv_heads is None else x[:, kv_heads] for x in (k_blocks, v_blocks))
        own_q = q if heads is None else q[:, heads]
        for row in rows:
            keys, values = _gathered(own_k, row), _gathered(own_v, row)
            queries = _folded(own_q[:, :, row.start : row.stop], group, row).to(wide)
            mask = _mask(plan, row, bias, heads, group, layout, q, wide)
            found, total = _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
            if mask is not None:  # where nothing is seen, torch has 0
                total = total.masked_fill(mask.amax(-1) == -math.inf, -math.inf)
            place = slice(None) if heads is None else heads
            of_heads = q.shape[0], group, row
            out[:, place, row.start : row.stop] = _unfolded(found, *of_heads).to(q.dtype)
            log_sum[:, place, row.start : row.stop] = _unfolded(total[..., None], *of_heads)[..., 0]
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
    if native.takes(q, bias):
        return native.backward(grad, q, k, v, out, log_sum, layout, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    plan = _plan(layout)
    k_blocks, v_blocks = (_in_blocks(x.to(wide), layout) for x in (k, v))
    grad_q = torch.zeros(q.shape, dtype=q.dtype)
    grad_k, grad_v = torch.zeros_like(k_blocks), torch.zeros_like(v_blocks)
    # exp(-inf - 0) is 0 for what sees nothing.
    log_sum = log_sum.masked_fill(log_sum == -math.inf, 0)
    by_query = grad, q, out, log_sum[..., None]
    for heads, group, kv_heads, rows in _parts(layout, plan.single, q.shape[1], k.shape[1]):
        own_k, own_v = (x if kv_heads is None else x[:, kv_heads] for x in (k_blocks, v_blocks))
        own = by_query if heads is None else tuple(x[:, heads] for x in by_query)
        sums = grad_k, grad_v
        if kv_heads is not None:
            sums = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for row in rows:
            keys, values = _gathered(own_k, row), _gathered(own_v, row)
            of_row = [_folded(x[:, :, row.start : row.stop], group, row).to(wide) for x in own]
            grad_row, queries, out_row, total = of_row
            mask = _mask(plan, row, bias, heads, group, layout, q, wide)
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
            of_query = _unfolded(found[0], q.shape[0], group, row)
            grad_q[:, place, row.start : row.stop] = of_query.to(q.dtype)
            for total_grad, part in zip(sums, found[1:], strict=True):
                part = part.unflatten(2, (-1, layout.block)).unflatten(0, (q.shape[0], -1))
                if row.run is not None:
                    total_grad[:, :, row.run] += part[:, :, 0]
                else:
                    total_grad.index_add_(2, row.blocks.flatten(), part.flatten(2, 3))
        if kv_heads is not None:
            for all_heads, some in zip((grad_k, grad_v), sums, strict=True):
                all_heads.index_add_(1, kv_heads, some)
    grad_k, grad_v = (
        x.flatten(2, 3)[:, :, : layout.k_len].to(k.dtype).contiguous() for x in (grad_k, grad_v)
    )
    return grad_q, grad_k, grad_v


def _plan(layout: Layout) -> _Plan:
    def made() -> _Plan:
        return _made(layout, best_rows(layout, _MOST_ROWS, _GATHER, _CALL))

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
            row = _Rows(
                number * rows, stop, blocks[None], run, None if hidden is None else hidden[None]
            )
            found.append(row)
        patterns.append(found)
    seen = torch.cat([tiles.table, torch.ones(1, rows, layout.block, dtype=torch.bool)])
    together = [_joined(found, layout.k_len // layout.block) for found in patterns]
    return _Plan(patterns, together, torch.zeros(seen.shape).masked_fill_(~seen, -math.inf))


def _joined(rows: list[_Rows], most: int) -> list[_Rows]:
    """Rows that follow each other and see equally many blocks, ``most`` of them in all, as one."""
    found: list[_Rows] = []
    for row in rows:
        above = found[-1] if found else row
        count, each = above.blocks.shape
        size = (above.stop - above.start) // count
        if (
            (above.stop, size, each) != (row.start, row.stop - row.start, row.blocks.shape[1])
            or above.run is not None
            or row.run is not None
            or (count + 1) * each > most
        ):
            found.append(row)
            continue
        masks = None
        if above.masks is not None or row.masks is not None:
            both = (above, row)
            masks = torch.cat(
                [torch.full_like(x.blocks, -1) if x.masks is None else x.masks for x in both]
            )
        blocks = torch.cat([above.blocks, row.blocks])
        found[-1] = _Rows(above.start, row.stop, blocks, None, masks)
    return found


def _parts(
    layout: Layout, of_patterns: list[list[_Rows]], heads: int, kv_heads: int
) -> Iterator[tuple[Tensor | None, int, Tensor | None, list[_Rows]]]:
    """For each pattern: its heads, how many share keys, the heads of the keys, and the rows.

    None stands for all heads.
    """
    group = heads // max(kv_heads, 1)
    if layout.patterns == 1:
        yield None, group, None, of_patterns[0]
        return
    for pattern, rows in enumerate(of_patterns):
        own = torch.tensor([h for h, p in enumerate(layout.head_patterns) if p == pattern])
        yield own, 1, own // group, rows


def _in_blocks(x: Tensor, layout: Layout) -> Tensor:
    """(batch, heads, keys, size) as (batch, heads, blocks, block, size), with zeros at the end."""
    more = layout.k_blocks * layout.block - layout.k_len
    return torch.nn.functional.pad(x, (0, 0, 0, more)).unflatten(2, (layout.k_blocks, layout.block))


def _gathered(blocks: Tensor, row: _Rows) -> Tensor:
    """The keys of each row: (batch * heads, rows, keys, size)."""
    if row.run is not None:
        return blocks[:, :, row.run].flatten(2, 3).flatten(0, 1).unsqueeze(1)
    own = blocks.index_select(2, row.blocks.flatten())
    return own.unflatten(2, row.blocks.shape).flatten(3, 4).flatten(0, 1)


def _folded(x: Tensor, group: int, row: _Rows) -> Tensor:
    """(batch, heads, queries, size) as (batch * heads of keys, rows, queries, size).

    Heads that share keys stand one after the other in one sequence of queries.
    """
    parts = x.unflatten(2, (len(row.blocks), -1)).unflatten(1, (-1, group))
    return parts.transpose(2, 3).flatten(3, 4).flatten(0, 1)


def _unfolded(x: Tensor, batch: int, group: int, row: _Rows) -> Tensor:
    parts = x.unflatten(0, (batch, -1)).unflatten(3, (group, -1))
    return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _mask(
    plan: _Plan,
    row: _Rows,
    bias: Tensor | None,
    heads: Tensor | None,
    group: int,
    layout: Layout,
    q: Tensor,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the scores: (1 or batch * heads of keys, rows, queries, keys), or None."""
    mask = None
    count = len(row.blocks)
    queries = (row.stop - row.start) // count
    if row.masks is not None:
        mask = plan.table[row.masks].transpose(1, 2).flatten(2)[:, :queries]
        mask = mask.to(dtype).repeat(1, group, 1)[None]
    if bias is None:
        return mask
    bias = bias.to(dtype)
    if heads is not None and bias.shape[1] > 1:
        bias = bias[:, heads]
    if bias.shape[2] > 1:
        bias = bias[:, :, row.start : row.stop]
    heads_here = q.shape[1] if heads is None else len(heads)
    bias = bias.expand(q.shape[0], heads_here, row.stop - row.start, -1)
    keys = (row.blocks[..., None] * layout.block + torch.arange(layout.block)).flatten(1)
    keys = keys.clamp_max(layout.k_len - 1)
    if bias.shape[3] == 1:
        bias = bias.expand(-1, -1, -1, keys.shape[1])
        bias = _folded(bias, group, row)
    else:
        each = bias.unflatten(2, (count, queries))
        each = torch.stack([each[:, :, i][..., own] for i, own in enumerate(keys)], 2)
        bias = _folded(each.flatten(2, 3), group, row)
    return bias if mask is None else bias + mask
