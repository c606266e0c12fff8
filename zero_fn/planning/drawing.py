"""How plans look: as tables in a terminal and in a notebook, and as stacked bars."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..accounting import PARTS
from ..memory_drawing import COLOURS
from ..naming import size_of, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from .plans import Plan


def rows_of(plan: Plan) -> dict[str, str]:
    """What a table says of a plan, row by row."""
    rows = {"at rest": size_of(sum(plan.rest.values()))}
    rows |= {f"  {part}": size_of(size) for part, size in plan.rest.items() if size}
    rows["peak"] = size_of(plan.peak.bytes)
    rows |= {f"  {part} then": size_of(size) for part, size in plan.peak.parts.items() if size}
    rows["peak at"] = plan.peak.operation.split(" = ")[-1].removesuffix(".default") + (
        f"\n{plan.peak.line}" if plan.peak.line else ""
    )
    if plan.hardware is not None:
        memory = size_of(plan.hardware.memory)
        rows["hardware"] = f"{plan.hardware.name}, {memory}"
        rows["fits"] = "yes" if plan.fits else "no"
    if plan.host:
        rows["on the host"] = size_of(plan.host)
    if plan.disk:
        rows["on disk"] = size_of(plan.disk)
    rows["sent"] = size_of(plan.bytes_sent)
    for found in plan.collectives:
        rows[f"  {found.kind} over {found.axis}"] = (
            f"{found.calls} calls, {size_of(found.bytes_sent)}"
        )
    rows["FLOPs"] = f"{plan.flops:.3g}"
    if plan.estimate is not None:
        rows["step, estimated"] = (
            f"{_time(plan.estimate.overlapped)} to {_time(plan.estimate.serial)}"
        )
        rows["  computing"] = _time(plan.estimate.compute)
        rows |= {
            f"  sending over {axis}": _time(seconds)
            for axis, seconds in plan.estimate.communication.items()
        }
    if plan.estimate is not None and plan.estimate.idle:
        rows["  idle"] = _time(plan.estimate.idle)
    if plan.estimate is not None and plan.estimate.offload:
        rows["  offload"] = _time(plan.estimate.offload)
    if plan.bubble is not None:
        rows["pipeline's bubble"] = f"{plan.bubble:.1%}"
    return rows


def table_of(plans: Sequence[Plan], measured: Mapping[str, float] | None) -> Table:
    from rich.table import Table

    columns = [rows_of(plan) for plan in plans]
    # The first column's order, with what others have put in behind what stands before it there.
    names: list[str] = []
    for column in columns:
        place = 0
        for name in column:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    table = Table(title="one step on one rank")
    table.add_column("")
    for plan in plans:
        table.add_column(plan.label, justify="right")
    if measured is None:
        for name in names:
            table.add_row(name, *[column.get(name, "") for column in columns])
        return table
    known = {"at rest": size_of, "peak": size_of, "sent": size_of, "step": _time}
    for name in measured:
        if name not in known:
            raise ValueError(f"measured has {name!r}; there are {', '.join(map(repr, known))}")
    table.add_column("measured", justify="right")
    for name in names:
        key = "step" if name == "step, estimated" else name
        shown = known[key](measured[key]) if key in measured else ""
        table.add_row(name, columns[0][name], shown)
    return table


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def text_of(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    found = console.file.getvalue()  # type: ignore[attr-defined]
    return str(found).rstrip()


def html_of(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, record=True, force_jupyter=False)
    console.print(table)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>'
    )


def draw(plans: Sequence[Plan], ax: Axes | None) -> Axes:
    """Two bars a plan, on matplotlib Axes."""
    from matplotlib import pyplot

    if ax is None:
        figure, ax = pyplot.subplots(figsize=(3.5 + 2.2 * len(plans), 4), layout="constrained")
        figure.set_facecolor("white")  # opaque: dark themes show the same picture
    names, bars = [], []
    for plan in plans:
        for when, sizes in (("at rest", plan.rest), ("peak", plan.peak.parts)):
            names.append(f"{plan.label}\n{when}")
            bars.append(sizes)
    highest = max(sum(sizes.values()) for sizes in bars)
    unit, unit_name = unit_of(highest)
    floors = [0.0] * len(bars)
    for part in PARTS:
        heights = [sizes.get(part, 0) / unit for sizes in bars]
        if any(heights):
            ax.bar(range(len(bars)), heights, 0.7, floors, label=part, color=COLOURS[part])
            floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
    for known in {plan.hardware.name: plan.hardware for plan in plans if plan.hardware}.values():
        if known.memory > 4 * highest:  # its line would leave nothing else to see
            ax.set_title(f"{known.name} has {size_of(known.memory)}", loc="left", fontsize="small")
            continue
        ax.axhline(known.memory / unit, color="#888888", linestyle="--")
        ax.annotate(known.name, (len(bars) - 0.5, known.memory / unit), ha="right", va="bottom")
    ax.set_xticks(range(len(bars)), names)
    ax.set_ylabel(f"{unit_name} on one rank")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
