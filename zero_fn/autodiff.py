"""Derivatives: ``grad_and_value`` and ``grad`` on ``torch.func.vjp``, and recomputation.

``torch.func.grad`` differentiates with ``create_graph=True`` and keeps every intermediate for a
second derivative that is rarely asked for. These free the graph as they go, and are differentiated
again where they stand inside another transform.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from . import tree
from .mesh import bind, bound_axes
from .tree import Tensor

ArgNums = int | tuple[int, ...]

_vjp: Callable[..., Any] = torch.func.vjp  # its stub forgets the auxiliary result


def grad_and_value(
    f: Callable[..., Any], argnums: ArgNums = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """The gradient of a scalar function, and its value.

    Args:
        f: returns a 0-dim floating-point tensor, or with ``has_aux`` a pair of that and a tree of
            other tensors.
        argnums: the place of the argument, or arguments, to differentiate by; each a tree of
            floating-point tensors.
        has_aux: whether ``f`` returns more than the scalar.

    Returns:
        A function of the same arguments that gives ``(grads, value)``, or with ``has_aux``
        ``(grads, (value, aux))``; ``grads`` is a tree like the argument, or a tuple of trees for a
        tuple of ``argnums``.

    Raises:
        TypeError: if a leaf to differentiate by is no floating-point tensor (its key path is
            named), or if ``f`` does not return a 0-dim floating-point tensor.
    """
    places = (argnums,) if isinstance(argnums, int) else argnums

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for place in places:
            if not -len(args) <= place < len(args):
                raise TypeError(f"argnums={argnums!r}, and there are {len(args)} arguments")
            tree.check_tensors(args[place], f"argument {place}", floating=True)
        leaves, treedef = tree.flatten(tuple(args[place] for place in places))

        static: list[_Static] = []

        def of_leaves(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            given = list(args)
            for place, argument in zip(places, tree.unflatten(treedef, leaves), strict=True):
                given[place] = argument
            value, aux = f(*given, **kwargs) if has_aux else (f(*given, **kwargs), None)
            tensors, rest = _split(aux)
            static[:] = [rest]
            return _scalar(value), tensors

        value, pullback, aux = _vjp(of_leaves, *leaves, has_aux=True)
        grads = tree.unflatten(treedef, pullback(torch.ones_like(value), retain_graph=False))
        grads = grads[0] if isinstance(argnums, int) else grads
        return grads, (value, _joined(aux, static[0])) if has_aux else value

    return differentiated


def grad(f: Callable[..., Any], argnums: ArgNums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of a scalar function; with ``has_aux`` ``(grads, aux)``.

    The arguments and errors are those of :func:`grad_and_value`.
    """
    both = grad_and_value(f, argnums, has_aux)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return differentiated


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose intermediates are computed again in the backward, not kept.

    Only the arguments are kept (activation checkpointing, arXiv 1604.06174). ``f`` takes and
    returns trees; every tensor to differentiate by must be an argument, not a captured variable.

    Raises:
        ValueError: if ``f`` captures a tensor that is being differentiated; its name is given.
    """

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return f(*args, **kwargs)  # torch.compile differentiates through a Function's forward
        _check_captured(f)
        tensors, inputs = _split((args, kwargs))
        # The axes' tokens are inputs like others, so that vmap and vjp see them.
        axes = bound_axes()
        tokens = {name: axis.token for name, axis in axes.items() if axis.token is not None}
        outputs: list[_Static] = []

        def body(*values: Tensor) -> tuple[Tensor, ...]:
            bound = dict(axes)
            for name, token in zip(tokens, values, strict=False):
                bound[name] = axes[name]._replace(token=token)
            with bind(bound):
                args, kwargs = _joined(values[len(tokens) :], inputs)
                results, static = _split(f(*args, **kwargs))
            outputs[:] = [static]
            return tuple(results)

        results = _Remat.apply(body, *tokens.values(), *tensors)
        return _joined(results, outputs[0])

    return recomputed


class _Static(NamedTuple):
    """What a tree is besides its tensors: its structure, and the leaves that are no tensors."""

    treedef: tree.TreeDef
    others: list[Any]  # None where a tensor stands


def _split(value: Any) -> tuple[list[Tensor], _Static]:
    leaves, treedef = tree.flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, _Static(treedef, [None if isinstance(x, Tensor) else x for x in leaves])


def _joined(tensors: Sequence[Tensor], static: _Static) -> Any:
    rest = iter(tensors)
    return tree.unflatten(
        static.treedef, [next(rest) if other is None else other for other in static.others]
    )


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the function to differentiate returned {value!r}, not a 0-dim tensor")
    if value.ndim or not value.is_floating_point():
        raise TypeError(
            f"the function to differentiate returned a tensor of shape {tuple(value.shape)} and "
            f"dtype {value.dtype}; it must be 0-dim and floating-point, such as x.mean()"
        )
    return value


def _check_captured(f: Callable[..., Any]) -> None:
    for name, x in _captured(f):
        if x.requires_grad or torch._C._functorch.is_gradtrackingtensor(x):
            raise ValueError(
                f"remat: {_name(f)!r} captures the tensor {name}, which is being "
                "differentiated; its gradient would be lost. Pass it as an argument"
            )


def _captured(f: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors a function holds on to: closure, defaults, bound arguments, objects' fields."""
    seen: set[int] = set()
    held: list[tuple[str, Any]] = [(_name(f), f)]
    while held:
        name, value = held.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | str | bytes | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, FunctionType):
            free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            held += [(var, cell.cell_contents) for var, cell in free if _filled(cell)]
            held.append((f"{name} (a default)", (value.__defaults__, value.__kwdefaults__)))
        elif isinstance(value, MethodType):
            held += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, functools.partial):
            held.append((name, (value.func, value.args, value.keywords)))
        elif isinstance(value, dict):
            held += [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            held += [(f"{name}[{place}]", inner) for place, inner in enumerate(value)]
        elif hasattr(value, "__dict__"):
            held += [(f"{name}.{key}", inner) for key, inner in vars(value).items()]


def _name(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class _Remat(torch.autograd.Function):
    @staticmethod
    def forward(body: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(out.view_as(out) for out in body(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.body, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*[out for out in output if not out.is_floating_point()])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        places = [i for i, x in enumerate(inputs) if x.is_floating_point()]

        def of_floating(*values: Tensor) -> tuple[Tensor, ...]:
            given = list(inputs)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            return tuple(out for out in ctx.body(*given) if out.is_floating_point())

        _, pullback = _vjp(of_floating, *[inputs[place] for place in places])
        wanted = [g for g in grads if g.is_floating_point()]
        found = dict(zip(places, pullback(tuple(wanted), retain_graph=False), strict=True))
        return None, *[found.get(place) for place in range(len(inputs))]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], body: Callable[..., Any], *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        mapped = torch.func.vmap(body, in_dims[1:], 0, randomness=info.randomness)
        return _Remat.apply(mapped, *inputs), 0
