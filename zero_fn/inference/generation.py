"""Generation: tokens one after another from a model with a cache."""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from .. import random
from ..mesh import Mesh
from ..models.decoding import Decoder
from ..ranks import spmd
from ..sharding import unshard
from ..slicing import local_slices
from ..tree import PyTree, Tensor
from .sampling import Sampling, draw, sample

Prompt = Tensor | Sequence[int]


def generate(
    decoder: Decoder,
    params: PyTree,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Tensor | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Continue prompts, a token at a time.

    >>> import zero_fn as zf
    >>> from zero_fn.models import gpt, gpt_decoding
    >>> config = gpt.Config()
    >>> params = gpt.init(config)
    >>> tokens = zf.generate(gpt_decoding.decoder(config), params, [1, 2, 3], max_new_tokens=5)
    >>> len(tokens)
    5

    Args:
        decoder: the model, ``gpt_decoding.decoder(config)``.
        params: its parameters, quantised or not; with a mesh this mesh's pieces or slices.
        prompts: the token ids of one prompt, or those of several, of any lengths.
        max_new_tokens: how many tokens at most; None: as many as the model's length allows.
        stop: token ids that end a sequence; they are its last token.
        temperature: 0: the likeliest token each time; else tokens are drawn, from the logits
            divided by it.
        top_k: draw among so many of the likeliest tokens only.
        top_p: draw among the likeliest tokens that have this probability together.
        key: what draws are made from, ``zf.random.key(seed)``. Row r uses ``fold_in(key, r)``.
        mesh: the mesh that ``params`` are cut on.

    Returns:
        The new tokens, a list of ints; for several prompts a list of such lists.

    Raises:
        ValueError: for an empty prompt, tokens outside the vocabulary, a prompt that is longer
            than the model's sequences or leaves no room for the new tokens, settings of sampling
            that mean nothing, or a temperature without a key.
    """
    several = _several(prompts)
    rows: Any = list(prompts) if several else [prompts]
    made: list[list[int]] = [[] for _ in rows]
    for tokens in stream(
        decoder, params, rows, max_new_tokens=max_new_tokens, stop=stop, temperature=temperature,
        top_k=top_k, top_p=top_p, key=key, mesh=mesh,
    ):  # fmt: skip
        for row, token in zip(made, tokens, strict=True):
            if token is not None:
                row.append(token)
    return made if several else made[0]


def stream(
    decoder: Decoder,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Tensor | None = None,
    mesh: Mesh | None = None,
) -> Iterator[list[int | None]]:
    """The same, as it is made: at each step the next token of each row, None once it has ended."""
    rows = [checked_prompt(decoder, prompt, max_new_tokens) for prompt in prompts]
    setting = Sampling(temperature, top_k, top_p)
    setting.check(key)
    return _steps(decoder, params, rows, max_new_tokens, checked_stop(stop), setting, key, mesh)


def checked_prompt(decoder: Decoder, prompt: Prompt, max_new_tokens: int | None) -> list[int]:
    """The token ids of a prompt.

    Raises:
        ValueError: for one that the model cannot continue so far.
        TypeError: for what is no sequence of integers.
    """
    rows = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(rows, Iterable):
        raise TypeError(f"a prompt is a sequence of token ids, and this one is {prompt!r}")
    given = []
    for place, token in enumerate(rows):
        if not _is_id(token):
            raise TypeError(f"a prompt is a sequence of token ids, and token {place} is {token!r}")
        given.append(int(token))
        if not 0 <= token < decoder.vocabulary:
            raise ValueError(
                f"token {place} of the prompt is {token}, and the model's vocabulary has the ids 0 "
                f"to {decoder.vocabulary - 1}"
            )
    if not given:
        raise ValueError("an empty prompt: a model continues one token or more")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it is 1 or more")
    wanted = max_new_tokens or 1
    # The last new token is never read, so it needs no place in the sequence.
    room = decoder.length - len(given) + 1
    if len(given) > decoder.length:
        raise ValueError(
            f"a prompt of {len(given)} tokens is longer than the model's sequences, of "
            f"{decoder.length}; cut it to its last {decoder.length}"
        )
    if wanted > room:
        raise ValueError(
            f"a prompt of {len(given)} tokens and max_new_tokens={wanted} are too long for the "
            f"model's sequences, of {decoder.length}; it can make {room} new tokens"
        )
    return given


def limit_of(decoder: Decoder, prompt: Sequence[int], max_new_tokens: int | None) -> int:
    """How many tokens a prompt gets at most."""
    return min(decoder.length - len(prompt) + 1, max_new_tokens or decoder.length)


def checked_stop(stop: Sequence[int]) -> frozenset[int]:
    """The token ids that end a sequence.

    Raises:
        TypeError: for what is no token id.
    """
    for token in stop:
        if not _is_id(token):
            raise TypeError(f"stop has {token!r}; it is a sequence of token ids")
    return frozenset(map(int, stop))


def _is_id(token: Any) -> bool:
    """Whether a value is an integer, NumPy's too."""
    return isinstance(token, Integral) and not isinstance(token, bool)


def padded(prompts: Sequence[Sequence[int]], device: Any = None) -> tuple[Tensor, Tensor]:
    """Prompts as (tokens (batch, longest), filled up with 0, and lengths (batch))."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor(lengths, device=device)


def _steps(
    decoder: Decoder,
    params: PyTree,
    prompts: list[list[int]],
    max_new_tokens: int | None,
    stop: frozenset[int],
    setting: Sampling,
    key: Tensor | None,
    mesh: Mesh | None,
) -> Iterator[list[int | None]]:
    if not prompts:
        return
    prefill, decode = decoder.prefill, decoder.decode
    if mesh is not None:
        prefill, decode = on_mesh(decoder, mesh)
    tokens, lengths = padded(prompts)
    longest = int(lengths.max())
    limits = [limit_of(decoder, prompt, max_new_tokens) for prompt in prompts]
    room = min(longest + max(limits) - 1, decoder.length)
    keys = None
    if key is not None:
        keys = torch.func.vmap(random.fold_in, (None, 0))(key, torch.arange(len(prompts)))
    settings, alive = [setting] * len(prompts), [True] * len(prompts)
    with torch.no_grad():
        cache, logits = prefill(params, tokens, lengths, room)
        for step in range(max(limits)):
            draws = None
            if keys is not None and setting.temperature:
                draws = draw(keys, torch.full((len(prompts),), step))
            chosen = sample(logits, settings, draws)
            found = chosen.tolist()
            yield [token if on else None for token, on in zip(found, alive, strict=True)]
            alive = [
                on and token not in stop and step + 1 < limit
                for on, token, limit in zip(alive, found, limits, strict=True)
            ]
            if not any(alive):
                return
            # A row that has ended is read on where there is room, and nobody looks.
            full = cache.lengths >= room
            cache = cache._replace(lengths=torch.where(full, room - 1, cache.lengths))
            cache, logits = decode(params, cache, chosen, min(longest + step, room - 1))


def on_mesh(decoder: Decoder, mesh: Mesh) -> tuple[Any, Any]:
    """Prefill and decode on every rank of a mesh, as functions of the same arguments."""

    def prefill(params: PyTree, tokens: Tensor, lengths: Tensor, room: int) -> Any:
        def program(params: PyTree, tokens: Tensor, lengths: Tensor) -> Any:
            return decoder.prefill(local_slices(unshard(params)), tokens, lengths, room)

        return spmd(program, mesh, batch="replicated")(params, tokens, lengths)

    def decode(params: PyTree, cache: Any, tokens: Tensor, longest: int | None) -> Any:
        def program(state: Any, tokens: Tensor) -> Any:
            params, cache = state
            return decoder.decode(local_slices(unshard(params)), cache, tokens, longest)

        return spmd(program, mesh, batch="replicated")((params, cache), tokens)

    return prefill, decode


def _several(prompts: Any) -> bool:
    if isinstance(prompts, str | bytes):
        raise TypeError(
            f"prompts is {prompts!r}; a prompt is token ids, for a model of bytes "
            "list(text.encode())"
        )
    if isinstance(prompts, Tensor):
        return prompts.ndim == 2
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r}; it is the token ids of one prompt, or several")
    first = next(iter(prompts), 0)
    return isinstance(first, Iterable) and not isinstance(first, str)
