"""Fused Adam: equal to torch's in float64, in place and pure, in every context of torch.func."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import zero_fn as zf
from zero_fn.kernels import fused_adamw, fused_adamw_
from zero_fn.passes import update_in_place
from zero_fn.program import trace

SHAPES = [(7, 5), (), (1,), (0, 3), (130,), (3, 2, 5)]


def leaves(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[list[Tensor]]:
    """Parameters, gradients and moments."""
    torch.manual_seed(seed)
    p, g, m, v = ([torch.randn(s, dtype=torch.float64).to(dtype) for s in SHAPES] for _ in range(4))
    return [p, g, m, [x.abs() for x in v]]


SETTINGS = [
    {"decoupled": True, "weight_decay": 0.1},
    {"decoupled": True, "weight_decay": 0.0},
    {"decoupled": False, "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "in place"])
def test_equals_torch_in_float64_over_100_steps(settings: Any, pure: bool) -> None:
    params, _, m, v = leaves()
    m, v = ([torch.zeros_like(x) for x in xs] for xs in (m, v))
    wide = [x.double().requires_grad_() for x in params]
    kind = torch.optim.AdamW if settings["decoupled"] else torch.optim.Adam
    optimizer = kind(wide, lr=1e-2, weight_decay=settings["weight_decay"])
    for count in range(1, 101):
        torch.manual_seed(count)
        grads = [torch.randn_like(x) for x in params]
        if count % 7 == 0:
            grads = [torch.zeros_like(g) for g in grads]
        if count % 11 == 0:
            grads = [g * 1e-40 for g in grads]  # denormals
        step = torch.tensor(count)
        if pure:
            updates, m, v = fused_adamw(params, grads, m, v, step, 1e-2, **settings)
            params = [p + u for p, u in zip(params, updates, strict=True)]
        else:
            fused_adamw_(params, grads, m, v, step, 1e-2, **settings)
        for x, g in zip(wide, grads, strict=True):
            x.grad = g.double()
        optimizer.step()
    for x, y in zip(params, wide, strict=True):
        # a rounding of float32 a step, 100 steps
        torch.testing.assert_close(x.double(), y.detach(), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    p, g, m, v = leaves(dtype)
    step = torch.tensor(3)
    got = fused_adamw(p, g, m, v, step, 1e-2, weight_decay=0.1)
    wide = [[x.double() for x in xs] for xs in (p, g, m, v)]
    want = fused_adamw(*wide, step, 1e-2, weight_decay=0.1)
    eps = torch.finfo(dtype).eps
    for xs, ys in zip(got, want, strict=True):
        for x, y in zip(xs, ys, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), y, rtol=4 * eps, atol=4 * eps)


def test_gradients_of_another_dtype() -> None:
    p, g, m, v = leaves()
    half = [x.bfloat16() for x in g]
    got = fused_adamw(p, half, m, v, torch.tensor(2), 0.1)
    want = fused_adamw(p, [x.float() for x in half], m, v, torch.tensor(2), 0.1)
    torch.testing.assert_close(got, want)


def test_odd_memory_layouts() -> None:
    torch.manual_seed(0)
    p, g, m, v = (torch.rand(6, 4).T for _ in range(4))
    g = torch.ones(()).expand(4, 6)
    want = fused_adamw([p.contiguous()], [g.contiguous()], [m.contiguous()], [v.contiguous()],
                       torch.tensor(1), 0.1)  # fmt: skip
    torch.testing.assert_close(fused_adamw([p], [g], [m], [v], torch.tensor(1), 0.1), want)
    inputs = [x.clone() for x in (p, m, v)]  # clone keeps the strides
    fused_adamw_([inputs[0]], [g], [inputs[1]], [inputs[2]], torch.tensor(1), 0.1)
    torch.testing.assert_close(inputs, [p + want[0][0], want[1][0], want[2][0]])


def test_the_pure_one_leaves_its_inputs_alone() -> None:
    given = leaves()
    kept = [[x.clone() for x in xs] for xs in given]
    scale = torch.tensor(4.0)
    fused_adamw(*given, torch.tensor(1), 0.1, weight_decay=0.1, grad_scale=scale)
    fused_adamw(*given, torch.tensor(1), 0.1, weight_decay=0.1, decoupled=False)
    torch.testing.assert_close(given, kept)
    p, g, m, v = given
    fused_adamw_(p, g, m, v, torch.tensor(1), 0.1, grad_scale=scale)
    torch.testing.assert_close(g, kept[1])


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "in place"])
def test_scale_and_skip(pure: bool) -> None:
    p, g, m, v = leaves()
    step, scale = torch.tensor(2), torch.tensor(8.0)
    scaled = [x * 8 for x in g]
    want = fused_adamw(p, g, m, v, step, 0.1)
    for skip in (False, True):
        flag = torch.tensor(skip)
        if pure:
            got = fused_adamw(p, scaled, m, v, step, 0.1, grad_scale=scale, skip=flag)
        else:
            new = [[x.clone() for x in xs] for xs in (p, m, v)]
            fused_adamw_(new[0], scaled, new[1], new[2], step, 0.1, grad_scale=scale, skip=flag)
            got = [x - y for x, y in zip(new[0], p, strict=True)], new[1], new[2]
        expected = ([torch.zeros_like(x) for x in p], m, v) if skip else want
        # in place, an update is a difference of parameters near 1
        torch.testing.assert_close(list(got), list(expected), rtol=1e-5, atol=1e-6)


def test_nan_goes_through_and_no_farther() -> None:
    p, g, m, v = leaves()
    g[0][2, 3] = math.nan
    updates, m_, v_ = fused_adamw(p, g, m, v, torch.tensor(1), 0.1)
    for x in (updates, m_, v_):
        assert x[0].isnan().sum() == 1
        assert not any(y.isnan().any() for y in x[1:])


# Every context


def flat(settings: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of (p, g, m, v, lr) for two leaves each, float64."""

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        *state, lr = xs
        lists = [list(state[i : i + 2]) for i in range(0, 8, 2)]
        out = fused_adamw(*lists, torch.tensor(3), lr, **settings)
        return tuple(x for part in out for x in part)

    return f


def arguments(*lead: int) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [(3,), (2, 2)] * 4
    xs = [torch.randn(*lead, *shape, dtype=torch.float64) for shape in shapes]
    xs[6:] = [x.abs() + 0.1 for x in xs[6:]]
    return [*xs, torch.tensor(0.1, dtype=torch.float64)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_derivatives_of_both_orders(settings: Any) -> None:
    xs = [x.requires_grad_() for x in arguments()]
    assert torch.autograd.gradcheck(flat(settings), xs)
    assert torch.autograd.gradgradcheck(flat(settings), xs)


def scalar(*xs: Tensor) -> Tensor:
    return torch.stack([x.sin().sum() for x in flat(SETTINGS[0])(*xs)]).sum()


def test_gradients_at_zero_moments_are_finite() -> None:
    xs = arguments()
    xs[2:8] = [torch.zeros_like(x) for x in xs[2:8]]
    grads = torch.func.grad(scalar, argnums=tuple(range(9)))(*xs)
    assert all(g.isfinite().all() for g in grads)


MAPS: dict[str, list[int | None]] = {
    "all": [0] * 8 + [None],
    "grads": [None, None, 0, 0] + [None] * 5,
    "one leaf": [0, None] * 4 + [None],
    "rate": [None] * 8 + [0],
    "all and rate": [0] * 9,
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("derive", [False, True], ids=["value", "grad"])
def test_maps_over_a_batch(name: str, derive: bool) -> None:
    dims = MAPS[name]
    whole = arguments(4)
    whole[-1] = torch.logspace(-3, -1, 4, dtype=torch.float64)
    xs = [x if dim == 0 else x[0] for x, dim in zip(whole, dims, strict=True)]
    f: Any = torch.func.grad(scalar, argnums=(0, 3, 8)) if derive else flat(SETTINGS[0])
    got = torch.func.vmap(f, tuple(dims))(*xs)
    for row in range(4):
        one = f(*[x if dim is None else x[row] for x, dim in zip(xs, dims, strict=True)])
        for x, y in zip(got, one, strict=True):
            torch.testing.assert_close(x[row], y)


def test_a_map_runs_the_fused_kernel_once() -> None:
    xs = arguments(4)
    mapped = torch.func.vmap(flat(SETTINGS[0]), (0,) * 8 + (None,))
    graph = make_fx(mapped, tracing_mode="fake")(*xs).graph
    assert sum(node.target is torch.ops.zero_fn.adamw.default for node in graph.nodes) == 1


def test_forward_mode_is_refused() -> None:
    xs = arguments()
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(scalar, tuple(xs), tuple(xs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles(backend: str) -> None:
    xs = arguments(4)
    f = torch.func.vmap(torch.func.grad(scalar, argnums=(2, 8)), (0,) * 8 + (None,))
    got = torch.compile(f, fullgraph=True, backend=backend)(*xs)
    torch.testing.assert_close(got, f(*xs))


# In place, by the pass


def test_the_pass_writes_donated_state_in_place_and_only_that() -> None:
    def step(state: Any, grads: Any, frozen: Any) -> Any:
        p, m, v = state
        updates, m, v = fused_adamw([p["a"], p["b"], frozen], grads, m, v, torch.tensor(1), 0.1)
        new = {"a": p["a"] + updates[0], "b": p["b"] + updates[1], "c": frozen + updates[2]}
        return (new, m, v), p["b"].sum()  # b is read afterwards

    p = {"a": torch.ones(3), "b": torch.ones(4)}
    frozen = torch.ones(2)
    m = [torch.zeros(3), torch.zeros(4), torch.zeros(2)]
    args = ((p, m, [x.clone() for x in m]), [torch.ones(3), torch.ones(4), torch.ones(2)], frozen)
    want = step(*args)
    program = update_in_place(trace(step, args, donate=(0,)))
    calls = {
        str(node.target): len(node.args[0])
        for node in program.graph_module.graph.nodes
        if "adamw" in str(node.target)
    }
    # b is read by the sum, and c's parameter was not donated
    assert calls == {"zero_fn.adamw_.default": 1, "zero_fn.adamw.default": 2}
    got = program(*args)
    torch.testing.assert_close(got, want)
    assert got[0][0]["a"].data_ptr() == p["a"].data_ptr()
    assert frozen.tolist() == [1, 1]


def test_a_gradient_that_is_the_parameter_itself_is_not_overwritten() -> None:
    def step(state: Any) -> Any:
        p, m, v = state
        updates, m, v = fused_adamw([p], [p], [m], [v], torch.tensor(1), 0.1)
        return p + updates[0], m[0], v[0]

    state = (torch.randn(5), torch.zeros(5), torch.zeros(5))
    want = step(state)
    torch.testing.assert_close(zf.jit(step, donate=0)(state), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": 1}, r"have \[6, 5, 6, 6\] leaves"),
        ({"shape": 1}, r"leaf 0: parameter, gradient and moments have shapes \[\(7, 5\), \(35,\)"),
        ({"weight_decay": [0.1]}, r"weight_decay has 1 factors for 6 leaves"),
        ({"step": torch.ones(1)}, r"step has shape \(1,\)"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    p, g, m, v = leaves()
    if "grads" in change:
        g = g[:5]
    if "shape" in change:
        g[0] = g[0].flatten()
    step = change.get("step", torch.tensor(1))
    with pytest.raises(ValueError, match=message):
        fused_adamw(p, g, m, v, step, 0.1, weight_decay=change.get("weight_decay", 0.0))
