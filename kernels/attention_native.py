"""Block-sparse attention on a CPU by ``attention.c``, on torch's threads.

Each takes the next row of tiles that nobody has taken, and nobody else writes the results of that:
they do not depend on the number of threads. ctypes lets go of the interpreter's lock while the C
runs.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .layout_tiles import best_rows, tiles_of
from .layouts import Layout
from .native import library

SOURCE = Path(__file__).with_name("attention.c")
SHARE = 1 << 16  # the scores that a thread is worth starting for
_PADDED = 16  # a head's size is padded to a multiple

_POINTERS = (
    *("q", "k", "v", "grad", "out", "grad_q"),
    *("top", "sum", "log_sum", "grad_k", "grad_v"),
    *("row_ptr", "column_ptr", "columns", "row_masks", "rows_of", "column_masks"),
    *("patterns", "table"),
)
_SIZES = ("batch", "heads", "group", "queries", "keys", "size", "rows", "block", "half")


class _Task(ctypes.Structure):
    """``task`` of the C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
    )


class _Tables(NamedTuple):
    """What the C knows of a layout."""

    rows: int  # queries of a tile
    scores: int  # of all patterns, on average
    tensors: dict[str, Tensor]


def takes(q: Tensor, bias: Tensor | None) -> bool:
    """Whether the C does: float32 and the halves on a CPU, without a bias, and a compiler."""
    fits = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return fits and bias is None and library(SOURCE) is not None


def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """The result like ``q``, and the log-sum (batch, heads, queries), if ``takes(q, None)``."""
    given = _native(q=q, k=k, v=v)
    out = torch.empty_like(given["q"])
    top, total = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    _run(["forward"], layout, scale, **given, out=out, top=top, sum=total)
    return out.to(q.dtype), top.add_(total.log_())


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the gradient of the result and what forward returned.

    Either a thread takes all queries of a head of keys, with five products a tile, or two passes
    share them out more finely, with seven in all. The sums are the same, in the same order.
    """
    given = _native(q=q, k=k, v=v, grad=grad, out=out, log_sum=log_sum)
    grad_q = torch.empty_like(given["q"])
    size = -(-k.shape[3] // _PADDED) * _PADDED
    padded = *k.shape[:2], layout.k_blocks * layout.block, size
    grad_k, grad_v = (k.new_zeros(padded, dtype=torch.float32) for _ in range(2))
    heads, threads = k.shape[0] * k.shape[1], torch.get_num_threads()
    evenly = -(-heads // threads) * threads * 5 <= heads * 7
    passes = ["backward"] if evenly else ["backward_queries", "backward_keys"]
    _run(passes, layout, scale, **given, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)
    grad_k, grad_v = (
        x[:, :, : k.shape[2], : k.shape[3]].to(k.dtype).contiguous() for x in (grad_k, grad_v)
    )
    return grad_q.to(q.dtype), grad_k, grad_v


def _native(**tensors: Tensor) -> dict[str, Tensor]:
    return {
        name: (x.float() if x.dtype == torch.float16 else x).contiguous()
        for name, x in tensors.items()
    }


def _tables(layout: Layout) -> _Tables:
    def made() -> _Tables:
        rows = best_rows(layout, most=128, per_key=16, per_row=4096)
        down, across = (tiles_of(layout, rows, layout.block, turned) for turned in (False, True))
        tensors = {
            "row_ptr": down.ptr,
            "column_ptr": across.ptr,
            "columns": down.others,
            "row_masks": down.masks,
            "rows_of": across.others,
            "column_masks": across.masks,
            "table": down.table.transpose(1, 2).contiguous(),
        }
        return _Tables(rows, len(down.others) * rows * layout.block // layout.patterns, tensors)

    tables: _Tables = layout.derived("native", made)
    return tables


def _run(passes: list[str], layout: Layout, scale: float, **tensors: Tensor) -> None:
    q, k, tables = tensors["q"], tensors["k"], _tables(layout)
    batch, heads, queries, size = q.shape
    own = layout.head_patterns if layout.heads == heads else layout.head_patterns * heads
    tensors |= {"patterns": torch.tensor(own, dtype=torch.int32), **tables.tensors}
    sizes = batch, heads, heads // k.shape[1], queries, k.shape[2], size, tables.rows, layout.block
    task = _Task(
        **{name: x.data_ptr() for name, x in tensors.items()},
        **dict(zip(_SIZES, (*sizes, q.dtype == torch.bfloat16), strict=True)),
        scale=scale,
    )
    workers = min(torch.get_num_threads(), batch * heads * tables.scores // SHARE)
    for name in passes:
        _on_threads(getattr(library(SOURCE), name), task, workers)


def _on_threads(function: ctypes._CFuncPtr, task: _Task, workers: int) -> None:
    taken = ctypes.c_int64(0)

    def work(_: int) -> None:
        function(ctypes.byref(task), ctypes.byref(taken))

    if workers <= 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
