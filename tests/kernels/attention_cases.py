"""Block-sparse attention's cases, for every implementation: shapes, layouts, and the oracle."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.kernels import Layout
from zero_fn.kernels.reference import attention_formula


class Case(NamedTuple):
    layout: Layout
    heads: int = 2
    kv_heads: int = 2
    size: int = 8
    causal: bool = False
    bias: tuple[int, int, int, int] | None = None  # its shape
    batch: int = 2


def random_mask(rows: int, columns: int, density: float, *heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.rand(*heads, rows, columns, generator=generator) < density


def cases() -> dict[str, Case]:
    holes = random_mask(3, 3, 0.6)
    holes[1] = False  # a row of queries that see nothing
    holes[:, 2] = False  # keys that nobody sees
    own = random_mask(3, 3, 0.5, 4)
    return {
        "dense": Case(Layout.dense(40, block=16)),
        "causal": Case(Layout.causal(45, block=16)),
        "causal rule": Case(Layout.fixed(45, attention="unidirectional"), causal=True, size=16),
        "document": Case(Layout.document([20, 1, 0, 19, 7], block=16), size=5),
        "document, causal": Case(Layout.document([20, 1, 0, 19, 7], block=32), causal=True),
        "bigbird": Case(Layout.bigbird(100, block=16), size=16),
        "holes": Case(Layout.from_mask(holes, 16)),
        "nothing": Case(Layout.from_mask(torch.zeros(2, 2, dtype=torch.bool), 16)),
        "more keys": Case(Layout.dense(20, block=16, k_len=50)),
        "fewer keys": Case(Layout.dense(50, block=16, k_len=20), causal=True),
        "one query": Case(Layout.dense(1, block=64, k_len=33), size=1),
        "one of each": Case(Layout.dense(1, block=128), heads=1, kv_heads=1, batch=1),
        "grouped": Case(Layout.causal(40, block=16), heads=6, kv_heads=2),
        "own patterns": Case(Layout.from_mask(own, 16, seq_len=44, k_len=35), heads=4, kv_heads=4),
        "own patterns, grouped": Case(Layout.from_mask(own, 16), heads=4, kv_heads=2),
        "bias": Case(Layout.causal(40, block=16), bias=(2, 2, 40, 40)),
        "bias of keys": Case(Layout.bigbird(75), heads=4, kv_heads=2, bias=(2, 1, 1, 75)),
        "bias of heads": Case(
            Layout.from_mask(own, 16), heads=4, kv_heads=2, bias=(1, 4, 48, 48), causal=True
        ),
    }


def inputs(
    case: Case, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, and the bias or None; of the bias the first key and one more are hidden."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    layout = case.layout
    q = random(case.batch, case.heads, layout.q_len, case.size)
    k, v = (random(case.batch, case.kv_heads, layout.k_len, case.size) for _ in range(2))
    bias = None
    if case.bias:
        bias = random(*case.bias)
        bias[..., ::7] = -math.inf
    return [q, k, v], bias


def oracle(
    case: Case, qkv: list[Tensor], bias: Tensor | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The result and log-sum of the formula, in float64."""
    seen = case.layout.to_dense()
    if case.causal:
        seen = seen.tril()
    wide = [x.double() for x in qkv]
    scale = 1 / math.sqrt(case.size) if scale is None else scale
    return attention_formula(*wide, seen, scale, None if bias is None else bias.double())
