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


def test_errors() -> None:
    with pytest.raises(ValueError, match="microbatches is 0"):
        zf.accumulate(mlp_loss, 0)
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(mlp_loss, zf.sgd(0.1), mesh, microbatches=5)
    with pytest.raises(ValueError, match=r"batch at '0': .* \(12, 7\), .* microbatches=5"):
        step(init(mlp()), batches(1)[0])
