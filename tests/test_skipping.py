"""A step that a loss scale skips: the fused Adam itself keeps the state, in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.graphs import op_name
from zero_fn.program import Program

WHERE = torch.ops.aten.where.self


def loss_fn(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (torch.tanh(x @ params["hidden"]) @ params["out"] - y).square().mean()


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (7, 33), "out": (33, 1)}
    return {name: torch.randn(*shape, generator=generator) / 4 for name, shape in shapes.items()}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Some are far too large for float16."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        x = torch.randn(12, 7, generator=generator) * (1e5 if number % 3 == 1 else 1)
        found.append((x, x.clamp(-3, 3).sin().sum(-1, keepdim=True)))
    return found


def stepped(mesh: zf.Mesh, stage: int, optimizer: zf.Optimizer, **jit: Any) -> tuple[Any, Any]:
    init, step = zf.train_step(
        loss_fn,
        optimizer,
        mesh,
        stage=stage,
        clip=1.0,
        policy=zf.policy(compute="fp16"),
        loss_scale=zf.LossScale(initial=2.0**10, hysteresis=1),
    )
    return init(parameters()), zf.jit(step.f, donate=0, **jit)  # type: ignore[attr-defined]


OPTIMIZERS = {
    "adamw": zf.adamw(1e-2, weight_decay=0.1),
    "adam": zf.adam(1e-2, weight_decay=0.1),
    "groups": zf.by_path({"out": zf.adamw(1e-3)}, default=zf.adamw(1e-2)),
}
each = pytest.mark.parametrize(
    ("name", "stage"), [*[("adamw", stage) for stage in range(4)], ("adam", 0), ("groups", 3)]
)


def whole_state_selects(program: Program) -> int:
    """How many leaves with more than one value are selected."""
    nodes = program.graph_module.graph.nodes
    return sum(node.target is WHERE and node.meta["val"].numel() > 1 for node in nodes)


@each
def test_it_gives_what_select_gives(name: str, stage: int) -> None:
    runs = [
        stepped(zf.Mesh(dp=3), stage, OPTIMIZERS[name], skip=skip)
        for skip in ((), ("skip_in_update", "update_in_place"))
    ]
    states, steps = [list(column) for column in zip(*runs, strict=True)]
    for number, batch in enumerate(batches(9)):
        before = tree.map(torch.clone, states[0].params)
        for place, step in enumerate(steps):
            states[place], metrics = step(states[place], batch)
        for path, x, y in zip(
            tree.paths(states[0]), tree.leaves(states[0]), tree.leaves(states[1]), strict=True
        ):
            # the fused Adam in place differs from p + u by a rounding
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-7), (number, path)
        if number % 3 == 1:
            for x, y in zip(tree.leaves(before), tree.leaves(states[0].params), strict=True):
                assert torch.equal(x, y)
    assert metrics["skipped"] == 3


@each
def test_no_second_copy_of_the_state(name: str, stage: int) -> None:
    state, step = stepped(zf.Mesh(dp=3).abstract(), stage, OPTIMIZERS[name])
    program = step.trace(state, batches(1)[0])
    assert whole_state_selects(program) == 0
    names = [op_name(node) for node in program.graph_module.graph.nodes]
    assert "zero_fn::adamw" not in names
    assert names.count("zero_fn::adamw_") == (2 if name == "groups" else 1)
    without = zf.jit(step.f, donate=0, skip=("skip_in_update",)).trace(state, batches(1)[0])
    assert whole_state_selects(without) == 6
    saved = without.peak().bytes - program.peak().bytes
    size = sum(x.numel() * x.element_size() for x in tree.leaves(state))
    assert saved >= 0 if stage else saved > 0.5 * size  # pieces are small: the peak is elsewhere


def takes_what_moved(new: Any, old: Any, keep: Tensor) -> Any:
    """Reads the new parameters, taken or not."""
    return zf.select(keep, new, old), zf.global_norm(new[0])


def falls_back_to_zero(new: Any, old: Any, keep: Tensor) -> Any:
    return zf.select(keep, new, tree.map(torch.zeros_like, old))


def turns_round(new: Any, old: Any, keep: Tensor) -> Any:
    return zf.select(keep, old, new)


def value_by_value(new: Any, old: Any, keep: Tensor) -> Any:
    return zf.select(keep & torch.tensor([True, False]).repeat_interleave(32)[:33, None], new, old)


@pytest.mark.parametrize(
    "selected", [takes_what_moved, falls_back_to_zero, turns_round, value_by_value]
)
def test_other_selections_stay(selected: Callable[[Any, Any, Tensor], Any]) -> None:
    optimizer = zf.adamw(1e-2)
    params = {"out": parameters()["out"]}

    def step(state: Any, grads: Any, keep: Tensor) -> Any:
        old, opt_state = state
        updates, (count, *moments) = optimizer.update(grads, opt_state, old)
        new = zf.apply_updates(old, updates), moments
        return selected(new, (old, list(opt_state[1:])), keep), count

    state = params, optimizer.init(params)
    grads = tree.map(torch.ones_like, params)
    for keep in (torch.tensor(True), torch.tensor(False)):
        want = step(state, grads, keep)
        got = zf.jit(step, donate=0)(tree.map(torch.clone, state), grads, keep)
        for x, y in zip(tree.leaves(want), tree.leaves(got), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
