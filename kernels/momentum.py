"""Momenta that travel in one bit a value, in as few passes over memory as there can be.

On a CPU a temporary of the model's size costs more than the arithmetic on it: the system hands out
its pages one by one. So nothing of that size is made here. What is encoded, the error plus the
moved momentum, is computed where it is encoded (``pack_momentum``), and once more where the codes
have met and the error is renewed (``rest_of_momentum``); likewise the average that a rank owns
(``pack_average``, ``rest_of_average``). An op that renews a state has a twin in place, by the same
name with ``_``, which a graph pass takes where the old state is free.

``momentum_run.py`` has the ops. None has a derivative but ``precondition``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .momentum_run import ops, updates
from .ops import Batch, InDims, Run, Static, differentiable


def pack_momentum(
    grads: Sequence[Tensor], mu: Tensor | None, error: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """The signs and scales of ``error + beta mu + (1 - beta) g``, or of ``error + g``.

    Args:
        grads: leaves of any shapes, which lie in the bucket in turn, each padded with zeros to
            whole blocks of 1024.
        mu: (n,), the momentum as a bucket; None: what travels is the gradient.
        error: (n,), float32 or float64; what was left over the last time.
        beta: the momentum's decay.

    Returns:
        bits (n / 8,) uint8 and scales (n / 1024,), as of :func:`sign_pack`.
    """
    bits, scales = _pack_momentum((len(grads), beta), *grads, error, *_given(mu))
    return bits, scales


def rest_of_momentum(
    grads: Sequence[Tensor],
    mu: Tensor | None,
    error: Tensor,
    beta: float,
    bits: Tensor,
    scales: Tensor,
    finite: Tensor,
) -> Tensor:
    """What :func:`pack_momentum` leaves over, (n,); ``error`` where ``finite``, 0-dim, is False."""
    (rest,) = _rest_of_momentum(
        (len(grads), beta), *grads, error, bits, scales, finite, *_given(mu)
    )
    return rest


def pack_average(
    bits: Tensor, scales: Tensor, owned: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The signs and scales of ``owned`` plus the mean of what the codes of several ranks say.

    Args:
        bits: (ranks, n / 8) uint8.
        scales: (ranks, n / 1024).
        owned: (n,): what was left over the last time.
        counts: (n / 1024,) int32: how many of each block's first values are real.

    Returns:
        bits (n / 8,) and scales (n / 1024,).
    """
    new = _pack_average((), bits, scales, owned, counts)
    return new[0], new[1]


def rest_of_average(
    bits: Tensor,
    scales: Tensor,
    owned: Tensor,
    counts: Tensor,
    own_bits: Tensor,
    own_scales: Tensor,
    finite: Tensor,
) -> Tensor:
    """What :func:`pack_average` leaves over, (n,); ``owned`` where ``finite`` is False."""
    return _rest_of_average((), bits, scales, owned, counts, own_bits, own_scales, finite)[0]


def unpack_if(finite: Tensor, bits: Tensor, scales: Tensor, old: Tensor) -> Tensor:
    """What the codes say, like ``old`` (n,); ``old`` itself where ``finite``, 0-dim, is False."""
    return _unpack_if((), finite, bits, scales, old)[0]


def precondition(
    params: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    rate: Tensor,
    unbias1: Tensor,
    unbias2: Tensor,
    eps: float,
    weight_decay: Sequence[float],
) -> list[Tensor]:
    """Adam's updates by means that are there: -rate (m / (sqrt(v) + eps) + decay p), leaf by leaf.

    Args:
        params: the parameters, any shapes.
        mu: the means of the gradients, of the same shapes; m = mu / unbias1.
        nu: the means of their squares; v = nu / unbias2. Where it is 0 no gradient ever came, and
            the quotient is 0.
        rate: the learning rate, 0-dim.
        unbias1: 0-dim.
        unbias2: 0-dim.
        eps: added outside the root.
        weight_decay: a factor for each leaf.

    Returns:
        What is added to the parameters, in their dtypes.
    """
    if not params:
        return []
    static = (len(params), eps, tuple(map(float, weight_decay)))
    return list(_precondition(static, *params, *mu, *nu, rate, unbias1, unbias2))


def _given(mu: Tensor | None) -> tuple[Tensor, ...]:
    return () if mu is None else (mu,)


# How they are called and batched: a mapped dimension is that of ranks, and each has its own call.


def _each(results: int) -> Callable[[Run], Batch]:
    def batch(call: Run) -> Batch:
        def rule(static: Static, in_dims: InDims, size: int, *xs: Tensor) -> Any:
            calls = [call(static, *_selected(xs, in_dims, number)) for number in range(size)]
            return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * results

        return rule

    return batch


def _selected(xs: Sequence[Tensor], in_dims: InDims, number: int) -> list[Tensor]:
    pairs = zip(xs, in_dims, strict=True)
    return [x if dim is None else x.select(dim, number).contiguous() for x, dim in pairs]


def _parted(static: Static, xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Gradients, the other tensors, and the momentum, from a call's flat tensors."""
    leaves, _ = static
    grads, others = list(xs[:leaves]), list(xs[leaves:])
    given = len(others) in (2, 5)
    mu = others.pop() if given else None
    return grads, mu, others


def _run_pack_momentum(static: Static, *xs: Tensor) -> tuple[Tensor, ...]:
    grads, mu, (error,) = _parted(static, xs)
    return ops.pack_momentum(grads, mu, error, static[1])


def _run_rest_of_momentum(static: Static, *xs: Tensor) -> tuple[Tensor, ...]:
    grads, mu, (error, bits, scales, finite) = _parted(static, xs)
    return (ops.rest_of_momentum(grads, mu, error, static[1], bits, scales, finite),)


def _lists(static: Static, xs: Sequence[Any]) -> tuple[list[list[Any]], Sequence[Any]]:
    n = static[0]
    return [list(xs[i * n : (i + 1) * n]) for i in range(3)], xs[3 * n :]


def _run_precondition(static: Static, *xs: Tensor) -> tuple[Tensor, ...]:
    lists, numbers = _lists(static, xs)
    return tuple(ops.precondition(*lists, *numbers, static[1], list(static[2])))


def _precondition_formula(static: Static, *xs: Tensor) -> tuple[Tensor, ...]:
    lists, (rate, unbias1, unbias2) = _lists(static, xs)
    return tuple(updates(lists, rate, unbias1, unbias2, static[1], static[2]))


def _batch_precondition(call: Run) -> Batch:
    """Leaves that no rank has of its own stay the same for all of them."""

    def rule(static: Static, in_dims: InDims, size: int, *xs: Tensor) -> Any:
        n, eps, decays = static
        lists, numbers = _lists(static, xs)
        dims, of_numbers = _lists(static, in_dims)
        mapped = [
            any(d is not None for d in (*leaf, *of_numbers)) for leaf in zip(*dims, strict=True)
        ]
        results: list[Any] = [None] * n
        for own in (True, False):
            places = [i for i in range(n) if mapped[i] == own]
            if not places:
                continue
            part = (len(places), eps, tuple(decays[i] for i in places))
            given = [*[x[i] for x in lists for i in places], *numbers]
            if own:
                given_dims = [*[d[i] for d in dims for i in places], *of_numbers]
                found, _ = _each(len(places))(call)(part, given_dims, size, *given)
            else:
                found = call(part, *given)
            for i, x in zip(places, found, strict=True):
                results[i] = x
        return tuple(results), tuple(0 if own else None for own in mapped)

    return rule


_pack_momentum = differentiable(_run_pack_momentum, None, _each(2))
_rest_of_momentum = differentiable(_run_rest_of_momentum, None, _each(1))
_pack_average = differentiable(lambda static, *xs: ops.pack_average(*xs), None, _each(2))
_rest_of_average = differentiable(lambda static, *xs: (ops.rest_of_average(*xs),), None, _each(1))
_unpack_if = differentiable(lambda static, *xs: (ops.unpack_if(*xs),), None, _each(1))
_precondition = differentiable(_run_precondition, _precondition_formula, _batch_precondition)
