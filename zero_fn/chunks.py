"""Chunks: the bytes of a leaf on disk, read and written in order, a bounded part at a time.

What follows a chunk is read ahead by the system while that chunk is computed, and what was computed
before is written by a thread: reading, computing and writing run beside each other.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .disk import PAGE, named, place_of
from .tree import Tensor

CHUNK = 16 << 20  # bytes in memory at once, of everything that one chunk of an update reads


class Reader:
    """Reads parts of the file of one tensor, in order.

    Not by the mapping: a page that is not in memory would stop the reader at each fault.
    """

    def __init__(self, source: Tensor) -> None:
        place = place_of(source)
        assert place is not None
        self.file, self.itemsize, self.nbytes = (
            str(place.file),
            source.element_size(),
            source.nbytes,
        )
        try:
            self.fd = os.open(self.file, os.O_RDONLY)
        except OSError as error:
            raise named(error, self.file) from error

    def get(self, into: Tensor, part: slice) -> None:
        """Fill a contiguous tensor with some values, and let the system read as many after them."""
        data, offset = _bytes(into), part.start * self.itemsize
        end = part.stop * self.itemsize
        try:
            if end < self.nbytes:
                os.posix_fadvise(self.fd, end, len(data), os.POSIX_FADV_WILLNEED)
            while data:
                read = os.preadv(self.fd, [data], offset)
                if not read:
                    raise OSError(errno.EIO, "the file ends before the leaf")
                offset, data = offset + read, data[read:]
        except OSError as error:
            raise named(error, self.file) from error

    def close(self) -> None:
        os.close(self.fd)


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
            raise named(error, self.file) from error

    def put(self, chunk: Tensor) -> None:
        """Append the bytes of a contiguous tensor; large files are synced as they grow."""
        data = _bytes(chunk)
        try:
            while data:
                written = os.pwrite(self.fd, data, self.offset)
                self.offset, data = self.offset + written, data[written:]
            if self.sync:
                os.fdatasync(self.fd)
        except OSError as error:
            raise named(error, self.file) from error

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def writing() -> Iterator[ThreadPoolExecutor]:
    """One thread that writes while the caller computes; all is written when it ends."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def ahead(x: Tensor, nbytes: int) -> None:
    """Let the system read the first bytes of a tensor's file, and do not wait for it."""
    place = place_of(x)
    if place is None:
        return
    try:
        fd = os.open(place.file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, min(nbytes, x.nbytes), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise named(error, str(place.file)) from error


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


def parts(length: int, itemsize: int, buffers: int) -> Iterator[slice]:
    """Parts of a flat leaf, so that ``buffers`` of them are one chunk; each starts on a page."""
    step = max(PAGE, CHUNK // buffers // PAGE * PAGE) // itemsize
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def finished(futures: Sequence[Future[Any]]) -> None:
    """Wait for writes, and raise what the first failed one raised."""
    for future in futures:
        future.result()


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
