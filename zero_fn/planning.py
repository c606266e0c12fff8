"""Plans: what one step costs on one rank, before it runs.

A plan is read off the traced program of an abstract rank, so nothing is allocated and nothing is
sent: a laptop plans for hundreds of GPUs. Bytes, operations and collectives are counted; only the
seconds are an estimate.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

from . import tree
from .accounting import PARTS, Collective, Work
from .compiler import Jitted, jit
from .hardware import Hardware
from .hardware import hardware as _hardware
from .mesh import Mesh
from .naming import size_of
from .program import Peak, Program
from .ranks import spmd
from .tree import PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


class Estimate(NamedTuple):
    """The seconds of a step: an estimate.

    Every operation takes as long as its floating-point operations at the hardware's efficiency, or
    its bytes at the memory's bandwidth, whichever is longer; a collective as long as its bytes on
    the slowest way it takes, without latency. Operations that a compiler fuses take less.

    Attributes:
        compute: of the operations.
        communication: of the collectives, by axis.
    """

    compute: float
    communication: Mapping[str, float]

    @property
    def overlapped(self) -> float:
        """A step whose communication hides behind computation as far as it can."""
        return max(self.compute, sum(self.communication.values()))

    @property
    def serial(self) -> float:
        """A step that computes while nothing is sent."""
        return self.compute + sum(self.communication.values())


@dataclass(frozen=True)
class Plan:
    """What one step costs on one rank.

    Attributes:
        label: what to call it in a table.
        mesh: the size of each axis.
        rest: the bytes of state and batch between steps, by what they are.
        peak: the most bytes while the step runs, what they are, and the operation that runs then.
        most: for each part of memory the most that it ever takes, wherever the peak is.
        states: the most that parameters, gathered parameters, gradients and optimizer state take
            together: what ZeRO's formulas count.
        collectives: kind, axis, calls and bytes.
        flops: floating-point operations of matrix products, convolutions and attention.
        hardware: what it is planned for, or None.
        estimate: the seconds, where the hardware is known.
    """

    label: str
    mesh: Mapping[str, int]
    rest: Mapping[str, int]
    peak: Peak
    most: Mapping[str, int]
    states: int
    collectives: tuple[Collective, ...]
    flops: int
    hardware: Hardware | None
    estimate: Estimate | None

    @property
    def bytes_sent(self) -> int:
        """What one rank sends in a step, by the ring algorithm."""
        return sum(collective.bytes_sent for collective in self.collectives)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the hardware's memory, if its allocator wastes none.

        Raises:
            ValueError: without hardware.
        """
        if self.hardware is None:
            raise ValueError("a plan without hardware fits nowhere; zf.plan(..., hardware='h100')")
        return self.peak.bytes <= self.hardware.memory

    def table(self, measured: Mapping[str, float] | None = None) -> Table:
        """The plan as a table of :mod:`rich`.

        Args:
            measured: what a run took, shown beside what the plan says, by the same names:
                ``"peak"``, ``"at rest"``, ``"sent"`` in bytes, ``"step"`` in seconds.

        Raises:
            ValueError: for a name that the table does not have.
        """
        return _table([self], measured)

    def plot(self) -> Figure:
        """Memory at rest and at the peak as stacked bars, with the hardware's as a line."""
        return _figure([self])

    def __str__(self) -> str:
        return _text(self.table())

    def _repr_html_(self) -> str:
        return _html(self.table())


class Comparison(NamedTuple):
    """Plans side by side; made by :func:`compare`."""

    plans: tuple[Plan, ...]

    def table(self) -> Table:
        """One column a plan."""
        return _table(self.plans, None)

    def plot(self) -> Figure:
        """Two bars a plan: memory at rest, and at the peak."""
        return _figure(self.plans)

    def __str__(self) -> str:
        return _text(self.table())

    def _repr_html_(self) -> str:
        return _html(self.table())


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """What ``f(*args)`` returns, as shapes and dtypes: nothing is computed or allocated.

    Args:
        f: any function of tensors and of what makes tensors.
        args: its arguments; they may come from ``eval_shape`` themselves.

    Returns:
        The results, with fake tensors in the place of tensors.
    """
    mode = next((x.fake_mode for x in tree.leaves(args) if hasattr(x, "fake_mode")), None)
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        return f(*args)


def plan(
    step: Callable[..., Any],
    state: PyTree,
    batch: PyTree,
    mesh: Mesh | None = None,
    *,
    hardware: Hardware | str | None = None,
    label: str | None = None,
) -> Plan:
    """What one step costs on one rank.

    Args:
        step: (state, batch) to anything: a jitted step over an abstract mesh, such as
            ``zf.train_step(..., mesh.abstract())`` makes, or, with ``mesh``, one rank's program.
        state: one rank's state, as ``init`` over the abstract mesh makes it; shapes are enough
            (:func:`eval_shape`).
        batch: the global batch, as the step takes it.
        mesh: the mesh of a rank's program; only its sizes count.
        hardware: what to estimate the seconds for: a name that :func:`zero_fn.hardware` knows, or
            the figures.
        label: what to call it in a table; None: the mesh's sizes.

    Raises:
        TypeError: if ``step`` is not jitted and there is no mesh.
        ValueError: if the step runs on several simulated ranks, all in one program; for unknown
            hardware, or a dtype that it has no figure for.
    """
    if isinstance(step, Jitted):
        jitted = step
    elif mesh is not None:
        jitted = jit(spmd(step, mesh.abstract()), donate=0)
    else:
        raise TypeError(
            f"step is {step!r}; pass a jitted step over an abstract mesh (zf.train_step(..., "
            "mesh.abstract()).step), or one rank's program and its mesh"
        )
    over = getattr(jitted.f, "mesh", mesh)
    if over is not None and over.size > 1 and over.interpreter == "simulated":
        raise ValueError(
            f"the step runs on {over}, all in one program; one rank's is that of mesh.abstract()"
        )
    known = _hardware(hardware) if isinstance(hardware, str) else hardware
    sizes = dict(over.shape) if over is not None else {}
    return _read_off(jitted.trace(state, batch), sizes, known, label)


def compare(*plans: Plan) -> Comparison:
    """Plans side by side.

    Raises:
        ValueError: without plans.
    """
    if not plans:
        raise ValueError("nothing to compare; zf.compare(plan_a, plan_b)")
    return Comparison(plans)


def _read_off(
    program: Program, sizes: dict[str, int], known: Hardware | None, label: str | None
) -> Plan:
    moments = program.memory_timeline()
    most = {part: max(moment.parts.get(part, 0) for moment in moments) for part in PARTS}
    owned = ("parameters", "gathered parameters", "gradients", "optimizer state")
    collectives = tuple(program.collectives())
    estimate = None
    if known is not None:
        sent: dict[str, float] = {}
        for collective in collectives:
            seconds = collective.bytes_sent / _speed(known, sizes, collective.axis)
            sent[collective.axis] = sent.get(collective.axis, 0) + seconds
        estimate = Estimate(sum(_seconds(known, work) for work in program.work()), sent)
    return Plan(
        label or " × ".join(f"{name} {size}" for name, size in sizes.items()) or "one rank",
        sizes,
        program.at_rest(),
        program.peak(),
        most,
        max(sum(moment.parts.get(part, 0) for part in owned) for moment in moments),
        collectives,
        program.flops(),
        known,
        estimate,
    )


def _seconds(known: Hardware, work: Work) -> float:
    moving = work.bytes / known.bandwidth
    if not work.flops or work.dtype is None:
        return moving
    return max(moving, work.flops / (known.flops_of(work.dtype) * known.efficiency))


def _speed(known: Hardware, sizes: Mapping[str, int], axis: str) -> float:
    """Bytes a second between neighbours on an axis: the axis named last changes fastest."""
    names = [*sizes]
    apart = 1
    for name in names[names.index(axis) :] if axis in names else []:
        apart *= sizes[name]
    return known.link if apart <= known.node else known.network


# Pictures.


def _rows(plan: Plan) -> dict[str, str]:
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
    return rows


def _table(plans: Sequence[Plan], measured: Mapping[str, float] | None) -> Table:
    from rich.table import Table

    columns = [_rows(plan) for plan in plans]
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


def _text(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    found = console.file.getvalue()  # type: ignore[attr-defined]
    return str(found).rstrip()


def _html(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, record=True, force_jupyter=False)
    console.print(table)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>'
    )


# Paul Tol's light scheme: told apart by colour-blind readers.
_COLOURS = dict(
    zip(PARTS, ("#77AADD", "#99DDFF", "#EE8866", "#44BB99", "#EEDD88", "#BBBBBB"), strict=True)
)


def _figure(plans: Sequence[Plan]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.2 * len(plans), 4), layout="constrained")
    axes = figure.add_subplot()
    names, bars = [], []
    for plan in plans:
        for when, sizes in (("at rest", plan.rest), ("peak", plan.peak.parts)):
            names.append(f"{plan.label}\n{when}")
            bars.append(sizes)
    floors = [0.0] * len(bars)
    for part in PARTS:
        heights = [sizes.get(part, 0) / 2**30 for sizes in bars]
        if any(heights):
            axes.bar(range(len(bars)), heights, 0.7, floors, label=part, color=_COLOURS[part])
            floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
    for known in {plan.hardware.name: plan.hardware for plan in plans if plan.hardware}.values():
        axes.axhline(known.memory / 2**30, color="#888888", linestyle="--")
        axes.annotate(known.name, (len(bars) - 0.5, known.memory / 2**30), ha="right", va="bottom")
    axes.set_xticks(range(len(bars)), names)
    axes.set_ylabel("GiB on one rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return figure
