"""Where leaves lie in one flat bucket, and what each rank keeps from step to step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import tree
from .codecs import BLOCK
from .collectives import axis_size
from .tree import Tensor


class _Place(NamedTuple):
    """The static fields of a tensor of each rank's own."""

    axis: str
    shape: tuple[int, ...]


class PerRank:
    """A pytree node: a tensor that each rank of an axis has of its own.

    Outside ``spmd``, in the simulation, ``local`` holds those of all ranks, stacked along a leading
    dimension.

    Attributes:
        local: this rank's tensor.
        axis: the mesh axis.
        shape: the shape of one rank's tensor.
    """

    __slots__ = ("axis", "local", "shape")
    __zero_fn_placed__ = True

    def __init__(self, local: Any, axis: str, shape: tuple[int, ...]) -> None:
        self.local, self.axis, self.shape = local, axis, shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which ``local`` differs from rank to rank."""
        return (self.axis,)

    def like(self, local: Tensor) -> "PerRank":
        """Another one of the same shape."""
        return PerRank(local, self.axis, self.shape)

    def __repr__(self) -> str:
        return f"PerRank({list(self.shape)} of each rank of {self.axis})"


tree.register_node(
    PerRank,
    lambda node: ((node.local,), _Place(node.axis, node.shape)),
    lambda place, parts: PerRank(parts[0], *place),
    lambda place: ("local",),
)


@dataclass(frozen=True)
class ErrorFeedback:
    """What compression left over so far; made by :func:`compression_state`.

    Attributes:
        sent: what this rank's own codes lost.
        owned: what the codes of the averages lost that this rank owns; None with PowerSGD.
        factors: PowerSGD's right factors, else an empty tuple.
        finite: whether the last gradients of all ranks were finite, a 0-dim bool. If they were
            not, the feedback is that of the step before, and the mean is not to be used.
        method: the codec.
        shapes: the shapes of the leaves it was made for.
    """

    sent: PerRank
    owned: PerRank | None
    factors: tuple[Tensor, ...]
    finite: Tensor
    method: Any
    shapes: tuple[tuple[int, ...], ...]


tree.register_dataclass(ErrorFeedback, static=("method", "shapes"))


ROUND = 2 << 20  # values whose codes are worth an exchange of their own: 8 MB of gradients


class Round(NamedTuple):
    """Neighbouring leaves of a bucket, whose codes travel by themselves.

    Attributes:
        leaves: which they are.
        values: where their values lie in the bucket.
        piece: the values that each rank owns the average of; the last ranks' may reach past the
            end, and are zeros there.
        owned: where these lie in what a rank owns.
    """

    leaves: slice
    values: slice
    piece: int
    owned: slice

    def rows(self, x: Tensor, ranks: int, values: int = 1) -> Tensor:
        """What stands for so many values each, of this round, with zeros behind; a row an owner."""
        missing = ranks * self.piece // values - len(x)
        return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(ranks, -1)


class Bucket(NamedTuple):
    """How leaves lie in one flat tensor, each padded to whole blocks.

    Attributes:
        shapes: the leaves' shapes.
        dtype: of the bucket: float64 if a leaf is, else float32.
        ranks: the bucket has a multiple of this many blocks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    ranks: int

    @property
    def sizes(self) -> list[int]:
        """The padded length of each leaf."""
        return [-(-math.prod(shape) // BLOCK) * BLOCK for shape in self.shapes]

    @property
    def length(self) -> int:
        """The values of the bucket, padding and all."""
        step = BLOCK * self.ranks
        return -(-sum(self.sizes) // step) * step

    @property
    def whole(self) -> Round:
        """All leaves as one round."""
        piece = self.length // self.ranks
        return Round(slice(0, len(self.shapes)), slice(0, self.length), piece, slice(0, piece))

    @property
    def rounds(self) -> list[Round]:
        """Leaf after leaf until there are enough, :data:`ROUND`; few blocks a rank are not."""
        least, sizes, found = max(ROUND, 32 * BLOCK * self.ranks), self.sizes, []
        first = start = end = owned = 0
        for number, size in enumerate(sizes, 1):
            end += size
            last = number == len(sizes)
            if last or min(end - start, sum(sizes) - end) >= least:
                stop = self.length if last else end
                piece = -(-(stop - start) // (BLOCK * self.ranks)) * BLOCK
                own = slice(owned, owned + piece)
                found.append(Round(slice(first, number), slice(start, stop), piece, own))
                first, start, owned = number, stop, own.stop
        return found

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """The leaves in one flat tensor, zeros between them."""
        parts = []
        for leaf, size in zip(leaves, self.sizes, strict=True):
            flat = leaf.reshape(-1).to(self.dtype)
            rest = size - leaf.numel()
            parts.append(torch.nn.functional.pad(flat, (0, rest)) if rest else flat)
        rest = self.length - sum(self.sizes)
        if rest:
            parts.append(torch.zeros(rest, dtype=self.dtype, device=leaves[0].device))
        return torch.cat(parts)

    def unpack(self, flat: Tensor, dtypes: Sequence[torch.dtype] | None = None) -> list[Tensor]:
        """The leaves again."""
        leaves, start = [], 0
        for number, (shape, size) in enumerate(zip(self.shapes, self.sizes, strict=True)):
            leaf = flat[start : start + math.prod(shape)].view(shape)
            leaves.append(leaf if dtypes is None else leaf.to(dtypes[number]))
            start += size
        return leaves

    def counts(self, device: torch.device) -> Tensor:
        """How many values of each block are real, (length / BLOCK,) int32."""
        real: list[int] = []
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            if size:
                real += [BLOCK] * (size // BLOCK - 1) + [(math.prod(shape) - 1) % BLOCK + 1]
        real += [0] * (self.length // BLOCK - len(real))
        return torch.tensor(real, dtype=torch.int32, device=device)


def bucket_of(leaves: Sequence[Any], axis: str) -> Bucket:
    """The bucket of leaves, which are whole tensors or pieces. Call it inside ``spmd``."""
    wide = any(leaf.dtype == torch.float64 for leaf in leaves)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    return Bucket(shapes, torch.float64 if wide else torch.float32, axis_size(axis))
