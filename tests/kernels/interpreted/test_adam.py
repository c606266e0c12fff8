"""The Triton Adam, interpreted: every variant against the formula, and all that memory can do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_fn.kernels import adam_run, adam_triton, fused_adamw, fused_adamw_
from zero_fn.kernels.reference import adamw_leaf, philox_bits, round_by_chance

# numpy, which the interpreter computes with, warns of each infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# None is a multiple of the block, one is larger than it.
SHAPES = [(7, 5), (), (0, 3), (1,), (adam_triton.BLOCK + 3,), (3, 2, 5)]


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go where CUDA tensors would."""

    def takes(leaf: Any) -> bool:
        return all(x.dtype in adam_triton.TYPES for x in (leaf.p, leaf.g, leaf.m, leaf.v))

    monkeypatch.setattr(adam_run, "_triton_takes", takes)


def leaves(p: torch.dtype, g: torch.dtype, state: torch.dtype) -> list[list[Tensor]]:
    """Parameters, gradients and moments."""
    torch.manual_seed(0)
    dtypes = (p, g, state, state)
    lists = [[torch.randn(s).to(dtype) for s in SHAPES] for dtype in dtypes]
    lists[3] = [x.abs() + 0.125 for x in lists[3]]
    return lists


def wanted(
    lists: list[list[Tensor]], decays: list[float], settings: dict[str, Any]
) -> list[list[Tensor]]:
    """Updates and moments in float64."""
    new = []
    for p, g, m, v, decay in zip(*lists, decays, strict=True):
        wide = [x.double() for x in (p, g, m, v)]
        new.append(
            adamw_leaf(
                *wide,
                settings["step"],
                settings["lr"],
                0.9,
                0.999,
                1e-8,
                decay,
                settings["decoupled"],
                settings["grad_scale"],
                settings["skip"],
            )
        )
    return [list(part) for part in zip(*new, strict=True)]


def close(got: list[Tensor], want: list[Tensor], size: float = 1.0) -> None:
    """Equal to a rounding of what it is stored in, and a few of float32 at values of ``size``."""
    for x, y in zip(got, want, strict=True):
        eps = max(torch.finfo(x.dtype).eps, 4 * torch.finfo(F32).eps)
        # a moment near 0 is a difference of a few times its parts' size
        torch.testing.assert_close(x.double(), y.double(), rtol=eps, atol=0.25 * eps * size)


DTYPES = [(F32, F32, F32), (F32, BF16, F32), (BF16, BF16, F32), (BF16, BF16, BF16), (F16, F16, F32)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"decoupled": False},
    {"grad_scale": torch.tensor(4.0), "skip": torch.tensor(False)},
    {"skip": torch.tensor(True)},
    {"grad_scale": torch.tensor(0.25, dtype=torch.float64), "decoupled": False},
]
# Every option at one dtype, and every dtype at the options that touch all of the arithmetic.
CASES = [(DTYPES[0], options) for options in OPTIONS]
CASES += [(dtypes, options) for dtypes in DTYPES[1:] for options in (OPTIONS[2], OPTIONS[4])]


@pytest.mark.parametrize(("dtypes", "options"), CASES, ids=str)
def test_pure_equals_the_formula(dtypes: Any, options: dict[str, Any]) -> None:
    lists = leaves(*dtypes)
    kept = [[x.clone() for x in xs] for xs in lists]
    decays = [0.1 * i for i in range(len(SHAPES))]
    settings = {"step": torch.tensor(3), "lr": torch.tensor(0.01), "decoupled": True}
    settings |= {"grad_scale": None, "skip": None} | options
    step, lr = settings.pop("step"), settings.pop("lr")
    got = fused_adamw(*lists, step, lr, weight_decay=decays, **settings)
    want = wanted(lists, decays, {"step": step, "lr": lr} | settings)
    for xs, ys, size in zip(got, want, (0.04, 1, 1), strict=True):
        close(xs, ys, size)  # an update is of order lr / (1 - beta1^3) = 0.04
    torch.testing.assert_close(lists, kept, rtol=0, atol=0)


@pytest.mark.parametrize(("dtypes", "options"), CASES, ids=str)
def test_in_place_is_the_pure_one_and_an_addition(dtypes: Any, options: dict[str, Any]) -> None:
    lists = leaves(*dtypes)
    copies = [torch.full_like(x, math.nan, dtype=BF16) for x in lists[0]]
    updates, m, v = fused_adamw(*lists, torch.tensor(3), 0.01, weight_decay=0.1, **options)
    want = [p.float() + u.float() for p, u in zip(lists[0], updates, strict=True)]
    fused_adamw_(*lists, torch.tensor(3), 0.01, weight_decay=0.1, copies=copies, **options)
    for x, y in zip(lists[0], want, strict=True):
        # an update is rounded once more when it is written out
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x.float(), y, rtol=eps, atol=0.02 * eps)
    torch.testing.assert_close(lists[2:], [m, v], rtol=0, atol=0)
    if dtypes[0] == F32:
        rounded = [p.to(BF16) for p in lists[0]]
        torch.testing.assert_close(copies, rounded, rtol=0, atol=0)


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize(("kind", "beta2"), [(ADAMW, 0.999), (ADAM, 0.95), (ADAMW, 0.5)])
def test_equals_torch_in_float64_over_100_steps(kind: Callable[..., Any], beta2: float) -> None:
    torch.manual_seed(0)
    params = [torch.randn(s) for s in [(33,)]]
    m, v = ([torch.zeros_like(x) for x in params] for _ in range(2))
    wide = [x.double().requires_grad_() for x in params]
    optimizer = kind(wide, lr=1e-2, betas=(0.9, beta2), weight_decay=0.1)
    for count in range(1, 101):
        grads = [torch.randn_like(x) for x in params]
        grads = [torch.zeros_like(x) for x in grads] if count % 7 == 0 else grads
        grads = [x * 1e-40 for x in grads] if count % 11 == 0 else grads  # denormals
        fused_adamw_(
            params,
            grads,
            m,
            v,
            torch.tensor(count),
            1e-2,
            beta2=beta2,
            weight_decay=0.1,
            decoupled=kind is ADAMW,
        )
        for x, g in zip(wide, grads, strict=True):
            x.grad = g.double()
        optimizer.step()
    for x, y in zip(params, wide, strict=True):
        torch.testing.assert_close(x.double(), y.detach(), rtol=1e-6, atol=1e-6)


def test_bias_correction_has_all_digits() -> None:
    """At every count, and at both sides of where the series ends."""
    for beta2 in (0.0, 0.9, 0.999, 0.9999):
        for count in [1, 2, 3, *range(5, 800, 53), 5000, 10**6]:
            state = [torch.tensor([x]) for x in (0.0, 0.0, 0.3, 0.2)]
            got = fused_adamw(*[[x] for x in state], torch.tensor(count), 1.0, beta2=beta2)
            want = adamw_leaf(
                *[x.double() for x in state],
                torch.tensor(count),
                torch.tensor(1.0, dtype=torch.float64),
                0.9,
                beta2,
                1e-8,
                0.0,
                True,
            )
            torch.testing.assert_close(got[0][0].double(), want[0], rtol=5e-7, atol=0)


def test_extreme_values_do_what_they_do_in_torch() -> None:
    grads = torch.tensor([math.nan, math.inf, 1e30, 0.0, 1e-40, 1e-21, -2.0])
    for eps in (1e-8, 0.0):
        p, m, v = torch.ones(7), torch.zeros(7), torch.zeros(7)
        wide = torch.ones(7).requires_grad_()
        optimizer = torch.optim.Adam([wide], lr=0.1, eps=eps)
        for count in range(1, 4):
            fused_adamw_([p], [grads], [m], [v], torch.tensor(count), 0.1, eps=eps)
            wide.grad = grads.clone()
            optimizer.step()
            torch.testing.assert_close(p, wide.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
        state = optimizer.state[wide]
        torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(m, state["exp_avg"], rtol=1e-6, atol=0, equal_nan=True)


def test_nothing_around_a_leaf_is_touched() -> None:
    """Leaves inside larger memory, aligned and not: every variant of the kernel's accesses."""
    for offset in (0, 16, 1):
        size = adam_triton.BLOCK + 5
        whole = [torch.full((size + 64,), 7.0) for _ in range(4)]
        inner = [x[offset : offset + size] for x in whole]
        values = [torch.rand(size) for _ in range(4)]
        for x, y in zip(inner, values, strict=True):
            x.copy_(y)
        fused_adamw_(*[[x] for x in inner], torch.tensor(2), 0.1)
        updates, m, v = fused_adamw(*[[x] for x in values], torch.tensor(2), 0.1)
        torch.testing.assert_close(inner[0], values[0] + updates[0])
        torch.testing.assert_close(inner[2:], [m[0], v[0]], rtol=0, atol=0)
        for x in whole:
            assert (x[:offset] == 7).all()
            assert (x[offset + size :] == 7).all()


def test_odd_memory_layouts() -> None:
    torch.manual_seed(0)
    p, m, v = (torch.rand(6, 4).T for _ in range(3))
    g = torch.ones(()).expand(4, 6)
    dense = [[x.contiguous()] for x in (p, g, m, v)]
    want = fused_adamw(*dense, torch.tensor(1), 0.1)
    torch.testing.assert_close(fused_adamw([p], [g], [m], [v], torch.tensor(1), 0.1), want)
    copies = [torch.zeros(6, 4).T]
    fused_adamw_([p], [g], [m], [v], torch.tensor(1), 0.1, copies=copies)
    torch.testing.assert_close([p, m, v], [dense[0][0] + want[0][0], want[1][0], want[2][0]])
    torch.testing.assert_close(copies[0], p)


def test_one_launch_for_a_tree_and_one_table_for_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = leaves(F32, F32, F32)
    launches = []
    whole = adam_triton._launch
    monkeypatch.setattr(adam_triton, "_launch", lambda *a: (launches.append(a), whole(*a)))
    adam_triton._leaf_tables.cache_clear()
    for count in range(1, 4):
        fused_adamw_(*lists, torch.tensor(count), 0.1)
    assert len(launches) == 3
    assert adam_triton._leaf_tables.cache_info().misses == 1
    fused_adamw_(*lists, torch.tensor(4), 0.1, weight_decay=0.1)  # in the table too
    assert adam_triton._leaf_tables.cache_info().misses == 2


def test_rounding_by_chance_is_the_reference_bit_for_bit() -> None:
    lists = leaves(BF16, BF16, F32)
    seed = torch.tensor(0x123456789ABCDEF)
    want = []
    for number, (p, g, m, v) in enumerate(zip(*lists, strict=True)):
        wide, *_ = fused_adamw([p.float()], [g], [m], [v], torch.tensor(3), 0.01)
        bits = philox_bits(seed, number, p.shape)
        want.append(round_by_chance(p.float() + wide[0], bits))
    nearest = [p.clone() for p in lists[0]]
    state = [[x.clone() for x in xs] for xs in lists[2:]]
    fused_adamw_(nearest, lists[1], *state, torch.tensor(3), 0.01)
    fused_adamw_(*lists, torch.tensor(3), 0.01, seed=seed)
    torch.testing.assert_close(lists[0], want, rtol=0, atol=0)
    assert any((x != y).any() for x, y in zip(lists[0], nearest, strict=True))


def test_rounding_by_chance_keeps_what_is_not_a_number() -> None:
    p = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 1.0], dtype=BF16)
    zeros = [torch.zeros(5)]
    fused_adamw_(
        [p], zeros, [torch.zeros(5)], [torch.zeros(5)], torch.tensor(1), 0.1, seed=torch.tensor(1)
    )
    want = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 1.0], dtype=BF16)
    torch.testing.assert_close(p, want, rtol=0, atol=0, equal_nan=True)


def test_memory_that_nobody_wrote_does_not_show() -> None:
    lists = leaves(F32, F32, F32)
    rows = []
    for number, (p, g, m, v) in enumerate(zip(*lists, strict=True)):
        poisoned = tuple(torch.full_like(p, math.nan) for _ in range(3))
        rows.append(adam_triton.Row(number, 0.1, (p, g, m, v), poisoned, None))
    settings = adam_triton.Settings(
        torch.tensor(1), torch.tensor(0.1), 0.9, 0.999, 1e-8, True, None, None, None
    )
    adam_triton.launch(rows, settings, pure=True)
    assert all(x.isfinite().all() for row in rows for x in row.write)
