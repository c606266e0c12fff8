"""Micro-batches: equal to one big batch, with as many collectives as the stage's policy says."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes
from .test_training import assert_same_run, batches, dense_run, mlp, mlp_loss


def run(stage: int, microbatches: int, ranks: int, steps: int) -> Any:
    mesh = zf.Mesh(dp=ranks)
    optimizer = zf.adamw(1e-2, weight_decay=0.1)
    init, step = zf.train_step(
        mlp_loss, optimizer, mesh, stage=stage, microbatches=microbatches, clip=0.05
    )
    state, losses = init(mlp()), []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, zf.gather_tree(state.params, mesh)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_equals_one_big_batch(stage: int, microbatches: int) -> None:
    want = dense_run(5, clip=0.05)
    # float32, other orders of summation
    assert_same_run(run(stage, microbatches, 2, 5), want, 1e-5)


def test_on_processes() -> None:
    for stage in (1, 2, 3):
        want = run(stage, 3, 2, 3)
        for rank in run_on_processes(2, run, stage, 3, 2, 3):
            assert_same_run(rank, want, 1e-6)


@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"), [(0, 0, 0), (1, 1, 1), (2, 1, 3), (3, 3, 3)]
)
def test_a_stage_is_a_policy(stage: int, gathers: int, reductions: int) -> None:
    """How often each leaf is gathered, and its gradient reduced, over three micro-batches."""
    mesh = zf.Mesh(dp=2).abstract()
    init, step = zf.train_step(mlp_loss, zf.sgd(0.1), mesh, stage=stage, microbatches=3)
    step = zf.jit(step.f, donate=0, skip=("bucket",))  # type: ignore[attr-defined]
    program = step.trace(init(mlp()), batches(1)[0])
    leaves = len(tree.leaves(mlp()))
    calls = {c.kind: c.calls for c in program.collectives()}
    assert calls.get("all_gather", 0) == gathers * leaves
    assert calls.get("reduce_scatter", 0) == reductions * leaves
    # the loss, and at stage 0 each gradient, once
    assert calls["all_reduce"] == 1 + (leaves if stage == 0 else 0)


def test_tied_weights_and_leaves_that_are_not_sharded() -> None:
    w, scale = torch.randn(4, 4), torch.tensor(0.7)
    x = torch.randn(12, 4)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["a"]) @ p["b"] * p["scale"]).square().mean()

    def program(params: Any, x: torch.Tensor) -> Any:
        pieces = zf.shard({"a": params["a"], "b": params["b"]}, 2)
        pieces["scale"] = zf.pvary(params["scale"], "dp")
        grads, value = zf.accumulate(loss, 3)(pieces, x)
        grads["scale"] = zf.psum(grads["scale"], "dp")
        return grads, value

    mesh = zf.Mesh(dp=2)
    grads, value = zf.spmd(program, mesh)({"a": w, "b": w, "scale": scale}, x)
    dense = {"a": w.clone().requires_grad_(), "scale": scale.clone().requires_grad_()}
    want = loss({**dense, "b": dense["a"]}, x)
    want.backward()
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(grads["scale"], dense["scale"].grad)
    torch.testing.assert_close(zf.gather_tree(grads, mesh)["b"], dense["a"].grad)


def ragged(steps: int, dtype: torch.dtype) -> list[Any]:
    """Rows with labels missing here and there (-100), on one rank's micro-batch nearly all."""
    generator = torch.Generator().manual_seed(8)
    data = []
    for x, y in batches(steps, dtype=dtype):
        missing = torch.rand(len(y), generator=generator) < 0.4
        missing[:4] = torch.tensor([True, True, True, False])
        missing[12:16] = True  # one with none at all
        data.append((x, torch.where(missing, -100, y)))
    return data


def token_loss(params: Any, batch: Any) -> Any:
    x, y = batch
    known = y >= 0
    rows = mlp_loss_of_rows(params, x, y.clamp(min=0))
    return (rows * known).sum() / known.sum().clamp(min=1), known.sum()


def mlp_loss_of_rows(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mlp_loss(params, (x[None], y[None]))

    return torch.func.vmap(one)(x, y)


def ragged_run(stage: int, microbatches: int, ranks: int) -> Any:
    mesh = zf.Mesh(dp=ranks)
    init, step = zf.train_step(
        token_loss,
        zf.adamw(1e-2, weight_decay=0.1),
        mesh,
        stage=stage,
        microbatches=microbatches,
        clip=0.05,
    )
    state, losses = init(mlp(torch.float64)), []
    for batch in ragged(4, torch.float64):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, zf.gather_tree(state.params, mesh)


def dense_ragged() -> Any:
    params = tree.map(lambda x: x.clone().requires_grad_(), mlp(torch.float64))
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses = []
    for x, y in ragged(4, torch.float64):
        loss = mlp_loss(params, (x, y))  # a mean over the labels that are not -100
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.05)
        optimizer.step()
        losses.append(loss.item())
    return losses, tree.map(lambda x: x.detach(), params)


def assert_same_ragged(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-12)  # float64, in other orders of summation
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ragged_microbatches_equal_one_big_batch(stage: int) -> None:
    want = dense_ragged()
    for microbatches in (1, 6):
        assert_same_ragged(ragged_run(stage, microbatches, 2), want)
    if stage == 2:
        for rank in run_on_processes(2, ragged_run, stage, 3, 2):
            assert_same_ragged(rank, want)


@pytest.mark.parametrize("reduce", [True, False])
def test_gradients_with_weights(reduce: bool) -> None:
    """Reduced, or each rank's own, whose mean over the ranks is the big batch's."""

    def loss(w: torch.Tensor, batch: Any) -> Any:
        x, weight = batch
        return (w * x * weight[:, None]).sum() / weight.sum(), weight.sum()

    def program(w: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        pieces = zf.shard(w, 1)
        grads, value = zf.accumulate(loss, 2, reduce=reduce)(pieces, (x, weight))
        return (grads if reduce else zf.pmean(grads, "dp")), value

    torch.manual_seed(2)
    w, x, weight = torch.randn(5), torch.randn(8, 5), torch.rand(8)
    mesh = zf.Mesh(dp=2)
    grads, value = zf.spmd(program, mesh)(w, x, weight)
    want = (x * weight[:, None]).sum(0) / weight.sum()
    torch.testing.assert_close(zf.gather_tree(grads, mesh), want)
    torch.testing.assert_close(value, want @ w)


def test_no_tokens_anywhere_change_nothing() -> None:
    init, step = zf.train_step(token_loss, zf.sgd(0.1), zf.Mesh(dp=2), microbatches=2, donate=False)
    x, y = batches(1)[0]
    state = init(mlp())
    new, metrics = step(state, (x, torch.full_like(y, -100)))
    assert metrics["loss"] == 0
    torch.testing.assert_close(tree.leaves(new.params), tree.leaves(state.params))


def weighted_mean(x: torch.Tensor, weight: torch.Tensor) -> Any:
    def program(_: None, x: torch.Tensor, weight: torch.Tensor) -> Any:
        def mean(x: torch.Tensor) -> torch.Tensor:
            return zf.pmean(x[0], "dp", weight[0])

        return mean(x), zf.all_gather_invariant(zf.grad(mean)(x), "dp")

    return zf.spmd(program, zf.Mesh(dp=2))(None, x, weight)


def test_means_with_weights() -> None:
    x, weight = torch.tensor([2.0, 5.0]), torch.tensor([3, 1])
    for value, gradient in (
        weighted_mean(x, weight),
        *run_on_processes(2, weighted_mean, x, weight),
    ):
        assert value == 11 / 4
        assert gradient.tolist() == [0.75, 0.25]


def test_errors() -> None:
    with pytest.raises(TypeError, match="the mean loss, or a pair of that and its weight"):
        zf.train_step(lambda p, x: (x.sum(), 3), zf.sgd(0.1), zf.Mesh(dp=2)).step(
            zf.TrainState(torch.ones(()), zf.sgd(0.1).init(None)), torch.ones(2)
        )
    with pytest.raises(ValueError, match="microbatches is 0"):
        zf.accumulate(mlp_loss, 0)
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(mlp_loss, zf.sgd(0.1), mesh, microbatches=5)
    with pytest.raises(ValueError, match=r"batch at '0': .* \(12, 7\), .* microbatches=5"):
        step(init(mlp()), batches(1)[0])
