"""The contract of spmd and of the mesh: what goes in, what comes out, what is refused."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes


class Pair(NamedTuple):
    first: Any
    second: Any


@zf.register_dataclass
@dataclass
class Record:
    value: Any
    note: Any


def gathered(x: Tensor, axis: Any = "dp") -> Tensor:
    """Every rank's value, one after the other."""
    return zf.all_gather(x.reshape(1, *x.shape), axis)


# Batches


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_are_split_over_the_data_axis(ranks: int) -> None:
    x = torch.arange(12.0).reshape(6, 2)
    run = zf.spmd(lambda _, x: gathered(x.sum()), zf.Mesh(dp=ranks))
    assert run(None, x).tolist() == [part.sum().item() for part in x.chunk(ranks)]


def test_batches_are_split_over_two_data_axes_and_not_over_others() -> None:
    mesh = zf.Mesh(dp_outer=2, tp=2, dp_inner=3)
    x = torch.arange(12.0)

    def program(_: Any, x: Tensor) -> Tensor:
        assert x.shape == (2,)
        return gathered(x, ("dp_outer", "tp", "dp_inner"))

    got = zf.spmd(program, mesh)(None, x).reshape(2, 2, 3, 2)
    assert torch.equal(got[:, 0], x.reshape(2, 3, 2))
    assert torch.equal(got[:, 0], got[:, 1])


def test_each_argument_says_how_it_reaches_the_ranks() -> None:
    mesh = zf.Mesh(dp=2)

    def program(_: Any, split: Any, local: Any, same: Any) -> Any:
        return gathered(split["x"].sum()), gathered(local), gathered(same)

    run = zf.spmd(program, mesh, batch=("split", "local", "replicated"))
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    split, local, same = run(None, {"x": torch.arange(4.0), "n": 3}, own, torch.tensor(7))
    assert split.tolist() == [1, 5]
    assert torch.equal(local, own)
    assert same.tolist() == [7, 7]


def batches_on_processes() -> Any:
    mesh = zf.Mesh(dp=2)

    def program(_: Any, split: Any, local: Any, same: Any) -> Any:
        return gathered(split.sum()), gathered(local), gathered(same)

    run = zf.spmd(program, mesh, batch=("split", "local", "replicated"))
    own = torch.tensor([1.0, 2.0]) + 2 * mesh.rank
    return run(None, torch.arange(4.0), own, torch.tensor(7))


def test_batches_on_processes() -> None:
    for split, local, same in run_on_processes(2, batches_on_processes):
        assert split.tolist() == [1, 5]
        assert local.tolist() == [[1, 2], [3, 4]]
        assert same.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            {"x": [torch.ones(3, 2)]},
            {},
            r"argument 1.x.0: dimension 0 of shape \(3, 2\) is not divisible by the 2 ranks of "
            r"'dp' \(2\); use a batch of 2",
        ),
        (torch.ones(1), {}, "use a batch of 2"),
        (torch.tensor(1.0), {}, "a 0-dim tensor cannot be split .* batch='replicated'"),
        (torch.ones(3, 2), {"batch": "local"}, r"local batch .* \{'dp': 2\}, .* \(3, 2\)"),
        (torch.ones(2), {"batch": "shared"}, "batch is 'shared'; it is 'split'"),
        (torch.ones(2), {"batch": ("split", "split")}, "names 2 placements, and there are 1"),
    ],
)
def test_batches_that_are_refused(batch: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.spmd(lambda _, x: None, zf.Mesh(dp=2), **options)(None, batch)


def test_data_axes_must_be_known() -> None:
    zf.spmd(lambda _: None, zf.Mesh(tp=2, pp=2))
    with pytest.raises(ValueError, match="does axis 'data' split the batch"):
        zf.spmd(lambda _: None, zf.Mesh(data=2))
    with pytest.raises(ValueError, match=r"data_axes names 'dp', and the mesh has \['data'\]"):
        zf.spmd(lambda _: None, zf.Mesh(data=2), data_axes=("dp",))
    run = zf.spmd(lambda _, x: gathered(x, "data"), zf.Mesh(data=2), data_axes=("data",))
    assert run(None, torch.arange(2)).tolist() == [[0], [1]]


# Arguments and results of any structure


def test_trees_go_through() -> None:
    def program(state: Any, x: Any) -> Any:
        assert state["text"] == "kept"
        assert state["none"] is None
        total = zf.psum(x.sum(), "dp")
        return Pair({"t": total, "n": None}, [total + 1, "text"]), Record(total, 3)

    state = {"text": "kept", "none": None, "w": torch.ones(2)}
    pair, record = zf.spmd(program, zf.Mesh(dp=2))(state, torch.ones(4))
    assert isinstance(pair, Pair)
    assert (pair.first["t"], pair.first["n"], pair.second) == (4, None, [5, "text"])
    assert (record.value, record.note) == (4, 3)


def test_placed_leaves_come_back_and_go_in_again() -> None:
    mesh = zf.Mesh(dp=2)
    pieces = zf.spmd(lambda p: {"p": zf.shard(p, 3), "count": p.sum()}, mesh)(torch.arange(4.0))
    assert pieces["p"].local.tolist() == [[0, 1], [2, 3]]

    def program(state: Any, other: Any) -> Any:
        assert state["p"].local.shape == other.local.shape == (2,)
        return tree.map(lambda a, b: a + b, state["p"], other)

    # a placed node keeps its place in any argument
    assert zf.spmd(program, mesh)(pieces, pieces["p"]).local.tolist() == [[0, 2], [4, 6]]


def test_the_same_tensor_twice_is_one_inside() -> None:
    w = torch.ones(2)

    def program(state: Any) -> Any:
        assert state["a"] is state["b"]
        assert state["a"] is not state["c"]

    zf.spmd(program, zf.Mesh(dp=2))({"a": w, "b": w, "c": w.clone()})


def test_what_an_expanded_result_holds_is_its_own() -> None:
    """A piece that happens to be equal on all ranks still has memory for each."""
    mesh = zf.Mesh(dp=3)
    pieces = zf.spmd(lambda p: tree.map(lambda x: torch.zeros(2), zf.shard(p, 1)), mesh)(
        torch.ones(6)
    )
    assert pieces.local.is_contiguous()
    assert pieces.local.untyped_storage().nbytes() == 3 * 2 * 4


# What varies


def test_a_varying_result_is_refused_with_its_place() -> None:
    mesh = zf.Mesh(dp=2)
    x = torch.arange(4.0)
    message = r"the result at '1.metrics.0' varies over axis 'dp' .* zf.pmean\(x, 'dp'\)"
    run = zf.spmd(lambda s, x: (s, {"metrics": [x.mean()]}), mesh)
    with pytest.raises(ValueError, match=message):
        run(None, x)
    with pytest.raises(ValueError, match=message):
        torch.func.vmap(lambda k: run(k, x * k))(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        zf.jit(run)(None, x)
    with pytest.raises(RuntimeError, match="varies over axis 'dp'"):
        torch.compile(run, fullgraph=True, backend="eager")(None, x)
    with pytest.raises(ValueError, match="the result varies over axis 'dp'"):
        zf.spmd(lambda s, x: x.mean(), mesh)(None, x)


def test_the_axis_that_varies_is_named() -> None:
    mesh = zf.Mesh(dp=2, tp=2)
    with pytest.raises(ValueError, match="varies over axis 'tp'"):
        zf.spmd(lambda s: zf.axis_index("tp"), mesh)(None)
    with pytest.raises(ValueError, match="varies over axis 'dp'"):
        zf.spmd(lambda s, x: zf.psum(x.sum(), "tp"), mesh)(None, torch.ones(2))


def test_a_replicated_state_that_drifts_apart_is_refused() -> None:
    """The gradient of a parameter that did not come through unshard or pvary."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        grads = zf.grad(lambda w: zf.pmean((w * x).sum(), "dp"))(w)
        return w - grads

    with pytest.raises(ValueError, match=r"varies over axis 'dp'.* zf.unshard or zf.pvary"):
        zf.spmd(step, zf.Mesh(dp=2))(torch.ones(()), torch.arange(4.0))


# What a simulated rank cannot do


def item(x: Tensor) -> Any:
    return x.sum().item()  # the line that is named


def branch(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def mask(x: Tensor) -> Any:
    return x[x > 0].sum()


def noise(x: Tensor) -> Any:
    return torch.rand_like(x).sum()


@pytest.mark.parametrize(
    ("f", "line", "advice"),
    [
        (item, "return x.sum().item()", "keep it a tensor"),
        (branch, "return x if x.sum() > 0 else -x", "torch.where(condition, a, b)"),
        (mask, "return x[x > 0].sum()", "use a mask and torch.where"),
        (noise, "return torch.rand_like(x).sum()", "randomness='different'"),
    ],
)
def test_what_a_simulated_rank_cannot_do(f: Any, line: str, advice: str) -> None:
    message = f"not possible inside a simulated rank at .*test_ranks.py:.*{re.escape(line)}"
    with pytest.raises(RuntimeError, match=message) as caught:
        zf.spmd(lambda _, x: zf.pmean(f(x), "dp"), zf.Mesh(dp=2))(None, torch.ones(4))
    assert advice in str(caught.value)


def test_writing_into_what_all_ranks_share() -> None:
    with pytest.raises(RuntimeError, match=r"write x = x \+ y instead"):
        zf.spmd(lambda w, x: w.add_(x), zf.Mesh(dp=2))(torch.zeros(2, 3), torch.ones(4, 3))


def test_other_errors_come_as_they_are() -> None:
    def program(_: Any) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        zf.spmd(program, zf.Mesh(dp=2))(None)
    with pytest.raises(NameError):  # and the axes are unbound again
        zf.psum(torch.ones(1), "dp")


@pytest.mark.parametrize(("randomness", "equal"), [("same", True), ("different", False)])
def test_randomness(randomness: Any, equal: bool) -> None:
    run = zf.spmd(lambda _: gathered(torch.rand(3)), zf.Mesh(dp=2), randomness=randomness)
    first, second = run(None)
    assert torch.equal(first, second) == equal


def test_spmd_inside_spmd() -> None:
    inner = zf.spmd(lambda x: zf.psum(x, "tp"), zf.Mesh(tp=2))
    outer = zf.spmd(lambda _, x: zf.psum(inner(x).sum(), "dp"), zf.Mesh(dp=2))
    assert outer(None, torch.ones(4)) == 8
    again = zf.spmd(lambda _, x: outer(_, x), zf.Mesh(dp=2))
    with pytest.raises(ValueError, match="axis 'dp' is bound already"):
        again(None, torch.ones(4))


# Meshes


def test_a_mesh_of_one_rank_works_anywhere() -> None:
    for mesh in (zf.Mesh(), zf.Mesh(dp=1), zf.Mesh(dp=1, tp=1)):
        run = zf.spmd(lambda p, x, m=mesh: zf.pmean((p * x).sum(), tuple(m.shape)), mesh)
        assert run(torch.ones(2), torch.ones(3, 2)) == 6
    assert repr(zf.Mesh(dp=2, tp=3)) == "Mesh(dp=2, tp=3) of 6 simulated ranks"


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_must_be_positive_ints(size: Any) -> None:
    with pytest.raises(ValueError, match=f"axis 'dp' has size {size!r}"):
        zf.Mesh(dp=size)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'nccl'"):
        zf.Mesh(backend="nccl", dp=2)  # type: ignore[arg-type]


def test_an_abstract_mesh_of_a_thousand_ranks() -> None:
    mesh = zf.Mesh(dp=1000).abstract()
    assert repr(mesh) == "Mesh(dp=1000) of 1000 abstract ranks"
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(torch.ones(2001))
    assert pieces.local.shape == (3,)

    def step(p: Any, x: Tensor) -> Any:
        return zf.grad_and_value(lambda p: zf.pmean((x * zf.unshard(p)).sum(), "dp"))(p)

    grads, value = zf.spmd(step, mesh)(pieces, torch.ones(4000, 2001))
    assert (grads.local.shape, value.shape) == ((3,), ())


def wrong_meshes() -> list[str]:
    said = []
    for sizes in ({"dp": 3}, {"dp": 1}, {}):
        try:
            zf.Mesh(**sizes)
        except ValueError as error:
            said.append(str(error))
    zf.Mesh(dp=3, backend="simulated")
    return said


def test_a_mesh_that_does_not_fit_the_processes() -> None:
    for said in run_on_processes(2, wrong_meshes):
        assert len(said) == 3
        assert "a mesh of dp 3 needs 3 processes, and there are 2" in said[0]
        assert "torchrun --nproc-per-node 3" in said[0]
        assert "backend='simulated'" in said[0]
        assert "a mesh of dp 1 needs 1 process," in said[1]


def rank_that_fails(failing: int) -> None:
    mesh = zf.Mesh(dp=2)
    if mesh.rank == failing:
        raise KeyError("this rank alone")
    zf.spmd(lambda _, x: zf.psum(x, "dp"), mesh)(None, torch.ones(2))


def test_a_rank_that_raises_fails_the_test_and_hangs_nothing() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*this rank alone"):
        run_on_processes(2, rank_that_fails, 1)
    assert len(run_on_processes(2, batches_on_processes)) == 2  # a new pool
