"""Which blocks each pattern of block-sparse attention holds: pure functions to ranges of columns.

The six patterns of DeepSpeed's sparse attention, block for block as it builds them, and a few that
it lacks. ``n`` is the number of blocks a side, ``causal`` means its ``"unidirectional"``.
:class:`layouts.Layout` has the arguments' descriptions.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout_blocks import Ranges, arange, rows_of


def local(n: int, windows: Sequence[int], causal: bool) -> Ranges:
    """Windows of consecutive rows that see each other; the last size repeats to the end."""
    starts = [0]
    for size in windows:
        starts.append(starts[-1] + size)
    edges = torch.tensor(starts, dtype=torch.int64)
    if edges[-1] < n:
        edges = torch.cat([edges, torch.arange(int(edges[-1]) + windows[-1], n + windows[-1],
                                               windows[-1])])  # fmt: skip
    rows = arange(n)
    window = torch.searchsorted(edges, rows, right=True)
    return Ranges(rows, edges[window - 1], rows + 1 if causal else edges[window])


def sliding(n: int, low: int, high: int) -> Ranges:
    """Each row sees ``low`` blocks before its own to ``high`` after it."""
    return rows_of(n, arange(n) - low, arange(n) + high + 1)


def global_columns(n: int, start: int, end: int, first_row: int = 0) -> Ranges:
    return rows_of(arange(first_row, n), start, end)


def global_rows(n: int, start: int, end: int) -> Ranges:
    return rows_of(arange(start, min(end, n)), 0, n)


def up_to_the_diagonal(ranges: Ranges) -> Ranges:
    return Ranges(ranges.rows, ranges.starts, torch.minimum(ranges.ends, ranges.rows + 1))


def scattered(n: int, count: int, causal: bool, seed: int) -> Ranges:
    """``count`` different random columns in each row; with ``causal`` none after the row."""
    draw = random.Random(seed)
    sizes = [row + 1 if causal else n for row in range(n)]
    picked = [
        (row, column)
        for row, size in enumerate(sizes)
        for column in draw.sample(range(size), min(count, size))
    ]
    rows, columns = _pairs(picked)
    return Ranges(rows, columns, columns + 1)


def _pairs(picked: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    table = torch.tensor(picked, dtype=torch.int64).view(-1, 2)
    return table[:, 0], table[:, 1]


def fixed(
    n: int, local_blocks: int, global_blocks: int, causal: bool, horizontal: bool, pattern: int
) -> Iterator[Ranges]:
    """Sparse Transformer's fixed pattern (arXiv 1904.10509, section 4.3) in blocks."""
    yield local(n, [local_blocks], causal)
    # Pattern 0 takes the last blocks of a window as global ones, pattern 1 those before them.
    first = local_blocks - (1 + pattern) * global_blocks
    whole_windows = n - n % local_blocks
    starts = list(range(first, whole_windows, local_blocks))
    if whole_windows < n:  # in a last, shorter window they are moved to fit
        starts.append(max(0, min(whole_windows + first, n - global_blocks)))
    for start in starts:
        end = start + global_blocks
        yield global_columns(n, start, end, start if causal else 0)
        if horizontal:
            yield global_rows(n, start, end)


def global_at(
    n: int, spans: Sequence[tuple[int, int]], causal: bool, horizontal: bool
) -> Iterator[Ranges]:
    """Columns that rows see from the first of them on (``causal``) or everywhere; rows with it."""
    for start, end in spans:
        if start < n:
            yield global_columns(n, start, end, start if causal else 0)
            if horizontal:
                yield global_rows(n, start, end)


def dilated(n: int, reach: int, dilation: int, causal: bool) -> Iterator[Ranges]:
    """Each row sees the blocks ``dilation``, 2 ``dilation``, … before and after it."""
    for step in range(-reach, 1 if causal else reach + 1):
        yield sliding(n, -step * dilation, step * dilation)


def strided(n: int, stride: int, local_blocks: int, causal: bool) -> Iterator[Ranges]:
    """Sparse Transformer's strided pattern (arXiv 1904.10509, section 4.3) in blocks."""
    yield sliding(n, local_blocks - 1, 0 if causal else local_blocks - 1)
    yield from dilated(n, n // stride, stride, causal)
