"""Block-sparse attention on a CPU: equal to the formula, in every context of torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import cases, inputs, oracle
from zero_fn.kernels import block_sparse_attention

CASES = cases()


def gradients(f: Callable[..., Any], *xs: Tensor) -> tuple[Tensor, ...]:
    xs = tuple(x.detach().clone().requires_grad_() for x in xs)
    out = f(*xs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, xs, weight)


# rtol of float64 and float32: an exponential and sums of up to 100 terms; of the halves: one
# rounding of the result, whose size is near 1, for all between is float32
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    qkv, bias = inputs(case, dtype)

    def ours(*qkv: Tensor) -> Tensor:
        return block_sparse_attention(*qkv, case.layout, causal=case.causal, bias=bias)

    def formula(*qkv: Tensor) -> Tensor:
        return oracle(case, list(qkv), bias)[0]

    out = ours(*qkv)
    assert out.dtype == dtype
    assert out.is_contiguous()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), formula(*qkv), **tolerance)
    wide = [x.double() for x in qkv]
    for got, want in zip(gradients(ours, *qkv), gradients(formula, *wide), strict=True):
        assert got.dtype == dtype
        # The gradients use the result as it was rounded to dtype.
        torch.testing.assert_close(
            got.double(), want, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )
