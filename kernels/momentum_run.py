"""The ops behind ``momentum.py``: C on a CPU, and the same in torch.

The C is compiled when it is first used. Torch takes what it does not: other devices, float64, and
machines without a compiler.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import momentum_native as native
from . import sign_packing
from .sign_packing import BLOCK

ops = torch.ops.zero_fn

# The same in torch.


def _total(
    grads: Sequence[Tensor], mu: Tensor | None, error: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """What is encoded, and how many values of each block are real."""
    total, counts = error.clone(), torch.zeros(len(error) // BLOCK, dtype=torch.int32)
    start = 0
    for g in grads:
        n, end = g.numel(), start + g.numel()
        x = g.reshape(-1).to(error.dtype)
        total[start:end] += x if mu is None else beta * mu[start:end] + (1 - beta) * x
        blocks = -(-n // BLOCK)
        first = start // BLOCK
        if blocks:
            counts[first : first + blocks] = BLOCK
            counts[first + blocks - 1] = n - (blocks - 1) * BLOCK
        start += blocks * BLOCK
    return total, counts.to(error.device)


def _pack(total: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    bits, scales, _ = ops.sign_pack(total, torch.zeros_like(total), counts, BLOCK)
    return bits, scales


def _rest(total: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> Tensor:
    real = torch.arange(BLOCK, device=total.device) < counts.unsqueeze(1)
    rest = (total - ops.sign_unpack(bits, scales)).view(-1, BLOCK)
    return torch.where(real, rest, 0).view(-1)


def _average(bits: Tensor, scales: Tensor, owned: Tensor) -> Tensor:
    return owned + ops.sign_unpack(bits, scales).mean(0)


def updates(
    lists: Sequence[Sequence[Tensor]],
    rate: Tensor,
    unbias1: Tensor,
    unbias2: Tensor,
    eps: float,
    decays: Sequence[float],
) -> list[Tensor]:
    found = []
    for p, m, v, decay in zip(*lists, decays, strict=True):
        root = (v / unbias2.to(v.dtype)).sqrt() + eps
        direction = torch.where(v > 0, m / unbias1.to(m.dtype) / root, 0).to(p.dtype)
        found.append(-rate.to(p.dtype) * (direction + decay * p))
    return found


# What runs.


def _dense(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype).contiguous() for x in xs]


@torch.library.custom_op("zero_fn::pack_momentum", mutates_args=())
def _pack_momentum_op(
    grads: Sequence[Tensor], mu: Tensor | None, error: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    if not native.takes([error, *([] if mu is None else [mu])], BLOCK):
        return _pack(*_total(grads, mu, error, beta))
    bits = error.new_zeros(len(error) // 8, dtype=torch.uint8)
    scales = error.new_zeros(len(error) // BLOCK)
    given = (_dense(grads, error.dtype), mu, error, bits, scales)
    native.over_leaves("pack_momentum", *given, beta, BLOCK)
    return bits, scales


@_pack_momentum_op.register_fake
def _(
    grads: Sequence[Tensor], mu: Tensor | None, error: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    bits = error.new_empty(len(error) // 8, dtype=torch.uint8)
    return bits, error.new_empty(len(error) // BLOCK)


def _renew_error(
    grads: Sequence[Tensor],
    mu: Tensor | None,
    error: Tensor,
    beta: float,
    bits: Tensor,
    scales: Tensor,
    finite: Tensor,
) -> None:
    if native.takes([error, scales, *([] if mu is None else [mu])], BLOCK):
        if finite:
            given = (_dense(grads, error.dtype), mu, error, bits, scales)
            native.over_leaves("rest_of_momentum", *given, beta, BLOCK)
    else:
        rest = _rest(*_total(grads, mu, error, beta), bits, scales)
        error.copy_(torch.where(finite, rest, error))


def _renew_owned(
    bits: Tensor,
    scales: Tensor,
    owned: Tensor,
    counts: Tensor,
    own_bits: Tensor,
    own_scales: Tensor,
    finite: Tensor,
) -> None:
    if native.takes([scales, owned, own_scales], BLOCK):
        if finite:
            given = (bits, scales, owned, counts, own_bits, own_scales)
            native.over_blocks("rest_of_average", *given, BLOCK)
    else:
        rest = _rest(_average(bits, scales, owned), counts, own_bits, own_scales)
        owned.copy_(torch.where(finite, rest, owned))


@torch.library.custom_op("zero_fn::pack_average", mutates_args=())
def _pack_average_op(
    bits: Tensor, scales: Tensor, owned: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    if not native.takes([scales, owned], BLOCK):
        return _pack(_average(bits, scales, owned), counts)
    own_bits = bits.new_empty(bits.shape[1:])
    own_scales = scales.new_empty(scales.shape[1:])
    given = (bits, scales, owned, counts, own_bits, own_scales)
    native.over_blocks("pack_average", *given, BLOCK)
    return own_bits, own_scales


@_pack_average_op.register_fake
def _(bits: Tensor, scales: Tensor, owned: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return bits.new_empty(bits.shape[1:]), scales.new_empty(scales.shape[1:])


def _overwrite_if(finite: Tensor, bits: Tensor, scales: Tensor, old: Tensor) -> None:
    if old.device.type == "cpu":
        if finite:
            sign_packing.unpack_on_cpu(bits, scales, old)
    else:
        old.copy_(torch.where(finite, ops.sign_unpack(bits, scales), old))


_RENEWING: dict[str, tuple[Callable[..., None], str, str, int]] = {
    "rest_of_momentum": (
        _renew_error,
        "(Tensor[] grads, Tensor? mu, Tensor{0} error, float beta, Tensor bits, Tensor scales, "
        "Tensor finite) -> {1}",
        "error",
        2,
    ),
    "rest_of_average": (
        _renew_owned,
        "(Tensor bits, Tensor scales, Tensor{0} owned, Tensor counts, Tensor own_bits, "
        "Tensor own_scales, Tensor finite) -> {1}",
        "owned",
        2,
    ),
    "unpack_if": (
        _overwrite_if,
        "(Tensor finite, Tensor bits, Tensor scales, Tensor{0} old) -> {1}",
        "old",
        3,
    ),
}


def _register(name: str, renew: Callable[..., None], schema: str, state: str, place: int) -> None:
    """Two ops: ``name`` returns the new state, ``name_`` writes it over the old one."""

    def pure(*arguments: Any) -> Tensor:
        given = list(arguments)
        given[place] = given[place].clone(memory_format=torch.contiguous_format)
        renew(*given)
        return given[place]

    def like(*arguments: Any) -> Tensor:
        return torch.empty_like(arguments[place], memory_format=torch.contiguous_format)

    functional: Any = torch.library.custom_op(
        f"zero_fn::{name}", pure, mutates_args=(), schema=schema.format("", "Tensor")
    )
    functional.register_fake(like)
    in_place: Any = torch.library.custom_op(
        f"zero_fn::{name}_", renew, mutates_args=(state,), schema=schema.format("(a!)", "()")
    )
    in_place.register_fake(lambda *arguments: None)


for _name, _how in _RENEWING.items():
    _register(_name, *_how)


_PRECONDITION = (
    "(Tensor{0}[] params, Tensor[] mu, Tensor[] nu, Tensor rate, Tensor unbias1, Tensor unbias2, "
    "float eps, float[] weight_decay) -> {1}"
)


def _into(
    outs: Sequence[Tensor],
    whole: bool,
    lists: Sequence[Sequence[Tensor]],
    rate: Tensor,
    unbias1: Tensor,
    unbias2: Tensor,
    eps: float,
    decays: Sequence[float],
) -> None:
    """Fill ``outs`` with the new parameters if ``whole``, else with what is added to them."""
    plain: list[Any] = []
    quick: list[Any] = []
    for out, p, m, v, decay in zip(outs, *lists, decays, strict=True):
        takes = native.takes([p, m, v], BLOCK) and out.is_contiguous() and p.is_contiguous()
        (quick if takes else plain).append((p, m, v, out, decay))
    for p, m, v, out, decay in plain:
        (update,) = updates(([p], [m], [v]), rate, unbias1, unbias2, eps, [decay])
        out.copy_(p + update if whole else update)
    if quick:
        leaves = [(p, m.contiguous(), v.contiguous(), out, d) for p, m, v, out, d in quick]
        roots = 1 / unbias1.item(), 1 / math.sqrt(unbias2.item())
        native.precondition(leaves, rate.item(), *roots, eps, whole)


def _precondition_pure(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    outs = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in params]
    _into(outs, False, (params, mu, nu), *rest)
    return outs


def _precondition_in_place(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    *rest: Any,
) -> None:
    _into(params, True, (params, mu, nu), *rest)


_precondition_op = torch.library.custom_op(
    "zero_fn::precondition",
    _precondition_pure,
    mutates_args=(),
    schema=_PRECONDITION.format("", "Tensor[]"),
)
_precondition_in_place_op = torch.library.custom_op(
    "zero_fn::precondition_",
    _precondition_in_place,
    mutates_args=("params",),
    schema=_PRECONDITION.format("(a!)", "()"),
)


@_precondition_op.register_fake
def _(params: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(p, memory_format=torch.contiguous_format) for p in params]


@_precondition_in_place_op.register_fake
def _(*arguments: Any) -> None:
    pass
