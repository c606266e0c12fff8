"""Momenta in one bit a value by ``momentum.c``: in place, on torch's threads.

ctypes lets go of the interpreter's lock while the C runs.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .native import library
from .sign_packing_native import LARGEST, WIDTH

SOURCE = Path(__file__).with_name("momentum.c")
SHARE = 1 << 20  # the values of one call: what a thread takes at a time

Job = tuple[Any, ...]  # a function of the C, and its arguments


def takes(tensors: Iterable[Tensor], block: int) -> bool:
    """Whether the C does: float32 on a CPU, blocks of whole vectors, and a compiler."""
    fits = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
    return fits and block % WIDTH == 0 and block <= LARGEST and library(SOURCE) is not None


def over_leaves(
    name: str,
    grads: Sequence[Tensor],
    mu: Tensor | None,
    error: Tensor,
    bits: Tensor,
    scales: Tensor,
    beta: float,
    block: int,
) -> None:
    """Call ``pack_momentum``, which fills bits and scales, or ``rest_of_momentum``: error."""
    function = getattr(library(SOURCE), name)
    share = max(SHARE // block, 1) * block

    def jobs() -> Iterator[Job]:
        start = 0  # of the leaf in the bucket
        for g in grads:
            for first in range(0, g.numel(), share):
                at = start + first
                yield (
                    function,
                    _pointer(g, first),
                    None if mu is None else _pointer(mu, at),
                    _pointer(error, at),
                    _pointer(bits, at // 8),
                    _pointer(scales, at // block),
                    ctypes.c_int64(min(share, g.numel() - first)),
                    ctypes.c_int64(block),
                    ctypes.c_float(beta),
                )
            start += -(-g.numel() // block) * block

    _run(jobs())


def over_blocks(
    name: str,
    received: Tensor,
    strengths: Tensor,
    owned: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    block: int,
) -> None:
    """Call ``pack_average``, which fills bits and scales, or ``rest_of_average``: owned."""
    function = getattr(library(SOURCE), name)
    ranks, blocks = strengths.shape
    share = max(SHARE // block, 1)

    def jobs() -> Iterator[Job]:
        for first in range(0, blocks, share):
            at = first * block
            yield (
                function,
                _pointer(received, at // 8),
                _pointer(strengths, first),
                _pointer(owned, at),
                _pointer(counts, first),
                _pointer(bits, at // 8),
                _pointer(scales, first),
                *map(
                    ctypes.c_int64,
                    (min(share, blocks - first), block, ranks, blocks * block // 8, blocks),
                ),
            )

    _run(jobs())


def precondition(
    leaves: Iterable[tuple[Tensor, Tensor, Tensor, Tensor, float]],
    rate: float,
    per_unbias1: float,
    per_root2: float,
    eps: float,
    whole: bool,
) -> None:
    """Fill each leaf's out, (p, mu, nu, out, decay): the new p if ``whole``, else its change."""

    def jobs() -> Iterator[Job]:
        function = library(SOURCE).precondition  # type: ignore[union-attr]
        for *tensors, decay in leaves:
            for first in range(0, tensors[0].numel(), SHARE):
                yield (
                    function,
                    *[_pointer(x, first) for x in tensors],
                    ctypes.c_int64(min(SHARE, tensors[0].numel() - first)),
                    *map(ctypes.c_float, (rate, decay, per_unbias1, per_root2, eps)),
                    ctypes.c_int32(whole),
                )

    _run(jobs())


def _pointer(x: Tensor, place: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr() + place * x.element_size())


def _run(jobs: Iterator[Job]) -> None:
    workers = torch.get_num_threads()
    if workers == 1:
        for function, *arguments in jobs:
            function(*arguments)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda job: job[0](*job[1:]), jobs))
