"""A ready-made training step: gathers, precision, clipping, loss scale, and the update."""

from collections.abc import Callable
from typing import Any

import torch

from . import tree
from .accumulation import LossFn, accumulate, at_least_float32, split_loss
from .carrying import Carried
from .codecs import Method
from .collectives import AxisName, pvary
from .compiler import Compiler, jit
from .exchanging import exchanging_step, local_optimizer
from .finiteness import first_not_finite, raising
from .freezing import freeze, merge, shard_frozen
from .mesh import Mesh
from .offloading import at_home, brought, taken_back
from .optim import (
    LocalOptimizer,
    Optimizer,
    apply_updates,
    clip_factor,
    global_norm,
    scale_by_factor,
)
from .pipelining.run import Pipeline
from .precision import LossScale, Policy, all_finite, cast_floats, select
from .ranks import spmd
from .sharding import Scheme, shard, unshard
from .slicing import Rules, local_slices, slice_params
from .states import Train, TrainState
from .tree import PyTree, Tensor, Where


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
    frozen: Where = (),
    buffers: PyTree = (),
    dropout_key: Tensor | None = None,
    check_finite: bool = False,
    donate: bool = True,
    compiler: Compiler = "eager",
) -> Train:
    """The usual step, for those who don't write it: gradients, clipping, the optimizer's update.

    Args:
        loss_fn: (params, batch) to the mean loss over the batch, 0-dim; sees one rank's batch. It
            may return a pair of that and its weight, see :func:`zero_fn.accumulate`. Or what
            :func:`zero_fn.pipeline` gives, whose params are a tuple of the stages' trees; its last
            stage returns the mean loss over one rank's micro-batch.
        optimizer: an ``(init, update)`` pair, or one that exchanges gradients itself, such as
            :func:`zero_fn.onebit_adam`.
        mesh: the mesh; the batch is split over ``axis``.
        stage: 0 to 3, or a scheme; see :func:`zero_fn.shard`.
        axis: the axis, or axes, that split the batch and cut the state.
        microbatches: how many parts a rank's batch is cut into; gradients add up over them. A
            pipeline says so itself.
        clip: the largest global norm of the gradients, ``inf`` to measure it only; None: no
            clipping. Where gradients travel compressed the norm of their mean is not known before:
            the root mean square of the ranks' own norms stands for it, which is never smaller.
        compress: how gradients travel, as for :func:`zero_fn.compress`, at stages 0 and 1; None:
            as they are, or as the optimizer says.
        policy: the dtypes, see :func:`zero_fn.policy`; None: everything as the parameters are.
        loss_scale: what the loss is multiplied by before it is differentiated, for a loss that
            computes in float16. A step whose gradients are not finite leaves parameters and
            optimizer state as they are.
        slice_rules: how the parameters are cut over ``slice_axis``, as for
            :func:`zero_fn.slice_params`; ``loss_fn`` then sees this rank's slices. None: not.
        slice_axis: the mesh axis of tensor slicing.
        frozen: the parameters that are not trained, as for :func:`zero_fn.freeze`. They have no
            gradients and no moments; at stages 0 to 2 every rank has them whole, without
            communication, at stage 3 they are gathered at each use.
        buffers: what the loss carries from step to step, a tree of tensors: its first values. The
            loss is then (params, batch, buffers=...) to (loss, new buffers), the same on all ranks.
        dropout_key: the first key, see :mod:`zero_fn.random`. The loss is then called with
            ``dropout_key=``, new for each step and micro-batch, and for each rank of ``axis``.
        check_finite: whether a step whose loss or gradients are not finite raises. It then waits
            for the device at each step. Not for a dynamic ``loss_scale``, whose overflows are
            expected.
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
            ``check_finite`` with a dynamic loss scale; for compressed gradients at stage 2 or 3,
            over several axes, of slices, named twice (by ``compress`` and by the optimizer), or
            with a policy or loss scale; for a pipeline with ``microbatches`` or along an axis of
            the data; for either with ``frozen``, ``buffers``, ``dropout_key`` or ``check_finite``.
        FloatingPointError: from the step with ``check_finite``, naming the first leaf whose
            gradient is not finite.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be positive, or None for no clipping")
    if check_finite and loss_scale is not None and loss_scale.factor > 1:
        raise ValueError(
            f"check_finite would raise at the first overflow, and by overflows {loss_scale} finds "
            "its value; leave it out, or use zf.LossScale.static(...)"
        )
    extra = {
        "frozen": bool(frozen),
        "buffers": bool(tree.leaves(buffers)),
        "dropout_key": dropout_key is not None,
        "check_finite": check_finite,
    }
    if isinstance(loss_fn, Pipeline):
        _check_pipeline(loss_fn, axis, microbatches)
        _refuse("a pipeline takes", extra)
    if compress is not None or isinstance(optimizer, LocalOptimizer):
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
        _refuse("compressed gradients take", extra)
        local = local_optimizer(optimizer, compress, stage, axis)
        return exchanging_step(
            loss_fn, local, mesh, stage, axis, microbatches, clip, donate, compiler
        )

    def init(params: PyTree) -> TrainState:
        if policy is not None:
            params = cast_floats(params, policy.params)
        if slice_rules is not None:
            params = slice_params(params, slice_rules, slice_axis)
        held: PyTree = ()
        if frozen:
            params, held = freeze(params, frozen)
            held = shard_frozen(held, stage, axis)
        params = shard(params, stage, axis)
        if isinstance(loss_fn, Pipeline):
            params = loss_fn.place(params)
        return TrainState(
            params,
            optimizer.init(params),
            () if loss_scale is None else loss_scale.init(),
            held,
            tree.map(torch.clone, buffers),
            () if dropout_key is None else dropout_key.clone(),
        )

    compute, reduce = (None, None) if policy is None else (policy.compute, policy.reduce)
    gradient = _gradient(loss_fn, microbatches, axis, compute, reduce)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        scale = state.loss_scale
        _check_state(state, loss_scale, dropout_key)

        if compute is not None:
            batch = cast_floats(batch, compute)
        params, held = brought((state.params, state.frozen), batch)
        here = state._replace(params=params, frozen=held)
        grads, value, carried = gradient(here, batch)
        home = at_home(state.params, state.opt_state)
        grads = taken_back(grads, home)
        if scale:
            grads = scale_by_factor(grads, 1 / scale.scale)
        metrics = {"loss": value}
        if check_finite:
            metrics["first_not_finite"] = first_not_finite(grads)
        if clip is not None:
            norm = global_norm(grads)
            factor = clip_factor(norm, clip)
            grads = scale_by_factor(grads, factor)
            metrics |= {"grad_norm": norm, "grad_norm_clipped": norm * factor}
        updates, opt_state = optimizer.update(grads, state.opt_state, home)
        old = home, state.opt_state, state.buffers, state.dropout_key
        new = apply_updates(home, updates), opt_state, *carried.after(state.dropout_key)
        if loss_scale is not None and scale:
            finite = all_finite(grads)
            scale = loss_scale.update(scale, finite)
            new = select(finite, new, old)
            metrics |= {
                "loss_scale": state.loss_scale.scale,  # type: ignore[union-attr]
                "skipped": scale.skipped,
                "stuck": scale.stuck,
            }
        params, opt_state, buffers, key = new
        params = taken_back(params, state.params)
        return TrainState(params, opt_state, scale, state.frozen, buffers, key), metrics

    axes = (axis,) if isinstance(axis, str) else axis
    run = jit(spmd(step, mesh, data_axes=axes), donate=0 if donate else (), compiler=compiler)
    return Train(spmd(init, mesh, data_axes=axes), raising(run) if check_finite else run)


def _gradient(
    loss_fn: LossFn | Pipeline,
    microbatches: int,
    axis: AxisName,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
) -> Callable[[TrainState, PyTree], tuple[PyTree, Tensor, Carried]]:
    """(state, batch) to the gradients, times the loss scale, the loss, and what it carries on."""

    if isinstance(loss_fn, Pipeline):
        pipe = loss_fn.averaged(axis, compute, reduce)

        def piped(state: TrainState, batch: PyTree) -> tuple[PyTree, Tensor, Carried]:
            scale = state.loss_scale.scale if state.loss_scale else None
            return *pipe(state.params, batch, scale), Carried((), ())

        return piped

    def gradient(state: TrainState, batch: PyTree) -> tuple[PyTree, Tensor, Carried]:
        scale = state.loss_scale

        def scaled(params: PyTree, microbatch: PyTree, carried: Carried) -> tuple[Any, Carried]:
            whole = merge(params, unshard(state.frozen, compute)) if state.frozen else params
            out, carried = carried.call(loss_fn, local_slices(whole), microbatch)
            value, weight = split_loss(out)
            if scale:
                value = at_least_float32(value) * pvary(scale.scale, axis)
            return (value if weight is None else (value, weight)), carried

        found = accumulate(
            scaled, microbatches, axis, dtype=compute, reduce_dtype=reduce, has_state=True
        )
        carried = Carried.of(state.buffers, state.dropout_key, axis)
        grads, value, carried = found(state.params, batch, carried)
        return grads, value / scale.scale if scale else value, carried

    return gradient


def _refuse(what: str, extra: dict[str, bool]) -> None:
    for name, given in extra.items():
        if given:
            raise ValueError(f"{what} no {name}; leave out one of them")


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


def _check_state(
    state: TrainState, loss_scale: LossScale | None, dropout_key: Tensor | None
) -> None:
    for name, here, takes in (
        ("loss_scale", state.loss_scale, loss_scale),
        ("dropout_key", state.dropout_key, dropout_key),
    ):
        has = not isinstance(here, tuple) or bool(here)
        if has != (takes is not None):
            words = ("one", "none") if has else ("none", "one")
            raise ValueError(
                f"the state has {words[0]} in {name}, and this step takes {words[1]}; make the "
                f"state by the init of the same train_step, or state._replace({name}=...)"
            )
