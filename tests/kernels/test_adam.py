"""Fused Adam: equal to torch's in float64, in place and pure, in every context of torch.func."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero_fn as zf
from zero_fn.kernels import adam_run, fused_adamw, fused_adamw_
from zero_fn.kernels.reference import philox_bits, round_by_chance
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
        # In place torch's kernel multiplies by 1 - lr * decay, rounded to float32: up to 3e-8 of
        # the parameter a step, and always to the same side.
        atol = 3e-6 if not pure and settings == SETTINGS[0] else 1e-6
        torch.testing.assert_close(x.double(), y.detach(), rtol=1e-6, atol=atol)


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


def test_a_learning_rate_is_learned_through_two_steps() -> None:
    """The derivative of a loss by the learning rate of the two steps before it."""

    weights = torch.arange(1.0, 6.0, dtype=torch.float64)

    def loss(p: Tensor) -> Tensor:
        return (p.sin() * weights).sum()

    def after_two_steps(lr: Tensor) -> Tensor:
        p, m, v = weights / 5, torch.zeros_like(weights), torch.zeros_like(weights)
        for count in (1, 2):
            g = torch.func.grad(loss)(p)
            (update,), (m,), (v,) = fused_adamw([p], [g], [m], [v], torch.tensor(count), lr)
            p = p + update
        return loss(p)

    rates = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(after_two_steps, [rates[1].clone().requires_grad_()])
    slopes = torch.func.vmap(torch.func.grad(after_two_steps))(rates)
    for slope, rate in zip(slopes, rates, strict=True):
        assert abs(slope.item()) > 0.1
        torch.testing.assert_close(slope, torch.func.grad(after_two_steps)(rate))


# Storage


def test_one_call_for_leaves_of_one_dtype_and_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = adam_run.fused_
    monkeypatch.setattr(
        adam_run, "fused_", lambda *args: (calls.append(len(args[0][0])), kernel(*args))
    )
    p, g, m, v = leaves()
    wide = [[x.double() for x in xs] for xs in (p, g, m, v)]
    lists = [xs + ys for xs, ys in zip((p, g, m, v), wide, strict=True)]
    fused_adamw_(*lists, torch.tensor(1), 0.1, weight_decay=[0.1, 0.2] * 6)
    assert sorted(calls) == [2, 2, 3, 3]  # two dtypes, two decays, without the empty leaves


def test_in_place_takes_no_memory_of_the_size_of_a_leaf() -> None:
    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = {x.data_ptr() for x in torch.utils._pytree.tree_leaves(args) if _is_tensor(x)}
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if _is_tensor(x) and x.data_ptr() not in given and not func.is_view:
                    self.seen = max(self.seen, x.numel())
            return out

    size = 3 * adam_run.PIECE + 5
    for dtype, scale in ((torch.float32, None), (torch.bfloat16, None), (None, torch.tensor(2.0))):
        lists = [[torch.ones(size)] for _ in range(4)]
        lists[1] = [lists[1][0].to(dtype or torch.float32)]
        rest = adam_run.Rest(
            torch.tensor(1), torch.tensor(0.1), 0.9, 0.999, 1e-8, [0.1], True, scale, None
        )
        with Largest() as largest:
            adam_run.in_place(lists, rest)
        assert largest.seen <= adam_run.PIECE
        want = fused_adamw(*[[torch.ones(1)] for _ in range(4)], torch.tensor(1), 0.1,
                           weight_decay=0.1, grad_scale=scale)  # fmt: skip
        torch.testing.assert_close(lists[0][0], (1 + want[0][0]).expand(size))


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_working_copy_is_the_new_parameter(dtype: torch.dtype) -> None:
    lists = leaves(dtype)
    copies = [torch.full_like(x, math.nan, dtype=torch.bfloat16) for x in lists[0]]
    plain = [[x.clone() for x in xs] for xs in lists]
    fused_adamw_(*lists, torch.tensor(1), 0.1, copies=copies)
    fused_adamw_(*plain, torch.tensor(1), 0.1)
    torch.testing.assert_close(lists, plain, rtol=0, atol=0)
    torch.testing.assert_close(copies, [p.bfloat16() for p in lists[0]], rtol=0, atol=0)


def test_moments_wider_than_the_parameter() -> None:
    p, g, m, v = leaves()
    p = [x.bfloat16() for x in p]
    want = fused_adamw([x.float() for x in p], g, m, v, torch.tensor(3), 0.1)
    got = fused_adamw(p, g, m, v, torch.tensor(3), 0.1)
    torch.testing.assert_close(got[0], [x.bfloat16() for x in want[0]])
    torch.testing.assert_close(got[1:], want[1:])
    new = [x.float() + y for x, y in zip(p, want[0], strict=True)]
    fused_adamw_(p, g, m, v, torch.tensor(3), 0.1)
    torch.testing.assert_close(p, [x.bfloat16() for x in new])


def test_random_bits_are_those_of_the_paper() -> None:
    """The known answer of Philox 4x32-7 that comes with its authors' implementation."""
    bits = philox_bits(torch.tensor(0), 0, torch.Size([3]))
    assert bits[0].item() == 0x5F6FB709
    many = philox_bits(torch.tensor(7), 3, torch.Size([1 << 16])).double() / 2**32
    # the mean of 65536 uniform numbers: 0.5 with a deviation of 0.0011
    assert abs(many.mean().item() - 0.5) < 5e-3
    assert 0 <= many.min() < 1e-3
    assert 0.999 < many.max() < 1


def test_rounding_by_chance_keeps_the_mean_and_small_updates() -> None:
    x = torch.full((1 << 16,), 1.0 + 2**-10)  # an eighth of the way to the next bfloat16
    for sign in (1, -1):
        rounded = round_by_chance(sign * x, philox_bits(torch.tensor(1), 0, x.shape))
        values = (sign * rounded.float()).unique()
        assert values.tolist() == [1.0, 1.0 + 2**-7]
        # 1/8 of the values go up; the deviation of their mean is 2^-7 * 0.0013
        assert abs((sign * rounded.float()).mean().item() - (1 + 2**-10)) < 5e-5
    exact = torch.tensor([1.5, -0.0, math.inf, -math.inf, math.nan, 1e-40])
    exact[5] = torch.tensor(2.0) ** -133  # denormal, and a bfloat16
    got = round_by_chance(exact, torch.full((6,), 0xFFFF))
    torch.testing.assert_close(got.float(), exact, rtol=0, atol=0, equal_nan=True)

    # lr = 1e-4 is far below half a digit of 1.0: nearest rounding never moves
    p, m, v = (
        [torch.full((4096,), x, dtype=d)]
        for x, d in ((1.0, torch.bfloat16), (0.0, None), (0.0, None))
    )
    moved = [p[0].clone()]
    state = [[x[0].clone()] for x in (m, v)]
    for count in range(1, 11):
        g, step = [torch.ones(4096)], torch.tensor(count)
        fused_adamw_(p, g, m, v, step, 1e-4)
        fused_adamw_(moved, g, *state, step, 1e-4, seed=torch.tensor(count))
    assert (p[0] == 1).all()
    # ten steps of 1e-4; the deviation of the mean is sqrt(0.001 * 2^-8 / 4096) = 3e-5
    assert moved[0].double().mean().item() == pytest.approx(1 - 1e-3, abs=1.5e-4)


# Refusals


def test_in_place_refuses_what_has_no_derivative() -> None:
    lists = [[torch.rand(3)] for _ in range(4)]

    def f(g: Tensor) -> Tensor:
        p, m, v = ([x[0].clone()] for x in (lists[0], lists[2], lists[3]))
        fused_adamw_(p, [g], m, v, torch.tensor(1), 0.1)
        return p[0].sum()

    g = torch.rand(3)
    with pytest.raises(RuntimeError, match="requires grad; an update in place has no derivative"):
        torch.func.grad(f)(g)
    with pytest.raises(RuntimeError, match="requires grad"):
        f(g.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="forward-mode tangent"):
        torch.func.jvp(f, (g,), (g,))
    with pytest.raises(RuntimeError, match="forward-mode tangent"):
        torch.compile(lambda g: torch.func.jvp(f, (g,), (g,)), fullgraph=True, backend="eager")(g)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.func.vmap(f)(torch.rand(2, 3))
    with torch.no_grad():
        f(g.clone().requires_grad_())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_place_compiles(backend: str) -> None:
    lists, plain = leaves(), leaves()
    ready = torch.compile(fused_adamw_, fullgraph=True, backend=backend)
    ready(*lists, torch.tensor(2), 0.1)
    fused_adamw_(*plain, torch.tensor(2), 0.1)
    torch.testing.assert_close(lists, plain)


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
        ({"dtype": torch.int64}, r"leaf 0: .* must be real floating-point"),
        ({"copies": []}, r"copies have shapes \[\], the parameters \[\(7, 5\)"),
        ({"seed": torch.tensor(1.0)}, r"seed is a torch.float32 tensor"),
        ({"seed": torch.tensor(1), "dtype": torch.float16}, r"leaf 0: its parameter is float16"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    p, g, m, v = leaves()
    if "grads" in change:
        g = g[:5]
    if "shape" in change:
        g[0] = g[0].flatten()
    if "dtype" in change:
        p[0] = p[0].to(change["dtype"])
    step, decay = change.get("step", torch.tensor(1)), change.get("weight_decay", 0.0)
    only_in_place = {name: change[name] for name in ("copies", "seed") if name in change}
    with pytest.raises(ValueError, match=message):
        fused_adamw_(p, g, m, v, step, 0.1, weight_decay=decay, **only_in_place)
    if not only_in_place:
        with pytest.raises(ValueError, match=message):
            fused_adamw(p, g, m, v, step, 0.1, weight_decay=decay)
