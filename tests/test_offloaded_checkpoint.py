"""Checkpoints of states that are offloaded: saved from files, read into memory and back."""

from pathlib import Path

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .test_training import batches, mlp, mlp_loss


def train(stage: int, ranks: int = 2) -> tuple[zf.Mesh, zf.Train]:
    mesh = zf.Mesh(dp=ranks)
    return mesh, zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, stage=stage)


def whole(state: zf.TrainState, mesh: zf.Mesh) -> list[torch.Tensor]:
    return tree.leaves(zf.gather_tree((state.params, state.opt_state), mesh))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("where", [None, "opt_state.*"])
def test_saved_from_disk_and_loaded_anywhere(stage: int, where: str | None, tmp_path: Path) -> None:
    mesh, (init, step) = train(stage)
    first, second, third = batches(3)
    expected, _ = step(init(mlp()), first)
    state, _ = step(zf.offload(init(mlp()), tmp_path / "state", where=where), first)
    zf.save(tmp_path / "saved", state, mesh, step=1)
    # On two meshes, stages and places, and on from there.
    for ranks, other in ((2, stage), (3, 3), (1, 0)):
        mesh_, (init_, step_) = train(other, ranks)
        loaded = zf.load(tmp_path / "saved", init_(mlp()), mesh_)
        for a, b in zip(whole(loaded, mesh_), whole(expected, mesh), strict=True):
            assert torch.equal(a, b)
        assert list(zf.residency(loaded)) == ["cpu"]
        there = zf.offload(
            tree.map(torch.clone, loaded), tmp_path / f"{ranks}-{other}", where=where
        )
        (after, _), (kept, _) = step_(there, second), step_(loaded, second)
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(after), tree.leaves(kept), strict=True)
        )
    # The state that was saved goes on, too; what its files were loaded from is not changed.
    state, _ = step(state, third)
    again = zf.load(tmp_path / "saved", init(mlp()), mesh)
    for a, b in zip(whole(again, mesh), whole(expected, mesh), strict=True):
        assert torch.equal(a, b)


def test_loaded_like_a_state_on_disk(tmp_path: Path) -> None:
    """What is loaded is in memory, wherever the state is that it is cut like."""
    mesh, (init, step) = train(3)
    (batch,) = batches(1)
    like = zf.offload(init(mlp()), tmp_path / "like")
    expected, _ = step(init(mlp()), batch)
    zf.save(tmp_path / "saved", expected, mesh, step=1)
    loaded = zf.load(tmp_path / "saved", like, mesh)
    assert list(zf.residency(loaded)) == ["cpu"]
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(like), tree.leaves(init(mlp())), strict=True)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(loaded), tree.leaves(expected), strict=True)
    )
