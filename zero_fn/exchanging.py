"""The step whose gradients travel compressed, or by an optimizer that exchanges them itself."""

from collections.abc import Callable

from . import tree
from .accumulation import LossFn, accumulate, check_unreduced
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
)
from .pipelining.run import Pipeline
from .pipelining.stage_buckets import by_stage
from .ranks import spmd
from .sharding import Scheme, scheme_of, shard
from .states import Train, TrainState
from .tree import PyTree, Tensor


def local_optimizer(
    optimizer: Optimizer | LocalOptimizer,
    method: Method | None,
    stage: int | Scheme,
    axis: AxisName,
) -> LocalOptimizer:
    """The optimizer that exchanges gradients, by itself or by this method.

    Raises:
        ValueError: for a stage or several axes where that cannot be, or two methods.
    """
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


def exchanging_step(
    loss_fn: LossFn | Pipeline,
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
    assert isinstance(axis, str)
    pipe = loss_fn if isinstance(loss_fn, Pipeline) else None
    gradient = _own_gradient(loss_fn, microbatches, axis)
    if pipe is not None:
        optimizer = by_stage(optimizer, axis)

    def init(params: PyTree) -> TrainState:
        params = shard(params, stage, axis)
        if pipe is not None:
            params = pipe.place(params)
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
        metrics["finite"] = optimizer.finite(opt_state)
        return TrainState(apply_updates(state.params, updates), opt_state), metrics

    run = jit(spmd(step, mesh, data_axes=(axis,)), donate=0 if donate else (), compiler=compiler)

    def stepped(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        return run(state._replace(opt_state=optimizer.advance(state.opt_state)), batch)

    stepped.trace, stepped.jitted = run.trace, run  # type: ignore[attr-defined]
    return Train(spmd(init, mesh, data_axes=(axis,)), stepped)


def _own_gradient(
    loss_fn: LossFn | Pipeline, microbatches: int, axis: str
) -> Callable[[PyTree, PyTree], tuple[PyTree, Tensor]]:
    """(whole params, batch) to this rank's own gradients, and the mean loss over all ranks."""
    if not isinstance(loss_fn, Pipeline):
        return accumulate(loss_fn, microbatches, axis, reduce=False)
    pipe = loss_fn.averaged(axis, reduce=False)

    def gradient(params: PyTree, batch: PyTree) -> tuple[PyTree, Tensor]:
        grads, value = pipe(params, batch)
        return grads, pmean(value, axis)

    return gradient
