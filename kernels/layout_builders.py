"""Layouts from lengths, windows and masks, besides DeepSpeed's, and what all builders end in.

Class methods of :class:`layouts.Layout`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from . import layout_arguments as check
from . import layout_patterns as patterns
from .layout_blocks import (
    Ranges,
    arange,
    distinct,
    keys_of,
    no_tiles,
    rows_of,
    whole,
    with_real_tensors,
)

if TYPE_CHECKING:
    from .layouts import Layout

Attention = Literal["bidirectional", "unidirectional"]


@with_real_tensors
def dense(
    cls: type["Layout"], seq_len: int, num_heads: int = 1, block: int = 64, k_len: int | None = None
) -> "Layout":
    """Every query sees every key. ``k_len``: number of keys, if not ``seq_len``."""
    k_len = seq_len if k_len is None else k_len
    n, columns = check.blocks(seq_len, block, num_heads), check.blocks(k_len, block)
    return same(cls, seq_len, block, num_heads, [rows_of(n, 0, columns)], k_len)


def causal(
    cls: type["Layout"], seq_len: int, num_heads: int = 1, block: int = 64, k_len: int | None = None
) -> "Layout":
    """Query i sees keys 0 to i. ``k_len``: number of keys, if not ``seq_len``."""
    return cls.dense(seq_len, num_heads, block, k_len).tril()


@with_real_tensors
def dilated(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    dilation: int = 2,
    attention: Attention = "bidirectional",
) -> "Layout":
    """A window with gaps: every ``dilation``-th block (arXiv 2004.05150, section 3.1).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        num_sliding_window_blocks: blocks that a row sees, its own included.
        dilation: distance between them, in blocks; 1 is a sliding window.
        attention: see :func:`fixed`.

    Raises:
        ValueError: for a window or dilation below 1.
    """
    n = check.blocks(seq_len, block, num_heads)
    reach = check.reach(num_sliding_window_blocks)
    if dilation < 1:
        raise ValueError(f"dilation={dilation}; 1 or more blocks")
    ranges = patterns.dilated(n, reach, dilation, check.causal(attention))
    return same(cls, seq_len, block, num_heads, ranges)


@with_real_tensors
def strided(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    stride: int = 4,
    num_local_blocks: int | None = None,
    attention: Attention = "bidirectional",
) -> "Layout":
    """Neighbours, and every ``stride``-th block (arXiv 1904.10509, section 4.3).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        stride: distance of the far blocks from each other, in blocks.
        num_local_blocks: the own block and those before it (bidirectional: and after it);
            None: ``stride``, as in the paper.
        attention: see :func:`fixed`.

    Raises:
        ValueError: for sizes below 1.
    """
    n = check.blocks(seq_len, block, num_heads)
    near = stride if num_local_blocks is None else num_local_blocks
    if stride < 1 or near < 1:
        raise ValueError(f"stride={stride}, num_local_blocks={near}; both are 1 or more")
    ranges = patterns.strided(n, stride, near, check.causal(attention))
    return same(cls, seq_len, block, num_heads, ranges)


@with_real_tensors
def document(
    cls: type["Layout"], lengths: Sequence[int], num_heads: int = 1, block: int = 64
) -> "Layout":
    """Packed documents: each token sees those of its own document, and no other.

    Exact for each element: a document may begin anywhere in a block.

    Args:
        lengths: tokens of each document; the sequence is as long as their sum.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.

    Raises:
        ValueError: for a negative length.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths={list(lengths)}; a document has 0 or more tokens")
    seq_len = sum(lengths)
    n = check.blocks(seq_len, block, num_heads)
    counts = torch.tensor(list(lengths), dtype=torch.int64)
    owner = torch.repeat_interleave(arange(len(lengths)), counts)
    edges = torch.cat([arange(1), counts.cumsum(0)])
    # Tokens past the end go with the last document: nothing reads them.
    owner = torch.cat([owner, owner[-1:].expand(n * block - seq_len)]).view(n, block)
    first, last = owner[:, 0], owner[:, -1]
    blocks = whole(keys_of([Ranges(arange(n), edges[first] // block,
                                   (edges[last + 1] + block - 1) // block)], n))  # fmt: skip
    rows, columns = blocks.keys // max(n, 1), blocks.keys % max(n, 1)
    cut = ((first != last)[rows] | (first != last)[columns]).nonzero().flatten()
    tiles = no_tiles(block)
    for part in cut.split(1024):  # a part at a time: together they can be many
        found, which = distinct(owner[rows[part], :, None] == owner[columns[part], None, :])
        blocks.masks[part] = (len(tiles) + which).int()
        tiles = torch.cat([tiles, found])
    return cls.from_blocks(seq_len, seq_len, block, [0] * num_heads, [blocks], tiles)


@with_real_tensors
def from_mask(
    cls: type["Layout"],
    mask: Bool[Tensor, "*heads q_blocks k_blocks"],
    block: int = 64,
    seq_len: int | None = None,
    k_len: int | None = None,
) -> "Layout":
    """The blocks that a boolean block mask holds.

    Args:
        mask: whether a block of queries sees a block of keys; may have a leading dimension of
            heads.
        block: 16, 32, 64 or 128.
        seq_len: number of queries; None: all blocks are full.
        k_len: number of keys; None: all blocks are full.

    Raises:
        ValueError: for a mask of another shape or dtype, or lengths it does not fit.
    """
    if mask.dtype != torch.bool or mask.ndim not in (2, 3) or mask.shape[:-2] == (0,):
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it takes torch.bool of shape "
            "(query blocks, key blocks) or (heads, query blocks, key blocks)"
        )
    mask = mask.detach().cpu()
    masks = mask if mask.ndim == 3 else mask[None]
    q_len, keys = (
        n * block if length is None else length
        for n, length in zip(mask.shape[-2:], (seq_len, k_len), strict=True)
    )
    sizes = check.blocks(q_len, block), check.blocks(keys, block)
    if sizes != tuple(mask.shape[-2:]):
        raise ValueError(
            f"mask has {tuple(mask.shape[-2:])} blocks; {q_len} queries and {keys} keys have "
            f"{sizes} of {block}"
        )
    blocks = [whole(one.flatten().nonzero().flatten()) for one in masks]
    return cls.from_blocks(q_len, keys, block, range(len(masks)), blocks, no_tiles(block))


def per_head(
    cls: type["Layout"],
    seq_len: int,
    block: int,
    head_patterns: Iterable[int],
    ranges: Callable[[int], Iterable[Ranges]],
) -> "Layout":
    """The layout whose heads have the patterns of these numbers."""
    heads = list(head_patterns)
    n = -(-seq_len // block)
    blocks = [whole(keys_of(ranges(p), n)) for p in range(max(heads) + 1)]
    return cls.from_blocks(seq_len, seq_len, block, heads, blocks, no_tiles(block))


def same(
    cls: type["Layout"],
    seq_len: int,
    block: int,
    heads: int,
    ranges: Iterable[Ranges],
    k_len: int | None = None,
) -> "Layout":
    """The layout whose heads all have the pattern of these ranges."""
    k_len = seq_len if k_len is None else k_len
    blocks = whole(keys_of(ranges, -(-k_len // block)))
    return cls.from_blocks(seq_len, k_len, block, [0] * heads, [blocks], no_tiles(block))


def clipped(ranges: Callable[[int], Iterable[Ranges]], causal: bool) -> Any:
    """The ranges, cut at the diagonal if ``causal``."""
    if not causal:
        return ranges
    return lambda pattern: map(patterns.up_to_the_diagonal, ranges(pattern))
