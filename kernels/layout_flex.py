"""Layouts from and to FlexAttention's ``BlockMask``, which is dense in blocks: for both, the size
of the mask is (query blocks × key blocks)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .layout_arguments import BLOCKS
from .layout_blocks import Blocks, distinct, with_real_tensors
from .layouts import Layout

_AT_ONCE = 1 << 22  # elements of masks that are evaluated at a time


def to_block_mask(layout: Layout, device: torch.device | str) -> BlockMask:
    """The BlockMask with the same elements; for ``layout.heads`` heads, or one for all."""
    whole, part = (x.to(device) for x in _counts(layout))
    number = torch.full(whole.shape, -2, dtype=torch.int32)  # -2: not seen
    for pattern, (keys, masks) in enumerate(layout.blocks()):
        number[pattern].view(-1)[keys] = masks
    number = number[list(layout.head_patterns)].to(device)
    ones = torch.ones(1, layout.block, layout.block, dtype=torch.bool)
    zeros = torch.zeros(1, layout.block, layout.block, dtype=torch.bool)
    tiles = torch.cat([layout.tiles, zeros, ones]).to(device)  # -2: nothing, -1: everything
    count, size = len(tiles), layout.block
    one_head = layout.heads == 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        tile = number[h * 0 if one_head else h, q // size, k // size]
        return tiles[torch.where(tile < 0, tile + count, tile), q % size, k % size]

    def ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = mask[list(layout.head_patterns)][None].to(device)
        counts = mask.sum(-1, dtype=torch.int32)
        return counts, mask.int().argsort(stable=True, dim=-1, descending=True).int()

    some, all_of_it = ordered(part), ordered(whole)
    return BlockMask.from_kv_blocks(
        *some,
        *all_of_it,
        BLOCK_SIZE=layout.block,
        mask_mod=mask_mod,
        seq_lengths=(layout.q_len, layout.k_len),
    )


@with_real_tensors
def _counts(layout: Layout) -> tuple[Tensor, Tensor]:
    """Which blocks are seen in full, and which in part: (patterns, query blocks, key blocks)."""
    shape = layout.patterns, layout.q_blocks, layout.k_blocks
    whole, part = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for pattern, (keys, masks) in enumerate(layout.blocks()):
        whole[pattern].view(-1)[keys[masks < 0]] = True
        part[pattern].view(-1)[keys[masks >= 0]] = True
    return whole, part


@with_real_tensors
def from_block_mask(block_mask: BlockMask) -> Layout:
    """See :meth:`Layout.from_block_mask`."""
    size, other = block_mask.BLOCK_SIZE
    if size != other or size not in BLOCKS:
        raise ValueError(
            f"a BlockMask with blocks of {(size, other)}; a Layout's are square, of "
            f"{', '.join(map(str, BLOCKS))}: create_block_mask(..., BLOCK_SIZE=128)"
        )
    if block_mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            f"a BlockMask for a batch of {block_mask.kv_num_blocks.shape[0]}; a Layout is the same "
            "for all sequences: create_block_mask(..., B=None)"
        )
    q_len, k_len = block_mask.seq_lengths
    shape = -(-q_len // size), -(-k_len // size)
    part = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, shape)
    if block_mask.full_kv_num_blocks is None:
        whole = torch.zeros_like(part)
    else:
        whole = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
    tiles = torch.zeros(0, size, size, dtype=torch.bool)
    patterns = []
    for head in range(len(part)):
        keys = (part[head] | whole[head]).flatten().nonzero().flatten()
        masks = torch.full_like(keys, -1, dtype=torch.int32)
        cut = (part[head] & ~whole[head]).flatten()[keys].nonzero().flatten()
        # An empty tensor splits into one empty part, which vmap refuses.
        for some in filter(len, cut.split(max(1, _AT_ONCE // size**2))):
            rows, columns = keys[some] // shape[1], keys[some] % shape[1]
            found, which = distinct(_evaluated(block_mask, head, rows, columns, size))
            masks[some] = (len(tiles) + which).int()
            tiles = torch.cat([tiles, found])
        patterns.append(Blocks(keys, masks))
    return Layout.from_blocks(q_len, k_len, size, range(len(patterns)), patterns, tiles)


def _dense(counts: Tensor, indices: Any, shape: tuple[int, int]) -> Tensor:
    """The first ``counts`` of ``indices`` in each row, as booleans (heads, *shape)."""
    counts, indices = counts[0].cpu(), indices[0].cpu().long()
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    width = max(shape[1], indices.shape[-1])
    mask = torch.zeros(*counts.shape, width, dtype=torch.int32)
    return mask.scatter_add_(-1, indices, listed.int())[:, : shape[0], : shape[1]].bool()


def _evaluated(
    block_mask: BlockMask, head: int, rows: Tensor, columns: Tensor, size: int
) -> Tensor:
    """The mask function's values in the blocks (rows, columns): (n, size, size)."""
    device = block_mask.kv_num_blocks.device
    inner = torch.arange(size)
    q_len, k_len = block_mask.seq_lengths
    # Past the end the function need not be defined; what stands there is never read.
    q = (rows[:, None] * size + inner).clamp_max(q_len - 1)[:, :, None].expand(-1, -1, size)
    k = (columns[:, None] * size + inner).clamp_max(k_len - 1)[:, None, :].expand(-1, size, -1)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    each = torch.vmap(block_mask.mask_mod, in_dims=(None, None, 0, 0))
    seen = each(zero, zero + head, q.flatten().to(device), k.flatten().to(device))
    return seen.view(-1, size, size).bool().cpu()
