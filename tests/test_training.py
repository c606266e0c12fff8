"""Training at every stage, in every interpreter, against a dense step that uses none of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes


def mlp(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Parameters whose shapes no axis divides: odd, 0-dim, smaller than the axis."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4).to(dtype)

    return {
        "in": {"weight": normal(7, 5), "bias": normal(5)},
        "scale": torch.tensor(1.3, dtype=dtype),
        "layers": [(normal(5, 5), normal(5)), (normal(5, 5), normal(5))],
        "out": normal(5, 3),
    }


def mlp_loss(params: dict[str, Any], batch: Any) -> torch.Tensor:
    x, y = batch
    h = torch.tanh(x @ params["in"]["weight"] + params["in"]["bias"]) * params["scale"]
    for weight, bias in params["layers"]:
        h = h + torch.tanh(h @ weight + bias)
    return F.cross_entropy(h @ params["out"], y)


def batches(
    steps: int, rows: int = 24, dtype: torch.dtype = torch.float32
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(rows, 7, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def dense_run(
    steps: int, dtype: torch.dtype = torch.float32, clip: float | None = None
) -> tuple[list[float], dict[str, Any]]:
    """torch.autograd and torch.optim alone."""
    params = tree.map(lambda x: x.clone().requires_grad_(), mlp(dtype))
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in batches(steps, dtype=dtype):
        loss = mlp_loss(params, batch)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, tree.map(lambda x: x.detach(), params)


def sharded_run(
    sizes: dict[str, int],
    stage: int,
    steps: int,
    clip: float | None = None,
    jit: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], dict[str, Any]]:
    """The same with this library, on whatever the mesh binds to."""
    mesh = zf.Mesh(**sizes)
    axis = tuple(sizes) if len(sizes) > 1 else "dp"
    optimizer = zf.adamw(1e-2, weight_decay=0.1)
    if clip is not None:
        optimizer = zf.chain(zf.clip_by_global_norm(clip), optimizer)

    def init(params: Any) -> zf.TrainState:
        params = zf.shard(params, stage, axis)
        return zf.TrainState(params, optimizer.init(params))

    def step(state: zf.TrainState, batch: Any) -> tuple[zf.TrainState, torch.Tensor]:
        def loss(params: Any) -> torch.Tensor:
            return zf.pmean(mlp_loss(zf.unshard(params), batch), axis)

        grads, value = zf.grad_and_value(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state), value

    run: Any = zf.spmd(step, mesh)
    if jit:
        run = zf.jit(run, donate=0)
    state = zf.spmd(init, mesh)(mlp(dtype))
    losses = []
    for batch in batches(steps, dtype=dtype):
        state, value = run(state, batch)
        losses.append(value.item())
    return losses, zf.gather_tree(state.params, mesh)


def assert_same_run(got: Any, want: Any, rtol: float) -> None:
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=rtol, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=rtol)


STEPS = 10


@pytest.fixture(scope="module")
def dense() -> Any:
    return dense_run(STEPS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 1},
        {"dp": 2},
        {"dp": 3},
        {"dp": 4},
        {"dp": 8},
        {"dp_outer": 2, "dp_inner": 3},
        {"dp_outer": 1, "dp_inner": 2},
    ],
    ids=lambda sizes: "x".join(map(str, sizes.values())),
)
def test_simulated_ranks_train_like_the_dense_step(sizes: Any, stage: int, dense: Any) -> None:
    # float32, other orders of summation: 1e-5 over ten steps
    assert_same_run(sharded_run(sizes, stage, STEPS), dense, 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_train_like_the_simulation(stage: int, dense: Any) -> None:
    simulated = sharded_run({"dp": 2}, stage, STEPS)
    for rank in run_on_processes(2, sharded_run, {"dp": 2}, stage, STEPS):
        assert_same_run(rank, simulated, 1e-6)
        assert_same_run(rank, dense, 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frozen": ["0"]}, "takes no frozen yet"),
        ({"buffers": {"mean": torch.ones(2)}}, "takes no buffers yet"),
        ({"dropout_key": zf.random.key(0)}, "its stages close over a key"),
    ],
)
def test_a_pipeline_refuses_what_it_would_drop(settings: dict[str, Any], message: str) -> None:
    pipe = zf.pipeline([lambda p, carry, batch: (batch * p).sum()], 1)
    with pytest.raises(ValueError, match=message):
        zf.train_step(pipe, zf.sgd(0.1), zf.Mesh(pp=1, dp=2), **settings)
