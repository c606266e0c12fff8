"""The tensors that a function holds on to, and the same function with others in their place.

``remat`` runs a function again in the backward, so it has to know what the function uses beside
its arguments: closures, defaults, bound arguments, the fields of objects, global variables.
"""

import copy
import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from . import tree
from .tree import Tensor

_NO_HOLDERS = type | ModuleType | str | bytes | int | float | complex | None


def captured(f: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that ``f`` holds on to, with a name for messages."""
    seen: dict[int, Any] = {}  # the objects too: an id may be given again to another one
    held: list[tuple[str, Any]] = [(name_of(f), f)]
    while held:
        name, value = held.pop()
        if id(value) in seen or isinstance(value, _NO_HOLDERS):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield name, value
        else:
            held += _held(name, value)


def _held(name: str, value: Any) -> list[tuple[str, Any]]:
    """What one object holds, each with a name."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        free = [(var, cell.cell_contents) for var, cell in cells if _filled(cell)]
        defaults = f"{name} (a default)"
        return [
            *free,
            *_globals(value),
            (defaults, value.__defaults__),
            (defaults, value.__kwdefaults__),
        ]
    if isinstance(value, MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, functools.partial):
        return [(name, value.func), (name, value.args), (name, value.keywords)]
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{name}[{place}]", inner) for place, inner in enumerate(value)]
    return [(f"{name}.{key}", inner) for key, inner in _fields(value).items()]


def _globals(f: FunctionType) -> list[tuple[str, Any]]:
    """The global tensors, and containers and functions of its own module, that a function reads.

    Further objects are left out: through modules and loggers they reach everything there is.
    """
    found = []
    for var in _global_names(f.__code__):
        value = f.__globals__.get(var)
        own = isinstance(value, FunctionType) and value.__module__ == f.__module__
        if own or isinstance(value, Tensor | dict | list | tuple):
            found.append((var, value))
    return found


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = {
        instruction.argval: None
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(names | dict.fromkeys(name for const in inner for name in _global_names(const)))


def _fields(value: Any) -> dict[str, Any]:
    slots = [key for cls in type(value).__mro__ for key in _names(getattr(cls, "__slots__", ()))]
    fields = {key: getattr(value, key) for key in slots if hasattr(value, key)}
    return fields | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """The same function with other tensors in place of captured ones.

    What holds none of them stays the object that it is; global variables stay.

    Args:
        value: the function.
        others: the ``id`` of a captured tensor to what takes its place.
    """
    return _replaced(value, others, {})


def _replaced(value: Any, others: Mapping[int, Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if id(value) in done:
        return done[id(value)]
    if not any(id(x) in others for _, x in captured(value)):
        return value

    def new(inner: Any) -> Any:
        return _replaced(inner, others, done)

    if isinstance(value, FunctionType):
        cells = tuple(CellType() for _ in value.__closure__ or ())
        f = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        done[id(value)] = f  # before its cells are filled: one may hold the function itself
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if _filled(old):
                cell.cell_contents = new(old.cell_contents)
        f.__defaults__, f.__kwdefaults__ = new(value.__defaults__), new(value.__kwdefaults__)
        return f
    if isinstance(value, MethodType):
        return MethodType(new(value.__func__), new(value.__self__))
    if isinstance(value, functools.partial):
        return functools.partial(new(value.func), *new(value.args), **new(value.keywords))
    if isinstance(value, set | frozenset):
        return type(value)(new(inner) for inner in value)
    leaves, treedef = tree.flatten(value, lambda x: isinstance(x, FunctionType))
    if not (len(leaves) == 1 and leaves[0] is value):
        return tree.unflatten(treedef, [new(leaf) for leaf in leaves])
    done[id(value)] = other = copy.copy(value)
    for key, inner in _fields(value).items():
        object.__setattr__(other, key, new(inner))
    return other


def name_of(f: Any) -> str:
    """What to call a function in a message."""
    return str(getattr(f, "__name__", type(f).__name__))
