"""How one step of Adam runs on a list of leaves: which kernel takes which leaf.

On a GPU the Triton kernel takes all leaves in one launch. On a CPU torch's own fused kernel takes
all leaves of one dtype and decay in one call, at the speed of memory. The plain formula takes what
neither does (float64 on a GPU, moments of another dtype than the parameter on a CPU).
"""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import adamw_leaf, philox_bits, round_by_chance

PIECE = 1 << 18  # elements that go through a cache-sized temporary at once, on a CPU
_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)


class Rest(NamedTuple):
    """The arguments of the ops after the four lists of leaves."""

    step: Tensor
    lr: Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: Sequence[float]
    decoupled: bool
    grad_scale: Tensor | None
    skip: Tensor | None


class Leaf(NamedTuple):
    number: int
    decay: float
    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.p, self.m, self.v


def pure(lists: Sequence[Sequence[Tensor]], rest: Rest) -> list[Tensor]:
    """Updates, new first moments and new second moments, in new memory, one list."""
    new: list[Any] = []
    on_gpu = []
    for leaf in _leaves(lists, rest):
        if _triton_takes(leaf):
            new.append(tuple(torch.empty_like(x, memory_format=_DENSE) for x in leaf.state))
            on_gpu.append(leaf)
        elif _torch_takes(leaf):
            new.append(_pure_fused(leaf, rest))
        else:
            new.append(formula(leaf, rest))
    if on_gpu:
        from . import adam_triton

        rows = [
            adam_triton.Row(
                leaf.number,
                leaf.decay,
                (
                    leaf.p.contiguous(),
                    leaf.g.contiguous(),
                    leaf.m.contiguous(),
                    leaf.v.contiguous(),
                ),
                new[leaf.number],
                None,
            )
            for leaf in on_gpu
        ]
        adam_triton.launch(rows, _settings(rest, None), pure=True)
    return [leaf[part] for part in range(3) for leaf in new]


def in_place(
    lists: Sequence[Sequence[Tensor]],
    rest: Rest,
    copies: Sequence[Tensor] | None = None,
    seed: Tensor | None = None,
) -> None:
    """Overwrite parameters and moments, and fill ``copies`` with the new parameters.

    With a seed, bfloat16 parameters are rounded up or down by chance.
    """
    on_gpu: list[Leaf] = []
    together: dict[Any, list[Leaf]] = {}
    alone: list[Leaf] = []
    for leaf in _leaves(lists, rest):
        by_chance = seed is not None and leaf.p.dtype == torch.bfloat16
        if _triton_takes(leaf):
            on_gpu.append(leaf)
            continue
        if not _torch_takes(leaf) or by_chance or not all(x.is_contiguous() for x in leaf.state):
            _by_formula_(leaf, rest, seed if by_chance else None)
        elif _skipped(rest):
            pass
        elif leaf.g.dtype == leaf.p.dtype and leaf.g.is_contiguous() and rest.grad_scale is None:
            together.setdefault((leaf.p.dtype, leaf.decay), []).append(leaf)
        else:
            alone.append(leaf)
    for (_, decay), group in together.items():
        fused_([[x.p for x in group], [x.g for x in group], [x.m for x in group],
                [x.v for x in group]], decay, rest)  # fmt: skip
    for leaf in alone:
        for p, g, m, v in _pieces(leaf.p, leaf.g.reshape(-1), leaf.m, leaf.v):
            fused_([[p], [_ready(g, p, rest)], [m], [v]], leaf.decay, rest)
    if on_gpu:
        _in_place_on_gpu(on_gpu, rest, copies, seed)
    if copies is not None:
        done = {leaf.number for leaf in on_gpu}
        for number, (copy, p) in enumerate(zip(copies, lists[0], strict=True)):
            if number not in done:
                copy.copy_(p)


def _in_place_on_gpu(
    leaves: Sequence[Leaf], rest: Rest, copies: Sequence[Tensor] | None, seed: Tensor | None
) -> None:
    from . import adam_triton

    rows, odd = [], []
    for leaf in leaves:
        given = [*leaf.state, *([] if copies is None else [copies[leaf.number]])]
        dense = [x.contiguous() for x in given]  # the same tensors, most often
        odd += [(x, y) for x, y in zip(given, dense, strict=True) if x is not y]
        p, m, v, *copy = dense
        rows.append(
            adam_triton.Row(
                leaf.number,
                leaf.decay,
                (p, leaf.g.contiguous(), m, v),
                (p, m, v),
                copy[0] if copy else None,
            )
        )
    adam_triton.launch(rows, _settings(rest, seed), pure=False)
    for x, dense_x in odd:
        x.copy_(dense_x)


def _settings(rest: Rest, seed: Tensor | None) -> Any:
    from . import adam_triton

    step, lr, beta1, beta2, eps, _, decoupled, scale, skip = rest
    return adam_triton.Settings(step, lr, beta1, beta2, eps, decoupled, scale, skip, seed)


_DENSE = torch.contiguous_format


def _leaves(lists: Sequence[Sequence[Tensor]], rest: Rest) -> Iterator[Leaf]:
    for number, (decay, *leaf) in enumerate(zip(rest.weight_decay, *lists, strict=True)):
        yield Leaf(number, decay, *leaf)


def _triton_takes(leaf: Leaf) -> bool:
    tensors = (leaf.p, leaf.g, leaf.m, leaf.v)
    on_gpu = all(x.device.type == "cuda" and x.dtype in _ON_GPU for x in tensors)
    return on_gpu and _triton_is_here()


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def _torch_takes(leaf: Leaf) -> bool:
    """Whether torch's fused kernel for CPUs does: it wants one dtype, and fails on empty lists."""
    p, m, v = leaf.state
    return p.device.type == "cpu" and p.dtype == m.dtype == v.dtype and p.numel() > 0


def _skipped(rest: Rest) -> bool:
    return rest.skip is not None and bool(rest.skip)


def _pure_fused(leaf: Leaf, rest: Rest) -> tuple[Tensor, ...]:
    """Adam's step from a parameter of zero is the update itself; the decay needs the parameter.

    In pieces, so that what is zeroed and copied is still in the cache when the kernel reads it.
    """
    new = tuple(torch.empty_like(x, memory_format=_DENSE) for x in leaf.state)
    old = (leaf.p.reshape(-1), leaf.g.reshape(-1), leaf.m.reshape(-1), leaf.v.reshape(-1))
    for p, g, m, v, update, new_m, new_v in _pieces(*old, *new):
        update.zero_()
        new_m.copy_(m)
        new_v.copy_(v)
        if _skipped(rest):
            continue
        ready = _ready(g, p, rest)
        if leaf.decay and not rest.decoupled:
            ready = ready + leaf.decay * p
        fused_([[update], [ready], [new_m], [new_v]], 0.0, rest)
        if leaf.decay and rest.decoupled:
            update.sub_(p, alpha=rest.lr.item() * leaf.decay)
    return new


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat views of equal parts of contiguous tensors."""
    return zip(*[x.view(-1).split(PIECE) for x in tensors], strict=True)


def _ready(g: Tensor, p: Tensor, rest: Rest) -> Tensor:
    """The gradient as the fused kernel wants it: in the state's dtype, unscaled, not stride 0."""
    g = g.to(p.dtype).contiguous()
    return g if rest.grad_scale is None else g / rest.grad_scale.to(p.device, p.dtype)


def fused_(lists: list[list[Tensor]], decay: float, rest: Rest) -> None:
    """torch's fused kernel. It writes unscaled gradients back, and so is never given a scale."""
    kernel: Any = torch._fused_adamw_ if rest.decoupled else torch._fused_adam_
    kernel(
        *lists,
        [],
        [rest.step.to("cpu", torch.float32)] * len(lists[0]),
        lr=rest.lr.to("cpu"),
        beta1=rest.beta1,
        beta2=rest.beta2,
        weight_decay=decay,
        eps=rest.eps,
        amsgrad=False,
        maximize=False,
    )


def formula(leaf: Leaf, rest: Rest) -> tuple[Tensor, Tensor, Tensor]:
    step, lr, beta1, beta2, eps, _, decoupled, scale, skip = rest
    _, decay, p, g, m, v = leaf
    return adamw_leaf(p, g, m, v, step, lr, beta1, beta2, eps, decay, decoupled, scale, skip)


def _by_formula_(leaf: Leaf, rest: Rest, seed: Tensor | None) -> None:
    p = leaf.p.to(torch.promote_types(leaf.p.dtype, torch.float32))
    update, m, v = formula(leaf._replace(p=p), rest)
    new = p + update
    if seed is not None:
        new = round_by_chance(new, philox_bits(seed, leaf.number, new.shape))
    leaf.p.copy_(new)
    leaf.m.copy_(m)
    leaf.v.copy_(v)
