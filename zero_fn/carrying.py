"""What a loss carries from micro-batch to micro-batch and step to step: buffers, and a key.

A step draws from a key of its own, different on the ranks that have different rows; each
micro-batch gets a new one of that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import random
from .collectives import AxisName, axis_index
from .tree import PyTree, Tensor

Key = Tensor | tuple[()]


class Carried(NamedTuple):
    """The buffers and the key of the next micro-batch; empty tuples for what there is not."""

    buffers: PyTree
    key: Key

    @classmethod
    def of(cls, buffers: PyTree, key: Key, axis: AxisName) -> "Carried":
        """At the beginning of a step, of a state's buffers and key."""
        if isinstance(key, Tensor):
            key = random.fold_in(random.split(key)[1], axis_index(axis))
        return cls(buffers, key)

    def call(self, loss_fn: Callable[..., Any], *args: Any) -> tuple[Any, "Carried"]:
        """What the loss returns besides buffers, and what is carried on.

        Raises:
            TypeError: if the loss is given buffers, and returns no pair.
        """
        given: dict[str, Any] = {}
        key = self.key
        if isinstance(key, Tensor):
            key, given["dropout_key"] = random.split(key).unbind(0)
        if self.buffers == ():
            return loss_fn(*args, **given), Carried((), key)
        out = loss_fn(*args, buffers=self.buffers, **given)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"a loss with buffers returns (loss, new buffers); it returned {out!r}")
        return out[0], Carried(out[1], key)

    def after(self, key: Key) -> tuple[PyTree, Key]:
        """The state's buffers and key after a step that began with ``key``."""
        return self.buffers, random.split(key)[0] if isinstance(key, Tensor) else ()
