"""Signs packed and unpacked by ``sign_packing.c``: one pass over memory, on torch's threads.

ctypes lets go of the interpreter's lock while the C runs.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .native import library

WIDTH, LARGEST = 16, 4096  # what sign_packing.c works on at once, and the values of a block
SOURCE = Path(__file__).with_name("sign_packing.c")
SHARE = 1 << 16  # the values that a thread is worth starting for


def takes(x: Tensor, block: int) -> bool:
    """Whether the C does: float32 on a CPU, blocks of whole vectors, and a compiler."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32
    return fits and block % WIDTH == 0 and block <= LARGEST and library(SOURCE) is not None


def pack(
    x: Tensor,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    residual: Tensor,
    block: int,
) -> None:
    """Fill bits, scales and residual; all contiguous, and ``takes(x, block)``."""
    whole = counts.to(torch.int32)
    _run("pack", [(x, block), (error, block), (whole, 1), (bits, block // 8), (scales, 1),
                  (residual, block)], block)  # fmt: skip


def unpack(bits: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    """Fill ``out``; all contiguous, and ``takes(scales, block)``."""
    _run("unpack", [(bits, block // 8), (scales, 1), (out, block)], block)


def _run(name: str, tensors: list[tuple[Tensor, int]], block: int) -> None:
    """Call a function of the C on each thread's share of the blocks."""
    function = getattr(library(SOURCE), name)
    first, width = tensors[0]
    blocks = first.numel() // width
    workers = max(min(torch.get_num_threads(), blocks * block // SHARE), 1)
    bounds = [blocks * worker // workers for worker in range(workers + 1)]

    def work(worker: int) -> None:
        start, stop = bounds[worker : worker + 2]
        at = [
            ctypes.c_void_p(tensor.data_ptr() + start * width * tensor.element_size())
            for tensor, width in tensors
        ]
        function(*at, ctypes.c_int64(stop - start), ctypes.c_int64(block))

    if workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
