"""Dense attention: torch's flash attention, with what it lacks on a CPU under torch.func.

On a CPU, torch's flash attention has no batching rule (vmap would run one sequence after the other)
and no second derivative. Here the batch folds into the first dimension, and the second derivative
comes from the plain formula.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def dense_attention(
    q: Float[Tensor, "batch heads queries size"],
    k: Float[Tensor, "batch heads keys size"],
    v: Float[Tensor, "batch heads keys size"],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "batch heads queries size"]:
    """softmax(scale * q kᵀ) v, over every key, or with ``causal`` over keys up to the query.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: whether query i sees keys 0 to i only.
        scale: the factor; None: 1/sqrt(size).

    Raises:
        ValueError: for tensors that are not 4-dimensional.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it takes (batch, heads, length, head size)"
            )
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return _attend(q, k, v, causal, scale)[0]


def attention_formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """The same in plain torch, with the scores in memory."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


# allow_in_graph: torch.compile over torch.func would drop a Function's backward and vmap.
@torch.compiler.allow_in_graph
def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    return _Attention.apply(q, k, v, causal, scale)


@torch.compiler.allow_in_graph
def _attend_backward(*args: Any) -> Any:
    return _AttentionBackward.apply(*args)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        grads = _attend_backward(grad.contiguous(), q, k, v, out, log_sum, ctx.causal, ctx.scale)
        return *grads, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, causal: bool, scale: Any) -> Any:
        return _folded(_attend, info.batch_size, in_dims, (q, k, v), causal, scale), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sum: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, causal, scale=scale
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, q, k, v, _, _, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(grad, q, k, v)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        def first_derivative(grad: Tensor, *qkv: Tensor) -> Any:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attention_formula(q, k, v, ctx.causal, ctx.scale)

            return torch.func.vjp(attend, *qkv)[1](grad)

        saved = [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        pullback: Callable[..., Any] = torch.func.vjp(first_derivative, *saved)[1]
        return *pullback(cotangents), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, causal, scale = args
        folded = _folded(_attend_backward, info.batch_size, in_dims, tensors, causal, scale)
        return folded, (0, 0, 0)


def _folded(
    f: Callable[..., Sequence[Tensor]],
    size: int,
    in_dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Call ``f`` with the mapped dimension joined to the first, and part them again."""
    rows = []
    for x, dim in zip(tensors, in_dims, strict=False):
        rows.append(x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0))
    outs = f(*[x.flatten(0, 1) for x in rows], causal, scale)
    return tuple(out.reshape(size, -1, *out.shape[1:]) for out in outs)
