"""Runs of their own processes, which tests of offloading kill, starve or limit.

``python -m tests.offloaded_runs train FOLDER`` trains a small model, all of its state on disk, and
prints a digest of the state after each step that it finished; it goes on from what is there.
``python -m tests.offloaded_runs memory FOLDER`` takes steps with the optimizer state on disk (in
memory if the folder's name is ``none``) under a limit of anonymous memory, and prints the bytes of
parameters and moments, those allowed beside parameters and gradients, and the peak.
"""

import hashlib
import re
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import disk, tree

SIZES = (5000, 7, 2051)


def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return torch.stack([(p - batch.mean()).square().mean() for p in params.values()]).sum()


def digest(state: Any) -> str:
    """What identifies a state, bit for bit."""
    found = hashlib.sha256()
    for x in tree.leaves(state):
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def batch(step: int) -> Tensor:
    return torch.full((2,), float(step % 7))


def made() -> tuple[zf.TrainState, Any]:
    init, step = zf.train_step(loss_fn, zf.adamw(0.1), zf.Mesh(dp=2, backend="simulated"), stage=3)
    params = {str(n): torch.linspace(-1, 1, n) for n in SIZES}
    return init(params), step


def train(folder: Path) -> None:
    disk.CHUNK = disk.PAGE  # many chunks, so that a kill falls between them
    state, step = made()
    if (folder / disk.MANIFEST).exists():
        state = zf.restore(state, folder)
    else:
        state = zf.offload(state, folder)
    print("ready", digest(state), flush=True)
    while True:
        state, _ = step(state, batch(int(state.opt_state.step)))
        print(int(state.opt_state.step), digest(state), flush=True)


def memory(folder: Path) -> None:
    """Initialise and take steps, with no room for moments beside parameters and gradients."""
    threading.stack_size(1 << 18)  # stacks count as data
    torch.set_num_threads(1)
    disk.CHUNK = 2 << 20
    leaves, rows, columns = 8, 1 << 15, 64

    def inputs(number: int) -> Tensor:
        return torch.linspace(-1, 1, columns)[None] + number

    size = leaves * rows * columns * 4
    init, step = zf.train_step(products, zf.adamw(0.1), zf.Mesh(dp=1, backend="simulated"))
    warm, _ = step(zf.offload(init, folder / "warm")({"0": torch.zeros(2, columns)}), inputs(0))
    del warm
    baseline = status("RssAnon")  # after what a first trace imports
    allowed = 2 * disk.CHUNK + (20 << 20)  # the rest: the traced program, threads, the allocator
    room = status("VmData") + 2 * size + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    if folder.name != "none":
        init = zf.offload(init, folder / "state", where=lambda path, x: "opt_state" in path)
    with sampled() as peak:
        state = init({str(n): torch.full((rows, columns), n / leaves) for n in range(leaves)})
        for number in range(3):
            state, _ = step(state, inputs(number))
    print(size, 2 * size, allowed, peak[0] - baseline, flush=True)


def products(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    """A loss whose intermediates are small beside its parameters."""
    return torch.stack([(p @ batch[0]).square().mean() for p in params.values()]).sum()


def status(field: str) -> int:
    """Bytes, from what the kernel tells of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


@contextmanager
def sampled() -> Iterator[list[int]]:
    """The largest anonymous memory that a thread sees, looking every millisecond."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], status("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    {"train": train, "memory": memory}[sys.argv[1]](Path(sys.argv[2]))
