"""PowerSGD: the mean of matrices by the sums of two thin factors, in two collectives.

arXiv 1905.13727, algorithm 1, with the last step's right factors as the start.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .codecs import PowerSGD
from .collectives import pmean, pvary
from .feedback import Bucket, ErrorFeedback
from .finiteness import all_finite_in
from .tree import Tensor


def _factored(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """The matrix that a leaf is, or None if it travels as it is."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None


def first_factors(bucket: Bucket, method: PowerSGD, device: torch.device) -> list[Tensor]:
    """Scattered numbers between -1 and 1 that are the same everywhere, without a generator."""
    factors = []
    for matrix in [_factored(shape, method.rank) for shape in bucket.shapes]:
        if matrix:
            shape = (matrix[1], method.rank)
            place = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=device)
            noise = torch.frac((place * 12.9898).sin() * 43758.5453)
            factors.append(noise.view(shape).to(bucket.dtype))
    return factors


def mean_by_factors(
    flat: Tensor,
    bucket: Bucket,
    method: PowerSGD,
    error: ErrorFeedback | None,
    axis: str,
    mask: Tensor | None = None,
) -> tuple[Tensor, ErrorFeedback | None]:
    """The mean of the buckets, 0 where the mask is False, and the new feedback."""
    if error is None:
        factors: Sequence[Tensor] = first_factors(bucket, method, flat.device)
        total = flat
    else:
        factors = error.factors
        total = flat + error.sent.local
    leaves = bucket.unpack(total)
    shapes = [_factored(shape, method.rank) for shape in bucket.shapes]
    matrices = [leaf.reshape(s) for leaf, s in zip(leaves, shapes, strict=True) if s]
    plain = [leaf.reshape(-1) for leaf, s in zip(leaves, shapes, strict=True) if not s]

    # Left factors, and what travels as it is; then right factors.
    left = [m @ pvary(q, axis) for m, q in zip(matrices, factors, strict=True)]
    *lefts, whole = _mean_together([*left, torch.cat(plain) if plain else flat[:0]], axis)
    lefts = [torch.linalg.qr(torch.nan_to_num(p))[0] for p in lefts]
    right = [m.mT @ pvary(p, axis) for m, p in zip(matrices, lefts, strict=True)]
    rights = _mean_together(right, axis) if right else []

    products = iter([p @ q.mT for p, q in zip(lefts, rights, strict=True)])
    wholes = iter(whole.split([math.prod(x) for x, s in zip(bucket.shapes, shapes, strict=True)
                               if not s]))  # fmt: skip
    mean = bucket.pack([next(products) if s else next(wholes) for s in shapes])
    if mask is not None:  # an orthogonalised row of zeros is zero but for roundings
        mean = torch.where(mask, mean, 0)
    if error is None:
        return mean, None
    finite = all_finite_in(mean)
    here = pvary(finite, axis)
    # What travels as it is, loses nothing.
    kept = bucket.pack(
        [
            torch.ones(shape, dtype=bucket.dtype, device=flat.device) * (s is not None)
            for shape, s in zip(bucket.shapes, shapes, strict=True)
        ]
    )
    rest = (total - pvary(mean, axis)) * kept
    return mean, replace(
        error,
        sent=error.sent.like(torch.where(here, rest, error.sent.local)),
        factors=tuple(
            torch.where(finite, new, old) for new, old in zip(rights, factors, strict=True)
        ),
        finite=finite,
    )


def _mean_together(parts: Sequence[Tensor], axis: str) -> list[Tensor]:
    """The mean over the axis of several tensors, in one collective."""
    flat = pmean(torch.cat([part.reshape(-1) for part in parts]), axis)
    split = flat.split([part.numel() for part in parts])
    return [x.view(part.shape) for x, part in zip(split, parts, strict=True)]
