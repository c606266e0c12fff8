"""A GPT cut into the stages of a pipeline."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.models import gpt

from .stages import assert_same

CONFIG = gpt.Config(vocabulary=19, length=8, layers=5, heads=2, width=8)


def data() -> tuple[Any, Any]:
    params = gpt.init(CONFIG)
    doubles: dict[int, torch.Tensor] = {}  # tied ones stay one tensor
    params = tree.map(lambda x: doubles.setdefault(id(x), 10 * x.double()), params)
    tokens = torch.randint(0, 19, (8, 9), generator=torch.Generator().manual_seed(0))
    return params, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def dense() -> tuple[Any, Any]:
    params, batch = data()
    doubles: dict[int, torch.Tensor] = {}
    params = tree.map(lambda x: doubles.setdefault(id(x), x.clone().requires_grad_()), params)
    value = gpt.loss(params, batch, CONFIG)
    value.backward()
    return tree.map(lambda x: x.grad, params), value.detach()


def step(axes: dict[str, int], n: int, name: str) -> Any:
    params, batch = data()
    mesh = zf.Mesh(**axes)
    *inner, last = gpt.stages(CONFIG, n)
    pipe = zf.pipeline(
        [*map(zf.remat, inner), lambda p, carry, b: zf.pmean(last(p, carry, b), "dp")], 4, name
    )

    def init(params: Any) -> Any:
        return pipe.place(zf.shard(params, 1))

    placed = zf.spmd(init, mesh)(gpt.split_params(params, CONFIG, n))
    grads, value = zf.spmd(pipe, mesh)(placed, batch)
    return zf.gather_tree(zf.spmd(pipe.collect, mesh)(grads), mesh), value


def assert_dense(got: Any, n: int) -> None:
    want, of_whole = dense()
    grads, value = got
    assert_same(grads, gpt.split_params(want, CONFIG, n))
    assert_same(value, of_whole)


@pytest.mark.parametrize(("n", "name"), [(1, "gpipe"), (3, "1f1b"), (4, "zbv"), (7, "1f1b")])
def test_stages_are_the_model(n: int, name: str) -> None:
    assert_dense(step({"dp": 2}, n, name), n)


def test_on_processes() -> None:
    for name, n in [("1f1b", 2), ("zbv", 4)]:
        for got in run_on_processes(4, step, {"pp": 2, "dp": 2}, n, name):
            assert_dense(got, n)


def test_every_layer_is_in_one_stage() -> None:
    params, _ = data()
    for n in range(1, 8):
        cut = gpt.split_params(params, CONFIG, n)
        assert len(cut) == len(gpt.stages(CONFIG, n)) == n
        whole = {id(x) for x in tree.leaves(params)}
        assert {id(x) for x in tree.leaves(cut)} == whole
        assert len(tree.leaves(cut)) == len(tree.leaves(params))
    with pytest.raises(ValueError, match="7 layers, and cannot be cut into 8 stages"):
        gpt.stages(CONFIG, 8)
