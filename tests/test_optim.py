"""Optimizers against torch.optim, and the norm and the clipping on every mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes
from .test_training import assert_same_run, dense_run, mlp, sharded_run

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[zf.Optimizer, Make]] = {
    "sgd": (zf.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (zf.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "nesterov": (
        zf.sgd(0.1, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    ),
    "adam": (zf.adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "adam_l2": (
        zf.adam(0.01, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
    "adamw": (
        zf.adamw(0.01, 0.8, 0.95, 1e-6, 0.1),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-6, 0.1),
    ),
    "chained_adam": (
        zf.chain(zf.scale_by_adam(), zf.scale_by_learning_rate(0.01)),
        lambda p: torch.optim.Adam(p, 0.01),
    ),
    "decay_then_sgd": (
        zf.chain(zf.add_decayed_weights(0.1), zf.sgd(0.1)),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch_in_float64(name: str) -> None:
    optimizer, make = OPTIMIZERS[name]
    params = mlp(torch.float64)
    theirs = tree.map(lambda x: x.clone().requires_grad_(), params)
    torch_optimizer = make(tree.leaves(theirs))
    state = optimizer.init(params)
    for count in range(50):
        torch.manual_seed(count)
        grads = tree.map(torch.randn_like, params)
        updates, state = optimizer.update(grads, state, params)
        params = zf.apply_updates(params, updates)
        for leaf, g in zip(tree.leaves(theirs), tree.leaves(grads), strict=True):
            leaf.grad = g.clone()
        torch_optimizer.step()
    torch.testing.assert_close(
        params, tree.map(lambda x: x.detach(), theirs), rtol=1e-10, atol=1e-12
    )


def test_a_mask_says_what_decays() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def mask(path: str, shape: tuple[int, ...]) -> bool:
        seen.append((path, shape))
        return len(shape) > 1

    params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    zeros = tree.map(torch.zeros_like, params)
    mesh = zf.Mesh(dp=2)
    optimizer = zf.adamw(0.1, weight_decay=0.5, mask=mask)

    def step(params: Any, zeros: Any) -> Any:
        pieces, zeros = zf.shard(params, 3), zf.shard(zeros, 3)
        updates, _ = optimizer.update(zeros, optimizer.init(pieces), pieces)
        return zf.apply_updates(pieces, updates)

    got = zf.gather_tree(zf.spmd(step, mesh, batch="replicated")(params, zeros), mesh)
    torch.testing.assert_close(got, {"w": torch.full((2, 3), 0.95), "b": torch.ones(3)})
    assert set(seen) == {("w", (2, 3)), ("b", (3,))}  # whole shapes, though cut


class Momentum(NamedTuple):
    trace: Any


class Foreign:
    """A duck-typed (init, update) pair, as another library would have it."""

    def init(self, params: Any) -> Momentum:
        return Momentum(tree.map(torch.zeros_like, params))

    def update(self, grads: Any, state: Momentum, params: Any = None) -> Any:
        trace = tree.map(lambda t, g: 0.9 * t + g, state.trace, grads)
        return tree.map(lambda t: -0.1 * t, trace), Momentum(trace)


def test_another_librarys_pair_works() -> None:
    mesh = zf.Mesh(dp=3)
    data = torch.randn(6, 4)

    def run(optimizer: Any) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return (x @ params["w"]).square().mean()

        init, step = zf.train_step(loss, optimizer, mesh, stage=2)
        state = init({"w": torch.ones(4, 5)})
        for _ in range(3):
            state, _ = step(state, data)
        return zf.gather_tree(state.params, mesh)

    torch.testing.assert_close(run(Foreign()), run(zf.sgd(0.1, 0.9)))


def norm_of(sizes: dict[str, int], stage: int) -> float:
    mesh = zf.Mesh(**sizes)
    axis = tuple(sizes) if len(sizes) > 1 else "dp"
    return zf.spmd(lambda g: zf.global_norm(zf.shard(g, stage, axis)), mesh)(mlp()).item()


SIZES = [{"dp": 1}, {"dp": 2}, {"dp": 3}, {"dp": 8}, {"dp_a": 2, "dp_b": 3}]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_global_norm_everywhere(sizes: Any, stage: int) -> None:
    dense = torch.nn.utils.get_total_norm(tree.leaves(mlp(torch.float64))).item()
    assert norm_of(sizes, stage) == pytest.approx(dense, rel=1e-6)


def test_the_norm_of_two_processes() -> None:
    dense = torch.nn.utils.get_total_norm(tree.leaves(mlp(torch.float64))).item()
    for stage in (0, 3):
        for rank in run_on_processes(2, norm_of, {"dp": 2}, stage):
            assert rank == pytest.approx(dense, rel=1e-6)


def test_the_norm_counts_each_axis_that_a_leaf_is_cut_on_and_only_those() -> None:
    mesh = zf.Mesh(dp=2, tp=3)
    params = {
        "both": torch.randn(12),
        "dp": torch.randn(5),
        "tp": torch.randn(7),
        "whole": torch.randn(3),
    }

    def norm(p: Any) -> Tensor:
        cut = {
            "both": zf.shard(p["both"], 1, ("dp", "tp")),
            "dp": zf.shard(p["dp"], 1, "dp"),
            "tp": zf.shard(p["tp"], 1, "tp"),
            "whole": p["whole"],
        }
        return zf.global_norm(cut)

    want = torch.cat(tree.leaves(params)).norm()
    torch.testing.assert_close(zf.spmd(norm, mesh)(params), want)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_equals_torchs(stage: int) -> None:
    want = dense_run(5, clip=0.05)
    assert_same_run(sharded_run({"dp": 3}, stage, 5, clip=0.05), want, 1e-5)


def test_the_metrics_name_the_norm_before_and_after() -> None:
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(
        lambda p, x: 100 * (x @ p).square().mean(), zf.sgd(0.0), mesh, stage=3, clip=0.5
    )
    _, metrics = step(init(torch.ones(4)), torch.ones(2, 4))
    assert set(metrics) == {"loss", "grad_norm", "grad_norm_clipped"}
    assert metrics["grad_norm"].item() == pytest.approx(1600, rel=1e-5)
    assert metrics["grad_norm_clipped"].item() == pytest.approx(0.5, rel=1e-5)


def test_the_gradient_of_clipping_sums_over_ranks() -> None:
    """The factor is the same on all ranks and meets pieces: differentiated as the dense one."""
    clip = zf.clip_by_global_norm(1.0)
    x = torch.randn(9, dtype=torch.float64) * 3

    def after(p: Any) -> Tensor:
        clipped, _ = clip.update(p, (), p)
        return clipped

    def meta(p: Any) -> Any:
        def loss(p: Any) -> Tensor:
            return zf.pmean(zf.unshard(after(p)).sin().sum(), "dp")

        return zf.grad(loss)(zf.shard(p, 3))

    mesh = zf.Mesh(dp=3)
    got = zf.gather_tree(zf.spmd(meta, mesh)(x), mesh)
    torch.testing.assert_close(got, torch.func.grad(lambda p: after(p).sin().sum())(x))


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (zf.constant(0.5), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (zf.warmup_linear(1.0, 2, 6), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (zf.warmup_linear(1.0, 0, 4, 0.2), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]),
        (zf.warmup_cosine(1.0, 2, 6), [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_schedules(schedule: Any, want: list[float]) -> None:
    got = [schedule(torch.tensor(count)).item() for count in range(7)]
    assert got == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zf.warmup_linear(1.0, 5, 5), "warmup is 5 and total 5"),
        (lambda: zf.clip_by_global_norm(0.0), "max_norm is 0.0"),
        (lambda: zf.sgd(0.1, nesterov=True), "momentum above 0"),
        (lambda: zf.adamw(0.1, b2=1.0), "b2 is 1.0"),
        (
            lambda: zf.train_step(lambda p, b: p, zf.sgd(0.1), zf.Mesh(dp=2), clip=-1.0),
            "clip is -1.0",
        ),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
