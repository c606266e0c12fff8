"""torch's impure functions as pure ones, while a module runs: dropout, batch norm, attention.

torch's own draw from a global generator, and write to running statistics that simulated ranks
share.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import random
from .collectives import AxisName, axis_size, pmean, pvary
from .mesh import bound_axes
from .tree import Tensor

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


class PureMode(TorchFunctionMode):
    """Dropout from a key, and batch norm as a pure function.

    Args:
        name: of the module, for errors.
        key: what dropout draws from; None: it raises.
        normalize_over: the mesh axes whose ranks' rows a batch norm takes together.

    Attributes:
        written: the new values of running statistics, by the id of the old ones.
    """

    def __init__(self, name: str, key: Tensor | None, normalize_over: AxisName | None) -> None:
        super().__init__()
        self.name, self.key, self.normalize_over = name, key, normalize_over
        self.drawn = 0
        self.written: dict[int, Tensor] = {}

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
                    f"{self.name} draws random numbers by {f.__name__}, and only dropout can "
                    "draw from a key; pass what it draws as an argument, or use apply.eval()"
                )
        return f(*args, **kwargs)

    def _next_key(self) -> Tensor:
        if self.key is None:
            raise ValueError(
                f"{self.name} draws dropout, and has no key: apply(params, ..., "
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
        dims, axis = [0, *range(2, x.ndim)], self.normalize_over
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
