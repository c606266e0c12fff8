"""The Triton attention, interpreted, against dense attention in float64: results and gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import Case, cases, inputs, oracle
from zero_fn.kernels import Layout, attention_launch, block_sparse_attention, sparse_attention
from zero_fn.kernels.attention_tiles import Tile, Which, best, tiles_for

# numpy, which the interpreter computes with, warns of each infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    name: case if case.bias else case._replace(batch=1, heads=min(case.heads, 4))
    for name, case in cases().items()
}
CASES["bias of keys"] = CASES["bias of keys"]._replace(heads=2, kv_heads=1)
CASES["bias of heads"] = CASES["bias of heads"]._replace(batch=1)


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors go where CUDA tensors would, in tiles so small that layouts need several.

    New memory is NaN, so that what a kernel leaves out, or reads before it is written, shows.
    """
    monkeypatch.setattr(sparse_attention, "_triton_takes", sparse_attention._fits_triton)
    monkeypatch.setattr(attention_launch, "tiles_for", lambda *_: [Tile(32, 16, 4, 1)])
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def both(
    f: Callable[..., Sequence[Tensor]], qkv: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """Results, and the gradients of q, k and v where the results have the given ones."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    outs = f(*leaves)
    return *[x.detach() for x in outs], *torch.autograd.grad(outs, leaves, grads)


def check(
    case: Case,
    dtype: torch.dtype = F32,
    *,
    scale: float | None = None,
    with_log_sum: bool = False,
    larger: float = 1.0,
    eps: float | None = None,
) -> None:
    """Results and gradients of a case, with queries ``larger`` than usual."""
    qkv, bias = inputs(case, dtype)
    qkv[0] = qkv[0] * larger
    scale = case.size**-0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(1)
    shape = qkv[0].shape
    grads = [torch.randn(shape, generator=generator).to(dtype)]
    if with_log_sum:
        grads.append(torch.randn(shape[:3], generator=generator))

    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        out = block_sparse_attention(
            *x, case.layout, causal=case.causal, scale=scale, bias=bias, return_lse=with_log_sum
        )
        return out if with_log_sum else (out,)

    def formula(*x: Tensor) -> tuple[Tensor, ...]:
        out, log_sum = oracle(case, list(x), bias, scale)
        return (out, log_sum) if with_log_sum else (out,)

    wide = [[x.double() for x in xs] for xs in (qkv, grads)]
    got, want = both(ours, qkv, grads), both(formula, *wide)
    # Of float32, exponentials and sums of up to 100 products; of the halves, roundings of weights
    # and result (gradients: of the result and of dS too); relative to the size of the largest.
    eps = eps or (1e-5 if dtype == F32 else torch.finfo(dtype).eps)
    for place, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.dtype == (F32 if with_log_sum and place == 1 else dtype)
        size = torch.where(y.isfinite(), y, 0).abs().max().clamp(min=1).item()
        torch.testing.assert_close(x.double(), y, rtol=eps, atol=eps * size)


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str) -> None:
    check(CASES[name])


HALVES = ["causal", "holes", "document", "bias of heads"]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("name", ["causal", "bias of heads"])
def test_log_sum_and_its_gradient(name: str) -> None:
    check(CASES[name], scale=0.3, with_log_sum=True)


def test_nothing_seen() -> None:
    case = CASES["holes"]
    qkv, _ = inputs(case, F32)
    out, log_sum = block_sparse_attention(*qkv, case.layout, return_lse=True)
    assert (out[:, :, 16:32] == 0).all()
    assert (log_sum[:, :, 16:32] == -math.inf).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale(scale: float) -> None:
    check(CASES["causal"], scale=scale)


def test_scores_whose_exponentials_overflow() -> None:
    # Scores of up to 2000 are rounded to 1e-4, and so much their exponentials differ by.
    check(CASES["causal"], larger=300.0, eps=1e-4)


# One that is a power of two, odd ones, and the largest, in the tiles that are launched.
@pytest.mark.parametrize(
    ("size", "dtype"), [(1, F32), (16, F16), (40, F32), (80, BF16), (128, F32), (256, F16)], ids=str
)
def test_head_sizes_in_their_own_tiles(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_launch, "tiles_for", tiles_for)
    layout = Layout.bigbird(150, block=32, seed=1)
    check(Case(layout, 1, 1, size, causal=True, batch=1), dtype)


@pytest.mark.parametrize("tile", [(16, 16), (64, 32), (16, 128), (256, 16)], ids=str)
@pytest.mark.parametrize("block", [16, 64])
def test_tiles_are_independent_of_blocks(
    tile: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_launch, "tiles_for", lambda *_: [Tile(*tile, 4, 1)])
    layout = Layout.document([30, 70, 1], block=block) & Layout.causal(101, block=block)
    check(Case(layout, 2, 1, 16, batch=1))


def _surrounded(x: Tensor) -> Tensor:
    """The same values with the length before the heads, and NaN in memory all around."""
    a, b, c, d = x.shape
    spread = x.new_full((a, c + 3, b + 1, d + 2), math.nan)
    inside = spread[:, 1 : c + 1, 1:, 1 : d + 1].transpose(1, 2)
    inside.copy_(x)
    return inside


@pytest.mark.parametrize("name", ["grouped", "bias of heads", "one query"])
def test_any_memory_layout(name: str) -> None:
    case = CASES[name]
    qkv, bias = inputs(case, F32)
    grad = torch.randn_like(qkv[0])
    found = []
    for arranged in (lambda x: x, _surrounded):
        q, k, v = map(arranged, qkv)
        own = None if bias is None else arranged(bias)
        out = attention_launch.forward(q, k, v, own, case.layout, 0.3)
        grads = attention_launch.backward(
            arranged(grad), None, q, k, v, own, *out, case.layout, 0.3
        )
        found.append((*out, *grads))
    for x, y in zip(*found, strict=True):
        assert x.isnan().sum() == 0
        assert torch.equal(x, y)


@pytest.mark.parametrize("capability", [0, 80, 90, 100, 120])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_each_size_has_tiles(dtype: torch.dtype, capability: int) -> None:
    for which in get_args(Which):
        for size in range(1, 257):
            for biased in (False, True):
                for tile in tiles_for(which, dtype, size, capability, biased):
                    assert min(tile.rows, tile.columns) >= 16


def test_small_blocks_have_small_tiles() -> None:
    usual, small = tiles_for("forward", BF16, 64, 90, False)
    assert usual.rows * usual.columns > small.rows * small.columns
    for block, want in ((16, small), (128, usual)):
        layout = Layout.bigbird(4096, block=block, num_random_blocks=3)
        assert best([usual, small], layout, False) == want
