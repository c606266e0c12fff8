"""The mean of momenta or gradients by their signs, which makes nothing of the model's size.

The two phases are those of ``compression.py``. But what is encoded is never there as a whole: the
kernels compute it where they encode it, and once more where the codes have met and what they lost
becomes the new feedback, in the memory of the old.

The codes of a large bucket travel in rounds, each of some megabytes of gradients, so that a round
can be under way while the backward still makes the gradients of the next
(``passes/rounds.py`` puts them there).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .codecs import BLOCK, from_bytes, to_bytes
from .collectives import all_gather_invariant, all_to_all, pscatter, pvary
from .feedback import Bucket, ErrorFeedback, Round
from .tree import Tensor


class _Exchanged(NamedTuple):
    """A round's codes; of n values, n / 8 bytes of bits and n / 1024 scales.

    Attributes:
        bits: this rank's own.
        scales: this rank's own.
        received: the bits of all ranks for the piece that this one owns, a row each.
        strengths: their scales.
        counts: how many values of each of the piece's blocks are real.
        owned_bits: those of the piece's average.
        owned_scales: those of the piece's average.
        mean_bits: those of the average of the whole round.
        mean_scales: those of the average of the whole round.
    """

    bits: Tensor
    scales: Tensor
    received: Tensor
    strengths: Tensor
    counts: Tensor
    owned_bits: Tensor
    owned_scales: Tensor
    mean_bits: Tensor
    mean_scales: Tensor


def mean_by_signs(
    grads: Sequence[Tensor],
    mu: Tensor | None,
    beta: float,
    bucket: Bucket,
    error: ErrorFeedback | None,
    axis: str,
) -> tuple[tuple[Tensor, Tensor], Tensor, ErrorFeedback | None]:
    """Bits and scales of the mean, whether it is finite, and the new feedback.

    Args:
        grads: this rank's own leaves.
        mu: None: the mean is that of the leaves. A bucket that is the same on all ranks: that of
            beta mu + (1 - beta) g.
        beta: see there.
        bucket: how the leaves lie.
        error: the feedback, or None for none.
        axis: the mesh axis, of more than one rank.
    """
    from zero_fn.kernels import rest_of_average, rest_of_momentum

    device, rounds = grads[0].device, bucket.rounds
    leaves = [g.contiguous() for g in grads]
    own = None if mu is None else pvary(mu, axis)
    counts = bucket.counts(device)
    if error is None:
        sent, owned = (torch.zeros(n, dtype=bucket.dtype, device=device)
                       for n in (bucket.length, rounds[-1].owned.stop))  # fmt: skip
    else:
        sent, owned = error.sent.local, error.owned.local  # type: ignore[union-attr]

    found = [
        _exchanged(part, bucket.ranks, leaves, own, beta, sent, owned, counts, axis)
        for part in rounds
    ]
    codes = _Exchanged(
        *[torch.cat(x, -1) if len(x) > 1 else x[0] for x in zip(*found, strict=True)]
    )
    mean = codes.mean_bits, codes.mean_scales
    # NaN and infinity travel in the scales, so that all ranks see them without a word more.
    finite = codes.mean_scales.isfinite().all()
    if error is None:
        return mean, finite, None
    here = pvary(finite, axis)
    sent = rest_of_momentum(leaves, own, sent, beta, codes.bits, codes.scales, here)
    received = codes.received, codes.strengths
    averages = codes.owned_bits, codes.owned_scales
    owned = rest_of_average(*received, owned, codes.counts, *averages, here)
    return mean, finite, replace(
        error,
        sent=error.sent.like(sent),
        owned=error.owned.like(owned),  # type: ignore[union-attr]
        finite=finite,
    )  # fmt: skip


def _exchanged(
    part: Round,
    ranks: int,
    leaves: Sequence[Tensor],
    mu: Tensor | None,
    beta: float,
    sent: Tensor,
    owned: Tensor,
    counts: Tensor,
    axis: str,
) -> _Exchanged:
    from zero_fn.kernels import pack_average, pack_momentum

    at = part.values
    momentum = None if mu is None else mu[at]
    bits, scales = pack_momentum(leaves[part.leaves], momentum, sent[at], beta)
    data, kinds = to_bytes([part.rows(bits, ranks, 8), part.rows(scales, ranks, BLOCK)])
    received, strengths = from_bytes(all_to_all(data, axis), kinds)
    real = counts[at.start // BLOCK : at.stop // BLOCK]
    real = pscatter(part.rows(real, ranks, BLOCK), axis).view(-1)
    own_bits, own_scales = pack_average(received, strengths, owned[part.owned], real)
    data, kinds = to_bytes([own_bits.unsqueeze(0), own_scales.unsqueeze(0)])
    all_bits, all_scales = from_bytes(all_gather_invariant(data, axis), kinds)
    mean_bits, mean_scales = all_bits.view(-1)[: len(bits)], all_scales.view(-1)[: len(scales)]
    return _Exchanged(
        bits, scales, received, strengths, real, own_bits, own_scales, mean_bits, mean_scales
    )
