"""Parameters as a safetensors file, whole tensors by key path: what other programs read and write.

Files are mapped into memory, so that a rank reads only what it holds. Written files pass through
rank 0, which has the whole parameters in its host's memory meanwhile.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import tree
from .checkpoint import (
    DamagedError,
    copied,
    cut_again,
    is_alone,
    matches,
    ranks_values,
    without_general,
)
from .mesh import Mesh
from .regions import Box, Whole, find_wholes, leaf_names
from .tree import PyTree, Tensor


def export_safetensors(path: str | os.PathLike[str], params: PyTree, mesh: Mesh) -> None:
    """Write parameters as a safetensors file; all ranks call it, outside ``spmd``.

    Rank 0 gathers them in its host's memory and writes. Names are key paths
    (``blocks.0.norm.weight``), as a state dict of the same structure has them. Tied leaves are
    written under each of their names. The file appears under its name when it is complete.

    Args:
        path: the file.
        params: tensors, of any mesh and stage, as a step returned them; not quantised.
        mesh: the mesh they live on.

    Raises:
        ValueError: for quantised weights; for two leaves of one name.
        TypeError: for a leaf that is no tensor, or of a dtype that the format lacks.
        OSError: on every rank, naming the file, if it cannot be written.
        ModuleNotFoundError: without safetensors, ``pip install 'zero-fn[safetensors]'``.

    >>> import tempfile, torch, zero_fn as zf
    >>> mesh, file = zf.Mesh(dp=2), tempfile.mkdtemp() + "/model.safetensors"
    >>> zf.export_safetensors(file, {"w": {"a": torch.ones(3)}}, mesh)
    >>> zf.import_safetensors(file, {"w": {"a": torch.zeros(3)}}, mesh)
    {'w': {'a': tensor([1., 1., 1.])}}
    """
    _refuse_quantised(params)
    wholes: dict[str, Whole] = find_wholes(without_general(params, mesh), mesh)
    for name, x in wholes.items():
        if not isinstance(x, Whole):
            raise TypeError(f"{name!r} is {x!r}; a safetensors file holds tensors only")
    there = ranks_values({name: _places(x) for name, x in wholes.items()}, mesh)
    looks = {name: places[:2] for rank in there for name, places in rank.items()}
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in looks.items():
        parts = _gathered(name, wholes.get(name), there, mesh)
        if not mesh.rank:
            tensors[name] = torch.empty(shape, dtype=dtype)
            for box in parts:
                _part(tensors[name], box).copy_(box.local)
    error = None
    if not mesh.rank:
        try:
            _write(Path(path), tensors)
        except (OSError, TypeError) as raised:
            error = raised
    (error, *_) = ranks_values(error, mesh)
    if error is not None:
        raise error


def import_safetensors(
    path: str | os.PathLike[str], like: PyTree, mesh: Mesh, *, fresh: Sequence[str] = ()
) -> PyTree:
    """Read a safetensors file as parameters of this mesh; all ranks call it, outside ``spmd``.

    Args:
        path: the file, from :func:`export_safetensors` or any other program.
        like: parameters of the wanted structure; it is not changed. Their dtypes stay, and floating
            point numbers of another dtype are converted. Of tied leaves one name is enough.
        mesh: the mesh they live on.
        fresh: patterns of names that are left as they are in ``like``, and may be missing in it or
            in the file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for every name that is missing or unknown, every other shape, and dtypes of
            another kind; for a file that is no safetensors file or cut short.
        ModuleNotFoundError: without safetensors, ``pip install 'zero-fn[safetensors]'``.
    """
    _refuse_quantised(like)
    entries = read_safetensors(Path(path))
    result = copied(without_general(like, mesh))
    wholes = find_wholes(result, mesh)
    names = dict(zip(leaf_names(result), tree.leaves(result), strict=True))
    source: dict[str, str] = {}  # of each name, the one in the file: a tie's own, or its partner's
    for name, x in names.items():
        partners = [other for other, y in names.items() if y is x and other in entries]
        source[name] = name if name in entries or not partners else partners[0]
    wanted = {name: x for name, x in wholes.items() if not matches(name, fresh)}
    found = _differences(entries, wanted, source)
    found += [
        f"{name!r} is in the file and not in `like`"
        for name in set(entries).difference(*ranks_values([*wholes], mesh))
        if not matches(name, fresh)
    ]
    found = sorted(set().union(*ranks_values(found, mesh)))
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise ValueError(
            f"{path} does not fit, and nothing was read:\n{lines}\n"
            "names that may differ stay as they are in `like` with fresh=[pattern]"
        )
    for name, x in wanted.items():
        for box in x.boxes:
            box.local.copy_(_part(entries[source[name]], box))
    return cut_again(result, like, mesh)


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped into memory: what is not used is not read.

    Raises:
        FileNotFoundError: if there is no such file.
        DamagedError: for one that is no safetensors file, or was cut short.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(file))
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DamagedError(f"{file} is no safetensors file, or was cut short: {error}") from error


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    hidden = file.with_name(f".{file.name}")
    try:
        save_file(tensors, hidden, metadata={"format": "pt"})
    except KeyError as error:
        raise TypeError(f"safetensors files hold no tensors of dtype {error}") from error
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    with open(hidden, "rb+") as written:
        os.fsync(written.fileno())
    os.replace(hidden, file)


def _refuse_quantised(params: PyTree) -> None:
    def is_quantised(node: Any) -> bool:
        return hasattr(type(node), "__zero_fn_frozen__")

    nodes = zip(tree.paths(params, is_quantised), tree.leaves(params, is_quantised), strict=True)
    for path, node in nodes:
        if is_quantised(node):
            raise ValueError(
                f"{path!r} is quantised, and nobody else reads its integers and scales; "
                "zf.dequantize(params) before"
            )


def _places(whole: Whole) -> tuple[Any, ...]:
    """What other ranks want to know of a leaf: its look, and the boxes that are here."""
    return whole.shape, whole.dtype, [(box.offsets, box.sizes) for box in whole.boxes]


def _gathered(name: str, whole: Whole | None, there: list[dict[str, Any]], mesh: Mesh) -> list[Box]:
    """On rank 0 all boxes of a leaf, each once; nothing on the others."""
    owner: dict[Any, int] = {}
    for rank, places in enumerate(there):
        for place in places[name][2] if name in places else ():
            owner.setdefault(place, rank)
    boxes = whole.boxes if whole is not None else []
    own = [box for box in boxes if owner[box.offsets, box.sizes] == mesh.rank]
    if is_alone(mesh) or set(owner.values()) <= {0}:
        return own
    sent = [box._replace(local=box.local.detach().cpu().clone()) for box in own]
    parts: list[Any] | None = None if mesh.rank else [None] * mesh.size
    dist.gather_object(sent, parts)
    return [box for part in parts or () for box in part]


def _part(values: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        values = values.narrow(dim, start, size)
    return values


def _differences(
    entries: dict[str, Tensor], wanted: dict[str, Any], source: dict[str, str]
) -> list[str]:
    lines = []
    for name, x in wanted.items():
        entry = entries.get(source[name])
        if not isinstance(x, Whole):
            lines.append(f"{name!r} is {x!r} in `like`; a file holds tensors only")
        elif entry is None:
            lines.append(f"{name!r} is in `like` and not in the file")
        elif tuple(entry.shape) != tuple(x.shape):
            lines.append(f"{name!r} has shape {tuple(x.shape)}, in the file {tuple(entry.shape)}")
        elif entry.dtype != x.dtype and not (
            entry.dtype.is_floating_point and x.dtype.is_floating_point
        ):
            lines.append(f"{name!r} has dtype {x.dtype}, in the file {entry.dtype}")
    return lines
