"""Activations on the host: the same numbers under every transform, and what is moved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacrev, jvp, vmap

import zero_fn as zf
from zero_fn import tree
from zero_fn.graphs import op_name
from zero_fn.models import gpt

from .memory import peak
from .test_remat import MAPPED, by_backward
from .test_transforms import CONFIG, gpt_batch

W = torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7)
X = torch.linspace(-2, 1, 15, dtype=torch.float64).view(3, 5)
XS = torch.stack([X, X.sin(), X.cos(), -X])

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def layer(w: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ w) * x.sum()).sin().exp()


def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda w, x: f(w, x).sum()


RUNS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "grad": lambda f: zf.grad(total(f), (0, 1))(W, X),
    "torch's grad": lambda f: torch.func.grad(total(f))(W, X),
    "backward": lambda f: by_backward(lambda p: f(p * W, X).sum()),
    "vmap(grad)": lambda f: vmap(zf.grad(total(f)), (None, 0))(W, XS),
    "grad(vmap)": lambda f: zf.grad(lambda w: vmap(f, (None, 0))(w, XS).sum())(W),
    "grad(vmap(vmap))": lambda f: zf.grad(
        lambda w: vmap(vmap(f, (1, None)), (None, 0))(torch.stack([w, 2 * w], 1), XS).sum()
    )(W),
    "jacrev": lambda f: jacrev(f)(W, X),
    "jvp": lambda f: jvp(lambda w: f(w, X), (W,), (W,)),
    "grad(grad)": lambda f: zf.grad(lambda w: zf.grad(total(f))(w, X).square().sum())(W),
    "jvp(grad)": lambda f: jvp(lambda w: zf.grad(total(f))(w, X), (W,), (W,)),
    "hessian": lambda f: hessian(lambda w: total(f)(w, X))(W),
    "grad, then backward": lambda f: by_backward(
        lambda p: zf.grad(total(f))(p * W, X).square().sum()
    ),
    "backward twice": lambda f: twice(lambda w: f(w, X).sum()),
    "jit(grad)": lambda f: zf.jit(zf.grad(total(f), (0, 1)))(W, X),
    "jit(vmap(grad))": lambda f: zf.jit(vmap(zf.grad(total(f)), (None, 0)))(W, XS),
    "not differentiated": lambda f: f(W, X),
    "compiled": lambda f: torch.compile(
        torch.func.grad(total(f)), backend="aot_eager", fullgraph=True
    )(W, X),
}


def twice(f: Callable[[Tensor], Tensor]) -> Tensor:
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(w), w, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), w)
    return second


WRAPS: dict[str, Wrap] = {
    "alone": zf.activation_offload,
    "weights stay": lambda f: zf.activation_offload(f, stay=0),
    "around remat": lambda f: zf.activation_offload(zf.remat(f)),
    "inside remat": lambda f: zf.remat(zf.activation_offload(f)),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", RUNS)
def test_the_same_numbers_bit_for_bit(name: str, wrap: str) -> None:
    if name == "compiled" and wrap != "alone":
        pytest.skip("activation_offload is then the function itself")
    expected, found = RUNS[name](layer), RUNS[name](WRAPS[wrap](layer))
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        if "remat" in wrap and name in ("grad(grad)", "hessian", "jvp(grad)"):
            # A second derivative through a recomputation adds up in another order: to float64
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", MAPPED)
def test_what_is_captured_at_a_level_of_vmap(name: str) -> None:
    assert torch.equal(MAPPED[name](zf.activation_offload), MAPPED[name](lambda f: f))


def moved(f: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what a derivative moves to the host."""
    program = zf.jit(zf.grad(total(f))).trace(*args)
    nodes = [n for n in program.graph_module.graph.nodes if op_name(n) == "zero_fn::to_host"]
    return [tuple(n.meta["val"].shape) for n in nodes]


def test_what_is_moved() -> None:
    assert moved(layer, W, X) == []
    assert moved(zf.activation_offload(layer, stay=(0, 1)), W, X).count((3, 5)) == 0
    assert (5, 7) not in moved(zf.activation_offload(layer), W, X)  # x is not differentiated
    both = zf.jit(zf.grad(total(zf.activation_offload(layer)), (0, 1))).trace(W, X)
    weights = [n for n in both.graph_module.graph.nodes if n.meta.get("val") is not None]
    hosts = [n for n in weights if op_name(n) == "zero_fn::to_host"]
    assert (5, 7) in [tuple(n.meta["val"].shape) for n in hosts]
    # remat saves its arguments alone.
    assert moved(zf.activation_offload(zf.remat(layer)), W, X) == [(5, 7), (3, 5)]
    assert moved(zf.activation_offload(zf.remat(layer), stay=0), W, X) == [(3, 5)]
    captured = X * 2
    assert (3, 5) not in moved(zf.activation_offload(lambda w, x: w.sum() * captured), W, X)


def test_a_value_that_several_operations_save_is_moved_once() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        return y.sin() + y.cos() + y.exp() * y

    # y, and the result of exp
    assert moved(zf.activation_offload(f, stay=(0, 1)), W, X) == [(3, 7), (3, 7)]
    assert moved(zf.activation_offload(lambda w, x: vmap(f, (None, 0))(w, x)), W, XS) == [
        (12, 5),
        (4, 3, 7),
        (4, 3, 7),
    ]


def test_a_tensor_that_is_mapped_two_ways_is_two_values() -> None:
    square = torch.arange(16, dtype=torch.float64).view(4, 4)
    w = torch.linspace(-1, 1, 4, dtype=torch.float64)

    def rows_and_columns(wrap: Wrap) -> Tensor:
        f = wrap(lambda w, a, b: (w * a).sum() + (w * w * b).sum())
        return vmap(lambda a, b: zf.grad(f)(w, a, b), (0, 1))(square, square)

    assert torch.equal(rows_and_columns(zf.activation_offload), rows_and_columns(lambda f: f))


def test_memory_that_is_used_again_is_another_value() -> None:
    """What was saved and is gone may leave its memory to the next value that is saved."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(20):
            w = (w * 1.01).sin()
        return w

    assert torch.equal(zf.grad(total(zf.activation_offload(f)))(W, X), zf.grad(total(f))(W, X))


def test_a_value_that_is_changed_in_place_is_another_value() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        y = w.detach() * 2
        a = y * w
        y.add_(1)
        return a + y * w

    # What was saved is a copy, so the change does no harm (without, autograd refuses it).
    found = zf.grad(total(zf.activation_offload(f)))(W, X)
    assert torch.equal(found, W * 2 + (W * 2 + 1))


def test_the_device_holds_less() -> None:
    """By the hooks alone, values that live on the host not counted."""
    w, x = torch.randn(64, 64), torch.randn(1000, 64)

    def deep(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def loss(w: Tensor) -> Tensor:
            y = x
            for _ in range(10):
                y = wrap(lambda w, y: torch.tanh(y @ w))(w, y)
            return y.sum()

        return loss

    hosts: list[int] = []
    size = 1000 * 64 * 4

    def on_host(f: Callable[..., Any]) -> Callable[..., Any]:
        return zf.activation_offload(f, stay=0)

    program = zf.jit(zf.grad(deep(on_host))).trace(w)
    for node in program.graph_module.graph.nodes:
        if op_name(node) == "zero_fn::to_host":
            hosts.append(node.meta["val"].nbytes)
    assert sum(hosts) == pytest.approx(20 * size, rel=0.1)
    plain = zf.jit(zf.grad(deep(lambda f: f))).trace(w).peak().bytes
    there = program.peak()
    assert plain > 10 * size
    assert there.bytes < 5 * size
    assert torch.equal(zf.grad(deep(on_host))(w), zf.grad(deep(lambda f: f))(w))
    assert peak(lambda: zf.grad(deep(on_host))(w), [w, x]) > 10 * size  # all of it is this memory


@pytest.mark.parametrize("stage", range(4))
def test_training_a_gpt(stage: int) -> None:
    """Over ranks, with blocks that are recomputed beside blocks whose activations are moved."""

    def run(wrap: Wrap) -> tuple[zf.TrainState, list[float]]:
        torch.manual_seed(0)
        params = gpt.init(CONFIG)
        batch = gpt_batch(6)

        def loss(params: Any, batch: Any) -> Tensor:
            return wrap(lambda p, b: gpt.loss(p, b, CONFIG))(params, batch)

        init, step = zf.train_step(
            loss, zf.adamw(1e-2), zf.Mesh(dp=3), stage=stage, clip=1.0, microbatches=2
        )
        state, losses = init(params), []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        return state, losses

    expected = run(lambda f: f)
    for stay in ((), (0,)):
        found = run(lambda f, stay=stay: zf.activation_offload(f, stay=stay))  # type: ignore[misc]
        assert found[1] == expected[1]
        for a, b in zip(tree.leaves(found[0]), tree.leaves(expected[0]), strict=True):
            assert torch.equal(a, b)


def test_errors_say_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"stay is 'w'"):
        zf.activation_offload(layer, stay="w")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stay names argument 2 of 'layer', which was given 2"):
        zf.activation_offload(layer, stay=2)(W, X)
    inner = zf.activation_offload(lambda w, x: zf.grad(total(layer))(w, x))
    with pytest.raises(ValueError, match=r"'<lambda>' takes a derivative itself"):
        W.clone().requires_grad_().sum() + inner(W.clone().requires_grad_(), X).sum()


def test_hooks_are_refused_again_afterwards() -> None:
    """What torch refuses inside its derivatives it refuses after the function, too."""

    def f(w: Tensor) -> Tensor:
        out = zf.activation_offload(torch.sin)(w).sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return out

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        zf.grad(f)(W)
