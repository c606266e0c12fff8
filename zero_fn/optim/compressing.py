"""Any optimizer on compressed gradients."""

from typing import NamedTuple

import torch

from .. import tree
from ..codecs import Method, codec_of
from ..compression import compress, compression_state
from ..feedback import ErrorFeedback
from ..tree import PyTree, Tensor
from .local import LocalOptimizer, cut_like, finite_by_feedback, nodes_of, whole_params
from .protocol import Optimizer


class CompressedState(NamedTuple):
    """The optimizer's own state, and what compression left over."""

    inner: PyTree
    error: ErrorFeedback


def compressed(optimizer: Optimizer, method: Method, axis: str = "dp") -> LocalOptimizer:
    """The same optimizer, whose gradients travel compressed, with error feedback.

    A step at which a rank's gradient is not finite changes nothing, and ``state.error.finite``
    says so. With ``"1bit"`` and Adam see :func:`zero_fn.onebit_adam` first: feedback makes up for
    what is lost only where the update is linear in the gradient.

    Args:
        optimizer: an ``(init, update)`` pair.
        method: as for :func:`zero_fn.compress`.
        axis: the mesh axis.

    Raises:
        ValueError: for an unknown method.
    """
    codec = codec_of(method)

    def init(params: PyTree) -> CompressedState:
        return CompressedState(optimizer.init(params), compression_state(params, codec, axis))

    def update(
        grads: PyTree, state: CompressedState, params: PyTree
    ) -> tuple[PyTree, CompressedState]:
        mean, error = compress(grads, codec, state.error, axis)
        assert error is not None
        updates, inner = optimizer.update(cut_like(params, nodes_of(mean)), state.inner, params)

        def kept(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(error.finite, new, old)

        updates = tree.map(lambda u: torch.where(error.finite, u, 0), updates)
        return updates, CompressedState(tree.map(kept, inner, state.inner), error)

    return LocalOptimizer(
        init,
        update,
        lambda state: state,
        lambda params, state: whole_params(params),
        finite_by_feedback,
    )
