"""The sizes of a GPT, and what its attention is; ``gpt.py`` is the model."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from zero_fn.kernels import Layout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT.

    Attributes:
        vocabulary: number of token ids.
        length: the longest sequence.
        layers: number of blocks.
        heads: attention heads a block; divides ``width``.
        width: size of the residual stream.
        tied: whether the output head is the token embedding.
        kv_heads: heads of keys and values, each shared by as many query heads; divides ``heads``.
            None: one for each query head.
        attention: ``"dense"``: each token sees itself and all before it; or a layout: those of
            them that it holds; or a function of queries, keys and values, each (batch, heads,
            length, head size). A layout is for sequences of exactly its length, for any number of
            heads or for ``heads``.

    Raises:
        ValueError: if the heads do not divide the width, or the key and value heads the heads; if
            the layout does not fit.
    """

    vocabulary: int = 256
    length: int = 128
    layers: int = 2
    heads: int = 2
    width: int = 64
    tied: bool = True
    kv_heads: int | None = None
    attention: Literal["dense"] | Layout | Attend = "dense"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        layout = self.attention
        if isinstance(layout, str) and layout != "dense":
            raise ValueError(
                f"attention={layout!r}; 'dense' or a Layout: Layout.bigbird({self.length}, "
                "attention='unidirectional'), say"
            )
        if not isinstance(layout, Layout):
            return
        if layout.q_len != layout.k_len or layout.q_len > self.length:
            raise ValueError(
                f"attention={layout!r}; as many keys as queries, and at most length={self.length}"
            )
        if layout.heads not in (1, self.heads):
            raise ValueError(f"attention={layout!r}; for any heads, or {self.heads}")

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def qkv(self) -> tuple[int, int, int]:
        """The sizes of queries, keys and values, which one matrix makes together."""
        shared = self.width // self.heads * self.groups
        return self.width, shared, shared

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        d, v = self.width, self.vocabulary
        block = (d + 1) * sum(self.qkv) + 9 * d * d + 10 * d  # 4 affine maps, 2 layer norms
        return v * d * (1 if self.tied else 2) + self.length * d + self.layers * block + 2 * d


PRESETS: dict[str, Config] = {
    "tiny": Config(),
    "small": Config(length=128, layers=4, heads=4, width=256),
    "medium": Config(length=256, layers=6, heads=6, width=384),
    "gpt2": Config(50257, 1024, 12, 12, 768),
    "gpt2-medium": Config(50257, 1024, 24, 16, 1024),
    "gpt2-large": Config(50257, 1024, 36, 20, 1280),
    "gpt2-xl": Config(50257, 1024, 48, 25, 1600),
}


def preset(name: str, **changes: Any) -> Config:
    """A configuration by name, with fields changed.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)
