"""Parameters as a safetensors file, whole tensors by key path: what other programs read and write.

The format: eight bytes with the length of a JSON header, the header (name to dtype, shape and
place), and the values in little-endian rows, https://github.com/huggingface/safetensors. Files are
mapped into memory, so that a rank reads only what it holds, and one leaf at a time is gathered.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Entry(NamedTuple):
    """A tensor in a file: its look, and its first and last byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def export_safetensors(path: str | os.PathLike[str], params: PyTree, mesh: Mesh) -> None:
    """Write parameters as a safetensors file; all ranks call it, outside ``spmd``.

    Rank 0 writes; it gathers one leaf at a time. Names are key paths (``blocks.0.norm.weight``), as
    a state dict of the same structure has them. Tied leaves are written under each of their names.
    The file appears under its name when it is complete.

    Args:
        path: the file.
        params: tensors, of any mesh and stage, as a step returned them; not quantised.
        mesh: the mesh they live on.

    Raises:
        ValueError: for quantised weights; for two leaves of one name.
        TypeError: for a leaf that is no tensor, or of a dtype that the format lacks.

    >>> import tempfile, torch, zero_fn as zf
    >>> mesh, file = zf.Mesh(dp=2), tempfile.mkdtemp() + "/model.safetensors"
    >>> zf.export_safetensors(file, {"w": {"a": torch.ones(3)}}, mesh)
    >>> zf.import_safetensors(file, {"w": {"a": torch.zeros(3)}}, mesh)
    {'w': {'a': tensor([1., 1., 1.])}}
    """
    _refuse_quantised(params)
    wholes: dict[str, Whole] = find_wholes(without_general(params, mesh), mesh)
    for name, x in wholes.items():
        if not isinstance(x, Whole) or x.dtype not in _NAMES:
            what = x.dtype if isinstance(x, Whole) else repr(x)
            raise TypeError(f"{name!r} is {what}; a safetensors file holds {', '.join(_DTYPES)}")
    there = ranks_values({name: _places(x) for name, x in wholes.items()}, mesh)
    entries = _laid_out(there)
    file, error = Path(path), None
    hidden, target = file.with_name(f".{file.name}"), None
    try:
        if not mesh.rank:
            target = _made(hidden, entries)
    except OSError as raised:
        error = raised
    for name, entry in entries.items():
        parts = _gathered(name, wholes.get(name), there, mesh)
        if target is not None:
            values = _values(target, entry)
            for box in parts:
                _part(values, box).copy_(box.local)
    if target is not None:
        del target, values
        with open(hidden, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(hidden, file)
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
    """
    _refuse_quantised(like)
    entries, data = _read(Path(path))
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
        values = _values(data, entries[source[name]])
        for box in x.boxes:
            box.local.copy_(_part(values, box))
    return cut_again(result, like, mesh)


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


def _laid_out(there: list[dict[str, Any]]) -> dict[str, Entry]:
    """Where each tensor of all ranks goes; wide dtypes first, so that all are aligned."""
    looks = {name: places[:2] for rank in reversed(there) for name, places in rank.items()}
    order = sorted(looks, key=lambda name: (-looks[name][1].itemsize, name))
    entries, start = {}, 0
    for name in order:
        shape, dtype = looks[name]
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, tuple(shape), start, stop)
        start = stop
    return entries


def _made(file: Path, entries: dict[str, Entry]) -> Tensor:
    """A new file with its header, and the bytes after it, as a tensor that writes through."""
    header: dict[str, Any] = {
        name: {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.start, entry.stop],
        }
        for name, entry in entries.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    length = max((entry.stop for entry in entries.values()), default=0)
    with open(file, "wb") as new:
        new.write(len(text).to_bytes(8, "little") + text)
        new.flush()
        if length and hasattr(os, "posix_fallocate"):
            # now, since a full disk would otherwise end the process while it is mapped
            os.posix_fallocate(new.fileno(), 8 + len(text), length)
        elif length:
            os.truncate(new.fileno(), 8 + len(text) + length)
    return _mapped(file, 8 + len(text), shared=True)


def _mapped(file: Path, start: int, shared: bool = False) -> Tensor:
    size = file.stat().st_size
    return torch.from_file(str(file), shared=shared, size=size, dtype=torch.uint8)[start:]


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


def _values(data: Tensor, entry: Entry) -> Tensor:
    """A tensor of a file, in the file's memory."""
    flat = data[entry.start : entry.stop]
    if flat.storage_offset() % entry.dtype.itemsize:  # a header of another program
        flat = flat.clone()
    if not len(flat):
        return torch.empty(entry.shape, dtype=entry.dtype)
    return flat.view(entry.dtype).view(entry.shape)


def _part(values: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        values = values.narrow(dim, start, size)
    return values


def _read(file: Path) -> tuple[dict[str, Entry], Tensor]:
    """The header of a file, and the bytes after it."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= size - 8:
            raise DamagedError(f"{file} is no safetensors file, or was cut short")
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: Entry(_DTYPES[x["dtype"]], tuple(x["shape"]), *x["data_offsets"])
                for name, x in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"the header of {file} cannot be read: {error!r}") from error
    for name, entry in entries.items():
        if entry.stop - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise DamagedError(f"{file}: {name!r} has {entry.stop - entry.start} bytes: {entry}")
    end = 8 + length + max((entry.stop for entry in entries.values()), default=0)
    if size < end:
        raise DamagedError(f"{file} has {size} bytes and should have {end}")
    return entries, _mapped(file, 8 + length)


def _differences(
    entries: dict[str, Entry], wanted: dict[str, Any], source: dict[str, str]
) -> list[str]:
    lines = []
    for name, x in wanted.items():
        entry = entries.get(source[name])
        if not isinstance(x, Whole):
            lines.append(f"{name!r} is {x!r} in `like`; a file holds tensors only")
        elif entry is None:
            lines.append(f"{name!r} is in `like` and not in the file")
        elif entry.shape != tuple(x.shape):
            lines.append(f"{name!r} has shape {tuple(x.shape)}, in the file {entry.shape}")
        elif entry.dtype != x.dtype and not (
            entry.dtype.is_floating_point and x.dtype.is_floating_point
        ):
            lines.append(f"{name!r} has dtype {x.dtype}, in the file {entry.dtype}")
    return lines
