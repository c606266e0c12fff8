"""Checkpoints: every mesh, stage and interpreter reads what any other wrote, bit for bit."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import checkpoint, storage, tree
from zero_fn.regions import find_wholes, flat_boxes

RULES = {"in": zf.SliceRule(0, sections=(4, 8)), "out": 1, "words": zf.SliceRule(0, pad=True)}
RULES |= {"scale": None, "none": None, "norm": None}


def params(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"in": (12, 3), "out": (5, 12), "words": (7, 3), "scale": (), "none": (0, 3)}
    shapes["norm"] = (5,)
    return {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()}


def train(mesh: zf.Mesh, stage: Any, seed: int = 0) -> tuple[Any, Callable[..., Any]]:
    """A state on the mesh, and a step that changes every value by itself and the batch."""
    optimizer = zf.adamw(0.1)

    def init(p: Any) -> Any:
        p = zf.slice_params(p, RULES) if "tp" in mesh.shape else p
        p = zf.shard(p, stage)
        return zf.TrainState(p, optimizer.init(p))

    def step(state: Any, batch: torch.Tensor) -> Any:
        mean = zf.pmean(batch.mean(), "dp")
        grads = tree.map(lambda x: x.sin() * mean, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state)

    return zf.spmd(init, mesh)(params(seed)), zf.spmd(step, mesh)


def wholes(state: Any, mesh: zf.Mesh) -> dict[str, torch.Tensor]:
    gathered = zf.gather_tree(state, mesh)
    return dict(zip(tree.paths(gathered), tree.leaves(gathered), strict=True))


def trained(mesh: zf.Mesh, stage: Any, steps: int = 2) -> tuple[Any, Callable[..., Any]]:
    state, step = train(mesh, stage)
    for k in range(steps):
        state = step(state, torch.arange(12.0, dtype=torch.float64) + k)
    return state, step


class Rows(zf.Scheme):
    """A scheme of a user's own: values dealt out like cards, so no piece is a range."""

    def scatter(self, x: torch.Tensor, axis: Any) -> torch.Tensor:
        n = zf.axis_size(axis)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n))
        return zf.pscatter(flat.view(-1, n).T.reshape(-1), axis)

    def gather(self, piece: torch.Tensor, shape: Any, axis: Any) -> torch.Tensor:
        n, length = zf.axis_size(axis), torch.Size(shape).numel()
        return zf.all_gather(piece, axis).view(n, -1).T.reshape(-1)[:length].view(shape)


MESHES = [{"dp": 4}, {"dp": 2}, {"dp": 3}, {"dp": 1}, {"dp": 2, "tp": 2}, {"tp": 4, "dp": 3}]

THEIRS = [({"dp": 3}, Rows()), ({"tp": 2, "dp": 2}, Rows()), ({"dp": 2}, 1)]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (4, 1, 3)])
def test_the_boxes_of_a_range_are_its_values_in_order(shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start, stop in itertools.combinations(range(x.numel() + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        found = []
        for offsets, sizes in boxes:
            part = x
            for dim, (low, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, low, size)
            found.append(part.reshape(-1))
        assert torch.cat(found).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("stage", [0, 3, Rows()], ids=["stage 0", "stage 3", "own scheme"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_checkpoint_is_read_on_every_mesh_and_stage(
    sizes: dict[str, int], stage: Any, tmp_path: Path
) -> None:
    mesh = zf.Mesh(**sizes)
    state, _ = trained(mesh, stage)
    zf.save(tmp_path, state, mesh, step=2)
    expected = wholes(state, mesh)
    for other, other_stage in [*itertools.product(MESHES, (0, 3)), *THEIRS]:
        there = zf.Mesh(**other)
        like, _ = train(there, other_stage, seed=1)
        before = [x.clone() for x in tree.leaves(like)]
        found = wholes(zf.load(tmp_path, like, there), there)
        assert found.keys() == expected.keys()
        for path, x in found.items():
            assert torch.equal(x, expected[path]), (other, other_stage, path)
        assert all(map(torch.equal, before, tree.leaves(like)))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_run_goes_on_bit_for_bit(sizes: dict[str, int], tmp_path: Path) -> None:
    mesh = zf.Mesh(**sizes)
    state, step = trained(mesh, 3)
    zf.save(tmp_path, state, mesh, step=2)
    again = zf.load(tmp_path, train(mesh, 3, seed=1)[0], mesh)
    batch = torch.arange(12.0, dtype=torch.float64)
    for x, y in zip(
        tree.leaves(step(step(state, batch), batch)),
        tree.leaves(step(step(again, batch), batch)),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_boxes_hold_each_value_once() -> None:
    mesh = zf.Mesh(tp=4, dp=3)
    for path, whole in find_wholes(trained(mesh, 3)[0].params, mesh).items():
        count = torch.zeros(whole.shape)
        for box in whole.boxes:
            ends = zip(box.offsets, box.sizes, strict=True)
            count[tuple(slice(low, low + size) for low, size in ends)] += 1
        assert (count == 1).all(), path


def test_1bit_adam_goes_on_and_its_feedback_asks_on_another_mesh(tmp_path: Path) -> None:
    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ p).square().mean()

    def make(ranks: int) -> tuple[zf.Mesh, Any, Any]:
        mesh = zf.Mesh(dp=ranks)
        init, step = zf.train_step(loss, zf.onebit_adam(0.1, 2), mesh)
        return mesh, init(torch.ones(3)), step

    batch = torch.arange(12.0).reshape(4, 3)
    mesh, state, step = make(2)
    for _ in range(4):
        state, _ = step(state, batch)
    zf.save(tmp_path, state, mesh, step=4)
    saved = zf.gather_tree(state.params, mesh).clone()
    again = zf.load(tmp_path, make(2)[1], mesh)
    assert step(again, batch)[1]["loss"] == step(state, batch)[1]["loss"]
    # Its buckets are padded for the number of ranks, and feedback is each rank's own.
    mesh, like, _ = make(4)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        zf.load(tmp_path, like, mesh)
    for name in ("mu", "nu", "error.sent", "error.owned"):
        assert f"'opt_state.{name}' has shape" in str(error.value)
    found = zf.load(tmp_path, like, mesh, fresh=["opt_state.*"])
    assert torch.equal(zf.gather_tree(found.params, mesh), saved)


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    mesh = zf.Mesh(dp=2)
    saved = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2), "old": torch.ones(1)}
    zf.save(tmp_path, {**saved, "n": 3, "m": 4}, mesh, step=1)
    like = {"a": torch.ones(4), "b": torch.ones(2, dtype=torch.int64), "c": 5, "n": "x", "m": 0}
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        zf.load(tmp_path, {**like, "new": torch.ones(1)}, mesh)
    for words in (
        "'a' has shape (4,), saved is (3,)",
        "'b' has dtype torch.int64, saved is torch.float32",
        "'c' is 5 in `like` and a tensor in the checkpoint",
        "'n' is 'x' in `like`, saved is 3",
        "'old' is in the checkpoint and not in `like`",
        "'new' is in `like` and not in the checkpoint",
    ):
        assert words in str(error.value)
    assert "'m'" not in str(error.value)
    found = zf.load(
        tmp_path, {"m": 0, "new": torch.ones(1)}, mesh, fresh=["new", "a", "b", "c", "n", "old"]
    )
    assert found == {"m": 4, "new": torch.ones(1)}


@pytest.mark.parametrize("damage", ["missing", "short", "index", "values"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    mesh = zf.Mesh(dp=2)
    zf.save(tmp_path, {"a": torch.ones(300)}, mesh, step=1)
    (data,) = tmp_path.glob("step-*/*.distcp")
    file = {"index": data.parent / ".metadata", "values": data.parent / "values.json"}
    file = file.get(damage, data)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    words = {"missing": "is missing", "short": "should have"}.get(damage, "cannot be read")
    with pytest.raises(ValueError, match=words):
        zf.load(tmp_path, {"a": torch.ones(300)}, mesh)


def test_old_ones_go_and_a_step_is_replaced(tmp_path: Path) -> None:
    mesh = zf.Mesh(dp=2)
    for step in (1, 2, 3, 3, 10):
        zf.save(tmp_path, {"a": torch.tensor(float(step))}, mesh, step=step, keep=2)
    assert zf.saved_steps(tmp_path) == [3, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert zf.load(tmp_path, {"a": torch.tensor(0.0)}, mesh, step=3)["a"] == 3
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2 .* \[3, 10\]"):
        zf.load(tmp_path, {"a": torch.tensor(0.0)}, mesh, step=2)
    # as a kill between the two renames of a replacement leaves it
    (tmp_path / "step-00000010").rename(tmp_path / ".replaced-step-00000010")
    assert zf.load(tmp_path, {"a": torch.tensor(0.0)}, mesh)["a"] == 10


def test_a_tie_stays_a_tie_and_arguments_are_checked(tmp_path: Path) -> None:
    mesh, x = zf.Mesh(dp=1), torch.ones(2)
    zf.save(tmp_path, {"a": x, "b": x}, mesh, step=1)
    y = torch.zeros(2)
    found = zf.load(tmp_path, {"a": y, "b": y}, mesh)
    assert found["a"] is found["b"]
    assert found["a"] is not y
    with pytest.raises(ValueError, match="step is -1"):
        zf.save(tmp_path, {}, mesh, step=-1)
    with pytest.raises(ValueError, match="keep is 0"):
        zf.save(tmp_path, {}, mesh, step=1, keep=0)
    with pytest.raises(TypeError, match=r"'a' is <object"):
        zf.save(tmp_path, {"a": object()}, mesh, step=1)


KILLED = """
    import sys, torch, zero_fn as zf
    mesh = zf.Mesh(dp=2)
    for step in range(100000):
        state = {f"w{k}": torch.full((500,), float(step)) for k in range(8)}
        save = zf.save_async if sys.argv[2] == "beside" and step else zf.save
        save(sys.argv[1], {**state, "step": step}, mesh, step=step % 7, keep=3)
        if not step:  # the first save imports what it needs
            print("ready", flush=True)
"""


def kill_while_saving(folder: Path, times: int, how: str) -> None:
    like = {**{f"w{k}": torch.zeros(500) for k in range(8)}, "step": 0}
    script = folder / "save.py"
    script.write_text(textwrap.dedent(KILLED))
    delays = torch.rand(times, generator=torch.Generator().manual_seed(0)) * 0.2
    for delay in delays.tolist():
        child = subprocess.Popen(
            [sys.executable, script, folder / "run", how], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1 + delay)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        for step in zf.saved_steps(folder / "run"):
            found = zf.load(folder / "run", like, zf.Mesh(dp=3), step=step)
            numbers = {
                x.unique().item() if isinstance(x, torch.Tensor) else x for x in found.values()
            }
            assert len(numbers) == 1
    assert zf.saved_steps(folder / "run")


@pytest.mark.parametrize("how", ["save", "beside"])
def test_a_kill_leaves_whole_checkpoints(how: str, tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 1, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "beside"])
def test_thirty_kills_leave_whole_checkpoints(how: str, tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 30, how)


def save_there(folder: Path, sizes: dict[str, int], stage: int) -> dict[str, torch.Tensor]:
    mesh = zf.Mesh(**sizes)
    state, _ = trained(mesh, stage)
    zf.save(folder, state, mesh, step=2)
    return wholes(state, mesh)


def load_there(folder: Path, sizes: dict[str, int], stage: int) -> dict[str, torch.Tensor]:
    mesh = zf.Mesh(**sizes)
    return wholes(zf.load(folder, train(mesh, stage, seed=1)[0], mesh), mesh)


def refuse_there(folder: Path) -> str:
    mesh = zf.Mesh(dp=2)
    like = {"a": torch.ones(3 + mesh.rank)}
    try:
        zf.load(folder, like, mesh)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_processes_and_simulated_ranks_read_each_other(stage: int, tmp_path: Path) -> None:
    (expected, *_) = run_on_processes(2, save_there, tmp_path / "a", {"dp": 2}, stage)
    run_on_processes(2, save_there, tmp_path / "b", {"dp": 1, "tp": 2}, stage)
    simulated = zf.Mesh(dp=3, tp=2)
    state, _ = trained(simulated, 3)
    zf.save(tmp_path / "c", state, simulated, step=1)
    for folder, sizes in itertools.product("abc", ({"dp": 2}, {"dp": 1, "tp": 2})):
        for found in run_on_processes(2, load_there, tmp_path / folder, sizes, 3 - stage):
            for path, x in found.items():
                # other meshes add the batch up in another order: a few units in the last place
                torch.testing.assert_close(x, expected[path], rtol=1e-12, atol=1e-12)
    for folder in "ab":
        found = load_there(tmp_path / folder, {"dp": 3, "tp": 4}, 1)
        for path, x in found.items():
            torch.testing.assert_close(x, expected[path], rtol=1e-12, atol=1e-12)


def test_what_one_process_misses_all_raise(tmp_path: Path) -> None:
    zf.save(tmp_path, {"a": torch.ones(3)}, zf.Mesh(dp=1), step=1)
    texts = run_on_processes(2, refuse_there, tmp_path)
    assert all("'a' has shape (4,), saved is (3,)" in text for text in texts)


def load_with_a_bad_disk(folder: Path) -> str:
    mesh = zf.Mesh(dp=2)

    def unreadable(path: Path) -> Any:
        raise OSError("the disk of one rank cannot be read")

    with pytest.MonkeyPatch.context() as patch:  # the process runs other tests too
        if mesh.rank == 1:
            patch.setattr(storage, "read_index", unreadable)
        try:
            zf.load(folder, {"a": torch.ones(3)}, mesh)
        except ValueError as error:
            return str(error)
    return ""


def test_what_one_rank_cannot_read_all_ranks_refuse(tmp_path: Path) -> None:
    zf.save(tmp_path, {"a": torch.ones(3)}, zf.Mesh(), step=1)
    for message in run_on_processes(2, load_with_a_bad_disk, tmp_path):
        assert "its index cannot be read: OSError('the disk of one rank" in message


def save_with_an_error_on_one_rank(folder: Path) -> str:
    mesh = zf.Mesh(dp=2)
    with pytest.MonkeyPatch.context() as patch:  # the process runs other tests too
        if mesh.rank == 0:
            patch.setattr(checkpoint, "json", None)  # a fault of the program, not of the disk
        try:
            zf.save(folder, {"a": torch.ones(3)}, mesh, step=1)
        except AttributeError as error:
            return str(error)
    return ""


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = run_on_processes(2, save_with_an_error_on_one_rank, tmp_path)
    assert "'NoneType' object has no attribute 'dump'" in first
    assert second == first
