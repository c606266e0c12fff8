"""Sums in place: the same numbers in less memory, and nothing overwritten that is still read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.passes import sum_in_place
from zero_fn.program import Program, trace

aten = torch.ops.aten
IN_PLACE = {aten.add_.Tensor, aten.addmm_.default}


def summed(f: Callable[..., Any], *args: Any) -> tuple[Program, int]:
    """The program after the pass, and how many of its sums are in place."""
    program = sum_in_place(trace(f, args))
    program.graph_module.graph.lint()
    program.graph_module.recompile()
    nodes = program.graph_module.graph.nodes
    return program, sum(node.target in IN_PLACE for node in nodes)


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dies(x: Tensor) -> Any:
    return x.sin() + x.cos()


def read_later(x: Tensor) -> Any:
    a, b = x.sin(), x.cos()
    return a + b, a * 2, b * 3


def read_later_as_a_view(x: Tensor) -> Any:
    a, b = x.sin(), x.cos()
    seen, other = a.t(), b.view(-1)
    return a + b, seen * 2, other * 3


def result(x: Tensor) -> Any:
    a, b = x.sin(), x.cos()
    return a + b, a, b


def with_itself(x: Tensor) -> Any:
    a = x.sin()
    return a + a.t(), a + a


def an_argument(x: Tensor) -> Any:
    return x + x.t()


def wider(x: Tensor) -> Any:
    return x[0].sin() + x.sum(1, keepdim=True)[:, 0].expand(3, 3)


def chained(x: Tensor) -> Any:
    total = x.sin()
    for number in range(3):
        total = total + torch.mm(x.t(), x.cos() * number)
    return total


def product_read_twice(x: Tensor) -> Any:
    p = torch.mm(x, x)
    return x.sin() + p, p * 2


def product_of_the_sum(x: Tensor) -> Any:
    total = x.sin()
    return total + torch.mm(total, x)


def total_read_after_the_product(x: Tensor) -> Any:
    total = x.sin()
    p = torch.mm(x, x)
    return total * 3, total + p


def transposed_product(x: Tensor) -> Any:
    return x.sin() + torch.mm(x, x.cos()).t()


@pytest.mark.parametrize(
    ("f", "in_place"),
    [
        (dies, 1),
        (read_later, 0),
        (read_later_as_a_view, 0),
        (result, 0),
        (with_itself, 0),
        (an_argument, 0),
        (chained, 3),
        (product_read_twice, 1),
        (product_of_the_sum, 1),
        (total_read_after_the_product, 1),
        (transposed_product, 1),
    ],
)
def test_nothing_that_is_read_is_overwritten(f: Callable[..., Any], in_place: int) -> None:
    x = values(3, 3)
    before = x.clone()
    program, count = summed(f, x)
    assert count == in_place, str(program)
    # float64: products are added up in another order
    torch.testing.assert_close(program(x), f(x), rtol=1e-14, atol=1e-14)
    assert torch.equal(x, before)


def test_a_narrow_summand_does_not_hold_a_wide_sum() -> None:
    x = values(3, 3)
    program, count = summed(lambda x: x.sum(0).sin() + x.cos(), x)
    assert count == 1  # into the cosines
    torch.testing.assert_close(program(x), x.sum(0).sin() + x.cos())
    half = values(3, 3).half()
    program, _ = summed(lambda x: x.sin() + x.double().cos(), half)
    assert program(half).dtype == torch.float64


def loss(params: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["up"].T + params["bias"])
    return (hidden @ params["down"].T).square().mean()


def traced(skip: tuple[str, ...] = ()) -> tuple[Program, Any, Tensor]:
    params = {"up": values(50, 7), "bias": values(50), "down": values(3, 50)}
    x = values(12, 7)
    step = zf.jit(zf.accumulate(loss, 4, ()), skip=skip)
    return step.trace(params, x), params, x


def test_gradients_add_up_in_the_memory_of_the_first() -> None:
    program, params, x = traced()
    plain, *_ = traced(("sum_in_place",))
    targets = [node.target for node in program.graph_module.graph.nodes]
    assert targets.count(aten.addmm_.default) == 2 * 3  # two matrices, all micro-batches but one
    assert program.flops() == plain.flops()
    assert program.peak().bytes < plain.peak().bytes
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    value = loss(leaves, x)
    want = torch.autograd.grad(value, tree.leaves(leaves))
    grads, got = program(params, x)
    torch.testing.assert_close(tree.leaves(grads), list(want), rtol=1e-12, atol=1e-14)  # float64
    torch.testing.assert_close(got, value.detach())
