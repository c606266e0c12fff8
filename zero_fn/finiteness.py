"""Whether numbers are finite; steps that raise where they are not, with the name of the leaf."""

from collections.abc import Callable
from typing import Any

import torch

from . import tree
from .collectives import psum, pvary
from .placed import placed_leaves, tree_axes
from .tree import PyTree, Tensor


def all_finite_in(x: Tensor) -> Tensor:
    """Whether all values are, 0-dim; without a temporary of their size."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return x.amin().isfinite() & x.amax().isfinite()  # both pass NaN on


def first_not_finite(grads: PyTree) -> Tensor:
    """The place, in order, of the first leaf with a NaN or an infinity on any rank; -1: none.

    One collective of a number a leaf for each axis that leaves are cut on.

    Raises:
        ValueError: where ranks hold different leaves, as the stages of a pipeline do.
    """
    if tree_axes(grads):
        raise ValueError("first_not_finite takes a tree that has the same leaves on all ranks")
    leaves = placed_leaves(grads)
    axes = tuple(sorted({axis for leaf in leaves for axis in leaf.axes}))
    flags = []
    for leaf in leaves:
        bad = (~all_finite_in(leaf.value)).to(torch.float32)
        missing = tuple(axis for axis in axes if axis not in leaf.axes)
        flags.append(pvary(bad, missing) if missing else bad)
    bad = torch.stack([tree.on_device_of(flags[0], flag) for flag in flags])
    bad = (psum(bad, axes) if axes else bad) > 0
    return torch.where(bad.any(), bad.to(torch.int64).argmax(), -1)


def raising(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, raising where its metric ``first_not_finite`` or its loss says so."""

    def checked(state: Any, batch: PyTree) -> Any:
        names = [leaf.path for leaf in placed_leaves(state.params)]
        new, metrics = step(state, batch)
        place, loss = int(metrics.pop("first_not_finite")), metrics["loss"].item()
        if place >= 0:
            raise FloatingPointError(
                f"the gradient of {names[place]!r} is not finite, the first of {len(names)} leaves "
                f"of which that is so, and the loss is {loss}"
            )
        if not torch.tensor(loss).isfinite():
            raise FloatingPointError(f"the loss is {loss}, and all gradients are finite")
        return new, metrics

    checked.trace, checked.jitted = step.trace, step  # type: ignore[attr-defined]
    return checked
