"""Learning-rate schedules: functions from the number of steps made to a 0-dim learning rate.

The count is a tensor, so that a schedule is part of a traced step; the first step has count 0.
"""

import math

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
