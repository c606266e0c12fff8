"""Loads and stores of Triton kernels that are right in Triton's interpreter too.

The interpreter computes with bfloat16's bit patterns, and cuts bits off where the device rounds.
Imported only when a kernel runs.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def store_bits(at, upper, mask):
    """Store the bit patterns of bfloat16 numbers."""
    tl.store(at, upper.to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit
def store(at, x, mask, INTERPRETED: tl.constexpr):
    """Store float32 ``x`` in the type of the memory, rounded to the nearest."""
    if INTERPRETED and at.dtype.element_ty == tl.bfloat16:
        pattern = x.to(tl.uint32, bitcast=True)
        nearest = ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).to(tl.uint16)
        store_bits(at, tl.where(x != x, 0x7FC0, nearest).to(tl.uint16), mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(
    at, rows, stride, limit, SIZE: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix of ``SIZE`` columns: (rows, PADDED), 0 past the ends.

    Without ``BOUNDED``, no row may lie at the limit or after it.
    """
    columns = tl.arange(0, PADDED)
    places = at + rows[:, None] * stride + columns[None, :]
    if BOUNDED and SIZE < PADDED:
        x = tl.load(places, mask=(rows[:, None] < limit) & (columns[None, :] < SIZE), other=0.0)
    elif BOUNDED:
        x = tl.load(places, mask=rows[:, None] < limit, other=0.0)
    elif SIZE < PADDED:
        x = tl.load(places, mask=columns[None, :] < SIZE, other=0.0)
    else:
        x = tl.load(places)
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_rows(
    at, x, rows, limit, SIZE: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Write (rows, PADDED) to a contiguous matrix of ``SIZE`` columns, but for what is past it."""
    columns = tl.arange(0, PADDED)
    inside = rows[:, None] < limit
    if SIZE < PADDED:
        inside = inside & (columns[None, :] < SIZE)
    store(at + rows[:, None] * SIZE + columns[None, :], x, inside, INTERPRETED)


INTERPRETED = not isinstance(store, triton.runtime.JITFunction)
