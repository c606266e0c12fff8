"""The delayed update against a dense loop that applies the gradients of the step before."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .test_training import batches, mlp, mlp_loss

F64 = torch.float64


def dense(steps: int, start: int, clip: float | None = None) -> tuple[list[float], dict[str, Any]]:
    """torch.autograd and torch.optim alone; the gradients wait in a variable."""
    params = tree.map(lambda x: x.clone().requires_grad_(), mlp(F64))
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses, before = [], None
    for number, batch in enumerate(batches(steps, dtype=F64)):
        loss = mlp_loss(params, batch)
        losses.append(loss.item())
        grads = list(torch.autograd.grad(loss, leaves))
        if clip is not None:
            norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
            grads = [g * (clip / (norm + 1e-6)).clamp(max=1) for g in grads]
        applied = grads if number < start else before
        before = grads if number >= start else None
        if applied is not None:
            for leaf, g in zip(leaves, applied, strict=True):
                leaf.grad = g
            optimizer.step()
    return losses, tree.map(lambda x: x.detach(), params)


def run(
    steps: int, start: int, stage: int, place: str = "", **options: Any
) -> tuple[list[float], dict[str, Any]]:
    mesh = zf.Mesh(dp=3)
    optimizer = zf.delayed_update(zf.adamw(1e-2, weight_decay=0.1), start=start)
    init, step = zf.train_step(mlp_loss, optimizer, mesh, stage=stage, **options)
    with tempfile.TemporaryDirectory() as folder:
        state = init(mlp(F64))
        if place:
            state = zf.offload(state, Path(folder) / "state" if place == "disk" else place)
        losses = []
        for batch in batches(steps, dtype=F64):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        return losses, zf.gather_tree(state.params, mesh)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_trajectory_is_that_of_the_gradients_before(start: int, stage: int) -> None:
    losses, params = run(9, start, stage, clip=0.5)
    expected, expected_params = dense(9, start, clip=0.5)
    # float64: three ranks add up in another order than one, nine steps in turn
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(params, expected_params, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"place": "cpu"}, {"place": "disk"}, {"microbatches": 2}])
def test_in_combination(options: dict[str, Any]) -> None:
    found, expected = run(6, 2, 3, **options), run(6, 2, 3)
    if options.get("place"):
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][key], expected[1][key]) for key in ("scale", "out"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_steps_that_are_skipped_keep_what_waits() -> None:
    """A step that overflows changes nothing: the gradients before it are applied by the next."""
    optimizer = zf.delayed_update(zf.sgd(1.0), start=0)
    scale = zf.LossScale(initial=1.0)
    mesh = zf.Mesh(dp=1)
    init, step = zf.train_step(lambda p, x: (p * x).sum(), optimizer, mesh, loss_scale=scale)
    state = init(torch.zeros(1))
    seen = []
    for x in (1.0, 2.0, float("inf"), 4.0, 8.0):
        state, _ = step(state, torch.full((1,), x))
        seen.append(zf.gather_tree(state.params, mesh).item())
    assert seen == [0.0, -1.0, -1.0, -3.0, -7.0]


@pytest.mark.parametrize(("rate", "converges"), [(0.45, True), (0.9, True), (1.1, False)])
def test_gradient_descent_is_stable_for_half_the_rates(rate: float, converges: bool) -> None:
    """Along a curvature of 1: below 1 with the delay, below 2 without it."""

    def descended(optimizer: zf.Optimizer) -> float:
        p = torch.ones((), dtype=F64)
        state = optimizer.init(p)
        for _ in range(400):
            updates, state = optimizer.update(p, state, p)  # the gradient of p² / 2 is p
            p = zf.apply_updates(p, updates)
        return abs(p.item())

    assert (descended(zf.delayed_update(zf.sgd(rate), start=0)) < 1e-3) == converges
    assert descended(zf.sgd(rate)) < 1e-3


def test_errors_say_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"an \(init, update\) pair"):
        zf.delayed_update(zf.onebit_adam(1e-3, freeze_step=2), start=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start is -1"):
        zf.delayed_update(zf.sgd(0.1), start=-1)
