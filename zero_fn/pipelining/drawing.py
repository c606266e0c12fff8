"""How a timeline looks: as text, in a terminal with colours, on matplotlib Axes, in a notebook.

Colours say the kind of an action, and darker ones that it belongs to a later stage of its rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zero_fn.pipelining.schedule import Action, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.text import Text

    from zero_fn.pipelining.timeline import Timeline

RGB = tuple[float, float, float]

# Paul Tol's light scheme: told apart by colour-blind readers, and dark text reads on all.
_COLOURS: dict[Kind, str] = {"F": "#77AADD", "B": "#EE8866", "I": "#EEDD88", "W": "#44BB99"}
_IDLE = "#EEEEEE"
_MEANINGS: dict[Kind, str] = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
}


def timeline_text(timeline: Timeline, width: int) -> str:
    """The timeline as text of at most `width` columns; see `Timeline.text`."""
    names = [f"rank {rank}" for rank in range(timeline.schedule.ranks)]
    indent = max(map(len, names)) + 2
    rows = _written_out(timeline, width - indent) or _sliced(timeline, max(width - indent, 1))
    lines = [name.ljust(indent) + row for name, row in zip(names, rows, strict=True)]
    return "\n".join([_title(timeline), *lines, _peaks(timeline)])


def timeline_rich(timeline: Timeline, width: int) -> Text:
    """The timeline as rich's text, coloured; see `timeline_text`."""
    from rich.text import Text

    first, *lines, last = timeline_text(timeline, width).split("\n")
    text = Text(first + "\n", no_wrap=True)
    for line in lines:
        row = Text(line + "\n", no_wrap=True)
        for kind, colour in _COLOURS.items():
            style = f"black on {colour}"
            row.highlight_regex(rf"\d*{kind}\d+─*|[{kind}{kind.lower()}]+(?![a-z]* \d)", style)
        text.append(row)
    return text.append(last)


def draw_timeline(timeline: Timeline, ax: Axes | None) -> Axes:
    """The timeline on matplotlib Axes; see `Timeline.draw`."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    if ax is None:
        height = 1.3 + 0.36 * schedule.ranks
        _, ax = pyplot.subplots(figsize=(12, height), layout="constrained")
    for rank, events in enumerate(timeline.events):
        ax.barh(rank, timeline.makespan, height=0.86, color=_IDLE)
        for action, start, end in events:
            colour = _colour(timeline, rank, action)
            # thin white edges part neighbours; at hundreds of actions they would hide them
            edge = min(0.8, 120 * (end - start) / timeline.makespan) if end > start else 0
            ax.barh(
                rank, end - start, left=start, height=0.86, color=colour, edgecolor="white",
                linewidth=edge,
            )  # fmt: skip
    _number(timeline, ax)
    kinds = [k for k in _COLOURS if any(e.action.kind == k for row in timeline.events for e in row)]
    handles = [Patch(facecolor=_COLOURS[kind], label=_MEANINGS[kind]) for kind in kinds]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    if schedule.stages > schedule.ranks:
        handles.append(Patch(facecolor="none", label="(darker: a later stage of the rank)"))
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / schedule.ranks - 0.06),
        ncols=len(handles),
        frameon=False,
        fontsize="small",
    )
    ax.set_title(_title(timeline), loc="left", fontsize="medium")
    ax.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    ax.set_ylim(schedule.ranks - 0.5, -0.5)
    ax.set_xlim(0, timeline.makespan or 1)
    ax.set_xlabel("time", loc="right", labelpad=1)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return ax


def _number(timeline: Timeline, ax: Axes) -> None:
    """Write each action's micro-batch into its bar, where the narrowest has room for it."""
    digits = len(str(timeline.schedule.microbatches - 1))
    points = 72 / ax.figure.dpi * ax.get_window_extent().width
    lengths = [e.end - e.start for row in timeline.events for e in row if e.end > e.start]
    if not lengths:
        return
    # a digit is about 0.62 of its size wide
    size = min(8.0, 0.85 * points * min(lengths) / timeline.makespan / (0.62 * digits))
    if size < 3.5:
        return
    for rank, events in enumerate(timeline.events):
        for action, start, end in events:
            if end > start:
                ax.text(
                    (start + end) / 2, rank, str(action.microbatch), fontsize=size, ha="center",
                    va="center", color=_ink(_colour(timeline, rank, action)),
                )  # fmt: skip


def timeline_html(timeline: Timeline) -> str:
    """The timeline as an HTML table, one row a rank, with the bars as inline SVG."""
    makespan = timeline.makespan or 1
    rows = []
    for rank, events in enumerate(timeline.events):
        bars = []
        for action, start, end in events:
            red, green, blue = (round(255 * part) for part in _colour(timeline, rank, action))
            x, width = (1000 * time / makespan for time in (start, end - start))
            bars.append(
                f'<rect x="{x:.2f}" width="{width:.2f}" height="18" '
                f'fill="rgb({red},{green},{blue})" stroke="white" stroke-width="0.5">'
                f"<title>{action}: {start:g} to {end:g}</title></rect>"
            )
        stages = ", ".join(map(str, timeline.schedule.stages_of(rank)))
        idle = 1 - timeline.busy[rank] / makespan if timeline.makespan else 0
        rows.append(
            f"<tr><td>{rank}</td><td>{stages}</td><td>{idle:.1%}</td>"
            f"<td>{timeline.peak_activations[rank]:g}</td><td>"
            f'<svg width="700" height="18" viewBox="0 0 1000 18" preserveAspectRatio="none">'
            f"{''.join(bars)}</svg></td></tr>"
        )
    kinds = " ".join(
        f'<span style="background:{_COLOURS[kind]};color:black;padding:0 6px">'
        f"{_MEANINGS[kind]}</span>"
        for kind in _COLOURS
    )
    return (
        f"<table><caption>{_escape(_title(timeline))}<br>{kinds}</caption>"
        f"<tr><th>rank</th><th>stages</th><th>idle</th><th>peak activations</th><th>time</th></tr>"
        f"{''.join(rows)}</table>"
    )


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}, {_count(schedule.ranks, 'rank')} × "
        f"{_count(schedule.microbatches, 'micro-batch')}: "
        f"bubble {100 * timeline.bubble:.1f} %, makespan {timeline.makespan:g}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('h') else 's'}"


def _peaks(timeline: Timeline) -> str:
    return "peak activations " + " ".join(f"{peak:g}" for peak in timeline.peak_activations)


def _label(timeline: Timeline, action: Action) -> str:
    # with one stage a rank, the row says the stage
    single = timeline.schedule.stages == timeline.schedule.ranks
    return f"{action.kind}{action.microbatch}" if single else str(action)


def _written_out(timeline: Timeline, columns: int) -> list[str] | None:
    """Each action by name, if all times are whole multiples of the shortest and the rows fit."""
    lengths = [e.end - e.start for row in timeline.events for e in row]
    unit = min((length for length in lengths if length > 0), default=0)
    if not unit or min(lengths) == 0:
        return None
    times = [time / unit for row in timeline.events for e in row for time in e[1:]]
    if any(not math.isclose(time, round(time), abs_tol=1e-6) for time in times):
        return None
    cell = 1 + max(len(_label(timeline, e.action)) for row in timeline.events for e in row)
    slots = round(timeline.makespan / unit)
    if slots * cell > columns:
        return None
    rows = []
    for events in timeline.events:
        row = ["·".ljust(cell)] * slots
        for action, start, end in events:
            first, last = round(start / unit), round(end / unit)
            bar = _label(timeline, action).ljust((last - first) * cell - 1, "─") + " "
            row[first:last] = [bar, *[""] * (last - first - 1)]
        rows.append("".join(row).rstrip())
    return rows


def _sliced(timeline: Timeline, columns: int) -> list[str]:
    """One character for each slice of time: the kind, small for a later stage of the rank."""
    rows = []
    for rank, events in enumerate(timeline.events):
        first = timeline.schedule.stages_of(rank)[:1]
        row = ["·"] * columns
        for action, start, end in events:
            letter = action.kind if action.stage in first else action.kind.lower()
            # the slices whose middle lies in [start, end)
            begin, stop = (
                math.ceil(columns * t / timeline.makespan - 0.5) if timeline.makespan else 0
                for t in (start, end)
            )
            row[begin:stop] = letter * (stop - begin)
        rows.append("".join(row))
    return rows


def _colour(timeline: Timeline, rank: int, action: Action) -> RGB:
    code = _COLOURS[action.kind]
    stages = timeline.schedule.stages_of(rank)
    shade = 1 - 0.38 * stages.index(action.stage) / max(len(stages) - 1, 1)
    red, green, blue = (shade * int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _ink(colour: RGB) -> str:
    red, green, blue = colour
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "white"


def _escape(text: str) -> str:
    from html import escape

    return escape(text)
