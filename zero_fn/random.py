"""Random numbers as pure functions of a key, as in ``jax.random``.

A key is a tensor, so it is part of a state, of a checkpoint, of a traced step. The same key gives
the same numbers: in the forward and where ``zf.remat`` computes it again, on simulated ranks and on
processes, on any device. Nothing is drawn from torch's global generator.

What differs between ranks is said where the key is made. A key that all ranks share gives all of
them the same numbers; ``fold_in(key, zf.axis_index("dp"))`` gives each rank of ``dp`` its own.
Dropout of activations wants a mask for each row of the batch, so fold in the data axes; on ``tp``
ranks activations between the layers are copies of each other, and so must be their masks: leave
``tp`` out, except where a rank holds its own slice of the activation (heads, hidden units, or a
part of the sequence).

The numbers come from Philox 4x32-10, a function of a 64-bit key and a 128-bit counter.
"""

import math
from collections.abc import Sequence

import torch

from .tree import Tensor

# The last word of the counter keeps apart what is drawn, folded and split from one key.
_DRAW, _FOLD, _SPLIT = 0, 1, 2

_MASK = 0xFFFFFFFF
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def key(seed: int) -> Tensor:
    """A key from a number.

    Args:
        seed: an int of at most 64 bits.

    Returns:
        A tensor (2,), int64, on the CPU: two words of 32 bits.

    Raises:
        TypeError: for what is no int.
        ValueError: for more than 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; a key is made from an int, zf.random.key(0)")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}, which needs more than 64 bits")
    return torch.tensor([seed & _MASK, seed >> 32 & _MASK])


def split(key: Tensor, count: int = 2) -> Tensor:
    """New keys from one, which is then not used again.

    >>> import zero_fn as zf
    >>> first, second = zf.random.split(zf.random.key(0))

    Args:
        key: a key.
        count: how many.

    Returns:
        The keys, (count, 2).
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count is {count!r}; it must be an int of 1 or more")
    _check(key, "split")
    return _words(key, torch.zeros_like(key[0]), count, _SPLIT)[:, :2]


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A key from a key and a number: a step, a layer, a rank's ``zf.axis_index``.

    Args:
        key: a key.
        data: an int, or a 0-dim integer tensor. Different numbers give different keys.

    Raises:
        TypeError: for data that is no integer.
        ValueError: for a tensor that is not 0-dim, or an int of more than 64 bits.
    """
    _check(key, "fold_in")
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise TypeError(f"fold_in takes an integer, and data is of dtype {data.dtype}")
        if data.ndim:
            raise ValueError(
                f"fold_in takes a 0-dim tensor, and data has shape {tuple(data.shape)}; for many "
                "keys map over it, torch.func.vmap(zf.random.fold_in, (None, 0))"
            )
        number = data.to(device=key.device, dtype=torch.int64)
    elif isinstance(data, bool) or not isinstance(data, int):
        raise TypeError(f"fold_in takes an integer, and data is {data!r}")
    elif not -(2**63) <= data < 2**63:
        raise ValueError(f"data is {data}, which is no int64")
    else:
        number = torch.full_like(key[0], data)
    return _words(key, number, 1, _FOLD)[0, :2]


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Random words of 32 bits, as int64 from 0 to 2^32 - 1."""
    _check(key, "bits")
    size = math.prod(_shape(shape))
    words = _words(key, torch.zeros_like(key[0]), -(-size // 4), _DRAW)
    return words.reshape(-1)[:size].reshape(tuple(shape))


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Numbers from [low, high), evenly spread; other bounds than 0 and 1 may round to ``high``.

    With the defaults they are multiples of the dtype's precision (2^-24 in float32), each as likely
    as any other.

    Args:
        key: a key.
        shape: the shape.
        dtype: a floating-point dtype of 16 bits or more.
        low: the least number.
        high: what all numbers are below.

    Returns:
        A tensor on the key's device.

    Raises:
        TypeError: for another dtype.
        ValueError: unless low < high.
    """
    _check_float(dtype, "uniform")
    if not low < high:
        raise ValueError(f"uniform from {low} to {high}; it takes low < high")
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if dtype == torch.float64:
        upper, lower = bits(key, (2, *_shape(shape))).unbind(0)
        whole = (upper >> 5 << 26) | (lower >> 6)  # 27 and 26 bits
    else:
        whole = bits(key, shape) >> (32 - digits)
    unit = whole.to(dtype) * 2.0**-digits
    return unit if (low, high) == (0.0, 1.0) else low + (high - low) * unit


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from the standard normal distribution, by Box and Muller's method.

    In float32 none is larger than 5.8. Those of 16 bits are rounded from float32.

    Raises:
        TypeError: for a dtype that is not floating-point.
    """
    _check_float(dtype, "normal")
    wide = torch.promote_types(dtype, torch.float32)
    radius, angle = uniform(key, (2, *_shape(shape)), wide).unbind(0)
    drawn = (-2 * torch.log1p(-radius)).sqrt() * (2 * math.pi * angle).cos()
    return drawn.to(dtype)


def bernoulli(key: Tensor, p: float | Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Booleans that are true with probability ``p``, in steps of 2^-24.

    Args:
        key: a key.
        p: a number from 0 to 1, or a tensor of them that broadcasts to the shape.
        shape: the shape.

    Raises:
        ValueError: for a number outside 0 to 1.
    """
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise ValueError(f"p is {p}; a probability is from 0 to 1")
    return uniform(key, shape) < p


def dropout(x: Tensor, rate: float, key: Tensor) -> Tensor:
    """``x`` with each value zero with probability ``rate``, the others divided by 1 - rate.

    (Srivastava et al. 2014.) Where ``x`` is a rank's own (rows of the batch), the key says whether
    the ranks' masks differ: fold in ``zf.axis_index("dp")``.

    Args:
        x: any shape, floating-point.
        rate: at least 0 and below 1; 0 gives ``x`` itself.
        key: a key.

    Raises:
        ValueError: for another rate.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate is {rate}; dropout takes 0 <= rate < 1")
    _check(key, "dropout")
    if rate == 0:
        return x
    kept = bernoulli(key.to(x.device), 1 - rate, x.shape)
    return torch.where(kept, x / (1 - rate), 0)


def _words(key: Tensor, data: Tensor, count: int, domain: int) -> Tensor:
    from zero_fn.kernels import philox

    words: Tensor = philox(key, data, count, domain)
    return words


def _check(key: Tensor, what: str) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"{what} takes a key, zf.random.key(0), and got {key!r}")
    if key.dtype != torch.int64 or tuple(key.shape) != (2,):
        raise TypeError(
            f"{what} takes a key, an int64 tensor of shape (2,), and got {key.dtype} of shape "
            f"{tuple(key.shape)}; zf.random.key(0) makes one, and many keys are mapped over with "
            "torch.func.vmap"
        )


def _check_float(dtype: torch.dtype, what: str) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"{what} in {dtype}; it takes one of {', '.join(map(str, _FLOATS))}")


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, int):
        raise TypeError(f"shape is {shape}; it is a tuple, ({shape},)")
    return tuple(shape)
