"""zf.train_step of a pipeline: clipping, precision, loss scales, metrics as on any other step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree

from .stages import CUTS, Stage, assert_same, batches, dense_run, make, plain


def train(
    axes: dict[str, int],
    stages: list[Stage],
    steps: int,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[list[dict[str, float]], Any]:
    """The metrics of each step, and all stages' parameters."""
    mesh = zf.Mesh(**axes)
    pipe = zf.pipeline(stages, 4, "zbv")
    init, step = zf.train_step(pipe, zf.adamw(1e-2, weight_decay=0.1), mesh, **options)
    params = make(CUTS[4], tied=True)
    made: dict[int, torch.Tensor] = {}  # tied ones stay one tensor
    state = init(tree.map(lambda x: made.setdefault(id(x), x.to(dtype)), params))
    found = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        found.append({name: x.item() for name, x in metrics.items()})
    return found, zf.gather_tree(zf.spmd(pipe.collect, mesh)(state.params), mesh)


def counted(params: Any, carry: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the tokens that are not 0, with their number, which differs by rank."""
    x, _ = carry
    losses = F.cross_entropy(x @ params["out"].T, batch[1], reduction="none")
    count = (batch[1] != 0).sum()
    return torch.where(batch[1] != 0, losses, 0.0).sum() / count, count


AXES = [{"dp": 2}, {"pp": 2, "dp": 2}]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("last", ["head", "counted"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_like_torch(axes: dict[str, int], stage: int, last: str) -> None:
    stages = [*CUTS[4][:-1], counted] if last == "counted" else CUTS[4]
    plain_loss = [*stages[:-1], lambda *a: counted(*a)[0]] if last == "counted" else stages
    losses, want = dense_run(plain_loss, make(CUTS[4], tied=True), batches(3), clip=0.5)
    found, params = train(axes, stages, 3, stage=stage, clip=0.5)
    # float64, three steps of AdamW
    assert [x["loss"] for x in found] == pytest.approx(losses, rel=1e-10)
    assert_same(params, want, 1e-9)
    for x in found:  # 1e-6 is added to a norm that divides
        assert x["grad_norm_clipped"] == pytest.approx(min(0.5, x["grad_norm"]), rel=1e-5)


def test_trains_like_torch_on_processes() -> None:
    stages = CUTS[4][:-1]
    losses, want = dense_run(
        [*stages, lambda *a: counted(*a)[0]], make(CUTS[4], tied=True), batches(3), clip=0.5
    )
    for found, params in run_on_processes(4, on_processes):
        assert [x["loss"] for x in found] == pytest.approx(losses, rel=1e-10)
        assert_same(params, want, 1e-9)


def on_processes() -> Any:
    stages = [*CUTS[4][:-1], counted]
    return train({"pp": 2, "dp": 2}, stages, 3, stage=3, clip=0.5)


def keeps(params: Any, carry: Any, batch: Any) -> Any:
    """The stage without parameters, in the carry's dtype."""
    x, constant = plain(params, carry, batch)
    return x.to(carry["x"].dtype), constant


STAGES = [*CUTS[4][:2], keeps, CUTS[4][3]]
HALF: dict[str, Any] = {
    "dtype": torch.float32,
    "policy": zf.policy(compute="bf16"),
    "loss_scale": zf.LossScale(initial=2.0**10, window=2),
    "clip": 0.5,
}


def of_one_function(stages: list[Stage], stage: int, **options: Any) -> list[dict[str, float]]:
    """The same step of the unpipelined loss, by train_step over two ranks of dp."""
    dtype = options.pop("dtype")

    def loss(params: Any, batch: Any) -> torch.Tensor:
        carry = None
        for f, of_stage in zip(stages, params, strict=True):
            carry = f(of_stage, carry, batch)
        assert isinstance(carry, torch.Tensor)
        return carry

    mesh = zf.Mesh(dp=2, backend="simulated")
    init, step = zf.train_step(
        loss, zf.adamw(1e-2, weight_decay=0.1), mesh, stage=stage, microbatches=4, **options
    )
    made: dict[int, torch.Tensor] = {}
    params = make(CUTS[4], tied=True)
    state = init(tree.map(lambda x: made.setdefault(id(x), x.to(dtype)), params))
    found = []
    for batch in batches(4):
        state, metrics = step(state, batch)
        found.append({name: x.item() for name, x in metrics.items()})
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [*AXES, None])
def test_policies_and_loss_scales(stage: int, axes: dict[str, int] | None) -> None:
    """None: on processes."""
    want = of_one_function(STAGES, stage, **HALF)
    if axes is not None:
        runs = [train(axes, STAGES, 4, stage=stage, **HALF)]
    elif stage in (1, 3):
        runs = run_on_processes(4, half_on_processes, stage)
    else:
        pytest.skip("two of the four are enough on processes")
    for found, _ in runs:
        for got, expected in zip(found, want, strict=True):
            assert got.keys() == expected.keys()
            for name in ("loss_scale", "skipped", "stuck"):
                assert got[name] == expected[name]
            for name in ("loss", "grad_norm", "grad_norm_clipped"):
                # bfloat16 rounds to 2**-9, in another order where stages are cut apart
                assert got[name] == pytest.approx(expected[name], rel=0.01)
    assert runs[0][0][-1]["loss_scale"] > 2**10


def half_on_processes(stage: int) -> Any:
    return train({"pp": 2, "dp": 2}, STAGES, 4, stage=stage, **HALF)


def test_the_stages_see_the_policy_s_dtypes() -> None:
    seen = set()

    def spying(params: Any, carry: Any, batch: Any) -> Any:
        seen.add(carry["x"].dtype)
        return keeps(params, carry, batch)

    stages = [*CUTS[4][:2], spying, CUTS[4][3]]
    _, params = train({"dp": 2}, stages, 1, stage=3, **HALF)
    assert seen == {torch.bfloat16}
    assert {x.dtype for x in tree.leaves(params)} == {torch.float32}


def overflowing() -> Any:
    """The first stage's gradients overflow float16 at a scale of 2**24; the last's do not."""

    def steep(params: Any, carry: Any, batch: Any) -> Any:
        x = CUTS[4][0](params, carry, batch)
        return {**x, "x": x["x"] * 64}

    return train(
        {"pp": 2, "dp": 1},
        [steep, *STAGES[1:]],
        3,
        dtype=torch.float32,
        policy=zf.policy(compute="fp16"),
        loss_scale=zf.LossScale(initial=2.0**22, hysteresis=1, factor=4.0),
    )


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all() -> None:
    for found, _ in [overflowing(), *run_on_processes(2, overflowing)]:
        assert found[0]["skipped"] == 1
        assert found[1]["loss_scale"] == 2.0**20


def test_what_is_refused() -> None:
    mesh, pipe = zf.Mesh(dp=2), zf.pipeline(CUTS[4], 4)
    with pytest.raises(ValueError, match="pipeline cuts a rank's batch into 4 already"):
        zf.train_step(pipe, zf.sgd(0.1), mesh, microbatches=2)
    with pytest.raises(ValueError, match="stages live along 'pp', which cannot split the batch"):
        zf.train_step(pipe, zf.sgd(0.1), zf.Mesh(pp=2), axis="pp")
