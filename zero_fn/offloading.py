"""Offload: where the leaves of a state live, and moving them.

``offload`` moves leaves of any tree to the host or to a folder of files, and the tree stays what it
was: plain tensors under the same nodes. A step that ``zf.jit`` traced with donation updates each
leaf where it lives (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, 2104.07857).
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from . import chunks, disk, tree
from .mesh import least_over_processes, process_place
from .naming import size_of
from .program import join, split, trace
from .tree import PyTree, Tensor

Where = str | Sequence[str] | Callable[[str, Tensor], bool]
Device = str | torch.device | Path

CONTAINER = Path("/sys/fs/cgroup")  # where a container sees its own limits


def offload(
    state: PyTree, device: Device, *, where: Where | None = None, fraction: float = 1.0
) -> PyTree:
    """The same tree, its tensors on another device, on the host, or in files.

    Args:
        state: any tree; leaves that are no tensors stay as they are. A tensor at two places stays
            one. Or a function, an ``init`` say, which becomes one whose result is offloaded, to a
            folder leaf by leaf as it is computed, so that it need not fit in memory.
        device: ``"cpu"`` (pinned memory where there is a GPU), a device, or a folder
            (``pathlib.Path``; made if it is missing): a memory-mapped file for each leaf. Each
            process uses a folder of its own in there. To come back, offload to ``"cpu"``.
        where: patterns of key paths as in ``fnmatch`` (``"opt_state.*"``), or a function of (key
            path, leaf) that says which leaves move; None: all. Tensors of a plan
            (:func:`zero_fn.eval_shape`) only change their place; nothing is written.
        fraction: the part of those bytes that moves, 0 to 1: the largest leaves first, as long as
            they fit, so that the rest stays where it is (as in Twin-Flow of DeepSpeed).

    Returns:
        The tree, or the function. Leaves that are there already, or have no bytes, are the same
        tensors.

    Raises:
        TypeError: for a string that is no device: a folder is a ``Path``.
        ValueError: for a fraction outside 0 to 1, a pattern that matches no leaf, or a tensor that
            requires a gradient.
        FileExistsError: if the folder holds a state already.
        OSError: naming the folder or file, if there is not enough room or it cannot be written;
            nothing is left behind.
        MemoryError: if the host has not enough memory; before anything moves.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it is the part of the bytes that moves, 0 to 1")
    target = _target(device)
    if callable(state):
        return functools.partial(_made_there, state, target, where, fraction)
    chosen = {k: x for k, x in _chosen(state, where, fraction).items() if not _is_at(x[1], target)}
    if any(isinstance(x, FakeTensor) for _, x in chosen.values()):
        made = [_planned(x, target) for _, x in chosen.values()]
    elif isinstance(target, Path):

        def fill(files: list[Tensor]) -> None:
            for file, (_, x) in zip(files, chosen.values(), strict=True):
                chunks.write(file, x)

        made = disk.create(target, list(chosen.values()), fill) if chosen else []
    else:
        if target.type == "cpu":
            _check_host(sum(x.nbytes for _, x in chosen.values()))
        made = [_moved(x, target) for _, x in chosen.values()]
    new = dict(zip(chosen, made, strict=True))
    return tree.map(lambda x: new.get(id(x), x), state)


def _chosen(state: PyTree, where: Where | None, fraction: float) -> dict[int, tuple[str, Tensor]]:
    """The leaves that move, each tensor once."""
    paths, leaves = tree.paths(state), tree.leaves(state)
    tensors = [(path, x) for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor)]
    if callable(where):
        meant = [bool(where(path, x)) for path, x in tensors]
    elif where is None:
        meant = [True] * len(tensors)
    else:
        meant = tree.chosen(where, [path for path, _ in tensors], tensors, "where")
    first: dict[int, tuple[str, Tensor]] = {}
    for (path, x), moves in zip(tensors, meant, strict=True):
        if moves and x.nbytes:
            if x.requires_grad:
                raise ValueError(f"{path!r} requires a gradient; offload x.detach()")
            first.setdefault(id(x), (path, x))
    return _part(first, fraction)


def _made_there(
    f: Callable[..., PyTree],
    target: torch.device | Path,
    where: Where | None,
    fraction: float,
    *args: Any,
) -> PyTree:
    """What ``f`` returns, each leaf moved as soon as it is computed."""
    if not isinstance(target, Path) or any(isinstance(x, FakeTensor) for x in tree.leaves(args)):
        return offload(f(*args), target, where=where, fraction=fraction)
    program = trace(f, args)
    *_, output = program.graph_module.graph.nodes
    nodes: list[Node] = list(output.args[0])
    outlines = [node.meta["val"] for node in nodes]
    chosen = _chosen(join(outlines, program.results), where, fraction)
    results: list[Tensor] = []

    def fill(files: list[Tensor]) -> None:
        named = dict(zip(chosen, files, strict=True))
        pairs = zip(nodes, outlines, strict=True)
        into = {node: named[id(x)] for node, x in pairs if id(x) in named}
        results[:] = _Storing(program.graph_module, into).run(*split(args)[0])

    with torch.no_grad():
        disk.create(target, list(chosen.values()), fill)
    return join(results, program.results)


class _Storing(torch.fx.Interpreter):
    """Runs a graph, and moves some values to their files as soon as they are there."""

    def __init__(self, module: torch.nn.Module, files: dict[Node, Tensor]) -> None:
        super().__init__(module)
        self.files = files

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n not in self.files:
            return value
        chunks.write(self.files[n], value)
        return self.files[n]


def restore(like: PyTree, folder: Path) -> PyTree:
    """The state that lies in a folder, after the process that wrote it has ended or died.

    Args:
        like: a tree with the same key paths, shapes and dtypes: the result of ``init``, say. Leaves
            that were not offloaded to the folder stay as they are.
        folder: what was given to :func:`offload`. Where ranks died on both sides of a step, all go
            back to the state before it.

    Returns:
        The tree, its leaves on disk: of the last step that was finished.

    Raises:
        FileNotFoundError: if the folder holds no state, or a file is missing.
        OSError: naming a file that is shorter than its leaf.
        ValueError: naming a leaf that ``like`` does not have, or has otherwise.
    """
    own = _own(folder)
    disk.go_back(own, least_over_processes(disk.read_manifest(own).generation))
    found = disk.load(own)
    named = dict(zip(tree.paths(like), tree.leaves(like), strict=True))
    for path, x in found.items():
        if path not in named:
            raise ValueError(
                f"{own} holds a leaf {path!r}, and the tree has none: it has {list(named)}; give "
                "the tree that was offloaded there"
            )
        y = named[path]
        if not isinstance(y, Tensor) or (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"{own} holds {path!r} as {_told(x)}, and the tree has {_told(y)}")
    same = {id(named[path]): x for path, x in found.items()}
    return tree.map(lambda x: same.get(id(x), x), like)


def discard(folder: Path) -> None:
    """Delete the files of the state in a folder: those that :func:`offload` made, and no others.

    Tensors that lie there stay usable until they are dropped, as the system keeps their memory, but
    no step takes them.

    Raises:
        FileNotFoundError: if the folder holds no state.
    """
    disk.discard(_own(folder))


def brought(params: PyTree, batch: PyTree) -> PyTree:
    """The parameters, those on the host on the batch's device, where the loss computes."""
    devices = {x.device for x in tree.leaves(batch) if isinstance(x, Tensor)}
    device = next(iter(devices), None)
    if device is None or len(devices) > 1 or device.type == "cpu":
        return params

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) and x.device.type == "cpu" else x

    return tree.map(moved, params)


def at_home(params: PyTree, opt_state: PyTree) -> PyTree:
    """The parameters, each where its moments live: the optimizer state of its path and shape.

    That is where a step updates them; :func:`taken_back` brings the new ones to their old place.
    """
    held = [
        (f".{path}", x)
        for path, x in zip(tree.paths(opt_state), tree.leaves(opt_state), strict=True)
        if isinstance(x, Tensor)
    ]
    held.sort(key=lambda entry: len(entry[0]))  # mu.w before mu.block.w, which ends in .w too

    def moved(path: str, p: Any) -> Any:
        end = f".{path}" if path else ""
        homes = (x for at, x in held if x.shape == p.shape and at.endswith(end))
        return tree.on_device_of(next(homes, p), p)

    return tree.map_with_path(moved, params)


def taken_back(new: PyTree, like: PyTree) -> PyTree:
    """Each tensor on the device of the one in its place in another tree."""
    return tree.map(lambda x, y: tree.on_device_of(y, x) if isinstance(x, Tensor) else x, new, like)


class Resident(NamedTuple):
    """What lives at one place."""

    leaves: int
    bytes: int


class Residency(dict[str, Resident]):
    """Where the bytes of a tree live; prints as a table."""

    def __str__(self) -> str:
        rows = [(place, f"{n} leaves", size_of(b)) for place, (n, b) in self.items()]
        total = sum(b for _, b in self.values())
        rows.append(("in all", f"{sum(n for n, _ in self.values())} leaves", size_of(total)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join(lines)

    __repr__ = __str__


def residency(state: PyTree) -> Residency:
    """Where every byte of a tree lives: the devices, ``cpu (pinned)``, folders.

    A tensor at two places counts once. The file's second slot is not counted.

    >>> import torch
    >>> import zero_fn as zf
    >>> zf.residency({"w": torch.zeros(256), "step": torch.tensor(0)})
    cpu     2 leaves  1.0 KiB
    in all  2 leaves  1.0 KiB
    """
    found: dict[str, Resident] = {}
    unique = {id(x): x for x in tree.leaves(state) if isinstance(x, Tensor)}
    for x in unique.values():
        place = _place(x)
        leaves, total = found.get(place, Resident(0, 0))
        found[place] = Resident(leaves + 1, total + x.nbytes)
    return Residency(sorted(found.items()))


def _target(device: Device) -> torch.device | Path:
    if isinstance(device, Path):
        return _own(device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise TypeError(
            f"device is {device!r}, which is no device; a folder is a pathlib.Path({device!r})"
        ) from error


def _own(folder: Path) -> Path:
    """This process' part of a folder."""
    rank, size = process_place()
    folder = folder.absolute()
    return folder / f"rank-{rank}-of-{size}" if size > 1 else folder


def _is_at(x: Tensor, target: torch.device | Path) -> bool:
    folder = disk.folder_of(x)
    if isinstance(target, Path) or folder is not None:
        return folder is not None and folder == target
    if target.type == "cpu" and torch.cuda.is_available():
        return x.is_pinned()
    return x.device.type == target.type and target.index in (None, x.device.index)


def _moved(x: Tensor, target: torch.device) -> Tensor:
    if target.type == "cpu" and torch.cuda.is_available():
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)
    return x.to(target, copy=True)


def _planned(x: Tensor, target: torch.device | Path) -> Tensor:
    """Where a tensor of a plan, or of an abstract rank, would be."""
    assert isinstance(x, FakeTensor)
    if isinstance(target, Path):
        return disk.planned(x, target)
    with x.fake_mode:
        return torch.empty_like(x, device=target)


def _part(leaves: dict[int, tuple[str, Tensor]], fraction: float) -> dict[int, tuple[str, Tensor]]:
    """The largest leaves that are ``fraction`` of the bytes at most, in the old order."""
    left = fraction * sum(x.nbytes for _, x in leaves.values())
    taken = set()
    for key, (_, x) in sorted(leaves.items(), key=lambda item: -item[1][1].nbytes):
        if x.nbytes <= left:
            taken.add(key)
            left -= x.nbytes
    return {key: leaf for key, leaf in leaves.items() if key in taken}


def _check_host(need: int) -> None:
    free = min(_available(), _left_in_container())
    if need > free:
        raise MemoryError(
            f"the state takes {need:,} bytes of the host's memory, and {free:,.0f} are available; "
            "offload less (where=..., fraction=...), or to a folder"
        )


def _available() -> float:
    """Bytes that the system has to give; without end where it does not say."""
    try:
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:  # no Linux: the allocation itself will tell
        return math.inf
    return int(told["MemAvailable"].split()[0]) << 10


def _left_in_container() -> float:
    """Bytes below the limit of the control group (version 2); files that are cached can go."""
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text())
        told = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    except OSError:
        return math.inf
    return math.inf if limit == "max" else int(limit) - used + int(told["inactive_file"])


def _place(x: Tensor) -> str:
    folder = disk.folder_of(x)
    if folder is not None:
        return str(folder)
    pinned = x.device.type == "cpu" and torch.cuda.is_available() and x.is_pinned()
    return "cpu (pinned)" if pinned else str(x.device)


def _told(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
