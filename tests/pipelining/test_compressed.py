"""Gradients of a pipeline that travel compressed: a bucket for each stage, wherever it lives."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree

from .stages import CUTS, WIDTH, Stage, assert_same, batches, dense_run, embed, make
from .test_training import counted

Axes = dict[str, int]


@dataclass(frozen=True)
class Lossless:
    """A code that loses nothing, so that dense steps are equal."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def decode(self, payload: tuple[torch.Tensor, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
        return payload[0].to(dtype)


def shifted(params: Any, carry: None, batch: Any) -> Any:
    """The first stage, with a leaf of its own beside the one that the last stage shares."""
    out = embed(params, carry, batch)
    return {**out, "x": out["x"] + params["shift"]}


STAGES: list[Stage] = [shifted, *CUTS[4][1:]]


def params() -> tuple[Any, ...]:
    first, *rest = make(CUTS[4], tied=True)
    shift = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    return {**first, "shift": shift}, *rest


@dataclass(frozen=True)
class OneScale:
    """Signs and one scale for all that a rank sends to another: who shares a bucket matters."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x >= 0, x.abs().mean(-1, keepdim=True)

    def decode(self, payload: tuple[torch.Tensor, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(payload[0], 1.0, -1.0).to(dtype) * payload[1].to(dtype)


CODECS: dict[str, Any] = {"lossless": Lossless(), "one scale": OneScale()}
OPTIMIZERS: dict[str, Any] = {
    "1-bit Adam": lambda: zf.onebit_adam(1e-2, 2, mask=lambda path, shape: path != "1.bias"),
    "1-bit LAMB": lambda: zf.onebit_lamb(1e-2, 2),
    "0/1 Adam": lambda: zf.zero_one_adam(1e-2, 2, local_step_scaler=2, var_update_scaler=1),
}


def made(on: Axes | zf.Mesh, optimizer: Any, ragged: bool = False, **options: Any) -> Any:
    """The mesh, the pipeline, a state and the step."""
    mesh = on if isinstance(on, zf.Mesh) else zf.Mesh(**on)
    stages = [*STAGES[:-1], counted] if ragged else STAGES
    # stages 0 and 3, whose leaf is tied, on one rank or on two
    pipe = zf.pipeline(stages, 4, "1f1b" if mesh.shape.get("pp") == 4 else "zbv")
    init, step = zf.train_step(pipe, optimizer, mesh, **options)
    return mesh, pipe, init(params()), step


def train(axes: Axes, name: str, steps: int = 6, **options: Any) -> tuple[list[Any], Any]:
    optimizer = zf.adamw(1e-2, weight_decay=0.1) if name not in OPTIMIZERS else OPTIMIZERS[name]()
    if name not in OPTIMIZERS:
        options["compress"] = CODECS.get(name, name)
    mesh, pipe, state, step = made(axes, optimizer, **options)
    found = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        found.append({key: x.item() for key, x in metrics.items()})
    return found, zf.gather_tree(zf.spmd(pipe.collect, mesh)(state.params), mesh)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_without_loss_it_is_the_dense_step(axes: Axes, stage: int, ragged: bool) -> None:
    stages = [*STAGES[:-1], lambda *a: counted(*a)[0]] if ragged else STAGES
    losses, want = dense_run(stages, params(), batches(3))
    found, got = train(axes, "lossless", 3, stage=stage, ragged=ragged)
    assert [x["loss"] for x in found] == pytest.approx(losses, rel=1e-10)
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "1bit", "int8", "powersgd", "one scale"])
def test_numbers_do_not_depend_on_where_stages_live(name: str) -> None:
    losses, want = train({"dp": 2}, name, clip=0.5)
    assert losses[-1]["finite"] == 1
    for axes in ({"pp": 2, "dp": 2}, {"pp": 4, "dp": 2})[: 2 if name == "1-bit Adam" else 1]:
        found, got = train(axes, name, clip=0.5)
        for a, b in zip(found, losses, strict=True):
            assert a == pytest.approx(b, rel=1e-10)
        assert_same(got, want, 1e-10)


def on_processes(axes: Axes) -> Any:
    return [
        train(axes, name, clip=0.5, stage=1) for name in ("1-bit Adam", "0/1 Adam", "one scale")
    ]


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}])
def test_processes_find_what_the_simulation_finds(axes: Axes) -> None:
    want = [
        train(axes, name, clip=0.5, stage=1) for name in ("1-bit Adam", "0/1 Adam", "one scale")
    ]
    for results in run_on_processes(4, on_processes, axes):
        for (found, got), (losses, whole) in zip(results, want, strict=True):
            for a, b in zip(found, losses, strict=True):
                # a sum over processes is in another order; a sign that it turns is 1e-2 away
                assert a == pytest.approx(b, rel=1e-10)
            assert_same(got, whole, 1e-10)


def spoiled(axes: Axes) -> tuple[bool, bool, int]:
    """A step whose gradient is infinite in the last stage alone: that of a root at 0."""
    mesh = zf.Mesh(**axes)
    stages = [lambda p, _, x: x * p, lambda p, carry, x: (carry * p.sqrt()).mean()]
    pipe = zf.pipeline(stages, 2)
    init, step = zf.train_step(pipe, zf.onebit_adam(1e-2, 1), mesh)
    state = init((torch.ones(3), torch.ones(3)))
    state, _ = step(state, torch.ones(4, 3))
    whole = zf.gather_tree(zf.spmd(pipe.collect, mesh)(state.params), mesh)[0]

    def at_zero(path: str, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) if path.startswith("1") else x

    broken = state._replace(params=tree.map_with_path(at_zero, state.params))
    after, metrics = step(broken, torch.ones(4, 3))
    left, root = zf.gather_tree(zf.spmd(pipe.collect, mesh)(after.params), mesh)
    counts = [int(x.step) for x in tree.leaves(after.opt_state, _is_onebit) if _is_onebit(x)]
    kept = torch.equal(left, whole) and not root.any()
    return bool(metrics["finite"]), kept, max(counts)


def _is_onebit(node: Any) -> bool:
    return hasattr(node, "phase")


def test_a_gradient_that_is_not_finite_in_one_stage_changes_nothing_in_any() -> None:
    for finite, same, steps in [
        spoiled({"pp": 2, "dp": 2}),
        *run_on_processes(4, spoiled, {"pp": 2, "dp": 2}),
    ]:
        assert not finite
        assert same
        assert steps == 1


def test_only_codes_travel_once_the_warmup_is_over() -> None:
    _, _, state, step = made(zf.Mesh(pp=2, dp=2).abstract(), zf.onebit_adam(1e-2, 1))
    found = {}
    for phase in ("warmup", "compressed"):
        late = tree.map(
            lambda x, phase=phase: replace(x, phase=phase) if _is_onebit(x) else x,
            state.opt_state,
            is_leaf=_is_onebit,
        )
        program = step.trace(state._replace(opt_state=late), batches(1)[0])
        found[phase] = {c.kind: c for c in program.collectives() if c.axis == "dp"}
    assert found["warmup"]["all_reduce"].bytes_in > 8 * 1024
    # the loss, and whether all is finite
    assert found["compressed"]["all_reduce"].bytes_in <= 16
    assert (
        found["compressed"]["all_to_all"].calls == 2
    )  # of stage 0, and of the leaf that it shares


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["1-bit Adam"]()
    mesh, _, state, step = made({"pp": 2, "dp": 2}, optimizer, stage=1)
    for batch in batches(3):
        state, _ = step(state, batch)
    zf.save(tmp_path / "saved", state, mesh, step=3)
    _, _, like, _ = made({"pp": 2, "dp": 2}, optimizer, stage=1)
    loaded = zf.load(tmp_path / "saved", like, mesh)
    want, _ = step(state, batches(4)[3])
    got, _ = step(loaded, batches(4)[3])
    assert_same(tree.leaves(got), tree.leaves(want), 0)
