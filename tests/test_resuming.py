"""Runs that are saved as they go: stopped anywhere, they go on as if nothing had happened."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import background, tree
from zero_fn.__main__ import main
from zero_fn.inference.model_files import load_model

from .test_training import batches, mlp, mlp_loss


class StopError(Exception):
    pass


def until(data: Any, count: int) -> Iterator[Any]:
    """The first batches, then an error, as a run ends that is killed."""
    for place, batch in enumerate(data):
        if place == count:
            raise StopError
        yield batch


def a_run(mesh: zf.Mesh, stage: int = 2) -> tuple[Any, Any]:
    init, step = zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, stage=stage, clip=1.0)
    return init(mlp()), step


def values_of(state: Any, mesh: zf.Mesh) -> list[torch.Tensor]:
    return tree.leaves(zf.gather_tree(state, mesh))


@pytest.mark.parametrize(("stop", "in_background"), [(1, False), (6, True), (7, False)])
def test_a_stopped_run_goes_on_bit_for_bit(stop: int, in_background: bool, tmp_path: Path) -> None:
    mesh, data = zf.Mesh(dp=3), batches(8)
    state, step = a_run(mesh)
    want_state, want = zf.fit(step, state, data, show=False)
    run = zf.Checkpoints(tmp_path, mesh, every=3, keep=2, background=in_background)
    state, step = a_run(mesh)
    with pytest.raises(StopError):
        zf.fit(step, state, until(data, stop), checkpoint=run, show=False)
    background.settle()
    assert zf.saved_steps(tmp_path) == [n for n in (3, 6) if n <= stop]
    state, step = a_run(mesh)
    rows: list[dict[str, float]] = []
    state, losses = zf.fit(step, state, data, checkpoint=run, show=False, log=rows.append)
    assert losses == want
    assert [row["step"] for row in rows] == list(range(stop // 3 * 3 + 1, 9))
    for x, y in zip(values_of(state, mesh), values_of(want_state, mesh), strict=True):
        assert torch.equal(x, y)
    assert zf.saved_steps(tmp_path) == [6, 8]


def test_a_run_goes_on_on_another_mesh_and_stage(tmp_path: Path) -> None:
    data = batches(9)
    mesh = zf.Mesh(dp=3)
    state, step = a_run(mesh)
    _, want = zf.fit(step, state, data, show=False)
    for count, (ranks, stage) in zip((3, 5, 9), ((3, 3), (2, 0), (1, 1)), strict=True):
        mesh = zf.Mesh(dp=ranks)
        state, step = a_run(mesh, stage)
        run = zf.Checkpoints(tmp_path, mesh, every=10)
        _, losses = zf.fit(step, state, data[:count], checkpoint=run, show=False)
    # float32 sums in another order
    assert losses == pytest.approx(want, rel=1e-5)


def test_a_finished_run_says_that_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, data = zf.Mesh(dp=2), batches(3)
    run = zf.Checkpoints(tmp_path, mesh, every=2)
    for expected in (0, 1):
        state, step = a_run(mesh)
        _, losses = zf.fit(step, state, data, checkpoint=run, show=False)
        assert len(losses) == 3
        assert caplog.text.count("at step 3 already") == expected


def shuffled(seed: int) -> Any:
    """A loader that shuffles by torch's own generator, and noise by numpy's and Python's."""
    loader = DataLoader(TensorDataset(torch.arange(24.0).view(12, 2)), 3, shuffle=True)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)

    def noisy(state: Any, batch: Any) -> tuple[Any, torch.Tensor]:
        noise = torch.randn(()) + np.random.rand() + random.random()
        return {"w": state["w"] + batch[0].sum() * noise}, state["w"].sum()

    return loader, noisy


def test_shuffling_and_noise_go_on(tmp_path: Path) -> None:
    loader, noisy = shuffled(0)
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    want_state, want = zf.fit(noisy, state, loader, show=False)
    run = zf.Checkpoints(tmp_path, zf.Mesh(), every=2)
    loader, noisy = shuffled(0)
    with pytest.raises(StopError):
        zf.fit(noisy, state, until(loader, 3), checkpoint=run, show=False)
    loader, noisy = shuffled(1)  # whatever the state of the generators at the restart
    state, losses = zf.fit(noisy, state, loader, checkpoint=run, show=False)
    assert losses == want
    assert torch.equal(state["w"], want_state["w"])


def noise_of_ranks(folder: Path, steps: int) -> list[float]:
    mesh = zf.Mesh(dp=2)
    torch.manual_seed(7 + mesh.rank if steps == 3 else 0)  # ranks draw numbers of their own
    run = zf.Checkpoints(folder, mesh, every=10, background=True)
    drawn = []

    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        drawn.append(torch.rand(()).item())
        return state + batch, batch

    zf.fit(step, torch.zeros(()), torch.arange(5.0)[:steps], checkpoint=run, show=False)
    return drawn


def test_each_rank_goes_on_with_its_own_generator(tmp_path: Path) -> None:
    first = run_on_processes(2, noise_of_ranks, tmp_path, 3)
    rest = run_on_processes(2, noise_of_ranks, tmp_path, 5)
    for rank in range(2):
        torch.manual_seed(7 + rank)
        assert first[rank] + rest[rank] == [torch.rand(()).item() for _ in range(5)]


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, data = zf.Mesh(dp=2), batches(5)
    run = zf.Checkpoints(tmp_path, mesh, every=2)
    state, step = a_run(mesh)
    _, want = zf.fit(step, state, data, checkpoint=run, show=False)
    for number in (4, 5):
        (file,) = (tmp_path / f"step-{number:08d}").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:100])
    state, step = a_run(mesh)
    _, losses = zf.fit(step, state, data, checkpoint=run, show=False)
    assert losses == want
    assert "going back to step 4" in caplog.text
    assert "going back to step 2" in caplog.text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"step-{n:08d}" for n in (2, 4, 5)} | {f"damaged-step-{n:08d}" for n in (4, 5)}
    for file in tmp_path.glob("*/.metadata"):
        file.write_bytes(b"")
    state, step = a_run(mesh)
    with pytest.raises(ValueError, match="its index cannot be read"):  # not from the beginning
        zf.fit(step, state, data, checkpoint=run, show=False)


def test_another_model_is_refused_and_arguments_are_checked(tmp_path: Path) -> None:
    mesh = zf.Mesh(dp=2)
    run = zf.Checkpoints(tmp_path, mesh, every=2)
    state, step = a_run(mesh)
    zf.fit(step, state, batches(2), checkpoint=run, show=False)
    with pytest.raises(ValueError, match=r"'train\.w' is in `like` and not in the checkpoint"):
        zf.fit(step, {"w": torch.ones(2)}, batches(2), checkpoint=run, show=False)
    with pytest.raises(ValueError, match="every is 0"):
        zf.Checkpoints(tmp_path, mesh, every=0)
    with pytest.raises(ValueError, match="keep is -1"):
        zf.Checkpoints(tmp_path, mesh, every=1, keep=-1)


def test_a_save_in_the_background_holds_what_was_there(tmp_path: Path) -> None:
    """The next steps overwrite the donated state while it is written."""
    mesh = zf.Mesh(dp=2)
    state, step = a_run(mesh, 3)
    for number, batch in enumerate(batches(4)):
        kept = [x.clone() for x in values_of(state, mesh)]
        saving = zf.save_async(tmp_path, state, mesh, step=number)
        state, _ = step(state, batch)
        found = values_of(zf.load(tmp_path, a_run(mesh, 3)[0], mesh, step=number), mesh)
        assert saving.done()
        assert all(map(torch.equal, found, kept))
        assert "done" in repr(saving)


def test_what_fails_in_the_background_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = zf.Mesh()
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "folder"
    saving = zf.save_async(bad, {"w": torch.ones(2)}, mesh, step=1)
    with pytest.raises(OSError, match="Not a directory"):
        zf.save(tmp_path, {"w": torch.ones(2)}, mesh, step=1)
    with pytest.raises(OSError, match="Not a directory"):
        saving.wait()
    zf.save(tmp_path, {"w": torch.ones(2)}, mesh, step=1)
    saving = zf.save_async(bad, {"w": torch.ones(2)}, mesh, step=1)
    with pytest.raises(OSError, match="Not a directory"):
        saving.wait()
    zf.save_async(tmp_path, {"w": torch.ones(2)}, mesh, step=2).wait()
    assert zf.saved_steps(tmp_path) == [1, 2]
    assert caplog.text.count("the save of step 1 to") == 2


def train_beside_saves(folder: Path) -> list[float]:
    """Saves of two processes, while their steps exchange over the same ranks."""
    mesh = zf.Mesh(dp=2)
    run = zf.Checkpoints(folder, mesh, every=1, keep=2, background=True)
    state, step = a_run(mesh, 3)
    return zf.fit(step, state, batches(12), checkpoint=run, show=False)[1]


def test_processes_save_beside_their_steps(tmp_path: Path) -> None:
    first, second = run_on_processes(2, train_beside_saves, tmp_path)
    mesh = zf.Mesh(dp=2)
    state, step = a_run(mesh, 3)
    _, want = zf.fit(step, state, batches(12), show=False)
    assert first == second == pytest.approx(want, rel=1e-6)
    state, step = a_run(mesh, 3)
    run = zf.Checkpoints(tmp_path, mesh, every=1)
    assert zf.fit(step, state, batches(12), checkpoint=run, show=False)[1] == first


TINY = ["demo", "--preset", "tiny", "--steps", "6", "--save-every", "2"]


@pytest.mark.parametrize("axes", [["--dp", "2"], ["--dp", "1", "--pp", "2"]])
def test_the_demo_saves_and_generate_reads(
    axes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    command = [*TINY, *axes, "--save", folder]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert zf.saved_steps(folder) == [4, 6]
    assert main(command) == 2
    assert "there are checkpoints of the steps [4, 6]; go on" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0  # nothing is left to train
    again = capsys.readouterr().out
    assert [x for x in first.splitlines() if "loss" in x] == [
        x for x in again.splitlines() if "loss" in x
    ]
    params, config = load_model(folder)
    assert params["head"] is params["tokens"]
    assert len(params["blocks"]) == config.layers == 2
    generate = ["generate", "--checkpoint", folder, "--tokens", "1,2,3", "--max-new-tokens", "4"]
    assert main(generate) == 0
    assert len(capsys.readouterr().out.split(",")) == 4
    assert main([*TINY, "--resume"]) == 2
    assert "--save FOLDER, which is missing" in capsys.readouterr().err


def test_a_model_is_read_from_checkpoints_of_ones_own(tmp_path: Path) -> None:
    from zero_fn.inference.model_files import save_config
    from zero_fn.models import gpt

    config = gpt.Config(vocabulary=11, length=8, layers=2, heads=2, width=8)
    mesh = zf.Mesh(dp=2, tp=2)
    params = gpt.init(config)
    init, _ = zf.train_step(
        lambda p, b: gpt.loss(p, b, config, "tp"),
        zf.adamw(1e-3),
        mesh,
        stage=3,
        slice_rules=gpt.rules(config),
    )
    zf.save(tmp_path, init(params), mesh, step=3)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    save_config(tmp_path, config)
    found, there = load_model(tmp_path)
    assert there == config
    assert all(map(torch.equal, tree.leaves(found), tree.leaves(params)))
    zf.save(tmp_path, {"w": torch.ones(2)}, mesh, step=4)
    with pytest.raises(ValueError, match="has no GPTs"):
        load_model(tmp_path)
    save_config(tmp_path, config, attention="bigbird")
    with pytest.raises(ValueError, match="attention='bigbird'"):
        load_model(tmp_path)
