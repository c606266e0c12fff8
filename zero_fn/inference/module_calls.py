"""torch.nn modules on quantised weights; torch.func.functional_call takes tensors only."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..tree import Tensor
from .quantization import Quantized

_LOCK = threading.RLock()  # a module is written to while it runs


def functional_call(
    module: torch.nn.Module,
    params: Mapping[str, Tensor | Quantized],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a module returns with these parameters in place of its own.

    One call at a time: others wait.

    >>> import torch, zero_fn as zf
    >>> from zero_fn.inference.module_calls import functional_call
    >>> module = torch.nn.Linear(6, 4)
    >>> params = zf.quantize(dict(module.named_parameters()))
    >>> functional_call(module, params, torch.ones(2, 6)).shape
    torch.Size([2, 4])

    Args:
        module: any module whose forward uses its weights through tensor functions.
        params: by key path, tensors and quantised weights. A parameter that the module has under
            several names may be given under one.
        args: the forward's own.
        kwargs: the forward's own.

    Raises:
        ValueError: for a name that the module does not have, or another shape.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in own.items():
        names.setdefault(id(parameter), []).append(name)
    given: dict[str, Tensor | Quantized] = {}
    for name, value in params.items():
        if name not in own:
            raise ValueError(f"{type(module).__name__} has no parameter {name!r}; it has {[*own]}")
        if tuple(value.shape) != tuple(own[name].shape):
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)}, and in {type(module).__name__} "
                f"{tuple(own[name].shape)}"
            )
        for other in names[id(own[name])]:
            if other == name or other not in params:
                given[other] = value
    plain = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    small = {name: value for name, value in given.items() if isinstance(value, Quantized)}
    with _LOCK, _in_place(module, small):
        return torch.func.functional_call(module, plain, args, kwargs, tie_weights=False)


@contextmanager
def _in_place(module: torch.nn.Module, values: Mapping[str, Quantized]) -> Iterator[None]:
    """The module with these as attributes where its parameters were."""
    taken = []
    try:
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            part = module.get_submodule(path)
            if attribute in part.__dict__:  # the same part under another name
                continue
            # All of a part's, so that their order comes back too.
            taken.append((part, attribute, dict(part._parameters)))
            del part._parameters[attribute]
            part.__dict__[attribute] = value
        yield
    finally:
        for part, attribute, parameters in reversed(taken):
            del part.__dict__[attribute]
            part._parameters.clear()
            part._parameters.update(parameters)
