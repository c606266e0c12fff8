"""What people hit in systems that do the same job, as behaviour that must be right here.

Each row of ``COVERED`` is a report and the tests that hold against it; the tests below are those
that belong to no one room.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes
from .test_training import batches, mlp, mlp_loss

HERE = Path(__file__).parent

COVERED = {
    "stages differ under accumulation (DeepSpeed #1488, #545, #6550)": [
        "test_accumulation.py::test_equals_one_big_batch",
        "test_grid.py::test_a_step_is_the_dense_one",
    ],
    "the gradient norm is wrong at one stage (DeepSpeed #7718, #7837)": [
        "test_grid.py::test_norms_are_equal_at_every_stage",
    ],
    "a printed norm above the clip value (DeepSpeed #6767, #7220, #6480)": [
        "test_optim.py::test_the_metrics_name_the_norm_before_and_after",
    ],
    "a pipeline stage without parameters hangs in the norm (DeepSpeed #1522)": [
        "test_cases.py::test_a_stage_without_parameters_takes_part_in_the_norm",
        "test_precision.py::test_an_infinity_in_one_stage_is_known_to_all",
        "test_collectives.py::test_empty_and_small_blocks",
    ],
    "resuming on another number of ranks (DeepSpeed #2898, #5405, #2921)": [
        "test_checkpoint.py::test_a_checkpoint_is_read_on_every_mesh_and_stage",
        "test_resuming.py::test_a_run_goes_on_on_another_mesh_and_stage",
    ],
    "saved weights of shape 0 (DeepSpeed #2413, transformers #10789)": [
        "test_checkpoint.py::test_every_difference_is_in_one_error",
        "test_safetensors.py::test_others_read_it_and_we_read_it_back",
    ],
    "an activation is cut twice between stages (DeepSpeed #4191, #4196, #1538)": [
        "test_cases.py::test_what_crosses_a_stage_is_what_it_returned",
    ],
    "no way to run in a notebook (DeepSpeed #748, transformers #10988)": [
        "test_launching.py::test_launch_returns_what_all_ranks_return",
        "test_ranks.py::test_a_mesh_of_one_rank_works_anywhere",
    ],
    "a hang without a word when ranks diverge (DeepSpeed #8262, #7844, #860)": [
        "test_agreeing.py::*",
        "test_launching.py::test_the_first_failure_is_what_one_sees",
    ],
    "memory estimates are off by 10 times (DeepSpeed #4527, #5102)": [
        "test_passes.py::test_the_predicted_peak_is_the_measured_one",
    ],
    "functions of cells cannot be pickled (pytorch #62943, accelerate #908)": [
        "test_launching.py::test_functions_of_a_script_and_lambdas_are_sent",
    ],
    "freezing and unfreezing after a resume (DeepSpeed #2921)": [
        "test_freezing.py::test_unfreezing_adds_moments",
    ],
    "tied weights under overlapped reduction (DeepSpeed #684)": [
        "test_sharding.py::test_tied_weights_stay_one_piece",
        "test_cases.py::test_tied_weights_have_one_reduction",
    ],
    "torch.func crashes under ZeRO-3 (DeepSpeed #7323, #7913)": [
        "test_transforms.py::*",
    ],
    "the loss scale falls to its minimum in silence": [
        "test_precision.py::test_fit_says_when_the_scale_is_stuck",
    ],
    "evaluation breaks training (DeepSpeed #3599, transformers #23693)": [
        "test_grid.py::test_a_step_is_the_dense_one",
        "test_cases.py::test_evaluating_in_any_order_changes_nothing",
    ],
    "psum's gradient is N times too large (jax #3970, #36886)": [
        "test_collectives.py::*",
    ],
    "install or import needs a compiler, CUDA_HOME or MPI": [
        "test_package.py::test_a_wheel_works_in_an_empty_environment",
        "test_package.py::test_import_is_silent_quick_and_leaves_things_alone",
    ],
    "Triton code is imported without a GPU (triton #6150, #5570)": [
        "test_package.py::test_import_works_without_triton",
        "test_package.py::test_import_is_silent_quick_and_leaves_things_alone",
    ],
    "no default process group on one device": [
        "test_ranks.py::test_a_mesh_of_one_rank_works_anywhere",
    ],
    "batch arithmetic (DeepSpeed #6914)": [
        "test_ranks.py::test_batches_that_are_refused",
    ],
    "a misspelt key does nothing (DeepSpeed #653, #774)": [
        "test_cases.py::test_a_misspelt_option_is_an_error",
        "test_precision.py::test_names_of_dtypes",
    ],
    "features refuse each other late (DeepSpeed #5046, #1197)": [
        "test_combinations.py::test_the_page_is_what_the_pairs_say",
        "test_onebit.py::test_refusals_come_when_the_step_is_built",
        "test_freezing.py::test_errors_of_freezing",
    ],
    "tokens are weighted wrongly (transformers #34191, #34242)": [
        "test_accumulation.py::test_ragged_microbatches_equal_one_big_batch",
        "test_accumulation.py::test_means_with_weights",
    ],
    "parameters that are not updated; adapters (pytorch #149205, #104690)": [
        "test_freezing.py::test_low_rank_adapters",
    ],
    ".item() that the user never wrote; batch norm (functorch #770, #1024, #273)": [
        "test_modules.py::test_batch_norm",
        "test_modules.py::test_running_statistics_that_nobody_averaged_are_refused",
        "test_modules.py::test_errors",
    ],
    "hundreds of log lines a rank (DeepSpeed #1541, #5801)": [
        "test_cases.py::test_nothing_is_printed",
    ],
    "one overflow in the compressed phase (DeepSpeed #753)": [
        "test_onebit.py::test_a_gradient_that_is_not_finite_changes_nothing",
    ],
    "1-bit Adam with tensor and pipeline parallelism (DeepSpeed #781)": [
        "test_onebit.py::test_refusals_come_when_the_step_is_built",
    ],
    "the host runs out of memory under offload (DeepSpeed #4571, #3000)": [
        "test_offloading.py::test_a_host_or_disk_that_is_too_small_is_known_before_anything_moves",
    ],
    "a loss scale below 1 (apex #452, tensorflow #38357)": [
        "test_cases.py::test_a_loss_scale_below_one",
    ],
}


@pytest.mark.parametrize("report", COVERED)
def test_a_report_has_its_tests(report: str) -> None:
    for name in COVERED[report]:
        file, _, test = name.partition("::")
        body = ast.parse((HERE / file).read_text()).body
        names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        assert test in names or (test == "*" and any(n.startswith("test_") for n in names)), name


def norm_of_stages(w: torch.Tensor) -> float:
    """The first stage has one leaf, the second none."""
    pipe = zf.pipeline([lambda p, _, x: x * p["w"], lambda p, carry, x: carry.sum()], 2)

    def program(w: torch.Tensor) -> torch.Tensor:
        return zf.global_norm(pipe.place(zf.shard(({"w": w}, ()), 1)))

    return zf.spmd(program, zf.Mesh(pp=2, dp=2))(w).item()


def test_a_stage_without_parameters_takes_part_in_the_norm() -> None:
    w = torch.tensor([2.0, 3.0, 6.0])
    assert run_on_processes(4, norm_of_stages, w) == [7.0] * 4


def gradients_of_cut_stages(x: torch.Tensor) -> list[torch.Tensor]:
    """What crosses the stages is cut over tp along the rows, as under sequence parallelism."""

    def first(params: Any, _: Any, x: torch.Tensor) -> torch.Tensor:
        return zf.pscatter(torch.tanh(x * params["w"]), "tp", dim=0)

    def last(params: Any, carry: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert carry.shape == (x.shape[0] // 2, x.shape[1])
        return (zf.all_gather_invariant(carry, "tp", dim=0) * params["v"] - x).square().mean()

    pipe = zf.pipeline([first, last], 2)

    def program(state: Any, x: torch.Tensor) -> Any:
        grads, _ = pipe(pipe.place(state), x)
        return state, *tree.leaves(pipe.collect(grads))

    state = ({"w": torch.linspace(0, 1, 3)}, {"v": torch.linspace(1, 2, 3)})
    return list(zf.spmd(program, zf.Mesh(pp=2, tp=2), data_axes=())(state, x)[1:])


def test_what_crosses_a_stage_is_what_it_returned() -> None:
    x = torch.randn(8, 3)
    w = torch.linspace(0, 1, 3).requires_grad_()
    v = torch.linspace(1, 2, 3).requires_grad_()
    (torch.tanh(x * w) * v - x).square().mean().backward()
    for found in (gradients_of_cut_stages(x), *run_on_processes(4, gradients_of_cut_stages, x)):
        # float32: two micro-batches are added up in another order
        torch.testing.assert_close(found, [w.grad, v.grad], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_tied_weights_have_one_reduction(microbatches: int) -> None:
    mesh = zf.Mesh(dp=2).abstract()
    w = torch.ones(4, 4)
    init, step = zf.train_step(
        lambda p, x: (torch.tanh(x @ p["a"]) @ p["b"]).mean(),
        zf.sgd(0.1),
        mesh,
        stage=2,
        microbatches=microbatches,
    )
    unfused = zf.jit(step.f, donate=0, skip=("bucket",))  # type: ignore[attr-defined]
    program = unfused.trace(init({"a": w, "b": w}), torch.ones(12, 4))
    calls = [c.calls for c in program.collectives() if c.kind == "reduce_scatter"]
    assert sum(calls) == microbatches


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_evaluating_in_any_order_changes_nothing(stage: int) -> None:
    """Bit for bit, with donation, batches of other sizes and evaluations before and between."""
    mesh = zf.Mesh(dp=2)

    def run(orders: str) -> list[float]:
        init, step = zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, stage=stage)
        evaluate = zf.jit(
            zf.spmd(lambda s, b: zf.pmean(mlp_loss(zf.unshard(s.params), b), "dp"), mesh)
        )
        state, losses, data = init(mlp()), [], iter(batches(4))
        x, y = batches(1, rows=36)[0]
        for what in orders:
            if what == "t":
                state, metrics = step(state, next(data))
                losses.append(metrics["loss"].item())
            else:
                first = evaluate(state, (x, y))
                assert torch.equal(evaluate(state, (x, y)), first)
                evaluate(state, (x[:4], y[:4]))
        return [*losses, *(x.double().sum().item() for x in tree.leaves(state.params))]

    want = run("tttt")
    assert run("ettettee") == want
    assert run("tetetet") == want


def test_a_misspelt_option_is_an_error() -> None:
    mesh = zf.Mesh(dp=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stge'"):
        zf.train_step(mlp_loss, zf.sgd(0.1), mesh, stge=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="did you mean '1bit'"):
        zf.train_step(mlp_loss, zf.sgd(0.1), mesh, compress="1bitt")  # type: ignore[arg-type]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    init, step = zf.train_step(mlp_loss, zf.adamw(1e-2), zf.Mesh(dp=2), stage=3, clip=1.0)
    zf.fit(step, init(mlp()), batches(3), show=False)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_a_loss_scale_below_one() -> None:
    """Gradients that overflow at 1: the scale goes below, and the run goes on."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"].half() * 300 * x.half() * 300).float().sum()

    init, step = zf.train_step(
        loss,
        zf.sgd(1e-6),
        zf.Mesh(dp=2),
        loss_scale=zf.LossScale(initial=2.0**10, minimum=2.0**-8, hysteresis=1),
    )
    state, scales = init({"w": torch.ones(2) * 1e-3}), []
    for _ in range(14):
        state, metrics = step(state, torch.ones(2, 2) * 3)
        scales.append(metrics["loss_scale"].item())
    assert 2.0**-8 < scales[-1] == scales[-2] < 1
    assert metrics["stuck"] == 0
