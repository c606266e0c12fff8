"""Checks of the arguments of the layouts' builders."""

import random
from collections.abc import Sequence

BLOCKS = (16, 32, 64, 128)


def blocks(length: int, block: int, num_heads: int = 1) -> int:
    """Number of blocks of a side."""
    if block not in BLOCKS:
        raise ValueError(f"block={block}; one of {', '.join(map(str, BLOCKS))}")
    if length < 0:
        raise ValueError(f"a layout of length {length}; 0 or more")
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads}; 1 (shared by any number of heads) or more")
    return -(-length // block)


def causal(attention: str, horizontal_global_attention: bool = False) -> bool:
    """Whether attention is unidirectional."""
    if attention not in ("unidirectional", "bidirectional"):
        raise ValueError(f"attention={attention!r}; 'unidirectional' or 'bidirectional'")
    if horizontal_global_attention and attention == "unidirectional":
        raise ValueError(
            "horizontal_global_attention=True lets blocks see later ones; it wants "
            "attention='bidirectional'"
        )
    return attention == "unidirectional"


def reach(num_sliding_window_blocks: int) -> int:
    """Blocks to either side in a window of so many."""
    if num_sliding_window_blocks < 1:
        raise ValueError(f"num_sliding_window_blocks={num_sliding_window_blocks}; 1 or more")
    return num_sliding_window_blocks // 2


def spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """Pairs of first block and end (left out)."""
    if ends is None:
        ends = [start + 1 for start in starts]
    if len(starts) != len(ends):
        raise ValueError(
            f"{len(starts)} global_block_indices and {len(ends)} global_block_end_indices"
        )
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start < end:
            raise ValueError(
                f"global blocks {start} to {end} (left out); from 0 on, and the end after the start"
            )
    return list(zip(starts, ends, strict=True))


def random_blocks(count: int, n: int) -> None:
    if not 0 <= count <= n:
        raise ValueError(f"num_random_blocks={count} of {n} blocks a row")


def seed(number: int, pattern: int) -> int:
    """A seed for each pattern."""
    return random.Random(f"{number}/{pattern}").getrandbits(64)
