"""What a training step takes and gives."""

from collections.abc import Callable
from typing import NamedTuple

from .precision import LossScaleState
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
