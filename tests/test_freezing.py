"""Leaves that are not trained, and groups of leaves, against torch.optim's parameter groups."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes
from .test_training import batches, mlp, mlp_loss

FROZEN = ("in.*", "layers.0.1")
EMPTY: Any = ()


def is_frozen(path: str) -> bool:
    return path.startswith("in.") or path == "layers.0.1"


def dense(steps: int, thaw: int | None = None) -> tuple[list[float], Any]:
    """torch.optim alone; from the step ``thaw`` on everything is trained."""
    params = tree.map(torch.clone, mlp())
    named = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    moments = {path: (torch.zeros_like(x), torch.zeros_like(x)) for path, x in named.items()}
    losses = []
    for count, batch in enumerate(batches(steps), 1):
        trained = {p: x for p, x in named.items() if not is_frozen(p) or count > (thaw or steps)}
        for x in named.values():
            x.requires_grad_(True)
        loss = mlp_loss(params, batch)
        grads = torch.autograd.grad(loss, list(trained.values()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        losses.append(loss.item())
        for (path, x), g in zip(trained.items(), grads, strict=True):
            m, v = moments[path]
            g = g * (0.3 / (norm + 1e-6)).clamp(max=1)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            update = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + 1e-8) + 0.1 * x
            with torch.no_grad():
                x.sub_(1e-2 * update)
    return losses, tree.map(lambda x: x.detach(), params)


def run(stage: int, microbatches: int, steps: int, thaw: int | None = None) -> Any:
    mesh = zf.Mesh(dp=2)
    optimizer = zf.adamw(1e-2, weight_decay=0.1)
    made = {"stage": stage, "clip": 0.3, "microbatches": microbatches}
    init, step = zf.train_step(mlp_loss, optimizer, mesh, frozen=FROZEN, **made)
    state, losses = init(mlp()), []
    moments = [p for p in tree.paths(state.opt_state) if p.startswith("mu.")]
    assert len(moments) == len(tree.leaves(mlp())) - 3
    for count, batch in enumerate(batches(steps)):
        if count == thaw:
            state = zf.unfreeze(state, optimizer, mesh, stage=stage)
            step = zf.train_step(mlp_loss, optimizer, mesh, **made).step
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    params = zf.merge(state.params, state.frozen) if state.frozen != () else state.params
    return losses, zf.gather_tree(params, mesh)


def assert_same(got: Any, want: Any) -> None:
    # float32, other orders of summation
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_leaves_stay_and_the_others_train(stage: int, microbatches: int) -> None:
    want = dense(5)
    got = run(stage, microbatches, 5)
    assert_same(got, want)
    before = mlp()
    for path, x, y in zip(
        tree.paths(before), tree.leaves(before), tree.leaves(got[1]), strict=True
    ):
        assert torch.equal(x, y) == is_frozen(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_unfreezing_adds_moments(stage: int) -> None:
    want = dense(6, thaw=3)
    assert_same(run(stage, 1, 6, thaw=3), want)
    for rank in run_on_processes(2, run, stage, 1, 6, 3):
        assert_same(rank, want)


def test_freezing_again_drops_moments_and_gives_pieces_back() -> None:
    mesh, optimizer = zf.Mesh(dp=2), zf.adamw(1e-2)
    init, step = zf.train_step(mlp_loss, optimizer, mesh, stage=2)
    state, _ = step(init(mlp()), batches(1)[0])
    whole = zf.gather_tree(state.params, mesh)
    again = zf.unfreeze(state, optimizer, mesh, stage=2, frozen=FROZEN)
    torch.testing.assert_close(
        zf.gather_tree(zf.merge(again.params, again.frozen), mesh), whole, rtol=0, atol=0
    )
    assert len(tree.leaves(again.opt_state.mu)) == len(tree.leaves(state.opt_state.mu)) - 3
    _, step = zf.train_step(mlp_loss, optimizer, mesh, stage=2, frozen=FROZEN)
    step(again, batches(1)[0])


@pytest.mark.parametrize(("stage", "bytes_of_frozen"), [(0, 0), (1, 0), (2, 0), (3, 48)])
def test_what_is_frozen_does_not_travel(stage: int, bytes_of_frozen: int) -> None:
    """At stage 3 it is gathered; nowhere is its gradient reduced."""
    mesh = zf.Mesh(dp=2).abstract()

    def sent(frozen: Any) -> dict[str, int]:
        params = {"big": torch.zeros(24), "small": torch.zeros(6)}
        init, step = zf.train_step(
            lambda p, x: (p["big"].sum() * p["small"].sum() * x).mean(),
            zf.adamw(1e-2),
            mesh,
            stage=stage,
            frozen=frozen,
        )
        program = step.trace(init(params), torch.zeros(4))  # type: ignore[attr-defined]
        found: dict[str, int] = {}
        for c in program.collectives():
            found[c.kind] = found.get(c.kind, 0) + c.bytes_sent
        return found

    held, free = sent(["big"]), sent(EMPTY)
    gathers = {0: 0, 1: 12, 2: 12, 3: 12}[stage]  # of the small one, half of 24 bytes
    times = 1 if stage < 3 else held["all_gather"] // (gathers + bytes_of_frozen)
    assert held.get("all_gather", 0) == times * (gathers + bytes_of_frozen)
    reduced = "all_reduce" if stage == 0 else "reduce_scatter"
    assert free[reduced] - held[reduced] == (96 if stage == 0 else 48)


def adapters(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Low-rank adapters (arXiv 2106.09685): W x + B (A x)."""
    lora = params["lora"]
    return x @ params["base"]["weight"] + params["base"]["bias"] + (x @ lora["a"]) @ lora["b"]


def adapter_params() -> Any:
    torch.manual_seed(5)
    base = {"weight": torch.randn(7, 5), "bias": torch.randn(5)}
    return {"base": base, "lora": {"a": torch.randn(7, 2), "b": torch.zeros(2, 5)}}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_low_rank_adapters(stage: int) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (adapters(params, x) - x.sum(1, keepdim=True)).square().mean()

    params = adapter_params()
    trained = [params["lora"]["a"].requires_grad_(), params["lora"]["b"].requires_grad_()]
    plain = torch.optim.AdamW(trained, lr=1e-2)
    mesh = zf.Mesh(dp=2)
    policy = zf.policy(compute="float32")
    init, step = zf.train_step(
        loss, zf.adamw(1e-2), mesh, stage=stage, frozen=["base.*"], policy=policy
    )
    state = init(adapter_params())
    for i in range(5):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(i))
        plain.zero_grad()
        loss(params, x).backward()
        plain.step()
        state, _ = step(state, x)
    got = zf.gather_tree(zf.merge(state.params, state.frozen), mesh)
    torch.testing.assert_close(got, tree.map(torch.Tensor.detach, params), rtol=1e-5, atol=1e-6)


def test_errors_of_freezing() -> None:
    params = mlp()
    with pytest.raises(ValueError, match=r"frozen: 'inn\.\*' matches none of the key paths"):
        zf.freeze(params, ["inn.*"])
    with pytest.raises(ValueError, match="every leaf is frozen"):
        zf.freeze(params, lambda path, shape: True)
    with pytest.raises(ValueError, match="compressed gradients take no frozen"):
        zf.train_step(mlp_loss, zf.sgd(0.1), zf.Mesh(dp=2), compress="1bit", frozen=FROZEN)


def test_tied_leaves_freeze_together() -> None:
    w = torch.ones(2)
    trained, frozen = zf.freeze({"a": w, "b": w, "c": torch.ones(1)}, ["a"])
    assert tree.paths(trained) == ["c"]
    assert tree.paths(frozen) == ["a", "b"]
    assert zf.merge(trained, frozen)["b"] is w


def grouped(stage: int) -> Any:
    mesh = zf.Mesh(dp=2)
    optimizer = zf.by_path(
        {"in.*": zf.adamw(1e-3, weight_decay=0.0), "out": zf.sgd(0.1, momentum=0.9)},
        default=zf.adamw(1e-2, weight_decay=0.1),
    )
    init, step = zf.train_step(mlp_loss, optimizer, mesh, stage=stage)
    state, losses = init(mlp()), []
    for batch in batches(5):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, zf.gather_tree(state.params, mesh)


def test_groups_have_their_own_optimizers() -> None:
    params = tree.map(lambda x: x.clone().requires_grad_(), mlp())
    rest = [params["scale"], *tree.leaves(params["layers"])]
    groups = [
        {"params": tree.leaves(params["in"]), "lr": 1e-3, "weight_decay": 0.0},
        {"params": rest, "lr": 1e-2, "weight_decay": 0.1},
    ]
    optimizers = [torch.optim.AdamW(groups), torch.optim.SGD([params["out"]], 0.1, momentum=0.9)]
    losses = []
    for batch in batches(5):
        loss = mlp_loss(params, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    want = losses, tree.map(torch.Tensor.detach, params)
    for stage in (0, 3):
        assert_same(grouped(stage), want)
    for rank in run_on_processes(2, grouped, 2):
        assert_same(rank, want)


def test_errors_of_groups() -> None:
    def init(rules: Any) -> Any:
        return zf.by_path(rules, default=zf.sgd(0.1)).init(mlp())

    with pytest.raises(ValueError, match=r"matches \['in\.\*', '\*\.weight'\], and a leaf has one"):
        init({"in.*": zf.sgd(0.1), "*.weight": zf.sgd(0.1)})
    with pytest.raises(ValueError, match="'outt' matches none of the key paths"):
        init({"outt": zf.sgd(0.1)})
    with pytest.raises(TypeError, match="got an optimizer that exchanges gradients itself"):
        init({"out": zf.onebit_adam(1e-2, 5)})
