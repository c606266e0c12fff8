"""jit: trace a step once for each signature, pass it through the passes, and run the program.

A signature is the structure of the arguments with its static fields, the shape, stride, dtype and
device of each tensor, and the values of the leaves that are no tensors. Why a function is traced
again is logged: ``logging.getLogger("zero_fn").setLevel("INFO")`` shows it.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.utils._pytree as torch_pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import disk
from .agreeing import Comparison
from .naming import suggestion
from .passes import BUILT_IN, Pass
from .program import TENSOR, Program, Static, describe, join, split, trace
from .tree import Tensor

Compiler = Literal["eager", "inductor"]

_log = logging.getLogger("zero_fn.jit")


def jit(
    f: Callable[..., Any],
    *,
    donate: int | Sequence[int] = (),
    compiler: Compiler = "eager",
    passes: Sequence[Pass] = (),
    skip: Sequence[str] = (),
) -> "Jitted":
    """The same function, traced into one graph when it is first called with such arguments.

    Args:
        f: a function of trees of tensors. Its Python code runs only while it is traced: other
            leaves are constants of the trace, and a change of one traces again.
        donate: the places of the arguments whose memory the results may take over; a donated
            tensor cannot be used after the call.
        compiler: ``"eager"`` runs the graph as it is, ``"inductor"`` compiles it.
        passes: further passes over the program, run after the built-in ones.
        skip: the names of built-in passes to leave out: ``"overlap"``, say; see
            :data:`zero_fn.passes.BUILT_IN`.

    Returns:
        A function like ``f``. Inside another transform (``torch.func.vmap``, another trace) it is
        ``f`` itself.

    Raises:
        ValueError: for an unknown compiler or pass; at a call, for a donated tensor that is used
            again, or a tensor with ``requires_grad``.
        RuntimeError: at a call on processes, where the ranks' programs would not exchange the
            same; on every rank, before the program runs.
        TypeError: at a call, for a leaf that is neither a tensor nor hashable.
    """
    if compiler not in ("eager", "inductor"):
        raise ValueError(f"compiler is {compiler!r}; it is 'eager' or 'inductor'")
    places = (donate,) if isinstance(donate, int) else tuple(donate)
    names = [built_in.__name__ for built_in in BUILT_IN]
    for name in skip:
        if name not in names:
            raise ValueError(
                f"skip names {name!r}, which is no built-in pass; {suggestion(name, names)}"
            )
    # Inductor finds by itself what it can do in place, and refuses reductions that say so.
    its_own = ["reduce_in_place", "sum_in_place"] if compiler == "inductor" else []
    left_out = {*skip, *its_own}
    kept = [built_in for built_in in BUILT_IN if built_in.__name__ not in left_out]
    return Jitted(f, places, compiler, (*kept, *passes))


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
        self.programs: dict[Signature, tuple[Program, Callable[..., Any]]] = {}
        self.comparison = Comparison()

    def __call__(self, *args: Any) -> Any:
        if _inside_transform():
            return self.f(*args)
        tensors, static = split(args)
        signature = _signature(tensors, static)
        try:
            found = self.programs.get(signature)
        except TypeError as error:
            raise TypeError(_unhashable(static)) from error
        if found is None:
            if self.programs:
                _log.info("%s is traced again: %s", self.__name__, self._reason(signature, args))
            program = self.trace(*args)
            self.comparison.check(program, self.__name__)
            found = program, _executable(program, self.compiler)
            self.programs[signature] = found
        program, run = found
        if any(program.on_disk):
            disk.check([x for x, own in zip(tensors, program.donated, strict=True) if own])
        inputs = _separated(tensors, program) if self.donate else tensors
        try:
            with torch.no_grad():
                results = run(*inputs)
            if any(program.on_disk):
                disk.commit(results)
        except OSError as error:
            if self.donate:  # what is in memory may be half new
                _use_up(tensors, program, self.__name__)
                error.add_note(_HALFWAY)
            raise
        if self.donate:
            results = _detached(results, inputs)
            _use_up(tensors, program, self.__name__)
        return join(results, program.results)

    __name__ = "f"

    def trace(self, *args: Any) -> Program:
        """The program for these arguments, after all passes; runs nothing."""
        program = trace(self.f, args, self.donate)
        if any(program.on_disk) and self.compiler != "eager":
            raise ValueError(
                f"compiler is {self.compiler!r}, and a state on disk is updated by compiler='eager'"
            )
        for transform in self.passes:
            program = transform(program)
        program.graph_module.graph.lint()
        program.graph_module.recompile()
        return program

    def _reason(self, signature: "Signature", args: tuple[Any, ...]) -> str:
        """What differs from the known signature that is nearest."""
        reasons = [_differences(known, signature, args) for known in self.programs]
        return "; ".join(sorted(reasons, key=len)[0])


class Signature(NamedTuple):
    """What a program was traced for.

    Attributes:
        static: the arguments' tree, and its leaves that are no tensors.
        tensors: shape, stride, dtype and device of each tensor, and whether it is on disk.
        ties: for each tensor the first place where it stands; None if all differ.
    """

    static: Static
    tensors: tuple[tuple[Any, ...], ...]
    ties: tuple[int, ...] | None


def _signature(tensors: list[Tensor], static: Static) -> Signature:
    for x in tensors:
        if type(x) is DonatedTensor:
            raise ValueError(x.message)
        if x.requires_grad:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has requires_grad=True; a traced step "
                "differentiates by itself: pass x.detach()"
            )
    described = tuple(
        [(x.shape, x.stride(), x.dtype, x.device, disk.is_on_disk(x)) for x in tensors]
    )
    ties = None
    if len(set(map(id, tensors))) < len(tensors):
        first: dict[int, int] = {}
        ties = tuple(first.setdefault(id(x), place) for place, x in enumerate(tensors))
    return Signature(static, described, ties)


def _unhashable(static: Static) -> str:
    for x in static.others:
        try:
            hash(x)
        except TypeError:
            return (
                f"an argument holds {x!r}, which is neither a tensor nor hashable; make it a "
                "tensor, or close over it"
            )
    return f"a static field of the arguments is not hashable: {static.treedef}; make it a tuple"


_DESCRIBED = ("shape", "stride", "dtype", "device", "on disk:")


def _differences(old: Signature, new: Signature, args: tuple[Any, ...]) -> list[str]:
    """What is new in a signature, in words, for each leaf."""
    if old.static.treedef != new.static.treedef:
        return ["the arguments have another structure, or other static fields"]
    paths = describe(args)
    found = [
        f"{path} is {after!r}, and was {before!r}"
        for path, before, after in zip(paths, old.static.others, new.static.others, strict=True)
        if before != after
    ]
    of_tensors = [path for path, x in zip(paths, new.static.others, strict=True) if x is TENSOR]
    if len(old.tensors) == len(new.tensors):
        for path, before, after in zip(of_tensors, old.tensors, new.tensors, strict=True):
            found += [
                f"{path} has {what} {_plain(y)}, and had {_plain(x)}"
                for what, x, y in zip(_DESCRIBED, before, after, strict=True)
                if x != y and not (what == "stride" and before[0] != after[0])
            ]
    return found or ["tensors that were one are two now, or the other way round"]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


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


_HALFWAY = (
    "The step stopped half-way: the files hold the state before it, and tensors in memory may be "
    "half new. zf.restore(like, folder) reads the files; what was in memory is in a checkpoint"
)


def _detached(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, as tensor objects that are none of the inputs' own, and no views of them."""
    taken = {id(x) for x in inputs}
    return [x.detach() if taken & {id(x), id(x._base)} else x for x in results]


def _use_up(tensors: Sequence[Tensor], program: Program, name: str) -> None:
    """Make every later use of the donated inputs an error."""
    for x, path, donated in zip(tensors, program.paths, program.donated, strict=True):
        if donated:
            x.__class__ = DonatedTensor
            x.message = (  # type: ignore[attr-defined]
                f"{path} was donated to {name!r}, and its memory may hold something else now; use "
                "the state that the call returned, or zf.jit(step) without donate to keep both"
            )
