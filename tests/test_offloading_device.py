"""Offload beside a device: the same numbers, wherever parameters and moments live.

The device is one of ``tests.accelerator``, which computes as the CPU does, to the bit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests import accelerator
from tests.processes import ProcessPool
from zero_fn import tree
from zero_fn.graphs import is_crossing
from zero_fn.offloading import at_home
from zero_fn.tree import Tensor

Params = dict[str, Tensor]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPool]:
    pool = ProcessPool(1)
    yield pool
    pool.close()


def params() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 11), "bias": (11,), "c": (11, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loss_fn(p: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (torch.tanh(x @ p["a"] + p["bias"]) @ p["c"] - y).square().mean()


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 7, generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(number)
    ]


# What is on the host: key paths of a state that is on the device otherwise.
PLACES: dict[str, tuple[str, ...]] = {
    "all": ("params.*", "opt_state.*"),
    "moments": ("opt_state.*",),
    "one leaf's moments": ("opt_state.mu.a*", "opt_state.nu.a*"),
    "parameters": ("params.*",),
}


OPTIMIZERS = {
    "adamw": lambda: zf.adamw(1e-2, weight_decay=0.1),
    "adam": lambda: zf.adam(1e-2, weight_decay=0.1),
    "sgd": lambda: zf.sgd(1e-2, momentum=0.9),
}


def run(
    host: tuple[str, ...], optimizer: str, options: dict[str, Any], folder: Path | None = None
) -> list[Tensor]:
    """What 20 steps end with."""
    device = accelerator.start()
    init, step = zf.train_step(loss_fn, OPTIMIZERS[optimizer](), zf.Mesh(dp=1), **options)
    state = zf.offload(init(params()), device)
    if host:
        state = zf.offload(state, "cpu" if folder is None else folder, where=host)
    before = [x.device for x in tree.leaves(state)]
    for batch in batches(20):
        state, metrics = step(state, zf.offload(batch, device))
    assert [x.device for x in tree.leaves(state)] == before
    assert metrics["loss"].device == device
    return [x.to("cpu", copy=True) for x in tree.leaves((state, metrics))]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 3, "clip": 0.1, "donate": False},
        {"policy": zf.policy(compute="bf16"), "clip": 0.1, "stage": 2},
        {"policy": zf.policy(compute="fp16"), "loss_scale": zf.LossScale(2.0**30)},
    ],
    ids=["plain", "stage 3", "bf16", "loss scale"],
)
def test_the_same_bits_wherever_the_state_lives(
    places: str, options: dict[str, Any], process: ProcessPool
) -> None:
    check_same(process, "adamw", options, PLACES[places])


def check_same(
    process: ProcessPool, optimizer: str, options: dict[str, Any], host: Any, folder: Any = None
) -> None:
    (there,) = process.run(run, (), optimizer, options)
    (here,) = process.run(run, host, optimizer, options, folder)
    assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_other_optimizers(optimizer: str, process: ProcessPool) -> None:
    check_same(process, optimizer, {"clip": 0.1}, PLACES["moments"])


@pytest.mark.parametrize("options", [{}, {"stage": 3, "policy": zf.policy(compute="bf16")}])
def test_moments_on_disk_beside_a_device(
    options: dict[str, Any], process: ProcessPool, tmp_path: Path
) -> None:
    check_same(process, "adamw", options, ("opt_state.[mn]u.*",), tmp_path / "state")


def traced(host: tuple[str, ...], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The results that are arguments, by path, and the dtypes of what crosses."""
    device = accelerator.start()
    init, step = zf.train_step(loss_fn, zf.adamw(1e-2), zf.Mesh(dp=1), **options)
    state = zf.offload(zf.offload(init(params()), device), "cpu", where=host)
    program = step.trace(state, zf.offload(batches(1)[0], device))
    *_, output = program.graph_module.graph.nodes
    inputs = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    kept = [path for x, path in zip(inputs, program.paths, strict=True) if x in output.args[0]]
    nodes = [x for x in program.graph_module.graph.nodes if is_crossing(x)]
    return kept, [str(x.meta["val"].dtype) for x in nodes]


@pytest.mark.parametrize("options", [{}, {"loss_scale": zf.LossScale(2.0)}])
def test_what_was_updated_elsewhere_goes_into_the_old_memory(
    options: dict[str, Any], process: ProcessPool
) -> None:
    ((kept, _),) = process.run(traced, PLACES["moments"], options)
    assert len([path for path in kept if "params" in path]) == 3
    assert len([path for path in kept if "opt_state.mu" in path or "opt_state.nu" in path]) == 6


def test_what_crosses_is_narrow(process: ProcessPool) -> None:
    ((_, dtypes),) = process.run(traced, PLACES["all"], {"policy": zf.policy(compute="bf16")})
    assert dtypes == ["torch.bfloat16"] * 6  # three parameters there, three gradients back


def test_the_parameter_of_a_moment_has_its_whole_path() -> None:
    w = torch.zeros(3)
    params = {"block": {"w": w}, "w": w.clone()}
    away = torch.empty(3, device="meta")
    moments = {"mu": {"block": {"w": away}, "w": w}, "nu": {"block": {"w": away}, "w": w}}
    found = at_home(params, moments)
    assert [x.device.type for x in tree.leaves(found)] == ["meta", "cpu"]
