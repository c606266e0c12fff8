"""jit: the same numbers, one trace a signature, donation that is safe, errors that help."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.program import Program

from .test_training import batches, mlp, mlp_loss


class Counter:
    """A function that counts how often its Python code runs."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.runs = f, 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.f(*args)


def sgd_step(params: Any, batch: Any) -> Any:
    grads, value = zf.grad_and_value(mlp_loss)(params, batch)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_the_same_numbers(compiler: Any, donate: Any) -> None:
    want, got = mlp(), mlp()
    step = zf.jit(sgd_step, donate=donate, compiler=compiler)
    for batch in batches(3):
        want, want_loss = sgd_step(want, batch)
        got, loss = step(got, batch)
        # Inductor fuses and reorders float32 sums
        torch.testing.assert_close((got, loss), (want, want_loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharded_step_under_inductor(stage: int) -> None:
    mesh = zf.Mesh(dp=3)
    runs = []
    for compiler in ("eager", "inductor"):
        init, step = zf.train_step(
            mlp_loss, zf.adamw(1e-2), mesh, stage=stage, clip=0.5, compiler=compiler
        )
        state = init(mlp())
        losses = []
        for batch in batches(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        runs.append((losses, zf.gather_tree(state.params, mesh)))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-5)


def test_one_trace_a_signature() -> None:
    f = Counter(lambda x, flag: x * 2 if flag else x * 3)
    run = zf.jit(f)
    assert run(torch.ones(2), True).tolist() == [2, 2]
    assert run(torch.zeros(2), True).tolist() == [0, 0]
    assert f.runs == 1
    assert run(torch.ones(2), False).tolist() == [3, 3]  # a constant of the trace changed
    assert f.runs == 2
    run(torch.ones(3), True)
    run(torch.ones(2, dtype=torch.float64), True)
    run(torch.ones(3, 2).T[0], True)  # another stride
    assert f.runs == 5
    run(torch.ones(2), True)
    assert f.runs == 5


def test_static_fields_are_part_of_the_signature() -> None:
    f = Counter(lambda p: tree.map(lambda x: x + 1, p))
    run = zf.jit(f)
    mesh = zf.Mesh(dp=2)
    cut = [zf.spmd(lambda p, s=s: zf.shard(p, s), mesh)(torch.ones(4)) for s in (1, 1, 2)]
    for piece in cut:
        assert run(piece).scheme == piece.scheme
    assert f.runs == 2


def test_results_of_any_structure() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    def f(x: Tensor) -> Any:
        return Pair({"x": x + 1, "none": None, "text": "kept", "number": 3}, [x, x])

    out = zf.jit(f)(torch.ones(2))
    assert isinstance(out, Pair)
    assert out.a["none"] is None
    assert (out.a["text"], out.a["number"]) == ("kept", 3)
    assert out.a["x"].tolist() == [2, 2]
    assert out.b[1].tolist() == [1, 1]


def test_captured_tensors_are_constants() -> None:
    weight = torch.ones(3)
    assert zf.jit(lambda x: x * weight)(torch.ones(3)).tolist() == [1, 1, 1]


def test_ties_in_the_arguments_are_seen() -> None:
    w = torch.ones(3)
    run = zf.jit(zf.spmd(lambda p: zf.shard(p, 1), zf.Mesh(dp=2)))
    assert repr(run({"a": w, "b": w})["b"]) == "tied to a"
    assert isinstance(run({"a": w, "b": w.clone()})["b"], zf.Sharded)


# Donation


def test_a_donated_state_is_updated_in_place() -> None:
    params = {"w": torch.ones(1000), "frozen": torch.ones(5)}
    address = params["w"].data_ptr()
    step = zf.jit(lambda p, x: {"w": p["w"] + x, "frozen": p["frozen"]}, donate=0)
    out = step(params, torch.ones(1000))
    assert out["w"].data_ptr() == address
    assert out["w"].sum() == 2000
    assert out["frozen"].tolist() == [1] * 5


def test_a_donated_tensor_used_again_is_an_error() -> None:
    params = {"w": torch.ones(3)}
    step = zf.jit(lambda p, x: ({"w": p["w"] + x}, x.sum()), donate=0)
    new, _ = step(params, torch.ones(3))
    message = r"argument 0 at 'w' was donated to '<lambda>'.* use the state that the call returned"
    for use in (
        lambda: step(params, torch.ones(3)),
        lambda: params["w"] + 1,
        lambda: torch.sin(params["w"]),
        lambda: torch.stack([params["w"], torch.ones(3)]),
        lambda: params["w"].tolist(),
        lambda: params["w"][0],
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert "was donated" in repr(params["w"])
    assert new["w"].tolist() == [2, 2, 2]


def test_without_donation_the_old_state_stays() -> None:
    params = {"w": torch.ones(3)}
    step = zf.jit(lambda p, x: {"w": p["w"] + x})
    step(params, torch.ones(3))
    assert params["w"].tolist() == [1, 1, 1]


def test_a_value_that_is_read_later_is_not_overwritten() -> None:
    step = zf.jit(lambda p: (p + 1, (p * 2).sum(), p[:2] * 3), donate=0)
    new, total, part = step(torch.ones(4))
    assert new.tolist() == [2] * 4
    assert total == 8
    assert part.tolist() == [3, 3]


def test_the_old_value_can_be_returned_beside_the_new_one() -> None:
    new, old, view = zf.jit(lambda p: (p + 1, p, p[1:]), donate=0)(torch.ones(3))
    assert (new.tolist(), old.tolist(), view.tolist()) == ([2] * 3, [1] * 3, [1] * 2)


def test_adding_a_view_of_itself_is_right() -> None:
    x = torch.arange(4.0)
    assert zf.jit(lambda p: p + p.flip(0), donate=0)(x.clone()).tolist() == [3] * 4
    y = torch.arange(9.0).view(3, 3)
    got = zf.jit(lambda p: p + p.T, donate=0)(y.clone())
    torch.testing.assert_close(got, y + y.T)


def test_the_same_tensor_twice_in_a_donated_state() -> None:
    zeros = torch.zeros(3)
    step = zf.jit(lambda s, x: {"mu": s["mu"] + x, "nu": s["nu"] + 2 * x}, donate=0)
    out = step({"mu": zeros, "nu": zeros}, torch.ones(3))
    assert (out["mu"].tolist(), out["nu"].tolist()) == ([1] * 3, [2] * 3)


def test_overlapping_views_in_a_donated_state() -> None:
    memory = torch.zeros(4)
    step = zf.jit(lambda s, x: {"a": s["a"] + x, "b": s["b"] + 2 * x}, donate=0)
    out = step({"a": memory[:3], "b": memory[1:]}, torch.ones(3))
    assert (out["a"].tolist(), out["b"].tolist()) == ([1] * 3, [2] * 3)


def test_a_batch_that_shares_the_states_memory_is_not_overwritten() -> None:
    memory = torch.ones(4)
    step = zf.jit(lambda s, x: (s + 1, x.sum()), donate=0)
    _, total = step(memory[:2], memory)
    assert total == 4
    assert memory.tolist() == [1] * 4


def test_a_state_that_keeps_the_batch_does_not_lend_it() -> None:
    batch = torch.ones(3)
    step = zf.jit(lambda s, x: {"last": x, "sum": s["sum"] + x}, donate=0)
    state = step({"last": torch.zeros(3), "sum": torch.zeros(3)}, batch)
    bump = zf.jit(lambda s: {"last": s["last"] + 1, "sum": s["sum"]}, donate=0)
    assert bump(state)["last"].tolist() == [2] * 3
    assert batch.tolist() == [1] * 3


def test_adam_under_donation_allocates_no_second_state() -> None:
    """Parameters and moments keep their addresses over the steps."""
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(mlp_loss, zf.adamw(1e-2), mesh, stage=3)
    state = init(mlp())

    def addresses(state: zf.TrainState) -> list[int]:
        held = (state.params, state.opt_state.mu, state.opt_state.nu)
        return [x.data_ptr() for x in tree.leaves(held)]

    before = addresses(state)
    for batch in batches(3):
        state, _ = step(state, batch)
        gc.collect()
    assert addresses(state) == before


# What is refused, and what passes through


def test_errors() -> None:
    with pytest.raises(ValueError, match="compiler is 'fast'"):
        zf.jit(sgd_step, compiler="fast")  # type: ignore[arg-type]
    run = zf.jit(lambda x, y=None: x)
    with pytest.raises(ValueError, match=r"shape \(2,\) has requires_grad=True"):
        run(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"holds \{1\}, which is neither a tensor nor hashable"):
        run(torch.ones(2), {1})


def test_inside_another_transform_it_is_the_function_itself() -> None:
    f = zf.jit(lambda x: (x * x).sum())
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(f)(x), (x * x).sum(1))
    torch.testing.assert_close(torch.func.grad(f)(x), 2 * x)
    torch.testing.assert_close(zf.jit(lambda x: f(x) + 1)(x), (x * x).sum() + 1)
    compiled = torch.compile(lambda x: f(x) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), (x * x).sum() * 2)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Dynamo of older versions cannot tell tied tensors apart"
)
def test_torch_compile_of_the_undecorated_step() -> None:
    mesh = zf.Mesh(dp=2)
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(mlp())

    def step(pieces: Any, batch: Any) -> Any:
        def loss(pieces: Any) -> Tensor:
            return zf.pmean(mlp_loss(zf.unshard(pieces), batch), "dp")

        grads, value = zf.grad_and_value(loss)(pieces)
        return tree.map(lambda p, g: p - 0.1 * g, pieces, grads), value

    run = zf.spmd(step, mesh)
    (batch,) = batches(1)
    want, want_loss = run(pieces, batch)
    got, loss = torch.compile(run, fullgraph=True, backend="aot_eager")(pieces, batch)
    torch.testing.assert_close(loss, want_loss)
    for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(x, y)


# Programs


def test_a_program_is_what_ran() -> None:
    mesh = zf.Mesh(dp=8).abstract()
    init, step = zf.train_step(mlp_loss, zf.sgd(0.1), mesh, stage=3)
    state = init(mlp())
    (batch,) = batches(1)
    program = step.trace(state, batch)  # type: ignore[attr-defined]
    assert isinstance(program, Program)
    counts = {c.kind: c.calls for c in program.collectives()}
    assert counts == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}  # one bucket each
    assert {c.axis for c in program.collectives()} == {"dp"}
    padded = sum(-(-x.numel() // 8) * 8 for x in tree.leaves(mlp()))
    sent = {c.kind: c.bytes_sent for c in program.collectives()}
    assert sent["all_gather"] == sent["reduce_scatter"] == padded * 4 * 7 // 8
    text = str(program)
    assert re.search(r": f32\[\d+\] = all_gather\(\w+, dp=8\)  # sends [\d.]+ \w+", text)
    assert re.search(r"= mm\(.*\)  # test_training.py:\d+ mlp_loss", text)
    rows, forward = 24 // 8, 7 * 5 + 2 * 5 * 5 + 5 * 3
    # a multiplication and an addition each; the backward does it twice, but for the inputs' part
    assert program.flops() == 2 * rows * (3 * forward - 7 * 5)


def test_what_cannot_be_hashed_is_named() -> None:
    @dataclass(frozen=True)
    class Setting:
        values: list[int]

    with pytest.raises(TypeError, match=r"Setting\(values=\[1\]\), which is neither"):
        zf.jit(lambda x, s: x)(torch.ones(2), Setting([1]))
    with pytest.raises(TypeError, match=r"holds \{1\}, which is neither"):
        zf.jit(lambda x, s: x)(torch.ones(2), {1})


def test_a_users_pass_runs_last() -> None:
    seen: list[Program] = []

    def note(program: Program) -> Program:
        seen.append(program)
        return program

    zf.jit(lambda x: x + 1, passes=[note])(torch.ones(2))
    assert len(seen) == 1
