"""The one differentiable Function behind all collectives.

It is an ``autograd.Function``, because torch's own collectives raise under ``torch.func.grad`` and
have a silent zero tangent under ``jvp``. Its ``forward`` is what a process does, its ``vmap`` rule
what the simulation does; ``transport.py`` has both. Which vmap level is the axis' own is told by
the axis' token, an input that is batched at that level and at no other. No other room moves data
between ranks.
"""

from typing import Any

import torch

from .mesh import bound_axis
from .transport import PROCESS, Static, Wire, current_wire, sent, simulate
from .tree import Tensor

_TRANSPOSE = {
    "psum": "pvary",
    "pvary": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "all_gather_invariant": "pscatter",
    "pscatter": "all_gather_invariant",
    "ppermute": "ppermute",
    "all_to_all": "all_to_all",
}


def apply(kind: str, x: Tensor, name: str, static: Static) -> Tensor:
    axis = bound_axis(name)
    if axis.size == 1:
        return _alone(kind, x, static)
    place = axis.size, axis.place, axis.group
    return _call(x, axis.token, kind, name, *place, static, current_wire())


def _alone(kind: str, x: Tensor, static: Static) -> Tensor:
    """Each collective over an axis of size 1: the value itself."""
    if kind == "ppermute" and not static:
        return torch.zeros_like(x)
    return x.clone() if kind == "pscatter" else x


def register_with_dynamo() -> None:
    """Make torch.compile leave the collectives as they are.

    Over torch.func it would otherwise drop a Function's backward and vmap rule without a word.
    ``spmd`` calls this before any collective can run; at import it would cost a second.
    """
    for function in (_call, invariant):
        torch.compiler.allow_in_graph(function)


def _call(
    x: Tensor,
    token: Tensor | None,
    kind: str,
    name: str,
    size: int,
    place: int,
    group: str,
    static: Static,
    wire: Wire,
) -> Tensor:
    return _Collective.apply(x, token, kind, name, size, place, group, static, wire)


def invariant(x: Tensor, token: Tensor | None, size: int, message: str | None) -> Tensor:
    return _Invariant.apply(x, token, size, message)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        token: Tensor | None,
        kind: str,
        name: str,
        size: int,
        place: int,
        group: str,
        static: Static,
        wire: Wire,
    ) -> Tensor:
        if token is not None:
            raise RuntimeError(f"{kind} over {name!r}: a simulated axis outlived its spmd call")
        return PROCESS[kind](sent(x, kind, wire), size, place, group, static).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, token, *ctx.rest = inputs
        ctx.save_for_backward(token)
        ctx.save_for_forward(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        kind, name, size, place, group, static, wire = ctx.rest
        # Incoming gradients can have stride 0, which no wire takes.
        grad, static = grad.contiguous(), _transposed(kind, static)
        place = size, place, group
        grad = _call(grad, token, _TRANSPOSE[kind], name, *place, static, wire[::-1])
        return grad, None, None, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (token,) = ctx.saved_tensors
        return _call(tangent, token, *ctx.rest)  # linear

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        token: Tensor | None,
        kind: str,
        name: str,
        size: int,
        place: int,
        group: str,
        static: Static,
        wire: Wire,
    ) -> tuple[Tensor, int | None]:
        batched = in_dims[0]
        if in_dims[1] is None:
            # Another level, such as a sweep around the step: the batch rides along as last
            # dimension, where it does not shift the others.
            assert batched is not None
            x = x.movedim(batched, -1)
            return _call(x, token, kind, name, size, place, group, static, wire), -1
        result, batched = simulate(kind, name, sent(x, kind, wire), batched, size, static)
        return result.to(x.dtype), batched


class _Invariant(torch.autograd.Function):
    """In the simulation: refuse what varies, with a message; without a message take rank 0's."""

    @staticmethod
    def forward(x: Tensor, token: Tensor | None, size: int, message: str | None) -> Tensor:
        raise RuntimeError("a simulated axis outlived its spmd call")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("what leaves a rank's program is not differentiated inside of it")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        token: Tensor | None,
        size: int,
        message: str | None,
    ) -> tuple[Tensor, int | None]:
        batched = in_dims[0]
        if in_dims[1] is None:
            assert batched is not None
            return invariant(x.movedim(batched, 0), token, size, message), 0
        if message is None:
            return (x.view_as(x) if batched is None else x.select(batched, 0)), None
        if batched is not None:
            raise ValueError(message)
        return x.expand(size, *x.shape), 0


def _transposed(kind: str, static: Static) -> Static:
    if kind == "ppermute":
        pairs = zip(static[::2], static[1::2], strict=True)
        return tuple(rank for source, target in pairs for rank in (target, source))
    return static[::-1] if kind == "all_to_all" else static
