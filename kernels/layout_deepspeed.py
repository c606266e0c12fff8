"""Layouts that DeepSpeed's sparse attention has, with its names and parameters.

Class methods of :class:`layouts.Layout`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from . import layout_arguments as check
from . import layout_patterns as patterns
from .layout_blocks import Ranges, with_real_tensors
from .layout_builders import Attention, clipped, per_head, same

if TYPE_CHECKING:
    from .layouts import Layout


@with_real_tensors
def fixed(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    different_layout_per_head: bool = False,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: Attention = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
) -> "Layout":
    """Local windows, and global blocks at the end of each (DeepSpeed's FixedSparsityConfig).

    Sparse Transformer's fixed pattern (arXiv 1904.10509, section 4.3).

    Args:
        seq_len: number of queries and keys; need not be a multiple of the block.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        different_layout_per_head: whether heads take turns with the global patterns.
        num_local_blocks: blocks of a local window.
        num_global_blocks: consecutive blocks of each window that everybody sees.
        attention: ``"unidirectional"``: no block sees later ones. That is a rule for blocks:
            pass ``causal=True`` to the attention to hide later keys within a block too.
        horizontal_global_attention: whether the global blocks see everything.
        num_different_global_patterns: pattern p takes the global blocks p places earlier.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    n = check.blocks(seq_len, block, num_heads)
    causal = check.causal(attention, horizontal_global_attention)
    if num_local_blocks < 1 or num_global_blocks < 1 or num_local_blocks % num_global_blocks:
        raise ValueError(
            f"num_local_blocks={num_local_blocks} is no multiple of "
            f"num_global_blocks={num_global_blocks}"
        )
    most = num_local_blocks // num_global_blocks
    if not 1 <= num_different_global_patterns <= most:
        raise ValueError(
            f"num_different_global_patterns={num_different_global_patterns}; a window of "
            f"{num_local_blocks} blocks has room for 1 to {most}"
        )
    if num_different_global_patterns > 1 and not different_layout_per_head:
        raise ValueError(
            f"num_different_global_patterns={num_different_global_patterns} wants "
            "different_layout_per_head=True"
        )
    return per_head(
        cls,
        seq_len,
        block,
        [h % num_different_global_patterns for h in range(num_heads)],
        lambda pattern: patterns.fixed(
            n, num_local_blocks, num_global_blocks, causal, horizontal_global_attention, pattern
        ),
    )


@with_real_tensors
def variable(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    different_layout_per_head: bool = False,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Attention = "bidirectional",
    horizontal_global_attention: bool = False,
    seed: int = 0,
) -> "Layout":
    """Local windows of any sizes, global and random blocks (VariableSparsityConfig).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        different_layout_per_head: whether each head draws its own random blocks.
        num_random_blocks: random blocks a row; unidirectional: none after the row (DeepSpeed
            draws those too).
        local_window_blocks: sizes of the windows, in blocks; the last one repeats.
        global_block_indices: blocks that everybody sees.
        global_block_end_indices: if given, the blocks from each index to its end (left out).
        attention: see :func:`fixed`.
        horizontal_global_attention: whether the global blocks see everything.
        seed: of the random blocks.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    n = check.blocks(seq_len, block, num_heads)
    causal = check.causal(attention, horizontal_global_attention)
    if not local_window_blocks or min(local_window_blocks) < 1:
        raise ValueError(f"local_window_blocks={local_window_blocks}; sizes of 1 or more")
    spans = check.spans(global_block_indices, global_block_end_indices)
    check.random_blocks(num_random_blocks, n)

    def ranges(pattern: int) -> Iterator[Ranges]:
        yield patterns.local(n, local_window_blocks, causal)
        yield patterns.scattered(n, num_random_blocks, causal, check.seed(seed, pattern))
        yield from patterns.global_at(n, spans, causal, horizontal_global_attention)

    own = different_layout_per_head and num_random_blocks
    return per_head(cls, seq_len, block, range(num_heads) if own else [0] * num_heads, ranges)


@with_real_tensors
def bigbird(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    different_layout_per_head: bool = False,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: Attention = "bidirectional",
    seed: int = 0,
) -> "Layout":
    """Random, neighbouring and first blocks (BigBird, arXiv 2007.14062; BigBirdSparsityConfig).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        different_layout_per_head: whether each head draws its own random blocks.
        num_random_blocks: random blocks a row.
        num_sliding_window_blocks: width of the window around each block, itself included.
        num_global_blocks: first blocks that see, and are seen by, everybody.
        attention: see :func:`fixed`.
        seed: of the random blocks.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    n = check.blocks(seq_len, block, num_heads)
    causal = check.causal(attention)
    check.random_blocks(num_random_blocks, n)
    reach = check.reach(num_sliding_window_blocks)

    def ranges(pattern: int) -> Iterator[Ranges]:
        yield patterns.scattered(n, num_random_blocks, causal, check.seed(seed, pattern))
        yield patterns.sliding(n, reach, reach)
        yield from patterns.global_at(n, [(0, num_global_blocks)], False, True)

    own = different_layout_per_head and num_random_blocks
    heads = range(num_heads) if own else [0] * num_heads
    return per_head(cls, seq_len, block, heads, clipped(ranges, causal))


@with_real_tensors
def bslongformer(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Attention = "bidirectional",
) -> "Layout":
    """Neighbouring and global blocks (Longformer, arXiv 2004.05150, blocks of it).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        num_sliding_window_blocks: width of the window around each block, itself included.
        global_block_indices: blocks that see, and are seen by, everybody.
        global_block_end_indices: if given, the blocks from each index to its end (left out).
        attention: see :func:`fixed`.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    n = check.blocks(seq_len, block, num_heads)
    causal = check.causal(attention)
    reach = check.reach(num_sliding_window_blocks)
    spans = check.spans(global_block_indices, global_block_end_indices)

    def ranges(_: int) -> Iterator[Ranges]:
        yield patterns.sliding(n, reach, reach)
        yield from patterns.global_at(n, spans, False, True)

    return per_head(cls, seq_len, block, [0] * num_heads, clipped(ranges, causal))


@with_real_tensors
def local_sliding_window(
    cls: type["Layout"],
    seq_len: int,
    num_heads: int = 1,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    attention: Attention = "unidirectional",
) -> "Layout":
    """Neighbouring blocks (LocalSlidingWindowSparsityConfig).

    Args:
        seq_len: number of queries and keys.
        num_heads: number of heads; 1: any number share the layout.
        block: 16, 32, 64 or 128.
        num_sliding_window_blocks: width of the window around each block, itself included;
            unidirectional: the half of it that is not after the block.
        attention: see :func:`fixed`.

    Raises:
        ValueError: for a window below 1.
    """
    n = check.blocks(seq_len, block, num_heads)
    reach = check.reach(num_sliding_window_blocks)
    window = patterns.sliding(n, reach, 0 if check.causal(attention) else reach)
    return same(cls, seq_len, block, num_heads, [window])
