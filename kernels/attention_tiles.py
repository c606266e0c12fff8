"""Which tile each of the attention's Triton kernels works on: by dtype, head size, device, layout.

The tiles are the largest that need no more registers than there are, on sm_80, sm_90 and sm_100:
``tests/kernels/aot_table.json`` has the figures. Where a layout's blocks are small, a large tile
computes much that nobody sees, and a smaller one is taken.
"""

from typing import Literal, NamedTuple, TypeVar

import torch

from .layout_tiles import tiles_of
from .layouts import Layout

T = TypeVar("T")
Which = Literal["forward", "dq", "dkv"]


class Tile(NamedTuple):
    """Sizes of a kernel's tile, and how it is compiled."""

    rows: int  # queries
    columns: int  # keys
    warps: int
    stages: int  # loads under way, as a number of tiles


# Up to the padded head size given. Half precision: on sm_90, on sm_100, and on all others, some of
# which have 99 KiB of shared memory.
_HALF: dict[Which, dict[int, tuple[Tile, Tile, Tile]]] = {
    "forward": {
        64: (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        256: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
    "dq": {
        64: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 16, 8, 2)),
    },
    "dkv": {
        64: (Tile(64, 128, 8, 2), Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
        128: (Tile(32, 128, 8, 2), Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
        256: (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
}
# Half precision, small blocks.
_FINE: dict[Which, dict[int, Tile]] = {
    "forward": {128: Tile(64, 32, 4, 3), 256: Tile(64, 32, 8, 2)},
    "dq": {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 16, 8, 2)},
    "dkv": {128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
}
# A bias takes registers too.
_BIASED: dict[Which, dict[int, Tile]] = {
    "forward": {64: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
    "dq": {256: Tile(64, 16, 8, 2)},
    "dkv": {64: Tile(16, 64, 4, 2), 256: Tile(32, 32, 8, 2)},
}
_FLOAT32: dict[Which, dict[int, Tile]] = {
    "forward": {64: Tile(64, 32, 4, 2), 128: Tile(32, 16, 4, 2), 256: Tile(16, 32, 8, 1)},
    "dq": {
        16: Tile(32, 32, 4, 2),
        64: Tile(32, 32, 8, 2),
        128: Tile(32, 16, 8, 2),
        256: Tile(16, 16, 8, 2),
    },
    "dkv": {
        16: Tile(32, 32, 4, 2),
        32: Tile(16, 32, 4, 2),
        64: Tile(32, 32, 8, 2),
        128: Tile(16, 16, 4, 1),
        256: Tile(16, 16, 8, 1),
    },
}
_BIASED_FLOAT32: dict[Which, Tile] = {
    "forward": Tile(16, 32, 8, 1),
    "dq": Tile(16, 16, 8, 2),
    "dkv": Tile(16, 16, 8, 1),
}
_FINER = 1.5  # what a score costs in a small tile, in those of a large one


def padded(size: int) -> int:
    """The head size that a kernel computes with."""
    return max(16, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype, size: int) -> str:
    """How products are computed.

    Of float32, as three on tensor cores of the upper and lower halves of its digits; for the
    largest head sizes that takes more registers than there are, and they are computed plainly.
    """
    return "tf32x3" if dtype == torch.float32 and padded(size) <= 128 else "ieee"


def tiles_for(
    which: Which, dtype: torch.dtype, size: int, capability: int, biased: bool
) -> list[Tile]:
    """The tiles of a kernel: the usual one, and if there is one, that for small blocks.

    Args:
        which: the kernel.
        dtype: of q, k and v.
        size: head size, up to 256.
        capability: the device's, 90 for sm_90.
        biased: whether there is a bias.
    """
    if dtype == torch.float32:
        return [_BIASED_FLOAT32[which] if biased else _up_to(_FLOAT32[which], size)]
    if biased:
        return [_up_to(_BIASED[which], size)]
    hopper, blackwell, other = _up_to(_HALF[which], size)
    usual = {90: hopper, 100: blackwell}.get(capability, other)
    return list(dict.fromkeys([usual, _up_to(_FINE[which], size)]))


def _up_to(by_size: dict[int, T], size: int) -> T:
    return next(found for largest, found in by_size.items() if padded(size) <= largest)


def best(tiles: list[Tile], layout: Layout, transposed: bool) -> Tile:
    """The tile that computes a layout soonest, counted in scores; the first is the usual one."""

    def cost(tile: Tile) -> float:
        found = tiles_of(layout, tile.rows, tile.columns, transposed)
        scores = len(found.others) * tile.rows * tile.columns
        return scores * (1.0 if tile is tiles[0] else _FINER)

    def made() -> Tile:
        return min(tiles, key=cost)

    if len(tiles) == 1:
        return tiles[0]
    chosen: Tile = layout.derived(("best tile", *tiles, transposed), made)
    return chosen
