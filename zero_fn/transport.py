"""How each collective moves data: between processes, and among simulated ranks.

``PROCESS`` holds what a process does, ``simulate`` what happens to the values of all ranks, stacked
along dimension 0. Neither knows of derivatives: those are in ``collectives.py``, which alone calls
them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .tree import Tensor

Static = tuple[int, ...]  # the numbers of a collective: dimensions, or pairs of ranks

# The dtypes in which floating-point tensors travel, in a collective itself and in its transpose,
# which carries gradients. Sums are in them, too. None: the tensors' own.
Wire = tuple[torch.dtype | None, torch.dtype | None]


class _Current(threading.local):
    wire: Wire = (None, None)


_current = _Current()


@contextmanager
def wire(there: torch.dtype | None, back: torch.dtype | None) -> Iterator[None]:
    """Collectives called inside travel in these dtypes; results have their inputs' own."""
    outer, _current.wire = _current.wire, (there, back)
    try:
        yield
    finally:
        _current.wire = outer


def current_wire() -> Wire:
    return _current.wire


def sent(x: Tensor, kind: str, wire: Wire) -> Tensor:
    """What a collective puts on the wire for ``x``."""
    dtype = wire[0]
    moves = kind not in ("pvary", "pscatter")
    return x.to(dtype) if moves and dtype is not None and x.is_floating_point() else x


# What a process does. The raw functional collectives are nodes that compilers see.


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


# Gloo and NCCL take no fp8 and no uint16; where data only moves, another dtype of the same width
# carries the bits.
CARRIED = {
    torch.uint16: torch.float16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _carried(x: Tensor) -> Tensor:
    return x.view(CARRIED[x.dtype]) if x.dtype in CARRIED else x


def _delivered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)


def _moved(x: Tensor, source: int, target: int) -> Tensor:
    """movedim, without a node in the graph where it moves nothing."""
    return x if source == target else x.movedim(source, target)


def _process_psum(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def _process_pvary(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    return x.view_as(x)


def _process_all_gather(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    (dim,) = static
    sent = _moved(x, dim, 0).contiguous()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(_carried(sent), size, group)
    return _moved(_delivered(_wait(gathered), x.dtype), 0, dim)


def _process_psum_scatter(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    (dim,) = static
    sent = _moved(x, dim, 0).contiguous()
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor(sent, "sum", size, group)
    return _moved(_wait(reduced), 0, dim)


def _process_pscatter(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    (dim,) = static
    length = x.shape[dim] // size
    # A copy: a view would keep the whole of x alive.
    return x.narrow(dim, place * length, length).clone(memory_format=torch.contiguous_format)


def _process_exchange(
    x: Tensor, sent: list[int], received: list[int], group: str
) -> Tensor:  # dim 0 of x is what is split
    carried = _carried(x.contiguous())
    out = torch.ops._c10d_functional.all_to_all_single(carried, received, sent, group)
    return _delivered(_wait(out), x.dtype)


def _process_ppermute(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    targets = dict(zip(static[::2], static[1::2], strict=True))
    sources = {target: source for source, target in targets.items()}
    sent = [int(rank == targets.get(place)) for rank in range(size)]
    received = [int(rank == sources.get(place)) for rank in range(size)]
    row = x.unsqueeze(0) if any(sent) else x.unsqueeze(0)[:0]
    out = _process_exchange(row, sent, received, group)
    return out.squeeze(0) if any(received) else torch.zeros_like(x)


def _process_all_to_all(x: Tensor, size: int, place: int, group: str, static: Static) -> Tensor:
    split, concat = static
    length = x.shape[split] // size
    out = _process_exchange(x.movedim(split, 0), [length] * size, [length] * size, group)
    parts = out.movedim(0, split).unflatten(split, (size, length))
    return _merge(parts.movedim(split, 0), concat)


PROCESS = {
    "psum": _process_psum,
    "pvary": _process_pvary,
    "all_gather": _process_all_gather,
    "psum_scatter": _process_psum_scatter,
    "all_gather_invariant": _process_all_gather,
    "pscatter": _process_pscatter,
    "ppermute": _process_ppermute,
    "all_to_all": _process_all_to_all,
}


# What the simulation does, on the values of all ranks stacked along dimension 0. A result that is
# the same on all ranks is held once: that is both the invariant bit and most of the speed.


def simulate(
    kind: str, name: str, x: Tensor, batched: int | None, size: int, static: Static
) -> tuple[Tensor, int | None]:
    if kind == "pvary":
        if batched is not None:
            raise ValueError(_ALREADY_VARYING.format(kind="pvary", axis=name))
        return x.view_as(x), None
    if kind == "pscatter":
        if batched is not None:
            raise ValueError(_ALREADY_VARYING.format(kind="pscatter", axis=name))
        (dim,) = static
        parts = x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0)
        return parts.clone(memory_format=torch.contiguous_format), 0
    x = x.expand(size, *x.shape) if batched is None else x.movedim(batched, 0)
    if kind == "psum":
        return x.sum(0, dtype=x.dtype), None
    if kind in ("all_gather", "all_gather_invariant"):
        return _merge(x, static[0]), None
    if kind == "psum_scatter":
        (dim,) = static
        total = x.sum(0, dtype=x.dtype)
        return total.unflatten(dim, (size, total.shape[dim] // size)), dim
    if kind == "ppermute":
        sources = dict(zip(static[1::2], static[::2], strict=True))
        rows = [
            x[sources[rank]] if rank in sources else torch.zeros_like(x[0]) for rank in range(size)
        ]
        return torch.stack(rows), 0
    split, concat = static
    # (sender, ..., receiver, slice, ...) -> (receiver, sender, ..., slice, ...)
    parts = x.unflatten(split + 1, (size, x.shape[split + 1] // size)).movedim(split + 1, 0)
    return torch.stack([_merge(part, concat) for part in parts]), 0


def _merge(parts: Tensor, dim: int) -> Tensor:
    """(n, ...) to the n parts one after the other along ``dim`` of what follows."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


_ALREADY_VARYING = (
    "{kind} over {axis!r} takes a value that all ranks share, and got one that varies. "
    "If this came up in a gradient, the result of a psum, pmean or all_gather_invariant over "
    "{axis!r} met varying values: make it varying first, zf.pvary(x, {axis!r})"
)
