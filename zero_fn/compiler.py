"""jit: trace a step once for each signature, pass it through the passes, and run the program.

A signature is the structure of the arguments with its static fields, the shape, stride, dtype and
device of each tensor, and the values of the leaves that are no tensors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as torch_pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .passes import BUILT_IN, Pass
from .program import TENSOR, Program, Static, join, split, trace
from .tree import Tensor

Compiler = Literal["eager", "inductor"]


def jit(
    f: Callable[..., Any],
    *,
    donate: int | Sequence[int] = (),
    compiler: Compiler = "eager",
    passes: Sequence[Pass] = (),
) -> "Jitted":
    """The same function, traced into one graph when it is first called with such arguments.

    Args:
        f: a function of trees of tensors. Its Python code runs only while it is traced: other
            leaves are constants of the trace, and a change of one traces again.
        donate: the places of the arguments whose memory the results may take over; a donated
            tensor cannot be used after the call.
        compiler: ``"eager"`` runs the graph as it is, ``"inductor"`` compiles it.
        passes: further passes over the program.

    Returns:
        A function like ``f``. Inside another transform (``torch.func.vmap``, another trace) it is
        ``f`` itself.

    Raises:
        ValueError: for an unknown compiler; at a call, for a donated tensor that is used again,
            or a tensor with ``requires_grad``.
        TypeError: at a call, for a leaf that is neither a tensor nor hashable.
    """
    if compiler not in ("eager", "inductor"):
        raise ValueError(f"compiler is {compiler!r}; it is 'eager' or 'inductor'")
    places = (donate,) if isinstance(donate, int) else tuple(donate)
    return Jitted(f, places, compiler, tuple(passes))


class Jitted:
    """A function with a cache of the programs it was traced into; made by :func:`jit`."""

    def __init__(
        self,
        f: Callable[..., Any],
        donate: tuple[int, ...],
        compiler: Compiler,
        passes: tuple[Pass, ...],
    ) -> None:
        functools.update_wrapper(self, f)
        self.f, self.donate, self.compiler, self.passes = f, donate, compiler, passes
        self.programs: dict[Any, tuple[Program, Callable[..., Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        if _inside_transform():
            return self.f(*args)
        tensors, static = split(args)
        key = _signature(tensors, static)
        if key not in self.programs:
            program = self.trace(*args)
            self.programs[key] = program, _executable(program, self.compiler)
        program, run = self.programs[key]
        inputs = _separated(tensors, program) if self.donate else tensors
        with torch.no_grad():
            results = run(*inputs)
        if self.donate:
            results = _detached(results, inputs)
            _use_up(tensors, program, self.__name__)
        return join(results, program.results)

    __name__ = "f"

    def trace(self, *args: Any) -> Program:
        """The program for these arguments, after all passes; runs nothing."""
        program = trace(self.f, args, self.donate)
        for transform in (*BUILT_IN, *self.passes):
            program = transform(program)
        return program


def _signature(tensors: list[Tensor], static: Static) -> Any:
    for x in tensors:
        if type(x) is DonatedTensor:
            raise ValueError(x.message)
        if x.requires_grad:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has requires_grad=True; a traced step "
                "differentiates by itself: pass x.detach()"
            )
    described = tuple((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
    first: dict[int, int] = {}
    ties = tuple(first.setdefault(id(x), place) for place, x in enumerate(tensors))
    key = (static, described, ties if len(first) < len(tensors) else None)
    try:
        hash(key)
    except TypeError:
        strange = next(x for x in static.others if x is not TENSOR and x.__hash__ is None)
        raise TypeError(
            f"an argument holds {strange!r}, which is neither a tensor nor hashable; "
            "make it a tensor, or close over it"
        ) from None
    return key


def _executable(program: Program, compiler: Compiler) -> Callable[..., Any]:
    if compiler == "eager":
        return program.graph_module.forward
    return torch.compile(program.graph_module, fullgraph=True, dynamic=False)


def _inside_transform() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or bool(_get_current_dispatch_mode_stack())
    )


class DonatedTensor(Tensor):
    """What a donated tensor becomes: every use of it raises."""

    message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = torch_pytree.tree_leaves((args, kwargs))
        raise ValueError(next(x.message for x in used if type(x) is DonatedTensor))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.message}>"


def _separated(tensors: list[Tensor], program: Program) -> list[Tensor]:
    """The inputs, with a copy for each donated one that shares memory with another input."""
    seen: set[int] = set()
    separate = list(tensors)
    order = sorted(range(len(tensors)), key=lambda place: program.donated[place])
    for place in order:  # those that are not donated come first, and keep their memory
        memory = tensors[place].untyped_storage().data_ptr()
        if memory and memory in seen and program.donated[place]:
            separate[place] = tensors[place].clone()
        seen.add(memory)
    return separate


def _detached(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, as tensor objects that are none of the inputs' own."""
    taken = {id(x) for x in inputs}
    return [x.detach() if id(x) in taken else x for x in results]


def _use_up(tensors: Sequence[Tensor], program: Program, name: str) -> None:
    """Make every later use of the donated inputs an error."""
    for x, path, donated in zip(tensors, program.paths, program.donated, strict=True):
        if donated:
            x.__class__ = DonatedTensor
            x.message = (  # type: ignore[attr-defined]
                f"{path} was donated to {name!r}, and its memory may hold something else now; use "
                "the state that the call returned, or zf.jit(step) without donate to keep both"
            )
