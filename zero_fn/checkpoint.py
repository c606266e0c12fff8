"""Checkpoints: a state of any mesh and stage, written whole, read on any other.

What is saved are whole tensors under their key paths, each rank writing the boxes that it holds
(see ``regions``), through torch.distributed.checkpoint (see ``storage``). So a mesh, a stage and a
number of ranks are nowhere in the files, and a load reads the boxes that its own mesh wants.

A checkpoint appears under its name only when it is complete: it is written to a hidden folder,
flushed, and renamed. ``save_async`` does the same beside the steps that follow, from a copy (see
``background``).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import tree
from .background import Saving, finish, group_of, settle, start
from .collectives import agreed
from .mesh import Mesh
from .pipelining.staging import Look
from .ranks import spmd
from .regions import Box, Whole, find_wholes, is_general, leaf_names
from .sharding import Replicated, Sharded
from .tree import PyTree, Tensor

_VALUES = "values.json"
_NAME = re.compile(r"step-(\d+)")
_PLAIN = (bool, int, float, str)


class DamagedError(ValueError):
    """Files of a checkpoint that are missing, cut short or unreadable."""


def save(
    folder: str | os.PathLike[str], state: PyTree, mesh: Mesh, *, step: int, keep: int | None = None
) -> None:
    """Write a state as the checkpoint of a step; all ranks call it, outside ``spmd``.

    Args:
        folder: where checkpoints of the run are kept, one folder each; on all hosts the same one.
        state: a tree of tensors and of plain values (bool, int, float, str), as a step returns it.
            What stands under no placed node is the same on all ranks. To continue a run as if it
            had never stopped, put the place in the data and the random state beside the train
            state: ``{"train": state, "batch": 17, "rng": torch.get_rng_state()}``.
        mesh: the mesh the state lives on.
        step: the number it goes by; a checkpoint of the same step is replaced.
        keep: how many of the newest checkpoints stay; None: all.

    Raises:
        ValueError: for a negative step, or a keep below 1.
        TypeError: for a leaf that is neither a tensor nor a plain value, with its key path.

    >>> import tempfile, torch, zero_fn as zf
    >>> mesh, folder = zf.Mesh(dp=2), tempfile.mkdtemp()
    >>> zf.save(folder, {"w": torch.ones(3), "batch": 17}, mesh, step=5)
    >>> zf.load(folder, {"w": torch.zeros(3), "batch": 0}, mesh)
    {'w': tensor([1., 1., 1.]), 'batch': 17}
    """
    finish()
    _planned(folder, state, mesh, step, keep)(None)


def save_async(
    folder: str | os.PathLike[str], state: PyTree, mesh: Mesh, *, step: int, keep: int | None = None
) -> Saving:
    """Like :func:`save`, and goes on while the files are written; all ranks call it.

    It returns when this rank's share of the state is copied to the host's memory, so that the next
    step may donate the state. One save is under way at a time: the next one, of either kind, waits
    for it. A Python process that ends writes to the end before.

    Returns:
        A handle: ``wait()`` until the checkpoint is there, ``done()`` asks. What went wrong is
        raised by ``wait()``, or else by the next save.

    Raises:
        As :func:`save`, and what went wrong in the save before.

    >>> import tempfile, torch, zero_fn as zf
    >>> mesh, folder = zf.Mesh(dp=2), tempfile.mkdtemp()
    >>> saving = zf.save_async(folder, {"w": torch.ones(3)}, mesh, step=5)
    >>> saving.wait()
    >>> zf.saved_steps(folder)
    [5]
    """
    finish()
    write = _planned(folder, state, mesh, step, keep, on_host=True)
    group = None if is_alone(mesh) else group_of(mesh)
    return start(lambda: write(group), f"step {step} to {folder}")


def _planned(
    folder: str | os.PathLike[str],
    state: PyTree,
    mesh: Mesh,
    step: int,
    keep: int | None,
    on_host: bool = False,
) -> Callable[[Any], None]:
    """What writes the checkpoint, speaking with other ranks over the group that it is given."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; it must be an int of 0 or more")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; it must be 1 or more, or None to keep all")
    from .storage import write  # here, since torch.distributed.checkpoint is slow to import

    wholes = find_wholes(without_general(state, mesh), mesh)
    tensors = {path: x for path, x in wholes.items() if isinstance(x, Whole)}
    values = {path: x for path, x in wholes.items() if not isinstance(x, Whole)}
    for path, value in values.items():
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"the state at {path!r} is {value!r}; a checkpoint holds tensors and values of "
                "bool, int, float and str: convert it, or keep it out of the state"
            )
    if on_host:
        tensors = {path: _on_host(whole) for path, whole in tensors.items()}
    root, name = Path(folder), f"step-{step:08d}"
    hidden = root / f".{name}"

    def begin() -> None:
        for rest in (hidden, *root.glob(".old-*"), *root.glob(".replaced-*")):
            # one that was replaced counts until the new one stands under its name
            if (root / rest.name.removeprefix(".replaced-")).exists() or rest == hidden:
                shutil.rmtree(rest, ignore_errors=True)
        hidden.mkdir(parents=True)

    def publish() -> None:
        with open(hidden / _VALUES, "w") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        _flush(hidden)
        aside = root / f".replaced-{name}"
        if (root / name).exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(root / name, aside)
        os.rename(hidden, root / name)
        _flush(root)
        shutil.rmtree(aside, ignore_errors=True)
        for old in saved_steps(root)[: -keep if keep else 0]:
            gone = root / f".old-step-{old:08d}"
            os.rename(root / f"step-{old:08d}", gone)  # removing a folder takes many steps
            shutil.rmtree(gone)

    def written(group: Any) -> None:
        _on_first(begin, mesh, group)
        write(hidden, tensors, alone=is_alone(mesh), group=group)
        _on_first(publish, mesh, group)

    return written


def _on_host(whole: Whole) -> Whole:
    """The same values in the host's memory, which nobody else writes to."""

    def copy(box: Box) -> Box:
        return box._replace(local=box.local.detach().to("cpu", copy=True))

    return whole._replace(boxes=[copy(box) for box in whole.boxes])


def load(
    folder: str | os.PathLike[str],
    like: PyTree,
    mesh: Mesh,
    *,
    step: int | None = None,
    fresh: Sequence[str] = (),
) -> PyTree:
    """Read a checkpoint, of any mesh and stage, as a state of this mesh; all ranks call it.

    A save under way is waited for.

    Args:
        folder: where the checkpoints are. Load only those you trust: torch's index is a pickle.
        like: a state of the wanted structure, as ``init`` gives it; it is not changed.
        mesh: the mesh it lives on.
        step: the checkpoint's number; None: the newest.
        fresh: patterns (``fnmatch``) of key paths that are left as they are in ``like``, and may be
            missing in the checkpoint or in ``like``: moments of leaves that were frozen, error
            feedback that was made for another number of ranks.

    Returns:
        A state like ``like`` with the saved values, in memory of its own.

    Raises:
        FileNotFoundError: if there is no such checkpoint, with those that there are.
        ValueError: with every key path that is missing, unknown, of another shape, dtype or type,
            and every file that is missing or cut short; a :class:`DamagedError` if nothing but
            files is wrong.
    """
    from .storage import read, read_index

    settle()
    path = _find(Path(folder), step)
    result = copied(without_general(like, mesh))
    wholes = find_wholes(result, mesh)
    wanted = {name: x for name, x in wholes.items() if not matches(name, fresh)}
    tensors = {name: x for name, x in wanted.items() if isinstance(x, Whole)}
    everywhere = set().union(*ranks_values(set(wholes), mesh))
    values: dict[str, Any] = {}
    found: list[str] = []
    try:
        index, damage = read_index(path)
        values = json.loads((path / _VALUES).read_text())
        found = _differences(index, values, wanted, everywhere, fresh)
    except Exception as error:  # an index that is damaged raises anything
        damage = [f"its index cannot be read: {error!r}"]
    everyone = ranks_values((found, damage), mesh)
    found = sorted({line for lines, _ in everyone for line in lines})
    damage = sorted({line for _, lines in everyone for line in lines})
    if found or damage:
        lines = "\n".join(f"  {line}" for line in damage + found)
        text = f"the checkpoint {path} does not fit, and nothing was loaded:\n{lines}"
        if not found:
            raise DamagedError(text)
        raise ValueError(
            f"{text}\n"
            "leaves that may differ stay as they are in `like` with zf.load(..., fresh=[pattern])"
        )
    read(path, tensors, alone=is_alone(mesh))
    leaves, treedef = tree.flatten(result)
    leaves = [
        values[name] if name in wanted and name not in tensors else x
        for name, x in zip(leaf_names(result), leaves, strict=True)
    ]
    return cut_again(tree.unflatten(treedef, leaves), like, mesh)


def saved_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of which a folder holds complete checkpoints, the newest last."""
    root = Path(folder)
    names = [p.name.removeprefix(".replaced-") for p in root.iterdir()] if root.is_dir() else []
    return sorted({int(m[1]) for m in map(_NAME.fullmatch, names) if m})


def set_aside(folder: str | os.PathLike[str], step: int) -> None:
    """Rename a checkpoint, so that it does not count among the saved ones any more."""
    path, aside = _find(Path(folder), step), Path(folder) / f"damaged-step-{step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)


def look(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """What a checkpoint holds, by key path: the :class:`Look` of each tensor, and plain values.

    Raises:
        FileNotFoundError: if there is no such checkpoint, with those that there are.
        DamagedError: if its index cannot be read.
    """
    from .storage import read_index

    path = _find(Path(folder), step)
    try:
        return {**read_index(path)[0], **json.loads((path / _VALUES).read_text())}
    except Exception as error:
        raise DamagedError(f"the index of {path} cannot be read: {error!r}") from error


def _find(root: Path, step: int | None) -> Path:
    steps = saved_steps(root)
    if not steps or (step is not None and step not in steps):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{what} in {root}; there are {steps or 'none'}")
    name = f"step-{steps[-1] if step is None else step:08d}"
    # A save that replaced it may have been killed between its two renames.
    return root / name if (root / name).exists() else root / f".replaced-{name}"


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _differences(
    index: dict[str, Look],
    values: dict[str, Any],
    wanted: dict[str, Any],
    everywhere: set[str],
    fresh: Sequence[str],
) -> list[str]:
    """What keeps this rank from loading, a line each."""
    saved: dict[str, Any] = {**index, **values}
    lines = [
        f"{name!r} is in the checkpoint and not in `like`"
        for name in saved
        if name not in everywhere and not matches(name, fresh)
    ]
    for name, x in wanted.items():
        if name not in saved:
            lines.append(f"{name!r} is in `like` and not in the checkpoint")
            continue
        there: Any = saved[name]
        if isinstance(x, Whole) != isinstance(there, Look):
            here = "a tensor" if isinstance(x, Whole) else repr(x)
            other = "a tensor" if isinstance(there, Look) else repr(there)
            lines.append(f"{name!r} is {here} in `like` and {other} in the checkpoint")
        elif isinstance(x, Whole):
            if there.shape != x.shape:
                lines.append(f"{name!r} has shape {x.shape}, saved is {there.shape}")
            if there.dtype != x.dtype:
                lines.append(f"{name!r} has dtype {x.dtype}, saved is {there.dtype}")
        elif type(there) is not type(x):
            lines.append(f"{name!r} is {x!r} in `like`, saved is {there!r}")
    return lines


def _is_sharded(node: Any) -> bool:
    return isinstance(node, Sharded)


def copied(state: PyTree) -> PyTree:
    """The same state in memory of its own; ties stay ties."""
    leaves, treedef = tree.flatten(state)
    copies: dict[int, Any] = {}
    for x in leaves:
        if isinstance(x, Tensor) and id(x) not in copies:
            copies[id(x)] = x.detach().clone(memory_format=torch.contiguous_format)
    return tree.unflatten(treedef, [copies.get(id(x), x) for x in leaves])


def without_general(state: PyTree, mesh: Mesh) -> PyTree:
    """The state with what schemes of a user's own cut gathered: they promise nothing else."""
    if not any(map(is_general, _sharded(state))):
        return state

    def whole(node: Any) -> Any:
        if not is_general(node):
            return node
        x = agreed(node.whole(node.local), node.axis)
        return Sharded(x, node.shape, node.axis, Replicated(), node.parts)

    return spmd(lambda s: tree.map(whole, s, is_leaf=_is_sharded), mesh, data_axes=())(state)


def cut_again(plain: PyTree, like: PyTree, mesh: Mesh) -> PyTree:
    cuts = [node.cut if is_general(node) else None for node in _sharded(like)]
    if not any(cuts):
        return plain

    def cut(state: PyTree) -> PyTree:
        rest = iter(cuts)

        def piece(node: Any) -> Any:
            wanted = next(rest) if _is_sharded(node) else None
            if wanted is None:
                return node
            return Sharded(wanted.scheme.scatter(node.local, wanted.axis), *wanted)

        return tree.map(piece, state, is_leaf=_is_sharded)

    return spmd(cut, mesh, data_axes=())(plain)


def _sharded(state: PyTree) -> list[Sharded]:
    return [node for node in tree.leaves(state, _is_sharded) if _is_sharded(node)]


def is_alone(mesh: Mesh) -> bool:
    return mesh.interpreter != "processes" or mesh.size == 1


def ranks_values(value: Any, mesh: Mesh, group: Any = None) -> list[Any]:
    """Every rank's value."""
    if is_alone(mesh):
        return [value]
    values: list[Any] = [None] * mesh.size
    dist.all_gather_object(values, value, group)
    return values


def _on_first(f: Callable[[], None], mesh: Mesh, group: Any = None) -> None:
    """Run ``f`` on rank 0 while the others wait; what it raises, all raise."""
    error = None
    if mesh.rank == 0:
        try:
            f()
        except Exception as raised:
            error = raised
    (first, *_) = ranks_values(error, mesh, group)
    if first is not None:
        raise first


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
