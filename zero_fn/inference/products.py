"""Linear layers and embeddings on quantised weights, without the whole weight in memory.

int8 weights with a scale a row go through ``kernels/int8_products.py``. Everything else multiplies
with some rows of the weight at a time, which are made and dropped.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..tree import Tensor
from .quantization import Quantized, dequantize, numbers, weights


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
    for own in _int8().blocks(*weight.shape):
        part = x[..., own] @ weight[own].to(x.dtype)
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
    """The product in integers; None where the weight or the inputs don't allow it."""
    values, scales, format = weight.values, weight.scales, weight.format
    if format.method != "int8" or format.group or scales.requires_grad:
        return None
    given = x, values, scales.squeeze(-1), format.activations is not None
    int8 = _int8()
    if torch.compiler.is_dynamo_compiling():
        return int8.int8_linear(*given)
    if not int8.has_kernel(x):
        return None
    # Inductor cannot lower torch's op for a few rows, and fuses the others.
    traced = type(x) is not Tensor and int8.is_small(x, values)
    as_op = traced or _transformed(x, values, scales)
    return int8.int8_linear(*given) if as_op else int8.product(*given)


def _by_blocks(x: Tensor, weight: Quantized) -> Tensor:
    """The product with some rows of the weight at a time, in plain differentiable torch."""
    format = weight.format
    x = _int8().rounded_through(x) if format.activations else x
    parts = []
    for own in _int8().blocks(*weight.shape):
        values, scales = weight.values[own], weight.scales[own]
        if format.group or format.padding:
            parts.append(F.linear(x, weights(values, scales, format, x.dtype)))
        else:
            y = F.linear(x, numbers(values, format, x.dtype))
            parts.append(y * scales.squeeze(-1).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _transformed(*tensors: Tensor) -> bool:
    """Whether a tensor is being differentiated or mapped over."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return differentiated or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def _int8() -> Any:
    """The kernels' room; torch's compiler comes with its ops, and takes a second to load."""
    from ..kernels import int8_products

    return int8_products
