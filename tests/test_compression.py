"""Compressed means: the algebra of feedback, every method, every interpreter, what goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import feedback, tree
from zero_fn.codecs import METHODS
from zero_fn.feedback import Bucket

from .processes import run_on_processes

# A matrix of more than a block, and leaves of a few values, none, and one; by name, as in trees.
SHAPES = {"cube": (7, 9, 11), "empty": (0, 3), "matrix": (70, 33), "scalar": (), "vector": (5,)}
METHODS_AND_SETTINGS = [*METHODS, zf.TopK(0.3), zf.PowerSGD(2), zf.Int8(64)]
methods = pytest.mark.parametrize("method", METHODS_AND_SETTINGS, ids=str)


def gradients(ranks: int, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(ranks, *shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


def run(ranks: int, method: Any, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    """Each step's mean, and what is left over at the end, as leaves."""
    mesh = zf.Mesh(dp=ranks)
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    error = zf.spmd(lambda p: zf.compression_state(p, method), mesh)(params)

    def step(error: Any, grads: Any) -> Any:
        own = tree.map(lambda g: g[0], grads)
        mean, error = zf.compress(own, method, error)
        return error, mean

    def left(error: Any) -> Any:
        rest = zf.pmean(error.sent.local, "dp")
        if error.owned is not None and ranks > 1:
            rest = rest + zf.all_gather_invariant(error.owned.local, "dp")
        return rest

    jitted, means = zf.jit(zf.spmd(step, mesh), donate=0), []
    for seed in range(steps):
        error, mean = jitted(error, gradients(ranks, seed, dtype))
        assert error.finite
        means.append(mean)
    bucket = Bucket(tuple(SHAPES.values()), dtype, ranks)
    return means, dict(zip(SHAPES, bucket.unpack(zf.spmd(left, mesh)(error)), strict=True))


@methods
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_comes_out_is_what_went_in_less_the_feedback(ranks: int, method: Any) -> None:
    means, left = run(ranks, method, 6)
    for name in SHAPES:
        got = sum(mean[name] for mean in means) + left[name]
        want = sum(gradients(ranks, seed)[name].mean(0) for seed in range(6))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # float32 sums of 6 × 3 values


@methods
def test_feedback_stays_bounded(method: Any) -> None:
    """The means of many steps become the true mean: what is left does not grow with the steps."""
    _, few = run(2, method, 10)
    _, many = run(2, method, 60)
    for name in ("matrix", "cube"):
        # 1 % of the values a step: feedback of up to 100 steps' values is to be expected
        bound = 30.0 if method == "topk" else 6.0
        assert many[name].norm() < bound * max(few[name].norm().item(), 1e-3)


@methods
def test_two_processes_get_the_same_bits(method: Any) -> None:
    simulated, left = run(2, method, 3)
    ranks = run_on_processes(2, run, 2, method, 3)
    for means, own_left in ranks:
        for got, want, first in zip(means, simulated, ranks[0][0], strict=True):
            # sums over ranks in another order; PowerSGD's factors pass through a QR
            tolerance = 1e-5 if "PowerSGD" in str(method) or method == "powersgd" else 1e-6
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            for name in SHAPES:
                assert torch.equal(got[name], first[name])
        torch.testing.assert_close(own_left, left, rtol=1e-5, atol=1e-5)


# Leaves of 118, 98, 1 and 127 blocks: rounds that do not divide by 2 or 3 ranks.
LARGE = {"a": (400, 300), "b": (100_001,), "c": (5,), "d": (130_000,)}


def in_rounds(ranks: int, steps: int, masked: Callable[[int], bool] = lambda step: False) -> Any:
    """Each step's mean and gradients by leaf, and what is left over at the end."""
    before, feedback.ROUND = feedback.ROUND, 0
    try:
        return _in_rounds(ranks, steps, masked)
    finally:
        feedback.ROUND = before


def _in_rounds(ranks: int, steps: int, masked: Callable[[int], bool]) -> Any:
    mesh = zf.Mesh(dp=ranks)
    params = {name: torch.zeros(shape) for name, shape in LARGE.items()}
    error = zf.spmd(lambda p: zf.compression_state(p, "1bit"), mesh)(params)
    mask = tree.map(lambda p: torch.ones((), dtype=torch.bool), params)

    def step(error: Any, grads: Any, masked: bool) -> Any:
        own = tree.map(lambda g: g[0], grads)
        mean, error = zf.compress(own, "1bit", error, mask=mask if masked else None)
        return error, mean

    def left(error: Any) -> Any:
        parts, at = [], zf.all_gather_invariant(error.owned.local.unsqueeze(0), "dp")
        for part in bucket.rounds:
            values = part.values.stop - part.values.start
            parts.append(at[:, part.owned].reshape(-1)[:values])
        return zf.pmean(error.sent.local, "dp") + torch.cat(parts)

    bucket = Bucket(tuple(LARGE.values()), torch.float32, ranks)
    assert len(bucket.rounds) == 3
    means, given = [], []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        grads = {n: torch.randn(ranks, *s, generator=generator) for n, s in LARGE.items()}

        def stepped(error: Any, grads: Any, masked: bool = masked(number)) -> Any:
            return step(error, grads, masked)

        error, mean = zf.jit(zf.spmd(stepped, mesh))(error, grads)
        means.append(mean)
        given.append({name: g.mean(0) for name, g in grads.items()})
    return means, given, bucket.unpack(zf.spmd(left, mesh)(error))


@pytest.mark.parametrize("masked", [lambda step: False, lambda step: step % 2 == 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_in_rounds(ranks: int, masked: Callable[[int], bool]) -> None:
    """Not where steps with a mask, which take another way, follow on steps without one either."""
    means, given, left = in_rounds(ranks, 4, masked)
    for name, rest in zip(LARGE, left, strict=True):
        got = sum(mean[name] for mean in means) + rest
        torch.testing.assert_close(got, sum(g[name] for g in given), rtol=0, atol=1e-5)


def test_rounds_on_two_processes() -> None:
    means, _, left = in_rounds(2, 3)
    for got, _, own_left in run_on_processes(2, in_rounds, 2, 3):
        # each value is a scale or minus it, the same on all ranks
        torch.testing.assert_close(got, means, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own_left, left, rtol=1e-5, atol=1e-5)


def test_rounds_end_with_leaves_and_have_some_blocks_for_each_rank() -> None:
    shapes = ((feedback.ROUND,), (feedback.ROUND // 2,), (3,), (feedback.ROUND,), (1000,))
    few = Bucket(shapes, torch.float32, 2)
    # The last leaf alone is too small.
    assert [part.leaves for part in few.rounds] == [slice(0, 1), slice(1, 5)]
    assert few.rounds[-1].values.stop == few.length
    assert all(2 * p.piece >= p.values.stop - p.values.start for p in few.rounds)
    many = few._replace(ranks=1024)  # 32 blocks each are more than all there is
    assert many.rounds == [many.whole]


def test_float64_gradients_keep_their_type() -> None:
    means, left = run(2, "1bit", 4, torch.float64)
    want = sum(gradients(2, s, torch.float64)["matrix"].mean(0) for s in range(4))
    got = sum(mean["matrix"] for mean in means) + left["matrix"]
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_one_bit_is_the_sign_times_the_mean_of_the_block() -> None:
    """One step of two ranks, by hand."""
    g = torch.randn(2, 1024)
    mean, _ = zf.spmd(lambda _, g: zf.compress(g[0], "1bit", None), zf.Mesh(dp=2))(None, g)
    sent = torch.where(g < 0, -1, 1) * g.abs().mean(1, keepdim=True)
    average = sent.mean(0)
    # a block of 1024 values, and the second owner's block of padding
    want = torch.where(torch.signbit(average), -1, 1) * average.abs().mean()
    torch.testing.assert_close(mean, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@methods
def test_what_is_not_finite_is_reported_and_forgotten(method: Any, bad: float) -> None:
    mesh = zf.Mesh(dp=3)
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def step(error: Any, grads: Any) -> Any:
        mean, error = zf.compress(tree.map(lambda g: g[0], grads), method, error)
        return error, mean

    error = zf.spmd(lambda p: zf.compression_state(p, method), mesh)(params)
    error, _ = zf.spmd(step, mesh)(error, gradients(3, 0))
    spoilt = gradients(3, 1)
    spoilt["matrix"][1, 5, 6] = bad
    after, _ = zf.spmd(step, mesh)(error, spoilt)
    assert not after.finite
    for name in ("sent", "owned"):
        if getattr(error, name) is not None:
            assert torch.equal(getattr(after, name).local, getattr(error, name).local)
    want, _ = zf.spmd(step, mesh)(error, gradients(3, 2))
    got, mean = zf.spmd(step, mesh)(after, gradients(3, 2))
    assert got.finite
    assert torch.equal(got.sent.local, want.sent.local)
    assert all(x.isfinite().all() for x in tree.leaves(mean))


@methods
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_masked_values_stay_exactly_zero(method: Any, ranks: int) -> None:
    """Rows, columns and single values; and what is not masked loses nothing over the steps."""
    mesh = zf.Mesh(dp=ranks)
    used = {
        "rows": torch.tensor([True, False, True, True, False, True]).unsqueeze(1),
        "columns": torch.arange(33) % 3 > 0,
        "cube": torch.rand(7, 9, 11) < 0.5,
        "all": None,
    }
    shapes = {"rows": (6, 50), "columns": (70, 33), "cube": (7, 9, 11), "all": (3,)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def step(error: Any, grads: Any) -> Any:
        own = tree.map(lambda g: g[0], grads)
        mean, error = zf.compress(own, method, error, mask=used)
        return error, mean

    def left(error: Any) -> Any:
        rest = zf.pmean(error.sent.local, "dp")
        if error.owned is not None and ranks > 1:
            rest = rest + zf.all_gather_invariant(error.owned.local, "dp")
        return rest

    error = zf.spmd(lambda p: zf.compression_state(p, method), mesh)(params)
    got, want = params, params
    for _ in range(4):
        grads = {name: torch.randn(ranks, *shape) for name, shape in shapes.items()}
        for name, flag in used.items():
            if flag is not None:
                grads[name] = torch.where(flag, grads[name], 0)
        error, mean = zf.spmd(step, mesh)(error, grads)
        for name, flag in used.items():
            if flag is not None:
                assert not mean[name].masked_fill(flag, 0).any(), name
            assert mean[name].any() or name == "all", name
        got = tree.map(torch.add, got, mean)
        want = tree.map(lambda total, g: total + g.mean(0), want, grads)
    leaves = tuple(tuple(x.shape) for x in tree.leaves(params))
    rest = Bucket(leaves, torch.float32, ranks).unpack(zf.spmd(left, mesh)(error))
    for path, a, b, c in zip(
        tree.paths(params), tree.leaves(got), rest, tree.leaves(want), strict=True
    ):
        torch.testing.assert_close(a + b, c, rtol=0, atol=1e-5, msg=path)  # float32 sums


@dataclass(frozen=True)
class Half:
    """A codec of one's own: half precision."""

    def encode(self, x: torch.Tensor) -> Any:
        return (x.half(),)

    def decode(self, payload: Any, n: int, dtype: torch.dtype) -> torch.Tensor:
        return payload[0].to(dtype)


@dataclass(frozen=True)
class Doubling:
    """No codec: what it loses grows."""

    def encode(self, x: torch.Tensor) -> Any:
        return (3 * x,)

    def decode(self, payload: Any, n: int, dtype: torch.dtype) -> torch.Tensor:
        return payload[0].to(dtype)


@dataclass(frozen=True)
class Hiding(Half):
    """No codec: it makes numbers of what is none."""

    def encode(self, x: torch.Tensor) -> Any:
        return (torch.nan_to_num(x).half(),)


@pytest.mark.parametrize(
    "codec",
    [zf.OneBit(), zf.BFloat16(), zf.Int8(), zf.Int8(1024), zf.TopK(), zf.TopK(1.0), Half()],
    ids=str,
)
def test_codecs_obey_the_laws(codec: Any) -> None:
    zf.testing.check_codec(codec)
    means, left = run(2, codec, 2)
    want = sum(gradients(2, seed)["matrix"].mean(0) for seed in range(2))
    got = sum(mean["matrix"] for mean in means) + left["matrix"]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "message"), [(Doubling(), "loses more than"), (Hiding(), "NaN")], ids=str
)
def test_what_is_no_codec_is_found_out(codec: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        zf.testing.check_codec(codec)


def test_errors_say_what_to_write() -> None:
    mesh, x = zf.Mesh(dp=2), torch.ones(2, 4)

    def call(f: Any) -> Any:
        return zf.spmd(lambda _, x: f(x[0]), mesh)(None, x)

    with pytest.raises(ValueError, match="did you mean '1bit'"):
        call(lambda x: zf.compress(x, "1bits", None))
    with pytest.raises(TypeError, match="frozen dataclass with encode"):
        call(lambda x: zf.compress(x, 3, None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="over one mesh axis"):
        call(lambda x: zf.compress(x, "1bit", None, ("dp", "tp")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"feedback of BFloat16\(\), and the method is OneBit"):
        call(lambda x: zf.compress(x, "1bit", zf.compression_state(x, "bf16")))
    with pytest.raises(ValueError, match=r"shapes \[\(3,\)\], and grads has \[\(4,\)\]"):
        call(lambda x: zf.compress(x, "1bit", zf.compression_state(x[:3], "1bit")))
    with pytest.raises(TypeError, match=r"grads at 'a': a tensor of dtype torch\.int64"):
        call(lambda x: zf.compress({"a": x.long()}, "1bit", None))
    with pytest.raises(ValueError, match="no leaves"):
        call(lambda x: zf.compress({}, "1bit", None))
    with pytest.raises(ValueError, match=r"grads at 'a' is a piece.*reduce=False"):
        zf.spmd(lambda p: zf.compress(zf.shard(p, 1), "1bit", None), mesh)({"a": x})
    with pytest.raises(ValueError, match="density is 0"):
        zf.TopK(0)
    with pytest.raises(ValueError, match="must divide 1024"):
        zf.Int8(100)
    with pytest.raises(ValueError, match="rank is 0"):
        zf.PowerSGD(0)
