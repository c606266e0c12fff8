"""Fused Adam and AdamW: one op for a whole tree of leaves.

Two ops of the same arguments. ``zero_fn::adamw`` returns updates (to be added to the parameters)
and new moments; ``zero_fn::adamw_`` writes parameters and moments in place. A graph pass may turn
the first into the second where the old state is free. ``zero_fn::adamw_mixed_`` is in place too,
and also fills a working copy of another dtype, or rounds bfloat16 parameters by chance.
What runs is in ``adam_run.py``; this file says how it is called, batched and differentiated.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .adam_run import Leaf, Rest, formula, in_place, pure
from .ops import Batch, InDims, Run, Static, differentiable, leading

_ARGUMENTS = (
    "({0} params, Tensor[] grads, {1} exp_avgs, {2} exp_avg_sqs, {3}Tensor step, Tensor lr, "
    "float beta1, float beta2, float eps, float[] weight_decay, bool decoupled, "
    "Tensor? grad_scale, Tensor? skip) -> {4}"
)


def _adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return pure((params, grads, exp_avgs, exp_avg_sqs), Rest(*rest))


def _adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *rest: Any,
) -> None:
    in_place((params, grads, exp_avgs, exp_avg_sqs), Rest(*rest))


def _adamw_mixed_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    seed: Tensor | None,
    *rest: Any,
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    in_place(lists, Rest(*rest), copies if copies else None, seed)


_functional = torch.library.custom_op(
    "zero_fn::adamw",
    _adamw,
    mutates_args=(),
    schema=_ARGUMENTS.format("Tensor[]", "Tensor[]", "Tensor[]", "", "Tensor[]"),
)
_in_place = torch.library.custom_op(
    "zero_fn::adamw_",
    _adamw_,
    mutates_args=("params", "exp_avgs", "exp_avg_sqs"),
    schema=_ARGUMENTS.format("Tensor(a!)[]", "Tensor(b!)[]", "Tensor(c!)[]", "", "()"),
)
_mixed = torch.library.custom_op(
    "zero_fn::adamw_mixed_",
    _adamw_mixed_,
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "copies"),
    schema=_ARGUMENTS.format(
        "Tensor(a!)[]", "Tensor(b!)[]", "Tensor(c!)[]", "Tensor(d!)[] copies, Tensor? seed, ", "()"
    ),
)


@_functional.register_fake
def _(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (*params, *exp_avgs, *exp_avg_sqs)
    ]


@_in_place.register_fake
@_mixed.register_fake
def _(*arguments: Any) -> None:
    pass


class _Call(NamedTuple):
    """The constants of a call; the tensors follow as params, grads, moments, step, lr, extras."""

    leaves: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: tuple[float, ...]
    decoupled: bool
    scaled: bool
    skippable: bool


def _parted(call: _Call, tensors: Sequence[Any]) -> tuple[list[list[Any]], Rest]:
    """The flat tensors of a call (or anything in their places) as an op's arguments."""
    n = call.leaves
    lists = [list(tensors[place * n : (place + 1) * n]) for place in range(4)]
    step, lr, *extras = tensors[4 * n :]
    scale = extras.pop(0) if call.scaled else None
    skip = extras.pop(0) if call.skippable else None
    constants = (call.beta1, call.beta2, call.eps, list(call.weight_decay), call.decoupled)
    return lists, Rest(step, lr, *constants, scale, skip)


def _run(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
    lists, rest = _parted(_Call(*static), tensors)
    return tuple(torch.ops.zero_fn.adamw(*lists, *rest))


def _reference(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
    lists, rest = _parted(_Call(*static), tensors)
    leaves = zip(rest.weight_decay, *lists, strict=True)
    new = [formula(Leaf(i, decay, *leaf), rest) for i, (decay, *leaf) in enumerate(leaves)]
    return tuple(leaf[place] for place in range(3) for leaf in new)


def _batch(call: Run) -> Batch:
    def rule(static: Static, in_dims: InDims, size: int, *tensors: Tensor) -> Any:
        given = _Call(*static)
        n = given.leaves
        if any(dim is not None for dim in in_dims[4 * n :]):
            # A sweep over learning rates, say: each has its own factors.
            mapped = torch.func.vmap(lambda *inner: _reference(static, *inner), tuple(in_dims))(
                *tensors
            )
            return mapped, (0,) * (3 * n)
        dims, rows = list(in_dims), list(tensors)
        batched = []
        for leaf in range(n):
            places = range(leaf, 4 * n, n)
            batched.append(any(in_dims[place] is not None for place in places))
            if batched[leaf]:
                for place in places:
                    rows[place] = leading(tensors[place], dims[place], size)
        return call(static, *rows), tuple(0 if batched[i % n] else None for i in range(3 * n))

    return rule


_differentiable = differentiable(_run, _reference, _batch)


def fused_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    lr: float | Tensor,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Sequence[float] = 0.0,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """One step of AdamW (arXiv 1711.05101, algorithm 2) for a list of leaves, as pure function.

    Args:
        params: the parameters, any shapes.
        grads: their gradients.
        exp_avgs: the running means of gradients.
        exp_avg_sqs: the running means of their squares.
        step: the number of this step, counted from 1; 0-dim.
        lr: the learning rate; a number or 0-dim.
        beta1: decay of the means of gradients.
        beta2: decay of the means of squares.
        eps: added outside the root.
        weight_decay: one factor, or one for each leaf.
        decoupled: whether decay is AdamW's, or joins the gradient as in Adam.
        grad_scale: what the gradients are divided by; 0-dim.
        skip: nonzero leaves everything as it is (updates are 0); 0-dim.

    Returns:
        The updates, to be added to the parameters, and the new moments, each a list.

    Raises:
        ValueError: if the lists differ in length, a leaf's tensors differ in shape or are not real
            floating-point numbers, or one of the 0-dim tensors is not.
    """
    lists, rest = _checked(
        (params, grads, exp_avgs, exp_avg_sqs), step, lr, weight_decay, grad_scale, skip
    )
    if not params:
        return [], [], []
    static = tuple(
        _Call(
            len(params),
            beta1,
            beta2,
            eps,
            rest.weight_decay,
            decoupled,
            grad_scale is not None,
            skip is not None,
        )
    )
    extras = [x for x in (grad_scale, skip) if x is not None]
    out = _differentiable(static, *[x for four in lists for x in four], step, rest.lr, *extras)
    n = len(params)
    return list(out[:n]), list(out[n : 2 * n]), list(out[2 * n :])


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    lr: float | Tensor,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Sequence[float] = 0.0,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
    seed: Tensor | None = None,
) -> None:
    """The same in place: parameters and moments are overwritten, nothing can be differentiated.

    The arguments are those of :func:`fused_adamw`, and:

    Args:
        copies: tensors of the parameters' shapes, of any dtype, that receive the new parameters in
            the same pass over memory: the bfloat16 working copy of float32 parameters.
        seed: a 0-dim int64 tensor, another one each step. bfloat16 parameters are then rounded up
            or down by chance, so that updates below half a digit are not lost but come through on
            average (arXiv 2010.06192, section 3).

    Raises:
        RuntimeError: if a tensor is being differentiated by, in either mode.
        ValueError: as :func:`fused_adamw`; for copies of other shapes, a seed that is not a
            0-dim int64 tensor, or a seed with float16 parameters.
    """
    lists, rest = _checked(
        (params, grads, exp_avgs, exp_avg_sqs), step, lr, weight_decay, grad_scale, skip
    )
    _refuse_derivatives([*[x for four in lists for x in four], *(copies or []), rest.lr])
    decays = list(rest.weight_decay)
    constants = (beta1, beta2, eps, decays, decoupled, grad_scale, skip)
    if copies is None and seed is None:
        torch.ops.zero_fn.adamw_(*lists, step, rest.lr, *constants)
        return
    if copies is not None:
        shapes = [tuple(x.shape) for x in copies], [tuple(x.shape) for x in params]
        if shapes[0] != shapes[1]:
            raise ValueError(f"copies have shapes {shapes[0]}, the parameters {shapes[1]}")
    if seed is not None:
        if seed.ndim or seed.dtype != torch.int64:
            raise ValueError(
                f"seed is a {seed.dtype} tensor of shape {tuple(seed.shape)}; write "
                "torch.tensor(number), or torch.randint(2**62, ())"
            )
        for place, p in enumerate(params):
            if p.dtype == torch.float16:
                raise ValueError(
                    f"leaf {place}: its parameter is float16, which is not rounded by chance; "
                    "leave seed out or use bfloat16"
                )
    torch.ops.zero_fn.adamw_mixed_(*lists, list(copies or []), seed, step, rest.lr, *constants)


# allow_in_graph: torch.compile over torch.func.jvp would not see the tangents.
@torch.compiler.allow_in_graph
def _refuse_derivatives(tensors: Sequence[Tensor]) -> None:
    """An op in place would cut the graph of a reverse-mode derivative, and have no tangent."""
    cure = "an update in place has no derivative: use fused_adamw, or call it"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(f"a tensor requires grad; {cure} under torch.no_grad()")
    dual = forward_ad._current_level >= 0
    if dual and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"a tensor has a forward-mode tangent (jvp); {cure} outside of jvp")


class _Checked(NamedTuple):
    lr: Tensor
    weight_decay: tuple[float, ...]


def _checked(
    lists: tuple[Sequence[Tensor], ...],
    step: Tensor,
    lr: float | Tensor,
    weight_decay: float | Sequence[float],
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> tuple[list[list[Tensor]], _Checked]:
    lengths = [len(one) for one in lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"params, grads and the two moments have {lengths} leaves")
    for place, leaf in enumerate(zip(*lists, strict=True)):
        shapes = [tuple(x.shape) for x in leaf]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"leaf {place}: parameter, gradient and moments have shapes {shapes}; they must "
                "be equal"
            )
        dtypes = [x.dtype for x in leaf]
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(
                f"leaf {place}: parameter, gradient and moments are {dtypes}; all must be real "
                "floating-point tensors: leave other leaves out of the tree"
            )
    if isinstance(weight_decay, int | float):
        decays = (float(weight_decay),) * lengths[0]
    else:
        decays = tuple(map(float, weight_decay))
    if len(decays) != lengths[0]:
        raise ValueError(f"weight_decay has {len(decays)} factors for {lengths[0]} leaves")
    for name, x in (("step", step), ("lr", lr), ("grad_scale", grad_scale), ("skip", skip)):
        if isinstance(x, Tensor) and x.ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it is a number: x.reshape(())")
    rate = lr if isinstance(lr, Tensor) else torch.full_like(step, lr, dtype=torch.float64)
    return [list(one) for one in lists], _Checked(rate, decays)
