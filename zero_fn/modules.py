"""torch.nn modules as ``(params, apply)``, through ``torch.func.functional_call``.

A module's parameters become a flat tree, key path to tensor, and its forward a function of that
tree. What a module hides becomes an argument: buffers (a batch norm's running statistics) go in and
come out, and dropout draws from a key. The module itself is never written to.

While a module runs, torch's dropout and batch norm are computed by the functions of this file:
torch's own draw from a global generator, and write to running statistics that simulated ranks
share.
"""

import copy
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from . import random
from .collectives import AxisName, agreed, axis_size, pmean, pvary
from .mesh import bound_axes
from .tree import PyTree, Tensor

Params = dict[str, Tensor]
Buffers = dict[str, Tensor]

_RESERVED = ("buffers", "dropout_key")


class ModuleFunction(NamedTuple):
    """What :func:`from_module` gives.

    Attributes:
        params: key path to parameter, each tensor once.
        apply: the forward as a function of them.
    """

    params: Params
    apply: "Apply"


@dataclass(frozen=True)
class Apply:
    """A module's forward, ``apply(params, *args, buffers=..., dropout_key=..., **kwargs)``.

    Attributes:
        module: the module without its values.
        buffers: key path to buffer as they were; what ``apply`` uses unless it is given others.
        frozen: the key paths of parameters that have ``requires_grad=False``, for
            ``zf.train_step(..., frozen=apply.frozen)``.
        ties: for each further name of a parameter or buffer, the name it has in the trees.
        average_over: see :func:`from_module`.
        normalize_over: see :func:`from_module`.
        training: whether the module trains; None: as each of its parts was set.
    """

    module: torch.nn.Module = field(repr=False)
    buffers: Buffers = field(repr=False)
    frozen: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    average_over: AxisName | None = None
    normalize_over: AxisName | None = None
    training: bool | None = None

    def train(self) -> "Apply":
        """The same function in training mode."""
        return replace(self, training=True)

    def eval(self) -> "Apply":
        """The same function in evaluation mode: no dropout, batch norm by running statistics."""
        return replace(self, training=False)

    def __call__(
        self,
        params: PyTree,
        *args: Any,
        buffers: Buffers | None = None,
        dropout_key: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the module returns for these parameters.

        Args:
            params: as :func:`from_module` gave them, with other values.
            args: the forward's own.
            buffers: the module's buffers; then the result is a pair, (output, new buffers). None:
                those it was made with, and what becomes of them is dropped.
            dropout_key: what dropout draws from (:func:`zero_fn.random.key`). The same key gives
                the same masks. Ranks with different rows fold in their place.
            kwargs: the forward's own.

        Raises:
            ValueError: for a missing or unknown key path, a tensor of another shape, or dropout
                without a key.
            NotImplementedError: if the module draws random numbers in another way.
        """
        _check_names(params, _shapes(self.module.named_parameters()), "params")
        state = self.buffers if buffers is None else buffers
        _check_names(state, _shapes(self.buffers.items()), "buffers")
        # Modules add to buffers in place; these are copies, of this call alone.
        own = {name: x.clone() for name, x in state.items()}
        given = {**params, **own}
        given |= {name: given[first] for name, first in self.ties.items()}
        mode = _Mode(self, dropout_key)
        with _mode_of(self.module, self.training), mode, _explained(self.module):
            out = torch.func.functional_call(self.module, given, args, kwargs, tie_weights=False)
        if buffers is None:
            return out
        return out, {name: self._averaged(mode.written.get(id(x), x)) for name, x in own.items()}

    def _averaged(self, x: Tensor) -> Tensor:
        axis = self.average_over
        if axis is None:
            return x
        return pmean(x, axis) if x.is_floating_point() else agreed(x, axis)


def from_module(
    module: torch.nn.Module,
    *,
    average_over: AxisName | None = None,
    normalize_over: AxisName | None = None,
) -> ModuleFunction:
    """A module as parameters and a function of them.

    >>> import torch
    >>> import zero_fn as zf
    >>> params, apply = zf.from_module(torch.nn.Linear(3, 2))
    >>> sorted(params)
    ['bias', 'weight']
    >>> apply(params, torch.ones(4, 3)).shape
    torch.Size([4, 2])

    Args:
        module: any module; parameters that it has under several names are one leaf.
        average_over: the mesh axis, or axes, over which new buffers are averaged (floating-point
            ones), so that the ranks' running statistics stay the same.
        normalize_over: the mesh axis, or axes, whose ranks' rows a batch norm takes together, as
            ``torch.nn.SyncBatchNorm``; the result is that of one rank with the whole batch.

    Returns:
        The parameters, copied and detached, and the function; see :class:`Apply`.

    Raises:
        TypeError: for what is no module.
        ValueError: if its forward has arguments that ``apply`` has itself, or if it has parameters
            that are not yet made (lazy modules).
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_module takes a torch.nn.Module, and got {module!r}")
    taken = [n for n in _RESERVED if n in inspect.signature(module.forward).parameters]
    if taken:
        raise ValueError(
            f"{type(module).__name__}.forward has an argument {taken[0]!r}, which apply has too; "
            "wrap the module in one whose forward names it otherwise"
        )
    params, buffers = {}, {}
    ties: dict[str, str] = {}
    frozen: list[str] = []
    first: dict[int, str] = {}
    empty: dict[int, Any] = {}
    for name, p in _slots(module, module.named_parameters(remove_duplicate=False)):
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet; run the module once on a batch")
        if first.setdefault(id(p), name) != name:
            ties[name] = first[id(p)]
            continue
        params[name] = p.detach().clone()
        frozen += [] if p.requires_grad else [name]
        empty[id(p)] = torch.nn.Parameter(p.detach().to("meta"), requires_grad=False)
    for name, b in _slots(module, module.named_buffers(remove_duplicate=False)):
        if first.setdefault(id(b), name) != name:
            ties[name] = first[id(b)]
            continue
        buffers[name] = b.detach().clone()
        empty[id(b)] = b.detach().to("meta")
    body = copy.deepcopy(module, empty)  # without a value
    apply = Apply(body, buffers, tuple(frozen), ties, average_over, normalize_over)
    return ModuleFunction(params, apply)


def _slots(
    module: torch.nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module, each place once, where a part of it may stand at several."""
    seen = set()
    for name, x in named:
        part, _, attribute = name.rpartition(".")
        slot = id(module.get_submodule(part)), attribute
        if slot not in seen:
            seen.add(slot)
            yield name, x


def to_module(
    module: torch.nn.Module, params: PyTree, buffers: Buffers | None = None
) -> torch.nn.Module:
    """Write parameters, and buffers if given, into a module; the module itself is returned.

    Args:
        module: the one that :func:`from_module` was given, or another of its shape.
        params: whole tensors by key path; of a state's pieces ``zf.gather_tree(params, mesh)``.
        buffers: the buffers by key path; None: they stay as they are.

    Raises:
        ValueError: for a missing or unknown key path, or a tensor of another shape; nothing is
            written then.
    """
    _check_names(params, _shapes(module.named_parameters()), "params")
    if buffers is not None:
        _check_names(buffers, _shapes(module.named_buffers()), "buffers")
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(params[name])
        for name, b in module.named_buffers() if buffers is not None else ():
            b.copy_(buffers[name])  # type: ignore[index]
    return module


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors}


def _check_names(given: Any, wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {type(given).__name__}; it is a dict, key path to tensor")
    for name, shape in wanted.items():
        if name not in given:
            raise ValueError(f"{what} lacks {name!r}; it has {sorted(given)[:8]}")
        x = given[name]
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{what} at {name!r} is {x!r}, no whole tensor; zf.unshard(params) inside spmd "
                "gives whole ones, and zf.gather_tree(params, mesh) outside"
            )
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{what} at {name!r} has shape {tuple(x.shape)}; the module's is {shape}"
            )
    unknown = sorted(set(given) - set(wanted))
    if unknown:
        raise ValueError(f"{what} has {unknown[0]!r}, which the module has not")


@contextmanager
def _mode_of(module: torch.nn.Module, training: bool | None) -> Iterator[None]:
    """The module in training or evaluation mode meanwhile."""
    if training is None:
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was


@contextmanager
def _explained(module: torch.nn.Module) -> Iterator[None]:
    """Say what to do where a module looks at the values of a traced or simulated tensor."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("data-dependent", ".item()")):
            raise
        raise RuntimeError(
            f"{type(module).__name__} branches on the values of a tensor, which a traced step and "
            "simulated ranks cannot. transformers looks for padding and packed sequences so, "
            "unless it is given a mask of 4 dimensions, (batch or 1, 1, queries, keys), true "
            "where a query sees a key: attention_mask=torch.ones(n, n).bool().tril()[None, None] "
            f"for a causal model. ({error})"
        ) from error


# Random functions that are not drawn from a key.
_RANDOM = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like),
    *(torch.randint_like, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout),
    *(torch.feature_alpha_dropout_, torch.rrelu, torch.rrelu_),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.normal_),
    *(torch.Tensor.uniform_, torch.Tensor.exponential_, torch.Tensor.multinomial),
}


@functools.cache
def _looked_into(f: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that hands over to a mode what it calls, not itself."""
    never = dict.fromkeys(
        [name for name in f.__globals__ if name.startswith("has_torch_function")], _never
    )
    inner = types.FunctionType(
        f.__code__, {**f.__globals__, **never}, f.__name__, f.__defaults__, f.__closure__
    )
    inner.__kwdefaults__ = f.__kwdefaults__
    return inner


def _never(*_: Any) -> bool:
    return False


class _Mode(TorchFunctionMode):
    """Dropout from a key, and batch norm as a pure function."""

    def __init__(self, apply: Apply, key: Tensor | None) -> None:
        super().__init__()
        self.apply, self.key, self.drawn = apply, key, 0
        self.written: dict[int, Tensor] = {}  # by the id of the buffer it is the new value of

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(f, "__globals__", None) is vars(torch.nn.functional):
            with self:
                return _looked_into(f)(*args, **kwargs)
        if f in (torch.dropout, torch.dropout_):
            return self._dropout(*args, **kwargs)
        if f in (torch.feature_dropout, torch.feature_dropout_):
            return self._dropout(*args, **{**kwargs, "channels": True})
        if f is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(f, *args, **kwargs)
        if f is torch.batch_norm:
            return self._batch_norm(f, *args, **kwargs)
        if f in _RANDOM:
            training = args[-1] if f in _MAYBE else True
            if training is not False:
                raise NotImplementedError(
                    f"{self._name()} draws random numbers by {f.__name__}, and only dropout can "
                    "draw from a key; pass what it draws as an argument, or use apply.eval()"
                )
        return f(*args, **kwargs)

    def _name(self) -> str:
        return type(self.apply.module).__name__

    def _next_key(self) -> Tensor:
        if self.key is None:
            raise ValueError(
                f"{self._name()} draws dropout, and has no key: apply(params, ..., "
                "dropout_key=zf.random.key(0)) with a new one each step, or apply.eval()"
            )
        self.drawn += 1
        return random.fold_in(self.key, self.drawn)

    def _dropout(self, x: Tensor, p: float, training: bool, channels: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if p == 1:
            return torch.zeros_like(x)
        key = self._next_key()
        if not channels:
            return random.dropout(x, p, key)
        ones = x.new_ones(x.shape[:2] + (1,) * (x.ndim - 2))
        return x * random.dropout(ones, p, key)

    def _attention(
        self,
        f: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not dropout_p and not any(axis.token is not None for axis in bound_axes().values()):
            return f(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        # torch's kernel has no batching rule for simulated ranks, and takes no key for dropout.
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p, True) @ v

    def _batch_norm(
        self,
        f: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
    ) -> Tensor:
        """Ioffe and Szegedy 2015, algorithm 1; running variances are unbiased, as torch's are."""
        if not training:
            return f(x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn)
        dims, axis = [0, *range(2, x.ndim)], self.apply.normalize_over
        count = x.numel() // x.shape[1]

        def mean_of(x: Tensor) -> Tensor:
            mean = x.mean(dims)
            return mean if axis is None else pmean(mean, axis)

        def spread(channel: Tensor, shared: bool) -> Tensor:
            channel = channel if axis is None or not shared else pvary(channel, axis)
            return channel.view(-1, *[1] * (x.ndim - 2))

        mean = mean_of(x)
        centred = x - spread(mean, True)
        variance = mean_of(centred.square())
        out = centred * torch.rsqrt(spread(variance, True) + eps)
        out = out if weight is None else out * spread(weight, False)
        out = out if bias is None else out + spread(bias, False)
        if running_mean is not None and running_var is not None:
            count *= 1 if axis is None else axis_size(axis)
            unbiased = variance.detach() * (count / max(count - 1, 1))
            for buffer, value in ((running_mean, mean.detach()), (running_var, unbiased)):
                self.written[id(buffer)] = (1 - momentum) * buffer + momentum * value.to(
                    buffer.dtype
                )
        return out


# Those whose last argument says whether they draw.
_MAYBE = {
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout),
    *(torch.feature_alpha_dropout_, torch.rrelu, torch.rrelu_),
}
