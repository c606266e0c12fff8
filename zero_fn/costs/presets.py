"""Models by name: the sizes that papers and posts give."""

from typing import NamedTuple

from ..models import gpt
from ..naming import suggestion


class Model(NamedTuple):
    """A model that others have trained, or said that they could.

    Attributes:
        config: the sizes.
        source: where they come from.
    """

    config: gpt.Config
    source: str


_WORDS = 50257  # of GPT-2's tokenizer, where a source does not say


MODELS: dict[str, Model] = {
    "demo": Model(gpt.preset("small"), "`zero-fn demo`, bytes of text"),
    "gpt2-124m": Model(gpt.preset("gpt2"), "GPT-2, the least: 12 layers of width 768"),
    "gpt2-1.5b": Model(gpt.preset("gpt2-xl"), "GPT-2, the largest: 48 layers of width 1600"),
    "7.5b": Model(
        gpt.Config(_WORDS, 1024, 38, 32, 4096), "as many as in ZeRO, arXiv 1910.02054, figure 1"
    ),
    "13b": Model(
        gpt.Config(_WORDS, 1024, 65, 32, 4096), "ZeRO-Offload, arXiv 2101.06840, evaluation"
    ),
    "turing-nlg-17b": Model(
        gpt.Config(_WORDS, 1024, 78, 28, 4256), "Turing-NLG, Microsoft Research, February 2020"
    ),
    "100b": Model(
        gpt.Config(_WORDS, 1024, 125, 64, 8192), "ZeRO, arXiv 1910.02054, evaluation: 100B"
    ),
    "1t": Model(
        gpt.Config(_WORDS, 2048, 298, 136, 17408),
        "DeepSpeed's 3D parallelism, Microsoft Research, September 2020",
    ),
    "1t-wide": Model(
        gpt.Config(_WORDS, 1024, 128, 256, 25600), "ZeRO-Infinity, arXiv 2104.07857, table 1: 1T"
    ),
}


def model(name: str) -> Model:
    """A model by name.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; {suggestion(name, MODELS)}")
    return MODELS[name]
