"""What only functions can do: torch.func's transforms over and inside a sharded step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt

from .test_training import batches, mlp, mlp_loss

CONFIG = gpt.Config(vocabulary=11, length=6, layers=2, heads=2, width=8)


def gpt_loss(params: Any, batch: Any) -> Tensor:
    return gpt.loss(params, batch, CONFIG)


def gpt_batch(rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocabulary, (rows, CONFIG.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer(
    loss_fn: Callable[..., Tensor], mesh: zf.Mesh, stage: int, steps: int
) -> Callable[..., Tensor]:
    """A function (learning rate, params, batch) to the loss after some steps of AdamW."""

    def run(rate: Tensor, params: Any, batch: Any) -> Tensor:
        optimizer = zf.adamw(rate, weight_decay=0.1)

        def program(params: Any, batch: Any) -> Tensor:
            def loss(pieces: Any) -> Tensor:
                return zf.pmean(loss_fn(zf.unshard(pieces), batch), "dp")

            pieces = zf.shard(params, stage)
            state = optimizer.init(pieces)
            for _ in range(steps):
                grads = zf.grad(loss)(pieces)
                updates, state = optimizer.update(grads, state, pieces)
                pieces = zf.apply_updates(pieces, updates)
            return loss(pieces)

        return zf.spmd(program, mesh)(params, batch)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_eight_learning_rates_in_one_program(stage: int) -> None:
    run = trainer(mlp_loss, zf.Mesh(dp=2), stage, 3)
    (batch,) = batches(1)
    rates = torch.logspace(-3, -1, 8)
    together = torch.func.vmap(run, (0, None, None))(rates, mlp(), batch)
    one_by_one = torch.stack([run(rate, mlp(), batch) for rate in rates])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    assert len(set(one_by_one.tolist())) == 8


def test_a_sweep_over_whole_states_of_a_gpt() -> None:
    """vmap over the step itself: eight states in, eight states out."""
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(gpt_loss, zf.adamw(1e-2), mesh, stage=3, donate=False)
    states = [init(gpt.init(CONFIG, seed)) for seed in range(3)]
    batch = gpt_batch(4)
    stacked = tree.map(lambda *xs: torch.stack(xs), *states)
    together, metrics = torch.func.vmap(step, (0, None))(stacked, batch)
    for place, state in enumerate(states):
        alone, want = step(state, batch)
        torch.testing.assert_close(metrics["loss"][place], want["loss"])
        for x, y in zip(tree.leaves(together), tree.leaves(alone), strict=True):
            torch.testing.assert_close(x[place], y, rtol=1e-5, atol=1e-6)


def hessian_vector(loss: Callable[[Any], Tensor], params: Any, direction: Any) -> Any:
    def slope(params: Any) -> Tensor:
        grads = tree.leaves(zf.grad(loss)(params))
        return sum(
            ((g * v).sum() for g, v in zip(grads, tree.leaves(direction), strict=True)),
            torch.zeros((), dtype=torch.float64),
        )

    return zf.grad(slope)(params)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_hessian_vector_product_through_pieces(model: str, stage: int) -> None:
    if model == "mlp":
        params, loss_fn, batch = mlp(torch.float64), mlp_loss, batches(1, dtype=torch.float64)[0]
    else:
        params = tree.map(torch.Tensor.double, gpt.init(CONFIG))
        params["head"] = params["tokens"] + 0
        loss_fn, batch = gpt_loss, gpt_batch(6)
    direction = tree.map(torch.randn_like, params)
    mesh = zf.Mesh(dp=3)

    def program(state: Any, batch: Any) -> Any:
        params, direction = zf.shard(state[0], stage), zf.shard(state[1], stage)

        def loss(pieces: Any) -> Tensor:
            return zf.pmean(loss_fn(zf.unshard(pieces), batch), "dp")

        def slope(pieces: Any) -> Tensor:
            # Pieces of different ranks are different numbers: their products add over the axis.
            # At stage 0 every rank has all of them.
            pairs = zip(tree.leaves(zf.grad(loss)(pieces)), tree.leaves(direction), strict=True)
            total = sum(((g * v).sum() for g, v in pairs), torch.zeros((), dtype=torch.float64))
            return total if stage == 0 else zf.psum(total, "dp")

        return zf.grad(slope)(params)

    got = zf.gather_tree(zf.spmd(program, mesh)((params, direction), batch), mesh)
    want = hessian_vector(lambda p: loss_fn(p, batch), params, direction)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_derivative_by_the_learning_rate_through_two_steps(stage: int) -> None:
    run = trainer(mlp_loss, zf.Mesh(dp=2), stage, 2)
    params, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    rate = torch.tensor(0.03, dtype=torch.float64)
    slope = torch.func.grad(run)(rate, params, batch)
    step = 1e-6
    difference = (run(rate + step, params, batch) - run(rate - step, params, batch)) / (2 * step)
    # a central difference in float64: 1e-12 of truncation, 1e-10 of rounding, of a loss near 1
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)


def test_per_sample_gradients_under_stage_3() -> None:
    mesh = zf.Mesh(dp=2)
    x, y = batches(1, rows=8, dtype=torch.float64)[0]
    params = mlp(torch.float64)

    def one(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return mlp_loss(params, (x[None], y[None]))

    def program(params: Any, batch: Any) -> Tensor:
        whole = zf.unshard(zf.shard(params, 3))
        grads = torch.func.vmap(zf.grad(one), (None, 0, 0))(whole, *batch)
        squares = [g.reshape(len(g), -1).square().sum(1) for g in tree.leaves(grads)]
        return zf.all_gather(torch.stack(squares).sum(0).sqrt(), "dp")

    norms = zf.spmd(program, mesh)(params, (x, y))
    want = [
        torch.cat([g.flatten() for g in tree.leaves(zf.grad(one)(params, a, b))]).norm()
        for a, b in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(norms, torch.stack(want))
