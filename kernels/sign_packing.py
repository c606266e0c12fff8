"""One bit a value: signs packed eight to a byte, one scale a block, and what that leaves over.

``sign_pack`` adds the values to the error of the last time, packs the signs of the sum, takes the
mean of its absolute values in each block as the block's scale, and returns what is lost, in one
pass. ``sign_unpack`` is the way back: plus or minus the scale. Signs are those of the bits, so that
-0.0 is negative, in both directions alike.

On a GPU this is one Triton kernel each way. On a CPU it is C, compiled when it is first used; where
there is no compiler, numpy on pieces that stay in the cache; without numpy, torch's own operations.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import sign_packing_native
from .ops import Batch, InDims, Run, Static, differentiable, leading

BLOCK = 1024  # values that share a scale
PIECE = 1 << 16  # values that numpy works on at once, so that they stay in the cache

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
        raise ValueError(
            f"x has shape {tuple(x.shape)}, and error {tuple(error.shape)}; an error is like x: "
            "start with torch.zeros_like(x)"
        )
    if x.dtype not in (torch.float32, torch.float64) or error.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype} and error {error.dtype}; both must be float32, or both float64"
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
        raise ValueError(
            f"bits have shape {tuple(bits.shape)}, and scales {tuple(scales.shape)}, with other "
            "leading dimensions; give what sign_pack returned"
        )
    blocks = scales.shape[-1]
    if bits.dtype != torch.uint8 or (bits.shape[-1] % blocks if blocks else bits.shape[-1]):
        raise ValueError(
            f"{bits.shape[-1]} bytes of {bits.dtype} are no whole number of bytes for each of "
            f"{blocks} scales; give what sign_pack returned"
        )
    return _unpack((), bits, scales)[0]


# What runs.


@torch.library.custom_op("zero_fn::sign_pack", mutates_args=())
def _pack_op(x: Tensor, error: Tensor, counts: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    x, error, counts = x.contiguous(), error.contiguous(), counts.contiguous()
    bits = x.new_empty((*x.shape[:-1], x.shape[-1] // 8), dtype=torch.uint8)
    scales = x.new_empty(counts.shape)
    residual = torch.empty_like(x)
    if _triton_takes(x, block):
        from . import sign_packing_triton

        sign_packing_triton.pack(x, error, counts, bits, scales, residual, block)
    else:
        pack_on_cpu(x, error, counts, bits, scales, residual, block)
    return bits, scales, residual


@_pack_op.register_fake
def _(x: Tensor, error: Tensor, counts: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    bits = x.new_empty((*x.shape[:-1], x.shape[-1] // 8), dtype=torch.uint8)
    return bits, x.new_empty(counts.shape), x.new_empty(x.shape)


@torch.library.custom_op("zero_fn::sign_unpack", mutates_args=())
def _unpack_op(bits: Tensor, scales: Tensor) -> Tensor:
    bits, scales = bits.contiguous(), scales.contiguous()
    out = scales.new_empty((*bits.shape[:-1], bits.shape[-1] * 8))
    if scales.numel() and _triton_takes(scales, out.numel() // scales.numel()):
        from . import sign_packing_triton

        sign_packing_triton.unpack(bits, scales, out)
    else:
        unpack_on_cpu(bits, scales, out)
    return out


@_unpack_op.register_fake
def _(bits: Tensor, scales: Tensor) -> Tensor:
    return scales.new_empty((*bits.shape[:-1], bits.shape[-1] * 8))


def _triton_takes(x: Tensor, block: int) -> bool:
    """Whether the Triton kernels do: float32 on a GPU, blocks of a power of two."""
    fits = x.device.type == "cuda" and x.dtype == torch.float32 and block & (block - 1) == 0
    return fits and importlib.util.find_spec("triton") is not None


def pack_on_cpu(
    x: Tensor,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    residual: Tensor,
    block: int,
) -> None:
    """Fill bits, scales and residual, all contiguous, in the quickest way that there is."""
    if sign_packing_native.takes(x, block):
        sign_packing_native.pack(x, error, counts, bits, scales, residual, block)
    elif np is None or x.device.type != "cpu":
        tensors = (x, error, bits, scales, residual, counts)
        _pack_by_torch(*_as_blocks(tensors, block))
    else:
        pack_by_numpy(x, error, counts, bits, scales, residual, block)


def pack_by_numpy(
    x: Tensor,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    residual: Tensor,
    block: int,
) -> None:
    """The same in about eight passes over the cache, two to four over memory."""
    tensors = (x, error, bits, scales, residual, counts)
    _on_threads(_pack_rows, [t.numpy() for t in _as_blocks(tensors, block)], block)


def _as_blocks(tensors: tuple[Tensor, ...], block: int) -> list[Tensor]:
    """Values, values, bits, scales, values and counts, with one row a block."""
    widths = (block, block, block // 8, 1, block, 1)
    return [t.view(-1, width) for t, width in zip(tensors, widths, strict=True)]


def _on_threads(work: Any, arrays: list[Any], block: int) -> None:
    """Run ``work`` on pieces of the rows; numpy lets go of the lock, and has no barriers."""
    rows = max(PIECE // block, 1)
    starts = range(0, len(arrays[0]), rows)
    workers = min(torch.get_num_threads(), len(starts))

    def run(worker: int) -> None:
        space = np.empty((rows, block), arrays[0].dtype if work is _pack_rows else np.uint8)
        for start in starts[worker::workers]:
            work(space, *[array[start : start + rows] for array in arrays])

    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, range(workers)))
    elif workers:
        run(0)


def _pack_rows(
    space: Any, x: Any, error: Any, bits: Any, scales: Any, residual: Any, counts: Any
) -> None:
    """Signs are taken and put back as the highest bit: numpy's copysign goes value by value."""
    space, block = space[: len(x)], x.shape[1]
    whole = np.int32 if x.itemsize == 4 else np.int64
    sign, words, total = np.iinfo(whole).min, space.view(whole), residual.view(whole)
    with np.errstate(all="ignore"):  # NaN and infinity go on as they are
        np.add(x, error, out=residual)
        (partial,) = np.nonzero(counts[:, 0] < block)
        padding = np.arange(block) >= counts[partial] if len(partial) else None
        if padding is not None:
            residual[partial] = np.where(padding, 0, residual[partial])
        np.abs(residual, out=space)
        np.divide(space.sum(1, keepdims=True), np.maximum(counts, 1), out=scales, casting="unsafe")
        bits[:] = np.packbits(total < 0, axis=1)
        np.bitwise_and(total, sign, out=words)
        np.bitwise_or(words, np.abs(scales).view(whole), out=words)
        np.subtract(residual, space, out=residual)
        if padding is not None:
            residual[partial] = np.where(padding, 0, residual[partial])


def _pack_by_torch(
    x: Tensor, error: Tensor, bits: Tensor, scales: Tensor, residual: Tensor, counts: Tensor
) -> None:
    real = torch.arange(x.shape[1], device=x.device) < counts
    torch.add(x, error, out=residual)
    residual.copy_(torch.where(real, residual, 0))
    scales.copy_(residual.abs().sum(1, keepdim=True) / counts.clamp(min=1))
    minus = torch.signbit(residual).unflatten(1, (-1, 8)).to(torch.uint8)
    bits.copy_((minus << _shifts(x.device)).sum(2, dtype=torch.uint8))
    residual.sub_(torch.copysign(scales, residual))
    residual.copy_(torch.where(real, residual, 0))


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def unpack_on_cpu(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill ``out``, in the quickest way that there is."""
    if not out.numel():
        return
    block = out.numel() // scales.numel()
    if sign_packing_native.takes(scales, block):
        sign_packing_native.unpack(bits, scales, out, block)
        return
    flat = [bits.view(-1, block // 8), scales.view(-1, 1), out.view(-1, block)]
    if np is None or bits.device.type != "cpu":
        flat[2].copy_(flat[1] * (1 - 2 * _bits_by_torch(flat[0]).to(scales.dtype)))
    else:
        _on_threads(_unpack_rows, [t.numpy() for t in flat], block)


def _unpack_rows(space: Any, bits: Any, scales: Any, out: Any) -> None:
    with np.errstate(all="ignore"):
        np.multiply(np.unpackbits(bits, axis=1), -2 * scales, out=out)
        np.add(out, scales, out=out)


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
