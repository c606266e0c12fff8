"""Activations on the host: what a backward needs is moved there, and comes back when it is used.

torch's hooks for saved tensors do it, inside ``torch.func`` too, where torch itself refuses them:
with one derivative they see each saved value once, with the maps around it. With more they would
cut the others off, without a word; there the function runs as it is.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import _functorch
from torch._functorch.eager_transforms import grad_increment_nesting
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from . import tree
from .captures import captured, name_of
from .tree import Tensor

_autograd: Any = torch._C._autograd


def activation_offload(
    f: Callable[..., Any], *, stay: int | Sequence[int] = ()
) -> Callable[..., Any]:
    """The same function, what it saves for the backward on the host until the backward uses it.

    Where :func:`zero_fn.remat` computes again, this copies: to pinned memory from a GPU, on its
    stream; on a CPU to another buffer, so that a program is the same there. Around a ``remat`` it
    keeps only that function's arguments, on the host (DeepSpeed's ``cpu_checkpointing``).

    Args:
        f: takes and returns trees.
        stay: the places of the arguments that are alive anyway, parameters say: they and their
            views are kept as they are. So is what ``f`` captures.

    Returns:
        A function that computes what ``f`` does, bit for bit. Where it is not differentiated, or
        more than once (a Hessian, a forward derivative of a gradient), and under ``torch.compile``,
        it is ``f`` itself and moves nothing.

    Raises:
        TypeError: if ``stay`` holds no places.
        ValueError: at the call, if ``stay`` names no argument, or ``f`` takes a derivative itself.
    """
    places = (stay,) if isinstance(stay, int) else tuple(stay)
    if not all(isinstance(place, int) and place >= 0 for place in places):
        raise TypeError(f"stay is {stay!r}; it is an int or several, the places of arguments: 0")

    @functools.wraps(f)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        for place in places:
            if place >= len(args):
                raise ValueError(
                    f"activation_offload: stay names argument {place} of {name_of(f)!r}, which "
                    f"was given {len(args)}"
                )
        if torch.compiler.is_compiling():
            return f(*args, **kwargs)
        held = [x for _, x in captured(f)]
        if _derivatives([*tree.leaves((args, kwargs)), *held]) != 1:
            return f(*args, **kwargs)
        staying = [*held, *tree.leaves([args[place] for place in places])]
        with _hooks(_Moves(staying), name_of(f)):
            return f(*args, **kwargs)

    return offloaded


class _Kept:
    """A value on the host; several operations may have saved it."""

    __slots__ = ("__weakref__", "device", "host", "source")

    def __init__(self, x: Tensor, source: StorageWeakRef) -> None:
        self.device, self.source = x.device, source
        self.host = torch.ops.zero_fn.to_host(x)


class _Moves:
    """The two hooks of one call."""

    def __init__(self, staying: Sequence[Any]) -> None:
        self.staying = {
            _plain(x).untyped_storage()._cdata for x in staying if isinstance(x, Tensor)
        }
        self.kept: WeakValueDictionary[tuple[Any, ...], _Kept] = WeakValueDictionary()

    def pack(self, x: Tensor) -> Any:
        plain = _plain(x)
        storage = plain.untyped_storage()
        if storage._cdata in self.staying:
            return x
        how = plain.shape, plain.stride(), plain.storage_offset(), plain.dtype, plain._version
        key = (storage._cdata, *how, *_levels(x))
        kept = self.kept.get(key)
        if kept is None or kept.source.expired():
            kept = self.kept[key] = _Kept(x, StorageWeakRef(storage))
        return kept

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        back: Tensor = torch.ops.zero_fn.from_host(kept.host, kept.device)
        if not _functorch.is_batchedtensor(back):
            return back
        # After vjp has returned, what it saved is wrapped at a level that is gone. Autograd takes
        # mapped values so alone: bare, it would ask them for their `data`.
        with grad_increment_nesting() as level:
            return _functorch._wrap_for_grad(back, level)


@contextmanager
def _hooks(moves: _Moves, name: str) -> Iterator[None]:
    refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
    _autograd._saved_tensors_hooks_enable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(moves.pack, moves.unpack):
            yield
    except RuntimeError as error:
        if "saved tensor" not in str(error) or "hooks" not in str(error):
            raise
        raise ValueError(
            f"activation_offload: {name!r} takes a derivative itself; offload the activations of "
            "the function that it differentiates, inside the derivative"
        ) from error
    finally:
        if refused is not None:
            _autograd._saved_tensors_hooks_disable(refused, False)


def _derivatives(leaves: Sequence[Any]) -> int:
    """How many derivatives are being taken here."""
    levels = [_functorch.TransformType.Grad, _functorch.TransformType.Jvp]
    stack = _functorch.get_interpreter_stack() or []
    count = sum(level.key() in levels for level in stack)
    count += forward_ad._current_level >= 0
    return count + any(isinstance(x, Tensor) and _plain(x).requires_grad for x in leaves)


def _plain(x: Tensor) -> Tensor:
    """The tensor whose memory it is, below every transform."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def _levels(x: Tensor) -> Iterator[int]:
    """What tells two views by transforms of one tensor apart."""
    while _functorch.is_functorch_wrapped_tensor(x):
        yield _functorch.maybe_get_level(x)
        if _functorch.is_batchedtensor(x):
            yield _functorch.maybe_get_bdim(x)
        x = _functorch.get_unwrapped(x)


@torch.library.custom_op("zero_fn::to_host", mutates_args=())
def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x.clone()
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)


@_to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.custom_op("zero_fn::from_host", mutates_args=())
def _from_host(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=True, copy=True)


@_from_host.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


@torch.library.register_vmap("zero_fn::to_host")
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.zero_fn.to_host(x), in_dims[0]


@torch.library.register_vmap("zero_fn::from_host")
def _(
    info: Any, in_dims: tuple[int | None, None], x: Tensor, device: torch.device
) -> tuple[Tensor, int | None]:
    return torch.ops.zero_fn.from_host(x, device), in_dims[0]
