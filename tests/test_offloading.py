"""Offload: moving trees, where they live, and training that does not depend on it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import chunks, disk, offloading, tree
from zero_fn.graphs import op_name

from .processes import run_on_processes

PARAMS = {"a": (7, 11), "b": (11,), "c": (11, 1), "s": ()}  # shapes that no axis divides


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(shape, generator=generator) for k, shape in PARAMS.items()}


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 12, 7, generator=generator)[:n]
    return [(one, one.sum(-1, keepdim=True)) for one in x]


def loss_fn(p: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (torch.tanh(x @ p["a"] + p["b"]) @ p["c"] * p["s"] - y).square().mean()


Move = Callable[[zf.TrainState], zf.TrainState]


def trained(
    move: Move, steps: int = 20, optimizer: Any = None, mesh: zf.Mesh | None = None, **options: Any
) -> tuple[zf.TrainState, list[float]]:
    """The state after some steps, and the losses."""
    mesh = mesh or zf.Mesh(dp=3, backend="simulated")
    init, step = zf.train_step(loss_fn, optimizer or zf.adamw(1e-2), mesh, **options)
    state, losses = move(init(params())), []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return state, losses


def moves(folder: Path) -> dict[str, Move]:
    """Ways to offload a state."""
    return {
        "to cpu": lambda s: zf.offload(s, "cpu"),
        "all to disk": lambda s: zf.offload(s, folder / "all"),
        "optimizer to disk": lambda s: s._replace(
            opt_state=zf.offload(s.opt_state, folder / "optimizer")
        ),
        "parameters to disk": lambda s: s._replace(params=zf.offload(s.params, folder / "params")),
        "half to disk": lambda s: zf.offload(s, folder / "half", fraction=0.5),
        "mu to disk": lambda s: zf.offload(s, folder / "mu", where=lambda path, x: ".mu." in path),
    }


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested here does not depend on the disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a page, so that leaves have several."""
    monkeypatch.setattr(chunks, "CHUNK", disk.PAGE)


@pytest.mark.parametrize("stage", range(4))
def test_trajectories_are_the_same_bit_for_bit(stage: int, folder: Path) -> None:
    expected = trained(lambda s: s, stage=stage, clip=1.0)
    for name, move in moves(folder).items():
        if stage in (1, 2) and name in ("parameters to disk", "mu to disk"):
            continue  # the same program as at stage 3, but for the gathers
        found = trained(move, stage=stage, clip=1.0)
        assert found[1] == expected[1], name
        assert same(found[0], expected[0]), name
        at = zf.residency(found[0])
        assert ("cpu" in at) == (name not in ("all to disk",)), at
        assert any(str(folder) in place for place in at) == (name != "to cpu"), at


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"optimizer": zf.sgd(1e-2, momentum=0.9)}),
        ("adam with decay", {"optimizer": zf.adam(1e-2, weight_decay=0.1)}),
        ("chain", {"optimizer": zf.chain(zf.scale_by_adam(), zf.scale_by_learning_rate(1e-2))}),
        ("loss scale", {"loss_scale": zf.LossScale(initial=2.0**126, window=3)}),
        ("bf16", {"policy": zf.policy(compute="bf16")}),
        ("bf16 at rest", {"policy": zf.policy(params="bf16")}),
        ("microbatches", {"microbatches": 2}),
        ("onebit", {"optimizer": zf.onebit_adam(1e-2, freeze_step=3), "stage": 1}),
    ],
)
def test_in_combination(name: str, options: dict[str, Any], folder: Path) -> None:
    options = {"stage": 2, **options}
    expected, losses = trained(lambda s: s, steps=8, **options)
    if name == "loss scale":  # some steps are skipped, and not all
        assert 0 < expected.loss_scale.skipped.item() < 8
    found, found_losses = trained(lambda s: zf.offload(s, folder), steps=8, **options)
    assert found_losses == losses
    assert same(found, expected)
    assert list(zf.residency(found)) == [str(folder)]


def test_large_leaves_go_by_chunks(folder: Path) -> None:
    """Several chunks a leaf, the last one not full; bfloat16 moments beside float32 parameters."""
    wide = {"w": torch.linspace(-1, 1, 5000), "v": torch.linspace(0, 1, 2051).bfloat16()}

    def loss(p: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (p["w"].square().sum() + p["v"].float().square().sum()) * batch.mean()

    init, step = zf.train_step(loss, zf.adamw(0.1), zf.Mesh(dp=1))
    a, b = init(wide), zf.offload(init(wide), folder)
    for _ in range(3):
        (a, _), (b, _) = step(a, torch.ones(1)), step(b, torch.ones(1))
    assert same(a, b)


def on_processes(folder: Path) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:  # the process runs other tests too
        patch.setattr(chunks, "CHUNK", disk.PAGE)
        return offloaded_on_processes(folder)


def offloaded_on_processes(folder: Path) -> list[float]:
    mesh = zf.Mesh(dp=2)
    expected, losses = trained(lambda s: s, steps=6, mesh=mesh, stage=3)
    found, found_losses = trained(lambda s: zf.offload(s, folder), steps=6, mesh=mesh, stage=3)
    assert same(found, expected)
    assert losses == found_losses
    ranks = f"rank-{mesh.rank}-of-2"
    assert list(zf.residency(found)) == [str(folder / ranks)]
    init, step = zf.train_step(loss_fn, zf.adamw(1e-2), mesh, stage=3)
    # Rank 1 died before it finished its last step: both go back to the one that both have.
    if mesh.rank == 1:
        disk.go_back(folder / ranks, 5)
    before, _ = trained(lambda s: s, steps=5, mesh=mesh, stage=3)
    again = zf.restore(init(params()), folder)
    assert same(again, before)
    again, _ = step(again, batches(6)[5])
    assert same(again, expected)
    zf.discard(folder)
    return losses


def test_processes_have_folders_of_their_own_and_go_back_together(folder: Path) -> None:
    a, b = run_on_processes(2, on_processes, folder)
    assert a == b


def test_round_trips(folder: Path) -> None:
    state = {
        "w": torch.randn(5, 3),
        "view": torch.randn(4, 6).T,
        "half": torch.randn(3).bfloat16(),
        "step": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "empty": torch.zeros(0, 3),
        "name": "x",
    }
    state["tied"] = state["w"]
    there = zf.offload(state, folder / "deep")
    assert there["tied"] is there["w"]
    assert there["empty"] is state["empty"]
    assert there["name"] == "x"
    back = zf.offload(there, "cpu")
    tensors = [key for key in state if key != "name"]
    assert all(torch.equal(back[key], state[key]) for key in tensors)
    assert list(zf.residency(back)) == ["cpu"]
    again = zf.restore({**state, "tied": state["w"]}, folder / "deep")
    assert all(torch.equal(again[key], state[key]) for key in tensors)
    assert zf.offload(there, folder / "deep")["w"] is there["w"]


def test_a_state_on_disk_is_read_by_functions_that_do_not_change_it(folder: Path) -> None:
    p = zf.offload(params(), folder)
    value = zf.jit(loss_fn)(p, batches(1)[0])
    assert torch.equal(value, loss_fn(params(), batches(1)[0]))
    kept = zf.jit(lambda p: p["a"])(p)
    assert not disk.is_on_disk(kept)
    gradient = zf.grad(loss_fn)(p, batches(1)[0])
    assert list(zf.residency(gradient)) == ["cpu"]


def test_a_value_that_moves_to_a_leaf_in_memory_is_a_copy(folder: Path) -> None:
    """An old value that the new state keeps must not change when its file is written again."""

    def step(state: Any) -> Any:
        return {"now": state["now"] + 1, "before": state["now"]}

    run = zf.jit(step, donate=0)
    state = {"now": torch.zeros(3), "before": torch.zeros(3)}
    state = zf.offload(state, folder, where=lambda path, x: path == "now")
    history = []
    for _ in range(4):
        state = run(state)
        history.append(state["before"].clone())
        assert not disk.is_on_disk(state["before"])
    assert [x[0].item() for x in history] == [0, 1, 2, 3]
    assert [x.item() for x in state["now"]] == [4, 4, 4]


def test_an_unchanged_leaf_is_not_written(folder: Path) -> None:
    run = zf.jit(lambda s: {"a": s["a"], "b": s["b"] * 2}, donate=0)
    state = run(zf.offload({"a": torch.ones(2), "b": torch.ones(2)}, folder))
    first, second = disk.place_of(state["a"]), disk.place_of(state["b"])
    assert (first, second) == (disk.Place(folder, 0, 0), disk.Place(folder, 1, 1))
    swapped = zf.jit(lambda s: {"a": s["b"], "b": s["a"]}, donate=0)(state)
    assert swapped["a"].tolist() == [2, 2]
    assert swapped["b"].tolist() == [1, 1]


def test_leaves_on_disk_are_read_ahead(folder: Path) -> None:
    """Each read is told to the system when the one before it begins, in the backward too."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        for name in sorted(p):
            x = torch.tanh(x @ p[name])
        return x.square().mean()

    init, step = zf.train_step(loss, zf.adamw(0.1), zf.Mesh(dp=1), stage=3)
    wide = {name: torch.randn(9, 9) for name in "abcd"}
    state = zf.offload(init(wide), folder, where="params.*")
    program = step.trace(state, torch.randn(2, 9))  # type: ignore[attr-defined]
    nodes = [*program.graph_module.graph.nodes]
    names = dict(zip(nodes, program.paths, strict=False))
    told = [names[n.args[0]][-8] for n in nodes if op_name(n) == "zero_fn::read_ahead"]
    assert told[:3] == ["b", "c", "d"]  # the forward; then the backward, from the last
    assert told[3:] == ["c", "b"]
    skipped = zf.jit(step.f, donate=0, skip=["read_ahead"])  # type: ignore[attr-defined]
    assert same(skipped(state, torch.ones(2, 9))[0], step(init(wide), torch.ones(2, 9))[0])
    state = zf.offload(init(wide), folder / "again", where="params.*")
    assert same(step(state, torch.ones(2, 9))[0], step(init(wide), torch.ones(2, 9))[0])


def test_a_state_is_made_on_disk(folder: Path) -> None:
    init, step = zf.train_step(loss_fn, zf.adamw(1e-2), zf.Mesh(dp=3), stage=3)
    expected = init(params())

    def opt_state(path: str, x: Tensor) -> bool:
        return path.startswith("opt_state")

    state = zf.offload(init, folder / "some", where=opt_state)(params())
    assert same(state, expected)
    assert [place for place, _ in zf.residency(state).items()] == [str(folder / "some"), "cpu"]
    assert same(step(state, batches(1)[0])[0], step(expected, batches(1)[0])[0])
    assert list(zf.residency(zf.offload(init, "cpu")(params()))) == ["cpu"]


def test_fractions_choose_by_size(folder: Path) -> None:
    state = {"big": torch.zeros(60), "middle": torch.zeros(30), "small": torch.zeros(10)}

    def moved(fraction: float) -> list[str]:
        there = zf.offload(state, folder / str(fraction), fraction=fraction)
        return [key for key, x in there.items() if disk.is_on_disk(x)]

    assert moved(0.0) == []
    assert moved(0.5) == ["middle", "small"]
    assert moved(0.7) == ["big", "small"]
    assert moved(1.0) == ["big", "middle", "small"]
    with pytest.raises(ValueError, match=r"fraction is 1.5"):
        zf.offload(state, "cpu", fraction=1.5)


def test_patterns_choose_by_key_path(folder: Path) -> None:
    state = {"params": {"a": torch.zeros(3), "b": torch.zeros(3)}, "step": 3}
    there = zf.offload(state, folder, where=["*.b"])
    assert [key for key, x in there["params"].items() if disk.is_on_disk(x)] == ["b"]
    with pytest.raises(ValueError, match=r"where: 'opt_state.\*' matches none of the key paths"):
        zf.offload(state, "cpu", where="opt_state.*")


def test_residency_counts_every_byte_once(folder: Path) -> None:
    x = torch.zeros(256)
    state = {"a": x, "tied": x, "b": zf.offload(torch.zeros(3), folder)}
    found = zf.residency(state)
    assert found == {str(folder): (1, 12), "cpu": (1, 1024)}
    assert str(found).splitlines()[-1].split() == ["in", "all", "2", "leaves", "1.0", "KiB"]


def test_errors_say_what_to_write(folder: Path) -> None:
    p = params()
    with pytest.raises(TypeError, match=r"a folder is a pathlib\.Path"):
        zf.offload(p, "/some/where")
    with pytest.raises(ValueError, match="'a' requires a gradient"):
        zf.offload({"a": torch.zeros(2, requires_grad=True)}, "cpu")
    zf.offload(p, folder)
    with pytest.raises(FileExistsError, match=r"zf\.discard"):
        zf.offload(p, folder)
    with pytest.raises(ValueError, match=r"holds a leaf 'b', and the tree has none"):
        zf.restore({"a": p["a"]}, folder)
    with pytest.raises(ValueError, match=r"holds 'a' as .*float32 of shape \(7, 11\)"):
        zf.restore({**p, "a": torch.zeros(2)}, folder)
    with pytest.raises(FileNotFoundError, match="no state was offloaded here"):
        zf.restore(p, folder / "other")
    with pytest.raises(FileNotFoundError, match="no state was offloaded here"):
        zf.discard(folder / "other")


def test_a_host_or_disk_that_is_too_small_is_known_before_anything_moves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.empty(250, device="meta")}  # moving it would fail
    monkeypatch.setattr(offloading, "_available", lambda: 999)
    with pytest.raises(MemoryError, match=r"takes 1,000 bytes .* 999 are available"):
        zf.offload(state, "cpu")
    monkeypatch.undo()

    monkeypatch.setattr(offloading, "CONTAINER", folder)
    files = {"max": "5000\n", "current": "4500\n", "stat": "anon 9\ninactive_file 300\n"}
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    with pytest.raises(MemoryError, match=r"takes 1,000 bytes .* 800 are available"):
        zf.offload(state, "cpu")
    (folder / "memory.max").write_text("max\n")
    with pytest.raises(NotImplementedError, match="meta tensor"):
        zf.offload(state, "cpu")

    usage = shutil.disk_usage(folder)._replace(free=8191)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"takes 8,192 bytes .* 8,191 are free"):
        zf.offload({"w": torch.zeros(250)}, folder / "state")
    assert not (folder / "state").exists()


def test_a_step_that_would_leave_the_disk_is_refused(folder: Path) -> None:
    mesh = zf.Mesh(dp=1)
    init, step = zf.train_step(loss_fn, zf.adamw(1e-2), mesh, donate=False)
    with pytest.raises(ValueError, match=r"donate the state"):
        step(zf.offload(init(params()), folder / "a"), batches(1)[0])
    with pytest.raises(ValueError, match=r"the same structure"):
        zf.jit(lambda p: p["a"], donate=0)(zf.offload(params(), folder / "b"))
    with pytest.raises(ValueError, match=r"float64 of shape \(7, 11\)"):
        zf.jit(lambda p: tree.map(lambda x: x.double(), p), donate=0)(
            zf.offload(params(), folder / "c")
        )
    with pytest.raises(ValueError, match=r"compiler='eager'"):
        zf.jit(lambda p: p, donate=0, compiler="inductor")(zf.offload(params(), folder / "d"))


def test_a_state_that_was_replaced_is_refused(folder: Path) -> None:
    run = zf.jit(lambda p: tree.map(lambda x: x + 1, p), donate=0)
    state = zf.offload(params(), folder)
    alias = tree.map(lambda x: x.detach(), state)
    state = run(state)
    with pytest.raises(ValueError, match=r"'a'.*a later step has\s+replaced"):
        run(alias)
    assert same(run(state), tree.map(lambda x: x + 1 + 1, params()))


def test_files_are_deleted_when_asked_and_no_others(folder: Path) -> None:
    state = zf.offload(params(), folder / "state")
    other = folder / "state" / "notes.txt"
    other.write_text("mine")
    zf.discard(folder / "state")
    assert list((folder / "state").iterdir()) == [other]
    assert same(state, params())  # the memory is there until it is dropped
    with pytest.raises(FileNotFoundError):
        zf.jit(lambda p: p, donate=0)(state)
