"""Training: the state, a ready-made step, and a loop with a progress bar."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from . import tree
from .accumulation import LossFn, accumulate, at_least_float32, check_unreduced
from .codecs import Method
from .collectives import AxisName, pmean, pvary
from .compiler import Compiler, jit
from .mesh import Mesh
from .optim import (
    LocalOptimizer,
    Optimizer,
    apply_updates,
    clip_factor,
    compressed,
    global_norm,
    scale_by_factor,
)
from .pipelining.run import Pipeline
from .precision import LossScale, LossScaleState, Policy, all_finite, cast_floats, select
from .ranks import spmd
from .sharding import Scheme, scheme_of, shard
from .slicing import Rules, local_slices, slice_params
from .tree import PyTree, Tensor

_log = logging.getLogger("zero_fn.train")


class TrainState(NamedTuple):
    """What a step takes and gives.

    Attributes:
        params: the parameters.
        opt_state: the optimizer's state.
        loss_scale: the loss scale's state; empty without one.
    """

    params: PyTree
    opt_state: PyTree
    loss_scale: LossScaleState | tuple[()] = ()


class Train(NamedTuple):
    """A way to make a state, and a step.

    Attributes:
        init: params to a :class:`TrainState`.
        step: (state, batch) to (state, metrics); metrics is a dict of 0-dim tensors.
    """

    init: Callable[[PyTree], TrainState]
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Tensor]]]


def train_step(
    loss_fn: LossFn | Pipeline,
    optimizer: Optimizer | LocalOptimizer,
    mesh: Mesh,
    *,
    stage: int | Scheme = 0,
    axis: AxisName = "dp",
    microbatches: int = 1,
    clip: float | None = None,
    compress: Method | None = None,
    policy: Policy | None = None,
    loss_scale: LossScale | None = None,
    slice_rules: Rules | None = None,
    slice_axis: str = "tp",
    donate: bool = True,
    compiler: Compiler = "eager",
) -> Train:
    """The usual step, for those who don't write it: gradients, clipping, the optimizer's update.

    Args:
        loss_fn: (params, batch) to the mean loss over the batch, 0-dim; sees one rank's batch. Or
            what :func:`zero_fn.pipeline` gives, whose params are a tuple of the stages' trees; its
            last stage returns the mean loss over one rank's micro-batch.
        optimizer: an ``(init, update)`` pair, or one that exchanges gradients itself, such as
            :func:`zero_fn.onebit_adam`.
        mesh: the mesh; the batch is split over ``axis``.
        stage: 0 to 3, or a scheme; see :func:`zero_fn.shard`.
        axis: the axis, or axes, that split the batch and cut the state.
        microbatches: how many parts a rank's batch is cut into; gradients add up over them. A
            pipeline says so itself.
        clip: the largest global norm of the gradients; None: no clipping. Where gradients travel
            compressed the norm of their mean is not known before: the root mean square of the
            ranks' own norms stands for it, which is never smaller.
        compress: how gradients travel, as for :func:`zero_fn.compress`, at stages 0 and 1; None:
            as they are, or as the optimizer says.
        policy: the dtypes, see :func:`zero_fn.policy`; None: everything as the parameters are.
        loss_scale: what the loss is multiplied by before it is differentiated, for a loss that
            computes in float16. A step whose gradients are not finite leaves parameters and
            optimizer state as they are.
        slice_rules: how the parameters are cut over ``slice_axis``, as for
            :func:`zero_fn.slice_params`; ``loss_fn`` then sees this rank's slices. None: not.
        slice_axis: the mesh axis of tensor slicing.
        donate: whether a step reuses the memory of the state it is given.
        compiler: see :func:`zero_fn.jit`.

    Returns:
        ``init`` and ``step``. The metrics are ``loss`` and, with ``clip``, ``grad_norm`` (before
        clipping) and ``grad_norm_clipped`` (after it); with ``loss_scale``, the ``loss_scale`` of
        this step and the number of steps ``skipped`` so far, and ``stuck``, how many of them in
        turn at the least scale; where gradients travel compressed also ``finite``, whether they
        were (if not, the step changes nothing).

    Raises:
        ValueError: for an unknown stage or compiler, or a clip that is not positive; for
            compressed gradients at stage 2 or 3, over several axes, of slices, of a pipeline, named
            twice (by ``compress`` and by the optimizer), or with a policy or loss scale; for a
            pipeline with ``microbatches``, or along an axis of the data.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be positive, or None for no clipping")
    if isinstance(loss_fn, Pipeline):
        _check_pipeline(loss_fn, axis, microbatches)
    if compress is not None or isinstance(optimizer, LocalOptimizer):
        if isinstance(loss_fn, Pipeline):
            raise ValueError(
                "gradients of a pipeline do not travel compressed: the error feedback and the "
                "counts of a compressing optimizer are one bucket, the same along every axis but "
                f"{axis!r}, and the ranks of {loss_fn.axis!r} have parameters of their own; leave "
                "out compress, and take an (init, update) pair such as zf.adamw"
            )
        if policy is not None or loss_scale is not None:
            raise ValueError(
                "compressed gradients take no policy and no loss_scale: cast in the loss, to "
                "bfloat16; a step whose gradients are not finite is skipped already"
            )
        if slice_rules is not None:
            raise ValueError(
                "gradients of slices do not travel compressed: leave out slice_rules, or compress "
                "and optimizers that exchange gradients themselves"
            )
        local = _local_optimizer(optimizer, compress, stage, axis)
        return _exchanging(loss_fn, local, mesh, stage, axis, microbatches, clip, donate, compiler)

    compute, reduce = (None, None) if policy is None else (policy.compute, policy.reduce)
    gradient = _gradient(loss_fn, microbatches, axis, compute, reduce)

    def init(params: PyTree) -> TrainState:
        if policy is not None:
            params = cast_floats(params, policy.params)
        if slice_rules is not None:
            params = slice_params(params, slice_rules, slice_axis)
        params = shard(params, stage, axis)
        if isinstance(loss_fn, Pipeline):
            params = loss_fn.place(params)
        scale = () if loss_scale is None else loss_scale.init()
        return TrainState(params, optimizer.init(params), scale)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        scale = state.loss_scale
        if bool(scale) != (loss_scale is not None):
            has, takes = ("one", "none") if scale else ("none", "one")
            raise ValueError(
                f"the state has {has} in loss_scale, and this step takes {takes}; make the state "
                "by the init of the same train_step, or state._replace(loss_scale=...)"
            )

        if compute is not None:
            batch = cast_floats(batch, compute)
        grads, value = gradient(state.params, batch, scale.scale if scale else None)
        if scale:
            grads = scale_by_factor(grads, 1 / scale.scale)
        metrics = {"loss": value}
        if clip is not None:
            norm = global_norm(grads)
            factor = clip_factor(norm, clip)
            grads = scale_by_factor(grads, factor)
            metrics |= {"grad_norm": norm, "grad_norm_clipped": norm * factor}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = TrainState(apply_updates(state.params, updates), opt_state, scale)
        if loss_scale is not None and scale:
            finite = all_finite(grads)
            after = loss_scale.update(scale, finite)
            new = select(finite, new, state)._replace(loss_scale=after)
            metrics |= {
                "loss_scale": scale.scale,
                "skipped": after.skipped,
                "stuck": after.stuck,
            }
        return new, metrics

    axes = (axis,) if isinstance(axis, str) else axis
    run = spmd(step, mesh, data_axes=axes)
    return Train(
        spmd(init, mesh, data_axes=axes), jit(run, donate=0 if donate else (), compiler=compiler)
    )


def _gradient(
    loss_fn: LossFn | Pipeline,
    microbatches: int,
    axis: AxisName,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
) -> Callable[[PyTree, PyTree, Tensor | None], tuple[PyTree, Tensor]]:
    """A function (params, batch, scale) to the gradients, times the scale, and the loss."""
    if isinstance(loss_fn, Pipeline):
        return loss_fn.averaged(axis, compute, reduce)

    def gradient(params: PyTree, batch: PyTree, scale: Tensor | None) -> tuple[PyTree, Tensor]:
        def scaled(params: PyTree, microbatch: PyTree) -> Tensor:
            value = loss_fn(local_slices(params), microbatch)
            return value if scale is None else at_least_float32(value) * pvary(scale, axis)

        found = accumulate(scaled, microbatches, axis, dtype=compute, reduce_dtype=reduce)
        grads, value = found(params, batch)
        return grads, value if scale is None else value / scale

    return gradient


def _check_pipeline(pipe: Pipeline, axis: AxisName, microbatches: int) -> None:
    if microbatches != 1:
        raise ValueError(
            f"microbatches is {microbatches}, and the pipeline cuts a rank's batch into "
            f"{pipe.microbatches} already; say it there: zf.pipeline(stages, microbatches=...)"
        )
    if pipe.axis in ((axis,) if isinstance(axis, str) else axis):
        raise ValueError(
            f"the pipeline's stages live along {pipe.axis!r}, which cannot split the batch too: "
            f"axis is {axis!r}; give each an axis of its own, zf.Mesh(pp=2, dp=2)"
        )


def _local_optimizer(
    optimizer: Optimizer | LocalOptimizer,
    method: Method | None,
    stage: int | Scheme,
    axis: AxisName,
) -> LocalOptimizer:
    check_unreduced(scheme_of(stage))
    if not isinstance(axis, str):
        raise ValueError(
            f"axis is {axis!r}; compressed communication goes over one mesh axis: put all "
            "data-parallel ranks on one, zf.Mesh(dp=4)"
        )
    if not isinstance(optimizer, LocalOptimizer):
        assert method is not None
        return compressed(optimizer, method, axis)
    if method is not None:
        raise ValueError(
            f"compress is {method!r}, and the optimizer exchanges gradients itself; leave out "
            "compress, or say how to the optimizer: zf.onebit_adam(..., method=...)"
        )
    return optimizer


def _exchanging(
    loss_fn: LossFn,
    optimizer: LocalOptimizer,
    mesh: Mesh,
    stage: int | Scheme,
    axis: AxisName,
    microbatches: int,
    clip: float | None,
    donate: bool,
    compiler: Compiler,
) -> Train:
    """The step where each rank's own gradients go to the optimizer."""
    gradient = accumulate(loss_fn, microbatches, axis, reduce=False)

    def init(params: PyTree) -> TrainState:
        params = shard(params, stage, axis)
        return TrainState(params, optimizer.init(params))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        grads, value = gradient(optimizer.view(state.params, state.opt_state), batch)
        metrics = {"loss": value}
        if clip is not None:
            norm = pmean(global_norm(grads).square(), axis).sqrt()
            factor = clip_factor(norm, clip)
            grads = tree.map(lambda g: g * pvary(factor, axis).to(g.dtype), grads)
            metrics |= {"grad_norm": norm, "grad_norm_clipped": norm * factor}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        if hasattr(opt_state, "error"):
            metrics["finite"] = opt_state.error.finite
        return TrainState(apply_updates(state.params, updates), opt_state), metrics

    axes = (axis,) if isinstance(axis, str) else axis
    run = jit(spmd(step, mesh, data_axes=axes), donate=0 if donate else (), compiler=compiler)

    def stepped(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        return run(state._replace(opt_state=optimizer.advance(state.opt_state)), batch)

    stepped.trace = run.trace  # type: ignore[attr-defined]
    return Train(spmd(init, mesh, data_axes=axes), stepped)


def progress(batches: Iterable[Any], total: int | None = None, **options: Any) -> Iterator[Any]:
    """The same batches, with a progress bar in a terminal or a notebook; rank 0's only.

    Args:
        batches: anything to iterate over.
        total: how many there are, if it has no length.
        options: further arguments of ``tqdm.auto.tqdm``.
    """
    return iter(_bar(batches, total, **options))


def _bar(batches: Iterable[Any], total: int | None, **options: Any) -> Any:
    options.setdefault("disable", _rank() != 0)
    return tqdm(batches, total=total, **options)


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: PyTree,
    batches: Iterable[PyTree],
    *,
    total: int | None = None,
    show: bool = True,
) -> tuple[PyTree, list[float]]:
    """Run a step over batches, showing the loss and the tokens a second.

    Args:
        step: (state, batch) to (state, value), where the value is the loss, or a dict of 0-dim
            tensors with the key ``loss``.
        state: the first state.
        batches: the batches. The elements of a batch's first integer tensor count as its tokens,
            the rows of its first tensor if there is none.
        total: how many batches there are, if they have no length.
        show: whether to show a progress bar (on rank 0).

    Returns:
        The last state, and the loss at each step.

    Raises:
        TypeError: if the step's second result holds no loss.
    """
    values: list[Tensor] = []
    bar = _bar(batches, total, unit="step", disable=not show or _rank() != 0)
    start, tokens, shown, told = time.perf_counter(), 0, 0.0, 0
    for batch in bar:
        state, value = step(state, batch)
        values.append(_loss(value))
        tokens += count_tokens(tree.leaves(batch))
        elapsed = time.perf_counter() - start
        if elapsed - shown > 0.2:  # reading a loss waits for the device
            shown = elapsed
            bar.set_postfix_str(f"loss {values[-1].item():.4f}, {tokens / elapsed:,.0f} tokens/s")
            told = _tell_if_stuck(value, told)
    if values:
        bar.set_postfix_str(f"loss {values[-1].item():.4f}, {tokens / elapsed:,.0f} tokens/s")
        _tell_if_stuck(value, told)
    bar.close()
    return state, [value.item() for value in values]


def _tell_if_stuck(value: Any, told: int) -> int:
    """Warn of steps that overflow at the least loss scale: at the first, then when they doubled."""
    stuck = value.get("stuck") if isinstance(value, dict) else None
    count = 0 if stuck is None else int(stuck.item())
    if count < max(1, 2 * told):
        return told if count else 0
    _log.warning(
        "the last %d steps were skipped: gradients overflow at the least loss scale, %g; the run "
        "has likely diverged, or the loss computes something float16 cannot hold",
        count,
        value["loss_scale"].item(),
    )
    return count


def count_tokens(leaves: Sequence[Any]) -> int:
    """The tokens of a batch: the elements of its first integer tensor, or its rows."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for x in tensors:
        if x.dtype in (torch.int32, torch.int64, torch.uint8, torch.int16):
            return x.numel()
    return len(tensors[0]) if tensors and tensors[0].ndim else 1


def _loss(value: Any) -> Tensor:
    loss = value.get("loss") if isinstance(value, dict) else value
    if not isinstance(loss, Tensor) or loss.ndim:
        raise TypeError(
            f"the step's second result is {value!r}; fit takes a 0-dim loss, or a dict with one "
            "under 'loss'"
        )
    return loss


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
