"""Sets of blocks in compressed form: ranges of columns to sorted keys, and element masks to tables.

What :mod:`layouts` is made of. A block (row, column) of one pattern is the key
``row * columns + column``; keys are sorted and unique. A block's mask is -1 where every element of
it is seen, otherwise a row of a table of distinct boolean tiles.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .ops import plainly

P = ParamSpec("P")
T = TypeVar("T")

WHOLE = -1  # the mask of a block that is seen in full
_ABSENT = -2


class Ranges(NamedTuple):
    """Columns ``starts`` to ``ends`` (left out) of each of ``rows``; an empty range is nothing."""

    rows: Tensor
    starts: Tensor
    ends: Tensor


class Blocks(NamedTuple):
    """The blocks of one pattern: sorted keys, and for each its mask."""

    keys: Tensor  # int64
    masks: Tensor  # int32


def with_real_tensors(f: Callable[P, T]) -> Callable[P, T]:
    """``f`` on real CPU tensors wherever it is called: a layout is data, never part of a graph."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with plainly(), torch.no_grad(), torch.device("cpu"):
            return f(*args, **kwargs)

    return wrapped


def arange(*args: int) -> Tensor:
    return torch.arange(*args, dtype=torch.int64)


def rows_of(rows: int | Iterable[int] | Tensor, start: Any, end: Any) -> Ranges:
    """``Ranges`` of the given rows (a number: all of them), each from ``start`` to ``end``."""
    if isinstance(rows, int):
        rows = arange(rows)
    elif not isinstance(rows, Tensor):
        rows = torch.tensor(list(rows), dtype=torch.int64)
    starts, ends = (torch.as_tensor(x, dtype=torch.int64).expand(len(rows)) for x in (start, end))
    return Ranges(rows, starts, ends)


def keys_of(ranges: Iterable[Ranges], columns: int) -> Tensor:
    """The sorted keys of all blocks in the ranges, cut off at the first and last column."""
    found = [arange(0)]
    for rows, starts, ends in ranges:
        first = starts.clamp(0, columns)
        counts = (ends.clamp(0, columns) - first).clamp_min(0)
        # Entry i of a range stands at its start plus i less the entries of all ranges before it.
        begin = rows * columns + first - (counts.cumsum(0) - counts)
        found.append(torch.repeat_interleave(begin, counts) + arange(int(counts.sum())))
    return torch.cat(found).unique()


def whole(keys: Tensor) -> Blocks:
    return Blocks(keys, torch.full_like(keys, WHOLE, dtype=torch.int32))


def no_tiles(block: int) -> Tensor:
    return torch.zeros(0, block, block, dtype=torch.bool)


def distinct(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ones of boolean tiles (n, block, block), and which of them each was."""
    if not len(tiles):
        return tiles, torch.zeros(0, dtype=torch.int64)
    # Compared eight elements at a time.
    words = tiles.contiguous().view(len(tiles), -1).view(torch.int64)
    unique, which = words.unique(dim=0, return_inverse=True)
    return unique.view(torch.bool).view(-1, *tiles.shape[1:]), which


def cleaned(patterns: list[Blocks], tiles: Tensor) -> tuple[list[Blocks], Tensor]:
    """The same blocks with a table of distinct tiles, each used; full and empty tiles are gone."""
    masks = torch.cat([b.masks for b in patterns]) if patterns else arange(0).int()
    used, which = masks[masks >= 0].long().unique(return_inverse=True)
    full = tiles[used].flatten(1).all(1)
    empty = ~tiles[used].flatten(1).any(1)
    table, place = distinct(tiles[used[~full & ~empty]])
    new = torch.full_like(used, WHOLE, dtype=torch.int32)
    new[~full & ~empty] = place.int()
    new[empty] = _ABSENT
    masks = masks.clone()
    masks[masks >= 0] = new[which]
    result, at = [], 0
    for keys, old in patterns:
        own = masks[at : at + len(old)]
        at += len(old)
        result.append(Blocks(keys[own != _ABSENT], own[own != _ABSENT]))
    return result, table


def ended(
    patterns: list[Blocks], tiles: Tensor, q_len: int, k_len: int, size: int
) -> tuple[list[Blocks], Tensor]:
    """The same blocks, with one form for masks that differ only past an end: seen there, if at all.

    A tile of which nothing before the ends is seen becomes an empty one.
    """
    rows, columns = -(-q_len // size), max(-(-k_len // size), 1)
    inside_rows, inside_columns = q_len - (rows - 1) * size, k_len - (columns - 1) * size
    if inside_rows == inside_columns == size or not len(tiles):
        return patterns, tiles
    inner = arange(size)
    every = torch.ones(size, dtype=torch.bool)
    forms = [tiles]
    for down in (every, inner < inside_rows):
        for across in (every, inner < inside_columns):
            inside = down[:, None] & across
            some = (tiles & inside).flatten(1).any(1)
            forms.append((tiles | ~inside) & some[:, None, None])
    result = []
    for keys, masks in patterns:
        form = 1 + 2 * (keys // columns == rows - 1) + (keys % columns == columns - 1)
        result.append(Blocks(keys, torch.where(masks < 0, masks, masks + form * len(tiles)).int()))
    return result, torch.cat(forms)


def combined(a: Blocks, b: Blocks, tiles: Tensor, union: bool) -> tuple[Blocks, Tensor]:
    """Union or intersection of two patterns whose masks are rows of the same table.

    Returns:
        The blocks, and the table with the tiles that came to it.
    """
    keys = torch.cat([a.keys, b.keys]).unique()
    first, second = (_masks_at(keys, x) for x in (a, b))
    high, low = torch.maximum(first, second), torch.minimum(first, second)
    if union:
        masks = torch.where((first == WHOLE) | (second == WHOLE), WHOLE, high)
    else:
        masks = torch.where(low == _ABSENT, _ABSENT, high)
    both = (low >= 0) & (first != second)
    pairs = torch.stack([low[both], high[both]], 1)
    if len(pairs):
        pairs, which = pairs.unique(dim=0, return_inverse=True)
        one, other = tiles[pairs[:, 0]], tiles[pairs[:, 1]]
        masks[both] = (len(tiles) + which).to(masks.dtype)
        tiles = torch.cat([tiles, one | other if union else one & other])
    kept = masks != _ABSENT
    return Blocks(keys[kept], masks[kept].int()), tiles


def _masks_at(keys: Tensor, blocks: Blocks) -> Tensor:
    """The masks of ``blocks`` at ``keys``, or absent."""
    result = torch.full_like(keys, _ABSENT)
    result[torch.searchsorted(keys, blocks.keys)] = blocks.masks.long()
    return result
