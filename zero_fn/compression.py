"""Compressed communication: the mean of the ranks' gradients in few bytes, with error feedback.

``compress`` takes each rank's own gradients, puts all leaves into one bucket, and exchanges it in
two phases, one collective each (arXiv 2102.02888, section 4.2); the signs of a large bucket in
several rounds of the two. First every rank encodes the bucket and sends each owner its piece
(all-to-all); the owner averages what it got, encodes the average and sends it to all (all-gather).
What a code loses is added to the next step's values, at the sender and at the owner alike, so that
over time nothing is lost: the sum of the means that came out is the sum of the true means, less the
last feedback.

PowerSGD sums thin factors of the matrices instead, also in two collectives.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import tree
from .codecs import (
    BLOCK,
    Codec,
    Method,
    OneBit,
    PowerSGD,
    codec_of,
    encode_with_rest,
    from_bytes,
    to_bytes,
)
from .collectives import all_gather_invariant, all_to_all, axis_size, pscatter, pvary
from .feedback import Bucket, ErrorFeedback, PerRank, Round, bucket_of
from .finiteness import all_finite_in
from .low_rank import first_factors, mean_by_factors
from .placed import placed_leaves
from .sharding import Sharded, Tied, is_piece
from .signs import mean_by_signs
from .tree import PyTree, Tensor


def compression_state(params: PyTree, method: Method, axis: str = "dp") -> ErrorFeedback:
    """The error feedback before the first step: zeros. Call it inside ``spmd``.

    Args:
        params: the parameters, whole or as :func:`zero_fn.shard` cut them.
        method: as for :func:`compress`.
        axis: the mesh axis whose ranks have different gradients.

    Returns:
        A tree for the training state. Each rank holds one value a parameter, and one a parameter
        that it owns the average of.

    Raises:
        ValueError: for an unknown method, parameters without leaves, or cut over another axis.
        TypeError: naming the key path of a leaf that is no floating-point tensor.
    """
    codec = codec_of(method)
    _check_axis(axis)
    leaves = _leaves(params, "params", axis)
    bucket = bucket_of(leaves, axis)
    device = _tensor(leaves[0]).device

    def zeros(length: int) -> PerRank:
        return PerRank(torch.zeros(length, dtype=bucket.dtype, device=device), axis, (length,))

    sent, owned, factors = zeros(bucket.length), zeros(rounds_of(codec, bucket)[-1].owned.stop), ()
    finite = torch.ones((), dtype=torch.bool, device=device)
    if isinstance(codec, PowerSGD):
        owned = None  # type: ignore[assignment]
        factors = tuple(first_factors(bucket, codec, device))  # type: ignore[assignment]
    return ErrorFeedback(sent, owned, factors, finite, codec, bucket.shapes)


def compress(
    grads: PyTree,
    method: Method,
    error: ErrorFeedback | None,
    axis: str = "dp",
    *,
    mask: PyTree | None = None,
) -> tuple[PyTree, ErrorFeedback | None]:
    """The mean over an axis of each rank's own gradients, sent in few bytes. Inside ``spmd``.

    Args:
        grads: a tree of whole tensors, this rank's gradients, which nobody has reduced yet.
        method: ``"1bit"`` (sign and scale), ``"bf16"``, ``"int8"``, ``"topk"`` (1 % of the
            values), ``"powersgd"`` (rank 4); a codec with settings of its own, ``zf.PowerSGD(2)``;
            or any object with ``encode`` and ``decode`` (see :class:`zero_fn.Codec`).
        error: the feedback of the step before, from :func:`compression_state`. None: without
            feedback, so that what a code loses is lost.
        axis: the mesh axis.
        mask: a tree like ``grads`` of bool tensors that broadcast to the leaves, the same on all
            ranks, or None for a leaf: False where a value never has a gradient (rows of unused
            embeddings). The mean is exactly zero there.

    Returns:
        The mean, the same bits on all ranks and in the dtypes of ``grads``; and the new feedback,
        whose ``finite`` says whether the gradients of all ranks were finite. If they were not, the
        mean has NaN or infinity in it, and the feedback stays as it was. An axis of size 1 sends
        nothing, and loses nothing.

    Raises:
        ValueError: for an unknown method, feedback of another method or tree, leaves that are
            pieces or slices, or an axis that is no single name.
        TypeError: naming the key path of a leaf that is no floating-point tensor.
    """
    codec = codec_of(method)
    _check_axis(axis)
    leaves = _leaves(grads, "grads", axis)
    for path, leaf in zip(tree.paths(grads, is_piece), tree.leaves(grads, is_piece), strict=True):
        if isinstance(leaf, Sharded):
            raise ValueError(
                f"grads at {path!r} is a piece, {leaf!r}, whose gradient was reduced already; "
                "compress takes each rank's own gradients by the whole parameters: "
                "zf.accumulate(loss_fn, reduce=False), at stage 0 or 1"
            )
    bucket = bucket_of(leaves, axis)
    _check_error(error, codec, bucket)
    if mask is None and by_signs(codec, axis):
        from zero_fn.kernels import sign_unpack

        signs, _, error = mean_by_signs(leaves, None, 0.0, bucket, error, axis)
        mean = sign_unpack(*signs)
    else:
        flags = None if mask is None else bucket.pack(_masks(mask, grads, leaves)) > 0
        mean, error = exchange(bucket.pack(leaves), bucket, codec, error, axis, flags)
    dtypes = [leaf.dtype for leaf in leaves]
    return tree.unflatten(tree.flatten(grads)[1], bucket.unpack(mean, dtypes)), error


def by_signs(codec: Any, axis: str) -> bool:
    """Whether a mean is made by :func:`mean_by_signs`, which knows of no masks."""
    return type(codec) is OneBit and axis_size(axis) > 1


def exchange_momentum(
    grads: Sequence[Tensor],
    mu: Tensor,
    beta: float,
    bucket: Bucket,
    method: Method,
    error: ErrorFeedback,
    axis: str,
) -> tuple[Tensor, ErrorFeedback]:
    """The mean of the ranks' beta mu + (1 - beta) g, and the new feedback; or ``mu`` as it was."""
    codec = codec_of(method)
    if by_signs(codec, axis):
        from zero_fn.kernels import unpack_if

        signs, finite, after = mean_by_signs(grads, mu, beta, bucket, error, axis)
        new = unpack_if(finite, *signs, mu)
    else:
        own = torch.lerp(pvary(mu, axis), bucket.pack(grads), 1 - beta)
        new, after = exchange(own, bucket, codec, error, axis)
        assert after is not None
        new = torch.where(after.finite, new, mu)
    assert after is not None
    return new, after


def exchange(
    flat: Tensor,
    bucket: Bucket,
    method: Method,
    error: ErrorFeedback | None,
    axis: str,
    mask: Tensor | None = None,
) -> tuple[Tensor, ErrorFeedback | None]:
    """What :func:`compress` does, on a bucket: the mean of ``flat``, and the new feedback."""
    codec = codec_of(method)
    if mask is not None:
        flat = torch.where(mask, flat, 0)
    if axis_size(axis) == 1:
        finite = all_finite_in(flat)
        return flat, None if error is None else replace(error, finite=finite)
    if isinstance(codec, PowerSGD):
        return mean_by_factors(flat, bucket, codec, error, axis, mask)
    return _in_two_phases(flat, bucket, codec, error, axis, mask)


def rounds_of(codec: Any, bucket: Bucket) -> list[Round]:
    """How codes travel: signs in rounds, all others at once."""
    return bucket.rounds if type(codec) is OneBit else [bucket.whole]


def _in_two_phases(
    flat: Tensor,
    bucket: Bucket,
    codec: Codec,
    error: ErrorFeedback | None,
    axis: str,
    mask: Tensor | None,
) -> tuple[Tensor, ErrorFeedback | None]:
    rounds = rounds_of(codec, bucket)
    sent = torch.zeros_like(flat) if error is None else error.sent.local
    owned = flat.new_zeros(rounds[-1].owned.stop) if error is None else error.owned.local  # type: ignore[union-attr]
    counts = bucket.counts(flat.device)
    found = []
    for part in rounds:
        at = part.values
        blocks = slice(at.start // BLOCK, at.stop // BLOCK)
        given = (flat[at], sent[at], *([] if mask is None else [mask[at]]))
        values = [part.rows(x, bucket.ranks) for x in given]
        real = part.rows(counts[blocks], bucket.ranks, BLOCK)
        length = at.stop - at.start
        mean, lost, owners = _round(codec, real, owned[part.owned], axis, *values)
        found.append((mean[:length], lost[:length], owners))
    mean, lost, owners = [torch.cat(x) if len(x) > 1 else x[0] for x in zip(*found, strict=True)]
    if error is None:
        return mean, None
    # NaN and infinity travel in the codes, so that all ranks see them without a word more.
    finite = all_finite_in(mean)
    here = pvary(finite, axis)
    return mean, replace(
        error,
        sent=error.sent.like(torch.where(here, lost, sent)),
        owned=error.owned.like(torch.where(here, owners, owned)),  # type: ignore[union-attr]
        finite=finite,
    )


def _round(
    codec: Codec,
    counts: Tensor,
    owned: Tensor,
    axis: str,
    x: Tensor,
    sent: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of what the ranks have, and what is left over at the sender and at the owner."""
    piece = x.shape[1]
    payload, lost = encode_with_rest(codec, x, sent, counts)
    data, kinds = to_bytes(payload)
    received = from_bytes(all_to_all(data, axis), kinds)
    average = codec.decode(received, piece, x.dtype).mean(0, keepdim=True)
    mine = None if mask is None else pscatter(mask, axis)
    if mine is not None:
        average = torch.where(mine, average, 0)
    payload, owners = encode_with_rest(codec, average, owned.view(1, -1), pscatter(counts, axis))
    data, kinds = to_bytes(payload)
    gathered = from_bytes(all_gather_invariant(data, axis), kinds)
    mean = codec.decode(gathered, piece, x.dtype)
    if mask is not None:
        assert mine is not None
        lost, owners = torch.where(mask, lost, 0), torch.where(mine, owners, 0)
        mean = torch.where(mask, mean, 0)
    return mean.reshape(-1), lost.reshape(-1), owners.reshape(-1)


# Checks.


def _check_axis(axis: Any) -> None:
    if not isinstance(axis, str):
        raise ValueError(
            f"axis is {axis!r}; compressed communication goes over one mesh axis, 'dp' say: put "
            "all data-parallel ranks on one axis"
        )


def _tensor(leaf: Any) -> Tensor:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def _leaves(values: PyTree, what: str, axis: str) -> list[Any]:
    for found in placed_leaves(values):
        others = [name for name in found.axes if name != axis]
        if others:
            raise ValueError(
                f"{what} at {found.path!r} is cut over {others[0]!r}, and one bucket over {axis!r} "
                "holds all leaves: what the ranks share would come out different on each; leave "
                "gradients of slices as they are (compress=None)"
            )
    nodes = tree.leaves(values, is_piece)
    leaves = [leaf for leaf in nodes if not isinstance(leaf, Tied)]
    named = zip(tree.paths(values, is_piece), nodes, strict=True)
    for path, leaf in named:
        if not isinstance(leaf, Tied):
            where = f"{what} at {path!r}" if path else what
            tree.check_tensors(_tensor(leaf), where, floating=True)
    if not leaves:
        raise ValueError(f"{what} has no leaves, so that there is nothing to compress")
    return leaves


def _masks(mask: PyTree, grads: PyTree, leaves: Sequence[Tensor]) -> list[Tensor]:
    flags = tree.leaves(mask, lambda node: node is None)
    if len(flags) != len(leaves):
        raise ValueError(
            f"mask has {len(flags)} leaves, and grads {len(leaves)}; it is a tree like grads, with "
            "None for a leaf without one"
        )
    whole = []
    for path, flag, leaf in zip(tree.paths(grads), flags, leaves, strict=True):
        if flag is None:
            flag = torch.ones((), dtype=torch.bool, device=leaf.device)
        if not isinstance(flag, Tensor) or flag.dtype != torch.bool:
            raise TypeError(f"mask at {path!r}: expected a bool tensor or None, got {flag!r}")
        whole.append(flag.expand(leaf.shape).to(torch.float32))
    return whole


def _check_error(error: ErrorFeedback | None, codec: Any, bucket: Bucket) -> None:
    if error is None:
        return
    if not isinstance(error, ErrorFeedback):
        raise TypeError(
            f"error is {error!r}; it is what zf.compression_state(params, method) makes, or None "
            "for no feedback"
        )
    if error.method != codec:
        raise ValueError(
            f"error is the feedback of {error.method!r}, and the method is {codec!r}; make it with "
            "the same: zf.compression_state(params, method)"
        )
    if error.shapes != bucket.shapes:
        raise ValueError(
            f"error was made for leaves of shapes {list(error.shapes)}, and grads has "
            f"{list(bucket.shapes)}; make it from the same tree: zf.compression_state(params, ...)"
        )
