"""Attention's section of the GPU benchmark: densities 1 to 1/32, against SDPA and FlexAttention."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

from tests.benchmarks.attention import evenly_random
from tests.benchmarks.gpu_results import Result, Setting
from tests.benchmarks.timing import interleaved
from zero_fn.kernels import Layout, block_sparse_attention, sparse_attention
from zero_fn.kernels.floors import Floor, attention_floor
from zero_fn.kernels.reference import attention_formula

OURS, FORWARD, BOTH = "block_sparse_attention", "forward", "forward + backward"
DENSITIES = (1.0, 1 / 2, 1 / 8, 1 / 32)
Attend = Callable[..., Tensor]


class _Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    block: int
    sizes: Sequence[int]
    densities: Sequence[float]


FULL = _Shape(4, 16, 16384, 128, (64, 128), DENSITIES)
TINY = _Shape(1, 2, 128, 32, (16,), (1.0, 1 / 2))


def section(setting: Setting) -> list[Result]:
    shape = TINY if setting.tiny else FULL
    takes = mock.patch.object(sparse_attention, "_triton_takes", sparse_attention._fits_triton)
    results = []
    with takes if setting.device == "cpu" else contextlib.nullcontext():
        # Compiled once: masks of all densities have tensors of the same shapes.
        flex = torch.compile(flex_attention, dynamic=False)
        for size in shape.sizes:
            for density in shape.densities:
                results += _case(shape, size, density, flex, setting)
    return results


def _case(shape: _Shape, size: int, density: float, flex: Attend, setting: Setting) -> list[Result]:
    layout = evenly_random(shape.length, density, shape.block)
    generator = torch.Generator(setting.device).manual_seed(0)

    def numbers() -> Tensor:
        dims = (shape.batch, shape.heads, shape.length, size)
        made = torch.randn(dims, generator=generator, device=setting.device)
        return made.to(torch.bfloat16)

    qkv, grad = (numbers(), numbers(), numbers()), numbers()
    mask = _block_mask(layout, setting.device)
    attends: dict[str, Attend] = {
        OURS: lambda *x: block_sparse_attention(*x, layout),
        "SDPA, flash, dense": _flash if setting.device == "cuda" else _dense,
    }
    if setting.device == "cuda":
        attends["FlexAttention"] = lambda *x: flex(*x, block_mask=mask)
    of_all = (shape.batch, shape.heads, shape.length, shape.length, size)
    results = []
    for pass_ in (FORWARD, BOTH):
        floors = [attention_floor(*of_all, layout.density)]
        if pass_ == BOTH:
            floors.append(attention_floor(*of_all, layout.density, backward=True))
        floor = Floor(*map(sum, zip(*floors, strict=True)))
        runs = {what: _run(f, qkv, grad, pass_ == BOTH) for what, f in attends.items()}
        times = interleaved(runs, 1 if setting.tiny else 7, setting.device)
        for what in attends:
            error = None
            if density == 1 or what != "SDPA, flash, dense":
                error = _error(runs[what](), qkv, grad, layout)
            case = f"D {size}, density {density:.4g}, {pass_}"
            results.append(Result(case, what, times[what], floor, error))
    return results


def _run(
    f: Attend, qkv: Sequence[Tensor], grad: Tensor, backward: bool
) -> Callable[[], tuple[Tensor, ...]]:
    if not backward:
        return lambda: (f(*qkv),)
    leaves = [x.detach().requires_grad_() for x in qkv]

    def both() -> tuple[Tensor, ...]:
        out = f(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return both


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _dense(q, k, v)


def _block_mask(layout: Layout, device: str) -> BlockMask:
    """Of a layout all of whose blocks are seen in full: no mask function to compile anew."""
    mask: Any = layout.to_block_mask(device)
    blocks = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=layout.block, mask_mod=noop_mask)


def _error(found: tuple[Tensor, ...], qkv: Sequence[Tensor], grad: Tensor, layout: Layout) -> float:
    """The largest error of the first head's result and gradients, in parts of the largest value."""
    leaves = [x[:1, :1].double().requires_grad_() for x in qkv]
    seen = layout.to_dense().to(grad.device)
    out = attention_formula(*leaves, seen, leaves[0].shape[-1] ** -0.5)[0]
    want = [out]
    if len(found) > 1:
        want += torch.autograd.grad(out, leaves, grad[:1, :1].double())
    pairs = zip(found, want, strict=True)
    return max(((x[:1, :1] - y).abs().max() / y.abs().max()).item() for x, y in pairs)


def summary(results: Sequence[Result]) -> list[str]:
    """The goals, and what was reached."""
    seconds = {(r.case, r.what): r.seconds for r in results}
    lines = []
    for case in dict.fromkeys(r.case for r in results):
        size, density, pass_ = case.split(", ")
        ours, share = seconds[case, OURS], float(density.split()[1])
        own = seconds[f"{size}, density 1, {pass_}", OURS]
        parts = [
            f"{own * share / ours:.2f} of its own dense time x density (goal 0.85)",
            f"{seconds[case, 'SDPA, flash, dense'] / ours:.2f} times dense SDPA",
        ]
        if share == 1 / 8:
            parts[-1] += f" (goal {5 if pass_ == FORWARD else 4})"
        if (case, "FlexAttention") in seconds:
            parts.append(
                f"{seconds[case, 'FlexAttention'] / ours:.2f} times FlexAttention (goal 1)"
            )
        lines.append(f"{case}: " + ", ".join(parts))
    return lines
