"""Learning-rate schedules: functions from the number of steps made to a 0-dim learning rate.

The count is a tensor, so that a schedule is part of a traced step; the first step has count 0.
"""

import math
from typing import Literal

import torch

from ..tree import Tensor
from .protocol import Schedule


def constant(learning_rate: float) -> Schedule:
    """The same rate at every step."""
    return lambda count: torch.full_like(count, learning_rate, dtype=torch.float32)


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """Rise linearly over ``warmup`` steps, then fall to ``end`` along half a cosine.

    Step t (from 0) has ``peak * (t + 1) / warmup`` while t < warmup, then
    ``end + (peak - end) * (1 + cos(pi * p)) / 2`` with p = (t - warmup) / (total - warmup), and
    ``end`` from step ``total`` on (arXiv 1608.03983).

    Raises:
        ValueError: unless 0 <= warmup < total.
    """
    return _warmup(peak, warmup, total, end, lambda p: (1 + torch.cos(math.pi * p)) / 2)


def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """Rise linearly over ``warmup`` steps, then fall linearly to ``end`` at step ``total``.

    Raises:
        ValueError: unless 0 <= warmup < total.
    """
    return _warmup(peak, warmup, total, end, lambda p: 1 - p)


def _warmup(peak: float, warmup: int, total: int, end: float, fall: Schedule) -> Schedule:
    if not 0 <= warmup < total:
        raise ValueError(f"warmup is {warmup} and total {total}; it takes 0 <= warmup < total")

    def rate(count: Tensor) -> Tensor:
        t = count.to(torch.float32)
        rising = peak * (t + 1) / max(warmup, 1)
        progress = ((t - warmup) / (total - warmup)).clamp(0, 1)
        return torch.where(t < warmup, rising, end + (peak - end) * fall(progress))

    return rate


WarmupType = Literal["log", "linear"]


def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's ``WarmupLR``: rise from one rate to another, then stay there.

    Step t (from 0) has ``min + (max - min) * w``, where w is t / n for ``"linear"`` and
    log(t + 1) / log(n) for ``"log"`` while t < n, and 1 after. n is at least 2.

    Args:
        warmup_min_lr: the rate of the first step.
        warmup_max_lr: the rate after the warm-up.
        warmup_num_steps: n.
        warmup_type: how the rate rises.

    Raises:
        ValueError: for another type.
    """
    warm = _warm(warmup_num_steps, warmup_type)

    def rate(count: Tensor) -> Tensor:
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * warm(count)

    return rate


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's ``WarmupDecayLR``: :func:`warmup_lr`, then a straight line down.

    From step n on, w is (total - t) / (total - n), and 0 from step ``total_num_steps`` on.

    Raises:
        ValueError: for another type, or a warm-up longer than the whole.
    """
    warm = _warm(warmup_num_steps, warmup_type, total_num_steps)
    steps = max(2, warmup_num_steps)

    def rate(count: Tensor) -> Tensor:
        falling = (total_num_steps - count.to(torch.float64)) / max(1, total_num_steps - steps)
        w = torch.where(count < steps, warm(count), falling.clamp(min=0))
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * w

    return rate


def warmup_cosine_lr(
    learning_rate: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's ``WarmupCosineLR``: warm up, then fall along half a cosine.

    The rate is ``learning_rate`` times r + (1 - r) w while t < n, where r is
    ``warmup_min_ratio`` and w as in :func:`warmup_lr`; then times c + (1 - c)(1 + cos(pi p)) / 2,
    where c is ``cos_min_ratio`` and p = (t - n + 1) / (total - n), 1 at most.

    Args:
        learning_rate: the rate at the end of the warm-up, which DeepSpeed takes from the optimizer.
        total_num_steps: the step at which the cosine ends.
        warmup_min_ratio: r.
        warmup_num_steps: n.
        cos_min_ratio: c.
        warmup_type: how the rate rises.

    Raises:
        ValueError: for another type, or a warm-up longer than the whole.
    """
    warm = _warm(warmup_num_steps, warmup_type, total_num_steps)
    steps = max(2, warmup_num_steps)

    def rate(count: Tensor) -> Tensor:
        t = count.to(torch.float64)
        progress = ((t - steps + 1) / max(1, total_num_steps - steps)).clamp(max=1)
        cosine = (1 + torch.cos(math.pi * progress)) / 2
        rising = warmup_min_ratio + (1 - warmup_min_ratio) * warm(count)
        falling = cos_min_ratio + (1 - cos_min_ratio) * cosine
        return learning_rate * torch.where(t < steps, rising, falling)

    return rate


def _warm(warmup: int, kind: WarmupType, total: int | None = None) -> Schedule:
    """From 0 to 1 in ``warmup`` steps, float64."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type is {kind!r}; it is 'log' or 'linear'")
    if total is not None and total < warmup:
        raise ValueError(
            f"total_num_steps is {total}, fewer than warmup_num_steps, {warmup}; it counts both"
        )
    steps = max(2, warmup)

    def warm(count: Tensor) -> Tensor:
        t = count.to(torch.float64)
        w = t / steps if kind == "linear" else torch.log(t + 1) / math.log(steps)
        return w.clamp(max=1)

    return warm
