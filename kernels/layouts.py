"""Block-sparse layouts: which blocks of keys each block of queries sees.

A :class:`Layout` is an immutable value in compressed rows (and, on demand, compressed columns):
its size is the number of blocks that are seen, and no array of length × length exists anywhere.
Most blocks are seen in full; one that is not, such as a block on the diagonal of a causal layout,
has a mask in a small table of distinct boolean tiles. Equal layouts are one object, so a layout
can be a static argument, a dictionary's key or a constant of a traced graph.

The builders bear the names and parameters of DeepSpeed's sparsity configurations.
"""

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from . import layout_arguments as check
from . import layout_patterns as patterns
from .layout_blocks import (
    Blocks,
    Ranges,
    arange,
    cleaned,
    combined,
    distinct,
    ended,
    keys_of,
    rows_of,
    whole,
    with_real_tensors,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Attention = Literal["bidirectional", "unidirectional"]

_ALIVE: "weakref.WeakValueDictionary[str, Layout]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Which keys each query may see, in blocks. Made by its class methods, not by its constructor.

    Attributes:
        q_len: number of queries.
        k_len: number of keys.
        block: rows and columns of a block; the last block of a side may be cut off by the length.
        head_patterns: for each head, the number of its pattern. ``(0,)``: any number of heads
            share one pattern.
        row_ptr: int64 (patterns * q_blocks + 1): where each block row begins in ``cols``.
        cols: int32 (blocks): the block columns, ascending in each row.
        masks: int32 (blocks): the number of the block's tile, or -1 where all of it is seen.
        tiles: bool (tiles, block, block): the distinct masks.
        key: a digest of all this: what the layout is called in a traced graph.
    """

    q_len: int
    k_len: int
    block: int
    head_patterns: tuple[int, ...]
    row_ptr: Tensor
    cols: Tensor
    masks: Tensor
    tiles: Tensor
    key: str
    # What was computed from the layout, by whoever asked for it; see `derived`.
    _derived: dict[Any, Any] = field(default_factory=dict)

    # Sizes

    @property
    def heads(self) -> int:
        """Number of heads; 1: any number of heads share one pattern."""
        return len(self.head_patterns)

    @property
    def patterns(self) -> int:
        """Number of distinct patterns among the heads."""
        return max(self.head_patterns) + 1

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block)

    @property
    @with_real_tensors
    def density(self) -> float:
        """Share of blocks that are seen, at least in part; mean of the heads."""
        total = self.q_blocks * self.k_blocks
        seen = self.row_ptr[:: max(self.q_blocks, 1)].diff().tolist()
        return sum(seen[p] for p in self.head_patterns) / self.heads / total if total else 0.0

    # Builders

    @classmethod
    @with_real_tensors
    def dense(
        cls, seq_len: int, num_heads: int = 1, block: int = 64, k_len: int | None = None
    ) -> "Layout":
        """Every query sees every key. ``k_len``: number of keys, if not ``seq_len``."""
        k_len = seq_len if k_len is None else k_len
        n, columns = check.blocks(seq_len, block, num_heads), check.blocks(k_len, block)
        return _same(seq_len, block, num_heads, [rows_of(n, 0, columns)], k_len)

    @classmethod
    def causal(
        cls, seq_len: int, num_heads: int = 1, block: int = 64, k_len: int | None = None
    ) -> "Layout":
        """Query i sees keys 0 to i. ``k_len``: number of keys, if not ``seq_len``."""
        return cls.dense(seq_len, num_heads, block, k_len).tril()

    @classmethod
    @with_real_tensors
    def fixed(
        cls,
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
        return _per_head(
            seq_len,
            block,
            [h % num_different_global_patterns for h in range(num_heads)],
            lambda pattern: patterns.fixed(
                n, num_local_blocks, num_global_blocks, causal, horizontal_global_attention, pattern
            ),
        )

    @classmethod
    @with_real_tensors
    def variable(
        cls,
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
            attention: see :meth:`fixed`.
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
        return _per_head(seq_len, block, range(num_heads) if own else [0] * num_heads, ranges)

    @classmethod
    @with_real_tensors
    def bigbird(
        cls,
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
            attention: see :meth:`fixed`.
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
        return _per_head(seq_len, block, heads, _clipped(ranges, causal))

    @classmethod
    @with_real_tensors
    def bslongformer(
        cls,
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
            attention: see :meth:`fixed`.

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

        return _per_head(seq_len, block, [0] * num_heads, _clipped(ranges, causal))

    @classmethod
    @with_real_tensors
    def local_sliding_window(
        cls,
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
            attention: see :meth:`fixed`.

        Raises:
            ValueError: for a window below 1.
        """
        n = check.blocks(seq_len, block, num_heads)
        reach = check.reach(num_sliding_window_blocks)
        window = patterns.sliding(n, reach, 0 if check.causal(attention) else reach)
        return _same(seq_len, block, num_heads, [window])

    @classmethod
    @with_real_tensors
    def dilated(
        cls,
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
            attention: see :meth:`fixed`.

        Raises:
            ValueError: for a window or dilation below 1.
        """
        n = check.blocks(seq_len, block, num_heads)
        reach = check.reach(num_sliding_window_blocks)
        if dilation < 1:
            raise ValueError(f"dilation={dilation}; 1 or more blocks")
        ranges = patterns.dilated(n, reach, dilation, check.causal(attention))
        return _same(seq_len, block, num_heads, ranges)

    @classmethod
    @with_real_tensors
    def strided(
        cls,
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
            attention: see :meth:`fixed`.

        Raises:
            ValueError: for sizes below 1.
        """
        n = check.blocks(seq_len, block, num_heads)
        near = stride if num_local_blocks is None else num_local_blocks
        if stride < 1 or near < 1:
            raise ValueError(f"stride={stride}, num_local_blocks={near}; both are 1 or more")
        ranges = patterns.strided(n, stride, near, check.causal(attention))
        return _same(seq_len, block, num_heads, ranges)

    @classmethod
    @with_real_tensors
    def document(cls, lengths: Sequence[int], num_heads: int = 1, block: int = 64) -> "Layout":
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
        tiles = _no_tiles(block)
        for part in cut.split(1024):  # a part at a time: together they can be many
            found, which = distinct(owner[rows[part], :, None] == owner[columns[part], None, :])
            blocks.masks[part] = (len(tiles) + which).int()
            tiles = torch.cat([tiles, found])
        return from_blocks(seq_len, seq_len, block, [0] * num_heads, [blocks], tiles)

    @classmethod
    @with_real_tensors
    def from_mask(
        cls,
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
        return from_blocks(q_len, keys, block, range(len(masks)), blocks, _no_tiles(block))

    @classmethod
    def from_block_mask(cls, block_mask: "BlockMask") -> "Layout":
        """The layout of FlexAttention's ``BlockMask``, exact for each element.

        Raises:
            ValueError: if it differs between sequences of a batch, or has blocks that ours can't
                be.
        """
        from .layout_flex import from_block_mask

        return from_block_mask(block_mask)

    def to_block_mask(self, device: torch.device | str = "cpu") -> "BlockMask":
        """FlexAttention's ``BlockMask`` of the same elements."""
        from .layout_flex import to_block_mask

        return to_block_mask(self, device)

    # Algebra

    @with_real_tensors
    def tril(self) -> "Layout":
        """The layout without keys after the query: query i sees keys 0 to i at most."""

        def made() -> Layout:
            blocks = self.blocks()
            width = max(self.k_blocks, 1)
            below = [
                Blocks(keys[keys % width <= keys // width], masks[keys % width <= keys // width])
                for keys, masks in blocks
            ]
            triangle = torch.ones(self.block, self.block, dtype=torch.bool).tril()
            # Tile i of the table has its lower part at i + its length, the whole tile's is last.
            tiles = torch.cat([self.tiles, self.tiles & triangle, triangle[None]])
            for keys, masks in below:
                diagonal = keys % width == keys // width
                shifted = masks + len(self.tiles)
                shifted[masks < 0] = 2 * len(self.tiles)
                masks[diagonal] = shifted[diagonal]
            return from_blocks(self.q_len, self.k_len, self.block, self.head_patterns, below, tiles)

        return self.derived("tril", made)

    def __or__(self, other: "Layout") -> "Layout":
        """Union: what either sees."""
        return _combine(self, other, union=True)

    def __and__(self, other: "Layout") -> "Layout":
        """Intersection: what both see."""
        return _combine(self, other, union=False)

    # Conversions

    @with_real_tensors
    def to_mask(self) -> Bool[Tensor, "heads q_blocks k_blocks"]:
        """Whether any element of each block is seen: heads × query blocks × key blocks."""
        mask = torch.zeros(self.patterns, self.q_blocks * self.k_blocks, dtype=torch.bool)
        for pattern, blocks in enumerate(self.blocks()):
            mask[pattern, blocks.keys] = True
        return mask.view(self.patterns, self.q_blocks, self.k_blocks)[list(self.head_patterns)]

    @with_real_tensors
    def to_dense(self) -> Bool[Tensor, "heads queries keys"]:
        """Whether each query sees each key. As large as it says: for tests and small examples."""
        tiles = torch.cat([self.tiles, torch.ones(1, self.block, self.block, dtype=torch.bool)])
        rows, columns = self.q_blocks, self.k_blocks
        dense = torch.zeros(self.patterns, rows * columns, self.block, self.block, dtype=torch.bool)
        for pattern, blocks in enumerate(self.blocks()):
            dense[pattern, blocks.keys] = tiles[blocks.masks.long()]
        dense = dense.view(self.patterns, rows, columns, self.block, self.block).transpose(2, 3)
        dense = dense.reshape(self.patterns, rows * self.block, columns * self.block)
        return dense[list(self.head_patterns), : self.q_len, : self.k_len]

    @with_real_tensors
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compressed columns: int64 (patterns * k_blocks + 1), int32 rows, places in ``cols``."""

        def made() -> tuple[Tensor, Tensor, Tensor]:
            keys = [b.keys for b in self.blocks()]
            rows = torch.cat([k // max(self.k_blocks, 1) for k in keys])
            column = torch.cat(
                [k % max(self.k_blocks, 1) + p * self.k_blocks for p, k in enumerate(keys)]
            )
            order = column.argsort(stable=True)
            count = torch.bincount(column, minlength=self.patterns * self.k_blocks)
            return torch.cat([arange(1), count.cumsum(0)]), rows[order].int(), order

        return self.derived("columns", made)

    def derived(self, name: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, computed once for each name and kept as long as the layout."""
        if name not in self._derived:
            self._derived[name] = with_real_tensors(make)()
        return self._derived[name]

    def _pattern(self, pattern: int) -> Blocks:
        first = pattern * self.q_blocks
        ptr = self.row_ptr[first : first + self.q_blocks + 1]
        rows = torch.repeat_interleave(arange(self.q_blocks), ptr.diff())
        begin, end = int(ptr[0]), int(ptr[-1])
        keys = rows * self.k_blocks + self.cols[begin:end].long()
        return Blocks(keys, self.masks[begin:end].clone())

    def blocks(self) -> list[Blocks]:
        """The blocks of each pattern, as sorted keys and masks."""
        return [self._pattern(p) for p in range(self.patterns)]

    # Values

    def __repr__(self) -> str:
        heads = "any heads" if self.heads == 1 else f"{self.heads} heads"
        several = f" in {self.patterns} patterns" if self.patterns > 1 else ""
        return (
            f"Layout({self.q_len} × {self.k_len}, {heads}{several}, block {self.block}, "
            f"{len(self.cols)} blocks, density {self.density:.3g})"
        )

    def __str__(self) -> str:
        from .layout_drawing import text

        return f"{self!r}\n{text(self)}"

    def plot(self, ax: Any = None, head: int = 0) -> Any:
        """Draw one head's blocks with matplotlib; returns the Axes. ``ax=None``: a new one."""
        from .layout_drawing import plot

        return plot(self, ax, head)

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self

    def __copy__(self) -> "Layout":
        return self

    def __reduce__(self) -> Any:
        fields = (self.q_len, self.k_len, self.block, self.head_patterns)
        return _interned, (*fields, self.row_ptr, self.cols, self.masks, self.tiles)


def find(key: str) -> Layout:
    """The layout of that key.

    Raises:
        LookupError: if nothing holds that layout any more.
    """
    layout = _ALIVE.get(key)
    if layout is None:
        raise LookupError(
            f"the layout {key} of this graph no longer exists: keep a reference to the Layout for "
            "as long as what was traced with it runs"
        )
    return layout


def from_blocks(
    q_len: int,
    k_len: int,
    block: int,
    head_patterns: Sequence[int],
    patterns: list[Blocks],
    tiles: Tensor,
) -> Layout:
    """The layout of these patterns, with equal ones joined and the table of tiles cleaned."""
    patterns, tiles = cleaned(*ended(patterns, tiles, q_len, k_len, block))
    kept: dict[bytes, int] = {}
    place = []
    for keys, masks in patterns:
        place.append(kept.setdefault(_bytes(keys) + _bytes(masks), len(kept)))
    patterns = [patterns[place.index(i)] for i in range(len(kept))]
    # Numbered in the order of the heads, so that equal layouts have equal fields.
    order = list(dict.fromkeys(place[p] for p in head_patterns))
    head_patterns = [order.index(place[p]) for p in head_patterns]
    patterns = [patterns[i] for i in order]
    rows, columns = -(-q_len // block), max(-(-k_len // block), 1)
    counts = [torch.bincount(keys // columns, minlength=rows) for keys, _ in patterns]
    row_ptr = torch.cat([arange(1), torch.cat(counts).cumsum(0)])
    cols = torch.cat([keys % columns for keys, _ in patterns]).int()
    masks = torch.cat([masks for _, masks in patterns])
    return _interned(q_len, k_len, block, tuple(head_patterns), row_ptr, cols, masks, tiles)


def _interned(
    q_len: int,
    k_len: int,
    block: int,
    head_patterns: tuple[int, ...],
    row_ptr: Tensor,
    cols: Tensor,
    masks: Tensor,
    tiles: Tensor,
) -> Layout:
    """The one layout with these fields."""
    digest = hashlib.blake2b(repr((q_len, k_len, block, head_patterns)).encode(), digest_size=16)
    for tensor in (row_ptr, cols, masks, tiles):
        digest.update(repr(tuple(tensor.shape)).encode() + _bytes(tensor))
    key = digest.hexdigest()
    layout = _ALIVE.get(key)
    if layout is None:
        layout = Layout(q_len, k_len, block, head_patterns, row_ptr, cols, masks, tiles, key)
        _ALIVE[key] = layout
    return layout


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _per_head(
    seq_len: int,
    block: int,
    head_patterns: Iterable[int],
    ranges: Callable[[int], Iterable[Ranges]],
) -> Layout:
    """The layout whose heads have the patterns of these numbers."""
    heads = list(head_patterns)
    n = -(-seq_len // block)
    blocks = [whole(keys_of(ranges(p), n)) for p in range(max(heads) + 1)]
    return from_blocks(seq_len, seq_len, block, heads, blocks, _no_tiles(block))


def _same(
    seq_len: int, block: int, heads: int, ranges: Iterable[Ranges], k_len: int | None = None
) -> Layout:
    """The layout whose heads all have the pattern of these ranges."""
    k_len = seq_len if k_len is None else k_len
    blocks = whole(keys_of(ranges, -(-k_len // block)))
    return from_blocks(seq_len, k_len, block, [0] * heads, [blocks], _no_tiles(block))


def _no_tiles(block: int) -> Tensor:
    return torch.zeros(0, block, block, dtype=torch.bool)


def _clipped(ranges: Callable[[int], Iterable[Ranges]], causal: bool) -> Any:
    """The ranges, cut at the diagonal if ``causal``."""
    if not causal:
        return ranges
    return lambda pattern: map(patterns.up_to_the_diagonal, ranges(pattern))


@with_real_tensors
def _combine(a: Layout, b: Layout, union: bool) -> Layout:
    for name in ("q_len", "k_len", "block"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(
                f"{'union' if union else 'intersection'} of layouts with {name} "
                f"{getattr(a, name)} and {getattr(b, name)}: {a!r} and {b!r}"
            )
    if a.heads != b.heads and 1 not in (a.heads, b.heads):
        raise ValueError(f"layouts with {a.heads} and {b.heads} heads: {a!r} and {b!r}")
    heads = max(a.heads, b.heads)
    pairs = list(
        zip(*(x.head_patterns * (heads if x.heads == 1 else 1) for x in (a, b)), strict=True)
    )
    tiles = torch.cat([a.tiles, b.tiles])
    first, second = a.blocks(), b.blocks()
    second = [Blocks(k, torch.where(m < 0, m, m + len(a.tiles))) for k, m in second]
    made: list[Blocks] = []
    distinct_pairs = list(dict.fromkeys(pairs))
    for p, q in distinct_pairs:
        blocks, tiles = combined(first[p], second[q], tiles, union)
        made.append(blocks)
    numbers = [distinct_pairs.index(pair) for pair in pairs]
    return from_blocks(a.q_len, a.k_len, a.block, numbers, made, tiles)
