"""Derivatives: ``grad_and_value`` and ``grad`` on ``torch.func.vjp``, and recomputation.

``torch.func.grad`` differentiates with ``create_graph=True`` and keeps every intermediate for a
second derivative that is rarely asked for. These free the graph as they go, and are differentiated
again where they stand inside another transform.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import tree
from .captures import captured, name_of, replaced
from .marks import marking
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
            named), if ``f`` does not return a 0-dim floating-point tensor (or the pair that
            ``has_aux`` promises), or if ``argnums`` names no argument.
        ValueError: if ``argnums`` names an argument twice.
    """
    places = _places(argnums)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for place in places:
            if not -len(args) <= place < len(args):
                raise TypeError(f"argnums={argnums!r}, and there are {len(args)} arguments")
        if len({place % len(args) for place in places}) < len(places):
            raise ValueError(f"argnums={argnums!r} names an argument twice; name each once")
        for place in places:
            tree.check_tensors(args[place], f"argument {place}", floating=True)
        leaves, treedef = tree.flatten(tuple(args[place] for place in places))

        static: list[Static] = []

        def of_leaves(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            given = list(args)
            for place, argument in zip(places, tree.unflatten(treedef, leaves), strict=True):
                given[place] = argument
            out = f(*given, **kwargs)
            value, aux = _pair(out) if has_aux else (out, None)
            tensors, rest = split_tensors(aux)
            static[:] = [rest]
            return _scalar(value), tensors

        value, pullback, aux = _vjp(of_leaves, *leaves, has_aux=True)
        grads = tree.unflatten(treedef, pullback(torch.ones_like(value), retain_graph=False))
        grads = grads[0] if isinstance(argnums, int) else grads
        return grads, (value, join_tensors(aux, static[0])) if has_aux else value

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


def remat(f: Callable[..., Any], save: Sequence[str] = ()) -> Callable[..., Any]:
    """The same function, whose intermediates are computed again in the backward, not kept.

    Only the arguments are kept (activation checkpointing, arXiv 1604.06174), and the values that
    ``save`` names. Under ``torch.compile`` it is ``f`` itself.

    Args:
        f: takes and returns trees; every tensor to differentiate by must be an argument, not a
            captured variable.
        save: names given by :func:`zero_fn.checkpoint_name` inside ``f``, of values that are kept
            too. Under ``zf.jit`` what leads to them alone is not computed again. Name products,
            whose derivative needs their factors, rather than what comes after a nonlinearity,
            whose derivative needs the result and computes it again.

    Raises:
        ValueError: if ``f`` captures a tensor that is being differentiated (its name is given), or
            draws random numbers; if ``save`` names what ``f`` does not.
        TypeError: if ``save`` is one string.
    """
    if isinstance(save, str):
        raise TypeError(f"save is {save!r}; it is a sequence of names, ({save!r},)")

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return f(*args, **kwargs)  # torch.compile differentiates through a Function's forward
        # What f captures at a level of vmap, and the axes' tokens, are inputs like others: the
        # backward runs at other levels than the forward, where such a tensor means another one.
        captures = _captures(f)
        tensors, inputs = split_tensors((args, kwargs))
        axes = bound_axes()
        tokens = {name: axis.token for name, axis in axes.items() if axis.token is not None}
        outputs: list[Static] = []
        kept = Kept()
        count = len(tokens) + len(captures) + len(tensors)

        def body(*values: Tensor) -> tuple[Tensor, ...]:
            bound, rest = dict(axes), iter(values[:count])
            for name in tokens:
                bound[name] = axes[name]._replace(token=next(rest))
            others = {id(x): next(rest) for x in captures}
            with bind(bound), marking(save, values[count:]) as marks:
                args, kwargs = join_tensors(list(rest), inputs)
                results, static = split_tensors(replaced(f, others)(*args, **kwargs))
            unknown = [name for name in save if name not in marks.seen]
            if unknown:
                raise ValueError(
                    f"remat: save names {unknown[0]!r}, and {name_of(f)!r} has the names "
                    f"{sorted(marks.seen)}; zf.checkpoint_name(x, name) gives one"
                )
            outputs[:], kept.count = [static], len(marks.values)
            return *results, *marks.values

        results = _Remat.apply(body, name_of(f), kept, *tokens.values(), *captures, *tensors)
        return join_tensors(results[: len(results) - kept.count], outputs[0])

    return recomputed


class Kept:
    """How many of a function's last results are named values, known when it has run."""

    count = 0


class Static(NamedTuple):
    """What a tree is besides its tensors: its structure, and the leaves that are no tensors."""

    treedef: tree.TreeDef
    others: list[Any]  # None where a tensor stands


def split_tensors(value: Any) -> tuple[list[Tensor], Static]:
    """The tensors of a tree, and the rest of it."""
    leaves, treedef = tree.flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, Static(treedef, [None if isinstance(x, Tensor) else x for x in leaves])


def join_tensors(tensors: Sequence[Tensor], static: Static) -> Any:
    """The tree again."""
    rest = iter(tensors)
    return tree.unflatten(
        static.treedef, [next(rest) if other is None else other for other in static.others]
    )


def _places(argnums: ArgNums) -> tuple[int, ...]:
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not places or any(not isinstance(place, int) for place in places):
        raise TypeError(f"argnums is {argnums!r}; it is an int or a tuple of ints, such as (0, 2)")
    return places


def _pair(out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"with has_aux=True the function to differentiate returns a pair, (value, aux); "
            f"it returned {out!r}"
        )
    return out[0], out[1]


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the function to differentiate returned {value!r}, not a 0-dim tensor")
    if value.ndim or not value.is_floating_point():
        raise TypeError(
            f"the function to differentiate returned a tensor of shape {tuple(value.shape)} and "
            f"dtype {value.dtype}; it must be 0-dim and floating-point, such as x.mean()"
        )
    return value


def _captures(f: Callable[..., Any]) -> list[Tensor]:
    """The captured tensors that live at a level of torch.func; those differentiated are refused."""
    found = []
    for name, x in captured(f):
        if _differentiated(x):
            raise ValueError(
                f"remat: {name_of(f)!r} captures the tensor {name}, which is being differentiated; "
                "its gradient would be lost. Pass it as an argument"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            found.append(x)
    return found


def _differentiated(x: Tensor) -> bool:
    while not x.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return True


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _NoDraws(TorchDispatchMode):
    """Refuses random operations: the second run would draw other numbers than the first."""

    supports_higher_order_operators = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _draws(
            func, args, kwargs
        ):
            raise ValueError(
                f"remat: {self.name!r} draws random numbers ({func}), and the backward would draw "
                "others; draw them outside and pass them as an argument: a mask, say"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operation draws: attention with a dropout of 0, say, does not."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True


class _Remat(torch.autograd.Function):
    @staticmethod
    def forward(
        body: Callable[..., tuple[Tensor, ...]], name: str, kept: Kept, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        with _NoDraws(name):
            return tuple(out.view_as(out) for out in body(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.body, ctx.name, ctx.kept, *tensors = inputs
        ctx.count, ctx.results = len(tensors), len(output) - ctx.kept.count
        ctx.save_for_backward(*tensors, *output[ctx.results :])
        ctx.save_for_forward(*tensors)
        ctx.moves = [_differentiable(out) for out in output[: ctx.results]]
        ctx.moves += [False] * ctx.kept.count
        still = [out for out, moves in zip(output, ctx.moves, strict=True) if not moves]
        ctx.mark_non_differentiable(*still)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        places = [i for i, x in enumerate(values[: ctx.count]) if _differentiable(x)]
        f = _of_places(ctx.body, values, places, ctx.results)
        _, pullback = _vjp(f, *[values[i] for i in places])
        wanted = tuple(g for g, moves in zip(grads, ctx.moves, strict=True) if moves)
        found = dict(zip(places, pullback(wanted, retain_graph=False), strict=True))
        return None, None, None, *[found.get(place) for place in range(ctx.count)]

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.count]
        places = [i for i, tangent in enumerate(tangents) if tangent is not None]
        body, results = ctx.body, ctx.results

        def pushed(*values: Tensor) -> tuple[Tensor, ...]:
            given = list(values[: len(inputs)])
            primals = tuple(given[place] for place in places)
            f = _of_places(body, given, places, results)
            out: tuple[Tensor, ...] = torch.func.jvp(f, primals, values[len(inputs) :])[1]
            return out

        # A Function again: torch runs this with forward derivatives off, and plain operations
        # here would have a silent zero under an outer jvp.
        given = [tangents[place] for place in places]
        found = iter(_Remat.apply(pushed, ctx.name, Kept(), *inputs, *given))
        return tuple(next(found) if moves else None for moves in ctx.moves)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        body: Callable[..., Any],
        name: str,
        kept: Kept,
        *inputs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        # What is not batched stays so: on simulated ranks it is what they share, a psum's result.
        batched: list[bool] = []

        def noted(*values: Tensor) -> tuple[Tensor, ...]:
            outs = body(*values)
            level = torch._C._functorch.maybe_current_level()
            batched[:] = [torch._C._functorch.maybe_get_level(out) == level for out in outs]
            return outs

        def mapped(*values: Tensor) -> tuple[Tensor, ...]:
            dims = *in_dims[3:], *(0 if own else None for own in batched[-kept.count :])
            outs = torch.func.vmap(noted, dims[: len(values)], 0, randomness=info.randomness)(
                *values
            )
            return tuple(out if own else out[0] for out, own in zip(outs, batched, strict=True))

        outs = _Remat.apply(mapped, name, kept, *inputs)
        return outs, tuple(0 if own else None for own in batched)


def _of_places(
    body: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], places: list[int], results: int
) -> Callable[..., tuple[Tensor, ...]]:
    """``body`` as a function of some of its inputs, and what is differentiable of its results."""

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(inputs)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return tuple(out for out in body(*given)[:results] if _differentiable(out))

    return f
