"""Pictures of a layout: text for a terminal, matplotlib for a page."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layout_blocks import with_real_tensors

if TYPE_CHECKING:
    from .layouts import Layout


@with_real_tensors
def shades(layout: "Layout", head: int, most: int) -> Tensor:
    """Share of elements seen in each cell of a grid of at most ``most`` cells a side.

    A cell is one block, or in longer layouts a square of several.
    """
    if not -layout.heads <= head < layout.heads:
        raise IndexError(f"head {head} of a layout with {layout.heads}")
    keys, masks = layout.blocks()[layout.head_patterns[head]]
    step = max(1, -(-max(layout.q_blocks, layout.k_blocks) // most))
    rows, columns = -(-layout.q_blocks // step), -(-layout.k_blocks // step)
    seen = torch.cat([layout.tiles.flatten(1).float().mean(1), torch.ones(1)])[masks.long()]
    width = max(layout.k_blocks, 1)
    cell = keys // width // step * columns + keys % width // step
    total = torch.zeros(rows * columns).index_add(0, cell, seen).view(rows, columns)
    # The last cells of a side may hold fewer blocks.
    heights = torch.full((rows,), step).cumsum(0).clamp_max(layout.q_blocks)
    widths = torch.full((columns,), step).cumsum(0).clamp_max(layout.k_blocks)
    area = heights.diff(prepend=torch.zeros(1))[:, None] * widths.diff(prepend=torch.zeros(1))
    return total / area


def text(layout: "Layout", head: int = 0, most: int = 48) -> str:
    """One character a block: █ for all of it, · for nothing, ░▒▓ for what is between."""
    grid = shades(layout, head, most)

    def character(shade: float) -> str:
        if shade == 0:
            return "·"
        return "█" if shade > 1 - 1e-6 else "░▒▓"[min(2, int(shade * 3))]

    return "\n".join("".join(map(character, row)) for row in grid.tolist())


def plot(layout: "Layout", ax: Any, head: int) -> Any:
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1]
    ax.imshow(
        shades(layout, head, 512).tolist() or [[0.0]],
        cmap="Blues",
        vmin=0,
        vmax=1.25,
        interpolation="none",
        extent=(0, max(layout.k_len, 1), max(layout.q_len, 1), 0),
    )
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    return ax
