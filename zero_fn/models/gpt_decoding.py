"""The GPT one token at a time: keys and values of the tokens before are kept, as explicit state.

``prefill`` takes the prompts, ``decode`` one more token of each row. Rows have lengths of their
own. Both give what ``gpt.apply`` gives at the same place.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from zero_fn.collectives import all_gather_invariant, axis_size
from zero_fn.kernels import Layout
from zero_fn.models import gpt
from zero_fn.models.decoding import Cache, Decoder
from zero_fn.models.gpt import Cut, Params
from zero_fn.models.gpt_config import Config
from zero_fn.sliced_layers import vocab_embedding
from zero_fn.slicing import Sliced, SliceRule


def decoder(config: Config, axis: str | None = None) -> Decoder:
    """The GPT as ``zf.generate`` takes it.

    Args:
        config: the sizes. A sparse layout is that of the prompts' attention; later tokens see what
            their row of it says, up to its length.
        axis: the mesh axis that the parameters are cut over, by ``gpt.rules(config)``.

    Raises:
        ValueError: for attention that is a function, of which nobody knows what one query sees.
    """
    if not isinstance(config.attention, str | Layout):
        raise ValueError(
            f"attention={config.attention!r} is a function of whole sequences; to generate, write "
            "it as 'dense' or as a Layout"
        )
    layout = config.attention if isinstance(config.attention, Layout) else None

    def run_prefill(
        params: Params, tokens: Tensor, lengths: Tensor, room: int
    ) -> tuple[Cache, Tensor]:
        return prefill(params, tokens, lengths, room, config, axis)

    def run_decode(
        params: Params, cache: Cache, tokens: Tensor, longest: int | None
    ) -> tuple[Cache, Tensor]:
        return decode(params, cache, tokens, config, axis, longest)

    length = config.length if layout is None else layout.q_len
    return Decoder(run_prefill, run_decode, config.vocabulary, length)


def prefill(
    params: Params,
    tokens: Int[Tensor, "batch length"],
    lengths: Int[Tensor, " batch"],
    room: int,
    config: Config,
    axis: str | None = None,
) -> tuple[Cache, Float[Tensor, "batch vocabulary"]]:
    """Read the prompts: a new cache, and the logits after each row's last token.

    Args:
        params: as ``gpt.init`` makes them, or this rank's slices of them.
        tokens: the prompts, filled up at their ends.
        lengths: the length of each, 1 or more.
        room: how many tokens the cache has room for.
        config: the sizes.
        axis: the mesh axis the parameters are cut over.
    """
    _check(params, config, axis)
    cut, rows = Cut(axis), tokens.shape[0]
    if isinstance(config.attention, Layout):
        tokens = F.pad(tokens, (0, config.attention.q_len - tokens.shape[1]))
    x = gpt.embed(params, tokens, config, cut)
    kept = min(tokens.shape[1], room)
    layers: list[tuple[Tensor, Tensor]] = []
    for block in params["blocks"]:
        q, k, v = gpt.projections(block, gpt.layer_norm(x, block["norm1"], cut), config, cut)
        layers.append((k, v))
        x = x + gpt.output(block, gpt.attend(q, k, v, config), cut)
        x = x + gpt.mlp(block, gpt.layer_norm(x, block["norm2"], cut), cut)
    keys, values = (
        F.pad(torch.stack([x[:, :, :kept] for x in xs]), (0, 0, 0, room - kept))
        for xs in zip(*layers, strict=True)
    )
    last = x[torch.arange(rows, device=x.device), lengths - 1].unsqueeze(1)
    cache = Cache(_placed(keys, axis), _placed(values, axis), lengths)
    return cache, _logits(params, last, config, cut)


def decode(
    params: Params,
    cache: Cache,
    tokens: Int[Tensor, " batch"],
    config: Config,
    axis: str | None = None,
    longest: int | None = None,
) -> tuple[Cache, Float[Tensor, "batch vocabulary"]]:
    """Read one more token of each row: the cache with it, and the logits after it.

    Args:
        params: as for :func:`prefill`.
        cache: written in place, and handed back.
        tokens: the next token of each row.
        config: the sizes.
        axis: the mesh axis the parameters are cut over.
        longest: no row has more tokens than this before; None: as many as there is room for.
    """
    cut = Cut(axis)
    keys, values = _local(cache.keys), _local(cache.values)
    rows, places = torch.arange(len(tokens), device=tokens.device), cache.lengths
    end = cache.room if longest is None else min(longest + 1, cache.room)
    seen = _seen(config, places, end)
    x = vocab_embedding(tokens, params["tokens"], vocabulary=config.vocabulary, axis=axis)
    x = (x + params["positions"][places]).unsqueeze(1)
    for layer, block in enumerate(params["blocks"]):
        q, k, v = gpt.projections(block, gpt.layer_norm(x, block["norm1"], cut), config, cut)
        for held, new in ((keys[layer], k), (values[layer], v)):
            held.transpose(1, 2)[rows, places] = new.squeeze(2)
        mixed = _attend(q, keys[layer][:, :, :end], values[layer][:, :, :end], seen)
        x = x + gpt.output(block, mixed, cut)
        x = x + gpt.mlp(block, gpt.layer_norm(x, block["norm2"], cut), cut)
    return cache._replace(lengths=places + 1), _logits(params, x, config, cut)


def _check(params: Params, config: Config, axis: str | None) -> None:
    """Refuse the parameters of another model, which might run and mean nothing."""
    names = ("tokens", "positions", "blocks", "norm", "head")
    missing = [n for n in names if not isinstance(params, dict) or n not in params]
    if missing:
        raise ValueError(f"params has no {', '.join(missing)}; these are no parameters of a GPT")
    found = [len(params["blocks"]), *params["positions"].shape, params["tokens"].shape[0]]
    ranks = 1 if axis is None else axis_size(axis)
    rows = -(-config.vocabulary // ranks)
    want = [config.layers, config.length, config.width, rows]
    what = ("layers", "length", "width", "rows of tokens")
    wrong = [f"{n} {a}, expected {b}" for n, a, b in zip(what, found, want, strict=True) if a != b]
    qkv = params["blocks"][0]["qkv"]["weight"].shape[0] * ranks if params["blocks"] else None
    if not wrong and qkv != sum(config.qkv):
        wrong = [f"{qkv} outputs of qkv, expected {sum(config.qkv)}"]
    if wrong:
        raise ValueError(f"params are another model's than {config}: {'; '.join(wrong)}")


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One query a head; the query heads that share keys are rows of one product."""
    heads, shared = q.shape[1], k.shape[1]
    grouped = q.squeeze(2).unflatten(1, (shared, heads // shared))
    if seen.shape[1] > 1:
        seen = seen.squeeze(2).unflatten(1, (shared, heads // shared))
    scores = (grouped @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    mixed = scores.softmax(-1) @ v
    # A sparse row may see nothing, and gives 0 as block-sparse attention does.
    mixed = torch.where(seen.any(-1, keepdim=True), mixed, 0)
    return rearrange(mixed, "b shared group d -> b (shared group) 1 d")


def _seen(config: Config, places: Tensor, end: int) -> Bool[Tensor, "batch heads 1 keys"]:
    """Which keys the token at each row's place sees."""
    ids = torch.arange(end, device=places.device)
    before = (ids <= places.unsqueeze(1))[:, None, None]
    layout = config.attention
    if not isinstance(layout, Layout):
        return before
    dense: Tensor = layout.derived("dense mask", layout.to_dense).to(places.device)
    rows = dense[:, places.clamp(max=layout.q_len - 1), :end]  # (heads, batch, keys)
    rows = F.pad(rows, (0, end - rows.shape[-1]))
    return before & rows.transpose(0, 1).unsqueeze(2)


def _logits(params: Params, x: Tensor, config: Config, cut: Cut) -> Tensor:
    own = gpt.logits(params, x, cut).squeeze(1)
    if cut.axis is None:
        return own
    return all_gather_invariant(own, cut.axis, dim=-1)[..., : config.vocabulary]


def _placed(x: Tensor, axis: str | None) -> Tensor | Sliced:
    if axis is None:
        return x
    shape = list(x.shape)
    shape[2] *= axis_size(axis)
    return Sliced(x, tuple(shape), axis, SliceRule(2), axis_size(axis))


def _local(x: Tensor | Sliced) -> Tensor:
    return x.local if isinstance(x, Sliced) else x
