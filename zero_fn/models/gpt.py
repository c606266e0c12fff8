"""A decoder-only transformer as two pure functions over a dict of tensors.

``init(config)`` makes the parameters, ``apply(params, tokens, config)`` the logits, and
``loss(params, (tokens, targets), config)`` the mean cross-entropy: GPT-2's architecture (layer norm
before each block, learned positions, GELU, output head tied to the embedding), with fewer key and
value heads than query heads where asked (grouped-query attention, arXiv 2305.13245).

The same source runs on slices: cut the parameters by ``rules(config)`` and name the mesh axis.
Heads, hidden units and vocabulary are then divided among its ranks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from zero_fn.collectives import axis_size, pscatter, pvary
from zero_fn.kernels import Layout, block_sparse_attention, dense_attention
from zero_fn.models.gpt_config import PRESETS, Attend, Config, preset
from zero_fn.pipelining.partition import partition
from zero_fn.sliced_layers import (
    column_linear,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)
from zero_fn.slicing import Rules, SliceRule

__all__ = [
    "PRESETS",
    "Attend",
    "Config",
    "Cut",
    "Params",
    "apply",
    "attend",
    "attention",
    "cross_entropy",
    "embed",
    "init",
    "logits",
    "loss",
    "output",
    "preset",
    "projections",
    "rules",
    "split_params",
    "stages",
    "transform",
]

Params = dict[str, Any]


class Cut(NamedTuple):
    """How a rank's model is sliced, as the layers of ``sliced_layers.py`` take it.

    Attributes:
        axis: the mesh axis over which the parameters are cut; None: they are whole.
        sequence_dim: the dimension along which the ranks have parts of the sequence between the
            matrices; None: each has all of it.
    """

    axis: str | None = None
    sequence_dim: int | None = None


WHOLE = Cut()


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
            "qkv": {"weight": normal(sum(config.qkv), d), "bias": torch.zeros(sum(config.qkv))},
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


def rules(config: Config, staged: bool = False) -> Rules:
    """How :func:`zero_fn.slice_params` cuts the parameters: heads, hidden units, vocabulary.

    Args:
        config: the sizes.
        staged: whether they are those of stages, as :func:`split_params` gives them.
    """
    vocabulary = SliceRule(0, pad=True)
    whole: Rules = {
        "tokens": vocabulary,
        "head": vocabulary,
        "positions": None,
        "blocks.*.qkv.*": SliceRule(0, sections=config.qkv),
        "blocks.*.out.weight": 1,
        "blocks.*.up.*": 0,
        "blocks.*.down.weight": 1,
        # What writes to the residual stream, and the norms, are whole on every rank.
        "blocks.*.out.bias": None,
        "blocks.*.down.bias": None,
        "blocks.*.norm?.*": None,
        "norm.*": None,
    }
    return {f"[0-9]*.{pattern}": rule for pattern, rule in whole.items()} if staged else whole


def apply(
    params: Params,
    tokens: Int[Tensor, "batch length"],
    config: Config,
    axis: str | None = None,
    sequence_parallel: bool = False,
) -> Float[Tensor, "batch length vocabulary"]:
    """The logits of the next token at every place.

    Args:
        params: as :func:`init` makes them; with ``axis`` this rank's slices of them
            (:func:`zero_fn.local_slices`).
        tokens: token ids.
        config: the sizes.
        axis: the mesh axis that the parameters are cut over; None: they are whole.
        sequence_parallel: whether each rank holds its part of the sequence between the matrices,
            which saves memory (arXiv 2205.05198).

    Returns:
        The logits; with ``axis`` those of this rank's part of the vocabulary, padded.

    Raises:
        ValueError: if the sequence is longer than the configuration's, or if the axis does not
            divide the heads; for ``sequence_parallel`` without an axis, or with one that does not
            divide the sequence.
    """
    cut = cut_over(axis, sequence_parallel)
    x = transform(params["blocks"], embed(params, tokens, config, cut), config, cut)
    return logits(params, x, cut)


def loss(
    params: Params,
    batch: tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]],
    config: Config,
    axis: str | None = None,
    sequence_parallel: bool = False,
) -> Float[Tensor, ""]:
    """The mean cross-entropy, in nats a token. The further arguments are those of :func:`apply`."""
    tokens, targets = batch
    found = apply(params, tokens, config, axis, sequence_parallel)
    return cross_entropy(found, targets, config, cut_over(axis, sequence_parallel))


# The parts of it, which take the cut in one.


def cut_over(axis: str | None, sequence_parallel: bool) -> Cut:
    """The cut that the arguments of :func:`apply` mean.

    Raises:
        ValueError: for ``sequence_parallel`` without an axis.
    """
    if sequence_parallel and axis is None:
        raise ValueError("sequence_parallel cuts the sequence over an axis; name it: axis='tp'")
    return Cut(axis, 1 if sequence_parallel else None)


def embed(
    params: Params, tokens: Int[Tensor, "batch length"], config: Config, cut: Cut = WHOLE
) -> Float[Tensor, "batch length width"]:
    """Token embeddings with their positions: what enters the residual stream."""
    length = tokens.shape[-1]
    if length > config.length:
        raise ValueError(
            f"a sequence of {length} tokens; the configuration ends at {config.length}"
        )
    positions = params["positions"][:length]
    if cut.axis is not None:
        _check_divisible(config, length, cut.axis, cut.sequence_dim is not None)
        if cut.sequence_dim is not None:
            positions = pscatter(positions, cut.axis)
    x = vocab_embedding(tokens, params["tokens"], vocabulary=config.vocabulary, **cut._asdict())
    return x + positions


def transform(
    blocks: Sequence[Params],
    x: Float[Tensor, "batch length width"],
    config: Config,
    cut: Cut = WHOLE,
) -> Float[Tensor, "batch length width"]:
    """The residual stream past some blocks."""
    for block in blocks:
        x = x + attention(block, layer_norm(x, block["norm1"], cut), config, cut)
        x = x + mlp(block, layer_norm(x, block["norm2"], cut), cut)
    return x


def logits(
    params: Params, x: Float[Tensor, "batch length width"], cut: Cut = WHOLE
) -> Float[Tensor, "batch length vocabulary"]:
    """The logits from the residual stream's end, this rank's part of them."""
    return column_linear(layer_norm(x, params["norm"], cut), params["head"], **cut._asdict())


def cross_entropy(
    logits: Float[Tensor, "batch length vocabulary"],
    targets: Int[Tensor, "batch length"],
    config: Config,
    cut: Cut = WHOLE,
) -> Float[Tensor, ""]:
    """The mean over all tokens, in nats."""
    return vocab_cross_entropy(logits, targets, axis=cut.axis, vocabulary=config.vocabulary)


def attention(
    block: Params, x: Float[Tensor, "batch length width"], config: Config, cut: Cut = WHOLE
) -> Float[Tensor, "batch length width"]:
    """Causal self-attention, over this rank's heads."""
    q, k, v = projections(block, x, config, cut)
    return output(block, attend(q, k, v, config), cut)


def projections(
    block: Params, x: Float[Tensor, "batch length width"], config: Config, cut: Cut = WHOLE
) -> tuple[
    Float[Tensor, "batch heads length size"],
    Float[Tensor, "batch kv_heads length size"],
    Float[Tensor, "batch kv_heads length size"],
]:
    """This rank's queries, keys and values."""
    qkv = column_linear(x, block["qkv"]["weight"], block["qkv"]["bias"], **cut._asdict())
    size, group = config.width // config.heads, config.heads // config.groups
    # (batch, length, (heads + 2 kv heads) / ranks, size)
    heads = rearrange(qkv, "b l (h d) -> b h l d", d=size)
    shared = heads.shape[1] // (group + 2)
    q, k, v = heads.split([group * shared, shared, shared], 1)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Tensor:
    """Each query's mean of the values that ``Config.attention`` and the order let it see."""
    group = config.heads // config.groups
    if group > 1:
        k, v = (repeat(x, "b h l d -> b (h group) l d", group=group) for x in (k, v))
    return causal_attention(config.attention)(q, k, v)


def output(
    block: Params, heads: Float[Tensor, "batch heads length size"], cut: Cut = WHOLE
) -> Float[Tensor, "batch length width"]:
    """What the heads write to the residual stream."""
    mixed = rearrange(heads, "b h l d -> b l (h d)")
    return row_linear(mixed, block["out"]["weight"], block["out"]["bias"], **cut._asdict())


def mlp(
    block: Params, x: Float[Tensor, "batch length width"], cut: Cut = WHOLE
) -> Float[Tensor, "batch length width"]:
    """Two affine maps with GELU between them, over this rank's hidden units."""
    hidden = column_linear(x, block["up"]["weight"], block["up"]["bias"], **cut._asdict())
    hidden = F.gelu(hidden, approximate="tanh")
    return row_linear(hidden, block["down"]["weight"], block["down"]["bias"], **cut._asdict())


def causal_attention(kind: Literal["dense"] | Layout | Attend) -> Attend:
    """The function that ``Config.attention`` means."""
    if isinstance(kind, str):
        return lambda q, k, v: dense_attention(q, k, v, causal=True)
    if isinstance(kind, Layout):
        return lambda q, k, v: block_sparse_attention(q, k, v, kind, causal=True)
    return kind


def layer_norm(x: Tensor, weights: Params, cut: Cut = WHOLE) -> Tensor:
    """Layer normalisation over the last dimension."""
    if cut.axis is not None and cut.sequence_dim is not None:  # x varies, the weights do not
        weights = {name: pvary(w, cut.axis) for name, w in weights.items()}
    return F.layer_norm(x, x.shape[-1:], weights["scale"], weights["shift"])


def _check_divisible(config: Config, length: int, axis: str, sequence_parallel: bool) -> None:
    counts = {"heads": config.heads, "kv_heads": config.groups}
    if sequence_parallel:
        counts["the sequence's length"] = length
    for name, count in counts.items():
        if count % axis_size(axis):
            raise ValueError(
                f"{name}={count} is not divisible by the {axis_size(axis)} ranks of {axis!r}, "
                "which divide it among them"
            )


# The same model cut into the stages of a pipeline: ``zf.pipeline(stages(config, n), microbatches)``
# with ``split_params(params, config, n)``.

Stage = Callable[[Params, Any, Any], Any]


def stages(
    config: Config, n: int, axis: str | None = None, sequence_parallel: bool = False
) -> list[Stage]:
    """The model as ``n`` functions (params, carry, micro-batch) to a carry, the last to the loss.

    The further arguments are those of :func:`apply`.

    Raises:
        ValueError: if there are fewer layers than stages; the embedding and the head count; for
            ``sequence_parallel`` without an axis.
    """
    cut = cut_over(axis, sequence_parallel)
    return [
        functools.partial(_stage, config, cut, first=stage == 0, last=stage == n - 1)
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
    config: Config, cut: Cut, params: Params, carry: Any, batch: Any, *, first: bool, last: bool
) -> Tensor:
    tokens, targets = batch
    x = embed(params, tokens, config, cut) if first else carry
    x = transform(params["blocks"], x, config, cut)
    return cross_entropy(logits(params, x, cut), targets, config, cut) if last else x
