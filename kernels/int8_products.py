"""Linear layers with int8 weights, a scale a row: torch's integer products on a CPU.

- Inputs rounded to int8, each row with a scale of its own: one product.
- float32 inputs as they are: each is split into two int8 digits, x = s (a + b / 254), and one
  product computes with both. What is lost of x is at most 1/64516 of its row's largest value, far
  below the weights' own rounding, sums are exact, and a row's result depends on no other row.
- bfloat16 inputs, few rows: torch's kernel for int8 weights.

Other dtypes and devices multiply with some rows of the weight at a time, made and dropped.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

from .ops import Batch, InDims, Run, Static, differentiable, leading

BLOCK = 1 << 20  # weights that are in memory at once, where they are made by blocks
FEW_ROWS = 4  # up to which torch's kernel for bfloat16 inputs is the faster one


def int8_linear(
    x: Float[Tensor, "rows inputs"],
    values: Int8[Tensor, "outputs inputs"],
    scale: Float[Tensor, " outputs"],
    round_inputs: bool = False,
) -> Float[Tensor, "rows outputs"]:
    """``x @ (values * scale[:, None]).T`` as one op, differentiable in ``x``.

    The gradient is that of the product; the rounding of inputs is passed over (straight through).

    Args:
        x: floating-point.
        values: -127 to 127.
        scale: float32; not differentiable.
        round_inputs: whether the inputs are rounded to int8, each row with its own scale.

    Raises:
        ValueError: if the sizes don't fit.
    """
    if x.ndim != 2 or values.ndim != 2 or x.shape[1] != values.shape[1]:
        raise ValueError(
            f"int8_linear: x of shape {tuple(x.shape)} and values of {tuple(values.shape)} don't "
            "fit; they are (rows, inputs) and (outputs, inputs)"
        )
    if tuple(scale.shape) != (values.shape[0],):
        raise ValueError(
            f"int8_linear: scale of shape {tuple(scale.shape)}; it is one for each of the "
            f"{values.shape[0]} outputs"
        )
    return _call((round_inputs,), x, values, scale)[0]


def product(x: Tensor, values: Tensor, scale: Tensor, round_inputs: bool) -> Tensor:
    """The same in torch's own functions, without a derivative."""
    if not has_kernel(x):
        return formula(x, values, scale, round_inputs)
    if round_inputs:
        digits, factor = rounded(x)
        return ((torch._int_mm(digits, values.t()) * factor) * scale).to(x.dtype)
    if is_small(x, values):
        return torch._weight_int8pack_mm(x, values, scale.to(x.dtype))
    factor = _factor(x)
    scaled = x / factor
    high = scaled.round()
    low = (scaled - high).mul_(254).round_()
    sums = torch._int_mm(torch.cat([high, low]).to(torch.int8), values.t()).float()
    first, second = sums.chunk(2)
    return (first.add_(second, alpha=1 / 254).mul_(factor).mul_(scale)).to(x.dtype)


def formula(x: Tensor, values: Tensor, scale: Tensor, round_inputs: bool = False) -> Tensor:
    """The same with some rows of the weight at a time, in plain differentiable torch."""
    x = rounded_through(x) if round_inputs else x
    parts = [
        F.linear(x, values[own].to(x.dtype)) * scale[own].to(x.dtype)
        for own in blocks(*values.shape)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def has_kernel(x: Tensor) -> bool:
    """Whether integer products serve these inputs."""
    dtypes = (torch.float32, torch.bfloat16)
    return x.device.type == "cpu" and x.numel() > 0 and x.dtype in dtypes and has_integer_products()


def has_integer_products() -> bool:
    """Whether the CPU has dot products of int8; without them torch's are slow loops."""
    return torch.cpu._is_vnni_supported()


def is_small(x: Tensor, values: Tensor) -> bool:
    """Whether torch's kernel for bfloat16 serves: it reads past the end of other sizes."""
    tiled = values.shape[0] % 64 == 0 and values.shape[1] % 64 == 0
    return x.dtype == torch.bfloat16 and len(x) <= FEW_ROWS and tiled


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a weight that are in memory at once."""
    step = max(BLOCK // max(columns, 1), 1)
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8, and its scale, float32."""
    factor = _factor(x)
    return (x / factor).round().to(torch.int8), factor


def rounded_through(x: Tensor) -> Tensor:
    """The rounded inputs, with the gradient of the inputs as they were."""
    digits, factor = rounded(x.detach())
    return x + ((digits * factor).to(x.dtype) - x).detach()


def _factor(x: Tensor) -> Tensor:
    """The scale of each row of inputs, float32: its largest value becomes 127."""
    factor = x.abs().amax(-1, keepdim=True).float() / 127
    return factor.clamp(min=torch.finfo(torch.float32).tiny)


@torch.library.custom_op("zero_fn::int8_linear", mutates_args=())
def _op(x: Tensor, values: Tensor, scale: Tensor, round_inputs: bool) -> Tensor:
    return product(x, values, scale, round_inputs)


@_op.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor, round_inputs: bool) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def _batch(call: Run) -> Batch:
    def rule(static: Static, in_dims: InDims, size: int, *tensors: Tensor) -> Any:
        if in_dims[1:] == (None, None):
            x = leading(tensors[0], in_dims[0], size)
            (y,) = call(static, x.flatten(0, 1), *tensors[1:])
            return (y.unflatten(0, (size, -1)),), (0,)
        rows = [leading(x, dim, size) for x, dim in zip(tensors, in_dims, strict=True)]
        each = [call(static, *own)[0] for own in zip(*rows, strict=True)]
        return (torch.stack(each),), (0,)

    return rule


def _backward(static: Static, inputs: Any, results: Any, grads: Any) -> Any:
    _, values, scale = inputs
    (grad,) = grads
    grad_x = None
    for own in blocks(*values.shape):
        part = (grad[:, own] * scale[own].to(grad.dtype)) @ values[own].to(grad.dtype)
        grad_x = part if grad_x is None else grad_x + part
    return grad_x, None, None


_call = differentiable(
    lambda static, *xs: (torch.ops.zero_fn.int8_linear(*xs, *static),), None, _batch, _backward
)
