"""Pytrees: what is a node, how leaves are named, what is refused."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import zero_fn as zf
from zero_fn import tree


class Point(NamedTuple):
    x: Any
    y: Any


@zf.register_dataclass
@dataclass
class Layer:
    weight: Any
    bias: Any


@dataclass
class Sized:
    weight: Any
    width: int


zf.register_dataclass(Sized, static=("width",))


def test_nestings_keep_their_structure_and_name_their_leaves() -> None:
    value = {"b": [1, (2, Point(3, 4))], "a": Layer(5, None), "c": {}, 7: 8}
    leaves, treedef = tree.flatten(value)
    assert tree.unflatten(treedef, leaves) == value
    named = dict(zip(tree.paths(value), leaves, strict=True))
    assert named == {"b.0": 1, "b.1.0": 2, "b.1.1.x": 3, "b.1.1.y": 4, "a.weight": 5, "7": 8}
    doubled = tree.map(lambda x: 2 * x, value)
    assert doubled["b"][1][1] == Point(6, 8)
    assert doubled["a"] == Layer(10, None)
    assert tree.map_with_path(lambda p, x, y: (p, x, y), [1], [2]) == [("0", 1, 2)]


def test_static_fields_are_structure() -> None:
    node = Sized(torch.ones(2), 3)
    leaves, treedef = tree.flatten(node)
    assert len(leaves) == 1
    assert tree.flatten(Sized(torch.zeros(2), 3))[1] == treedef
    assert tree.flatten(Sized(torch.zeros(2), 4))[1] != treedef
    assert tree.unflatten(treedef, [1]) == Sized(1, 3)


def test_torch_sees_through_the_same_nodes() -> None:
    def f(layer: Layer, piece: Any) -> Any:
        return Layer(layer.weight * 2, piece)

    mesh = zf.Mesh(dp=2)
    piece = zf.spmd(lambda p: zf.shard(p, 1), mesh)(torch.arange(4.0))
    stacked = tree.map(lambda x: torch.stack([x, x]), piece)
    out = torch.func.vmap(f)(Layer(torch.ones(2), torch.zeros(2)), stacked)
    assert isinstance(out, Layer)
    assert isinstance(out.bias, zf.Sharded)
    assert out.bias.local.shape == (2, 2, 2)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a dataclass, got <class 'int'>"):
        zf.register_dataclass(int)
    with pytest.raises(TypeError, match=r"Layer has no field 'size'; .* \['weight', 'bias'\]"):
        zf.register_dataclass(Layer, static=("size",))

    @dataclass
    class Unknown:
        weight: Any

    with pytest.raises(TypeError, match=r"params at 'a': .* zf.register_dataclass\(Unknown\)"):
        tree.check_tensors({"a": Unknown(1)}, "params")
