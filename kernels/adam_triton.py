"""Fused Adam in Triton: one launch and one pass over memory for a whole tree of leaves.

A table of addresses lies on the device, one row a leaf; each program finds its leaf and its block
there. Tables are kept by what they hold (addresses, sizes, decays), so that a training loop in
place builds its table once. Everything that changes from step to step (step, learning rate,
gradient scale, skip flag, seed) is read from device memory: no step waits for the device.

Arithmetic is float32 whatever the storage. Imported only when a kernel runs: see ``adam.py``.
"""

# mypy: disable-error-code="no-untyped-def"

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_memory import INTERPRETED, store, store_bits

BLOCK = 2048  # elements a program; 8 a thread
NUM_WARPS = 8
# Of a leaf: the addresses of p, g, m, v, new p (or update), new m, new v and copy; its number.
COLUMNS = tl.constexpr(9)

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def adam_kernel(
    leaves,  # (leaves, COLUMNS) int64
    sizes,  # (leaves,) int64
    decays,  # (leaves,) float32
    blocks,  # (programs, 2) int32: leaf, number of the block within it
    step,  # one number each, of any type, or None for the last three
    lr,
    grad_scale,
    skip,
    seed,
    one_minus_beta1,
    beta2,
    beta2_rest,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    COPY: tl.constexpr,  # None: no working copy
    DECOUPLED: tl.constexpr,
    PURE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    leaf = tl.load(blocks + 2 * program)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    left = tl.load(sizes + leaf) - start
    row = leaves + leaf * COLUMNS
    p_at = _address(row, 0, P, ALIGNED) + start
    g_at = _address(row, 1, G, ALIGNED) + start
    m_at = _address(row, 2, M, ALIGNED) + start
    v_at = _address(row, 3, V, ALIGNED) + start
    p_to = _address(row, 4, P, ALIGNED) + start
    m_to = _address(row, 5, M, ALIGNED) + start
    v_to = _address(row, 6, V, ALIGNED) + start
    copy_to = p_to
    if COPY is not None:
        copy_to = _address(row, 7, COPY, ALIGNED) + start

    count = tl.load(step).to(tl.float32)
    rate = tl.load(lr).to(tl.float32)
    decay = tl.load(decays + leaf)
    # Two numbers instead of three divisions an element.
    pace = tl.div_rn(rate, _one_minus_exp(count * log_beta1))
    unbias = tl.div_rn(1.0, tl.sqrt_rn(_one_minus_exp(count * log_beta2)))

    # A mask that ends anywhere would forbid 16-byte accesses, so that full blocks have none.
    if left >= BLOCK:
        _block(
            p_at, g_at, m_at, v_at, p_to, m_to, v_to, copy_to, row, start, left, rate, pace,
            unbias, decay, grad_scale, skip, seed, one_minus_beta1, beta2, beta2_rest,
            one_minus_beta2, eps, COPY, DECOUPLED, PURE, INTERPRETED, BLOCK, False,
        )  # fmt: skip
    else:
        _block(
            p_at, g_at, m_at, v_at, p_to, m_to, v_to, copy_to, row, start, left, rate, pace,
            unbias, decay, grad_scale, skip, seed, one_minus_beta1, beta2, beta2_rest,
            one_minus_beta2, eps, COPY, DECOUPLED, PURE, INTERPRETED, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _block(
    p_at, g_at, m_at, v_at, p_to, m_to, v_to, copy_to, row, start, left, rate, pace, unbias, decay,
    grad_scale, skip, seed, one_minus_beta1, beta2, beta2_rest, one_minus_beta2, eps,
    COPY: tl.constexpr, DECOUPLED: tl.constexpr, PURE: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, BLOCK)
    mask = places < left if MASKED else None
    p = tl.load(p_at + places, mask=mask).to(tl.float32)
    g = tl.load(g_at + places, mask=mask).to(tl.float32)
    m = tl.load(m_at + places, mask=mask).to(tl.float32)
    v = tl.load(v_at + places, mask=mask).to(tl.float32)

    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale).to(tl.float32))
    drag = tl.where(decay != 0, decay * p, 0.0)  # no decay of an infinite parameter is 0
    if not DECOUPLED:
        g += drag
    new_m = m + one_minus_beta1 * (g - m)
    # beta2 in two parts: its rounding to float32 alone would shift v by up to 3e-5. The bound keeps
    # an infinite v infinite: inf times a small negative rest is -inf, and inf - inf is NaN.
    new_v = beta2 * v + beta2_rest * tl.minimum(v, 3.4028234663852886e38)
    new_v += one_minus_beta2 * (g * g)
    # Correctly rounded: the fast root takes denormals for zero, the fast division is 2 ulp off.
    update = -tl.div_rn(pace * new_m, tl.sqrt_rn(new_v) * unbias + eps)
    if DECOUPLED:
        update -= rate * drag
    if skip is not None:
        keep = tl.load(skip) != 0
        update = tl.where(keep, 0.0, update)
        new_m = tl.where(keep, m, new_m)
        new_v = tl.where(keep, v, new_v)

    if PURE:
        store(p_to + places, update, mask, INTERPRETED)
    else:
        new_p = p + update
        if seed is not None:
            at = places.to(tl.int64) + start
            # Philox with 7 rounds is the smallest that passes every test of BigCrush (Salmon et
            # al. 2011, table 2); a counter names the element, so that no two share their bits.
            bits, _, _, _ = tl.philox(
                tl.load(seed),
                (at & 0xFFFFFFFF).to(tl.uint32),
                (at >> 32).to(tl.uint32),
                (tl.load(row + 8) + 0 * places).to(tl.uint32),
                (0 * places).to(tl.uint32),
                7,
            )
            store_bits(p_to + places, _rounded_up_by_chance(new_p, bits), mask)
        else:
            store(p_to + places, new_p, mask, INTERPRETED)
        if COPY is not None:
            store(copy_to + places, new_p, mask, INTERPRETED)
    store(m_to + places, new_m, mask, INTERPRETED)
    store(v_to + places, new_v, mask, INTERPRETED)


@triton.jit
def _address(row, column: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0 with all digits: by its series near 0, where the difference has few."""
    series = 1.0 + x / 8.0
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = 1.0 + x / 2.0 * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _rounded_up_by_chance(x, bits):
    """The upper half of float32 ``x``, one higher with a chance equal to the lower half."""
    pattern = x.to(tl.uint32, bitcast=True)
    upper = ((pattern + (bits & 0xFFFF)) >> 16).to(tl.uint16)
    # An infinity or NaN has no lower half to round by: a carry would turn it into a number.
    finite = (pattern & 0x7F800000) != 0x7F800000
    special = ((pattern >> 16) | tl.where(x != x, 0x40, 0)).to(tl.uint16)
    return tl.where(finite, upper, special)


class Settings(NamedTuple):
    """What a step of all leaves shares. The tensors are 0-dim."""

    step: Tensor
    lr: Tensor
    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    grad_scale: Tensor | None
    skip: Tensor | None
    seed: Tensor | None


class Row(NamedTuple):
    """A leaf: its tensors to read and to write, contiguous, of one size, on one device."""

    number: int
    weight_decay: float
    read: tuple[Tensor, Tensor, Tensor, Tensor]  # p, g, m, v
    write: tuple[Tensor, Tensor, Tensor]  # new p (or the update), new m, new v; may be those read
    copy: Tensor | None


def launch(leaves: Sequence[Row], settings: Settings, *, pure: bool) -> None:
    """Run the step: one launch for leaves of the same dtypes, device and alignment.

    Args:
        leaves: what to read and where to write it.
        settings: what all leaves share.
        pure: whether an update is written rather than the new parameter.
    """
    groups: dict[Any, list[Row]] = {}
    for leaf in leaves:
        if leaf.read[0].numel():
            tensors = [*leaf.read, *leaf.write, *([] if leaf.copy is None else [leaf.copy])]
            aligned = all(x.data_ptr() % 16 == 0 for x in tensors)
            dtypes = (*(x.dtype for x in leaf.read), None if leaf.copy is None else leaf.copy.dtype)
            groups.setdefault((leaf.read[0].device, dtypes, aligned), []).append(leaf)
    for (device, dtypes, aligned), group in groups.items():
        _launch(group, settings, device, dtypes, aligned, pure)


def _launch(
    group: Sequence[Row],
    settings: Settings,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    aligned: bool,
    pure: bool,
) -> None:
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        # A table is ready for the stream that filled it, not for others.
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
        rows = tuple(
            (
                *(x.data_ptr() for x in (*leaf.read, *leaf.write)),
                0 if leaf.copy is None else leaf.copy.data_ptr(),
                leaf.number,
            )
            for leaf in group
        )
        decays = tuple(leaf.weight_decay for leaf in group)
        leaf_table, decay_table = _leaf_tables(device, stream, rows, decays)
        sizes = tuple(leaf.read[0].numel() for leaf in group)
        size_table, block_table = _block_tables(device, stream, sizes)

        numbers = [settings.step, settings.lr, settings.grad_scale, settings.skip, settings.seed]
        p, g, m, v, copy = (None if dtype is None else TYPES[dtype] for dtype in dtypes)
        adam_kernel[(len(block_table),)](
            leaf_table,
            size_table,
            decay_table,
            block_table,
            *[x if x is None else x.to(device, non_blocking=True) for x in numbers],
            **constants(settings.beta1, settings.beta2, settings.eps),
            P=p,
            G=g,
            M=m,
            V=v,
            COPY=copy,
            DECOUPLED=settings.decoupled,
            PURE=pure,
            ALIGNED=aligned,
            INTERPRETED=INTERPRETED,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def constants(beta1: float, beta2: float, eps: float) -> dict[str, float]:
    """The kernel's float32 arguments, computed in float64."""
    rounded = torch.tensor(beta2, dtype=torch.float32).item()
    return {
        "one_minus_beta1": 1 - beta1,
        "beta2": rounded,
        "beta2_rest": beta2 - rounded,
        "one_minus_beta2": 1 - beta2,
        "log_beta1": math.log(beta1) if beta1 else -math.inf,
        "log_beta2": math.log(beta2) if beta2 else -math.inf,
        "eps": eps,
    }


@functools.lru_cache(maxsize=64)
def _leaf_tables(
    device: torch.device, stream: int, rows: tuple[tuple[int, ...], ...], decays: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    return (
        _sent(torch.tensor(rows, dtype=torch.int64), device),
        _sent(torch.tensor(decays, dtype=torch.float32), device),
    )


@functools.lru_cache(maxsize=8)
def _block_tables(
    device: torch.device, stream: int, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    size = torch.tensor(sizes, dtype=torch.int64)
    blocks = (size + BLOCK - 1) // BLOCK
    leaf = torch.arange(len(sizes)).repeat_interleave(blocks)
    first = blocks.cumsum(0) - blocks
    number = torch.arange(len(leaf)) - first[leaf]
    return _sent(size, device), _sent(torch.stack([leaf, number], 1).to(torch.int32), device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and these leaves lie at addresses that the fused Adam "
            "has not met: it would copy its table anew at each replay. Run the same step in place "
            "(fused_adamw_) once on this stream before the capture"
        )
    return table.pin_memory().to(device, non_blocking=True)
