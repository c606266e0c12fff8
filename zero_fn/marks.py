"""Names for values inside a function, so that ``zf.remat`` can keep them.

In the forward the named values are recorded. Where the backward runs the function again, each of
them is what was recorded, with the derivative of what was computed: so the computation of the value
itself is used by nobody, and drops out of a traced step.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .tree import Tensor


class Marks:
    """The named values of one run.

    Attributes:
        values: what the names in ``save`` stood for, in order.
        seen: every name that was met.
    """

    def __init__(self, save: Sequence[str], given: Sequence[Tensor]) -> None:
        self.save, self.given = save, list(given)
        self.values: list[Tensor] = []
        self.seen: set[str] = set()
        self.level = torch._C._functorch.maybe_current_level()


class _Active(threading.local):
    def __init__(self) -> None:
        self.marks: Marks | None = None


_active = _Active()


@contextmanager
def marking(save: Sequence[str], given: Sequence[Tensor]) -> Iterator[Marks]:
    """Record the values of these names meanwhile, or with ``given`` put those in their places."""
    outer, _active.marks = _active.marks, Marks(save, given)
    try:
        yield _active.marks
    finally:
        _active.marks = outer


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """``x``, with a name by which ``zf.remat(f, save=...)`` keeps it.

    Inside a map or a derivative that ``f`` itself takes, a name means nothing.
    """
    marks = _active.marks
    if marks is None or torch._C._functorch.maybe_current_level() != marks.level:
        return x
    marks.seen.add(name)
    if name not in marks.save:
        return x
    place = len(marks.values)
    value = _Recorded.apply(x, marks.given[place]) if marks.given else x
    marks.values.append(value)
    return value


class _Recorded(torch.autograd.Function):
    """The recorded value, with the derivative of the one that was computed again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(computed: Tensor, recorded: Tensor) -> Tensor:
        return recorded.view_as(recorded)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)
