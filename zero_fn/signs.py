"""The mean of momenta or gradients by their signs, which makes nothing of the model's size.

The two phases are those of ``compression.py``. But what is encoded is never there as a whole: the
kernels compute it where they encode it, and once more where the codes have met and what they lost
becomes the new feedback, in the memory of the old.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .codecs import from_bytes, to_bytes
from .collectives import all_gather_invariant, all_to_all, pscatter, pvary
from .feedback import Bucket, ErrorFeedback
from .tree import Tensor


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
    from zero_fn.kernels import pack_average, pack_momentum, rest_of_average, rest_of_momentum

    ranks, piece = bucket.ranks, bucket.length // bucket.ranks
    device = grads[0].device
    leaves = [g.contiguous() for g in grads]
    own = None if mu is None else pvary(mu, axis)
    counts = pscatter(bucket.counts(device), axis)
    if error is None:
        sent, owned = (torch.zeros(n, dtype=bucket.dtype, device=device)
                       for n in (bucket.length, piece))  # fmt: skip
    else:
        sent, owned = error.sent.local, error.owned.local  # type: ignore[union-attr]

    bits, scales = pack_momentum(leaves, own, sent, beta)
    data, kinds = to_bytes((bits.view(ranks, -1), scales.view(ranks, -1)))
    received = from_bytes(all_to_all(data, axis), kinds)
    average = pack_average(*received, owned, counts)
    data, kinds = to_bytes([part.unsqueeze(0) for part in average])
    gathered = from_bytes(all_gather_invariant(data, axis), kinds)
    mean = gathered[0].reshape(-1), gathered[1].reshape(-1)
    # NaN and infinity travel in the scales, so that all ranks see them without a word more.
    finite = mean[1].isfinite().all()
    if error is None:
        return mean, finite, None
    here = pvary(finite, axis)
    sent = rest_of_momentum(leaves, own, sent, beta, bits, scales, here)
    owned = rest_of_average(*received, owned, counts, *average, here)
    return mean, finite, replace(
        error,
        sent=error.sent.like(sent),
        owned=error.owned.like(owned),  # type: ignore[union-attr]
        finite=finite,
    )  # fmt: skip
