"""A decoder-only transformer as two pure functions over a dict of tensors.

``init(key, config)`` makes the parameters, ``apply(params, tokens, config)`` the logits, and
``loss(params, (tokens, targets), config)`` the mean cross-entropy: GPT-2's architecture (layer norm
before each block, learned positions, GELU, output head tied to the embedding).
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from zero_fn.kernels import Layout, block_sparse_attention, dense_attention

Params = dict[str, Any]
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
        attention: ``"dense"``: each token sees itself and all before it; or a layout: those of
            them that it holds. A layout is for sequences of exactly its length, for any number of
            heads or for ``heads``.

    Raises:
        ValueError: if the heads do not divide the width, or the layout does not fit.
    """

    vocabulary: int = 256
    length: int = 128
    layers: int = 2
    heads: int = 2
    width: int = 64
    tied: bool = True
    attention: Literal["dense"] | Layout = "dense"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        layout = self.attention
        if isinstance(layout, str):
            if layout != "dense":
                raise ValueError(
                    f"attention={layout!r}; 'dense' or a Layout: Layout.bigbird({self.length}, "
                    "attention='unidirectional'), say"
                )
        elif layout.q_len != layout.k_len or layout.q_len > self.length:
            raise ValueError(
                f"attention={layout!r}; as many keys as queries, and at most length={self.length}"
            )
        elif layout.heads not in (1, self.heads):
            raise ValueError(f"attention={layout!r}; for any heads, or {self.heads}")

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        d, v = self.width, self.vocabulary
        block = 12 * d * d + 13 * d  # 4 matrices with biases, 2 layer norms
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


def init(config: Config, seed: int = 0) -> Params:
    """New parameters, float32: normal with deviation 0.02, as in GPT-2.

    The matrices that write to the residual stream are scaled by 1/sqrt(2 * layers).
    """
    generator = torch.Generator().manual_seed(seed)
    d = config.width

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.02 * scale)

    def norm() -> Params:
        return {"scale": torch.ones(d), "shift": torch.zeros(d)}

    def block() -> Params:
        into_stream = 1 / math.sqrt(2 * config.layers)
        return {
            "norm1": norm(),
            "qkv": {"weight": normal(3 * d, d), "bias": torch.zeros(3 * d)},
            "out": {"weight": normal(d, d, scale=into_stream), "bias": torch.zeros(d)},
            "norm2": norm(),
            "up": {"weight": normal(4 * d, d), "bias": torch.zeros(4 * d)},
            "down": {"weight": normal(d, 4 * d, scale=into_stream), "bias": torch.zeros(d)},
        }

    embedding = normal(config.vocabulary, d)
    return {
        "tokens": embedding,
        "positions": normal(config.length, d),
        "blocks": [block() for _ in range(config.layers)],
        "norm": norm(),
        # The same tensor at two places is tied: zf.shard keeps one piece for both.
        "head": embedding if config.tied else normal(config.vocabulary, d),
    }


def apply(
    params: Params,
    tokens: Int[Tensor, "batch length"],
    config: Config,
    attend: Attend | None = None,
) -> Float[Tensor, "batch length vocabulary"]:
    """The logits of the next token at every place.

    Args:
        params: as ``init`` makes them.
        tokens: token ids.
        config: the sizes.
        attend: what mixes q, k and v, in place of ``config.attention``.

    Raises:
        ValueError: if the sequence is longer than the configuration's, or not its layout's length.
    """
    length = tokens.shape[-1]
    if length > config.length:
        raise ValueError(
            f"a sequence of {length} tokens; the configuration ends at {config.length}"
        )
    if attend is None:
        attend = causal_attention(config.attention)
    x = F.embedding(tokens, params["tokens"]) + params["positions"][:length]
    for block in params["blocks"]:
        x = x + attention(block, layer_norm(x, block["norm1"]), config.heads, attend)
        hidden = F.gelu(linear(layer_norm(x, block["norm2"]), block["up"]), approximate="tanh")
        x = x + linear(hidden, block["down"])
    return F.linear(layer_norm(x, params["norm"]), params["head"])


def loss(
    params: Params,
    batch: tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]],
    config: Config,
    attend: Attend | None = None,
) -> Float[Tensor, ""]:
    """The mean cross-entropy, in nats a token; see :func:`apply`."""
    tokens, targets = batch
    logits = apply(params, tokens, config, attend)
    return F.cross_entropy(
        rearrange(logits, "b l v -> (b l) v"), rearrange(targets, "b l -> (b l)")
    )


def attention(
    block: Params, x: Float[Tensor, "batch length width"], heads: int, attend: Attend
) -> Float[Tensor, "batch length width"]:
    """Self-attention."""
    qkv = rearrange(linear(x, block["qkv"]), "b l (three h d) -> three b h l d", three=3, h=heads)
    mixed = attend(qkv[0], qkv[1], qkv[2])
    return linear(rearrange(mixed, "b h l d -> b l (h d)"), block["out"])


def causal_attention(kind: Literal["dense"] | Layout) -> Attend:
    """What mixes q, k and v, each (batch, heads, length, head size)."""
    if isinstance(kind, str):
        return lambda q, k, v: dense_attention(q, k, v, causal=True)
    return lambda q, k, v: block_sparse_attention(q, k, v, kind, causal=True)


def linear(x: Tensor, weights: Params) -> Tensor:
    """An affine map with weight (out, in)."""
    return F.linear(x, weights["weight"], weights["bias"])


def layer_norm(x: Tensor, weights: Params) -> Tensor:
    """Layer normalisation over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weights["scale"], weights["shift"])
