"""Codecs: how values become fewer bytes, and values again.

A codec knows nothing of ranks, feedback or transport, which are ``compression.py``'s. It takes rows
of a bucket, shape (rows, n) with n a multiple of ``BLOCK``, and gives tensors with the same rows,
which travel as one string of bytes a row. Laws, which ``zf.testing.check_codec`` checks: a row's
code is of fixed length and depends on this row alone; decoding is deterministic; what a code loses
is not more than what was there, so that error feedback stays bounded (|x - d(e(x))| < |x|, the
compressors of arXiv 1901.09847); zeros stay zeros or become finite; NaN and infinity stay visible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from .naming import suggestion
from .tree import Tensor

BLOCK = 1024  # every leaf of a bucket is padded to a multiple of this many values

Payload = Sequence[Tensor]  # each with the rows of what was encoded as dimension 0


@runtime_checkable
class Codec(Protocol):
    """A pair of pure functions; its class is a frozen dataclass, so that it can be a static field.

    ``encode(x)`` takes (rows, n), float32 or float64, to a tuple of tensors (rows, ...);
    ``decode(payload, n, dtype)`` takes them back to (rows, n). A codec may also have
    ``encode_with_rest(x, error, counts) -> (payload, rest)`` where that is cheaper than
    ``x + error - decode(encode(x + error))``; ``counts`` (rows, n / BLOCK) says how many of each
    block's first values are real.
    """

    def encode(self, x: Tensor) -> Payload:
        """The code of each row."""

    def decode(self, payload: Payload, n: int, dtype: torch.dtype) -> Tensor:
        """The rows again, (rows, n)."""


@dataclass(frozen=True)
class OneBit:
    """Sign and scale: 1 bit a value, and the mean of the absolute values of each block of 1024.

    32 / (1 + 32 / 1024) = 31 times smaller than float32 (arXiv 2102.02888).
    """

    def encode(self, x: Tensor) -> Payload:
        """Bits (rows, n / 8) and scales (rows, n / 1024)."""
        whole = torch.full((*x.shape[:-1], x.shape[-1] // BLOCK), BLOCK, device=x.device)
        return self.encode_with_rest(x, torch.zeros_like(x), whole)[0]

    def encode_with_rest(self, x: Tensor, error: Tensor, counts: Tensor) -> tuple[Payload, Tensor]:
        """The code of ``x + error``, and what it loses, in one pass."""
        from zero_fn.kernels import sign_pack

        bits, scales, rest = sign_pack(x, error, counts.expand(*x.shape[:-1], -1), BLOCK)
        return (bits, scales), rest

    def decode(self, payload: Payload, n: int, dtype: torch.dtype) -> Tensor:
        """Plus or minus the scale."""
        from zero_fn.kernels import sign_unpack

        bits, scales = payload
        return sign_unpack(bits, scales.to(dtype))


@dataclass(frozen=True)
class BFloat16:
    """Rounded to bfloat16: 2 times smaller than float32."""

    def encode(self, x: Tensor) -> Payload:
        """The rounded values."""
        return (x.to(torch.bfloat16),)

    def decode(self, payload: Payload, n: int, dtype: torch.dtype) -> Tensor:
        """The values in ``dtype``."""
        return payload[0].to(dtype)


@dataclass(frozen=True)
class Int8:
    """Rounded to 255 steps between plus and minus the largest value of each block.

    Attributes:
        block: values that share a scale, a divisor of 1024: 3.94 times smaller than float32 at 256.

    Raises:
        ValueError: if the block does not divide 1024.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1 or BLOCK % self.block:
            raise ValueError(f"block is {self.block}; it must divide {BLOCK}")

    def encode(self, x: Tensor) -> Payload:
        """Whole numbers (rows, n) int8, and scales (rows, n / block) float32."""
        blocks = x.unflatten(-1, (-1, self.block))
        scale = (blocks.abs().amax(-1) / 127).float()
        step = torch.where(scale > 0, scale, 1).to(x.dtype).unsqueeze(-1)
        whole = (blocks / step).round().clamp(-127, 127)
        # NaN and infinity travel in the scale.
        whole = torch.where(whole.isfinite(), whole, 0).to(torch.int8)
        return whole.flatten(-2), scale

    def decode(self, payload: Payload, n: int, dtype: torch.dtype) -> Tensor:
        """Whole numbers times scales."""
        whole, scale = payload
        blocks = whole.unflatten(-1, (-1, self.block)).to(dtype)
        return (blocks * scale.to(dtype).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class TopK:
    """The largest values of each row by magnitude, with their places (arXiv 1712.01887).

    Attributes:
        density: the share of values that is kept, above 0 and at most 1. A value that is kept
            costs 8 bytes: at 0.01 it is 50 times smaller than float32.

    Raises:
        ValueError: for a density outside of that.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}; it must be above 0 and at most 1")

    def encode(self, x: Tensor) -> Payload:
        """Values float32 and places int32, (rows, k) each; NaN counts as the largest."""
        k = math.ceil(x.shape[-1] * self.density)
        places = x.abs().topk(k, -1, sorted=False)[1]
        return x.gather(-1, places).float(), places.to(torch.int32)

    def decode(self, payload: Payload, n: int, dtype: torch.dtype) -> Tensor:
        """The values at their places, zeros elsewhere."""
        values, places = payload
        empty = torch.zeros((*values.shape[:-1], n), dtype=dtype, device=values.device)
        return empty.scatter(-1, places.long(), values.to(dtype))


@dataclass(frozen=True)
class PowerSGD:
    """Each matrix as a product of two thin ones (arXiv 1905.13727, algorithm 1); no :class:`Codec`.

    A leaf of two or more dimensions is a matrix, its first dimension by the rest. One step of power
    iteration from the last step's right factor; leaves where the two factors would have no fewer
    values than the leaf travel as they are.

    Attributes:
        rank: the number of columns of the factors.

    Raises:
        ValueError: if the rank is not positive.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; it must be 1 or more")


METHODS: dict[str, Any] = {
    "1bit": OneBit(),
    "bf16": BFloat16(),
    "int8": Int8(),
    "topk": TopK(),
    "powersgd": PowerSGD(),
}

Method = str | Codec | PowerSGD


def codec_of(method: Method) -> Any:
    """The codec of that name, or the one that is given.

    Raises:
        ValueError: for an unknown name, with the nearest one.
        TypeError: for what is neither a name nor a codec.
    """
    if isinstance(method, str):
        if method in METHODS:
            return METHODS[method]
        raise ValueError(
            f"method is {method!r}; {suggestion(method, METHODS)}, and codecs of your own"
        )
    if isinstance(method, PowerSGD) or (isinstance(method, Codec) and not isinstance(method, type)):
        return method
    raise TypeError(
        f"method is {method!r}; give a name ({', '.join(map(repr, METHODS))}) or a codec: a frozen "
        "dataclass with encode(x) and decode(payload, n, dtype)"
    )


def encode_with_rest(
    codec: Codec, x: Tensor, error: Tensor, counts: Tensor
) -> tuple[Payload, Tensor]:
    """The code of ``x + error``, and what it loses."""
    own = getattr(codec, "encode_with_rest", None)
    if own is not None:
        return own(x, error, counts)
    total = x + error
    payload = codec.encode(total)
    return payload, total - codec.decode(payload, total.shape[-1], total.dtype)


def to_bytes(payload: Payload) -> tuple[Tensor, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """A code as one string of bytes a row, (rows, bytes) uint8, and what it takes to read it."""
    parts = [part.flatten(1).contiguous().view(torch.uint8) for part in payload]
    kinds = [(part.dtype, tuple(part.shape[1:])) for part in payload]
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]), kinds


def from_bytes(
    data: Tensor, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[Tensor, ...]:
    """What :func:`to_bytes` was given."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
    parts = data.split(sizes, 1)
    return tuple(
        # a copy, since a part may start at any byte
        part.clone(memory_format=torch.contiguous_format).view(dtype).unflatten(1, shape)
        for part, (dtype, shape) in zip(parts, kinds, strict=True)
    )
