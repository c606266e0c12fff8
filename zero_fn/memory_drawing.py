"""How a program's memory looks: what is alive while each operation runs, stacked by what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .accounting import PARTS, Moment
from .naming import size_of, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What rests is at the bottom, and what comes and goes above it.
_STACKED = (
    "parameters",
    "optimizer state",
    "gathered parameters",
    "gradients",
    "activations",
    "other",
)
# Paul Tol's light scheme: told apart by colour-blind readers.
COLOURS = dict(
    zip(PARTS, ("#77AADD", "#99DDFF", "#EE8866", "#44BB99", "#EEDD88", "#BBBBBB"), strict=True)
)


def draw_memory(moments: Sequence[Moment], line: str, ax: Axes | None) -> Axes:
    """What is alive, on matplotlib Axes; ``line`` is the peak's line of the program."""
    from matplotlib import pyplot

    if ax is None:
        figure, ax = pyplot.subplots(figsize=(9, 4), layout="constrained")
        figure.set_facecolor("white")  # opaque: dark themes show the same picture
    highest = max(moment.bytes for moment in moments)
    unit, name = unit_of(highest)
    kinds = [part for part in _STACKED if any(moment.parts.get(part, 0) for moment in moments)]
    heights = [[moment.parts.get(part, 0) / unit for moment in moments] for part in kinds]
    ax.stackplot(
        range(len(moments)), heights, labels=kinds, colors=[COLOURS[part] for part in kinds],
        step="post", linewidth=0,
    )  # fmt: skip
    place = max(range(len(moments)), key=lambda place: moments[place].bytes)
    ax.plot(place, highest / unit, "v", color="black", markersize=5)
    operation = moments[place].operation.split(" = ")[-1].removesuffix(".default")
    where = "right" if place > len(moments) / 2 else "left"
    ax.annotate(
        f"{size_of(highest)}, {operation}" + (f"\n{line}" if line else ""),
        (place, highest / unit), xytext=(-8 if where == "right" else 8, 6),
        textcoords="offset points", ha=where, va="bottom", fontsize="small",
    )  # fmt: skip
    ax.set_xlim(0, max(len(moments) - 1, 1))
    ax.set_ylim(0, 1.25 * highest / unit or 1)
    ax.set_xlabel("operation of the step, in order")
    ax.set_ylabel(f"{name} on one rank")
    ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()  # the topmost first, as they are stacked
    ax.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize="small",
        loc="center left", bbox_to_anchor=(1, 0.5),
    )  # fmt: skip
    return ax
