"""One table of kernels, and the contexts that each must work in: ``test_matrix.py`` runs them all.

A kernel's row has the kernel and its plain formula as functions of the same tensors, and what each
does in a traced graph. A new kernel is a new row of ``KERNELS``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_fn.kernels import (
    Layout,
    block_sparse_attention,
    dense_attention,
    fused_adamw,
    int8_linear,
    sign_pack,
)
from zero_fn.kernels.flash_attention import attention_formula
from zero_fn.kernels.ops import Batch, InDims, Run, Static, differentiable, leading
from zero_fn.kernels.reference import adamw_leaf
from zero_fn.kernels.reference import attention_formula as sparse_formula

Function = Callable[..., Any]  # of tensors, to a tensor or a tuple of them


class Kernel(NamedTuple):
    name: str
    function: Function
    formula: Function
    arguments: Callable[[], list[Tensor]]  # float64, for derivatives of both orders
    op: str  # the op's name
    every: Sequence[int]  # places of the arguments that are mapped where all are
    some: Sequence[int]  # where some are


def _adam_lists(xs: Sequence[Tensor]) -> tuple[list[list[Tensor]], Tensor]:
    *state, lr = xs
    return [list(state[i : i + 2]) for i in range(0, 8, 2)], lr


def _adam(*xs: Tensor) -> tuple[Tensor, ...]:
    """Two leaves: params, grads, exp_avgs, exp_avg_sqs, lr."""
    lists, lr = _adam_lists(xs)
    new = fused_adamw(*lists, torch.tensor(3), lr, weight_decay=[0.1, 0.0])
    return tuple(x for part in new for x in part)


def _adam_formula(*xs: Tensor) -> tuple[Tensor, ...]:
    lists, lr = _adam_lists(xs)
    step = torch.tensor(3)
    new = [
        adamw_leaf(p, g, m, v, step, lr, 0.9, 0.999, 1e-8, decay, True)
        for p, g, m, v, decay in zip(*lists, [0.1, 0.0], strict=True)
    ]
    return tuple(leaf[part] for part in range(3) for leaf in new)


def _adam_arguments() -> list[Tensor]:
    xs = [torch.randn(*shape, dtype=torch.float64) for shape in [(3,), (2, 2)] * 4]
    xs[6:] = [x.abs() + 0.1 for x in xs[6:]]
    return [*xs, torch.tensor(0.1, dtype=torch.float64)]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, causal=True)


def _attention_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_formula(q, k, v, True, None)


def _attention_arguments() -> list[Tensor]:
    return [torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(3)]


_LAYOUT = Layout.document([7, 0, 13], block=16)


def _sparse_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return block_sparse_attention(q, k, v, _LAYOUT, causal=True, return_lse=True)


def _sparse_formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return sparse_formula(q, k, v, _LAYOUT.to_dense().tril(), 0.5)


def _sparse_arguments() -> list[Tensor]:
    """Two heads share keys."""
    return [torch.randn(1, heads, 20, 4, dtype=torch.float64) for heads in (2, 1, 1)]


# A kernel with a backward of its own: x y², so that the derivatives of both differ.


@torch.library.custom_op("zero_fn_test::product", mutates_args=())
def _product(x: Tensor, y: Tensor) -> Tensor:
    return x * y * y


@torch.library.custom_op("zero_fn_test::product_backward", mutates_args=())
def _product_backward(x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    assert grad.is_contiguous()
    return grad * y * y, 2 * grad * x * y


@_product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@_product_backward.register_fake
def _(x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def _all_mapped(results: int) -> Callable[[Run], Batch]:
    def batch(call: Run) -> Batch:
        def rule(static: Static, in_dims: InDims, size: int, *xs: Tensor) -> Any:
            rows = [leading(x, dim, size) for x, dim in zip(xs, in_dims, strict=True)]
            return call(static, *rows), (0,) * results

        return rule

    return batch


def _never() -> Any:
    raise AssertionError("a kernel with a backward of its own does not need its reference")


_differentiable_backward = differentiable(
    lambda static, *xs: torch.ops.zero_fn_test.product_backward(*xs),
    lambda static, x, y, grad: (grad * y * y, 2 * grad * x * y),
    _all_mapped(2),
)
_differentiable_product = differentiable(
    lambda static, *xs: (torch.ops.zero_fn_test.product(*xs),),
    lambda static, *xs: _never(),
    _all_mapped(1),
    lambda static, inputs, results, grads: _differentiable_backward((), *inputs, *grads),
)


def _product_arguments() -> list[Tensor]:
    return [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]


def _counts() -> Tensor:
    return torch.tensor([8, 5])


def _sign_pack(x: Tensor, error: Tensor) -> tuple[Tensor, ...]:
    """Scales and residual of two blocks of 8, the second one with padding; bits are no floats."""
    return sign_pack(x, error, _counts(), 8)[1:]


def _sign_pack_formula(x: Tensor, error: Tensor) -> tuple[Tensor, ...]:
    total = (x + error).view(2, 8) * (torch.arange(8) < _counts().unsqueeze(1))
    scale = total.abs().sum(1) / _counts()
    sign = torch.where(torch.signbit(total), -1, 1) * (torch.arange(8) < _counts().unsqueeze(1))
    return scale, (total - sign * scale.unsqueeze(1)).view(16)


def _sign_pack_arguments() -> list[Tensor]:
    return [torch.randn(16, dtype=torch.float64) for _ in range(2)]


def _int8_weights() -> tuple[Tensor, Tensor]:
    return torch.arange(-6, 6, dtype=torch.int8).view(3, 4), torch.arange(1.0, 4.0)


def _int8_linear(x: Tensor, y: Tensor) -> Tensor:
    """Weights have no gradient, so that the second argument is of what comes after."""
    return int8_linear(x, *_int8_weights()) * y


def _int8_formula(x: Tensor, y: Tensor) -> Tensor:
    values, scale = _int8_weights()
    return x @ (values * scale[:, None]).double().T * y


KERNELS = [
    Kernel(
        "int8 linear",
        _int8_linear,
        _int8_formula,
        lambda: [torch.randn(*shape, dtype=torch.float64) for shape in [(5, 4), (3,)]],
        "zero_fn::int8_linear",
        every=range(2),
        some=(0,),
    ),
    Kernel(
        "adamw",
        _adam,
        _adam_formula,
        _adam_arguments,
        "zero_fn::adamw",
        # not the learning rate: a sweep over it runs the formula
        every=range(8),
        some=(2, 5),
    ),
    Kernel(
        "dense attention",
        _attention,
        _attention_formula,
        _attention_arguments,
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        every=range(3),
        some=(1,),
    ),
    Kernel(
        "block-sparse attention",
        _sparse_attention,
        _sparse_formula,
        _sparse_arguments,
        "zero_fn::block_sparse_attention",
        every=range(3),
        some=(1,),
    ),
    Kernel(
        "sign packing",
        _sign_pack,
        _sign_pack_formula,
        _sign_pack_arguments,
        "zero_fn::sign_pack",
        every=range(2),
        some=(1,),
    ),
    Kernel(
        "own backward",
        lambda x, y: _differentiable_product((), x, y)[0],
        lambda x, y: x * y * y,
        _product_arguments,
        "zero_fn_test::product",
        every=range(2),
        some=(1,),
    ),
]


# What turns a function of tensors into another one. Each works on kernel and formula alike.


def scalar(f: Function) -> Function:
    def total(*xs: Tensor) -> Tensor:
        out = f(*xs)
        parts = out if isinstance(out, tuple) else (out,)
        return torch.stack([part.sin().sum() for part in parts]).sum()

    return total


def grad(f: Function) -> Function:
    return lambda *xs: torch.func.grad(scalar(f), argnums=tuple(range(len(xs))))(*xs)


def second(f: Function) -> Function:
    """The gradient of the gradient's squared norm."""

    def norm(*xs: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(f)(*xs)]).sum()

    return lambda *xs: torch.func.grad(norm, argnums=tuple(range(len(xs))))(*xs)


def vjp(f: Function) -> Function:
    def pulled(*xs: Tensor) -> Any:
        out, pullback = torch.func.vjp(f, *xs)
        # stride 0, as a sum's gradient
        ones = torch.utils._pytree.tree_map(lambda x: x.new_ones(()).expand(x.shape), out)
        return pullback(ones)

    return pulled


def backward(f: Function) -> Function:
    def accumulated(*xs: Tensor) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in xs]
        scalar(f)(*leaves).backward()
        # what a result does not depend on has no gradient in one, and zeros in the other
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    return accumulated


CONTEXTS: dict[str, Callable[[Function], Function]] = {
    "call": lambda f: f,
    "grad": grad,
    "vjp": vjp,
    "grad of grad": second,
    "backward": backward,
}
