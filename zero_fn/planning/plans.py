"""Plans: what one step costs on one rank, before it runs.

A plan is read off the traced program of an abstract rank, so nothing is allocated and nothing is
sent: a laptop plans for hundreds of GPUs. Bytes, operations and collectives are counted; only the
seconds are an estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

from .. import tree
from ..accounting import Collective
from ..compiler import Jitted, jit
from ..hardware import Hardware
from ..hardware import hardware as _hardware
from ..mesh import Mesh
from ..pipelining.schedule import Schedule
from ..pipelining.timeline import Timeline, timeline
from ..program import Peak, Program
from ..ranks import spmd
from ..tree import PyTree
from .drawing import draw, html_of, table_of, text_of
from .estimating import Estimate, check_room, estimate
from .residing import Offload, Turns, most_of, peak_of, resident, states_of, turns_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


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
        timeline: of a pipeline, when each stage computes; None without one.
        host: bytes on the host.
        disk: bytes on disk, both files of each leaf.
        turns: for each operation of a line of the program, what is alive at its first turn, at its
            last one, and at its highest.
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
    timeline: Timeline | None = None
    host: int = 0
    disk: int = 0
    turns: Turns = field(default_factory=dict, repr=False)

    @property
    def bubble(self) -> float | None:
        """The idle share of a pipeline's time, 0 to 1; None without one."""
        return None if self.timeline is None else self.timeline.bubble

    @property
    def bytes_sent(self) -> int:
        """What one rank sends in a step, by the ring algorithm."""
        return sum(collective.bytes_sent for collective in self.collectives)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory, if its allocator wastes none, and the
        host's bytes within the host's.

        Raises:
            ValueError: without hardware, or without a figure for the host where it is needed.
        """
        if self.hardware is None:
            raise ValueError("a plan without hardware fits nowhere; zf.plan(..., hardware='h100')")
        check_room(self.hardware, self.host)
        here = self.peak.bytes <= self.hardware.memory
        return here and (not self.host or self.host <= (self.hardware.host or 0))

    def table(self, measured: Mapping[str, float] | None = None) -> Table:
        """The plan as a table of :mod:`rich`.

        Args:
            measured: what a run took, shown beside what the plan says, by the same names:
                ``"peak"``, ``"at rest"``, ``"sent"`` in bytes, ``"step"`` in seconds.

        Raises:
            ValueError: for a name that the table does not have.
        """
        return table_of([self], measured)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw memory at rest and at the peak as stacked bars, with the hardware's as a line.

        Args:
            ax: where to draw; None: a new figure.
        """
        return draw([self], ax)

    def __str__(self) -> str:
        return text_of(self.table())

    def _repr_html_(self) -> str:
        return html_of(self.table())


class Comparison(NamedTuple):
    """Plans side by side; made by :func:`compare`."""

    plans: tuple[Plan, ...]

    def table(self) -> Table:
        """One column a plan."""
        return table_of(self.plans, None)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw two bars a plan: memory at rest, and at the peak.

        Args:
            ax: where to draw; None: a new figure.
        """
        return draw(self.plans, ax)

    def __str__(self) -> str:
        return text_of(self.table())

    def _repr_html_(self) -> str:
        return html_of(self.table())


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
    schedule: Schedule | None = None,
    offload: Offload | None = None,
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
        schedule: the pipeline's (``pipe.schedule(ranks)``), for its bubble: every stage is taken to
            compute as long as this rank's, a third of it forwards.
        offload: where parts of the memory live, ``{"optimizer state": "host"}`` say, of
            ``"parameters"``, ``"gradients"`` and ``"optimizer state"``, on the ``"host"`` or on
            ``"disk"``; see :func:`zero_fn.planning.residing.resident` for what that assumes.
            State that is on disk already (``zf.offload``) counts there by itself.

    Raises:
        TypeError: if ``step`` is not jitted and there is no mesh.
        ValueError: if the step runs on several simulated ranks, all in one program; for unknown
            hardware, or a dtype or place that it has no figure for; for an
            unknown part or place.
    """
    step = getattr(step, "jitted", step)  # what wraps a jitted step says so
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
    found = _read_off(jitted.trace(state, batch), sizes, known, label, offload or {})
    return found if schedule is None else with_timeline(found, timeline(schedule))


def with_timeline(found: Plan, of_all: Timeline) -> Plan:
    """The plan of a pipeline's rank, which waits for as long as the timeline says.

    Args:
        found: the plan of one rank.
        of_all: when each rank computes, in any unit in which the busiest one's time is this one's.
    """
    if found.estimate is not None:
        idle = found.estimate.compute * (of_all.makespan / max(of_all.busy) - 1)
        found = dataclasses.replace(found, estimate=found.estimate._replace(idle=idle))
    return dataclasses.replace(found, timeline=of_all)


def compare(*plans: Plan) -> Comparison:
    """Plans side by side.

    Raises:
        ValueError: without plans.
    """
    if not plans:
        raise ValueError("nothing to compare; zf.compare(plan_a, plan_b)")
    return Comparison(plans)


def _read_off(
    program: Program,
    sizes: dict[str, int],
    known: Hardware | None,
    label: str | None,
    offload: Offload,
) -> Plan:
    here = resident(program, offload)
    moments = here.moments
    collectives = tuple(program.collectives())
    seconds = None
    if known is not None:
        check_room(known, here.host)
        seconds = estimate(known, sizes, program.work(), collectives, program.at_rest(), offload)
    return Plan(
        label or " × ".join(f"{name} {size}" for name, size in sizes.items()) or "one rank",
        sizes,
        here.rest,
        peak_of(program, moments),
        most_of(moments),
        states_of(moments),
        collectives,
        program.flops(),
        known,
        seconds,
        host=here.host,
        disk=here.disk,
        turns=turns_of(program, moments),
    )
