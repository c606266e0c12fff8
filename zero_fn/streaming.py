"""Updates of leaves on disk, as ops that a traced step calls: chunk by chunk, slot to slot.

``zero_fn::next_slot`` gives the tensor that takes a leaf's next value, ``zero_fn::store_`` writes a
value there, ``zero_fn::read_ahead`` tells the system of a read to come, and
``zero_fn::adamw_stream_`` is a step of Adam that reads moments (and parameters) from one slot and
writes the other. It computes what ``zero_fn::adamw_`` computes, element by element, so that
trajectories are the same bit for bit. At most two chunks are in memory: one is computed while the
other is written.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

import torch

from zero_fn.kernels.adam_run import Rest, in_place

from . import chunks, disk
from .tree import Tensor


@torch.library.custom_op("zero_fn::next_slot", mutates_args=())
def _next_slot(x: Tensor) -> Tensor:
    return disk.next_slot(x)


@_next_slot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("zero_fn::store_", mutates_args=("slot",))
def _store_(slot: Tensor, x: Tensor) -> None:
    chunks.write(slot, x)


@torch.library.custom_op("zero_fn::read_ahead", mutates_args=())
def _read_ahead(x: Tensor) -> None:
    chunks.ahead(x, x.nbytes)


def _adamw_stream_(
    new: Sequence[Tensor], grads: Sequence[Tensor], old: Sequence[Tensor], *rest: Any
) -> None:
    """One step of Adam for leaves of which some part is on disk.

    Args:
        new: parameters, first and second moments, one list: what is in memory is updated in place,
            what is on disk is the slot that takes the new value.
        grads: the gradients.
        old: the old values of those of ``new`` that are on disk, in their order.
        rest: as for ``zero_fn::adamw``.
    """
    before = iter(old)
    values = [next(before) if disk.is_on_disk(x) else x for x in new]
    n, options = len(grads), Rest(*rest)
    for leaf, g in enumerate(grads):
        slots, parts = new[leaf::n], values[leaf::n]
        one = options._replace(weight_decay=[options.weight_decay[leaf]])
        for following in values[leaf + 1 :: n] if leaf + 1 < n else ():
            chunks.ahead(following, chunks.CHUNK)
        _stream(slots, parts, g, one)


torch.library.custom_op(
    "zero_fn::adamw_stream_",
    _adamw_stream_,
    mutates_args=("new",),
    schema="(Tensor(a!)[] new, Tensor[] grads, Tensor[] old, Tensor step, Tensor lr, float beta1, "
    "float beta2, float eps, float[] weight_decay, bool decoupled, Tensor? grad_scale, "
    "Tensor? skip) -> ()",
)


def _stream(slots: Sequence[Tensor], parts: Sequence[Tensor], g: Tensor, rest: Rest) -> None:
    """One leaf: ``slots`` get what Adam makes of ``parts`` (parameter and two moments)."""
    streamed = [i for i in range(3) if slots[i] is not parts[i]]
    flat, gradient = [x.view(-1) for x in parts], g.reshape(-1)
    widest = max(parts[i].element_size() for i in streamed)
    spare: list[dict[int, Tensor]] = [{}, {}]
    written: list[list[Future[None]]] = [[], []]
    with ExitStack() as files, chunks.writing() as pool:
        readers = {i: files.enter_context(closing(chunks.Reader(parts[i]))) for i in streamed}
        writers = {i: files.enter_context(closing(chunks.Writer(slots[i]))) for i in streamed}
        for turn, part in enumerate(chunks.parts(g.numel(), widest, len(streamed))):
            side = turn % 2
            chunks.finished(written[side])
            chunk = [x[part] for x in flat]
            for i in streamed:
                if i not in spare[side]:
                    spare[side][i] = torch.empty_like(chunk[i])
                chunk[i] = spare[side][i][: part.stop - part.start]
                readers[i].get(chunk[i], part)
            p, m, v = chunk
            in_place(([p], [gradient[part]], [m], [v]), rest)
            written[side] = [pool.submit(writers[i].put, chunk[i]) for i in streamed]
        for futures in written:
            chunks.finished(futures)
