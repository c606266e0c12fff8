"""Pipeline, data and tensor parallelism together: a tiny GPT trains like the dense step."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.models import gpt

# Nothing divides: padded vocabulary, norms and pieces of odd sizes.
CONFIG = gpt.Config(vocabulary=11, length=8, layers=3, heads=8, width=16)
ROWS, STEPS, CLIP = 8, 10, 0.05


def parameters() -> gpt.Params:
    """Large enough that attention is not uniform; float64; tied tensors stay one."""
    made: dict[int, torch.Tensor] = {}
    return tree.map(lambda x: made.setdefault(id(x), 5 * x.double()), gpt.init(CONFIG))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocabulary, (ROWS, CONFIG.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def dense_run(steps: int = STEPS) -> tuple[list[float], gpt.Params]:
    """torch.autograd and torch.optim alone; tests/test_sliced_training.py checks the loss."""
    params = tree.map(lambda x: x.requires_grad_(), parameters())
    leaves = list({id(x): x for x in tree.leaves(params)}.values())
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses = []
    for seed in range(steps):
        loss = gpt.loss(params, batch(seed), CONFIG)
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(leaves, CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    return losses, tree.map(lambda x: x.detach(), params)


def run(
    axes: dict[str, int],
    stage: int,
    n: int,
    name: str = "1f1b",
    steps: int = STEPS,
    jitted: bool = False,
    sequence_parallel: bool = False,
    microbatches: int = 2,
) -> tuple[list[float], Any]:
    """The step as one writes it: losses, and the stages' parameters."""
    mesh = zf.Mesh(**axes)
    *inner, last = gpt.stages(CONFIG, n, "tp", sequence_parallel)
    pipe = zf.pipeline(
        [*inner, lambda p, carry, b: zf.pmean(last(p, carry, b), "dp")], microbatches, name
    )
    optimizer = zf.chain(zf.clip_by_global_norm(CLIP), zf.adamw(1e-2, weight_decay=0.1))

    def init(params: Any) -> zf.TrainState:
        sliced = zf.slice_params(params, gpt.rules(CONFIG, staged=True))
        params = pipe.place(zf.shard(sliced, stage))
        return zf.TrainState(params, optimizer.init(params))

    def step(state: zf.TrainState, batch: Any) -> tuple[zf.TrainState, torch.Tensor]:
        grads, value = pipe(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state), value

    state = zf.spmd(init, mesh)(gpt.split_params(parameters(), CONFIG, n))
    stepped = zf.spmd(step, mesh)
    if jitted:
        stepped = zf.jit(stepped, donate=0)
    losses = []
    for seed in range(steps):
        state, value = stepped(state, batch(seed))
        losses.append(value.item())
    return losses, zf.gather_tree(zf.spmd(pipe.collect, mesh)(state.params), mesh)


def assert_dense(got: Any, want: Any, n: int) -> None:
    # float64: AdamW's first steps divide small gradients by their size, so 1e-16 grows to 1e-10
    want = want[0], gpt.split_params(want[1], CONFIG, n)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def dense() -> Any:
    return dense_run()


SIZES = [
    (pp, dp, tp)
    for pp in (1, 2, 3, 4, 5)
    for dp in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    if pp * dp * tp <= 8
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_every_mesh_of_up_to_eight_simulated_ranks(sizes: tuple[int, int, int], dense: Any) -> None:
    pp, dp, tp = sizes
    stage, n = (pp + dp + tp) % 4, max(pp, 2)
    got = run({"pp": pp, "dp": dp, "tp": tp}, stage, n, microbatches=1 if dp == 8 else 2)
    assert_dense(got, dense, n)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_eight_simulated_ranks_train_like_the_dense_step(stage: int) -> None:
    name, n = ("1f1b", 2) if stage < 2 else ("zbv", 4)
    got = run({"pp": 2, "dp": 2, "tp": 2}, stage, n, name, 2, sequence_parallel=stage == 3)
    assert_dense(got, dense_run(2), n)


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 1, "tp": 2}, {"tp": 2, "dp": 1, "pp": 2}])
def test_four_processes_two_axes_at_a_time(axes: dict[str, int], dense: Any) -> None:
    """The third pair, pp and dp, is in test_processes.py; dp and tp in test_sliced_training.py."""
    for got in run_on_processes(4, run, axes, 0, 2):
        assert_dense(got, dense, 2)


def test_traced_on_four_processes(dense: Any) -> None:
    args = {"pp": 2, "dp": 1, "tp": 2}, 3, 4, "zbv", STEPS, True, True
    for got in run_on_processes(4, run, *args):
        assert_dense(got, dense, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name", "n"), [(0, "1f1b", 2), (2, "zbv", 4), (3, "1f1b", 2)])
def test_eight_processes(stage: int, name: str, n: int) -> None:
    """Leaves cut on one, two and three axes, clipped by the norm of all."""
    want = dense_run(3)
    args = {"pp": 2, "dp": 2, "tp": 2}, stage, n, name, 3, False, stage == 2
    for got in run_on_processes(8, run, *args):
        assert_dense(got, want, n)
