"""A layout cut into the tiles that a kernel works on, whatever the layout's own block is.

Tiles are listed in compressed rows (or columns, for a kernel that goes through the queries of some
keys). A tile that is seen in full carries no mask; the others refer to a table of distinct masks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout_blocks import WHOLE, Blocks, arange, cleaned, with_real_tensors
from .layouts import Layout


class Tiles(NamedTuple):
    """The tiles of a layout: for each pattern and tile row, which columns, and their masks.

    ``ptr`` is int64 (patterns * tile rows + 1), ``others`` int32 (tiles), ``masks`` int32 (tiles):
    -1 or a row of ``table``, bool (distinct masks, rows of a tile, columns of a tile). Of
    transposed tiles, ``ptr`` counts tile columns and ``others`` are tile rows; ``table`` stays
    (rows, columns). Masks hide keys past the end, but not queries past the end.
    """

    ptr: Tensor
    others: Tensor
    masks: Tensor
    table: Tensor


def tiles_of(layout: Layout, rows: int, columns: int, transposed: bool = False) -> Tiles:
    """``layout`` in tiles of ``rows`` queries and ``columns`` keys, powers of two from 8 to 256."""

    def made() -> Tiles:
        return _tiles(layout, rows, columns, transposed)

    tiles: Tiles = layout.derived(("tiles", rows, columns, transposed), made)
    return tiles


def best_rows(layout: Layout, most: int, per_key: int, per_row: int) -> int:
    """How many queries to a row of tiles: more share their keys, but see more in vain.

    Args:
        layout: in whose blocks the keys come.
        most: rows.
        per_key: what a key of a tile costs besides its scores, in scores.
        per_row: what a row of tiles costs besides.
    """

    def cost(rows: int) -> float:
        total = 0
        for keys, _ in layout.blocks():
            row, column = keys // max(layout.k_blocks, 1), keys % max(layout.k_blocks, 1)
            together = row * layout.block // rows * layout.k_blocks + column
            total += len(together.unique()) * layout.block * (rows + per_key)
        return total + layout.patterns * -(-layout.q_len // rows) * per_row

    sizes = [layout.block * 2**i for i in range(5) if layout.block * 2**i <= most]
    return min(sizes, key=cost)


@with_real_tensors
def _tiles(layout: Layout, rows: int, columns: int, transposed: bool) -> Tiles:
    size = layout.block
    patterns, tiles = _without_keys_past_the_end(layout)
    # Each block is cut where a tile ends within it ...
    down, across = max(1, size // rows), max(1, size // columns)
    piece = size // down, size // across
    pieces = tiles.view(-1, down, piece[0], across, piece[1]).transpose(2, 3).flatten(0, 2)
    width = layout.k_blocks * across
    patterns, pieces = cleaned([_cut(b, layout.k_blocks, down, across) for b in patterns], pieces)
    # ... and joined with its neighbours where a tile is larger.
    high, wide = rows // piece[0], columns // piece[1]
    tile_rows, tile_columns = -(-layout.q_len // rows), -(-layout.k_len // columns)
    found = [_joined(b, max(width, 1), high, wide, tile_rows, tile_columns) for b in patterns]
    signatures = torch.cat([signature for _, signature in found])
    whole = (signatures == WHOLE).all(1)
    kinds, which = signatures[~whole].unique(dim=0, return_inverse=True)
    ends = torch.zeros(1, *piece, dtype=torch.bool), torch.ones(1, *piece, dtype=torch.bool)
    # -2 (absent) and -1 (whole) count from the end.
    table = torch.cat([pieces, *ends])[kinds.long()].view(len(kinds), high, wide, *piece)
    table = table.transpose(2, 3).reshape(len(kinds), rows, columns)
    masks = torch.full((len(signatures),), WHOLE, dtype=torch.int32)
    masks[~whole] = which.int()
    ptrs, others, at = [arange(1)], [], 0
    ordered = []
    for keys, _ in found:
        row, column = keys // max(tile_columns, 1), keys % max(tile_columns, 1)
        line, other, lines = (column, row, tile_columns) if transposed else (row, column, tile_rows)
        order = line.argsort(stable=True)
        ptrs.append(ptrs[-1][-1] + torch.bincount(line, minlength=lines).cumsum(0))
        others.append(other[order].int())
        ordered.append(masks[at : at + len(keys)][order])
        at += len(keys)
    return Tiles(torch.cat(ptrs), torch.cat(others), torch.cat(ordered), table)


def _without_keys_past_the_end(layout: Layout) -> tuple[list[Blocks], Tensor]:
    """The layout's blocks, where masks hide what is past the last key."""
    patterns, tiles = layout.blocks(), layout.tiles
    inside = layout.k_len % layout.block
    if not inside:
        return patterns, tiles
    seen = (arange(layout.block) < inside).expand(1, layout.block, layout.block)
    count = len(tiles)
    tiles = torch.cat([tiles, tiles & seen, seen])
    for keys, masks in patterns:
        last = keys % layout.k_blocks == layout.k_blocks - 1
        masks[last] = torch.where(masks[last] < 0, 2 * count, masks[last] + count)
    return patterns, tiles


def _cut(blocks: Blocks, width: int, down: int, across: int) -> Blocks:
    """Each block as ``down`` × ``across`` pieces; piece (i, j) of tile t is tile (t, i, j)."""
    keys, masks = blocks
    i, j = arange(down)[:, None], arange(across)
    rows, columns = (x[:, None, None] for x in (keys // max(width, 1), keys % max(width, 1)))
    new = (rows * down + i) * (width * across) + columns * across + j
    tile = (masks.long()[:, None, None] * down + i) * across + j
    tile = torch.where(masks[:, None, None] < 0, WHOLE, tile)
    order = new.flatten().argsort()
    return Blocks(new.flatten()[order], tile.flatten()[order].int())


def _joined(
    pieces: Blocks, width: int, high: int, wide: int, tile_rows: int, tile_columns: int
) -> tuple[Tensor, Tensor]:
    """The keys of the tiles, and the masks of the pieces of each: (tiles, high * wide)."""
    keys, masks = pieces
    row, column = keys // width, keys % width
    # A last block may reach past the last tile; of keys past the end nothing is left by now.
    inside = row // high < tile_rows
    row, column, masks = row[inside], column[inside], masks[inside]
    keys, which = ((row // high) * tile_columns + column // wide).unique(return_inverse=True)
    signature = torch.full((len(keys), high * wide), -2, dtype=torch.int32)
    signature[which, row % high * wide + column % wide] = masks
    return keys, signature
