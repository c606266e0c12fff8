"""A pipeline in one process: the numbers of the dense step, for every schedule."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zero_fn as zf
from tests.memory import peak
from zero_fn import tree
from zero_fn.pipelining.builders import SCHEDULES
from zero_fn.pipelining.checking import ScheduleError
from zero_fn.pipelining.work import PipelineError, Work

from .stages import (
    CUTS,
    assert_same,
    batches,
    block,
    dense,
    dense_run,
    embed,
    loss,
    make,
    plain,
    tail,
)


def suits(name: str, stages: int) -> bool:
    """Whether a schedule has that many stages: two on each rank for some."""
    return stages % 2 == 0 or name in ("gpipe", "1f1b", "zero_bubble")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_equals_the_dense_step(name: str, stages: int, microbatches: int) -> None:
    if not suits(name, stages):
        pytest.skip("the schedule has two stages on each rank")
    cut, (batch,) = CUTS[stages], batches()
    params = make(cut)
    grads, value = zf.pipeline(cut, microbatches, name)(params, batch)
    want, of_whole = dense(cut, params, batch)
    assert_same(grads, want)
    assert_same(value, of_whole)


def test_a_schedule_of_ones_own() -> None:
    def mine(ranks: int, microbatches: int) -> list[list[str]]:
        rows = ["0F0 0F1 2F0 2B0 2F1 2B1 0B1 0B0", "1F0 1F1 1B0 1B1"]
        return [row.split() for row in rows]

    def wrong(ranks: int, microbatches: int) -> list[list[str]]:
        return [mine(ranks, microbatches)[0], ["1F0", "1F1", "1B0"]]

    cut, (batch,) = CUTS[3], batches()
    params = make(cut)
    with pytest.raises(ScheduleError, match=r"0B1, .* waits for 1B1"):
        zf.pipeline(cut, 2, wrong)
    grads, value = zf.pipeline(cut, 2, mine)(params, batch)
    want, of_whole = dense(cut, params, batch)
    assert_same(grads, want)
    assert_same(value, of_whole)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rematerialised", [False, True])
def test_ties_and_remat(name: str, rematerialised: bool) -> None:
    cut, (batch,) = CUTS[4], batches()
    params = make(cut, tied=True)
    assert params[0]["embedding"] is params[-1]["out"]
    stages = [zf.remat(stage) for stage in cut] if rematerialised else cut
    grads, value = zf.pipeline(stages, 4, name)(params, batch)
    want, of_whole = dense(cut, params, batch)
    assert_same(grads, want)
    assert_same(value, of_whole)


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_ties_by_name(stage: int | None) -> None:
    cut, (batch,) = CUTS[4], batches()
    params = make(cut, tied=True)
    named = (*params[:-1], {"out": zf.tied("0.embedding")})
    if stage is None:
        grads, value = zf.pipeline(cut, 4)(named, batch)
    else:
        mesh = zf.Mesh(dp=1)
        pieces = zf.spmd(lambda p: zf.shard(p, stage), mesh)(named)
        grads, value = zf.spmd(zf.pipeline(cut, 4), mesh)(pieces, batch)
        grads = zf.gather_tree(grads, mesh)
    want, of_whole = dense(cut, params, batch)
    assert_same(grads[0], want[0])
    assert_same(value, of_whole)
    with pytest.raises(ValueError, match=r"'3.out' is tied to '0.embeding', which is in no stage"):
        zf.pipeline(cut, 4)((*params[:-1], {"out": zf.tied("0.embeding")}), batch)
    with pytest.raises(TypeError, match="tied takes the key path of a leaf"):
        zf.tied(params[0]["embedding"])  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_beside_data_parallel_ranks(stage: int, name: str, jitted: bool, tied: bool) -> None:
    """Each rank of dp runs the whole pipeline; gradients are pieces, cut as the parameters are."""
    cut, (batch,) = CUTS[4], batches()
    params = make(cut, tied=tied)
    mesh = zf.Mesh(dp=2)

    def averaged(p: Any, carry: Any, batch: Any) -> Any:
        return zf.pmean(cut[-1](zf.unshard(p), carry, batch), "dp")

    run = zf.spmd(zf.pipeline([*cut[:-1], averaged], 4, name), mesh)
    pieces = zf.spmd(lambda p: zf.shard(p, stage), mesh)(params)
    grads, value = (zf.jit(run) if jitted else run)(pieces, batch)
    want, of_whole = dense(cut, params, batch)
    assert_same(zf.gather_tree(grads, mesh), want)
    assert_same(value, of_whole)


def test_a_loss_that_nobody_averaged_is_refused() -> None:
    cut, (batch,) = CUTS[2], batches()
    mesh = zf.Mesh(dp=2)
    pieces = zf.spmd(lambda p: zf.shard(p, 1), mesh)(make(cut))
    with pytest.raises(ValueError, match=r"result at '1' varies over axis 'dp'.*pmean"):
        zf.spmd(zf.pipeline(cut, 4), mesh)(pieces, batch)


def counted(params: Any, carry: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss over the tokens that are not 0, with their number."""
    x, _ = plain((), carry, batch)
    losses = F.cross_entropy(x @ params["out"].T, batch[1], reduction="none")
    count = (batch[1] != 0).sum()
    return torch.where(batch[1] != 0, losses, 0.0).sum() / count, count


@pytest.mark.parametrize("jitted", [False, True])
def test_losses_weighted_by_token_counts(jitted: bool) -> None:
    cut, (batch,) = [embed, block, counted], batches()
    assert len({(part != 0).sum().item() for part in batch[1].chunk(4)}) > 1
    params = make([embed, block, tail])
    run: Any = zf.pipeline(cut, 4)
    grads, value = (zf.jit(run) if jitted else run)(params, batch)
    want, of_whole = dense([embed, block, lambda *a: counted(*a)[0]], params, batch)
    assert_same(grads, want)
    assert_same(value, of_whole)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_beside_data_parallel_ranks(stage: int) -> None:
    (batch,) = batches()
    params = make([embed, tail])

    def last(p: Any, carry: Any, batch: Any) -> Any:
        value, count = counted(p, carry, batch)
        total = zf.psum(count, "dp")
        return zf.psum(value * count, "dp") / total, total

    mesh = zf.Mesh(dp=2)
    pieces = zf.spmd(lambda p: zf.shard(p, stage), mesh)(params)
    grads, value = zf.spmd(zf.pipeline([embed, last], 2), mesh)(pieces, batch)
    want, of_whole = dense([embed, lambda *a: counted(*a)[0]], params, batch)
    assert_same(zf.gather_tree(grads, mesh), want)
    assert_same(value, of_whole)


def test_micro_batches_that_do_not_divide_the_batch() -> None:
    cut, (batch,) = CUTS[3], batches()
    params = make(cut)
    with pytest.raises(ValueError, match=r"batch at '0': .* not divisible by microbatches=5"):
        zf.pipeline(cut, 5)(params, batch)
    grads, value = zf.pipeline(cut, 5, uneven=True)(params, batch)
    want, of_whole = dense(cut, params, batch)
    assert_same(grads, want)
    assert_same(value, of_whole)
    with pytest.raises(ValueError, match="fewer rows than microbatches=17"):
        zf.pipeline(cut, 17, uneven=True)(params, batch)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_gradients_that_share_memory(name: str) -> None:
    """The gradients of both summands are one tensor, that of a mean is expanded from one value."""

    def first(p: Any, carry: Any, x: Any) -> Any:
        return (p["a"] + p["b"]) * x

    def middle(p: Any, carry: Any, x: Any) -> Any:
        return carry + p + p.T

    def last(p: Any, carry: Any, x: Any) -> Any:
        return carry.square().mean() + p.mean()

    cut = [first, middle, last]
    square = torch.randn(4, 4, dtype=torch.float64)
    params = ({"a": square, "b": square + 1}, square - 1, square.T.clone())
    batch = torch.randn(20, 4, dtype=torch.float64)  # parts of 4 rows
    grads, value = zf.pipeline(cut, 5, name)(params, batch)
    want, of_whole = dense([lambda *a: _mean_over_parts(cut, *a)], (params,), batch)
    assert_same(grads, want[0])
    assert_same(value, of_whole)


def _mean_over_parts(cut: Any, params: Any, carry: None, batch: torch.Tensor) -> torch.Tensor:
    return torch.stack([loss(cut, params, part) for part in batch.chunk(5)]).mean()


def test_a_stage_that_writes_in_place() -> None:
    """Its trace cannot be cut between I and W, and keeps its order."""

    def writes(p: Any, carry: Any, batch: Any) -> Any:
        x = carry["x"] @ p["up"]
        x.mul_(2).add_(p["bias"])
        return {"x": torch.tanh(x) @ p["down"], "even": carry["even"]}

    cut, (batch,) = [embed, writes, tail], batches()
    params = make([embed, block, tail])
    for name in ("1f1b", "zero_bubble"):
        grads, value = zf.pipeline(cut, 4, name)(params, batch)
        want, of_whole = dense(cut, params, batch)
        assert_same(grads, want)
        assert_same(value, of_whole)


def test_inside_other_transforms() -> None:
    """A pipeline is a function: mapped over parameters, and differentiated again."""
    cut, (batch,) = CUTS[3], batches()
    run = zf.pipeline(cut, 2)
    several = [make(cut, seed) for seed in range(3)]
    stacked = tree.map(lambda *x: torch.stack(x), *several)
    grads, values = torch.func.vmap(run, (0, None))(stacked, batch)
    for place, params in enumerate(several):
        want, of_whole = dense(cut, params, batch)
        assert_same(tree.map(lambda x, i=place: x[i], grads), want)
        assert_same(values[place], of_whole)

    params = several[0]
    direction = make(cut, 7)
    _, product = torch.func.jvp(lambda p: run(p, batch)[0], (params,), (direction,))
    step = 1e-5
    ahead, _ = dense(cut, tree.map(lambda p, v: p + step * v, params, direction), batch)
    behind, _ = dense(cut, tree.map(lambda p, v: p - step * v, params, direction), batch)
    # central differences: an error of step² in float64
    want = tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    assert_same(product, want, 1e-8)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("gpipe", 0), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 3), ("zbv", 1), ("1f1b", 3)],
)
def test_ten_steps_of_training(name: str, stage: int) -> None:
    """Over 2 ranks of dp, clipped, tied; against torch.optim."""
    cut, mesh, optimizer = CUTS[4], zf.Mesh(dp=2), zf.adamw(1e-2, weight_decay=0.1)
    params, data = make(cut, tied=True), batches(10)
    losses, want = dense_run(cut, params, data, clip=0.5)

    def averaged(p: Any, carry: Any, batch: Any) -> Any:
        return zf.pmean(cut[-1](p, carry, batch), "dp")

    gradient = zf.pipeline([*cut[:-1], averaged], 4, name)
    chained = zf.chain(zf.clip_by_global_norm(0.5), optimizer)

    def init(params: Any) -> Any:
        params = zf.shard(params, stage)
        return zf.TrainState(params, chained.init(params))

    def step(state: Any, batch: Any) -> Any:
        grads, value = gradient(state.params, batch)
        updates, opt_state = chained.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state), value

    state, run = zf.spmd(init, mesh)(params), zf.jit(zf.spmd(step, mesh), donate=0)
    for batch, expected in zip(data, losses, strict=True):
        state, value = run(state, batch)
        assert abs(value.item() - expected) < 1e-10  # float64, ten steps
    assert_same(zf.gather_tree(state.params, mesh), want, 1e-9)


class Watched(Work):
    """Counts what is saved for backwards."""

    most = 0

    def compute(self, action: Any) -> None:
        super().compute(action)
        held = {*self.saved, *self.due}
        for rank in range(4):
            Watched.most = max(Watched.most, len([x for x in held if x[0] == rank]))


@pytest.mark.parametrize(("name", "limit"), [("1f1b", 4), ("zero_bubble", 4), ("gpipe", 8)])
def test_what_is_saved_follows_the_schedule(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B saves at most as many micro-batches as there are stages, of any number."""
    monkeypatch.setattr("zero_fn.pipelining.run.Work", Watched)
    Watched.most = 0
    cut, (batch,) = CUTS[4], batches()
    zf.pipeline(cut, 8, name)(make(cut), batch)
    assert Watched.most == limit


def wide(width: int = 64) -> tuple[Any, Any, Any]:
    """Four stages whose activations are much larger than their parameters."""

    def middle(p: Any, carry: Any, x: Any) -> torch.Tensor:
        for w in p:
            x = torch.tanh((x if carry is None else carry) @ w)
            carry = x
        return carry

    def last(p: Any, carry: Any, x: Any) -> torch.Tensor:
        return middle(p, carry, x).square().mean()

    params = tuple([torch.randn(width, width) / 8 for _ in range(2)] for _ in range(4))
    return [middle, middle, middle, last], params, torch.randn(1024, width)


def test_memory_follows_the_schedule() -> None:
    """Measured in one process, where the ranks' activations lie together."""
    stages, params, batch = wide()
    inputs = [*tree.leaves(params), batch]

    def measured(name: str, microbatches: int, f: Any = lambda stage: stage) -> int:
        run = zf.pipeline([f(stage) for stage in stages], microbatches, name)
        run(params, batch)  # traced here
        return peak(lambda: run(params, batch), inputs)

    # the sum over 4 ranks of the live micro-batches, of which there are 16: at most 4 + 3 + 2 + 1
    # under 1F1B, 4 × 16 under GPipe; and the gradients
    whole = measured("gpipe", 16)
    assert measured("1f1b", 16) < 0.3 * whole
    # split backwards hold a micro-batch until its W
    assert measured("zero_bubble", 16) < 0.5 * whole
    # saved per stage of two layers: the input and both results; recomputed: the input
    assert measured("gpipe", 8, zf.remat) < 0.5 * measured("gpipe", 8)


def test_stage_3_gathers_again_for_each_backward() -> None:
    """Between a forward and its backward no whole parameters are held."""
    stages, params, _ = wide(256)
    batch, mesh = torch.randn(16, 256), zf.Mesh(dp=2).abstract()
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(params)
    step = zf.jit(zf.spmd(zf.pipeline(stages, 8, "gpipe"), mesh), skip=("bucket", "overlap"))
    program = step.trace(pieces, batch)
    gathers = {c.kind: c.calls for c in program.collectives()}["all_gather"]
    # 8 matrices, 8 micro-batches, in F, in I, except where nothing needs it: the first matrix'
    # own input has no gradient
    assert gathers == 8 * (8 + 7)
    # the pieces are half of the 8 matrices, so are the gradients; whole at once: a few
    matrix = 256 * 256 * 4
    assert program.peak().bytes < 8 * matrix + 4 * matrix + 8 * batch.numel() * 4


def bad_index(params: Any, carry: Any, batch: Any) -> Any:
    return {**carry, "x": carry["x"] + params["up"][batch[0]].sum(-1, keepdim=True)}


def test_a_stage_that_raises_is_named() -> None:
    cut, (batch,) = [embed, bad_index, tail], batches()
    params = make([embed, block, tail])
    tokens = torch.zeros(16, dtype=torch.int64)
    tokens[9] = 6  # the weight has rows 0 to 4
    with pytest.raises(
        PipelineError,
        match=r"the forward of stage 1 \('bad_index'\) failed on micro-batch 2 \(action 1F2\): Ind",
    ) as caught:
        zf.pipeline(cut, 4)(params, (tokens, batch[1]))
    assert str(caught.value.action) == "1F2"

    def branches(p: Any, carry: Any, batch: Any) -> Any:
        return {} if carry["x"].sum() > 0 else carry

    with pytest.raises(PipelineError, match=r"stage 1 \('branches'\).*write torch.where"):
        zf.pipeline([embed, branches, tail], 4)((params[0], (), params[2]), batch)


def test_errors() -> None:
    cut, (batch,) = CUTS[4], batches()
    params = make(cut)
    with pytest.raises(PipelineError, match=r"stage 1 \('head'\).*TypeError"):
        zf.pipeline([embed, CUTS[4][-1]], 2)((params[0], params[-1]), batch)
    with pytest.raises(ValueError, match="there are 4 stages; got 3 of them"):
        zf.pipeline(cut, 4)(params[:3], batch)
    with pytest.raises(ValueError, match=r"'zbv' runs .*2 stages on 1 ranks, .* has 3 stages"):
        zf.pipeline(CUTS[3], 4, "zbv")
    with pytest.raises(ValueError, match="no schedule is called '1f2b'; did you mean '1f1b'"):
        zf.pipeline(cut, 4, "1f2b")
    with pytest.raises(ValueError, match="the list of them is empty"):
        zf.pipeline([], 4)
    wrong = (params[0], {**params[1], "up": torch.zeros(5, 6, dtype=torch.int64)}, *params[2:])
    with pytest.raises(TypeError, match=r"params of stage 1 at 'up'.*int64"):
        zf.pipeline(cut, 4)(wrong, batch)
    with pytest.raises(PipelineError, match=r"last stage returns the loss.*float64\[8, 5\]"):
        zf.pipeline([embed, block], 2)(params[:2], batch)
