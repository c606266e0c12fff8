"""Block-sparse attention on a CPU: equal to the formula, in every context of torch.func."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import zero_fn as zf
from tests.kernels.attention_cases import cases, inputs, oracle
from zero_fn.kernels import (
    Layout,
    attention_cpu,
    attention_native,
    attention_rows,
    block_sparse_attention,
)
from zero_fn.kernels.reference import attention_formula

CASES = cases()


def gradients(f: Callable[..., Any], *xs: Tensor) -> tuple[Tensor, ...]:
    xs = tuple(x.detach().clone().requires_grad_() for x in xs)
    out = f(*xs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, xs, weight)


# rtol of float64 and float32: an exponential and sums of up to 100 terms; of the halves: one
# rounding of the result, whose size is near 1, for all between is float32
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    qkv, bias = inputs(case, dtype)

    def ours(*qkv: Tensor) -> Tensor:
        return block_sparse_attention(*qkv, case.layout, causal=case.causal, bias=bias)

    def formula(*qkv: Tensor) -> Tensor:
        return oracle(case, list(qkv), bias)[0]

    out = ours(*qkv)
    assert out.dtype == dtype
    assert out.is_contiguous()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), formula(*qkv), **tolerance)
    wide = [x.double() for x in qkv]
    for got, want in zip(gradients(ours, *qkv), gradients(formula, *wide), strict=True):
        assert got.dtype == dtype
        # The gradients use the result as it was rounded to dtype.
        torch.testing.assert_close(
            got.double(), want, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula_without_a_compiler(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_native, "takes", lambda q, bias: False)
    test_equals_the_formula(name, dtype)


@pytest.mark.parametrize("heads", [2, 1])  # of keys: 1 is shared out by rows and columns
def test_threads_change_no_bit(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if attention_native.library(attention_native.SOURCE) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(attention_native, "SHARE", 1)
    passes = []
    run = attention_native._run

    def counted(names: list[str], *args: Any, **tensors: Any) -> None:
        passes.append(tuple(names))
        run(names, *args, **tensors)

    monkeypatch.setattr(attention_native, "_run", counted)
    layout = Layout.bigbird(200, num_heads=1, block=16)
    q, k, v = (torch.randn(1, n, 200, 40) for n in (2 * heads, heads, heads))

    def found(threads: int) -> list[Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        f = lambda *qkv: block_sparse_attention(*qkv, layout)  # noqa: E731
        return [f(q, k, v), *gradients(f, q, k, v)]

    for a, b in zip(found(1), found(2), strict=True):
        assert torch.equal(a, b)
    whole, parted = ("backward",), ("backward_queries", "backward_keys")
    expected = {("forward",), whole} | ({parted} if heads == 1 else set())
    assert set(passes) == expected


@pytest.mark.parametrize("name", ["causal", "holes", "own patterns, grouped", "bias of heads"])
def test_log_sum_and_its_gradient(name: str) -> None:
    case = CASES[name]
    qkv, bias = inputs(case)

    def ours(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return block_sparse_attention(
            *qkv, case.layout, causal=case.causal, bias=bias, scale=0.3, return_lse=True
        )

    def formula(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return oracle(case, list(qkv), bias, scale=0.3)

    torch.testing.assert_close(ours(*qkv), formula(*qkv))

    def scalar(f: Callable[..., Any]) -> Callable[..., Tensor]:
        def total(*qkv: Tensor) -> Tensor:
            out, log_sum = f(*qkv)
            return out.sin().sum() + log_sum.exp().sum()  # exp: 0 where nothing is seen

        return total

    argnums = (0, 1, 2)
    got = torch.func.grad(scalar(ours), argnums)(*qkv)
    torch.testing.assert_close(got, torch.func.grad(scalar(formula), argnums)(*qkv))


@pytest.mark.parametrize("name", ["causal", "document", "own patterns"])
def test_equals_flex_attention(name: str) -> None:
    layout = CASES[name].layout
    qkv, _ = inputs(CASES[name], torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of running slowly, where it is not compiled
        want = flex_attention(*qkv, block_mask=layout.to_block_mask())
    got = block_sparse_attention(*qkv, layout)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_share_calls_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that see equally many blocks, as many as one more copy of the keys takes."""
    calls, flash = [], attention_cpu._flash

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(q.shape[1])
        return flash(q, *args, **kwargs)

    monkeypatch.setattr(attention_cpu, "_flash", counted)
    monkeypatch.setattr(attention_cpu, "best_rows", lambda *given: 16)
    q, k, v = (torch.randn(2, heads, 200, 8, dtype=torch.float64) for heads in (4, 2, 2))
    rank = torch.rand(13, 13, generator=torch.Generator().manual_seed(0)).argsort(1).argsort(1)
    seen = rank < 3
    seen[4] = False  # sees nothing
    seen[5, :] = True  # all
    layout = Layout.from_mask(seen, block=16, seq_len=200, k_len=200)
    for causal in (False, True):
        dense = layout.to_dense().tril() if causal else layout.to_dense()
        want = attention_formula(q, k, v, dense, 8**-0.5)[0]
        found = block_sparse_attention(q, k, v, layout, causal=causal)
        torch.testing.assert_close(found, want)
    assert max(calls) > 1


def test_nothing_seen_passes_nothing() -> None:
    case = CASES["holes"]
    qkv, _ = inputs(case)
    out, log_sum = block_sparse_attention(*qkv, case.layout, return_lse=True)
    assert (out[:, :, 16:32] == 0).all()
    assert (log_sum[:, :, 16:32] == -math.inf).all()
    dq, dk, dv = gradients(lambda *x: block_sparse_attention(*x, case.layout), *qkv)
    assert (dq[:, :, 16:32] == 0).all()
    assert (dk[:, :, 32:] == 0).all()
    assert (dv[:, :, 32:] == 0).all()


@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 2, 5, 4), (0, 2, 5, 4)],
        [(2, 0, 5, 4), (2, 0, 5, 4)],
        [(2, 2, 0, 4), (2, 2, 5, 4)],
        [(2, 2, 5, 4), (2, 2, 0, 4)],
        [(2, 2, 0, 4), (2, 2, 0, 4)],
    ],
    ids=str,
)
def test_empty(shapes: list[tuple[int, ...]]) -> None:
    q, k = (torch.randn(shape) for shape in shapes)
    layout = Layout.dense(q.shape[2], block=16, k_len=k.shape[2])

    def ours(*qkv: Tensor) -> Tensor:
        return block_sparse_attention(*qkv, layout)

    assert ours(q, k, k).shape == q.shape
    assert (ours(q, k, k) == 0).all()
    for got, x in zip(gradients(ours, q, k, k), (q, k, k), strict=True):
        assert got.shape == x.shape
        assert (got == 0).all()


def test_any_memory_layout() -> None:
    layout = Layout.causal(40, block=16)
    q, k, v = torch.randn(3, 2, 40, 3, 8).transpose(2, 3).unbind()  # heads inside the length
    got = gradients(lambda *x: block_sparse_attention(*x, layout), q, k, v)
    want = gradients(
        lambda *x: block_sparse_attention(*x, layout), *[x.contiguous() for x in (q, k, v)]
    )
    torch.testing.assert_close(got, want)
    out = block_sparse_attention(q.requires_grad_(), k, v, layout)
    out.sum().backward()  # a gradient of stride 0
    ones = torch.autograd.grad(block_sparse_attention(q, k, v, layout), q, torch.ones(q.shape))
    torch.testing.assert_close(q.grad, ones[0])


def test_dense_in_memory_is_never_made() -> None:
    length = 1 << 12
    layout = Layout.local_sliding_window(length, block=64)
    qkv = [torch.randn(1, 1, length, 4).requires_grad_() for _ in range(3)]
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        block_sparse_attention(*qkv, layout, causal=True).sum().backward()
    assert 0 < largest <= 256 * length


# Every context of torch.func


def ours(name: str) -> Callable[..., Tensor]:
    case = CASES[name]
    bias = inputs(case)[1]
    return lambda *qkv: block_sparse_attention(*qkv, case.layout, causal=case.causal, bias=bias)


def formula(name: str) -> Callable[..., Tensor]:
    case = CASES[name]
    seen = case.layout.to_dense()
    seen = seen.tril() if case.causal else seen
    bias = inputs(case)[1]
    return lambda *qkv: attention_formula(*qkv, seen, case.size**-0.5, bias)[0]


def value(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return f


def gradient(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return torch.func.grad(lambda *qkv: f(*qkv).sin().sum(), argnums=(0, 1, 2))


def second(f: Callable[..., Tensor]) -> Callable[..., Any]:
    def norm(*qkv: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in gradient(f)(*qkv)]).sum()

    return torch.func.grad(norm, argnums=(0, 1, 2))


DERIVE = [value, gradient, second]
SOME = ["causal", "holes", "document, causal", "own patterns, grouped", "bias of heads"]


@pytest.mark.parametrize("derive", DERIVE)
@pytest.mark.parametrize("name", SOME)
def test_derivatives(name: str, derive: Callable[..., Any]) -> None:
    qkv, _ = inputs(CASES[name])
    torch.testing.assert_close(derive(ours(name))(*qkv), derive(formula(name))(*qkv))


def test_second_derivatives_agree_with_differences() -> None:
    layout = Layout.from_mask(torch.tensor([[True, False], [True, True]]), 16, 18, 20)
    case = CASES["grouped"]._replace(batch=1, size=3, heads=2, kv_heads=1, layout=layout)
    qkv, _ = inputs(case)
    qkv = [x.requires_grad_() for x in qkv]

    def both(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return block_sparse_attention(*qkv, case.layout, return_lse=True)

    assert torch.autograd.gradcheck(both, qkv, fast_mode=True)
    assert torch.autograd.gradgradcheck(both, qkv, fast_mode=True)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 1, None), (0, None, 2)])
@pytest.mark.parametrize("derive", DERIVE)
@pytest.mark.parametrize("name", ["own patterns, grouped", "bias", "bias of heads"])
def test_maps_over_a_batch(name: str, derive: Callable[..., Any], in_dims: Any) -> None:
    many = [
        torch.stack(rows)
        for rows in zip(*(inputs(CASES[name], seed=i)[0] for i in range(3)), strict=True)
    ]
    qkv = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(many, in_dims, strict=True)]
    got = torch.func.vmap(derive(ours(name)), in_dims)(*qkv)
    torch.testing.assert_close(got, torch.func.vmap(derive(formula(name)), in_dims)(*qkv))


@pytest.mark.parametrize("shape", [(3, 1, 1, 1, 40), (3, 2, 2, 40, 40), (3, 1, 2, 40, 1)], ids=str)
def test_maps_over_a_bias(shape: tuple[int, ...]) -> None:
    case = CASES["causal"]._replace(layout=Layout.causal(40, block=16))
    qkv, _ = inputs(case)
    bias = torch.randn(shape, dtype=torch.float64)

    def grads(bias: Tensor) -> Any:
        return gradient(lambda *x: block_sparse_attention(*x, case.layout, bias=bias))(*qkv)

    got = torch.func.vmap(grads)(bias)
    for row in range(3):
        torch.testing.assert_close(tuple(x[row] for x in got), grads(bias[row]))


def test_gradient_of_a_map_and_map_of_a_map() -> None:
    many = [torch.stack([x] * 6).view(2, 3, *x.shape) for x in inputs(CASES["causal"])[0]]
    many = [x + torch.randn_like(x) for x in many]

    def twice(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.func.vmap(torch.func.vmap(f))

    for derive in (gradient(twice(ours("causal"))), twice(gradient(ours("causal")))):
        torch.testing.assert_close(derive(*many), gradient(twice(formula("causal")))(*many))


def test_vjp_and_ordinary_backward() -> None:
    qkv, _ = inputs(CASES["causal"])
    want = gradient(formula("causal"))(*qkv)
    out, pullback = torch.func.vjp(ours("causal"), *qkv)
    torch.testing.assert_close(pullback(out.cos()), want)
    leaves = [x.clone().requires_grad_() for x in qkv]
    ours("causal")(*leaves).sin().sum().backward()
    torch.testing.assert_close(tuple(x.grad for x in leaves), want)


def test_per_sample_jacobian() -> None:
    qkv, _ = inputs(CASES["one query"])
    got = torch.func.jacrev(ours("one query"))(*qkv)
    torch.testing.assert_close(got, torch.func.jacrev(formula("one query"))(*qkv))


def test_a_third_derivative_is_refused() -> None:
    qkv, _ = inputs(CASES["one query"])
    with pytest.raises(NotImplementedError, match="further derivative"):
        torch.func.grad(lambda q: second(ours("one query"))(q, *qkv[1:])[0].sum())(qkv[0])


def test_forward_mode_is_refused() -> None:
    qkv, _ = inputs(CASES["causal"])
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(ours("causal"), tuple(qkv), tuple(qkv))


def test_a_gradient_of_the_bias_is_refused() -> None:
    case = CASES["bias"]
    qkv, bias = inputs(case)

    def f(bias: Tensor) -> Tensor:
        return block_sparse_attention(*qkv, case.layout, bias=bias).sum()

    with pytest.raises(NotImplementedError, match=r"shape \(2, 2, 40, 40\), .* detach"):
        torch.func.grad(f)(bias)
    with pytest.raises(NotImplementedError, match="detach"):
        f(bias.clone().requires_grad_()).backward()


COMPILED = {
    "value": lambda f: f,
    "grad": gradient,
    "vmap(grad)": lambda f: torch.func.vmap(gradient(f)),
    "grad(vmap)": lambda f: gradient(torch.func.vmap(f)),
    "second": second,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", COMPILED)
def test_compiles(how: str, backend: str) -> None:
    qkv, _ = inputs(CASES["causal"])
    if "vmap" in how:
        qkv = [torch.stack([x, x + 1, x - 1]) for x in qkv]
    torch.compiler.reset()
    compiled = torch.compile(COMPILED[how](ours("causal")), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*qkv), COMPILED[how](formula("causal"))(*qkv))


def test_compiles_with_inductor_and_ordinary_backward() -> None:
    qkv, _ = inputs(CASES["causal"])
    leaves = [x.clone().requires_grad_() for x in qkv]
    torch.compile(ours("causal"), fullgraph=True)(*leaves).sin().sum().backward()
    want = gradient(formula("causal"))(*qkv)
    torch.testing.assert_close(tuple(x.grad for x in leaves), want)


def test_traces_to_one_node_a_direction() -> None:
    qkv, _ = inputs(CASES["causal"])
    many = [torch.stack([x, x + 1, x - 1]) for x in qkv]
    f = torch.func.vmap(gradient(ours("causal")))
    traced = make_fx(f, tracing_mode="fake")(*many)
    names = [str(node.target) for node in traced.graph.nodes if "zero_fn" in str(node.target)]
    assert names == [
        "zero_fn.block_sparse_attention.default",
        "zero_fn.block_sparse_attention_backward.default",
    ]
    torch.testing.assert_close(traced(*many), torch.func.vmap(gradient(formula("causal")))(*many))


def test_a_layout_may_be_made_inside_the_step() -> None:
    qkv = list(torch.randn(3, 2, 2, 50, 4))

    def step(*qkv: Tensor) -> Any:
        def f(*qkv: Tensor) -> Tensor:
            layout = Layout.bigbird(50, block=16, num_random_blocks=2, seed=99)
            return block_sparse_attention(*qkv, layout, causal=True)

        return gradient(f)(*qkv)

    want = step(*qkv)
    traced = make_fx(step, tracing_mode="fake")(*qkv)
    torch.testing.assert_close(traced(*qkv), want)
    many = [x[None] for x in qkv]
    mapped = torch.func.vmap(step)(*many)
    torch.testing.assert_close(tuple(x[0] for x in mapped), want)
    torch.testing.assert_close(zf.jit(step)(*qkv), want)
    with torch.inference_mode():
        inferred = block_sparse_attention(*qkv, Layout.bigbird(50, seed=1234), causal=True)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = block_sparse_attention(*leaves, Layout.bigbird(50, seed=1234), causal=True)
    torch.testing.assert_close(out, inferred)
    out.sum().backward()


def test_inside_remat_and_a_simulated_mesh() -> None:
    layout = Layout.bslongformer(40, block=16)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attend = zf.remat(lambda *qkv: block_sparse_attention(*qkv, layout))
        return attend(q, k, v).square().mean()

    w, x = torch.randn(8, 24, dtype=torch.float64), torch.randn(4, 40, 8, dtype=torch.float64)

    def step(state: Any, batch: Tensor) -> Any:
        grads = torch.func.grad(lambda w: zf.pmean(loss(w, batch), "dp"))(state)
        return state, zf.psum(grads, "dp")

    want = torch.func.grad(loss)(w, x)
    _, got = zf.spmd(step, zf.Mesh(dp=2))(w, x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", CASES)
def test_row_by_row_equals_the_formula(name: str) -> None:
    case = CASES[name]
    qkv, bias = inputs(case)
    layout = case.layout.tril() if case.causal else case.layout
    got = attention_rows.forward(*qkv, bias, layout, case.size**-0.5)
    want = oracle(case, qkv, bias)
    torch.testing.assert_close(got, want)
    grads = torch.randn_like(want[0]), torch.randn_like(want[1])
    got = attention_rows.backward(*grads, *qkv, bias, layout, case.size**-0.5)

    def formula(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum = oracle(case, list(qkv), bias)
        return out, log_sum.masked_fill(log_sum == -math.inf, 0)

    torch.testing.assert_close(got, torch.func.vjp(formula, *qkv)[1](grads))


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 5, 8)}, r"q \(2, 5, 8\).*each is \(batch, heads, length, head size\)"),
        ({"v": (2, 2, 40, 9)}, "batch and head size are equal"),
        ({"q": (2, 3, 40, 8)}, "3 heads can't share the keys of 2"),
        ({"q": (2, 2, 41, 8)}, "41 queries and 40 keys, but the layout is for 40 and 40"),
        ({"layout": Layout.causal(40, num_heads=5)}, "2 heads, but the layout has 5"),
        ({"bias": torch.zeros(40, 40)}, r"bias \(40, 40\) does not broadcast"),
        ({"bias": torch.zeros(1, 1, 40, 40).bool()}, "torch.where"),
        ({"q": (2, 2, 40, 0), "k": (2, 2, 40, 0), "v": (2, 2, 40, 0)}, "a head size of 0"),
        ({"dtype": torch.int32}, "one floating dtype"),
    ],
    ids=str,
)
def test_errors(change: dict[str, Any], message: str) -> None:
    shapes = {name: change.get(name, (2, 2, 40, 8)) for name in "qkv"}
    q, k, v = (torch.zeros(shape, dtype=change.get("dtype")) for shape in shapes.values())
    layout = change.get("layout", Layout.causal(40))
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, layout, bias=change.get("bias"))
