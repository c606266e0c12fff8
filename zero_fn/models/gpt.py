"""A decoder-only transformer as two pure functions over a dict of tensors.

``init(key, config)`` makes the parameters, ``apply(params, tokens, config)`` the logits, and
``loss(params, (tokens, targets), config)`` the mean cross-entropy: GPT-2's architecture (layer norm
before each block, learned positions, GELU, output head tied to the embedding).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from zero_fn.kernels import dense_attention
from zero_fn.pipelining.partition import partition

Params = dict[str, Any]


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

    Raises:
        ValueError: if the heads do not divide the width.
    """

    vocabulary: int = 256
    length: int = 128
    layers: int = 2
    heads: int = 2
    width: int = 64
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")

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
    params: Params, tokens: Int[Tensor, "batch length"], config: Config
) -> Float[Tensor, "batch length vocabulary"]:
    """The logits of the next token at every place.

    Raises:
        ValueError: if the sequence is longer than the configuration's.
    """
    return logits(params, transform(params["blocks"], embed(params, tokens, config), config))


def loss(
    params: Params,
    batch: tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]],
    config: Config,
) -> Float[Tensor, ""]:
    """The mean cross-entropy, in nats a token."""
    tokens, targets = batch
    return cross_entropy(apply(params, tokens, config), targets)


def embed(
    params: Params, tokens: Int[Tensor, "batch length"], config: Config
) -> Float[Tensor, "batch length width"]:
    """Token embeddings with their positions: what enters the residual stream."""
    length = tokens.shape[-1]
    if length > config.length:
        raise ValueError(
            f"a sequence of {length} tokens; the configuration ends at {config.length}"
        )
    return F.embedding(tokens, params["tokens"]) + params["positions"][:length]


def transform(
    blocks: Sequence[Params], x: Float[Tensor, "batch length width"], config: Config
) -> Float[Tensor, "batch length width"]:
    """The residual stream past some blocks."""
    for block in blocks:
        x = x + attention(block, layer_norm(x, block["norm1"]), config.heads)
        hidden = F.gelu(linear(layer_norm(x, block["norm2"]), block["up"]), approximate="tanh")
        x = x + linear(hidden, block["down"])
    return x


def logits(
    params: Params, x: Float[Tensor, "batch length width"]
) -> Float[Tensor, "batch length vocabulary"]:
    """The logits from the residual stream's end."""
    return F.linear(layer_norm(x, params["norm"]), params["head"])


def cross_entropy(
    logits: Float[Tensor, "batch length vocabulary"], targets: Int[Tensor, "batch length"]
) -> Float[Tensor, ""]:
    """The mean over all tokens, in nats."""
    return F.cross_entropy(
        rearrange(logits, "b l v -> (b l) v"), rearrange(targets, "b l -> (b l)")
    )


def attention(
    block: Params, x: Float[Tensor, "batch length width"], heads: int
) -> Float[Tensor, "batch length width"]:
    """Causal self-attention."""
    qkv = rearrange(linear(x, block["qkv"]), "b l (three h d) -> three b h l d", three=3, h=heads)
    mixed = dense_attention(qkv[0], qkv[1], qkv[2], causal=True)
    return linear(rearrange(mixed, "b h l d -> b l (h d)"), block["out"])


def linear(x: Tensor, weights: Params) -> Tensor:
    """An affine map with weight (out, in)."""
    return F.linear(x, weights["weight"], weights["bias"])


def layer_norm(x: Tensor, weights: Params) -> Tensor:
    """Layer normalisation over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weights["scale"], weights["shift"])


# The same model cut into the stages of a pipeline: ``zf.pipeline(stages(config, n), microbatches)``
# with ``split_params(params, config, n)``.

Stage = Callable[[Params, Any, Any], Any]


def stages(config: Config, n: int) -> list[Stage]:
    """The model as ``n`` functions (params, carry, micro-batch) to a carry, the last to the loss.

    Raises:
        ValueError: if there are fewer layers than stages; the embedding and the head count.
    """
    return [
        functools.partial(_stage, config, first=stage == 0, last=stage == n - 1)
        for stage in range(len(_layers(config, n)))
    ]


def split_params(params: Params, config: Config, n: int) -> tuple[Params, ...]:
    """The parameters of each of the :func:`stages`; the tensors are the same, ties too."""
    cut = []
    for stage, layers in enumerate(_layers(config, n)):
        inner = range(max(layers.start, 1), min(layers.stop, config.layers + 1))
        part: Params = {"blocks": [params["blocks"][layer - 1] for layer in inner]}
        if stage == 0:
            part |= {name: params[name] for name in ("tokens", "positions")}
        if stage == n - 1:
            part |= {name: params[name] for name in ("norm", "head")}
        cut.append(part)
    return tuple(cut)


def _layers(config: Config, n: int) -> tuple[range, ...]:
    """The layers of each stage: the embedding, the blocks, the head, balanced by arithmetic."""
    if config.layers + 2 < n:
        raise ValueError(
            f"{config.layers} blocks, the embedding and the head are {config.layers + 2} layers, "
            f"and cannot be cut into {n} stages"
        )
    block = 12 * config.width + config.length  # multiplications a token and channel
    return partition([0, *[block] * config.layers, config.vocabulary], n)


def _stage(
    config: Config, params: Params, carry: Any, batch: Any, *, first: bool, last: bool
) -> Tensor:
    tokens, targets = batch
    x = embed(params, tokens, config) if first else carry
    x = transform(params["blocks"], x, config)
    return cross_entropy(logits(params, x), targets) if last else x
