"""Random numbers as functions of a key: their spread, and the same ones wherever they are drawn."""

import math
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import zero_fn as zf
from zero_fn import random

from .processes import run_on_processes

KEY = random.key(17)


def test_a_key_is_its_seed() -> None:
    assert random.key(5).tolist() == [5, 0]
    assert random.key(2**40 + 3).tolist() == [3, 2**8]
    assert random.key(-1).tolist() == random.key(2**64 - 1).tolist()


def test_keys_that_are_split_or_folded_differ() -> None:
    made = [KEY, *random.split(KEY, 1000), *(random.fold_in(KEY, i) for i in range(-500, 500))]
    made += [random.fold_in(KEY, 2**32 + i) for i in range(100)]  # the upper word counts too
    assert len({tuple(key.tolist()) for key in made}) == len(made)
    # and what is drawn from a key has nothing to do with the keys made from it
    drawn = set(random.bits(KEY, (4000,)).tolist())
    assert not drawn & {word for key in made[1:] for word in key.tolist()}


def test_fold_in_takes_numbers_and_tensors() -> None:
    for number in (0, 7, -7, 2**40):
        for dtype in (torch.int64, *([torch.int32] if abs(number) < 2**31 else [])):
            folded = random.fold_in(KEY, torch.tensor(number, dtype=dtype))
            assert torch.equal(folded, random.fold_in(KEY, number))


def test_more_numbers_begin_with_the_same() -> None:
    assert torch.equal(random.bits(KEY, (7,)), random.bits(KEY, (3, 5)).view(-1)[:7])
    assert random.bits(KEY).shape == ()
    assert random.bits(KEY, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform(dtype: torch.dtype) -> None:
    n = 1 << 16
    x = random.uniform(KEY, (n,), dtype).double()
    assert x.min() >= 0
    assert x.max() < 1
    # Kolmogorov and Smirnov's distance, at 1e-6: sqrt(ln(2e6) / 2n); 16 bits have coarse steps
    step = torch.finfo(dtype).eps / 2
    ordered, grid = x.sort().values, torch.arange(n) / n
    assert (ordered - grid).abs().max() < math.sqrt(math.log(2e6) / (2 * n)) + step + 1 / n
    assert torch.equal((x / step).round() * step, x)
    y = random.uniform(KEY, (n,), dtype, -2, 4)
    assert -2 <= y.min() <= -1.9
    assert 3.9 <= y.max() <= 4
    assert y.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_normal(dtype: torch.dtype) -> None:
    n = 1 << 16
    x = random.normal(KEY, (n // 2, 2), dtype).double()
    assert x.isfinite().all()
    error = 5 / math.sqrt(n)  # five standard errors of each moment, times its deviation
    coarse = torch.finfo(dtype).eps
    assert abs(x.mean()) < error + coarse
    assert abs(x.square().mean() - 1) < error * math.sqrt(2) + coarse
    assert abs(x.pow(3).mean()) < error * math.sqrt(15) + coarse
    assert abs(x.pow(4).mean() - 3) < error * math.sqrt(96) + 4 * coarse
    assert abs((x[:, 0] * x[:, 1]).mean()) < error * math.sqrt(2) + coarse


def test_bernoulli() -> None:
    n = 1 << 16
    assert not random.bernoulli(KEY, 0.0, (n,)).any()
    assert random.bernoulli(KEY, 1.0, (n,)).all()
    p = torch.tensor([[0.1], [0.7]])
    share = random.bernoulli(KEY, p, (2, n)).double().mean(1)
    torch.testing.assert_close(share, p[:, 0].double(), rtol=0, atol=5 * math.sqrt(0.25 / n))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout(dtype: torch.dtype) -> None:
    x = random.normal(random.key(1), (300, 200), dtype) + 5
    y = random.dropout(x, 0.3, KEY)
    kept = y != 0
    assert y.dtype == dtype
    assert torch.equal(y[kept], (x / 0.7)[kept])
    assert abs(kept.double().mean() - 0.7) < 5 * math.sqrt(0.21 / x.numel())
    assert random.dropout(x, 0.0, KEY) is x
    # the mask is that of the shape, whatever the values
    assert torch.equal(kept, random.dropout(torch.ones_like(x), 0.3, KEY) != 0)


def test_nothing_global_is_read_or_changed() -> None:
    before, seen = torch.get_rng_state(), random.normal(KEY, (5,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(random.normal(KEY, (5,)), seen)


def noisy(w: torch.Tensor, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    first, second = random.split(key)
    h = random.dropout(torch.tanh(x @ w), 0.4, first)
    return (h + random.normal(second, h.shape, h.dtype)).square().mean()


W = random.normal(random.key(2), (7, 5), torch.float64)
X = random.normal(random.key(3), (6, 7), torch.float64)


def test_in_transforms() -> None:
    """Derivatives of first and second order, maps, traces and compiled steps draw the same."""
    w = W.clone().requires_grad_()
    (want,) = torch.autograd.grad(noisy(w, X, KEY), w)
    close = torch.testing.assert_close
    close(zf.grad(noisy)(W, X, KEY), want)
    close(torch.func.grad(noisy)(W, X, KEY), want)
    keys = random.split(KEY, 3)
    mapped = torch.func.vmap(zf.grad(noisy), (None, None, 0))(W, X, keys)
    close(mapped, torch.stack([zf.grad(noisy)(W, X, key) for key in keys]))
    assert len({float(row[0, 0]) for row in mapped}) == 3
    assert torch.autograd.gradcheck(lambda w: noisy(w, X, KEY), (w,))
    assert torch.autograd.gradgradcheck(lambda w: noisy(w, X, KEY), (w,))
    traced = make_fx(zf.grad(noisy), tracing_mode="fake")(W, X, KEY)
    assert torch.equal(traced(W, X, KEY), zf.grad(noisy)(W, X, KEY))
    assert not torch.equal(traced(W, X, keys[0]), want)  # the key is an input, not a constant


def test_under_torch_compile() -> None:
    for f in (noisy, torch.func.vmap(noisy, (None, None, 0))):
        key = KEY if f is noisy else random.split(KEY, 3)
        compiled = torch.compile(
            torch.func.grad(noisy) if f is noisy else f, fullgraph=True, backend="aot_eager"
        )
        want = torch.func.grad(noisy)(W, X, key) if f is noisy else f(W, X, key)
        torch.testing.assert_close(compiled(W, X, key), want)


def test_recomputation_draws_the_same() -> None:
    def layer(w: torch.Tensor, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return random.dropout(torch.tanh(x @ w), 0.5, key)

    def loss(wrap: Any) -> Any:
        return lambda w: wrap(layer)(w, X, KEY).square().mean()

    for differentiated in (zf.grad, torch.func.grad):
        plain, again = differentiated(loss(lambda f: f)), differentiated(loss(zf.remat))
        assert torch.equal(plain(W), again(W))


def masks(sizes: dict[str, int], folded: tuple[str, ...]) -> Any:
    """Each rank's mask, (dp, tp, rows, width), and the gradient through it."""
    mesh = zf.Mesh(**sizes)
    ranks = tuple(sizes)

    def program(w: torch.Tensor, key: torch.Tensor) -> Any:
        for name in folded:
            key = random.fold_in(key, zf.axis_index(name))

        def loss(w: torch.Tensor) -> torch.Tensor:
            out = random.dropout(zf.pvary(w, ranks), 0.5, key)
            return zf.psum((out * out).sum(), ranks)

        own = random.dropout(zf.pvary(torch.ones_like(w), ranks), 0.5, key)
        for name in reversed(ranks):
            own = zf.all_gather_invariant(own[None], name)
        return own, zf.grad(loss)(w)

    return zf.jit(zf.spmd(program, mesh, batch="replicated"))(W, KEY)


@pytest.mark.parametrize("folded", [(), ("dp",), ("dp", "tp")])
def test_ranks_differ_where_their_place_is_folded_in(folded: tuple[str, ...]) -> None:
    sizes = {"dp": 2, "tp": 2}
    got, gradient = masks(sizes, folded)
    flat = got.reshape(4, -1)
    different = {tuple(row.tolist()) for row in flat}
    assert len(different) == 2 ** len(folded)
    assert torch.equal(got[:, 0], got[:, 1]) == ("tp" not in folded)
    torch.testing.assert_close(gradient, (flat.square().sum(0) * 2).view_as(W) * W)
    for rank in run_on_processes(4, masks, sizes, folded):
        assert torch.equal(rank[0], got)
        torch.testing.assert_close(rank[1], gradient)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: random.key(0.5), TypeError, "seed is 0.5; a key is made from an int"),
        (lambda: random.key(2**64), ValueError, "seed is 18446744073709551616, which needs more"),
        (lambda: random.split(KEY, 0), ValueError, "count is 0; it must be an int of 1 or more"),
        (lambda: random.fold_in(KEY, 1.5), TypeError, "takes an integer, and data is 1.5"),
        (lambda: random.fold_in(KEY, 2**63), ValueError, "data is 9223372036854775808, which is"),
        (lambda: random.fold_in(KEY, torch.ones(())), TypeError, "data is of dtype torch.float32"),
        (lambda: random.fold_in(KEY, torch.arange(3)), ValueError, r"data has shape \(3,\)"),
        (lambda: random.uniform(3, (2,)), TypeError, r"takes a key, zf.random.key\(0\), and got 3"),
        (lambda: random.bits(random.split(KEY)), TypeError, r"of shape \(2, 2\); zf.random.key"),
        (lambda: random.bits(KEY, 3), TypeError, r"shape is 3; it is a tuple, \(3,\)"),
        (lambda: random.uniform(KEY, (), torch.int32), TypeError, "uniform in torch.int32; it tak"),
        (lambda: random.uniform(KEY, (), low=2), ValueError, "uniform from 2 to 1.0"),
        (lambda: random.bernoulli(KEY, 1.5), ValueError, "p is 1.5; a probability is from 0 to 1"),
        (lambda: random.dropout(X, 1.0, KEY), ValueError, "rate is 1.0; dropout takes 0 <= rate"),
        (lambda: random.dropout(X, 0.1, 3), TypeError, "dropout takes a key"),
    ],
)
def test_errors(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
