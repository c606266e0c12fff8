"""Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Random numbers as a function of a key and a counter, with no state: the same on every device and in
every order of calls. One op, so that a traced step holds one node for a draw.
"""

from typing import Any

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at a time, so that the rounds stay in the cache


def philox(key: Tensor, data: Tensor, count: int, domain: int = 0) -> Tensor:
    """The words at the counters (i, low word of data, high word of data, domain), i < count.

    Args:
        key: (..., 2), int64, two words of 32 bits.
        data: (...), int64.
        count: how many counters.
        domain: the last word of the counter, 32 bits.

    Returns:
        (..., count, 4), int64, words from 0 to 2^32 - 1.

    Raises:
        ValueError: for more counters than a word can count.
    """
    if not 0 <= count <= _MASK:
        raise ValueError(f"philox at {count} counters; a call has at most 2^32 - 1 of them")
    words: Tensor = _philox(key, data, count, domain)
    return words


def words_at(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of a counter of four words, by the rounds as the paper has them."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps, and its upper half is the upper half of the unsigned product.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK
        x2, x3 = ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


@torch.library.custom_op("zero_fn::philox", mutates_args=())
def _philox(key: Tensor, data: Tensor, count: int, domain: int) -> Tensor:
    out = key.new_empty((*key.shape[:-1], count, 4))
    pair = key[..., 0, None], key[..., 1, None]
    low, high = data[..., None] & _MASK, (data[..., None] >> 32) & _MASK
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        index = torch.arange(start, stop, device=key.device).expand(*key.shape[:-1], -1)
        last = torch.full_like(index, domain)
        out[..., start:stop, :] = torch.stack(words_at((index, low, high, last), pair), -1)
    return out


@_philox.register_fake
def _(key: Tensor, data: Tensor, count: int, domain: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], count, 4))


@_philox.register_vmap
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    data: Tensor,
    count: int,
    domain: int,
) -> tuple[Tensor, int | None]:
    size = info.batch_size
    # Every rank, or every member of a sweep, is one more leading dimension of keys.
    key = key.expand(size, *key.shape) if in_dims[0] is None else key.movedim(in_dims[0], 0)
    data = data.expand(size, *data.shape) if in_dims[1] is None else data.movedim(in_dims[1], 0)
    return philox(key, data, count, domain), 0
