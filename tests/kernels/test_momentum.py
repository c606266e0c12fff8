"""Momenta in one bit a value: C and torch against plain formulas, in place and not."""

import math
from typing import Any

import pytest
import torch

from zero_fn.kernels import (
    momentum_native,
    pack_average,
    pack_momentum,
    precondition,
    rest_of_average,
    rest_of_momentum,
    sign_pack,
    sign_unpack,
    unpack_if,
)

BLOCK = 1024
SIZES = (0, 1, 1000, 1024, 1041, 5000)  # with ends inside a vector, and at one
YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.fixture(params=["compiled", "torch", "float64"])
def dtype(request: Any, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(momentum_native, "SHARE", 2048)  # several calls a leaf
    if request.param == "torch":
        monkeypatch.setattr(momentum_native, "takes", lambda *given: False)
    return torch.float64 if request.param == "float64" else torch.float32


def bucket(leaves: list[torch.Tensor], extra: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The leaves padded to blocks, with empty blocks behind them; and their counts."""
    parts, counts = [], []
    for leaf in leaves:
        rest = -leaf.numel() % BLOCK
        parts += [leaf, leaf.new_zeros(rest)]
        blocks = (leaf.numel() + rest) // BLOCK
        counts += [BLOCK] * (blocks - 1) + [BLOCK - rest] * (blocks > 0)
    flat = torch.cat([*parts, leaves[0].new_zeros(extra * BLOCK)])
    return flat, torch.tensor([*counts, *[0] * extra], dtype=torch.int32)


def some(dtype: torch.dtype) -> Any:
    grads = [torch.randn(n, dtype=dtype) for n in SIZES]
    flat, counts = bucket(grads)
    mu, _ = bucket([torch.randn(n, dtype=dtype) for n in SIZES])
    error, _ = bucket([torch.randn(n, dtype=dtype) for n in SIZES])
    return grads, flat, mu, error, counts


@pytest.mark.parametrize("with_mu", [True, False])
def test_a_momentum_is_packed_like_a_bucket_of_it(dtype: torch.dtype, with_mu: bool) -> None:
    grads, flat, mu, error, counts = some(dtype)
    x = 0.9 * mu + (1 - 0.9) * flat if with_mu else flat
    want_bits, want_scales, want_rest = sign_pack(x, error, counts)
    own = mu if with_mu else None
    bits, scales = pack_momentum(grads, own, error, 0.9)
    # a sum that is near zero may have the other sign, by a rounding
    other = (bits ^ want_bits).count_nonzero()
    assert other <= (0 if dtype == torch.float64 else 2)
    torch.testing.assert_close(scales, want_scales)
    rest = rest_of_momentum(grads, own, error, 0.9, want_bits, want_scales, YES)
    torch.testing.assert_close(rest, want_rest, rtol=1e-5, atol=1e-6)
    padding = bucket([torch.ones(n, dtype=dtype) for n in SIZES])[0] == 0
    assert not rest[padding].any()
    before = error.clone()
    assert torch.equal(rest_of_momentum(grads, own, error, 0.9, bits, scales, NO), error)
    torch.ops.zero_fn.rest_of_momentum_(grads, own, error, 0.9, bits, scales, NO)
    assert torch.equal(error, before)
    torch.ops.zero_fn.rest_of_momentum_(grads, own, error, 0.9, want_bits, want_scales, YES)
    assert torch.equal(error, rest)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_average_is_packed_like_the_mean_of_what_was_sent(
    dtype: torch.dtype, ranks: int
) -> None:
    _, _, _, owned, counts = some(dtype)
    codes = [sign_pack(*some(dtype)[1:4:2], counts)[:2] for _ in range(ranks)]
    bits, scales = (torch.stack([code[part] for code in codes]) for part in range(2))
    mean = sign_unpack(bits, scales).mean(0)
    want_bits, want_scales, want_rest = sign_pack(mean, owned, counts)
    own_bits, own_scales = pack_average(bits, scales, owned, counts)
    assert (own_bits ^ want_bits).count_nonzero() <= (0 if dtype == torch.float64 else 2)
    torch.testing.assert_close(own_scales, want_scales)
    given = (bits, scales, owned, counts, want_bits, want_scales)
    rest = rest_of_average(*given, YES)
    torch.testing.assert_close(rest, want_rest, rtol=1e-5, atol=1e-6)
    assert torch.equal(rest_of_average(*given, NO), owned)
    torch.ops.zero_fn.rest_of_average_(*given, YES)
    assert torch.equal(owned, rest)


def test_what_is_not_finite_shows_in_its_scale_alone(dtype: torch.dtype) -> None:
    grads, _, mu, error, counts = some(dtype)
    grads[3][5] = math.nan
    grads[4][1030] = math.inf
    _, scales = pack_momentum(grads, mu, error, 0.9)
    assert (~scales.isfinite()).nonzero().squeeze(1).tolist() == [2, 4]
    strengths = torch.ones(2, len(counts), dtype=dtype)
    strengths[1, 3] = math.inf
    bits = torch.zeros(2, len(error) // 8, dtype=torch.uint8)
    _, own = pack_average(bits, strengths, error, counts)
    assert (~own.isfinite()).nonzero().squeeze(1).tolist() == [3]


def test_unpacking_leaves_the_old_where_that_is_said(dtype: torch.dtype) -> None:
    _, flat, mu, error, counts = some(dtype)
    bits, scales, _ = sign_pack(flat, error, counts)
    want = sign_unpack(bits, scales)
    assert torch.equal(unpack_if(YES, bits, scales, mu), want)
    assert torch.equal(unpack_if(NO, bits, scales, mu), mu)
    torch.ops.zero_fn.unpack_if_(YES, bits, scales, mu)
    assert torch.equal(mu, want)


def test_preconditioning_is_adams_formula(dtype: torch.dtype) -> None:
    params, mu, nu = ([torch.randn(n, dtype=dtype) for n in SIZES] for _ in range(3))
    nu = [x.square() for x in nu]
    nu[4][7] = 0  # no gradient ever came there
    numbers = [torch.tensor(x, dtype=dtype) for x in (0.01, 0.5, 0.3)]
    decays = [0.1, 0.0, 0.2, 0.0, 0.1, 0.1]
    got = precondition(params, mu, nu, *numbers, 1e-8, decays)
    for p, m, v, decay, update in zip(params, mu, nu, decays, got, strict=True):
        p, m, v = p.double(), m.double(), v.double()
        direction = torch.where(v > 0, m / 0.5 / ((v / 0.3).sqrt() + 1e-8), 0)
        want = -0.01 * (direction + decay * p)
        torch.testing.assert_close(update.double(), want, rtol=2e-6, atol=1e-8)  # float32
    moved = [p.clone() for p in params]
    torch.ops.zero_fn.precondition_(moved, mu, nu, *numbers, 1e-8, decays)
    for new, p, update in zip(moved, params, got, strict=True):
        # in one go a product is not rounded before it is added; p and update may cancel
        torch.testing.assert_close(new, p + update, rtol=1e-6, atol=1e-7)


def test_preconditioning_is_differentiated_and_mapped() -> None:
    p, m = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    v, one = torch.rand(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def moved(rate: torch.Tensor) -> torch.Tensor:
        (update,) = precondition([p], [m], [v], rate, one, one, 1e-8, [0.1])
        return update

    slope = torch.func.grad(lambda rate: moved(rate).sum())(one)
    torch.testing.assert_close(slope, moved(one).sum())  # linear in the rate
    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(moved)(rates), rates.unsqueeze(1) * moved(one))


def test_ranks_are_mapped_one_by_one() -> None:
    grads, _, mu, error, _ = some(torch.float32)
    rows = [torch.stack([g, -g]) for g in grads]

    def packed(*leaves: torch.Tensor) -> Any:
        return pack_momentum(list(leaves), mu, error, 0.9)

    bits, scales = torch.func.vmap(packed)(*rows)
    for rank in range(2):
        want = packed(*[x[rank] for x in rows])
        assert torch.equal(bits[rank], want[0])
        assert torch.equal(scales[rank], want[1])
