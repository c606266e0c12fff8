"""Offload: the update in memory beside torch's and DeepSpeed's; on disk beside a copy of files.

    python -m tests.benchmarks.offload --folder /a/disk

First one step of Adam on leaves in memory, beside ``torch.optim.AdamW(fused=True)`` and, where it
is installed and builds, DeepSpeed's CPUAdam; goal: at least 1.0 times each. All work on the same
memory. Then a training step whose state lies in files, beside the sequential copy of as many bytes
in the same folder; goal: 70 % of its speed. What is read is not in the system's cache, and what is
written is synced, for both.
"""

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zero_fn as zf
from tests.benchmarks.timing import interleaved, where
from zero_fn import chunks, disk, tree
from zero_fn.kernels import fused_adamw_
from zero_fn.optim.adam import AdamState
from zero_fn.tree import PyTree, Tensor

LR, DECAY = 1e-4, 0.1
DONT_NEED = 4  # MADV_DONTNEED


def leaves(count: int, number: int = 16) -> list[Tensor]:
    """``count`` values in leaves of equal size."""
    return [torch.rand(count // number) for _ in range(number)]


def contestants(count: int) -> dict[str, Callable[[], object]]:
    """Ways to take one step of AdamW on leaves in memory."""
    params, grads, m, v = (leaves(count) for _ in range(4))
    number = torch.tensor(10)

    def optimizer(make: Callable[..., Any], first: object, **options: Any) -> Callable[[], object]:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        made = make(params, lr=LR, weight_decay=DECAY, **options)
        for p, one, other in zip(params, m, v, strict=True):
            made.state[p] = {"step": first, "exp_avg": one, "exp_avg_sq": other}
        return made.step

    def in_place() -> None:
        fused_adamw_(params, grads, m, v, number, LR, weight_decay=DECAY)

    adam = zf.adamw(LR, weight_decay=DECAY)

    def update(state: PyTree, grads: PyTree) -> PyTree:
        held, moments = state
        updates, moments = adam.update(grads, moments, held)
        return zf.apply_updates(held, updates), moments

    step = zf.jit(update, donate=0)
    given = {str(place): g for place, g in enumerate(grads)}
    # Views: what a step was given is used up, and the others work on the same memory.
    named, mu, nu = ({str(i): x.detach() for i, x in enumerate(xs)} for xs in (params, m, v))
    held = [(named, AdamState(torch.tensor(9), mu, nu))]

    def traced() -> None:
        held[0] = step(held[0], given)

    made = {
        "torch.optim.AdamW(fused=True)": optimizer(
            torch.optim.AdamW, torch.tensor(9.0), fused=True
        ),
        "fused_adamw_": in_place,
        "zf.jit(update, donate=0)": traced,
    }
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        made["DeepSpeedCPUAdam"] = optimizer(DeepSpeedCPUAdam, 9, adamw_mode=True)
    return made


def forget(x: Tensor) -> None:
    """Let the system's cache forget a leaf's files; the next read of it comes from the disk."""
    place = disk.place_of(x)
    assert place is not None
    # What is mapped stays, until the mapping lets go of it.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), DONT_NEED)
    for slot in (place, place.other):
        _forget(slot.file)


def _forget(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def on_disk(folder: Path, count: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step with its state in files, and of the copy of as many bytes, in turn."""
    init, step = zf.train_step(
        lambda params, batch: sum(p.mean() for p in params.values()) * batch.mean(),
        zf.adamw(LR, weight_decay=DECAY),
        zf.Mesh(dp=1, backend="simulated"),
    )
    params = {str(place): p for place, p in enumerate(leaves(count))}
    state = zf.offload(init(params), folder / "state", where=lambda path, x: x.ndim > 0)
    del params
    batch = torch.ones(1)
    times: dict[str, list[float]] = {"a sequential copy": [], "the step": []}
    for turn in range(repeats + 1):
        filed = [x for x in tree.leaves(state) if disk.is_on_disk(x)]
        files = [disk.place_of(x).file for x in filed]  # type: ignore[union-attr]
        for x in filed:
            forget(x)
        start = time.perf_counter()
        for place, file in enumerate(files):
            copy(file, folder / f"{place}.copy")
        copied = time.perf_counter() - start
        for x in filed:
            forget(x)
        start = time.perf_counter()
        state, _ = step(state, batch)
        taken = time.perf_counter() - start
        if turn:  # the first step is traced
            times["a sequential copy"].append(copied)
            times["the step"].append(taken)
    zf.discard(folder / "state")
    return times


def copy(source: Path, target: Path) -> None:
    """A file into another, which keeps its blocks, and is synced."""
    buffer = bytearray(chunks.CHUNK)
    view = memoryview(buffer)
    read, write = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        while size := os.readv(read, [buffer]):
            os.write(write, view[:size])
        os.fdatasync(write)
    finally:
        os.close(read)
        os.close(write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=200.0, help="values, updated in memory")
    parser.add_argument("--disk-millions", type=float, default=40.0, help="values, on disk")
    parser.add_argument("--folder", type=Path, help="where the files are; None: none on disk")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    if options.millions:
        count = int(options.millions * 1e6)
        times = interleaved(contestants(count), options.repeats)
        table = Table(title=f"one step of Adam in memory, {count:,} values")
        for column in ("step", "median, ms", "times torch's fused"):
            table.add_column(column, justify="left" if column == "step" else "right")
        base = next(iter(times.values()))
        for name, seconds in times.items():
            table.add_row(name, f"{seconds * 1e3:.1f}", f"{base / seconds:.2f}")
        console.print(table)
    if options.folder is not None:
        count = int(options.disk_millions * 1e6)
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            taken = on_disk(Path(name), count, options.repeats)
        size = 3 * count * 4
        copied = statistics.median(taken["a sequential copy"])
        table = Table(title=f"state on disk, {size / 1e6:,.0f} MB read and as many written")
        for column in ("", "median, s", "MB/s", "of the copy"):
            table.add_column(column, justify="right" if column else "left")
        for name, seconds in taken.items():
            middle = statistics.median(seconds)
            row = f"{middle:.2f}", f"{2 * size / middle / 1e6:,.0f}", f"{copied / middle:.0%}"
            table.add_row(name, *row)
        console.print(table)
    console.print(f"python -m tests.benchmarks.offload {' '.join(sys.argv[1:])}; {where()}")


if __name__ == "__main__":
    main()
