"""A pipeline on processes: each rank its own stages, the numbers of the dense step."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import run_on_processes

from .stages import CUTS, assert_same, batches, dense, dense_run, make


def once(ranks: int, stages: int, microbatches: int, name: str, placed: bool, tied: bool) -> Any:
    cut, (batch,) = CUTS[stages], batches()
    mesh = zf.Mesh(pp=ranks)
    pipe = zf.pipeline(cut, microbatches, name)
    params: Any = make(cut, tied=tied)
    if placed:
        params = zf.spmd(pipe.place, mesh)(params)
    grads, value = zf.spmd(pipe, mesh)(params, batch)
    return zf.gather_tree(zf.spmd(pipe.collect, mesh)(grads), mesh), value


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks(placed: bool, tied: bool) -> None:
    for name, stages in [
        ("gpipe", 2),
        ("1f1b", 2),
        ("zero_bubble", 2),
        ("interleaved", 4),
        ("zbv", 4),
        ("dualpipev", 4),
    ]:
        for microbatches in (1, 4):
            cut, (batch,) = CUTS[stages], batches()
            want, of_whole = dense(cut, make(cut, tied=tied), batch)
            for grads, value in run_on_processes(
                2, once, 2, stages, microbatches, name, placed, tied
            ):
                assert_same(grads, want)
                assert_same(value, of_whole)


def train(
    axes: dict[str, int], stages: int, name: str, stage: int, steps: int, jitted: bool
) -> Any:
    """AdamW, clipped, tied, on processes or simulated ranks: losses, and all parameters."""
    mesh, cut = zf.Mesh(**axes), CUTS[stages]

    def last(p: Any, carry: Any, batch: Any) -> Any:
        return zf.pmean(cut[-1](p, carry, batch), "dp")

    pipe = zf.pipeline([*cut[:-1], last], 4, name)
    optimizer = zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(1e-2, weight_decay=0.1))

    def init(params: Any) -> Any:
        params = pipe.place(zf.shard(params, stage))
        return zf.TrainState(params, optimizer.init(params))

    def step(state: Any, batch: Any) -> Any:
        grads, value = pipe(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state), value

    state, run = zf.spmd(init, mesh)(make(cut, tied=True)), zf.spmd(step, mesh)
    if jitted:
        run = zf.jit(run, donate=0)
    losses = []
    for batch in batches(steps):
        state, value = run(state, batch)
        losses.append(value.item())
    return losses, zf.gather_tree(zf.spmd(pipe.collect, mesh)(state.params), mesh)


def assert_trained(got: Any, want: Any) -> None:
    for losses, params in got:
        # float64, a few steps
        assert torch.allclose(torch.tensor(losses), torch.tensor(want[0]), rtol=0, atol=1e-10)
        assert_same(params, want[1], 1e-9)


@pytest.mark.parametrize("jitted", [False, True])
def test_training_on_two_by_two_ranks(jitted: bool) -> None:
    """ZeRO's stages 0 to 3 over dp within each stage of the pipeline, for 10 steps."""
    for name, stages, stage in [
        ("1f1b", 2, 0),
        ("zero_bubble", 2, 1),
        ("zbv", 4, 2),
        ("1f1b", 2, 3),
    ]:
        want = dense_run(CUTS[stages], make(CUTS[stages], tied=True), batches(10), clip=0.5)
        axes = {"pp": 2, "dp": 2}
        assert_trained(run_on_processes(4, train, axes, stages, name, stage, 10, jitted), want)


def test_training_on_four_ranks() -> None:
    """One of them has a stage without parameters, and takes part in every norm."""
    for name, stages in [("1f1b", 4), ("interleaved", 8), ("zbv", 8)]:
        want = dense_run(CUTS[stages], make(CUTS[stages], tied=True), batches(3), clip=0.5)
        got = run_on_processes(4, train, {"pp": 4, "dp": 1}, stages, name, 0, 3, False)
        assert_trained(got, want)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("name", "stages"), [("1f1b", 2), ("interleaved", 4), ("zbv", 4)])
def test_simulated_ranks_train_alike(name: str, stages: int, jitted: bool) -> None:
    want = dense_run(CUTS[stages], make(CUTS[stages], tied=True), batches(3), clip=0.5)
    for axes in ({"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 2}):
        assert_trained([train(axes, stages, name, 1, 3, jitted)], want)
