"""Linear layers and embeddings on quantised weights, without the whole weight in memory.

On a CPU an int8 weight with a scale a row goes through torch's integer matrix product:

- inputs rounded to int8 (``activations="int8"``): one product;
- float32 inputs as they are: each is split into two int8 digits, x = s (a + b / 254), and one
  product computes with both. What is lost of x is at most 1/64516 of its row's largest value, far
  below the weights' own rounding, sums are exact, and a row's result depends on no other row;
- bfloat16 inputs, few rows: torch's kernel for int8 weights.

Everything else multiplies with some rows of the weight at a time, which are made and dropped: other
dtypes and methods, other devices, inputs that are being differentiated, and simulated ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..tree import Tensor
from .quantization import Quantized, dequantize, numbers, weights

BLOCK = 1 << 20  # weights that are in memory at once, where they are made by blocks
FEW_ROWS = 4  # up to which torch's kernel for bfloat16 inputs is the faster one


def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: (..., inputs), floating-point.
        weight: (outputs, inputs), quantised or not.
        bias: (outputs).

    Returns:
        (..., outputs), in the dtype of ``x``.

    Raises:
        ValueError: if the sizes don't fit.
    """
    if not isinstance(weight, Quantized):
        return F.linear(x, weight, bias)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x of shape {tuple(x.shape)} and {weight!r} don't fit; the weight is "
            "(outputs, inputs) and x (..., inputs)"
        )
    rows = x.reshape(-1, x.shape[-1])
    y = _kernel(rows, weight)
    if y is None:
        y = _by_blocks(rows, weight)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def embedding(
    tokens: Tensor,
    table: Tensor | Quantized,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The rows of a table; of a quantised one only these become plain weights.

    Args:
        tokens: (...), indices of rows.
        table: (rows, width).
        padding_idx: as in ``torch.nn.functional.embedding``; it says what has no gradient.
        max_norm: as there, for plain tables: it changes the table.
        args: further ones, for plain tables.
        kwargs: further ones.

    Raises:
        ValueError: for max_norm with a quantised table.
    """
    if not isinstance(table, Quantized):
        return F.embedding(tokens, table, padding_idx, max_norm, *args, **kwargs)
    if max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm} writes to the table, and {table!r} is quantised; quantise "
            "without it, with `where`"
        )
    values, scales = F.embedding(tokens, table.values), F.embedding(tokens, table.scales)
    return weights(values, scales, table.format, table.dtype)


def _torch_embedding(table: Any, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return embedding(tokens, table)


def matmul(x: Tensor | Quantized, weight: Tensor | Quantized) -> Tensor:
    """``x @ weight`` for a weight (inputs, outputs), some of its inputs at a time."""
    if isinstance(x, Quantized) or not isinstance(weight, Quantized) or weight.ndim != 2:
        return torch.matmul(*dequantize((x, weight)))
    y: Tensor | None = None
    for start, stop in _blocks(*weight.shape):
        part = x[..., start:stop] @ weight[start:stop].to(x.dtype)
        y = part if y is None else y + part
    assert y is not None
    return y


def addmm(bias: Tensor, x: Tensor, weight: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * bias + alpha * (x @ weight)``."""
    return beta * bias + alpha * matmul(x, weight)


# What tensor functions are on quantised weights.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    F.embedding: embedding,
    torch.embedding: _torch_embedding,
    torch.matmul: matmul,
    torch.mm: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.addmm: addmm,
}


def _kernel(x: Tensor, weight: Quantized) -> Tensor | None:
    """The product by one of torch's integer kernels; None where none of them serves."""
    values, scales, format = weight.values, weight.scales, weight.format
    if format.method != "int8" or format.group or x.device.type != "cpu" or not x.numel():
        return None
    if _transformed(x, values, scales) or not _has_integer_products():
        return None
    scale = scales.squeeze(-1)
    if format.activations:
        digits, factor = _rounded(x)
        return ((torch._int_mm(digits, values.t()) * factor) * scale).to(x.dtype)
    if x.dtype == torch.bfloat16 and len(x) <= FEW_ROWS and _is_tiled(values):
        return torch._weight_int8pack_mm(x, values, scale.to(x.dtype))
    if x.dtype not in (torch.float32, torch.bfloat16):
        return None
    factor = _factor(x)
    scaled = x / factor
    high = scaled.round()
    low = (scaled - high).mul_(254).round_()
    product = torch._int_mm(torch.cat([high, low]).to(torch.int8), values.t()).float()
    first, second = product.chunk(2)
    return (first.add_(second, alpha=1 / 254).mul_(factor).mul_(scale)).to(x.dtype)


def _by_blocks(x: Tensor, weight: Quantized) -> Tensor:
    """The product with some rows of the weight at a time, in plain differentiable torch."""
    format = weight.format
    rows, columns = weight.shape
    parts = []
    if format.activations:  # as the kernel computes, so that both paths agree
        digits, factor = _rounded(x)
        x = (digits.to(x.dtype) * factor).to(x.dtype)
    for start, stop in _blocks(rows, columns):
        values, scales = weight.values[start:stop], weight.scales[start:stop]
        if format.group or format.padding:
            parts.append(F.linear(x, weights(values, scales, format, x.dtype)))
        else:
            y = F.linear(x, numbers(values, format, x.dtype))
            parts.append(y * scales.squeeze(-1).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(BLOCK // max(columns, 1), 1)
    return [(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def _factor(x: Tensor) -> Tensor:
    """The scale of each row of inputs, float32: its largest value becomes 127."""
    factor = x.abs().amax(-1, keepdim=True).float() / 127
    return factor.clamp(min=torch.finfo(torch.float32).tiny)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = _factor(x)
    return (x / factor).round().to(torch.int8), factor


def _transformed(*tensors: Tensor) -> bool:
    """Whether a tensor is being differentiated or mapped over: kernels have no rules for it."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return differentiated or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def _is_tiled(values: Tensor) -> bool:
    """Whether torch's kernel for bfloat16 takes the sizes: it reads past the end of others."""
    return values.shape[0] % 64 == 0 and values.shape[1] % 64 == 0


def _has_integer_products() -> bool:
    """Whether the CPU has dot products of int8; without them torch's are slow loops."""
    return torch.cpu._is_vnni_supported()
