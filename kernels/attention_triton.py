"""Block-sparse attention's kernels in Triton: the result, the gradient of q, those of k and v.

A program has a row of tiles (or a column, for the gradients of k and v), and goes through the tiles
that are seen; one that is seen in full skips the mask. Nothing is added to memory that another
program adds to, so that results are the same each time.

The softmax is computed on the way (arXiv 1805.02867) in powers of two, as the device has them;
the backward computes the weights again (FlashAttention-2, arXiv 2307.08691, section 3.1). What
calls these kernels, and the tables that they read, are in ``attention_launch.py``.

Shapes: q, out and their gradients (batch, heads, queries, SIZE), k and v (batch, heads / group,
keys, SIZE), log_sum and delta (batch, heads, queries), bias (batch, heads, queries, keys). Strides
are named by tensor and dimension: ``q_b``, ``q_h``, ``q_l``; where there are none, the tensor is
contiguous. A tile is ROWS queries and COLUMNS keys. Imported only when a kernel runs.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .triton_memory import load_rows, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def forward_kernel(
    q, k, v, bias, out, log_sum,
    firsts, order, others, masks, table, patterns,
    scale, heads, group, layout_heads, lines, q_len, k_len,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, bias_b, bias_h, bias_q, bias_k,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``out`` and the natural logarithm of the sums of exponentials, -inf where nothing is seen.

    EVEN and EVEN_KEYS: whether ROWS divides the number of queries, and COLUMNS that of keys. Masks
    hide the keys past the end.
    """
    line, head, batch = _place(order, patterns, layout_heads, heads, lines)
    at = _pattern(patterns, head, layout_heads) * lines + line
    start = line.to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    left = q_len - line * ROWS
    q_tile = load_rows(
        q + batch * q_b + head * q_h + start * q_l, rows, q_l, left, SIZE, PADDED, not EVEN,
        INTERPRETED,
    )  # fmt: skip
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    if bias is not None:
        bias += batch * bias_b + head * bias_h + start * bias_q
    acc = tl.zeros((ROWS, PADDED), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -INFINITY, tl.float32)
    acc, total, top = _attend(
        acc, total, top, q_tile, k, v, bias, others, masks, table, tl.load(firsts + at),
        tl.load(firsts + at + 1), scale, left, k_len, k_l, v_l, bias_q, bias_k, SIZE, PADDED, ROWS,
        COLUMNS, EVEN_KEYS, PRECISION, INTERPRETED,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # where nothing is seen, acc is 0 and top -inf
    row = (batch * heads + head) * q_len + start
    acc = acc / total[:, None]
    store_rows(out + row * SIZE, acc, rows, left, SIZE, PADDED, INTERPRETED)
    tl.store(log_sum + row + rows, (top + tl.log2(total)) * LN_2, mask=rows < left)


@triton.jit
def _attend(
    acc, total, top, q, k, v, bias, others, masks, table, begin, end, scale, left, k_len, k_l, v_l,
    bias_q, bias_k, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tiles ``begin`` to ``end`` of a row: weighted values, sum of weights, highest score."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for tile in range(begin, end):
        column, mask = tl.load(others + tile).to(tl.int64), tl.load(masks + tile)
        key_left = (k_len - column * COLUMNS).to(tl.int32)
        k_tile = load_rows(
            k + column * COLUMNS * k_l, keys, k_l, key_left, SIZE, PADDED, not EVEN_KEYS,
            INTERPRETED,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2_E)
        if bias is not None:
            at = bias + column * COLUMNS * bias_k
            scores += _bias(at, rows[:, None], keys[None, :], bias_q, bias_k, left, key_left)
        if mask >= 0:
            scores = tl.where(_seen(table, mask, ROWS, COLUMNS), scores, -INFINITY)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -INFINITY, 0.0, new_top)  # not -inf + inf
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = load_rows(
            v + column * COLUMNS * v_l, keys, v_l, key_left, SIZE, PADDED, not EVEN_KEYS,
            INTERPRETED,
        )  # fmt: skip
        acc = tl.dot(
            weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION
        )
        top = new_top
    return acc, total, top


@triton.jit
def dq_kernel(
    grad, grad_log_sum, q, k, v, bias, out, log_sum, delta, dq,
    firsts, order, others, masks, table, patterns,
    scale, heads, group, layout_heads, lines, q_len, k_len,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, bias_b, bias_h, bias_q, bias_k,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``dq``, and ``delta`` = rowsum(grad ∘ out) − grad_log_sum for the other gradients."""
    line, head, batch = _place(order, patterns, layout_heads, heads, lines)
    at = _pattern(patterns, head, layout_heads) * lines + line
    start = line.to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    left = q_len - line * ROWS
    row = (batch * heads + head) * q_len + start
    q_tile = load_rows(
        q + batch * q_b + head * q_h + start * q_l, rows, q_l, left, SIZE, PADDED, not EVEN,
        INTERPRETED,
    )  # fmt: skip
    grad_tile = load_rows(grad + row * SIZE, rows, SIZE, left, SIZE, PADDED, not EVEN, INTERPRETED)
    out_tile = load_rows(out + row * SIZE, rows, SIZE, left, SIZE, PADDED, not EVEN, INTERPRETED)
    shift = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if grad_log_sum is not None:
        shift -= tl.load(grad_log_sum + row + rows, mask=rows < left, other=0.0)
    tl.store(delta + row + rows, shift, mask=rows < left)
    sums = _log_sums(log_sum + row, rows, left)
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    if bias is not None:
        bias += batch * bias_b + head * bias_h + start * bias_q
    acc = tl.zeros((ROWS, PADDED), tl.float32)
    acc = _add_dq(
        acc, q_tile, grad_tile, shift, sums, k, v, bias, others, masks, table,
        tl.load(firsts + at), tl.load(firsts + at + 1), scale, left, k_len, k_l, v_l, bias_q,
        bias_k, SIZE, PADDED, ROWS, COLUMNS, EVEN_KEYS, PRECISION, INTERPRETED,
    )  # fmt: skip
    store_rows(dq + row * SIZE, acc * scale, rows, left, SIZE, PADDED, INTERPRETED)


@triton.jit
def _add_dq(
    acc, q, grad, shift, sums, k, v, bias, others, masks, table, begin, end, scale, left, k_len,
    k_l, v_l, bias_q, bias_k, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add dS K of tiles ``begin`` to ``end`` of a row, with dS = P ∘ (grad Vᵀ − delta)."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for tile in range(begin, end):
        column, mask = tl.load(others + tile).to(tl.int64), tl.load(masks + tile)
        key_left = (k_len - column * COLUMNS).to(tl.int32)
        k_tile = load_rows(
            k + column * COLUMNS * k_l, keys, k_l, key_left, SIZE, PADDED, not EVEN_KEYS,
            INTERPRETED,
        )  # fmt: skip
        v_tile = load_rows(
            v + column * COLUMNS * v_l, keys, v_l, key_left, SIZE, PADDED, not EVEN_KEYS,
            INTERPRETED,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2_E)
        if bias is not None:
            at = bias + column * COLUMNS * bias_k
            scores += _bias(at, rows[:, None], keys[None, :], bias_q, bias_k, left, key_left)
        weights = tl.exp2(scores - sums[:, None])
        if mask >= 0:
            weights = tl.where(_seen(table, mask, ROWS, COLUMNS), weights, 0.0)
        slope = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION) - shift[:, None]
        slope = (weights * slope).to(k_tile.dtype)
        acc = tl.dot(slope, k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dkv_kernel(
    grad, q, k, v, bias, log_sum, delta, dk, dv,
    firsts, order, others, masks, table, patterns,
    scale, heads, group, layout_heads, lines, q_len, k_len,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, bias_b, bias_h, bias_q, bias_k,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of a column of tiles: of its keys, from the queries of a group of heads.

    The tables are those of transposed tiles, and each mask of ``table`` is (COLUMNS, ROWS).
    """
    kv_heads = heads // group
    line, head, batch = _place(order, patterns, layout_heads, kv_heads, lines)
    start = line.to(tl.int64) * COLUMNS
    keys = tl.arange(0, COLUMNS)
    left = k_len - line * COLUMNS
    k_tile = load_rows(
        k + batch * k_b + head * k_h + start * k_l, keys, k_l, left, SIZE, PADDED, not EVEN_KEYS,
        INTERPRETED,
    )  # fmt: skip
    v_tile = load_rows(
        v + batch * v_b + head * v_h + start * v_l, keys, v_l, left, SIZE, PADDED, not EVEN_KEYS,
        INTERPRETED,
    )  # fmt: skip
    acc_k = tl.zeros((COLUMNS, PADDED), tl.float32)
    acc_v = tl.zeros((COLUMNS, PADDED), tl.float32)
    for own in range(group):
        q_head = head * group + own
        row = (batch * heads + q_head) * q_len
        own_q, own_bias = q + batch * q_b + q_head * q_h, bias
        if bias is not None:
            own_bias = bias + batch * bias_b + q_head * bias_h + start * bias_k
        at = _pattern(patterns, q_head, layout_heads) * lines + line
        acc_k, acc_v = _add_dkv(
            acc_k, acc_v, k_tile, v_tile, grad + row * SIZE, own_q, own_bias, log_sum + row,
            delta + row, others, masks, table, tl.load(firsts + at), tl.load(firsts + at + 1),
            scale, left, q_len, q_l, bias_q, bias_k, SIZE, PADDED, ROWS, COLUMNS, EVEN, PRECISION,
            INTERPRETED,
        )  # fmt: skip
    key = ((batch * kv_heads + head) * k_len + start) * SIZE
    store_rows(dk + key, acc_k * scale, keys, left, SIZE, PADDED, INTERPRETED)
    store_rows(dv + key, acc_v, keys, left, SIZE, PADDED, INTERPRETED)


@triton.jit
def _add_dkv(
    acc_k, acc_v, k, v, grad, q, bias, log_sum, delta, others, masks, table, begin, end, scale,
    left, q_len, q_l, bias_q, bias_k, SIZE: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q and Pᵀ grad of tiles ``begin`` to ``end`` of a column."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for tile in range(begin, end):
        line, mask = tl.load(others + tile).to(tl.int64), tl.load(masks + tile)
        start = line * ROWS
        row_left = (q_len - start).to(tl.int32)
        q_tile = load_rows(
            q + start * q_l, rows, q_l, row_left, SIZE, PADDED, not EVEN, INTERPRETED
        )
        grad_tile = load_rows(
            grad + start * SIZE, rows, SIZE, row_left, SIZE, PADDED, not EVEN, INTERPRETED
        )
        sums = _log_sums(log_sum + start, rows, row_left)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2_E)
        if bias is not None:
            at = bias + start * bias_q
            scores += _bias(at, rows[None, :], keys[:, None], bias_q, bias_k, row_left, left)
        weights = tl.exp2(scores - sums[None, :])
        if mask >= 0:
            weights = tl.where(_seen(table, mask, COLUMNS, ROWS), weights, 0.0)
        acc_v = tl.dot(weights.to(grad_tile.dtype), grad_tile, acc_v, input_precision=PRECISION)
        shift = tl.load(delta + start + rows, mask=rows < row_left, other=0.0)
        slope = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION) - shift[None, :]
        slope = (weights * slope).to(q_tile.dtype)
        acc_k = tl.dot(slope, q_tile, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit
def _place(order, patterns, layout_heads, heads, lines):
    """This program's row (or column) of tiles, head and place in the batch; long rows first."""
    program = tl.program_id(0)
    sequence = (program // lines).to(tl.int64)
    head = sequence % heads
    at = _pattern(patterns, head, layout_heads) * lines + program % lines
    return tl.load(order + at), head, sequence // heads


@triton.jit
def _pattern(patterns, head, layout_heads):
    return tl.load(patterns + head % layout_heads)


@triton.jit
def _log_sums(at, rows, left):
    """For base 2; with it, the weights are 0 of what sees nothing and of rows past the end."""
    sums = tl.load(at + rows, mask=rows < left, other=INFINITY) * LOG2_E
    return tl.where(sums == -INFINITY, 0.0, sums)


@triton.jit
def _seen(table, mask, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    at = table + mask.to(tl.int64) * (HEIGHT * WIDTH)
    inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(at + inner) != 0


@triton.jit
def _bias(at, rows, keys, bias_q, bias_k, row_left, key_left):
    """For base 2, 0 past the ends; rows and keys are already broadcast against each other."""
    inside = (rows < row_left) & (keys < key_left)
    places = at + rows.to(tl.int64) * bias_q + keys.to(tl.int64) * bias_k
    return tl.load(places, mask=inside, other=0.0).to(tl.float32) * LOG2_E
