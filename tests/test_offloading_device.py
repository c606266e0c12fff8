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
    "none": (),
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
    host: tuple[str, ...], optimizer: str, options: dict[str, Any], folder: Path | None, steps: int
) -> tuple[list[Tensor], list[str]]:
    """What 20 steps end with, and the devices of the parameters then."""
    device = accelerator.start()
    init, step = zf.train_step(loss_fn, OPTIMIZERS[optimizer](), zf.Mesh(dp=1), **options)
    state = zf.offload(init(params()), device)
    if host:
        state = zf.offload(state, "cpu" if folder is None else folder, where=host)
    before = [x.device for x in tree.leaves(state)]
    for batch in batches(steps):
        state, metrics = step(state, zf.offload(batch, device))
    assert [x.device for x in tree.leaves(state)] == before
    assert metrics["loss"].device == device
    return [x.to("cpu") for x in tree.leaves((state, metrics))], zf.residency(state)


@pytest.mark.parametrize("places", [name for name in PLACES if name != "none"])
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
    ((there, _),) = process.run(run, (), "adamw", options, None, 20)
    ((here, _),) = process.run(run, PLACES[places], "adamw", options, None, 20)
    assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True))
