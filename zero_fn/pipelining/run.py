"""pipeline: stage functions and a schedule as one function, ``(params, batch) -> (grads, value)``.

Where the ranks of the pipeline's axis are, decides who runs what:

    no such axis, or of size 1     this process runs every rank's actions, in the order of time
    simulated ranks                the same, once for all ranks of the axis: stages have different
                                   shapes and cannot lie stacked, so they are in no one's piece
    processes, abstract ranks      each rank runs its own list, and sends and receives what crosses

The other axes go on as always: inside a stage ``zf.pmean(loss, "dp")`` means what it does without a
pipeline. Numbers are those of the unpipelined loss, up to the order of sums.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import tree
from ..accumulation import at_least_float32, cut_batch
from ..collectives import AxisName, axis_size, pmean, psum, pvary
from ..mesh import Axis, bound_axes
from ..optim import scale_by_factor
from ..tree import PyTree, Tensor
from .builders import Builder, pipeline_schedule
from .checking import ScheduleError
from .exchange import Exchange
from .outlines import Outline, outlines
from .parameters import OWN, Dtypes
from .schedule import Action, Schedule
from .staging import (
    Look,
    Staged,
    collect_stages,
    is_staged,
    place_stages,
    sum_over_ranks,
    tie_stages,
)
from .timeline import timeline, with_communication
from .work import Programs, StageFn, Work, is_eager, loss_and_weight

# The gradients of the stages, the sum of the losses, and that of their weights if they have any.
_Results = tuple[list[PyTree], Tensor, Tensor | None]


def pipeline(
    stages: Sequence[StageFn],
    microbatches: int,
    schedule: str | Builder = "1f1b",
    axis: str = "pp",
    *,
    uneven: bool = False,
    **options: object,
) -> "Pipeline":
    """The gradient and value of a loss that is cut into stages, by a pipeline schedule.

    A drop-in for ``zf.grad_and_value(loss)`` of the loss that the stages make one after the other.

    Args:
        stages: pure functions (params of the stage, carry, micro-batch) to the next carry, a tree
            of tensors of any dtype. The first is given None as its carry; the last returns the
            mean loss over the micro-batch, 0-dim, or a pair of that and its weight (the number of
            tokens, say), a 0-dim tensor. They are given whole parameters, whatever ``zf.shard``
            made of them, and this rank's slices of what ``zf.slice_params`` cut.
        microbatches: how many parts a rank's batch is cut into, along dimension 0.
        schedule: a name (see :func:`zero_fn.pipeline_schedule`), or a function of (ranks,
            micro-batches) that returns one.
        axis: the mesh axis along which the stages live.
        uneven: whether the parts may differ by a row; each loss then counts by its rows.
        options: further arguments of the schedule, such as ``chunks=2`` for ``"interleaved"``.

    Returns:
        A function (params, batch) to ``(grads, value)``. ``params`` is a tuple of the stages'
        trees, ``grads`` one like it. The same leaf in two stages has the same gradient at both
        places, the sum. The value is the mean of the micro-batches' losses, weighted where they
        have weights.

    Raises:
        ValueError: for no stages, an unknown schedule, numbers of stages and ranks that the
            schedule does not fit, or micro-batches that don't divide the batch.
        PipelineError: for whatever a stage raises, naming the stage, micro-batch and action.

    >>> import torch
    >>> import zero_fn as zf
    >>> stages = [lambda p, carry, x: x * p, lambda p, carry, x: (carry + p).mean()]
    >>> two = zf.pipeline(stages, microbatches=3)
    >>> two((torch.tensor(2.0), torch.tensor(1.0)), torch.arange(6.0))
    ((tensor(2.5000), tensor(1.)), tensor(6.))
    """
    return Pipeline(stages, microbatches, schedule, axis, uneven, options)


class Pipeline:
    """The function that :func:`pipeline` made."""

    def __init__(
        self,
        stages: Sequence[StageFn],
        microbatches: int,
        schedule: str | Builder,
        axis: str,
        uneven: bool,
        options: dict[str, object],
        dtypes: Dtypes = OWN,
    ) -> None:
        if not stages:
            raise ValueError("a pipeline has stages, and the list of them is empty")
        for stage in stages:
            if not callable(stage):
                raise TypeError(
                    f"a stage is a function (params, carry, microbatch) to a carry; got {stage!r}"
                )
        self.stages, self.microbatches, self.axis = tuple(stages), microbatches, axis
        self.uneven, self.options, self.dtypes = uneven, options, dtypes
        self._schedule, self._schedules = schedule, {}  # type: Any, dict[int | None, Schedule]
        self._programs: Programs = {}
        self._outlines: dict[Any, list[Outline]] = {}
        self.schedule()

    def schedule(self, ranks: int | None = None) -> Schedule:
        """The schedule for that many ranks; None: for as many as the stages suit.

        Raises:
            ValueError: if it does not fit the number of stages.
        """
        if ranks not in self._schedules:
            self._schedules[ranks] = self._built(ranks)
        return self._schedules[ranks]

    def averaged(
        self,
        axis: AxisName,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        *,
        reduce: bool = True,
    ) -> "Pipeline":
        """The pipeline of the mean loss over the ranks of further axes, as in ``zf.accumulate``.

        Args:
            axis: the axis, or axes, whose ranks have different batches. Losses with weights are
                averaged by them.
            dtype: the dtype of the whole params that the stages see, and in which they travel;
                None: the pieces' own. Gradients add up in the pieces' dtype.
            reduce_dtype: the dtype in which gradients travel and are summed over ranks; None: the
                pieces' own.
            reduce: False: the gradients and the value are this rank's own, and their means over the
                ranks are those of the mean loss.
        """
        *inner, last = self.stages

        @functools.wraps(last)
        def mean(params: PyTree, carry: PyTree, microbatch: PyTree) -> PyTree:
            (loss,), weights = loss_and_weight(last(params, carry, microbatch))
            loss = at_least_float32(loss)
            if not weights:
                return pmean(loss, axis) if reduce else loss
            total = psum(weights[0], axis)
            share = weights[0].to(torch.float64) / pvary(total, axis)
            if not reduce:
                return loss * (share * axis_size(axis)).to(loss.dtype), pvary(total, axis)
            return psum(loss * share.to(loss.dtype), axis), total

        return Pipeline(
            [*inner, mean],
            self.microbatches,
            self._schedule,
            self.axis,
            self.uneven,
            self.options,
            (dtype, reduce_dtype),
        )

    def __call__(
        self, params: Sequence[PyTree], batch: PyTree, scale: Tensor | None = None
    ) -> tuple[PyTree, Tensor]:
        """The gradients, times ``scale`` from the loss on if it is given, and the loss itself."""
        self._check(params)
        parts = cut_batch(batch, self.microbatches, uneven=self.uneven)
        axis = self._axis()
        if axis is None or axis.token is not None:
            of_stages, value, weight = self._all_ranks(params, parts, axis, scale)
        else:
            of_stages, value, weight = self._one_rank(params, parts, axis, scale)
        grads: PyTree = tuple(of_stages) if isinstance(params, tuple) else of_stages
        if weight is not None:
            grads = scale_by_factor(grads, 1 / weight.to(torch.float64))
            value = value / weight
        return grads, value

    def place(self, params: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Keep of the stages' parameters those that live on this rank; call it inside ``spmd``.

        Where ranks are processes, each then holds its own stages' trees, and the function takes
        and gives such. Elsewhere all stages stay. Leaves that are the same tensor are tied from
        here on: they stay equal through every optimizer.

        Args:
            params: a tuple of the stages' trees, the same on all ranks of the axis; as they are,
                or cut by :func:`zero_fn.shard`.
        """
        self._check(params)
        axis, tied = self._axis(), tie_stages(params)
        if axis is None or axis.token is not None:
            return tied
        return place_stages(tied, self.schedule(axis.size).placement, axis.name, axis.place)

    def collect(self, params: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """All stages' parameters on every rank, from placed ones; call it inside ``spmd``."""
        self._check(params)
        return collect_stages(params) if is_staged(params) else tuple(params)

    def _all_ranks(
        self,
        params: Sequence[PyTree],
        parts: list[PyTree],
        axis: Axis | None,
        scale: Tensor | None,
    ) -> _Results:
        """The step in one process, every rank's actions in the order of time."""
        trees = dict(enumerate(params))
        work = self._work(trees, parts, is_eager(params, parts), scale)
        for action in _in_time(self.schedule(None if axis is None else axis.size)):
            work.compute(action)
        value, weight = work.sums()
        assert value is not None
        return [work.params[stage].gradient() for stage in trees], value, weight

    def _one_rank(
        self, params: Sequence[PyTree], parts: list[PyTree], axis: Axis, scale: Tensor | None
    ) -> _Results:
        """One rank's part of the step, where ranks are processes."""
        eager = is_eager(params, parts)
        schedule = _with_messages(self.schedule(axis.size))
        placed = is_staged(params)
        trees = dict(enumerate(params))
        if placed:
            trees = {stage: node.local for stage, node in trees.items() if node.here}
        if placed and tuple(trees) != schedule.stages_of(axis.place):
            raise ValueError(
                f"the params of stages {[*trees]} are here, and the schedule {schedule.name!r} has "
                f"stages {[*schedule.stages_of(axis.place)]} on rank {axis.place}; place them with "
                "the same pipeline, pipeline.place(params)"
            )
        looks = [node.looks() for node in params] if placed else params
        # what a trace knows ends with it
        known = self._outlines if eager else {}
        shapes = [self._outlined(looks, part, number, known) for number, part in enumerate(parts)]
        work = self._work(trees, parts, eager, scale)
        exchange = Exchange(work, schedule, axis, shapes, tracing=not eager)
        exchange.run()
        value, weight = exchange.agree(work.sums())
        grads = {stage: work.params[stage].gradient() for stage in trees}
        if placed:
            summed = sum_over_ranks(grads, params, axis.name)
            return (
                [Staged(summed.get(stage), node.home) for stage, node in enumerate(params)],
                value,
                weight,
            )
        return [tree.map(lambda g: psum(g, axis.name), grads[s]) for s in grads], value, weight

    def _work(
        self, trees: dict[int, PyTree], parts: list[PyTree], eager: bool, scale: Tensor | None
    ) -> Work:
        programs, shares = self._programs if eager else {}, self._shares(parts)
        return Work(self.stages, trees, parts, shares, programs, eager, self.dtypes, scale)

    def _outlined(
        self,
        looks: Sequence[PyTree],
        part: PyTree,
        microbatch: int,
        known: dict[Any, list[Outline]],
    ) -> list[Outline]:
        """What the stages hand on; run on fake tensors for the first such micro-batch."""
        leaves, treedef = tree.flatten((list(looks), part))
        seen = tuple(Look.of(x) if isinstance(x, Tensor) else x for x in leaves)
        key = treedef, seen, tuple((axis.name, axis.size) for axis in bound_axes().values())
        if key not in known:
            known[key] = outlines(self.stages, looks, part, microbatch, self.dtypes)
        return known[key]

    def _axis(self) -> Axis | None:
        axis = bound_axes().get(self.axis)
        return None if axis is None or axis.size == 1 else axis

    def _check(self, params: Sequence[PyTree]) -> None:
        if not isinstance(params, tuple | list) or len(params) != len(self.stages):
            got = (
                f"{len(params)} of them"
                if isinstance(params, tuple | list)
                else type(params).__name__
            )
            raise ValueError(
                f"params is a tuple of the stages' trees, and there are {len(self.stages)} stages; "
                f"got {got}. A stage without parameters has ()"
            )

    def _shares(self, parts: Sequence[PyTree]) -> list[float]:
        """What each micro-batch's loss counts: its share of the rows."""
        if not self.uneven:
            return [1 / len(parts)] * len(parts)
        rows = [next(x.shape[0] for x in tree.leaves(p) if isinstance(x, Tensor)) for p in parts]
        return [row / sum(rows) for row in rows]

    def _built(self, ranks: int | None) -> Schedule:
        count, name = len(self.stages), self._schedule
        tried = {}
        for number in range(count, 0, -1) if ranks is None else [ranks]:
            try:
                built = pipeline_schedule(name, number, self.microbatches, **self.options)
            except ScheduleError:
                if ranks is not None or number == 1:
                    raise
                continue  # a builder of one's own may be for fewer ranks
            if built.stages == count:
                return built
            tried[number] = built.stages
        wants = ", ".join(f"{stages} stages on {number} ranks" for number, stages in tried.items())
        raise ValueError(
            f"the schedule {name!r} runs {wants}, and the pipeline has {count} stages"
            + (f" on the {ranks} ranks of axis {self.axis!r}" if ranks else "")
            + "; cut the model into another number of stages (zf.partition), or, for several a "
            "rank, use 'interleaved' with chunks=..."
        )


@functools.lru_cache(64)
def _in_time(schedule: Schedule) -> tuple[Action, ...]:
    """The actions of all ranks in the order in which they start."""
    events = [event for rank in timeline(schedule).events for event in rank]
    return tuple(event.action for event in sorted(events, key=lambda event: event.start))


@functools.lru_cache(64)
def _with_messages(schedule: Schedule) -> Schedule:
    return schedule if schedule.communicates else with_communication(schedule)
