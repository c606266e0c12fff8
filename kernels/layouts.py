"""Block-sparse layouts: which blocks of keys each block of queries sees.

A :class:`Layout` is an immutable value in compressed rows (and, on demand, compressed columns):
its size is the number of blocks that are seen, and no array of length × length exists anywhere.
Most blocks are seen in full; one that is not, such as a block on the diagonal of a causal layout,
has a mask in a small table of distinct boolean tiles. Equal layouts are one object, so a layout
can be a static argument, a dictionary's key or a constant of a traced graph.

The builders stand in ``layout_builders.py``, and those that bear the names and parameters of
DeepSpeed's sparsity configurations in ``layout_deepspeed.py``.
"""

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from . import layout_builders as builders
from . import layout_deepspeed as deepspeed
from .layout_blocks import Blocks, arange, cleaned, combined, ended, with_real_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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

    dense = classmethod(builders.dense)
    causal = classmethod(builders.causal)
    fixed = classmethod(deepspeed.fixed)
    variable = classmethod(deepspeed.variable)
    bigbird = classmethod(deepspeed.bigbird)
    bslongformer = classmethod(deepspeed.bslongformer)
    local_sliding_window = classmethod(deepspeed.local_sliding_window)
    dilated = classmethod(builders.dilated)
    strided = classmethod(builders.strided)
    document = classmethod(builders.document)
    from_mask = classmethod(builders.from_mask)

    @classmethod
    def from_blocks(
        cls,
        q_len: int,
        k_len: int,
        block: int,
        head_patterns: Sequence[int],
        patterns: list[Blocks],
        tiles: Tensor,
    ) -> "Layout":
        """The layout of these patterns: what the builders end in.

        Equal patterns are joined, and the table of tiles is cleaned.
        """
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
            return Layout.from_blocks(
                self.q_len, self.k_len, self.block, self.head_patterns, below, tiles
            )

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
    return Layout.from_blocks(a.q_len, a.k_len, a.block, numbers, made, tiles)
