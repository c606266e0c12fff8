"""Precision: the dtypes of a step, a loss scale as state, and steps that are skipped.

float16 holds nothing above 65504 and nothing but zero below 6e-8. So the loss is multiplied by a
scale before it is differentiated and the gradients divided by it after (arXiv 1710.03740, section
3.2); a step whose gradients are not finite is skipped, and the scale lowered. All of it is tensor
arithmetic on the state: no value is read on the host.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import tree
from .collectives import psum, pvary
from .finiteness import all_finite_in
from .naming import suggestion
from .placed import placed_leaves, tree_axes
from .tree import PyTree, Tensor

_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Policy(NamedTuple):
    """The dtypes of a step; made by :func:`policy`.

    Attributes:
        params: of parameters and optimizer state at rest, and of the gradients that it gets.
        compute: of the parameters and floating-point batches that the loss sees, and of
            parameters on the wire.
        reduce: in which gradients travel and are summed over ranks.
    """

    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def policy(params: str = "float32", compute: str = "bf16", reduce: str = "float32") -> Policy:
    """A :class:`Policy` from names of dtypes, torch's (``float32``) or short ones (``fp32``).

    The default keeps float32 master parameters beside bfloat16 computing (arXiv 1710.03740,
    section 3.1).

    Args:
        params: at rest, of parameters and optimizer state.
        compute: of what the loss sees, and of parameters on the wire.
        reduce: in which gradients travel and are summed over ranks.

    Raises:
        ValueError: for a name that is no floating-point dtype of 16 bits or more.
    """
    return Policy(_dtype(params, "params"), _dtype(compute, "compute"), _dtype(reduce, "reduce"))


def _dtype(name: str, what: str) -> torch.dtype:
    dtype = getattr(torch, _SHORT.get(name, name), None)
    known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if dtype not in known:
        names = [*(str(d).removeprefix("torch.") for d in known), *_SHORT]
        raise ValueError(f"{what} is {name!r}; {suggestion(name, names)}")
    return dtype


def cast_floats(tree_: PyTree, dtype: torch.dtype) -> PyTree:
    """The same tree, its floating-point tensors in another dtype; one tensor stays one."""
    done: dict[int, Tensor] = {}

    def cast(x: object) -> object:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return done.setdefault(id(x), x.to(dtype))

    return tree.map(cast, tree_)


class LossScaleState(NamedTuple):
    """What a loss scale remembers, the same on all ranks; 0-dim tensors.

    Attributes:
        scale: the factor of the next loss, float32.
        stable: steps since the last overflow, or since the start.
        hysteresis: how many more overflows in turn it takes until the scale is lowered.
        skipped: how many steps were skipped in all.
        stuck: how many were skipped in turn while the scale could not be lowered.
    """

    scale: Tensor
    stable: Tensor
    hysteresis: Tensor
    skipped: Tensor
    stuck: Tensor


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale, with the meanings and defaults of DeepSpeed's ``fp16`` section.

    Attributes:
        initial: the first scale (``initial_scale_power`` 16).
        factor: what the scale is divided by at an overflow and multiplied by after ``window``
            steps without one; 1: the scale is static.
        window: that number of steps (``loss_scale_window``).
        minimum: the least scale (``min_loss_scale``).
        hysteresis: the scale is lowered at the overflow of this number since it last grew, and at
            each further one.
        consecutive_hysteresis: whether a step without overflow starts that count anew.

    Raises:
        ValueError: for a scale or minimum that is not positive, an initial scale below the minimum,
            a factor below 1, or a window or hysteresis below 1.

    >>> import torch
    >>> import zero_fn as zf
    >>> scale = zf.LossScale(initial=8.0, hysteresis=1)
    >>> state = scale.update(scale.init(), torch.tensor(False))
    >>> state.scale, state.skipped
    (tensor(4.), tensor(1))
    """

    initial: float = 2.0**16
    factor: float = 2.0
    window: int = 1000
    minimum: float = 1.0
    hysteresis: int = 2
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        for name, least in (("factor", 1), ("window", 1), ("hysteresis", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not 0 < self.minimum <= self.initial:
            raise ValueError(
                f"minimum is {self.minimum} and the initial scale {self.initial}; it takes "
                "0 < minimum <= initial"
            )

    @classmethod
    def static(cls, scale: float) -> "LossScale":
        """A scale that never changes; steps that overflow are still skipped."""
        return cls(initial=scale, factor=1.0, minimum=scale)

    def init(self) -> LossScaleState:
        """The state before the first step."""
        zero = torch.zeros((), dtype=torch.int64)
        left = zero + self.hysteresis
        return LossScaleState(torch.tensor(self.initial), zero, left, zero.clone(), zero.clone())

    def update(self, state: LossScaleState, finite: Tensor) -> LossScaleState:
        """The state after a step whose gradients were finite, or were not (0-dim bool)."""
        scale, stable, left, skipped, stuck = state
        overflow = ~finite
        at_last = overflow & (left <= 1)
        lowered = (scale / self.factor).clamp(min=self.minimum)
        grown = scale * self.factor
        grows = finite & (stable > 0) & (stable % self.window == 0)
        full = torch.full_like(left, self.hysteresis)
        renewed = finite if self.consecutive_hysteresis else grows
        return LossScaleState(
            torch.where(at_last, lowered, torch.where(grows & grown.isfinite(), grown, scale)),
            torch.where(finite, stable + 1, 0),
            torch.where(renewed, full, torch.where(overflow & ~at_last, left - 1, left)),
            skipped + overflow,
            torch.where(overflow & (scale <= self.minimum), stuck + 1, 0),
        )


def all_finite(grads: PyTree) -> Tensor:
    """Whether no leaf holds a NaN or an infinity, on any rank; 0-dim bool, the same on all ranks.

    One collective of one number for each axis that leaves are cut on.
    """
    leaves, outer = placed_leaves(grads), tree_axes(grads)
    cut = {axis for leaf in leaves for axis in leaf.axes}
    # Ranks with different leaves come last, and all of them take part.
    axes = (*sorted(cut - set(outer)), *outer)
    bad = torch.zeros((), dtype=torch.float32)
    bad = pvary(bad, axes) if axes else bad
    for leaf in leaves:
        found = (~all_finite_in(leaf.value)).to(torch.float32)
        missing = tuple(axis for axis in axes if axis not in leaf.axes)
        bad = bad + (pvary(found, missing) if missing else found)
    return (psum(bad, axes) if axes else bad) == 0


def select(condition: Tensor, new: PyTree, old: PyTree) -> PyTree:
    """The tree ``new`` where the condition (0-dim bool) holds, else ``old``; no host sync.

    Raises:
        ValueError: if the trees differ.
    """
    copies: dict[torch.device, Tensor] = {}

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        if y.device not in copies:
            copies[y.device] = tree.on_device_of(y, condition)
        return torch.where(copies[y.device], x, y)

    return tree.map(chosen, new, old)
