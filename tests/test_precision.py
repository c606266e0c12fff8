"""Loss scales: DeepSpeed's figures, steps that are skipped, in every interpreter."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zero_fn as zf
from zero_fn import tree
from zero_fn.graphs import base
from zero_fn.models import gpt
from zero_fn.program import Program

from .processes import run_on_processes
from .test_training import batches, mlp, mlp_loss

FIGURES = json.loads((Path(__file__).parent / "data" / "deepspeed_figures.json").read_text())


@pytest.mark.parametrize("case", FIGURES["dynamic_loss_scale"])
def test_the_scale_is_deepspeeds_step_by_step(case: dict[str, Any]) -> None:
    scale = zf.LossScale(
        initial=case["init_scale"],
        factor=case["scale_factor"],
        window=case["scale_window"],
        minimum=case["min_scale"],
        hysteresis=case["hysteresis"],
        consecutive_hysteresis=case["consecutive_hysteresis"],
    )
    state, scales = scale.init(), []
    for overflow in case["overflow"]:
        state = scale.update(state, torch.tensor(not overflow))
        scales.append(state.scale.item())
    assert scales == case["scale_after"]
    assert state.skipped.item() == sum(case["overflow"])


def schedule(case: dict[str, Any]) -> Any:
    if case["schedule"] == "WarmupLR":
        return zf.warmup_lr(**case["args"])
    if case["schedule"] == "WarmupDecayLR":
        return zf.warmup_decay_lr(**case["args"])
    return zf.warmup_cosine_lr(case["base_lr"], **case["args"])


@pytest.mark.parametrize("case", FIGURES["lr_schedules"])
def test_the_rates_are_deepspeeds_step_by_step(case: dict[str, Any]) -> None:
    rate = schedule(case)
    got = [rate(torch.tensor(step)).item() for step in range(len(case["lr_after_step"]))]
    # float64 on both sides, in another order of operations
    assert got == pytest.approx(case["lr_after_step"], rel=1e-12, abs=1e-18)


def test_a_warm_up_of_one_step() -> None:
    assert zf.warmup_lr(0.0, 1.0, 1, "log")(torch.tensor(1)).item() == 1.0


def test_the_scale_stops_at_its_minimum_and_below_infinity() -> None:
    scale = zf.LossScale(initial=2.0, minimum=1.0, hysteresis=1, window=1)
    state = scale.init()
    for count in range(1, 5):
        state = scale.update(state, torch.tensor(False))
        assert state.scale.item() == 1.0
        assert state.stuck.item() == count - 1  # the first one lowered it
    for _ in range(300):
        state = scale.update(state, torch.tensor(True))
    assert state.scale.item() == 2.0**127
    assert state.stuck.item() == 0


def test_a_static_scale_stays() -> None:
    scale = zf.LossScale.static(128.0)
    state = scale.init()
    for finite in (True, False, False, False, True, True):
        state = scale.update(state, torch.tensor(finite))
        assert state.scale.item() == 128.0
    assert state.skipped.item() == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 0.5}, "factor is 0.5; it must be 1 or more"),
        ({"window": 0}, "window is 0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"minimum": 0.0}, "minimum is 0.0"),
        ({"initial": 1.0, "minimum": 2.0}, "0 < minimum <= initial"),
    ],
)
def test_a_scale_that_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.LossScale(**arguments)


def test_schedules_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="warmup_type is 'cubic'"):
        zf.warmup_lr(warmup_type="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_num_steps is 5"):
        zf.warmup_decay_lr(5, warmup_num_steps=6)


def found(where: int | None) -> bool:
    """all_finite with a NaN on one rank, in a piece of one leaf beside one that all share."""

    def program(x: torch.Tensor) -> torch.Tensor:
        pieces = zf.shard({"a": x, "b": x[:1]}, 3)
        local = pieces["a"].local
        if where is not None:
            hit = (zf.axis_index("dp") == where).to(local.dtype)
            local = local / (1 - zf.pvary(torch.ones(()), "dp") * hit)
        return zf.all_finite({"a": pieces["a"].like(local), "c": x})

    return bool(zf.spmd(program, zf.Mesh(dp=2), batch="replicated")(torch.ones(5)))


@pytest.mark.parametrize("where", [None, 0, 1])
def test_an_infinity_on_one_rank_is_known_to_all(where: int | None) -> None:
    assert found(where) is (where is None)
    assert run_on_processes(2, found, where) == [where is None] * 2


def found_in_a_stage(value: float) -> bool:
    """all_finite where ranks hold different leaves: the second stage has none."""
    pipe = zf.pipeline([lambda p, _, x: x * p["w"], lambda p, carry, x: carry.sum()], 2)

    def program(w: torch.Tensor) -> torch.Tensor:
        return zf.all_finite(pipe.place(zf.shard(({"w": w}, ()), 1)))

    return bool(zf.spmd(program, zf.Mesh(pp=2, dp=2))(torch.tensor([1.0, 2.0, value])))


@pytest.mark.parametrize("value", [3.0, float("inf")])
def test_an_infinity_in_one_stage_is_known_to_all(value: float) -> None:
    assert run_on_processes(4, found_in_a_stage, value) == [value == 3.0] * 4


def half_loss(params: Any, batch: Any) -> torch.Tensor:
    """Computes in float16; the third batch, of many, overflows."""
    x, y = batch
    half = tree.map(lambda p: p.to(torch.float16), params)
    return mlp_loss(half, (x.to(torch.float16), y)).float()


def hostile(steps: int) -> list[Any]:
    data = batches(steps)
    x, y = data[2]
    data[2] = x.clone().index_fill_(0, torch.tensor([3]), float("inf")), y
    return data


def dense_half(steps: int) -> tuple[list[float], Any, list[float]]:
    """A loop with torch's own autograd and AdamW, and the scale as DeepSpeed says, by hand."""
    params = tree.map(lambda p: p.clone().requires_grad_(), mlp())
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    scale, losses, scales = 1024.0, [], []
    for batch in hostile(steps):
        loss = half_loss(params, batch)
        optimizer.zero_grad()
        (loss * scale).backward()
        scales.append(scale)
        losses.append(loss.item())
        if all(p.grad.isfinite().all() for p in leaves):
            for p in leaves:
                p.grad /= scale
            torch.nn.utils.clip_grad_norm_(leaves, 0.5)
            optimizer.step()
        else:
            scale /= 2
    return losses, tree.map(lambda p: p.detach(), params), scales


def half_run(stage: int, microbatches: int, steps: int, jit: bool) -> Any:
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(
        half_loss,
        zf.adamw(1e-2, weight_decay=0.1),
        mesh,
        stage=stage,
        microbatches=microbatches,
        clip=0.5,
        loss_scale=zf.LossScale(initial=1024.0, hysteresis=1),
    )
    state = init(mlp())
    losses, scales = [], []
    for batch in hostile(steps):
        state, metrics = (step if jit else step.f)(state, batch)  # type: ignore[attr-defined]
        losses.append(metrics["loss"].item())
        scales.append(metrics["loss_scale"].item())
    assert metrics["skipped"].item() == 1
    assert metrics["stuck"].item() == 0
    count = state.opt_state.step.item()
    return losses, zf.gather_tree(state.params, mesh), scales, count


@pytest.mark.parametrize(("microbatches", "jit"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_overflows_changes_nothing(stage: int, microbatches: int, jit: bool) -> None:
    losses, params, scales = dense_half(6)
    runs = [half_run(stage, microbatches, 6, jit)]
    if jit and microbatches == 1:
        runs += run_on_processes(2, half_run, stage, microbatches, 6, jit)
    for run in runs:
        assert run[3] == 5  # steps that Adam counted
        assert run[2] == scales
        assert run[0][2] != run[0][2] or run[0][2] == float("inf")
        for step in (0, 1, 3, 4, 5):
            # float16 gradients of other groups of rows: 2^-11 of a sum, through two or three steps
            assert run[0][step] == pytest.approx(losses[step], rel=5e-3)
        torch.testing.assert_close(run[1], params, rtol=0.05, atol=5e-3)


def test_a_state_without_the_scale_is_refused() -> None:
    mesh = zf.Mesh(dp=2)
    init, _ = zf.train_step(mlp_loss, zf.adamw(1e-2), mesh)
    _, step = zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, loss_scale=zf.LossScale())
    with pytest.raises(ValueError, match="the state has none in loss_scale, and this step takes"):
        step(init(mlp()), batches(1)[0])
    with pytest.raises(ValueError, match="compressed gradients take no policy and no"):
        zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, compress="1bit", loss_scale=zf.LossScale())


def test_fit_says_when_the_scale_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    def step(state: int, batch: Any) -> tuple[int, dict[str, torch.Tensor]]:
        return state, {
            "loss": torch.tensor(float("nan")),
            "loss_scale": torch.tensor(1.0),
            "stuck": torch.tensor(7),
        }

    with caplog.at_level(logging.WARNING, "zero_fn.train"):
        zf.fit(step, 0, [torch.ones(2)] * 3, show=False)
    assert caplog.text.count("the last 7 steps were skipped") == 1


def low_loss(params: Any, batch: Any) -> torch.Tensor:
    """In the parameters' dtype up to the logits, in float32 from there."""
    x, y = batch
    h = torch.tanh(x @ params["in"]["weight"] + params["in"]["bias"]) * params["scale"]
    for weight, bias in params["layers"]:
        h = h + torch.tanh(h @ weight + bias)
    return F.cross_entropy((h @ params["out"]).float(), y)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def dense_low(compute: str, parts: int, steps: int, scale: float) -> tuple[list[float], Any]:
    """Gradients of each part of the batch by low-precision copies, added up in float32."""
    dtype, params = DTYPES[compute], tree.map(torch.clone, mlp())
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses = []
    for x, y in batches(steps):
        low = tree.map(lambda p: p.to(dtype).requires_grad_(), params)
        for p in leaves:
            p.grad = torch.zeros_like(p)
        total = 0.0
        for rows, labels in zip(x.to(dtype).chunk(parts), y.chunk(parts), strict=True):
            loss = low_loss(low, (rows, labels)) / parts
            grads = torch.autograd.grad(loss * scale, tree.leaves(low))
            for p, g in zip(leaves, grads, strict=True):
                p.grad += g.float() / scale
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        optimizer.step()
        losses.append(total)
    return losses, params


def low_run(
    stage: int, microbatches: int, compute: str, reduce: str, steps: int, scale: float
) -> tuple[list[float], Any]:
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(
        low_loss,
        zf.adamw(1e-2, weight_decay=0.1),
        mesh,
        stage=stage,
        microbatches=microbatches,
        clip=0.5,
        policy=zf.policy(compute=compute, reduce=reduce),
        loss_scale=zf.LossScale.static(scale) if scale != 1 else None,
    )
    state = init(mlp())
    losses = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    assert {x.dtype for x in tree.leaves(state.params)} == {torch.float32}
    return losses, zf.gather_tree(state.params, mesh)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("compute", "scale"), [("bf16", 1.0), ("fp16", 128.0), ("float32", 1.0)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_low_precision_with_float32_sums(
    stage: int, microbatches: int, compute: str, scale: float
) -> None:
    losses, params = dense_low(compute, 2 * microbatches, 4, scale)
    arguments = stage, microbatches, compute, "float32", 4, scale
    runs = [low_run(*arguments)]
    if microbatches == 3:
        runs += run_on_processes(2, low_run, *arguments)
    for got_losses, got in runs:
        # The same products in another order: a low-precision value may be rounded the other way
        # (2^-8 of it in bf16), and Adam's first steps follow the sign of small gradients.
        assert got_losses == pytest.approx(losses, rel=5e-3)
        torch.testing.assert_close(got, params, rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_in_bf16_are_summed_in_float32(stage: int, ranks: int) -> None:
    rows = torch.randn(8, 7, generator=torch.Generator().manual_seed(5))
    mesh = zf.Mesh(dp=ranks)

    def gradient(reduce: torch.dtype | None) -> torch.Tensor:
        def program(w: torch.Tensor, x: torch.Tensor) -> Any:
            f = zf.accumulate(
                lambda w, x: (w * x).sum(), 8 // ranks, dtype=torch.bfloat16, reduce_dtype=reduce
            )
            return f(zf.shard(w, stage), x)[0]

        got: torch.Tensor = zf.gather_tree(zf.spmd(program, mesh)(torch.ones(7), rows), mesh)
        return got

    # one row for each rank and micro-batch, whose gradient is the row, rounded
    want = (rows / 8).bfloat16().float().sum(0)
    torch.testing.assert_close(gradient(None), want, rtol=1e-6, atol=1e-7)
    if ranks > 1:
        assert not torch.allclose(gradient(torch.bfloat16), want, rtol=1e-4, atol=1e-5)


def test_what_travels_in_which_dtype() -> None:
    mesh = zf.Mesh(dp=4).abstract()

    def sent(compute: str, reduce: str) -> dict[str, int]:
        init, step = zf.train_step(
            mlp_loss, zf.sgd(0.1), mesh, stage=3, policy=zf.policy(compute=compute, reduce=reduce)
        )
        program = step.trace(init(mlp()), batches(1)[0])  # type: ignore[attr-defined]
        return {c.kind: c.bytes_sent for c in program.collectives()}

    full, half, both = sent("fp32", "fp32"), sent("bf16", "fp32"), sent("bf16", "bf16")
    assert half["all_gather"] * 2 == full["all_gather"]
    assert half["reduce_scatter"] == full["reduce_scatter"] == both["reduce_scatter"] * 2


def test_no_parameter_is_whole_in_float32() -> None:
    mesh = zf.Mesh(dp=8).abstract()
    config = gpt.Config(vocabulary=64, length=16, layers=6, heads=2, width=64)
    tokens = torch.zeros(8, 2, dtype=torch.int64)

    def traced(skip: tuple[str, ...]) -> Program:
        init, step = zf.train_step(
            lambda p, b: gpt.loss(p, b, config), zf.sgd(0.1), mesh, stage=3, policy=zf.policy()
        )
        jitted = zf.jit(step.f, donate=0, skip=skip)  # type: ignore[attr-defined]
        return jitted.trace(init(gpt.init(config)), (tokens, tokens))

    def widened(program: Program) -> int:
        """The casts of gathered values to float32."""
        casts = [n for n in program.graph_module.graph.nodes if "_to_copy" in str(n.target)]
        wide = [n for n in casts if n.meta["val"].dtype == torch.float32]
        return sum("all_gather" in str(base(n.args[0]).target) for n in wide)

    direct, plain = traced(("bucket",)), traced(("bucket", "cast_directly"))
    assert widened(direct) == 0 < widened(plain)


def test_names_of_dtypes() -> None:
    assert zf.policy() == zf.Policy(torch.float32, torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="compute is 'bf15'; did you mean 'bf16'"):
        zf.policy(compute="bf15")
    with pytest.raises(ValueError, match="reduce is 'int32'; there are 'float64'"):
        zf.policy(reduce="int32")


def poisoned(check: bool, where: str) -> None:
    def loss(params: Any, batch: Any) -> torch.Tensor:
        value = mlp_loss(params, batch)
        if where == "loss":
            return value + batch[0].sum() * float("inf")
        leaf = params["layers"][1][0]  # an infinite gradient, and no other
        return value + (leaf.sum() * batch[0].max().clamp(min=3e38) * 10)

    init, step = zf.train_step(
        loss, zf.sgd(0.1), zf.Mesh(dp=2), stage=2, check_finite=check, policy=zf.policy()
    )
    step(init(mlp()), batches(1)[0])


def test_a_step_may_raise_and_name_the_leaf() -> None:
    poisoned(False, "leaf")
    words = r"gradient of 'layers\.1\.0' is not finite, the first of 8 leaves"
    with pytest.raises(FloatingPointError, match=words):
        poisoned(True, "leaf")
    with pytest.raises(AssertionError, match=words):
        run_on_processes(2, poisoned, True, "leaf")
    with pytest.raises(FloatingPointError, match=r"the loss is -?(inf|nan), and all gradients are"):
        poisoned(True, "loss")
    with pytest.raises(ValueError, match=r"by overflows LossScale\(.*LossScale\.static"):
        zf.train_step(
            mlp_loss, zf.sgd(0.1), zf.Mesh(dp=2), check_finite=True, loss_scale=zf.LossScale()
        )
