"""Places: what lies on the host or on disk beside a device, in a traced step and in its plan.

There is no device here; torch's ``meta`` stands for one, whose tensors have shapes and no memory.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_fn as zf
from zero_fn import disk, tree
from zero_fn.graphs import arrivals, departures, op_name, order
from zero_fn.models import gpt
from zero_fn.tree import Tensor

GPU = dataclasses.replace(zf.hardware("a100-80gb"), name="a GPU of 32 GB", memory=32e9)
Loss = Callable[[Any, Any], Tensor]


def model(layers: int, width: int, length: int, rows: int) -> tuple[Any, Any, Loss]:
    """Parameters of a GPT on the host, a batch on the device, the loss that recomputes blocks."""
    config = gpt.Config(50257, length, layers=layers, heads=max(1, width // 128), width=width)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = gpt.split_params(gpt.init(config), config, layers)
        tokens = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    *inner, last = gpt.stages(config, layers)

    def loss(params: Any, batch: Any) -> Tensor:
        carry = None
        for stage, own in zip(inner, params, strict=False):
            carry = zf.remat(stage)(own, carry, batch)
        return last(params[-1], carry, batch)

    return params, (tokens, tokens), loss


def count(params: Any) -> int:
    """The values of the parameters, tied ones once."""
    return sum(x.numel() for x in {id(x): x for x in tree.leaves(params)}.values())


def step_of(loss: Loss, ranks: int, stage: int, **options: Any) -> zf.Train:
    mesh = zf.Mesh(dp=ranks).abstract()
    options = {"policy": zf.policy(compute="bf16"), **options}
    return zf.train_step(loss, zf.adamw(1e-4), mesh, stage=stage, **options)


def check_fits(layers: int, width: int, length: int, folder: Path | None) -> zf.Plan:
    params, batch, loss = model(layers, width, length, 4)
    init, step = step_of(loss, 1, 3)
    state = init(params)
    if folder is not None:
        state = zf.offload(state, folder, where="opt_state.[mn]u.*")
        assert list(zf.residency(state)) == [str(folder), "cpu"]
        assert not folder.exists()
    found = zf.plan(step, state, batch, hardware=GPU, label="offload")
    n = count(params)
    small = 1e-6 * n + 1e5  # counts, and what is smaller than a page
    moments = 0 if folder is not None else 8 * n
    assert sum(found.rest.values()) < 1e5  # tokens alone
    # float32 parameters and gradients of all leaves, moments, and the last gradient, the
    # embedding's, as it came in bfloat16
    last = 2 * 50257 * width
    assert found.host == pytest.approx(8 * n + moments + last, abs=small)
    assert found.disk == pytest.approx(2 * (8 * n - moments), abs=2 * small)  # two files of each
    return found


def test_a_plan_says_what_lies_where(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "state"):
        found = check_fits(2, 128, 64, folder)
        text = str(found)
        assert "on the host" in text
        assert ("on disk" in text) == (folder is not None)
        assert found.peak.parts["gathered parameters"] > 0
        assert found.peak.parts["optimizer state"] == 0


@pytest.mark.slow
def test_13_billion_parameters_on_one_gpu_of_32_gb() -> None:
    """As the paper of ZeRO-Offload says of a V100; moments and parameters on the host."""
    params, *_ = model(41, 5120, 1024, 4)
    assert count(params) > 13e9
    found = check_fits(41, 5120, 1024, None)
    print(found)
    assert found.fits
    assert found.peak.bytes < 16e9


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 3), (4, 0), (4, 1), (4, 3)])
def test_each_leaf_is_on_the_device_while_it_is_used(ranks: int, stage: int) -> None:
    params, batch, loss = model(4, 128, 64, 4)
    init, step = step_of(loss, ranks, stage)
    program = step.trace(init(params), batch)  # type: ignore[attr-defined]
    n = count(params)
    most = {
        part: max(moment.parts[part] for moment in program.memory_timeline())
        for part in ("parameters", "gathered parameters", "gradients", "optimizer state")
    }
    assert most["parameters"] == most["optimizer state"] == 0
    if stage == 3:  # the largest leaf as it comes and in bfloat16, and two small ones
        assert most["gathered parameters"] < 6 * 50257 * 128 + 8 * 4 * 128 * 128 + 4096
    largest = 50257 * 128  # whole in both dtypes, and as a sum of both uses
    assert most["gradients"] < 12 * largest + 4 * (n - largest) * (stage < 2)
    # Every gradient leaves before the update, and one by one.
    nodes = [*program.graph_module.graph.nodes]
    place = order(program.graph_module.graph)
    leaving = [place[node] for node in departures(nodes)]
    (update,) = [place[node] for node in nodes if op_name(node) == "zero_fn::adamw_"]
    assert max(leaving) < update
    assert max(leaving) - min(leaving) > len(nodes) / 6


def test_what_is_where_the_batch_is_stays() -> None:
    params, (tokens, _), loss = model(2, 128, 64, 4)
    init, step = step_of(loss, 1, 3)
    with tokens.fake_mode:
        there = tree.map(lambda x: torch.empty_like(x, device="meta"), params)
    program = step.trace(init(there), (tokens, tokens))  # type: ignore[attr-defined]
    nodes = program.graph_module.graph.nodes
    assert arrivals(nodes) == departures(nodes) == []
    assert program.at_rest("host").get("parameters", 0) == 0
    assert program.at_rest()["optimizer state"] > 8 * count(params) - 100


def test_planned_files_are_no_files(tmp_path: Path) -> None:
    x = zf.eval_shape(torch.zeros, 5)
    there = zf.offload({"x": x}, tmp_path / "state")
    assert disk.is_on_disk(there["x"])
    assert not disk.is_on_disk(zf.offload(there, "cpu")["x"])
    made = zf.offload(lambda x: {"y": x + 1}, tmp_path / "state")(x)
    assert zf.residency(made) == {str(tmp_path / "state"): (1, 20)}
    assert not (tmp_path / "state").exists()


def test_a_batch_on_the_host_brings_nothing_there() -> None:
    """Parameters on a device and a batch that was forgotten on the host are a mistake."""
    params, (tokens, _), loss = model(2, 128, 64, 4)
    with tokens.fake_mode:
        there = tree.map(lambda x: torch.empty_like(x, device="meta"), params)
        batch = torch.zeros(4, 64, dtype=torch.int64)
    init, step = step_of(loss, 1, 3)
    with pytest.raises(RuntimeError, match="device"):
        step.trace(init(there), (batch, batch))  # type: ignore[attr-defined]


def test_frozen_parameters_come_too() -> None:
    params, batch, loss = model(2, 128, 64, 4)
    init, step = step_of(loss, 1, 3, frozen=["0.*"])
    program = step.trace(init(params), batch)  # type: ignore[attr-defined]
    assert len(arrivals(program.graph_module.graph.nodes)) > len(tree.leaves(params)) - 3
