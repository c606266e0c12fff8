"""A pipeline on processes: each rank its own stages, the numbers of the dense step."""

from typing import Any

import pytest

import zero_fn as zf
from tests.processes import run_on_processes

from .stages import CUTS, assert_same, batches, dense, make


def once(ranks: int, stages: int, microbatches: int, name: str, placed: bool, tied: bool) -> Any:
    cut, (batch,) = CUTS[stages], batches()
    mesh = zf.Mesh(pp=ranks)
    pipe = zf.pipeline(cut, microbatches, name)
    params: Any = make(cut, tied=tied)
    if placed:
        params = zf.spmd(pipe.place, mesh)(params)
    grads, value = zf.spmd(pipe, mesh)(params, batch)
    return zf.gather_tree(zf.spmd(pipe.collect, mesh)(grads), mesh), value


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks(placed: bool, tied: bool) -> None:
    for name, stages in [
        ("gpipe", 2),
        ("1f1b", 2),
        ("zero_bubble", 2),
        ("interleaved", 4),
        ("zbv", 4),
        ("dualpipev", 4),
    ]:
        for microbatches in (1, 4):
            cut, (batch,) = CUTS[stages], batches()
            want, of_whole = dense(cut, make(cut, tied=tied), batch)
            for grads, value in run_on_processes(
                2, once, 2, stages, microbatches, name, placed, tied
            ):
                assert_same(grads, want)
                assert_same(value, of_whole)
