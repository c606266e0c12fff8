"""A stage that raises, a rank that dies, carries that don't fit, with tp or dp beside pp."""

import os
import time
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import ProcessPool, RankError
from zero_fn.pipelining.work import PipelineError

TIMEOUT = 20.0  # seconds a collective or message may take; a busy machine traces for some


def first(params: Any, carry: None, batch: torch.Tensor) -> torch.Tensor:
    """Reduces over the other axis, as a sliced layer does."""
    return zf.psum(zf.pvary(batch, "tp") * params["w"], "tp")


def picks(params: Any, carry: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Fails on tensor rank 1 alone where a row of the batch says so."""
    here = (batch[:, 0].long() * zf.axis_index("tp")).clamp(max=9)
    return zf.psum((zf.pvary(carry, "tp") * params["w"][here]).mean(), "tp")


def step(way: str) -> Any:
    """What each rank of (pp, tp) = (2, 2) has to say, and after how many seconds."""
    mesh = zf.Mesh(pp=2, tp=2, timeout=TIMEOUT)
    stages = [first, narrow] if way == "mismatched" else [first, picks]
    pipe = zf.pipeline(stages, 4)
    params = ({"w": torch.ones(3)}, {"w": torch.ones(2, 3)})
    batch = torch.zeros(8, 3)
    placed = zf.spmd(pipe.place, mesh)(params)
    if way != "mismatched":
        zf.spmd(pipe, mesh)(placed, batch)
    if way == "dies" and mesh.rank == 3:
        os._exit(1)
    if way == "raises":
        batch[5] = 5.0  # in micro-batch 2
    start = time.monotonic()
    try:
        zf.spmd(pipe, mesh)(placed, batch)
    except PipelineError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def narrow(params: Any, carry: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (carry @ params["w"]).mean()  # (2, 3) @ (2, 3)


def run(way: str) -> list[Any]:
    pool = ProcessPool(4, time_limit=100)
    try:
        return pool.run(step, way)
    finally:
        pool.close()


def test_a_carry_that_does_not_fit() -> None:
    for message, took in run("mismatched"):
        assert "the forward of stage 1 ('narrow') failed on micro-batch 0 (action 1F0)" in message
        assert took < TIMEOUT


@pytest.mark.slow
def test_a_stage_that_raises_on_one_tensor_rank() -> None:
    """It says what happened; those who wait for it say where, when the mesh's time has passed."""
    heard = run("raises")
    text = "the forward of stage 1 ('picks') failed on micro-batch 2 (action 1F2): IndexError"
    assert text in heard[3][0]
    for message, took in heard:
        assert "stage" in message
        assert "micro-batch" in message
        assert "action" in message
        assert took < 3 * TIMEOUT


@pytest.mark.slow
def test_a_rank_that_dies() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="the process ended"):
        run("dies")
    assert time.monotonic() - start < 90
