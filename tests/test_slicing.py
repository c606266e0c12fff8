"""Parameters cut by rules: what a rank holds, putting them together, ties, nesting, refusals."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes

RULES: Any = {
    "rows.*": 0,
    "columns": -1,
    "qkv": zf.SliceRule(0, sections=(12, 12, 24)),
    "table": zf.SliceRule(0, pad=True),
    "wide": zf.SliceRule(1, pad=True),
    "norm": None,
    "scalar": None,
}


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def params() -> dict[str, Any]:
    return {
        "rows": [numbered(12), numbered(24, 3)],
        "columns": numbered(2, 5, 12),
        "qkv": numbered(48, 2),
        "table": numbered(11, 3),
        "wide": numbered(3, 5, 2),
        "norm": numbered(7),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }


def cut(values: Any, mesh: zf.Mesh, rules: Any = RULES) -> Any:
    return zf.spmd(lambda p: zf.slice_params(p, rules), mesh)(values)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_gathering_gives_the_whole(tp: int) -> None:
    mesh = zf.Mesh(dp=2, tp=tp)
    slices = cut(params(), mesh)
    torch.testing.assert_close(zf.gather_tree(slices, mesh), params(), rtol=0, atol=0)


def test_what_each_rank_holds() -> None:
    slices = cut(params(), zf.Mesh(tp=2))
    whole = params()
    for rank in range(2):
        assert torch.equal(slices["rows"][1].local[rank], whole["rows"][1].chunk(2)[rank])
        assert torch.equal(slices["columns"].local[rank], whole["columns"].chunk(2, -1)[rank])
        of_sections = [x.chunk(2)[rank] for x in whole["qkv"].split([12, 12, 24])]
        assert torch.equal(slices["qkv"].local[rank], torch.cat(of_sections))
    padding = torch.zeros(1, 3, dtype=torch.float64)
    assert torch.equal(slices["table"].local.flatten(0, 1), torch.cat([whole["table"], padding]))
    assert torch.equal(slices["norm"].local, whole["norm"])


def test_a_slice_has_memory_of_its_own() -> None:
    whole = params()
    slices = cut(whole, zf.Mesh(tp=1))
    for slice_ in tree.leaves(slices):
        slice_.zero_()
    torch.testing.assert_close(whole, params(), rtol=0, atol=0)


def test_abstract_ranks_hold_the_same_shapes() -> None:
    mesh = zf.Mesh(tp=4)
    simulated, abstract = cut(params(), mesh), cut(params(), mesh.abstract())

    def is_slice(node: Any) -> bool:
        return isinstance(node, zf.Sliced)

    pairs = zip(tree.leaves(simulated, is_slice), tree.leaves(abstract, is_slice), strict=True)
    for one, other in pairs:
        assert one.local.shape[len(one.axes) :] == other.local.shape


def test_repr_says_what_a_slice_is() -> None:
    mesh = zf.Mesh(dp=4, tp=2)
    values = {"w": torch.randn(6, 4), "b": torch.randn(3, dtype=torch.bfloat16)}
    slices = cut(values, mesh, {"w": 1, "b": None})
    assert (
        repr(slices) == "{'w': f32[6,4] as 1/2 of tp along dim 1, 'b': bf16[3] whole on each of tp}"
    )
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(slices)
    assert repr(pieces["w"]) == "f32[6,4] as 1/2 of tp along dim 1, f32[6,2] as 1/4 of dp"


# Pieces of slices


def nested(mesh: zf.Mesh, stage: int) -> Any:
    return zf.spmd(lambda p: zf.shard(zf.slice_params(p, RULES), stage), mesh)(params())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [{"dp": 3, "tp": 2}, {"tp": 2, "dp": 3}, {"dp": 2, "tp": 1}])
def test_slices_are_cut_again_and_put_together(sizes: Any, stage: int) -> None:
    mesh = zf.Mesh(**sizes)
    torch.testing.assert_close(zf.gather_tree(nested(mesh, stage), mesh), params(), rtol=0, atol=0)


def nested_on_processes(stage: int) -> Any:
    mesh = zf.Mesh(dp=2, tp=2)
    pieces = nested(mesh, stage)
    norm = zf.spmd(zf.global_norm, mesh)(pieces)
    return zf.gather_tree(pieces, mesh), norm, [tuple(x.shape) for x in tree.leaves(pieces)]


@pytest.mark.parametrize("stage", [0, 3])
def test_processes_hold_their_pieces_of_slices(stage: int) -> None:
    want = torch.cat([x.flatten() for x in tree.leaves(params())]).norm()
    for whole, norm, shapes in run_on_processes(4, nested_on_processes, stage):
        torch.testing.assert_close(whole, params(), rtol=0, atol=0)
        torch.testing.assert_close(norm, want)
        # leaves by key: columns, norm, qkv
        assert shapes[:3] == ([(2, 5, 6), (7,), (24, 2)] if stage == 0 else [(30,), (4,), (24,)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_add_over_the_axes_that_a_leaf_is_cut_on(stage: int) -> None:
    """What all ranks of tp share counts once."""
    mesh = zf.Mesh(dp=3, tp=2)
    pieces = nested(mesh, stage)
    flat = torch.cat([x.flatten() for x in tree.leaves(params())])
    norm = zf.spmd(zf.global_norm, mesh)(pieces)
    torch.testing.assert_close(norm, flat.norm(), rtol=1e-12, atol=0)
    clip = zf.clip_by_global_norm(2.0)
    clipped = zf.spmd(lambda p: clip.update(p, (), p)[0], mesh)(pieces)
    whole = zf.gather_tree(clipped, mesh)
    got = torch.cat([x.flatten() for x in tree.leaves(whole)])
    torch.testing.assert_close(got, flat * 2 / (flat.norm() + 1e-6), rtol=1e-12, atol=0)


def test_norms_of_leaves_that_are_cut_on_one_two_and_three_axes() -> None:
    mesh = zf.Mesh(dp_outer=2, tp=2, dp_inner=3)

    def program(values: Any) -> tuple[Tensor, Any]:
        slices = zf.slice_params(values, RULES)
        pieces = {
            "one": slices["qkv"],
            "two": zf.shard(slices["columns"], 3, "dp_inner"),
            "three": zf.shard(slices["table"], 3, ("dp_outer", "dp_inner")),
            "none": slices["norm"],
        }
        return zf.global_norm(pieces), zf.clip_by_global_norm(2.0).update(pieces, (), pieces)[0]

    norm, clipped = zf.spmd(program, mesh)(params())
    whole = params()
    leaves = [whole["norm"], whole["qkv"], whole["table"], whole["columns"]]
    flat = torch.cat([x.flatten() for x in leaves])
    torch.testing.assert_close(norm, flat.norm(), rtol=1e-12, atol=0)
    got = torch.cat([x.flatten() for x in tree.leaves(zf.gather_tree(clipped, mesh))])
    torch.testing.assert_close(got, flat * 2 / (flat.norm() + 1e-6), rtol=1e-12, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_two_are_taken_off_in_either_order(stage: int) -> None:
    mesh = zf.Mesh(dp=2, tp=2)

    def program(pieces: Any) -> list[Tensor]:
        one = tree.leaves(zf.local_slices(zf.unshard(pieces)))
        other = tree.leaves(zf.unshard(zf.local_slices(pieces)))
        apart = [(x - y).abs().sum() for x, y in zip(one, other, strict=True)]
        assert len(apart) == len(tree.leaves(params()))
        return [zf.psum(x, ("dp", "tp")) for x in apart]

    assert not any(zf.spmd(program, mesh)(nested(mesh, stage)))


def test_masks_and_paths_are_those_of_the_whole_leaf() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def mask(path: str, shape: tuple[int, ...]) -> bool:
        seen[path] = shape
        return True

    mesh = zf.Mesh(dp=2, tp=2)
    optimizer = zf.adamw(1e-3, weight_decay=0.1, mask=mask)
    pieces = nested(mesh, 3)
    zf.spmd(lambda p: optimizer.update(p, optimizer.init(p), p)[0], mesh)(pieces)
    whole = params()
    assert seen == dict(
        zip(tree.paths(whole), [tuple(x.shape) for x in tree.leaves(whole)], strict=True)
    )


# Ties


def test_tied_leaves_stay_one_slice() -> None:
    mesh = zf.Mesh(dp=2, tp=2)
    w = numbered(6, 4)
    rules = {"embed": 0, "head": 0, "mid": None}
    values = {"mid": numbered(4, 4), "head": w, "embed": w}
    pieces = zf.spmd(lambda p: zf.shard(zf.slice_params(p, rules), 3), mesh)(values)
    assert len(tree.leaves(pieces)) == 2
    whole = zf.gather_tree(pieces, mesh)
    assert whole["head"] is whole["embed"]
    torch.testing.assert_close(whole, values, rtol=0, atol=0)

    def program(pieces: Any) -> Any:
        local = zf.local_slices(zf.unshard(pieces))
        assert local["head"] is local["embed"]
        return ()

    zf.spmd(program, mesh)(pieces)
    with pytest.raises(ValueError, match=r"'head' is tied to 'embed' .*rules differ"):
        cut(values, mesh, {"mid": None, "embed": 0, "head": 1})


# Refusals


@pytest.mark.parametrize(
    ("values", "rules", "error", "message"),
    [
        (
            {"a": {"up": torch.ones(4)}},
            {"b.*": 0},
            ValueError,
            "params at 'a.up' matches no rule of ['b.*']; add one: {'a.up': 0} cuts dimension 0",
        ),
        (
            {"a": {"up": torch.ones(4)}},
            {"a.*": 0, "*.up": None},
            ValueError,
            "params at 'a.up' matches 2 rules, ['a.*', '*.up'], and a leaf takes one",
        ),
        (
            {"a": torch.ones(4)},
            {"a": 0, "A": 0},
            ValueError,
            "the rule 'A' matches no leaf of params; its leaves are ['a']",
        ),
        (
            {"a": torch.ones(4, 10)},
            {"a": 1},
            ValueError,
            "params at 'a': size 10 of dimension 1 of shape (4, 10) is not divisible by the 4 "
            "ranks of 'tp'; take a multiple of 4, leave the leaf whole ({'a': None}), or",
        ),
        (
            {"a": torch.ones(12, 2)},
            {"a": zf.SliceRule(0, sections=(6, 6))},
            ValueError,
            "params at 'a': a section of 6 of dimension 0 of shape (12, 2) is not divisible by "
            "the 4 ranks of 'tp'",
        ),
        (
            {"a": torch.ones(12)},
            {"a": zf.SliceRule(0, sections=(4, 4))},
            ValueError,
            "dimension 0 of shape (12,) is 12, and the rule's sections (4, 4) add up to 8",
        ),
        (
            {"a": torch.ones(8)},
            {"a": zf.SliceRule(0, sections=(4, 4), pad=True)},
            ValueError,
            "take pad or sections, not both",
        ),
        (
            {"a": torch.ones(4)},
            {"a": 1},
            ValueError,
            "params at 'a': shape (4,) has no dimension 1 to cut",
        ),
        (
            {"a": torch.ones(4)},
            {"a": "0"},
            TypeError,
            "params at 'a': its rule is '0'; it is a dim",
        ),
        ({"a": torch.ones(4)}, {"a": True}, TypeError, "params at 'a': its rule is True; it is"),
        ({"a": torch.arange(4)}, {"a": 0}, TypeError, "params at 'a': a tensor of dtype torch.int"),
        ({"a": "text"}, {"a": 0}, TypeError, "params at 'a': expected a tensor, got 'text'"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    values: Any, rules: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cut(values, zf.Mesh(tp=4), rules)


def test_what_is_cut_already_is_refused() -> None:
    mesh = zf.Mesh(dp=2, tp=2)
    for pieces in (cut(params(), mesh), zf.spmd(lambda p: zf.shard(p, 1), mesh)(params())):
        with pytest.raises(ValueError, match=r"params at 'columns' is cut already: f64\[2,5,12\]"):
            cut(pieces, mesh)


def test_another_mesh_is_refused() -> None:
    slices = cut({"w": torch.ones(4)}, zf.Mesh(tp=1), {"w": 0})
    with pytest.raises(ValueError, match=r"cut on another mesh|was cut for"):
        zf.gather_tree(slices, zf.Mesh(tp=2))
    shared = cut({"w": torch.ones(4)}, zf.Mesh(tp=4), {"w": None})
    with pytest.raises(ValueError, match="was cut for 4 ranks, and axis 'tp' has 2 here"):
        zf.spmd(lambda p: zf.local_slices(p)["w"], zf.Mesh(tp=2))(shared)
    with pytest.raises(ValueError, match=r"state at 'w' is cut over axis 'tp', .* \['dp'\]"):
        zf.gather_tree(cut({"w": torch.ones(4)}, zf.Mesh(tp=2), {"w": 0}), zf.Mesh(dp=2))


def test_outside_spmd_is_refused() -> None:
    with pytest.raises(NameError, match="unknown mesh axis 'tp'; no axis is bound here"):
        zf.slice_params({"w": torch.ones(4)}, {"w": 0})


def test_a_shared_leaf_that_meets_varying_values_needs_pvary() -> None:
    mesh = zf.Mesh(tp=2)
    slices = cut({"w": torch.ones(4), "scale": torch.tensor(2.0)}, mesh, {"w": 0, "scale": None})

    def step(slices: Any, vary: bool) -> Any:
        def loss(slices: Any) -> Tensor:
            local = zf.local_slices(slices)
            scale = zf.pvary(local["scale"], "tp") if vary else local["scale"]
            return zf.psum((local["w"] * scale * (1 + zf.axis_index("tp"))).sum(), "tp")

        return zf.grad(loss)(slices)

    grads = zf.spmd(lambda p: step(p, True), mesh)(slices)
    assert grads["scale"].local == 6
    with pytest.raises(ValueError, match="the result at 'scale' varies over axis 'tp'"):
        zf.spmd(lambda p: step(p, False), mesh)(slices)


def test_gradients_of_slices_do_not_travel_compressed() -> None:
    mesh = zf.Mesh(dp=2, tp=2)
    grads = cut({"w": torch.ones(4)}, mesh, {"w": 0})
    with pytest.raises(ValueError, match="grads at 'w' is cut over 'tp', and one bucket over 'dp'"):
        zf.spmd(lambda g: zf.compress(g, "1bit", None)[0], mesh)(grads)
    with pytest.raises(ValueError, match="params at 'w' is cut over 'tp'"):
        zf.spmd(zf.onebit_adam(1e-3, 5).init, mesh)(grads)
    with pytest.raises(ValueError, match="gradients of slices do not travel compressed"):
        zf.train_step(
            lambda p, b: p["w"].sum(), zf.sgd(0.1), mesh, compress="1bit", slice_rules={"w": 0}
        )
