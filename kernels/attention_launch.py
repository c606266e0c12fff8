"""What runs block-sparse attention's Triton kernels: tables on the device, and launches.

A layout's block and a kernel's tile differ freely: ``attention_tiles.py`` has the tile, and
``layout_tiles.py`` cuts the layout into such. The tables are made once for each layout, tile and
device. Imported only when a kernel runs.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .attention_tiles import Which, best, padded, precision, tiles_for
from .attention_triton import dkv_kernel, dq_kernel, forward_kernel
from .layout_tiles import tiles_of
from .layouts import Layout
from .triton_memory import INTERPRETED


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # the interpreter
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class _Tables(NamedTuple):
    """A layout in tiles, on a device."""

    firsts: Tensor  # int32 (patterns * lines + 1): where each line's tiles begin
    order: Tensor  # int32 (patterns * lines): the lines of a pattern, the longest first
    others: Tensor  # int32 (tiles): columns of the tiles; of transposed ones, rows
    masks: Tensor  # int32 (tiles): rows of the table, -1 for none
    table: Tensor  # uint8 (masks, rows, columns); of transposed ones (masks, columns, rows)
    patterns: Tensor  # int32 (layout's heads)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """The result like ``q``, and the log-sum, float32 (batch, heads, queries).

    Args:
        q: (batch, heads, queries, size), not empty; float32, float16 or bfloat16; size up to 256.
        k: (batch, heads or a divisor of them, keys, size), not empty.
        v: like ``k``.
        bias: (1 or batch, 1 or heads, 1 or queries, 1 or keys), or None.
        layout: what is seen.
        scale: the factor of the scores.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sum = q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch("forward", (q, k, v), bias, (out, log_sum), layout, scale)
    return out, log_sum


def backward(
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from those of the results and what forward returned."""
    q, k, v = (_rows(x) for x in (q, k, v))
    grad, out, log_sum = (x.contiguous() for x in (grad, out, log_sum))
    if grad_log_sum is not None:
        grad_log_sum = grad_log_sum.contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(log_sum)
    first = (grad, grad_log_sum), (out, log_sum, delta, dq)
    _launch("dq", (q, k, v), bias, first[1], layout, scale, before=first[0])
    _launch("dkv", (q, k, v), bias, (log_sum, delta, dk, dv), layout, scale, before=(grad,))
    return dq, dk, dv


_KERNELS: dict[Which, Any] = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}


def _launch(
    which: Which,
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    others: tuple[Tensor, ...],
    layout: Layout,
    scale: float,
    before: tuple[Tensor | None, ...] = (),
) -> None:
    q, k, _ = qkv
    batch, heads, q_len, size = q.shape
    kv_heads, k_len = k.shape[1:3]
    transposed = which == "dkv"
    tiles = tiles_for(which, q.dtype, size, _capability(q.device), bias is not None)
    tile = best(tiles, layout, transposed)
    lines = triton.cdiv(k_len, tile.columns) if transposed else triton.cdiv(q_len, tile.rows)
    programs = batch * (kv_heads if transposed else heads) * lines
    tables = _tables(layout, tile.rows, tile.columns, transposed, q.device)
    bias_strides: tuple[int, ...] = (0,) * 4
    if bias is not None:
        # A dimension of 1 is broadcast.
        bias_strides = tuple(bias.stride(i) if bias.shape[i] > 1 else 0 for i in range(4))
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _KERNELS[which][(programs,)](
            *before,
            *qkv,
            bias,
            *others,
            *tables,
            scale,
            heads,
            heads // kv_heads,
            layout.heads,
            lines,
            q_len,
            k_len,
            *[stride for x in qkv for stride in x.stride()[:3]],
            *bias_strides,
            SIZE=size,
            PADDED=padded(size),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            EVEN=q_len % tile.rows == 0,
            EVEN_KEYS=k_len % tile.columns == 0,
            PRECISION=precision(q.dtype, size),
            INTERPRETED=INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _rows(x: Tensor) -> Tensor:
    """``x``, with the values of a row next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(
    layout: Layout, rows: int, columns: int, transposed: bool, device: torch.device
) -> _Tables:
    def made() -> _Tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph is being captured, and {layout!r} was not used on {device} before: "
                "its tables can't be copied in a capture. Run the same step once before"
            )
        tables = _on_cpu(layout, rows, columns, transposed)
        return _Tables(*(x.to(device) for x in tables))

    tables: _Tables = layout.derived(("triton", rows, columns, transposed, device), made)
    return tables


def _on_cpu(layout: Layout, rows: int, columns: int, transposed: bool) -> _Tables:
    tiles = tiles_of(layout, rows, columns, transposed)
    counts = tiles.ptr.diff()
    order = counts.view(layout.patterns, -1).argsort(dim=1, descending=True, stable=True)
    table = tiles.table.mT if transposed else tiles.table
    return _Tables(
        tiles.ptr.int(),
        order.flatten().int(),
        tiles.others,
        tiles.masks,
        table.contiguous().view(torch.uint8),
        torch.tensor(layout.head_patterns, dtype=torch.int32),
    )
