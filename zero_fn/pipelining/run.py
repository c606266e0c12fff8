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

from .. import tree
from ..accumulation import cut_batch
from ..mesh import Axis, bound_axes
from ..tree import PyTree, Tensor
from .builders import Builder, pipeline_schedule
from .schedule import Action, Schedule
from .timeline import timeline
from .work import Programs, StageFn, Work, can_keep_programs, scaled


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
            made of them.
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
    ) -> None:
        if not stages:
            raise ValueError("a pipeline has stages, and the list of them is empty")
        for stage in stages:
            if not callable(stage):
                raise TypeError(
                    f"a stage is a function (params, carry, microbatch) to a carry; got {stage!r}"
                )
        self.stages, self.microbatches, self.axis = tuple(stages), microbatches, axis
        self.uneven, self.options = uneven, options
        self._schedule, self._schedules = schedule, {}  # type: Any, dict[int | None, Schedule]
        self._programs: Programs = {}
        self.schedule()

    def schedule(self, ranks: int | None = None) -> Schedule:
        """The schedule for that many ranks; None: for as many as the stages suit.

        Raises:
            ValueError: if it does not fit the number of stages.
        """
        if ranks not in self._schedules:
            self._schedules[ranks] = self._built(ranks)
        return self._schedules[ranks]

    def __call__(self, params: Sequence[PyTree], batch: PyTree) -> tuple[PyTree, Tensor]:
        trees = dict(enumerate(self._checked(params)))
        parts = cut_batch(batch, self.microbatches, uneven=self.uneven)
        programs = self._programs if can_keep_programs(trees, batch) else {}
        work = Work(self.stages, trees, parts, self._shares(parts), programs)
        axis = self._axis()
        schedule = self.schedule(None if axis is None else axis.size)
        for action in _in_time(schedule):
            work.compute(action)
        value, weight = work.sums()
        assert value is not None
        grads: PyTree = tuple(work.params[stage].gradient() for stage in trees)
        if weight is not None:
            grads, value = scaled(grads, weight), value / weight
        return grads if isinstance(params, tuple) else list(grads), value

    def _axis(self) -> Axis | None:
        axis = bound_axes().get(self.axis)
        return None if axis is None or axis.size == 1 else axis

    def _checked(self, params: Sequence[PyTree]) -> Sequence[PyTree]:
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
        return params

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
            built = pipeline_schedule(name, number, self.microbatches, **self.options)
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
def _in_time(schedule: Schedule) -> list[Action]:
    """The actions of all ranks in the order in which they start."""
    events = [event for rank in timeline(schedule).events for event in rank]
    return [event.action for event in sorted(events, key=lambda event: event.start)]
