"""Signs packed and unpacked in Triton, one block a program; see ``sign_packing.py``.

One pass: packing reads x and error and writes residual, bits and scales, 12.1 bytes a value.
"""

# mypy: disable-error-code="no-untyped-def"

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4


@triton.jit
def pack_kernel(x, error, counts, bits, scales, residual, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    at = block * BLOCK + places
    count = tl.load(counts + block).to(tl.int32)
    real = places < count
    total = tl.where(real, tl.load(x + at) + tl.load(error + at), 0.0)
    scale = tl.div_rn(tl.sum(tl.abs(total), 0), tl.maximum(count, 1).to(tl.float32))
    minus = total.to(tl.int32, bitcast=True) < 0
    lost = total - tl.where(minus, -scale, scale)
    tl.store(residual + at, tl.where(real, lost, 0.0))
    tl.store(scales + block, scale)
    shifted = minus.to(tl.int32) << (7 - places % 8)
    packed = tl.sum(tl.reshape(shifted, (BLOCK // 8, 8)), 1)
    tl.store(bits + block * (BLOCK // 8) + tl.arange(0, BLOCK // 8), packed.to(tl.uint8))


@triton.jit
def unpack_kernel(bits, scales, out, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    byte = tl.load(bits + block * (BLOCK // 8) + places // 8).to(tl.int32)
    minus = ((byte >> (7 - places % 8)) & 1) != 0
    scale = tl.load(scales + block)
    tl.store(out + block * BLOCK + places, tl.where(minus, -scale, scale))


def pack(
    x: Tensor,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    residual: Tensor,
    block: int,
) -> None:
    """Fill bits, scales and residual; all contiguous, float32, blocks of a power of two."""
    if counts.numel():
        with _device(x):
            pack_kernel[(counts.numel(),)](
                x, error, counts, bits, scales, residual, BLOCK=block, num_warps=NUM_WARPS
            )


def unpack(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill ``out``."""
    if scales.numel():
        with _device(bits):
            unpack_kernel[(scales.numel(),)](
                bits, scales, out, BLOCK=out.numel() // scales.numel(), num_warps=NUM_WARPS
            )


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
