"""Quantised weights: their size and error, what computes on them, and every way they travel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from tests.memory import peak
from zero_fn.inference.quantization import METHODS, numbers
from zero_fn.inference.quantization_errors import tree_bytes
from zero_fn.kernels import int8_products
from zero_fn.models import gpt

# Half a step of the grid over the norm of a normal row; measured figures rounded up.
ERROR = {"int8": 0.01, "int4": 0.1, "fp8": 0.03}
SHAPES = [(1, 1), (3, 5), (7, 33), (130, 65), (5, 64), (0, 4)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("group", [None, 0, 16, 7])
@pytest.mark.parametrize("method", METHODS)
def test_weights_come_back_within_the_grid(method: Any, group: int | None) -> None:
    for shape in SHAPES:
        w = normal(*shape)
        q = zf.quantize({"w": w}, method, group=group)["w"]
        assert q.shape == w.shape
        assert q.dtype == w.dtype
        assert q.ndim == 2
        back = zf.dequantize(q)
        if w.numel() > 100:
            assert (back - w).norm() <= ERROR[method] * w.norm() * (2 if method == "int4" else 1)
        if method == "int8" and not group:
            step = w.abs().amax(-1, keepdim=True) / 127 if w.numel() else w
            assert bool(((back - w).abs() <= step / 2 * (1 + 1e-5)).all())  # float32's rounding


def test_the_largest_weight_is_exact_and_zero_is_zero() -> None:
    w = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, -1.0, 0.0, 0.5], [-2.0, 0.0, 0.1, 1.0]])
    for method in METHODS:
        back = zf.dequantize(zf.quantize(w, method))
        assert torch.equal(back[0], torch.zeros(4))
        torch.testing.assert_close(back[1, 0], w[1, 0])
        torch.testing.assert_close(back[2, 0], w[2, 0])
        assert back[1, 2] == 0


def test_a_weight_that_is_not_finite_shows() -> None:
    for method in METHODS:
        for bad in (torch.nan, torch.inf):
            w = normal(3, 40)
            w[1, 2] = bad
            y = F.linear(torch.ones(2, 40), zf.quantize(w, method))
            assert not y[:, 1].isfinite().any()
            assert y[:, 0].isfinite().all()


def test_bits_of_fp8_are_torchs_numbers() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 127) != 127]  # NaN, which no finite weight becomes
    format = zf.quantize(torch.ones(1, 1), "fp8").format
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(numbers(bits, format, dtype), bits.view(torch.float8_e4m3fn).to(dtype))


# The product's own error beside the dequantised weight in float64, relative to the norm. float32:
# activations lose 1/64516 of the largest, about 3 deviations (int8_products.py), 3e-5 measured;
# bfloat16: its own 2^-9; activations in int8: 1/254 of the largest.
PRODUCT = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", PRODUCT)
@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 9)])
@pytest.mark.parametrize("method", [*METHODS, "activations"])
def test_linear_equals_the_dequantised_weight(method: Any, rows: Any, dtype: torch.dtype) -> None:
    rounded = method == "activations"
    for shape in [(7, 33), (130, 65), (64, 128)]:
        w, bias, x = normal(*shape), normal(shape[0]), normal(*rows, shape[1], dtype=dtype)
        made = {"activations": "int8"} if rounded else {}
        q = zf.quantize(w, "int8" if rounded else method, **made)  # type: ignore[arg-type]
        want = F.linear(x.double(), zf.dequantize(q).double(), bias.double())
        y = zf.linear(x, q, bias.to(dtype))
        assert y.dtype == dtype
        error = (y.double() - want).norm() / want.norm()
        assert error < (0.02 if rounded else PRODUCT[dtype])
        assert torch.equal(F.linear(x, q, bias.to(dtype)), y)  # type: ignore[arg-type]


def test_kernels_and_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(5, 65), normal(130, 65)
    for activations in (None, "int8"):
        q = zf.quantize(w, activations=activations)  # type: ignore[arg-type]
        fast = zf.linear(x, q)
        with monkeypatch.context() as patch:
            patch.setattr(int8_products, "has_integer_products", lambda: False)
            patch.setattr(int8_products, "BLOCK", 1000)  # nine blocks
            torch.testing.assert_close(zf.linear(x, q), fast, rtol=1e-3, atol=1e-3)


def test_a_row_depends_on_no_other_row() -> None:
    """What a server's batches rest on."""
    x, q = normal(9, 64), zf.quantize(normal(50, 64))
    together = zf.linear(x, q)
    assert torch.equal(torch.cat([zf.linear(row, q) for row in x.split(1)]), together)


def test_gradients_by_the_inputs_are_the_dequantised_weights() -> None:
    x = normal(4, 65, dtype=torch.float64)
    for method in METHODS:
        q = zf.quantize(normal(30, 65, dtype=torch.float64), method)
        found = zf.grad(lambda x, q=q: F.linear(x, q).square().sum())(x)
        want = zf.grad(lambda x, q=q: F.linear(x, zf.dequantize(q)).square().sum())(x)
        torch.testing.assert_close(found, want)
        mapped = torch.func.vmap(lambda x, q=q: F.linear(x, q))(x)
        torch.testing.assert_close(mapped, F.linear(x, zf.dequantize(q)))
        leaf = x.float().requires_grad_()
        F.linear(leaf, q).sum().backward()
        assert leaf.grad is not None


def test_other_functions_see_the_weight() -> None:
    w, x, tokens = normal(6, 8), normal(3, 6), torch.tensor([[0, 5], [3, 3]])
    for method in METHODS:
        q = zf.quantize(w, method)
        whole = zf.dequantize(q)
        torch.testing.assert_close(F.embedding(tokens, q), whole[tokens])
        torch.testing.assert_close(torch.addmm(torch.ones(8), x, q), 1 + x @ whole)
        torch.testing.assert_close(x @ q, x @ whole)
        torch.testing.assert_close(torch.tanh(q), whole.tanh())
        torch.testing.assert_close(q[2:4], whole[2:4])


def test_the_whole_weight_is_never_made() -> None:
    w = normal(3000, 1000)
    x = normal(2, 1000)
    for method in METHODS:
        for dtype in (torch.float32, torch.float64):
            q = zf.quantize(w, method)
            inputs = [q.values, q.scales]
            taken = peak(lambda q=q, dtype=dtype: zf.linear(x.to(dtype), q), inputs)
            # A third of the weight at a time, with what its conversion holds.
            assert taken < 1.6 * 3 * (1 << 20) * dtype.itemsize, (method, dtype, taken)
    whole = 3000 * 1000 * 4
    assert peak(lambda: zf.linear(x, zf.quantize(w)), [w]) > whole  # quantising itself does


def test_sizes_and_errors_of_the_small_model() -> None:
    params = gpt.init(gpt.preset("small"))
    for method, most in (("int8", 0.27), ("fp8", 0.27), ("int4", 0.18)):
        q = zf.quantize(params, method)  # type: ignore[arg-type]
        assert tree_bytes(q) <= most * tree_bytes(params)
        report = zf.quantization_error(params, q)
        assert "blocks.0.qkv.weight" in report
        assert "blocks.0.qkv.bias" not in report
        for path, error in report.items():
            assert 0 < error.relative < ERROR[method], path
            assert error.share <= most
        assert q["head"] is q["tokens"]  # tied, as before


def test_the_model_runs_on_quantised_weights() -> None:
    config = gpt.Config(vocabulary=53, width=48, heads=3, kv_heads=1)
    params = gpt.init(config)
    tokens = torch.arange(40).view(2, 20) % 53
    for method in METHODS:
        q = zf.quantize(params, method)
        want = gpt.apply(zf.dequantize(q), tokens, config)
        # The products' own error, twice a block; logits are of order 0.1.
        torch.testing.assert_close(gpt.apply(q, tokens, config), want, rtol=1e-3, atol=1e-4)


def test_where_names_leaves() -> None:
    params = {"a": {"w": torch.ones(4, 4), "b": torch.ones(4)}, "c": torch.ones(2, 2)}
    q = zf.quantize(params, where="a.*w")
    assert repr(q["a"]["w"]) == "int8[4,4] with a scale a row"
    assert isinstance(q["c"], Tensor)
    q = zf.quantize(params, where=lambda path, shape: shape == (2, 2))
    assert isinstance(q["a"]["w"], Tensor)
    assert repr(q["c"]) == "int8[2,2] with a scale a row"
    for where, error, message in (
        ("d.*", ValueError, "where: 'd"),
        ("a.b", TypeError, "two or more dimensions"),
    ):
        with pytest.raises(error, match=message):
            zf.quantize(params, where=where)
    with pytest.raises(TypeError, match=r"'n' is torch\.int64"):
        zf.quantize({"n": torch.arange(4).view(2, 2)}, where="n")
    with pytest.raises(ValueError, match="quantised already"):
        zf.quantize(zf.quantize(params), where="c")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"method": "int3"}, "method is 'int3'; there are int8, int4, fp8"),
        ({"group": -1}, "group is -1"),
        ({"activations": "fp8"}, "activations is 'fp8'"),
        ({"method": "int4", "activations": "int8"}, "the weights are int4"),
    ],
)
def test_what_cannot_be_asked(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.quantize(torch.ones(2, 2), **made)


def test_sizes_that_do_not_fit_and_trees_that_do_not() -> None:
    q = zf.quantize({"w": normal(6, 4)})
    with pytest.raises(ValueError, match=r"x of shape \(2, 5\) and int8\[6,4\]"):
        zf.linear(torch.ones(2, 5), q["w"])
    with pytest.raises(ValueError, match="'w' is int8"):
        zf.quantization_error({"w": normal(4, 6)}, q)
    with pytest.raises(TypeError, match="first dimension"):
        q["w"][:, 0]


CONFIG = gpt.Config(vocabulary=53, length=24, width=32, heads=4, kv_heads=2)
TOKENS = torch.arange(4 * 24).view(4, 24) * 7 % 53


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", [*METHODS, "activations"])
def test_compiled_with_a_full_graph(method: Any, dtype: torch.dtype) -> None:
    made = {"activations": "int8"} if method == "activations" else {}
    q = zf.quantize(normal(64, 128), "int8" if made else method, **made)  # type: ignore[arg-type]
    x = normal(3, 128, dtype=dtype)
    torch._dynamo.reset()
    ready = torch.compile(lambda x, q: F.linear(x, q).tanh(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(ready(x, q), F.linear(x, q).tanh())

    def loss(x: Tensor, q: Any) -> Tensor:
        return F.linear(x, q).square().sum()

    torch._dynamo.reset()
    ready = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(ready(x, q), torch.func.grad(loss)(x, q))


def test_the_rounding_of_inputs_is_passed_over_by_gradients() -> None:
    x, w = normal(4, 64), normal(32, 64)
    for dtype in (torch.float32, torch.float64):  # by the kernel, and by blocks
        q = zf.quantize(w, activations="int8")
        found = zf.grad(lambda x, q=q: F.linear(x, q).sum())(x.to(dtype))
        want = zf.dequantize(q).sum(0).expand(4, -1).to(dtype)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_traced_step_computes_on_them() -> None:
    q = zf.quantize(gpt.init(CONFIG))
    apply = zf.jit(lambda params, tokens: gpt.apply(params, tokens, CONFIG))
    torch.testing.assert_close(apply(q, TOKENS), gpt.apply(q, TOKENS, CONFIG))
    assert "_int_mm" in str(apply.trace(q, TOKENS))
    # Inductor has no way to lower torch's kernel for bfloat16 inputs after other ops.
    low, one = zf.quantize(normal(64, 64, dtype=torch.bfloat16)), normal(1, 64).bfloat16()
    few = zf.jit(lambda q, x: F.linear(x.tanh(), q))
    assert "int8_linear" in str(few.trace(low, one))
