"""Which rank holds what of a state: as a grid in a notebook, as text in a terminal.

A row is a leaf, a column a rank; what is filled of a cell is what the rank holds. A slice along
dimension 0 fills rows of the tensor, along another one columns, and a piece of ZeRO's an interval
of the values in their order. Of a weight with sections each is cut so; it is drawn as one.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from . import tree
from .mesh import Mesh
from .naming import short_dtype, size_of
from .placed import is_placed
from .sharding import Flat, Sharded
from .slicing import Sliced
from .tree import PyTree, Tensor

_MOST = 32  # columns


class Box(NamedTuple):
    """What a rank holds of a leaf that is drawn as a unit square: intervals down and across."""

    top: Fraction
    bottom: Fraction
    left: Fraction
    right: Fraction


WHOLE = Box(Fraction(0), Fraction(1), Fraction(0), Fraction(1))


@dataclass(frozen=True)
class Row:
    """Leaves that look the same.

    Attributes:
        name: their key path; numbers that differ as a range.
        count: how many there are.
        look: dtype and shape of the whole leaf.
        boxes: what each rank holds.
        bytes: of each rank, of all the leaves together.
    """

    name: str
    count: int
    look: str
    boxes: tuple[Box, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShardingPicture:
    """A state's leaves by rank; prints, and shows itself in a notebook. By :func:`show_sharding`.

    Attributes:
        axes: sizes of the axes that the ranks lie along.
        rows: the leaves.
    """

    axes: dict[str, int]
    rows: tuple[Row, ...]

    @property
    def ranks(self) -> list[str]:
        """What to call each rank: its places along the axes."""
        places = product(*[range(size) for size in self.axes.values()])
        return [
            " ".join(f"{name}{at}" for name, at in zip(self.axes, place, strict=True)) or "rank 0"
            for place in places
        ]

    def __str__(self) -> str:
        names = [_named(row) for row in self.rows]
        ranks, width = self.ranks[:_MOST], max(8, *map(len, self.ranks))
        first = max(map(len, names), default=0)
        looks = max((len(row.look) for row in self.rows), default=0)
        lines = [" " * (first + looks + 3) + " ".join(rank.ljust(width) for rank in ranks)]
        for name, row in zip(names, self.rows, strict=True):
            cells = " ".join(_cell(box, width) for box in row.boxes[:_MOST])
            lines.append(f"{name:<{first}} {row.look:<{looks}}  {cells}")
        totals = [size_of(sum(row.bytes[rank] for row in self.rows)) for rank in range(len(ranks))]
        lines.append(" " * (first + looks + 3) + " ".join(t.ljust(width) for t in totals))
        if len(self.ranks) > _MOST:
            lines.append(f"and {len(self.ranks) - _MOST} ranks more")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _html(self)


def show_sharding(state: PyTree, mesh: Mesh | None = None) -> ShardingPicture:
    """Which rank holds what of a state.

    Args:
        state: any tree, as an ``init`` or a step returns it.
        mesh: for axes over which nothing is cut; None: those that the leaves are cut over.

    Returns:
        A picture: text in a terminal, a grid in a notebook. Leaves that look the same share a row.
        Of a pipeline whose ranks are processes it shows this rank's stages.

    Raises:
        ValueError: if leaves were cut for different numbers of ranks of an axis.

    >>> import torch
    >>> import zero_fn as zf
    >>> mesh = zf.Mesh(dp=4)
    >>> params = {"w": torch.zeros(8, 2), "b": torch.zeros(3)}
    >>> print(zf.show_sharding(zf.spmd(lambda p: zf.shard(p, 3), mesh)(params)))
                dp0      dp1      dp2      dp3
    b f32[3]    ██▋····· ··▐██▍·· ·····▐██ ········
    w f32[8,2]  ██······ ··██···· ····██·· ······██
                20 B     20 B     20 B     16 B
    """
    axes = {} if mesh is None else dict(mesh.shape)
    leaves = [*_leaves(state)]
    for path, cuts, _ in leaves:
        for cut in cuts:
            if axes.setdefault(_axis(cut), cut.parts) != cut.parts:
                raise ValueError(
                    f"{path!r} was cut for {cut.parts} ranks of {_axis(cut)!r}, and there are "
                    f"{axes[_axis(cut)]}"
                )
    places = [
        dict(zip(axes, place, strict=True))
        for place in product(*[range(size) for size in axes.values()])
    ]
    groups: dict[tuple[Any, ...], list[tuple[str, Row]]] = {}
    for path, cuts, x in leaves:
        shape = tuple(cuts[0].shape) if cuts else tuple(x.shape)
        boxes = tuple([_box(cuts, shape, place) for place in places])
        size = math.prod(shape) * x.element_size()
        held = tuple([round(size * _area(box)) for box in boxes])
        look = f"{short_dtype(x.dtype)}[{','.join(map(str, shape))}]"
        row = Row(path, 1, look, boxes, held)
        groups.setdefault((re.sub(r"\d+", "*", path), look, boxes), []).append((path, row))
    rows = [_joined([row for _, row in found]) for found in groups.values()]
    return ShardingPicture(axes, tuple(rows))


def _leaves(state: PyTree) -> Iterator[tuple[str, list[Any], Tensor]]:
    """Each leaf with its key path, and how it is cut, the outermost cut first."""

    def is_cut(node: Any) -> bool:
        return isinstance(node, Sharded | Sliced)

    for path, node in zip(tree.paths(state, is_cut), tree.leaves(state, is_cut), strict=True):
        cuts = []
        while is_cut(node):
            cuts.append(node)
            node = node.local
        if isinstance(node, Tensor):
            yield path, cuts, node
        elif is_placed(node):
            for below, cuts_, x in _leaves(node):
                yield f"{path}.{below}", [*cuts, *cuts_], x


def _axis(cut: Any) -> str:
    return cut.axis if isinstance(cut.axis, str) else "×".join(cut.axis)


def _box(cuts: list[Any], shape: tuple[int, ...], place: dict[str, int]) -> Box:
    """What the rank at a place holds, padding left out."""
    box = WHOLE
    for cut in cuts:
        if not cut.axes:
            continue
        at, parts = place[_axis(cut)], cut.parts
        if isinstance(cut, Sliced):
            assert cut.rule is not None
            size = max(shape[cut.rule.dim], 1)
            start, end = _share(size, parts, at)
            across = cut.rule.dim > 0 or len(shape) == 1
            box = _within(box, start, end, across)
            sliced = list(shape)
            sliced[cut.rule.dim] = -(-size // parts)
            shape = tuple(sliced)
        elif isinstance(cut.scheme, Flat):
            start, end = _share(math.prod(shape), parts, at)
            box = _within(box, start, end, len(shape) == 1)
        else:  # how much, not which values
            box = _within(box, Fraction(at, parts), Fraction(at + 1, parts), len(shape) == 1)
    return box


def _share(size: int, parts: int, at: int) -> tuple[Fraction, Fraction]:
    """The interval of a size that the rank at a place has, when all but the last have as much."""
    if not size:
        return Fraction(0), Fraction(0)
    piece = -(-size // parts)
    return Fraction(min(at * piece, size), size), Fraction(min((at + 1) * piece, size), size)


def _within(box: Box, start: Fraction, end: Fraction, across: bool) -> Box:
    low, high = (box.left, box.right) if across else (box.top, box.bottom)
    new = low + start * (high - low), low + end * (high - low)
    return Box(box.top, box.bottom, *new) if across else Box(*new, box.left, box.right)


def _area(box: Box) -> Fraction:
    return (box.bottom - box.top) * (box.right - box.left)


def _joined(rows: list[Row]) -> Row:
    """Rows that differ in the numbers of their key paths, as one."""
    if len(rows) == 1:
        return rows[0]
    numbers = [re.findall(r"\d+", row.name) for row in rows]
    ends = iter(zip(*numbers, strict=True))

    def span(match: re.Match[str]) -> str:
        found = sorted({int(number) for number in next(ends)})
        return str(found[0]) if len(found) == 1 else f"{found[0]}…{found[-1]}"

    name = re.sub(r"\d+", span, rows[0].name)
    held = tuple(map(sum, zip(*[row.bytes for row in rows], strict=True)))
    return Row(name, len(rows), rows[0].look, rows[0].boxes, held)


def _named(row: Row) -> str:
    name = row.name or "the leaf"
    return name if row.count == 1 else f"{name} × {row.count}"


_EIGHTHS = " ▏▎▍▌▋▊▉█"


def _cell(box: Box, width: int) -> str:
    """A cell of text: what is held across, in its upper or lower half where it is cut both ways.

    What is held down counts as across where the leaf is cut that way only.
    """
    across = (box.left, box.right) != (Fraction(0), Fraction(1))
    down = (box.top, box.bottom) != (Fraction(0), Fraction(1))
    start, end = (box.left, box.right) if across else (box.top, box.bottom)
    full = "█" if not (across and down) else "▀" if box.top + box.bottom < 1 else "▄"
    text = ""
    for place in range(width):
        low, high = Fraction(place, width), Fraction(place + 1, width)
        filled = max(Fraction(0), min(end, high) - max(start, low)) * width
        if not filled:
            text += "·"
        elif filled == 1 or full != "█":
            text += full
        elif start > low:  # from somewhere within to its right edge
            text += "▐"
        else:
            text += _EIGHTHS[max(1, round(filled * 8))]
    return text


# Blue on a grey that shows on white and on black; text in the page's own colour.
_HELD, _EMPTY = "#4477AA", "#88888840"
_WIDE, _HIGH = 44, 22


def _html(picture: ShardingPicture) -> str:
    ranks = picture.ranks[:_MOST]
    heads = "".join(f"<th>{html.escape(rank)}</th>" for rank in ranks)
    lines = [f"<tr><th></th><th></th>{heads}</tr>"]
    for row in picture.rows:
        cells = "".join(f"<td>{_svg(box)}</td>" for box in row.boxes[:_MOST])
        lines.append(
            f"<tr><td style='text-align:left'><code>{html.escape(_named(row))}</code></td>"
            f"<td style='text-align:left'><code>{html.escape(row.look)}</code></td>{cells}</tr>"
        )
    sums = [size_of(sum(row.bytes[rank] for row in picture.rows)) for rank in range(len(ranks))]
    lines.append(f"<tr><td></td><td></td>{''.join(f'<td>{size}</td>' for size in sums)}</tr>")
    more = len(picture.ranks) - _MOST
    note = f"<p>and {more} ranks more</p>" if more > 0 else ""
    return f"<table>{''.join(lines)}</table>{note}"


def _svg(box: Box) -> str:
    x, y = float(box.left) * _WIDE, float(box.top) * _HIGH
    w, h = float(box.right - box.left) * _WIDE, float(box.bottom - box.top) * _HIGH
    held = f"<rect x='{x:.2f}' y='{y:.2f}' width='{w:.2f}' height='{h:.2f}' fill='{_HELD}'/>"
    return (
        f"<svg width='{_WIDE}' height='{_HIGH}' role='img'><rect width='{_WIDE}' height='{_HIGH}' "
        f"fill='{_EMPTY}'/>{held if w * h else ''}</svg>"
    )
