"""A module's forward with other values in the place of its own.

``torch.func.functional_call`` takes tensors. What stands for one, a quantised weight say, or any
other node of a tree that answers tensor functions by ``__torch_function__``, is an attribute of its
module meanwhile.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import tree
from .placed import is_placed
from .tree import Tensor

_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()


def stands_for_tensor(x: Any) -> bool:
    """Whether a value is a whole tensor, or a node of whole tensors that tensor functions take."""
    if isinstance(x, Tensor):
        return True
    parts = tree.leaves(x, is_placed)
    return hasattr(type(x), "__torch_function__") and all(isinstance(p, Tensor) for p in parts)


def turn_of(module: torch.nn.Module) -> Any:
    """A context in which other threads that want this module wait: a call writes to it."""
    if torch.compiler.is_compiling():  # nothing runs
        return nullcontext()
    return _LOCKS.setdefault(module, threading.RLock())


def call_module(
    module: torch.nn.Module, given: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """What a module returns with these values.

    Args:
        module: any module.
        given: parameters and buffers by key path, of tied ones each.
        args: the forward's own.
        kwargs: the forward's own.
    """
    plain = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    with _attributes(module, others):
        return torch.func.functional_call(module, plain, args, dict(kwargs), tie_weights=False)


@contextmanager
def _attributes(module: torch.nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """The module with these as attributes where its parameters were."""
    taken = []
    try:
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            part = module.get_submodule(path)
            if attribute in part.__dict__:  # the same part under another name
                continue
            taken.append((part, attribute, dict(part._parameters)))
            del part._parameters[attribute]
            setattr(part, attribute, value)
        yield
    finally:
        for part, attribute, parameters in reversed(taken):
            delattr(part, attribute)
            setattr(part, attribute, parameters[attribute])
            part._parameters.clear()  # in the order that they had
            part._parameters.update(parameters)
