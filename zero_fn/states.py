"""What a training step takes and gives."""

from collections.abc import Callable
from typing import NamedTuple

from .collectives import AxisName
from .freezing import Frozen, cut_again, freeze, merge, overlaid, shard_frozen_again
from .mesh import Mesh
from .optim import Optimizer
from .precision import LossScaleState
from .ranks import spmd
from .sharding import Scheme
from .tree import PyTree, Tensor


class TrainState(NamedTuple):
    """What a step takes and gives.

    Attributes:
        params: the parameters.
        opt_state: the optimizer's state.
        loss_scale: the loss scale's state; empty without one.
        frozen: the parameters that are not trained; ``zf.merge(state.params, state.frozen)`` is
            all of them.
        buffers: what the loss carries from step to step, running statistics say.
        dropout_key: the key that the next step draws from.
    """

    params: PyTree
    opt_state: PyTree
    loss_scale: LossScaleState | tuple[()] = ()
    frozen: PyTree = ()
    buffers: PyTree = ()
    dropout_key: Tensor | tuple[()] = ()


class Train(NamedTuple):
    """A way to make a state, and a step.

    Attributes:
        init: params to a :class:`TrainState`.
        step: (state, batch) to (state, metrics); metrics is a dict of 0-dim tensors.
    """

    init: Callable[[PyTree], TrainState]
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Tensor]]]


def unfreeze(
    state: TrainState,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    stage: int | Scheme = 0,
    frozen: Frozen = (),
    axis: AxisName = "dp",
) -> TrainState:
    """The same state with other leaves frozen, for a ``train_step`` made with the same arguments.

    What is trained from here on gets moments as the optimizer's ``init`` makes them (zeros); what
    was trained already keeps its own, and the count of steps goes on.

    Args:
        state: the state of a ``train_step`` with other frozen leaves, none or some.
        optimizer: the step's optimizer.
        mesh: the mesh that the state lives on.
        stage: the step's stage.
        frozen: the leaves that are frozen from here on; none by default.
        axis: the axis, or axes, that the state is cut over.
    """

    def program(state: TrainState) -> TrainState:
        params = merge(state.params, state.frozen) if state.frozen else state.params
        held: PyTree = ()
        if callable(frozen) or len(frozen):
            params, held = freeze(params, frozen)
            held = shard_frozen_again(held, stage)
        params = cut_again(params, stage)
        opt_state = overlaid(optimizer.init(params), state.opt_state)
        return state._replace(params=params, opt_state=opt_state, frozen=held)

    axes = (axis,) if isinstance(axis, str) else axis
    changed: TrainState = spmd(program, mesh, data_axes=axes)(state)
    return changed
