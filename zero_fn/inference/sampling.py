"""Choosing the next token from logits: greedy, by temperature, among the top k, or the top p.

The draw is a pure function of a key: the same key, logits and settings give the same token, in
whatever batch the row stands.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int

from .. import random
from ..tree import Tensor

NOT_FINITE = (
    "the model gave logits that are not finite, so no token can be chosen: look for NaN in the "
    "parameters"
)


class Sampling(NamedTuple):
    """How a token is chosen.

    Attributes:
        temperature: what the logits are divided by; 0: the likeliest token, always.
        top_k: only so many of the likeliest tokens take part; None: all.
        top_p: only the likeliest tokens take part that together have at least this probability
            (nucleus sampling, arXiv 1904.09751); None: all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            ValueError: naming the setting.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it is 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it is 1 or more, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is above 0 and at most 1, or None")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} choose among tokens, and temperature=0 "
                "takes the likeliest; give a temperature, 1.0 say"
            )


def sample(
    logits: Float[Tensor, "batch vocabulary"],
    settings: list[Sampling],
    draws: Float[Tensor, " batch"] | None = None,
) -> Int[Tensor, " batch"]:
    """The next token of each row.

    Args:
        logits: what the model says.
        settings: how each row's token is chosen.
        draws: a number from [0, 1) for each row, :func:`draw`; None where all are greedy.

    Raises:
        ValueError: for logits that are not finite, or without draws where one is needed.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError(NOT_FINITE)
    greedy = logits.argmax(-1)
    rows = [row for row, setting in enumerate(settings) if setting.temperature > 0]
    if not rows:
        return greedy
    if draws is None:
        raise ValueError("a temperature above 0 draws random numbers: pass key=zf.random.key(0)")
    chosen = torch.tensor(rows, device=logits.device)
    warm = [settings[row] for row in rows]
    count = logits.shape[-1]

    def each(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    scaled = logits[chosen].double() / each([s.temperature for s in warm])
    ranked, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(count, device=logits.device)
    kept = place < each([count if s.top_k is None else s.top_k for s in warm])
    chance = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    before = chance.cumsum(-1) - chance
    kept &= before < each([2.0 if s.top_p is None else s.top_p for s in warm])
    total = torch.where(kept, chance, 0).cumsum(-1)
    point = draws[chosen].double().unsqueeze(1) * total[:, -1:]
    # The last that may be chosen, where rounding puts the point at the total.
    index = (total <= point).sum(-1, keepdim=True).clamp(max=count - 1)
    index = torch.minimum(index, kept.sum(-1, keepdim=True) - 1)
    return greedy.index_put((chosen,), tokens.gather(-1, index).squeeze(-1))


def draw(keys: Int[Tensor, "batch 2"], steps: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """A number from [0, 1) for each row's key and the number of its token."""
    folded = torch.func.vmap(random.fold_in)(keys, steps)
    drawn: Tensor = torch.func.vmap(lambda key: random.uniform(key, (), torch.float64))(folded)
    return drawn
