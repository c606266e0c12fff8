"""The mesh: named axes of ranks, and what each name is bound to while a rank's program runs.

A mesh binds its names to one of three interpreters. *Processes*: the ranks are processes of a
``torch.distributed`` group. *Simulated*: all ranks live in this process, as a dimension that
``torch.func.vmap`` maps over. *Abstract*: sizes only, for plans on fake tensors. The program of a
rank is the same in all three; collectives look up here what the names mean.

Axis order: as in a row-major array, the axis named last changes fastest with the rank. In
``Mesh(dp=2, tp=4)`` ranks 0 to 3 are neighbours on ``tp``.
"""

import atexit
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from .tree import Tensor

Interpreter = Literal["processes", "simulated", "abstract"]


class Axis(NamedTuple):
    """What an axis name means to the rank that runs now.

    Attributes:
        name: the name.
        size: the number of ranks along it.
        place: this rank's place along it, where it is known as a number (processes, abstract).
        group: the process group's name; in the abstract interpreter the axis' own name.
        token: in the simulation, the rank's place as a 0-dim int64 tensor that vmap has batched at
            exactly this axis' level; whatever is batched beside it varies over the axis.
    """

    name: str
    size: int
    place: int = 0
    group: str = ""
    token: Tensor | None = None


class _Bound(threading.local):
    """The axes bound in this thread, while a rank's program runs."""

    def __init__(self) -> None:
        self.axes: dict[str, Axis] = {}
        self.seen: dict[str, Axis] = {}


_bound = _Bound()


def bound_axes() -> dict[str, Axis]:
    """The axes that the running rank's program knows, by name."""
    return _bound.axes


def bound_axis(name: str) -> Axis:
    """The axis of that name.

    Raises:
        NameError: outside ``spmd``, or if the mesh has no such axis.
    """
    axes = _bound.axes
    if name not in axes:
        known = (
            f"the mesh has {sorted(axes)}"
            if axes
            else "no axis is bound here: call this inside a function that zf.spmd(f, mesh) runs"
        )
        raise NameError(f"unknown mesh axis {name!r}; {known}")
    return axes[name]


@contextmanager
def bind(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Bind these axes, beside those that are bound already, for the extent of a ``with``."""
    outer = _bound.axes
    _bound.axes = {**outer, **axes}
    for axis in axes.values():
        if axis.group:
            _bound.seen[axis.group] = axis
    try:
        yield
    finally:
        _bound.axes = outer


@contextmanager
def seen_axes() -> Iterator[dict[str, Axis]]:
    """The axes that are bound meanwhile, by the names of their process groups."""
    outer, _bound.seen = _bound.seen, {}
    try:
        yield _bound.seen
    finally:
        _bound.seen = outer


class Mesh:
    """Named axes of ranks.

    >>> Mesh(dp=4, tp=2)
    Mesh(dp=4, tp=2) of 8 simulated ranks

    Args:
        backend: ``"processes"`` or ``"simulated"``. None: processes where a launcher's environment
            (``RANK``, ``WORLD_SIZE``) or an initialised process group is present, else simulated.
        timeout: seconds after which a collective of processes gives up; None: torch's default.
        axes: name to size. Without any, or with all of size 1, the mesh is one rank, works
            anywhere and costs nothing.

    In the processes interpreter the default group is initialised (NCCL where there is CUDA, else
    Gloo) and closed at exit if nobody did so before. Making a mesh is then collective: every rank
    makes the same meshes in the same order.

    Raises:
        ValueError: if a size is not positive, or the number of processes is not the product of
            the sizes.
    """

    def __init__(
        self,
        *,
        backend: Literal["processes", "simulated"] | None = None,
        timeout: float | None = None,
        **axes: int,
    ) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"axis {name!r} has size {size!r}; it must be an int of 1 or more")
        if backend not in (None, "processes", "simulated"):
            raise ValueError(f"backend is {backend!r}; it is 'processes', 'simulated' or None")
        self.shape: dict[str, int] = dict(axes)
        self.size: int = math.prod(axes.values())
        launched = dist.is_available() and (
            dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
        )
        self.interpreter: Interpreter = backend or ("processes" if launched else "simulated")
        self._axes: dict[str, Axis] = {name: Axis(name, size) for name, size in axes.items()}
        if self.interpreter == "processes":
            self._join_processes(timeout)

    def abstract(self) -> "Mesh":
        """The same axes as sizes only: ``spmd`` on it runs rank 0's program on fake tensors."""
        mesh = object.__new__(Mesh)
        mesh.shape, mesh.size, mesh.interpreter = dict(self.shape), self.size, "abstract"
        mesh._axes = {name: Axis(name, size, group=name) for name, size in self.shape.items()}
        return mesh

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes to bind; in the simulation their tokens are still missing."""
        return self._axes

    @property
    def rank(self) -> int:
        """This process' rank; 0 where all ranks live in one process."""
        return dist.get_rank() if self.interpreter == "processes" and self.size > 1 else 0

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        ranks = "processes" if self.interpreter == "processes" else f"{self.interpreter} ranks"
        return f"Mesh({sizes}) of {self.size} {ranks}"

    def _join_processes(self, timeout: float | None) -> None:
        world = (
            dist.get_world_size()
            if dist.is_initialized()
            else int(os.environ.get("WORLD_SIZE", "1"))
        )
        if world != self.size:
            source = "the process group" if dist.is_initialized() else "WORLD_SIZE"
            raise ValueError(
                f"{self._sizes()} needs {_processes(self.size)}, and there are {world} "
                f"(from {source}). Start it with `torchrun --nproc-per-node {self.size} ...`, "
                "or simulate the ranks in one process: zf.Mesh(..., backend='simulated')"
            )
        if self.size == 1:
            return
        limit = None if timeout is None else timedelta(seconds=timeout)
        if not dist.is_initialized():
            cuda = torch.cuda.is_available()
            if cuda:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=limit)
            atexit.register(_close)
        ranks = torch.arange(self.size).reshape([*self.shape.values()])
        here = (ranks == dist.get_rank()).nonzero()[0].tolist()
        for dim, (name, size) in enumerate(self.shape.items()):
            lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
            group = _group(tuple(map(tuple, lines)), limit)
            self._axes[name] = Axis(name, size, here[dim], group)

    def _sizes(self) -> str:
        sizes = " × ".join(f"{name} {size}" for name, size in self.shape.items())
        return f"a mesh of {sizes or 'one rank'}"


def is_gloo(group: str, device: torch.device) -> bool:
    """Whether Gloo carries a group's tensors of that device; no group of an abstract mesh."""
    if not dist.is_initialized():
        return False
    try:
        found: Any = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    except RuntimeError:  # no group has that name
        return False
    return "gloo" in found._get_backend(device).name()


def process_place() -> tuple[int, int]:
    """This process' rank, and how many there are; (0, 1) before any group is made."""
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def least_over_processes(number: int) -> int:
    """The least of the processes' numbers; every process calls it."""
    if process_place()[1] == 1:
        return number
    given = torch.tensor([number], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(given, dist.ReduceOp.MIN)
    return int(given.item())


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count != 1)


_groups: dict[tuple[tuple[int, ...], ...], str] = {}


def _group(lines: tuple[tuple[int, ...], ...], timeout: timedelta | None) -> str:
    """The name of this rank's group among ``lines``, lists of ranks. Groups are made once."""
    size, rank = len(lines[0]), dist.get_rank()
    if size == 1:
        return ""
    if size == dist.get_world_size():
        return _name(dist.group.WORLD)
    if lines not in _groups:
        # Every rank takes part in making every group, its own or not.
        made = [dist.new_group(list(line), timeout=timeout) for line in lines]
        _groups[lines] = next(
            _name(group) for group, line in zip(made, lines, strict=True) if rank in line
        )
    return _groups[lines]


def _name(group: Any) -> str:
    return str(group.group_name)


def _close() -> None:
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
