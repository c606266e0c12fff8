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


def attention_floor(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    size: int,
    seen: float = 1.0,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
) -> Floor:
    """Attention's forward, or its backward, which computes the weights again.

    Two products of matrices forward, five backward (FlashAttention-2, arXiv 2307.08691, section
    3.1), and an exponential each time for each query and key that it sees.

    Args:
        batch: number of sequences.
        heads: heads of queries.
        q_len: number of queries.
        k_len: number of keys.
        size: head size.
        seen: share of the pairs of query and key that are seen.
        kv_heads: heads of keys; None: as many as of queries.
        dtype: what all but the log-sum (float32) is stored in.
        backward: which of the two.

    >>> attention_floor(1, 1, 10, 10, 4)
    Floor(bytes=360, flops=1600, exponentials=100)
    """
    queries, keys = batch * heads * q_len, batch * (kv_heads or heads) * k_len
    pairs = round(queries * k_len * seen)
    stored = (queries * 2 + keys * 2) * size * dtype.itemsize + queries * 4
    if backward:  # reads the result's gradient too, and writes three
        stored += (queries * 2 + keys * 2) * size * dtype.itemsize
    products = 5 if backward else 2
    return Floor(stored, products * 2 * pairs * size, pairs)
