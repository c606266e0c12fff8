"""One bit a value: signs packed eight to a byte, one scale a block, and what that leaves over.

``sign_pack`` adds the values to the error of the last time, packs the signs of the sum, takes the
mean of its absolute values in each block as the block's scale, and returns what is lost, in one
pass. ``sign_unpack`` is the way back: plus or minus the scale. Signs are those of the bits, so that
-0.0 is negative, in both directions alike.

On a GPU this is one Triton kernel each way; on a CPU it runs in pieces that stay in the cache, with
numpy's packbits where there is numpy, and in torch's own operations where there is none.
"""

from typing import Any

import torch
from torch import Tensor

from .ops import Batch, InDims, Run, Static, differentiable, leading

BLOCK = 1024  # values that share a scale
PIECE = 1 << 17  # values that are worked on at once: 512 KiB in float32

try:  # torch works without numpy, and so do we
    import numpy as np
except ImportError:  # pragma: no cover
    np = None  # type: ignore[assignment]


def sign_pack(
    x: Tensor, error: Tensor, counts: Tensor, block: int = BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """The signs of ``x + error``, packed, with a scale a block, and what they leave over.

    Args:
        x: (..., n), float32 or float64; n a multiple of ``block``.
        error: like ``x``: what was left over the last time.
        counts: (..., n / block) integers: how many of each block's first values are real. The rest
            are padding: whatever they are, they count as zeros, and leave nothing over.
        block: values that share a scale, a multiple of 8.

    Returns:
        bits (..., n / 8) uint8, the first value in the highest bit and 1 for a minus; scales
        (..., n / block), the mean of the absolute values; residual (..., n), ``x + error`` minus
        what :func:`sign_unpack` makes of bits and scales.

    Raises:
        ValueError: for shapes that do not fit.
    """
    if block < 8 or block % 8:
        raise ValueError(f"block is {block}; it must be a multiple of 8")
    if x.shape != error.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, and error {tuple(error.shape)}")
    if x.dtype not in (torch.float32, torch.float64) or error.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype} and error {error.dtype}; both must be float32 or both float64: x.float()"
        )
    if x.ndim == 0 or x.shape[-1] % block:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, whose last dimension is no multiple of {block}; pad it "
            "with zeros and say so in counts"
        )
    want = (*x.shape[:-1], x.shape[-1] // block)
    if tuple(counts.shape) != want:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; one for each block is {want}")
    bits, scales, residual = _pack((block,), x, error, counts)
    return bits, scales, residual


def sign_unpack(bits: Tensor, scales: Tensor) -> Tensor:
    """Plus or minus the block's scale for each bit: (..., n / 8) and (..., n / block) to (..., n).

    Raises:
        ValueError: for shapes that do not fit.
    """
    if bits.ndim == 0 or bits.shape[:-1] != scales.shape[:-1]:
        raise ValueError(f"bits have shape {tuple(bits.shape)}, scales {tuple(scales.shape)}")
    blocks = scales.shape[-1]
    if bits.dtype != torch.uint8 or (bits.shape[-1] % blocks if blocks else bits.shape[-1]):
        raise ValueError(
            f"{bits.shape[-1]} bytes of {bits.dtype} are no whole number of bytes for each of "
            f"{blocks} scales; give what sign_pack returned"
        )
    return _unpack((), bits, scales)[0]


# What runs.


@torch.library.custom_op("zero_fn::sign_pack", mutates_args=())
def _pack_op(
    x: Tensor, error: Tensor, counts: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, error, counts = x.contiguous(), error.contiguous(), counts.contiguous()
    bits = x.new_empty((*x.shape[:-1], x.shape[-1] // 8), dtype=torch.uint8)
    scales = x.new_empty(counts.shape)
    residual = torch.empty_like(x)
    if x.device.type == "cuda" and x.dtype == torch.float32:
        from . import sign_packing_triton

        sign_packing_triton.pack(x, error, counts, bits, scales, residual, block)
    else:
        _pack_in_pieces(x, error, counts, bits, scales, residual, block)
    return bits, scales, residual


@_pack_op.register_fake
def _(x: Tensor, error: Tensor, counts: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    bits = x.new_empty((*x.shape[:-1], x.shape[-1] // 8), dtype=torch.uint8)
    return bits, x.new_empty(counts.shape), x.new_empty(x.shape)


@torch.library.custom_op("zero_fn::sign_unpack", mutates_args=())
def _unpack_op(bits: Tensor, scales: Tensor) -> Tensor:
    bits, scales = bits.contiguous(), scales.contiguous()
    out = scales.new_empty((*bits.shape[:-1], bits.shape[-1] * 8))
    if bits.device.type == "cuda" and scales.dtype == torch.float32:
        from . import sign_packing_triton

        sign_packing_triton.unpack(bits, scales, out)
    else:
        _unpack_in_pieces(bits, scales, out)
    return out


@_unpack_op.register_fake
def _(bits: Tensor, scales: Tensor) -> Tensor:
    return scales.new_empty((*bits.shape[:-1], bits.shape[-1] * 8))


def _pack_in_pieces(
    x: Tensor,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    residual: Tensor,
    block: int,
) -> None:
    rows = max(PIECE // block, 1)
    flat = [t.view(-1, width) for t, width in ((x, block), (error, block), (residual, block))]
    packed = bits.view(-1, block // 8)
    count, scale = counts.view(-1), scales.view(-1)
    for start in range(0, count.numel(), rows):
        here = slice(start, start + rows)
        a, b, rest = (t[here] for t in flat)
        torch.add(a, b, out=rest)
        whole = count[here]
        partial = (whole < block).nonzero().squeeze(-1)
        if partial.numel():
            real = torch.arange(block, device=x.device) < whole[partial].unsqueeze(-1)
            rest[partial] = torch.where(real, rest[partial], 0)
        torch.div(rest.abs().sum(-1), whole.clamp(min=1), out=scale[here])
        packed[here] = _packed_signs(rest)
        rest.sub_(torch.copysign(scale[here].unsqueeze(-1), rest))
        if partial.numel():
            rest[partial] = torch.where(real, rest[partial], 0)


def _packed_signs(x: Tensor) -> Tensor:
    """The signs of (rows, n) as (rows, n / 8) bytes."""
    if np is not None:
        return torch.from_numpy(np.packbits(np.signbit(x.numpy()), axis=-1))
    return _packed_by_torch(x)


def _packed_by_torch(x: Tensor) -> Tensor:
    eights = torch.signbit(x).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (eights << _shifts(x.device)).sum(-1, dtype=torch.uint8)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _unpack_in_pieces(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    if not scales.numel():
        return
    width = bits.numel() // scales.numel()
    packed, scale = bits.view(-1, width), scales.view(-1, 1)
    whole = out.view(-1, width * 8)
    rows = max(PIECE // max(width * 8, 1), 1)
    for start in range(0, scale.shape[0], rows):
        here = slice(start, start + rows)
        if np is not None:
            minus = torch.from_numpy(np.unpackbits(packed[here].numpy(), axis=-1))
        else:
            minus = _bits_by_torch(packed[here])
        # scale * (1 - 2 minus)
        torch.mul(minus, -2 * scale[here], out=whole[here]).add_(scale[here])


def _bits_by_torch(bits: Tensor) -> Tensor:
    return ((bits.unsqueeze(-1) >> _shifts(bits.device)) & 1).flatten(-2)


# How they are batched and differentiated. Leading dimensions are a batch already.


def _batch(results: int) -> Any:
    def batch(call: Run) -> Batch:
        def rule(static: Static, in_dims: InDims, size: int, *xs: Tensor) -> Any:
            rows = [leading(x, dim, size) for x, dim in zip(xs, in_dims, strict=True)]
            return call(static, *rows), (0,) * results

        return rule

    return batch


def _pack_backward(
    static: Static, inputs: Any, results: Any, grads: Any
) -> tuple[Tensor, Tensor, None]:
    """Through scales and residual; bits are steps, whose derivative is zero."""
    (block,) = static
    x, error, counts = inputs
    _, of_scale, of_rest = grads
    blocks = (-1, block)
    total = (x + error).unflatten(-1, blocks)
    real = torch.arange(block, device=x.device) < counts.unsqueeze(-1)
    sign = torch.copysign(torch.ones_like(total), total) * real
    of_rest = of_rest.unflatten(-1, blocks) * real
    of_scale = (of_scale - (sign * of_rest).sum(-1)) / counts.clamp(min=1)
    grad = (of_rest + sign * of_scale.unsqueeze(-1)).flatten(-2)
    return grad, grad, None


def _unpack_backward(
    static: Static, inputs: Any, results: Any, grads: Any
) -> tuple[Tensor | None, ...]:
    bits, scales = inputs
    sign = 1 - 2 * _bits_by_torch(bits).to(scales.dtype)
    return None, (sign * grads[0]).unflatten(-1, (scales.shape[-1], -1)).sum(-1)


_pack = differentiable(
    lambda static, *xs: torch.ops.zero_fn.sign_pack(*xs, *static),
    None,
    _batch(3),
    _pack_backward,
)
_unpack = differentiable(
    lambda static, *xs: (torch.ops.zero_fn.sign_unpack(*xs),), None, _batch(1), _unpack_backward
)
