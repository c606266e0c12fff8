"""What a kernel must move and compute at least: the floor that a measured time is held against."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Floor(NamedTuple):
    """Of one call: bytes to and from memory, each datum once; arithmetic; exponentials."""

    bytes: int
    flops: int = 0
    exponentials: int = 0

    def seconds(self, bandwidth: float, rate: float = math.inf) -> float:
        """The time below which no kernel gets.

        Args:
            bandwidth: bytes a second.
            rate: floating-point operations a second.
        """
        return max(self.bytes / bandwidth, self.flops / rate)


def adamw_floor(
    sizes: Sequence[int],
    *,
    params: torch.dtype = torch.float32,
    grads: torch.dtype = torch.float32,
    moments: torch.dtype = torch.float32,
    copies: torch.dtype | None = None,
) -> Floor:
    """One step of Adam: all four tensors are read, all but the gradient are written.

    The pure form writes an update where the one in place writes the parameter: the same bytes.

    Args:
        sizes: the number of elements of each leaf.
        params: what parameters are stored in.
        grads: what gradients are stored in.
        moments: what both moments are stored in.
        copies: what a working copy is written in; None: there is none.

    >>> adamw_floor([1000]).bytes
    28000
    """
    count = sum(sizes)
    each = 2 * params.itemsize + grads.itemsize + 4 * moments.itemsize
    each += 0 if copies is None else copies.itemsize
    # Moments 3 + 4, division, root, product and sum of the denominator 5, decay 2, update 2.
    return Floor(each * count, 16 * count)
