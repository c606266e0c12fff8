"""Files: the leaves of a state in a folder, memory-mapped, and updated so that a crash tears none.

A leaf on disk is a plain tensor whose memory is a file; torch's storage knows the file's name, so
nothing else has to be kept. Each leaf has two files of its full size, its *slots*: ``00007.0.leaf``
and ``00007.1.leaf``. One holds the state, the other takes the next one. A step never writes to the
files that it reads. When all new leaves are written and synced, ``manifest.json``, which says which
slot counts, is replaced by an atomic rename: a process that dies before it leaves the old state,
one that dies after it the new one, never a mix. So disk space is twice the state, and the traffic
of a step is that of a copy.

Slots are allocated in full when they are made: a disk cannot run full in the middle of a step.
The manifest also remembers the state before, whose files stay as they were until the next step
writes: ranks that died on both sides of a step go back to the one that all of them have.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from .tree import Tensor

CHUNK = 16 << 20  # bytes in memory at once, of everything that one chunk of an update reads
PAGE = 4096
MANIFEST = "manifest.json"
_T = TypeVar("_T")
_NAME = re.compile(r"(\d{5})\.([01])\.leaf")


class Place(NamedTuple):
    """Where a tensor on disk lies: the leaf of that number in a folder, in one of its slots."""

    folder: Path
    number: int
    slot: int

    @property
    def file(self) -> Path:
        return self.folder / f"{self.number:05d}.{self.slot}.leaf"

    @property
    def other(self) -> "Place":
        return self._replace(slot=1 - self.slot)


def place_of(x: Tensor) -> Place | None:
    """Where a tensor lies on disk; None for one in memory."""
    name = x.untyped_storage().filename if x.device.type == "cpu" else None
    if name is None:
        return None
    folder, file = os.path.split(name)
    match = _NAME.fullmatch(file)
    return Place(Path(folder), int(match[1]), int(match[2])) if match else None


def is_on_disk(x: Tensor) -> bool:
    """Whether a tensor's memory is a file of this room."""
    return place_of(x) is not None


class Entry(NamedTuple):
    """What the manifest says of one leaf; its number is its place in the list."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: int
    before: int  # the slot of the generation before

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Manifest(NamedTuple):
    """Which slot of each leaf counts, and how many steps were committed."""

    generation: int
    entries: tuple[Entry, ...]


def create(
    folder: Path, leaves: Sequence[tuple[str, Tensor]], fill: Callable[[list[Tensor]], None]
) -> list[Tensor]:
    """Make files for leaves (key path, tensor of at least one byte) in a folder, which is made.

    ``fill`` writes the tensors on disk that it is given. Nothing is left behind if it fails.

    Raises:
        FileExistsError: if the folder holds a state already.
        OSError: naming the folder or the file, if there is not enough room, or none may be written.
    """
    if (folder / MANIFEST).exists():
        raise FileExistsError(
            errno.EEXIST,
            "this folder holds a state already: read it by zf.restore(like, folder), remove it by "
            "zf.discard(folder), or name another folder",
            str(folder),
        )
    made_folder = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    entries = tuple(Entry(path, tuple(x.shape), x.dtype, 0, 0) for path, x in leaves)
    made: list[Path] = []
    try:
        need = 2 * sum(_rounded(entry.nbytes) for entry in entries)
        free = shutil.disk_usage(folder).free
        if need > free:
            raise OSError(
                errno.ENOSPC,
                f"the state takes {need:,} bytes here (two slots for each leaf), and {free:,} are "
                "free; offload less (where=..., fraction=...), or to another disk",
                str(folder),
            )
        mapped = []
        for number, entry in enumerate(entries):
            place = Place(folder, number, 0)
            for file in (place.file, place.other.file):
                made.append(file)
                _allocate(file, _rounded(entry.nbytes), os.O_EXCL)
            mapped.append(_mapped(place, entry.shape, entry.dtype))
        fill(mapped)
        _sync([Place(folder, number, 0) for number in range(len(entries))])
        _write_manifest(folder, Manifest(0, entries))
    except BaseException:
        for file in [*made, folder / MANIFEST, folder / f"{MANIFEST}.new"]:
            file.unlink(missing_ok=True)
        if made_folder:
            folder.rmdir()
        raise
    return mapped


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is none of ours.
    """
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(
            errno.ENOENT, "no state was offloaded here, or the folder is gone", str(file)
        )
    try:
        told = json.loads(file.read_text())
        entries = tuple(
            Entry(e["path"], tuple(e["shape"]), getattr(torch, e["dtype"]), e["slot"], e["before"])
            for e in told["leaves"]
        )
        return Manifest(told["generation"], entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a manifest that zf.offload wrote: {error}") from error


def load(folder: Path) -> dict[str, Tensor]:
    """The leaves of the state in a folder, by key path.

    Raises:
        FileNotFoundError: if there is none, or a file is missing.
        OSError: if a file is shorter than its leaf.
    """
    entries = read_manifest(folder).entries
    found = {}
    for number, entry in enumerate(entries):
        place = Place(folder, number, entry.slot)
        _check(place, entry.nbytes)
        found[entry.path] = _mapped(place, entry.shape, entry.dtype)
    return found


def go_back(folder: Path, generation: int) -> None:
    """Make the generation before count again, if it is the one asked for.

    Raises:
        ValueError: if the folder has neither this generation nor could go back to it.
    """
    manifest = read_manifest(folder)
    if manifest.generation == generation:
        return
    if manifest.generation != generation + 1:
        raise ValueError(
            f"{folder} holds the state after {manifest.generation} steps and the one before, and "
            f"another rank has one after {generation}: they are not of the same run"
        )
    entries = tuple(entry._replace(slot=entry.before) for entry in manifest.entries)
    _write_manifest(folder, Manifest(generation, entries))


def next_slot(x: Tensor) -> Tensor:
    """The tensor that will take the next value of one on disk; what it holds now is stale."""
    place = place_of(x)
    assert place is not None
    return _mapped(place.other, tuple(x.shape), x.dtype)


def check(tensors: Sequence[Tensor]) -> None:
    """Before a step: that both slots of each tensor on disk are there, whole, and may be written.

    Raises:
        OSError: naming the first file that is missing, shorter than its leaf, or read-only.
        ValueError: for a tensor of a state that a later step has replaced.
    """
    manifests: dict[Path, Manifest] = {}
    for x in tensors:
        place = place_of(x)
        if place is None:
            continue
        folder, number, slot = place
        if folder not in manifests:
            manifests[folder] = read_manifest(folder)
        entry = manifests[folder].entries[number]
        if entry.slot != slot:
            raise ValueError(
                f"the tensor in {place.file} ({entry.path!r}) is of a state that a later step has "
                "replaced; use the state which that step returned, or zf.restore(like, folder)"
            )
        _check(place, x.nbytes)
        _check(place.other, x.nbytes)
    for folder in manifests:  # so that the commit needs no room either
        _allocate(folder / f"{MANIFEST}.new", (folder / MANIFEST).stat().st_size + PAGE, 0)


def commit(tensors: Sequence[Tensor]) -> None:
    """Make a new state count: one tensor for each leaf that has a new value, in whatever folders.

    One folder is committed at once, or not at all; several one after another.
    """
    folders: dict[Path, dict[int, Place]] = {}
    for x in tensors:
        place = place_of(x)
        if place is not None:
            folders.setdefault(place.folder, {})[place.number] = place
    for folder, places in folders.items():
        manifest = read_manifest(folder)
        moved = [p for n, p in places.items() if manifest.entries[n].slot != p.slot]
        _sync(moved)
        entries = [entry._replace(before=entry.slot) for entry in manifest.entries]
        for place in moved:
            entries[place.number] = entries[place.number]._replace(slot=place.slot)
        _write_manifest(folder, Manifest(manifest.generation + 1, tuple(entries)))


def discard(folder: Path) -> None:
    """Delete the files that :func:`create` made in a folder, and the folder if it is empty then.

    Raises:
        FileNotFoundError: if no state lies there.
    """
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    for number in range(len(manifest.entries)):
        for slot in (0, 1):
            Place(folder, number, slot).file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


class Writer:
    """Writes chunks to the file of one tensor, in order, beside what the caller computes."""

    def __init__(self, target: Tensor) -> None:
        place = place_of(target)
        assert place is not None
        self.file, self.offset = str(place.file), 0
        self.sync = target.nbytes >= CHUNK  # small files are synced all together, by the commit
        try:
            self.fd = os.open(self.file, os.O_RDWR)
        except OSError as error:
            raise _named(error, self.file) from error

    def put(self, chunk: Tensor) -> None:
        """Append the bytes of a contiguous tensor; large files are synced as they grow."""
        data = memoryview(chunk.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            while data:
                written = os.pwrite(self.fd, data, self.offset)
                self.offset, data = self.offset + written, data[written:]
            if self.sync:
                os.fdatasync(self.fd)
        except OSError as error:
            raise _named(error, self.file) from error

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def writing() -> Iterator[ThreadPoolExecutor]:
    """One thread that writes while the caller computes; all is written when it ends."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def write(target: Tensor, x: Tensor) -> None:
    """Copy a tensor to one on disk, by chunks, synced as it goes."""
    if not x.numel():
        return
    flat = x.detach().reshape(-1)
    writer = Writer(target)
    try:
        for chunk in flat.split(max(1, CHUNK // x.element_size())):
            writer.put(chunk.to("cpu", target.dtype).contiguous())
    finally:
        writer.close()


def chunks(length: int, itemsize: int, buffers: int) -> Iterator[slice]:
    """Parts of a flat leaf, so that ``buffers`` of them are one chunk; each starts on a page."""
    step = max(PAGE, CHUNK // buffers // PAGE * PAGE) // itemsize
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def finished(futures: Sequence[Future[Any]]) -> None:
    """Wait for writes, and raise what the first failed one raised."""
    for future in futures:
        future.result()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _allocate(file: Path, nbytes: int, flags: int) -> None:
    """Make a file of that size at least, whose blocks are there."""
    _opened(str(file), lambda fd: os.posix_fallocate(fd, 0, nbytes), os.O_CREAT | flags)


def _mapped(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage.from_file(str(place.file), True, nbytes)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]


def _check(place: Place, nbytes: int) -> None:
    file = str(place.file)
    size = _opened(file, lambda fd: os.fstat(fd).st_size)
    if size < nbytes:
        raise OSError(
            errno.EIO,
            f"truncated: the leaf has {nbytes:,} bytes and the file {size:,}; nothing was changed. "
            "Go back to a checkpoint, or to a copy of this folder",
            file,
        )


def _opened(file: str, do: Callable[[int], _T], flags: int = 0) -> _T:
    """What ``do`` returns for an open file; its errors name the file."""
    try:
        fd = os.open(file, os.O_RDWR | flags, 0o644)
        try:
            return do(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _named(error, file) from error


def _named(error: OSError, file: str) -> OSError:
    """The same error, with the file in its message."""
    return OSError(error.errno, os.strerror(error.errno or errno.EIO), file)


def _sync(places: Sequence[Place]) -> None:
    with ThreadPoolExecutor(8) as pool:  # a sync waits, and waits can be shared
        finished([pool.submit(_opened, str(place.file), os.fdatasync) for place in places])


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    told = {
        "generation": manifest.generation,
        "leaves": [
            {**entry._asdict(), "dtype": str(entry.dtype).removeprefix("torch.")}
            for entry in manifest.entries
        ],
    }
    data = json.dumps(told).encode()
    new = folder / f"{MANIFEST}.new"

    def write_all(fd: int) -> None:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
        os.fsync(fd)

    _opened(str(new), write_all, os.O_CREAT)
    new.replace(folder / MANIFEST)
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)  # the rename itself
    finally:
        os.close(fd)
