"""Block-sparse attention, with derivatives of both orders, on any device.

Three ops, ``zero_fn::block_sparse_attention``, its backward and the backward of that, which know a
layout by its key. The first two run on CUDA in Triton, on a CPU by rows of torch's flash attention,
elsewhere in plain torch; so does the third everywhere.
"""

import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor

from . import attention_cpu, attention_rows
from .layouts import Layout, find
from .ops import Batch, Gradients, InDims, Run, Static, differentiable, leading

# Layouts that some graph knows by their key: they live as long as the process, for nobody can say
# when the last such graph is gone.
_TRACED: dict[str, Layout] = {}


class _Call(NamedTuple):
    """The constants of a call."""

    layout: str
    causal: bool
    scale: float
    with_bias: bool
    with_log_sum: bool  # whether a gradient of the second result counts


@overload
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    bias: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    bias: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def block_sparse_attention(
    q: Float[Tensor, "batch heads queries size"],
    k: Float[Tensor, "batch kv_heads keys size"],
    v: Float[Tensor, "batch kv_heads keys size"],
    layout: Layout,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: Float[Tensor, "#batch #heads #queries #keys"] | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q kᵀ + bias) v over the keys that the layout lets each query see.

    Work and memory are those of the blocks that are seen. A query that sees nothing has result 0
    and passes no gradient. Differentiable in q, k and v, twice; a bias has no gradient.

    Args:
        q: queries; any head size.
        k: keys. ``heads`` is a multiple of ``kv_heads``, and consecutive heads share keys
            (grouped-query attention, arXiv 2305.13245).
        v: values, like ``k``.
        layout: which blocks are seen; of exactly these numbers of queries and keys.
        causal: whether besides, query i sees keys 0 to i only, element for element.
        scale: the factor; None: 1/sqrt(size).
        bias: added to the scaled scores; -inf hides a key. Any dimension may be 1.
        return_lse: whether to return the logarithm of the sum of the scores' exponentials too.

    Returns:
        The attention (batch, heads, queries, size); with ``return_lse`` also the natural logarithm
        (batch, heads, queries), float32 or wider, -inf for a query that sees nothing. It can be
        differentiated too, more slowly.

    Raises:
        ValueError: for shapes or dtypes that do not fit together or do not fit the layout.
        NotImplementedError: for a gradient of the bias.
    """
    _check(q, k, v, layout, bias)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    call = _Call(layout.key, causal, scale, bias is not None, return_lse)
    extra = () if bias is None else (bias,)
    out, log_sum = _attend(tuple(call), q, k, v, *extra)
    return (out, log_sum) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"{shapes}: each is (batch, heads, length, head size)")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: batch and head size are equal, and k and v alike")
    if not q.shape[3]:
        raise ValueError(f"{shapes}: a head size of 0")
    if q.shape[1] % max(k.shape[1], 1) or (q.shape[1] and not k.shape[1]):
        raise ValueError(f"{shapes}: {q.shape[1]} heads can't share the keys of {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: one floating dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}: one device")
    if (q.shape[2], k.shape[2]) != (layout.q_len, layout.k_len):
        raise ValueError(
            f"{shapes} have {q.shape[2]} queries and {k.shape[2]} keys, but the layout is for "
            f"{layout.q_len} and {layout.k_len}: make one of these lengths (they need not be "
            "multiples of the block)"
        )
    if layout.heads not in (1, q.shape[1]):
        raise ValueError(
            f"{shapes} have {q.shape[1]} heads, but the layout has {layout.heads}: make it with "
            f"num_heads={q.shape[1]}, or 1 to share it"
        )
    if bias is None:
        return
    full = (*q.shape[:3], k.shape[2])
    if bias.ndim != 4 or any(b not in (1, n) for b, n in zip(bias.shape, full, strict=True)):
        raise ValueError(f"bias {tuple(bias.shape)} does not broadcast to {full}")
    if not bias.is_floating_point() or bias.device != q.device:
        raise ValueError(
            f"bias is {bias.dtype} on {bias.device}: floating, on {q.device}; a boolean mask is "
            "part of the layout, or torch.where(mask, 0.0, -torch.inf)"
        )


def _seen(key: str, causal: bool) -> Layout:
    layout = find(key)
    return layout.tril() if causal else layout


def _triton_takes(q: Tensor) -> bool:
    return q.device.type == "cuda" and _fits_triton(q) and _triton_is_here()


def _fits_triton(q: Tensor) -> bool:
    return q.shape[-1] <= 256 and q.dtype in (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op("zero_fn::block_sparse_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    seen = _seen(layout, causal)
    if not q.numel() or not k.numel():
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full(
            q.shape[:3], -math.inf, dtype=wide
        )
    if _triton_takes(q):
        from . import attention_launch

        return attention_launch.forward(q, k, v, bias, seen, scale)
    if q.device.type == "cpu":
        return attention_cpu.forward(q, k, v, bias, seen, scale)
    return attention_rows.forward(q, k, v, bias, seen, scale)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _TRACED.setdefault(layout, find(layout))
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[:3], dtype=wide),
    )


@torch.library.custom_op("zero_fn::block_sparse_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    layout: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seen = _seen(layout, causal)
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if _triton_takes(q):
        from . import attention_launch

        return attention_launch.backward(
            grad, grad_log_sum, q, k, v, bias, out, log_sum, seen, scale
        )
    if q.device.type == "cpu" and grad_log_sum is None:
        return attention_cpu.backward(grad, q, k, v, bias, out, log_sum, seen, scale)
    return attention_rows.backward(grad, grad_log_sum, q, k, v, bias, seen, scale)


@_backward.register_fake
def _(
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    layout: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _TRACED.setdefault(layout, find(layout))
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q, k, v


@torch.library.custom_op("zero_fn::block_sparse_attention_double_backward", mutates_args=())
def _double_backward(
    cotangents: Sequence[Tensor],
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: str,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    seen = _seen(layout, causal)
    if not q.numel() or not k.numel():
        extra = [] if grad_log_sum is None else [grad_log_sum]
        return [torch.zeros_like(x) for x in (q, k, v, grad, *extra)]
    a, b, c = cotangents
    return attention_rows.double_backward((a, b, c), grad, grad_log_sum, q, k, v, bias, seen, scale)


@_double_backward.register_fake
def _(
    cotangents: Sequence[Tensor],
    grad: Tensor,
    grad_log_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: str,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    _TRACED.setdefault(layout, find(layout))
    inputs = (q, k, v, grad) if grad_log_sum is None else (q, k, v, grad, grad_log_sum)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


# The ops as the registration wants them: (static, q, k, v, bias if there is one, and then: nothing;
# results and gradients that count; gradients that count and three cotangents).


def _run(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
    call = _Call(*static)
    qkv, bias, _ = _parted(call, tensors)
    result: tuple[Tensor, ...] = torch.ops.zero_fn.block_sparse_attention(
        *qkv, bias, call.layout, call.causal, call.scale
    )
    return result


def _first(
    static: Static, inputs: Sequence[Tensor], results: Sequence[Tensor], grads: Sequence[Tensor]
) -> Gradients:
    call = _Call(*static)
    # A gradient may come in any memory layout, even with stride 0.
    counted = [x.contiguous() for x in (grads if call.with_log_sum else grads[:1])]
    # The results are functions of q, k and v: what depends on them is counted there.
    known = [x.detach() for x in results]
    return *_attend_backward(static, *inputs, *known, *counted), *_no_bias(call)


def _run_backward(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
    call = _Call(*static)
    qkv, bias, (out, log_sum, grad, *more) = _parted(call, tensors)
    result: tuple[Tensor, ...] = torch.ops.zero_fn.block_sparse_attention_backward(
        grad,
        more[0] if more else None,
        *qkv,
        bias,
        out,
        log_sum,
        call.layout,
        call.causal,
        call.scale,
    )
    return result


def _second(
    static: Static, inputs: Sequence[Tensor], results: Sequence[Tensor], grads: Sequence[Tensor]
) -> Gradients:
    call = _Call(*static)
    qkv, bias, (_, _, *first) = _parted(call, inputs)
    extra = [] if bias is None else [bias]
    dq, dk, dv, *rest = _attend_double_backward(static, *qkv, *extra, *first, *grads)
    return dq, dk, dv, *_no_bias(call), None, None, *rest


def _run_double_backward(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
    call = _Call(*static)
    qkv, bias, rest = _parted(call, tensors)
    found = torch.ops.zero_fn.block_sparse_attention_double_backward(
        rest[-3:],
        rest[0],
        rest[1] if call.with_log_sum else None,
        *qkv,
        bias,
        call.layout,
        call.causal,
        call.scale,
    )
    return tuple(found)


def _parted(
    call: _Call, tensors: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Tensor | None, Sequence[Tensor]]:
    """q, k and v, the bias or None, and what follows."""
    rest = tensors[4:] if call.with_bias else tensors[3:]
    return tensors[:3], tensors[3] if call.with_bias else None, rest


def _no_bias(call: _Call) -> list[None]:
    return [None] if call.with_bias else []


def _batch(call: Run) -> Batch:
    """The mapped dimension joins the batch."""

    def rule(static: Static, in_dims: InDims, size: int, *tensors: Tensor) -> Any:
        bias = 3 if _Call(*static).with_bias else None
        rows = []
        for place, (x, dim) in enumerate(zip(tensors, in_dims, strict=True)):
            if place == bias and dim is None and x.shape[0] == 1:
                rows.append(x)
                continue
            x = leading(x, dim, size)
            if place == bias and x.shape[1] == 1:
                # q is the first, and has the whole batch
                x = x.expand(-1, _batch_of(tensors[0], in_dims[0]), -1, -1, -1)
            rows.append(x.flatten(0, 1))
        outs = call(static, *rows)
        return tuple(x.unflatten(0, (size, len(x) // size)) for x in outs), (0,) * len(outs)

    return rule


def _batch_of(q: Tensor, dim: int | None) -> int:
    return q.shape[0 if dim != 0 else 1]


def _keep(static: Static) -> Layout:
    return find(_Call(*static).layout)


_attend = differentiable(_run, None, _batch, _first, _keep)
_attend_backward = differentiable(_run_backward, None, _batch, _second, _keep)
_attend_double_backward = differentiable(_run_double_backward, None, _batch, None, _keep)
