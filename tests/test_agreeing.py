"""Ranks that would exchange different things say so, instead of waiting for each other for ever."""

import time
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import ProcessPool, run_on_processes
from zero_fn.mesh import meeting_place


def attempt(f: Any, *args: Any) -> str:
    try:
        f(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def different(what: str) -> list[str]:
    mesh = zf.Mesh(dp=2, timeout=20.0)
    odd = mesh.rank == 1

    def step(state: Any, batch: torch.Tensor) -> Any:
        mean = zf.pmean(batch.sum(), "dp")
        if what == "kind" and odd:
            return state, zf.all_gather_invariant(batch.sum()[None], "dp").sum()
        if what == "more" and odd:
            mean = mean + zf.pmean(batch.cos().sum(), "dp")
        if what == "dtype" and odd:
            return state, zf.pmean(batch.double().sum(), "dp")
        return state, mean

    if what == "shape":
        init, run = zf.train_step(lambda w, x: (x @ w).mean(), zf.sgd(0.1), mesh)
        text = attempt(lambda: run(init(torch.ones(3 + odd)), torch.ones(4, 3 + odd)))
    else:
        text = attempt(zf.jit(zf.spmd(step, mesh)), (), torch.ones(4))
    # the ranks can go on together, with what they agree on
    fine = zf.jit(zf.spmd(lambda _, x: zf.psum(x.sum(), "dp"), mesh))
    return [text, str(fine((), torch.ones(4)).item())]


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        (
            "kind",
            ["collective 2 is", "0, 'step': none", "1, 'step': all_gather over 'dp' of f32[1]"],
        ),
        (
            "more",
            ["collective 2 is", "0, 'step': none", "1, 'step': all_reduce over 'dp' of f32[]"],
        ),
        ("dtype", ["all_reduce over 'dp' of f64[] (test_agreeing.py:", " step)"]),
        ("shape", ["collective 1 is", "all_reduce over 'dp' of f32[3]", "f32[4]"]),
    ],
)
def test_the_first_difference_is_named_on_every_rank(what: str, texts: list[str]) -> None:
    for text, after in run_on_processes(2, different, what):
        for words in ("ranks 0 and 1 differ in what they exchange", *texts):
            assert words in text
        assert after == "4.0"


def other_batches() -> list[float]:
    """Batches of other lengths are other programs, which exchange the same: nobody waits."""
    mesh = zf.Mesh(dp=2, timeout=20.0)
    step = zf.jit(zf.spmd(lambda _, x: zf.psum(x.sum(), "dp"), mesh, batch="local"))
    lengths = [(3, 3), (3, 5), (4, 3), (5, 4)]
    return [step((), torch.ones(both[mesh.rank])).item() for both in lengths]


def test_batches_may_differ() -> None:
    assert run_on_processes(2, other_batches) == [[6.0, 8.0, 7.0, 9.0]] * 2


def alone() -> tuple[str, float]:
    mesh = zf.Mesh(dp=2, timeout=3.0)
    step = zf.jit(zf.spmd(lambda _, x: zf.psum(x.sum(), "dp"), mesh))
    step((), torch.ones(2))
    start = time.monotonic()
    if mesh.rank == 0:
        time.sleep(6)
        return "", 0.0
    text = attempt(
        zf.jit(zf.spmd(lambda _, x: zf.psum(x.cos(), "dp").sum(), mesh)), (), torch.ones(6)
    )
    return text, time.monotonic() - start


def test_a_program_that_others_do_not_come_to() -> None:
    pool = ProcessPool(2)  # of its own: the store of this one keeps what a rank said in vain
    try:
        _, (text, seconds) = pool.run(alone)
    finally:
        pool.close()
    assert "within 3 seconds (the mesh's timeout) ranks [0] have come to none" in text
    assert seconds < 12


def on_one_rank() -> float:
    """A program without collectives is one rank's own affair."""
    mesh = zf.Mesh(dp=2, timeout=20.0)
    if mesh.rank == 0:
        return zf.jit(lambda x: x.sum())(torch.ones(3)).item()
    return 3.0


def test_programs_without_collectives_are_not_compared() -> None:
    assert run_on_processes(2, on_one_rank) == [3.0, 3.0]


def store_of_torch() -> bool:
    zf.Mesh(dp=2)
    store, _, seconds = meeting_place()
    store.set("a word", "said")
    return store.get("a word") == b"said" and seconds == 1800


def test_torch_still_has_the_store() -> None:
    assert run_on_processes(2, store_of_torch) == [True, True]
