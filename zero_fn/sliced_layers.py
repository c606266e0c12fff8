"""Layers of tensor-sliced models: functions of this rank's slices and the name of a mesh axis.

After Megatron (arXiv 1909.08053, section 3). A block is a column-parallel layer, whose outputs are
cut over the ranks, some work on each rank's own, and a row-parallel layer, whose inputs are cut:

    forward    x the same on all ranks -> column_linear -> cut -> row_linear, a psum -> the same
    backward                    a psum <- column_linear <- cut <- row_linear        <- the same

With ``sequence_dim``, sequence parallelism (arXiv 2205.05198, section 4.2.2): between the blocks
each rank holds its part of the sequence, and the two psums become an all_gather before the columns
and a psum_scatter after the rows, which together send what a psum does. What all ranks share (a
norm's scale) then meets varying values, and goes through ``zf.pvary`` first.

With ``axis=None`` each function is the dense layer, so that a model is written once.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from .collectives import (
    all_gather,
    all_gather_invariant,
    axis_index,
    axis_size,
    psum,
    psum_scatter,
    pvary,
)
from .tree import Tensor

Reduction = Literal["mean", "sum", "none"]


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str | None = "tp",
    sequence_dim: int | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, this rank's outputs of it; Megatron's column-parallel layer.

    Args:
        x: (..., inputs), the same on all ranks; with ``sequence_dim`` this rank's part of the
            sequence.
        weight: (outputs / ranks, inputs), this rank's slice along dimension 0.
        bias: (outputs / ranks), this rank's slice.
        axis: the mesh axis the weight is cut over; None: it is whole.
        sequence_dim: the dimension of ``x`` along which the sequence is cut; None: ``x`` is whole.

    Returns:
        (..., outputs / ranks), varying, over the whole sequence.

    Raises:
        ValueError: if the sizes of x and weight don't fit.
    """
    _check_inputs("column_linear", x, weight, "(outputs / ranks, inputs)")
    if axis is not None:
        x = pvary(x, axis) if sequence_dim is None else all_gather(x, axis, sequence_dim)
    return F.linear(x, weight, bias)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str | None = "tp",
    sequence_dim: int | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, where each rank has some of the inputs; Megatron's row-parallel.

    Args:
        x: (..., inputs / ranks), varying, as :func:`column_linear` gives it.
        weight: (outputs, inputs / ranks), this rank's slice along dimension 1.
        bias: (outputs), the same on all ranks; added once, after the sum.
        axis: the mesh axis the weight is cut over; None: it is whole.
        sequence_dim: the dimension along which to cut the sequence of the result; None: don't.

    Returns:
        (..., outputs), the same on all ranks; with ``sequence_dim`` this rank's part of the
        sequence, varying.

    Raises:
        ValueError: if the sizes of x and weight don't fit, or the axis does not divide the
            sequence.
    """
    _check_inputs("row_linear", x, weight, "(outputs, inputs / ranks)")
    if axis is None:
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    if sequence_dim is None:
        y = psum(y, axis)
    else:
        y = psum_scatter(y, axis, sequence_dim)
        bias = None if bias is None else pvary(bias, axis)
    return y if bias is None else y + bias


def vocab_embedding(
    tokens: Tensor,
    table: Tensor,
    *,
    axis: str | None = "tp",
    vocabulary: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """The rows of an embedding table that is cut along its vocabulary.

    Args:
        tokens: (...), token ids from 0 to ``vocabulary`` - 1, the same on all ranks.
        table: (ceil(vocabulary / ranks), width), this rank's slice along dimension 0, padded at
            the vocabulary's end.
        axis: the mesh axis the table is cut over; None: it is whole.
        vocabulary: the number of token ids; None: the rows of all ranks.
        sequence_dim: the dimension along which to cut the sequence of the result; None: don't.

    Returns:
        (..., width), the same on all ranks; with ``sequence_dim`` this rank's part of the
        sequence, varying. NaN for a token id outside the vocabulary.

    Raises:
        ValueError: if the table has not the rows of such a slice, or the axis does not divide the
            sequence.
    """
    if axis is None:
        return F.embedding(tokens, table)
    vocabulary = _vocabulary("vocab_embedding: table", table.shape[0], axis, vocabulary)
    place, mine = _own(tokens, table.shape[0], axis)
    x = torch.where(mine.unsqueeze(-1), F.embedding(place, table), 0)
    # An index of no rank is no silent zero. Each rank sees it.
    known = (tokens >= 0) & (tokens < vocabulary)
    x = torch.where(known.unsqueeze(-1), x, torch.nan)
    return psum(x, axis) if sequence_dim is None else psum_scatter(x, axis, sequence_dim)


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    axis: str | None = "tp",
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """The cross-entropy of logits that are cut along the vocabulary, and are never gathered.

    Of each token two numbers travel: the logarithm of the sum of this rank's exponentials, and the
    target's logit, on the rank that has it.

    Args:
        logits: (..., ceil(vocabulary / ranks)), varying, as :func:`column_linear` gives them. Half
            precision is computed in float32.
        targets: (...), token ids, the same on all ranks.
        axis: the mesh axis the logits are cut over; None: they are whole.
        vocabulary: the number of token ids; None: the logits of all ranks. Logits past it, of
            padding, take no part.
        ignore_index: targets of this value take no part.
        reduction: ``"mean"`` over the targets that take part, ``"sum"``, or ``"none"``.

    Returns:
        The loss in nats, the same on all ranks, as ``torch.nn.functional.cross_entropy``: 0-dim,
        or (...) with ``"none"``. NaN for a target outside the vocabulary.

    Raises:
        ValueError: if there are not as many logits as such a slice has, the shapes of logits and
            targets don't fit, or the reduction is unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it is 'mean', 'sum' or 'none'")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"vocab_cross_entropy: logits of shape {tuple(logits.shape)} are not (..., vocabulary) "
            f"of targets of shape {tuple(targets.shape)}"
        )
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if axis is None:
        rows = logits.reshape(-1, logits.shape[-1])
        flat = F.cross_entropy(
            rows, targets.reshape(-1), ignore_index=ignore_index, reduction=reduction
        )
        return flat.reshape(targets.shape) if reduction == "none" else flat
    losses = _losses(logits, targets, axis, vocabulary)
    counted = targets != ignore_index
    losses = torch.where(counted, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def _losses(logits: Tensor, targets: Tensor, axis: str, vocabulary: int | None) -> Tensor:
    """Each token's loss, the same on all ranks."""
    rows = logits.shape[-1]
    vocabulary = _vocabulary("vocab_cross_entropy: logits", rows, axis, vocabulary)
    if rows * axis_size(axis) > vocabulary:
        ids = axis_index(axis) * rows + torch.arange(rows, device=logits.device)
        # Finite, since a rank may have nothing but padding, and half of the least, since more is
        # added; its exponential beside any logit is 0.
        logits = torch.where(ids < vocabulary, logits, torch.finfo(logits.dtype).min / 2)
    place, mine = _own(targets, rows, axis)
    known = (targets >= 0) & (targets < vocabulary)
    target = torch.where(mine, logits.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0)
    pair = torch.stack([logits.logsumexp(-1), torch.where(known, target, torch.nan)])
    pairs = all_gather_invariant(pair.unsqueeze(0), axis)  # (ranks, 2, ...)
    return pairs[:, 0].logsumexp(0) - pairs[:, 1].sum(0)


def _own(tokens: Tensor, rows: int, axis: str) -> tuple[Tensor, Tensor]:
    """The place of each token in this rank's rows (0 if it has none), and whether it has one."""
    place = tokens - axis_index(axis) * rows
    mine = (place >= 0) & (place < rows)
    return torch.where(mine, place, 0), mine


def _vocabulary(what: str, rows: int, axis: str, vocabulary: int | None) -> int:
    n = axis_size(axis)
    if vocabulary is None:
        return rows * n
    if rows != -(-vocabulary // n):
        raise ValueError(
            f"{what}: {rows} rows on each of the {n} ranks of {axis!r}, and a vocabulary of "
            f"{vocabulary} has {-(-vocabulary // n)}; cut it by the rule zf.SliceRule(0, pad=True)"
        )
    return vocabulary


def _check_inputs(what: str, x: Tensor, weight: Tensor, layout: str) -> None:
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{what}: x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)} don't "
            f"fit; on a rank the weight is {layout} and x (..., inputs of the weight)"
        )
