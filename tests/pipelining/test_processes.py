"""A pipeline on processes: each rank its own stages, the numbers of the dense step."""

import os
import time
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import ProcessPool, RankError, run_on_processes
from zero_fn import tree
from zero_fn.graphs import op_name
from zero_fn.pipelining.work import PipelineError

from .stages import CUTS, assert_same, batches, block, dense, dense_run, embed, make, plain, tail


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


def weighted(uneven: bool) -> Any:
    (batch,), mesh = batches(), zf.Mesh(pp=2)
    last, microbatches = (tail, 5) if uneven else (counted, 4)
    pipe = zf.pipeline([embed, last], microbatches, uneven=uneven)
    placed = zf.spmd(pipe.place, mesh)(make(CUTS[2]))
    grads, value = zf.spmd(pipe, mesh)(placed, batch)
    return zf.spmd(pipe.collect, mesh)(grads), value


def counted(params: Any, carry: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose weight is not that of its rows."""
    weight = (batch[1] != 0).sum()
    return tail(params, carry, batch) / weight, weight


def test_weights_and_uneven_micro_batches() -> None:
    (batch,) = batches()
    params = make(CUTS[2])
    weights = [(part != 0).sum() for part in batch[1].chunk(4)]
    want, of_whole = dense(CUTS[2], params, batch)
    for grads, value in run_on_processes(2, weighted, True):
        assert_same(grads, want)
        assert_same(value, of_whole)
    # each mean is divided by its weight and multiplied by it again: 4 equal parts in all
    total = 4 / float(sum(weights))
    for grads, value in run_on_processes(2, weighted, False):
        assert_same(grads, tree.map(lambda g: g * total, want))
        assert_same(value, of_whole * total)


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


def two_steps() -> Any:
    """A step that fails on one micro-batch of one stage, and a good one after it."""
    mesh = zf.Mesh(pp=2)
    pipe = zf.pipeline([embed, picks_last], 4)
    params = zf.spmd(pipe.place, mesh)(make([embed, tail]))
    good, bad = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    bad[9] = 6  # what it indexes has rows 0 to 6
    heard: list[Any] = []
    for tokens in (bad, good):
        try:
            _, value = zf.spmd(pipe, mesh)(params, (tokens, tokens))
            heard.append(value.isfinite().item())
        except PipelineError as error:
            heard.append((str(error), str(error.action)))
    return heard


def picks_last(params: Any, carry: Any, batch: Any) -> Any:
    return tail(params, {**carry, "x": carry["x"] + params["out"][batch[0] + 1]}, batch)


def test_a_stage_that_raises_stops_every_rank() -> None:
    text = "the forward of stage 1 ('picks_last') failed on micro-batch 2 (action 1F2): IndexError"
    for rank, heard in enumerate(run_on_processes(2, two_steps)):
        (message, action), fine = heard
        assert text in message
        assert (action == "1F2") if rank == 1 else message.startswith("rank 1 of 'pp': ")
        assert fine is True


def mismatched(ranks: int) -> Any:
    cut, (batch,) = CUTS[4], batches()
    mesh = zf.Mesh(pp=ranks)
    pipe = zf.pipeline([embed, block, plain, block], 4)
    params = zf.spmd(pipe.place, mesh)(make(cut))
    try:
        zf.spmd(pipe, mesh)(params, batch)
    except PipelineError as error:
        return str(error)


def test_a_carry_that_does_not_fit_is_found_on_every_rank() -> None:
    for message in run_on_processes(4, mismatched, 4):
        assert "forward of stage 3 ('block') failed on micro-batch 0 (action 3F0)" in message


def leaves_or_sleeps(timeout: float, way: str, jitted: bool) -> Any:
    cut, (batch,) = CUTS[2], batches()
    mesh = zf.Mesh(pp=2, timeout=timeout)
    pipe = zf.pipeline(cut, 4)
    params = zf.spmd(pipe.place, mesh)(make(cut))
    run = zf.jit(zf.spmd(pipe, mesh)) if jitted else zf.spmd(pipe, mesh)
    run(params, batch)
    if mesh.rank == 1:
        if way == "dies":
            os._exit(1)
        time.sleep(60)
    run(params, batch)


@pytest.mark.parametrize(("way", "jitted"), [("dies", True), ("sleeps", False)])
def test_a_rank_that_is_gone_stops_the_others(way: str, jitted: bool) -> None:
    pool = ProcessPool(2, time_limit=60)
    start = time.monotonic()
    # whichever of its messages is the first to wait for the other rank
    text = r"rank 0: (.|\n)*(RECV_B|SEND_F)(.|\n)*rank 1 of axis 'pp' may have ended, or be stuck"
    with pytest.raises(RankError, match=text):
        pool.run(leaves_or_sleeps, 5.0, way, jitted)
    assert time.monotonic() - start < 45


def test_an_abstract_rank() -> None:
    """Rank 0's program of 4, on fake tensors: its stage's memory, and its messages."""
    cut, (batch,) = CUTS[4], batches()
    mesh = zf.Mesh(pp=4, dp=2).abstract()
    pipe = zf.pipeline(cut, 4)
    params = zf.spmd(lambda p: pipe.place(zf.shard(p, 1)), mesh)(make(cut))
    assert len(tree.leaves(params)) == 1  # the embedding
    program = zf.jit(zf.spmd(pipe, mesh)).trace(params, batch)
    names = [op_name(node) for node in program.graph_module.graph.nodes]
    # two tensors forwards, one of them with a gradient, for 4 micro-batches
    assert names.count("zero_fn::send") == 8
    assert names.count("zero_fn::receive") == names.count("zero_fn::received") == 4


def test_params_are_placed_together_and_for_one_schedule() -> None:
    run_on_processes(2, misplaced)


def misplaced() -> None:
    cut, (batch,) = CUTS[4], batches()
    mesh = zf.Mesh(pp=2)
    pipe, other = zf.pipeline(cut, 4, "zbv"), zf.pipeline(cut, 4, "interleaved")
    params = zf.spmd(pipe.place, mesh)(make(cut))
    with pytest.raises(ValueError, match="some of the stages' params are placed"):
        zf.spmd(pipe, mesh)((*params[:3], make(cut)[3]), batch)
    with pytest.raises(ValueError, match=r"'interleaved' has stages \[.*\] on rank .; place them"):
        zf.spmd(other, mesh)(params, batch)
