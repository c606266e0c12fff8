"""Checkpoints of pipelines: the same stages on other ranks, with slices and tied leaves."""

from pathlib import Path
from typing import Any

import torch

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.models import gpt

CONFIG = gpt.Config(vocabulary=11, length=8, layers=3, heads=2, width=8)
STAGES = 4


def train(axes: dict[str, int], stage: int, seed: int) -> tuple[zf.Mesh, Any, Any, Any]:
    """The mesh, a state on it, the step, and what puts the stages' parameters together."""
    mesh = zf.Mesh(**axes)
    sliced = axes.get("tp", 1) > 1
    pipe = zf.pipeline(
        gpt.stages(CONFIG, STAGES, "tp" if sliced else None),
        2,
        "1f1b" if axes["pp"] == STAGES else "interleaved",
    )
    rules = gpt.rules(CONFIG, staged=True) if sliced else None
    init, step = zf.train_step(pipe, zf.adamw(1e-2), mesh, stage=stage, clip=0.1, slice_rules=rules)
    state = init(gpt.split_params(gpt.init(CONFIG, seed), CONFIG, STAGES))
    return mesh, state, step, zf.spmd(pipe.collect, mesh)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocabulary, (4, CONFIG.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def whole(state: Any, mesh: zf.Mesh, collect: Any) -> list[torch.Tensor]:
    """Parameters and both moments."""
    (adam,) = [x for x in tree.leaves(state.opt_state, _has_moments) if _has_moments(x)]
    trees = [collect(x) for x in (state.params, adam.mu, adam.nu)]
    found: list[torch.Tensor] = tree.leaves([zf.gather_tree(x, mesh) for x in trees])
    return found


def _has_moments(node: Any) -> bool:
    return hasattr(node, "mu")


def save_there(folder: Path, axes: dict[str, int], stage: int) -> list[torch.Tensor]:
    mesh, state, step, collect = train(axes, stage, seed=0)
    for seed in range(2):
        state, _ = step(state, batch(seed))
    zf.save(folder, state, mesh, step=2)
    return whole(state, mesh, collect)


def load_there(folder: Path, axes: dict[str, int], stage: int) -> tuple[list[torch.Tensor], float]:
    mesh, like, step, collect = train(axes, stage, seed=1)
    state = zf.load(folder, like, mesh)
    found = [x.clone() for x in whole(state, mesh, collect)]
    return found, step(state, batch(2))[1]["loss"].item()


def test_four_ranks_of_a_pipeline_go_on_as_two_and_simulated(tmp_path: Path) -> None:
    (saved, *_) = run_on_processes(4, save_there, tmp_path, {"pp": 4, "dp": 1}, 0)
    there = run_on_processes(4, load_there, tmp_path, {"pp": 2, "dp": 1, "tp": 2}, 1)
    there += run_on_processes(2, load_there, tmp_path, {"pp": 2, "dp": 1}, 3)
    there.append(load_there(tmp_path, {"pp": 2, "dp": 2, "tp": 2}, 2))
    for found, loss in there:
        torch.testing.assert_close(found, saved, rtol=0, atol=0)
        # sums over other ranks, in float32
        assert abs(loss - there[0][1]) <= 1e-6 * abs(loss)


def test_slices_of_two_ranks_go_on_simulated(tmp_path: Path) -> None:
    (saved, *_) = run_on_processes(4, save_there, tmp_path, {"pp": 2, "dp": 1, "tp": 2}, 2)
    found, _ = load_there(tmp_path, {"pp": 4, "dp": 1}, 0)
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
