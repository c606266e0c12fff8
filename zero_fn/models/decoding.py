"""What a model is to generation: a function that reads prompts, one that reads one more token.

``gpt_decoding.decoder(config)`` makes it for the GPT; a model of your own does the same. Nothing
here loads a model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor


class Cache(NamedTuple):
    """What a model keeps of the tokens it has seen; a pytree.

    Attributes:
        keys: (layers, batch, kv heads, room, head size); with an axis a :class:`zero_fn.Sliced`,
            this rank's heads.
        values: the same.
        lengths: (batch), how many tokens of each row are in it.
    """

    keys: Any
    values: Any
    lengths: Int[Tensor, " batch"]

    @property
    def room(self) -> int:
        """How many tokens a row has room for."""
        return self.keys.shape[-2]


class Decoder(NamedTuple):
    """A model that generates: what ``zf.generate`` and the batchers take.

    Attributes:
        prefill: (params, tokens (batch, length), lengths (batch), room) to (cache, logits (batch,
            vocabulary) at each row's last token). Tokens past a row's length are any.
        decode: (params, cache, tokens (batch), longest) to the same, of one more token. The cache
            is written in place and handed back. ``longest``: a bound of the lengths, or None.
        vocabulary: the number of token ids.
        length: the longest sequence.
    """

    prefill: Callable[[Any, Tensor, Tensor, int], tuple[Any, Tensor]]
    decode: Callable[[Any, Any, Tensor, int | None], tuple[Any, Tensor]]
    vocabulary: int
    length: int
