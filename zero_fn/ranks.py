"""spmd: run the program of one rank on every rank of a mesh.

State crosses the boundary as its placed nodes say (``placed.py``): each has the mesh axes over
which its tensors differ from rank to rank. On processes each rank holds its own tensors; in the
simulation the tensors of all ranks lie stacked, with one leading dimension for each of these axes
(in the mesh's order, axes of size 1 left out). Tensors under no placed node are the same on all
ranks. Batches are split on dimension 0 over the data axes.
"""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import tree
from .collectives import check_invariant
from .mesh import Axis, Mesh, bind, bound_axes
from .placed import Leaf, placed_leaves
from .primitives import register_with_dynamo
from .tree import PyTree, Tensor

BatchPlacement = Literal["split", "local", "replicated"]
Randomness = Literal["error", "different", "same"]

# Axes of these names cut models, not batches.
_MODEL_AXES = {"tp", "pp", "sp", "cp", "ep"}


def spmd(
    f: Callable[..., Any],
    mesh: Mesh,
    *,
    batch: BatchPlacement | Sequence[BatchPlacement] = "split",
    data_axes: Sequence[str] | None = None,
    randomness: Randomness = "error",
) -> Callable[..., Any]:
    """Run ``f``, the program of one rank, on every rank of the mesh.

    Args:
        f: a function of (state, *batches). It sees one rank's tensors, and may call collectives
            over the mesh's axes.
        mesh: the axes, and where the ranks are.
        batch: how each argument after the first reaches the ranks. ``"split"``: the global batch,
            each tensor cut on dimension 0 over the data axes. ``"local"``: on processes this
            rank's own batch, in the simulation all ranks' own, stacked along leading dimensions,
            one for each data axis. ``"replicated"``: the same for all. One for all arguments, or
            one for each.
        data_axes: the axes over which batches are split; None: ``dp`` and the axes whose names
            start with ``dp``.
        randomness: what random operations do in the simulation, as in ``torch.func.vmap``.

    Returns:
        A function of the same arguments, whose results are the ranks' results: leaves of placed
        nodes stay on their ranks, everything else must be the same on all ranks.

    Raises:
        ValueError: if a batch is not divisible by the data axes; in the simulation, if a result
            that must be the same on all ranks varies, with its key path; if an axis is unknown.
        RuntimeError: in the simulation, for what a simulated rank cannot do (``.item()``, a branch
            on a value, ...), with what to write instead.

    >>> import torch
    >>> import zero_fn as zf
    >>> mesh = zf.Mesh(dp=2)
    >>> zf.spmd(lambda _, x: zf.psum(x.sum(), "dp"), mesh)(None, torch.arange(4.0))
    tensor(6.)
    """
    split_axes = _data_axes(mesh, data_axes)
    register_with_dynamo()

    @functools.wraps(f)
    def on_every_rank(state: PyTree, *batches: PyTree) -> Any:
        for name in mesh.shape:
            if name in bound_axes():
                raise ValueError(f"spmd inside spmd: axis {name!r} is bound already; rename one")
        placements = _placements(batch, len(batches))
        args = (state, *batches)
        found = placed_leaves(state)
        for leaf in found:
            _check_stacked(leaf, "state", mesh)
        for number, (argument, placement) in enumerate(zip(batches, placements, strict=True), 1):
            inner = placed_leaves(argument, f"argument {number}")
            for leaf in inner:
                if leaf.placed:
                    _check_stacked(leaf, "", mesh)
            found += [_place(leaf, placement, mesh, split_axes) for leaf in inner]
        return _RUN[mesh.interpreter](f, mesh, args, found, randomness)

    on_every_rank.mesh = mesh  # type: ignore[attr-defined]
    return on_every_rank


def _data_axes(mesh: Mesh, data_axes: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(data_axes, str):
        data_axes = (data_axes,)
    if data_axes is None:
        strange = [n for n in mesh.shape if not n.startswith("dp") and n not in _MODEL_AXES]
        if strange:
            raise ValueError(
                f"{mesh!r}: does axis {strange[0]!r} split the batch? Say which axes do: "
                f"data_axes=({strange[0]!r},), or data_axes=() for none"
            )
        return tuple(name for name in mesh.shape if name.startswith("dp"))
    for name in data_axes:
        if name not in mesh.shape:
            raise ValueError(f"data_axes names {name!r}, and the mesh has {list(mesh.shape)}")
    return tuple(name for name in mesh.shape if name in data_axes)


def _placements(
    batch: BatchPlacement | Sequence[BatchPlacement], count: int
) -> Sequence[BatchPlacement]:
    each = [batch] * count if isinstance(batch, str) else list(batch)
    if len(each) != count:
        raise ValueError(f"batch names {len(each)} placements, and there are {count} batches")
    for placement in each:
        if placement not in ("split", "local", "replicated"):
            raise ValueError(f"batch is {placement!r}; it is 'split', 'local' or 'replicated'")
    return each


def _place(leaf: Leaf, placement: BatchPlacement, mesh: Mesh, split_axes: tuple[str, ...]) -> Leaf:
    """One leaf of a batch, cut over the data axes as the interpreter wants it."""
    x = leaf.value
    if leaf.placed or placement == "replicated" or not isinstance(x, Tensor):
        return leaf
    axes = tuple(name for name in split_axes if mesh.shape[name] > 1)
    sizes = [mesh.shape[name] for name in axes]
    ranks = 1
    for size in sizes:
        ranks *= size
    if placement == "local":
        if mesh.interpreter == "simulated" and list(x.shape[: len(sizes)]) != sizes:
            raise ValueError(
                f"{leaf.path}: a local batch has a leading dimension for each data axis, "
                f"{dict(zip(axes, sizes, strict=True))}, and its shape is {tuple(x.shape)}"
            )
        return leaf._replace(axes=axes)
    split = " × ".join(f"{name!r} ({size})" for name, size in zip(axes, sizes, strict=True))
    if x.ndim == 0 and axes:
        raise ValueError(
            f"{leaf.path}: a 0-dim tensor cannot be split over {split}; if all ranks use the same, "
            "write spmd(..., batch='replicated') for this argument"
        )
    if axes and x.shape[0] % ranks:
        raise ValueError(
            f"{leaf.path}: dimension 0 of shape {tuple(x.shape)} is not divisible by the "
            f"{ranks} ranks of {split}; use a batch of {x.shape[0] // ranks * ranks or ranks}"
        )
    if mesh.interpreter == "simulated":
        return leaf._replace(
            value=x.reshape(*sizes, x.shape[0] // ranks, *x.shape[1:]) if axes else x, axes=axes
        )
    index = 0
    for name in axes:
        index = index * mesh.shape[name] + mesh.axes[name].place
    length = x.shape[0] // ranks if axes else 0
    return leaf._replace(value=x.narrow(0, index * length, length) if axes else x, axes=axes)


def _check_stacked(leaf: Leaf, what: str, mesh: Mesh) -> None:
    """Refuse pieces that were cut on another mesh."""
    where = " at ".join([what] * bool(what) + [repr(leaf.path)] * bool(leaf.path))
    for name in leaf.axes:
        if name not in mesh.shape:
            raise ValueError(f"{where} is cut over axis {name!r}, and the mesh has {[*mesh.shape]}")
    if mesh.interpreter == "simulated" and isinstance(leaf.value, Tensor):
        sizes = [mesh.shape[name] for name in mesh.shape if name in leaf.axes]
        sizes = [size for size in sizes if size > 1]
        if list(leaf.value.shape[: len(sizes)]) != sizes:
            raise ValueError(
                f"{where} has a tensor of shape {tuple(leaf.value.shape)}, which does not hold the "
                f"pieces of the {sizes} ranks of {leaf.axes}: it was cut on another mesh. Gather "
                "it there (zf.gather_tree) and shard it again on this one"
            )


def _run_processes(
    f: Callable[..., Any], mesh: Mesh, args: Any, found: list[Leaf], randomness: Randomness
) -> Any:
    with bind(mesh.axes):
        return f(*_rebuild(args, [leaf.value for leaf in found]))


def _run_abstract(
    f: Callable[..., Any], mesh: Mesh, args: Any, found: list[Leaf], randomness: Randomness
) -> Any:
    """Rank 0's program on fake tensors: the results have shapes and dtypes, and no values."""
    fake = next(
        (leaf.value.fake_mode for leaf in found if isinstance(leaf.value, FakeTensor)), None
    )
    mode = fake or FakeTensorMode(allow_non_fake_inputs=True)
    values = [
        mode.from_tensor(leaf.value, static_shapes=True)
        if isinstance(leaf.value, Tensor) and not isinstance(leaf.value, FakeTensor)
        else leaf.value
        for leaf in found
    ]
    with mode, bind(mesh.axes):
        return f(*_rebuild(args, values))


def _rebuild(args: Any, values: list[Any]) -> Any:
    _, treedef = tree.flatten(args)
    return tree.unflatten(treedef, values)


def _run_simulated(
    f: Callable[..., Any], mesh: Mesh, args: Any, found: list[Leaf], randomness: Randomness
) -> Any:
    axes = [axis for axis in mesh.axes.values() if axis.size > 1]
    _, treedef = tree.flatten(args)
    # The same tensor at two places stays one tensor inside, so that ties can be seen there; but
    # where it is the ranks' own at one place and shared at the other, it is two.
    slots: dict[tuple[int, tuple[str, ...]], int] = {}
    tensors: list[Leaf] = []
    for leaf in found:
        if isinstance(leaf.value, Tensor) and _slot(leaf) not in slots:
            slots[_slot(leaf)] = len(tensors)
            tensors.append(leaf)
    results: list[Leaf] = []
    out_treedef: list[tree.TreeDef] = []

    def rank(tokens: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        bound = {a.name: a for a in mesh.axes.values() if a.size == 1}
        for axis, token in zip(axes, tokens, strict=True):
            bound[axis.name] = axis._replace(token=token)
        with bind(bound):
            inner = [
                values[slots[_slot(leaf)]] if isinstance(leaf.value, Tensor) else leaf.value
                for leaf in found
            ]
            out = f(*tree.unflatten(treedef, inner))
            results[:] = placed_leaves(out)
            out_treedef[:] = [tree.flatten(out)[1]]
            return [
                _checked(leaf, [bound[axis.name] for axis in axes])
                for leaf in results
                if isinstance(leaf.value, Tensor)
            ]

    mapped: Callable[..., Any] = rank
    for level in reversed(range(len(axes))):
        in_dims = (
            [0 if place == level else None for place in range(len(axes))],
            [0 if axes[level].name in leaf.axes else None for leaf in tensors],
        )
        mapped = torch.func.vmap(mapped, in_dims, 0, randomness=randomness)
    tokens = [torch.arange(axis.size) for axis in axes]
    if torch.compiler.is_compiling():
        outs = mapped(tokens, [leaf.value for leaf in tensors])
    else:
        try:
            outs = mapped(tokens, [leaf.value for leaf in tensors])
        except RuntimeError as error:
            explained = _explained(error)
            if explained is None:
                raise
            raise explained from error
    stacked = iter(outs)
    return tree.unflatten(
        out_treedef[0],
        [
            _unstacked(next(stacked), leaf, axes) if isinstance(leaf.value, Tensor) else leaf.value
            for leaf in results
        ],
    )


def _slot(leaf: Leaf) -> tuple[int, tuple[str, ...]]:
    return id(leaf.value), leaf.axes


def _checked(leaf: Leaf, axes: Sequence[Axis]) -> Tensor:
    x: Tensor = leaf.value
    for axis in axes:
        if axis.name not in leaf.axes:
            where = f"the result at {leaf.path!r}" if leaf.path else "the result"
            message = (
                f"{where} varies over axis {axis.name!r} (each rank has a value of its own), and "
                f"must be the same on all ranks. Average it, zf.pmean(x, {axis.name!r}), or sum "
                f"it, zf.psum(x, {axis.name!r}); a parameter's gradient comes out summed if the "
                "loss takes the parameter through zf.unshard or zf.pvary; to return every rank's "
                f"value, zf.all_gather(x, {axis.name!r})"
            )
            x = check_invariant(x, axis, message)
    return x


def _unstacked(x: Tensor, leaf: Leaf, axes: Sequence[Axis]) -> Tensor:
    for dim in reversed(range(len(axes))):
        if axes[dim].name not in leaf.axes:
            x = x.select(dim, 0)
    # What vmap expanded to the ranks gets memory of its own, so that it can be updated in place.
    return x.contiguous() if 0 in x.stride() and x.numel() else x


# The words of torch's refusals, and what a rank's program writes instead.
_ADVICE = {
    ".item()": "keep it a tensor (torch.where instead of a branch on it), and read the value from "
    "the result, outside the rank's program",
    "data-dependent control flow": "a branch on a value can differ from rank to rank; use "
    "torch.where(condition, a, b)",
    "Cannot access data pointer": "a rank's tensor has no numbers of its own to hand out; keep it "
    "a tensor, and read the value from the result, outside the rank's program",
    "inplace arithmetic": "the tensor it writes to is shared by all ranks; write "
    "x = x + y instead of x += y, or make it like one that varies, torch.zeros_like(x)",
    "doesn't match the broadcast shape": "if an in-place operation wrote to a tensor that all "
    "ranks share, write x = x + y instead of x += y",
    "randomness": "say what random operations do: spmd(..., randomness='different') or 'same'",
    "Batching rule not implemented": "this operation has no batching rule; write it with others, "
    "or run the ranks as processes",
    "dynamic shape": "its shape depends on values; use a mask and torch.where",
    "differently shaped Tensor": "its shape depends on values; use a mask and torch.where",
    "running_mean": "its running statistics are shared by all ranks; keep none "
    "(track_running_stats=False), or use one that needs none, such as a layer norm",
    "supported yet": "this operation has no batching rule; write it with others, or run the ranks "
    "as processes",
    "nonzero": "its shape depends on values; use a mask and torch.where",
}


def _explained(error: RuntimeError) -> RuntimeError | None:
    text = str(error)
    advice = next((words for key, words in _ADVICE.items() if key in text), None)
    if advice is None:
        return None
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and "/zero_fn/" not in frame.filename:
            where = f" at {frame.filename}:{frame.lineno}: `{frame.line}`"
            break
    return RuntimeError(f"not possible inside a simulated rank{where}; {advice}. ({text})")


_RUN = {
    "processes": _run_processes,
    "simulated": _run_simulated,
    "abstract": _run_abstract,
}
