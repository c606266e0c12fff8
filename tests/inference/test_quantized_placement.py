"""Quantised weights on meshes and in files: pieces over dp, slices over tp, checkpoints of both."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from tests.inference.test_quantization import CONFIG, TOKENS, normal
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.inference.quantization import METHODS
from zero_fn.models import gpt


def sharded_logits(mesh: zf.Mesh, method: Any, stage: int) -> Tensor:
    params = zf.quantize(gpt.init(CONFIG), method)
    pieces = zf.spmd(lambda p: zf.shard(p, stage), mesh)(params)

    def logits(pieces: Any, tokens: Tensor) -> Tensor:
        return zf.all_gather_invariant(gpt.apply(zf.unshard(pieces), tokens, CONFIG), "dp")

    return zf.spmd(logits, mesh)(pieces, TOKENS)


def sharded_on_processes() -> list[Tensor]:
    return [sharded_logits(zf.Mesh(dp=2), method, 3) for method in METHODS]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("method", METHODS)
def test_shards_hold_pieces_of_values_and_scales(method: Any, stage: int) -> None:
    q = zf.quantize(gpt.init(CONFIG), method)
    mesh = zf.Mesh(dp=3)
    pieces = zf.spmd(lambda p: zf.shard(p, stage), mesh)(q)
    if stage:
        assert pieces["head"].values.parts == 3  # `tokens` is tied to it
        assert pieces["head"].scales.parts == 3
    torch.testing.assert_close(tree.leaves(zf.gather_tree(pieces, mesh)), tree.leaves(q))
    # Simulated ranks compute by blocks, the whole by kernels, whose own error this is.
    want = gpt.apply(q, TOKENS, CONFIG)
    torch.testing.assert_close(
        sharded_logits(zf.Mesh(dp=2), method, stage), want, rtol=1e-3, atol=1e-4
    )


def test_shards_on_processes() -> None:
    for logits in run_on_processes(2, sharded_on_processes):
        for method, found in zip(METHODS, logits, strict=True):
            want = gpt.apply(zf.quantize(gpt.init(CONFIG), method), TOKENS, CONFIG)
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def slices(mesh: zf.Mesh, method: Any, group: int | None = None, stage: int | None = None) -> Any:
    rules = gpt.rules(CONFIG)

    def cut(params: Any) -> Any:
        sliced = zf.quantize(zf.slice_params(params, rules), method, group=group)
        return sliced if stage is None else zf.shard(sliced, stage)

    return zf.spmd(cut, mesh)(gpt.init(CONFIG))


def sliced_logits(mesh: zf.Mesh, sliced: Any) -> Tensor:
    def logits(sliced: Any, tokens: Tensor) -> Tensor:
        whole = zf.local_slices(zf.unshard(sliced))
        own = zf.all_gather_invariant(gpt.apply(whole, tokens, CONFIG, axis="tp"), "tp", dim=-1)
        return zf.all_gather_invariant(own, "dp") if "dp" in mesh.shape else own

    return zf.spmd(logits, mesh)(sliced, TOKENS)[..., : CONFIG.vocabulary]


def sliced_on_processes() -> Tensor:
    mesh = zf.Mesh(tp=2)
    return sliced_logits(mesh, slices(mesh, "int8"))


# A group that divides the slices of rows, of 16 and 64 columns.
@pytest.mark.parametrize(("method", "group"), [("int8", None), ("fp8", None), ("int4", 8)])
@pytest.mark.parametrize("stage", [None, 3])
def test_slices_are_those_of_the_quantised_weight(
    method: Any, group: int | None, stage: int | None
) -> None:
    """The mesh is not seen in the values and scales, whatever it cuts."""
    mesh = zf.Mesh(tp=2) if stage is None else zf.Mesh(dp=2, tp=2)
    q = zf.quantize(gpt.init(CONFIG), method, group=group)
    sliced = slices(mesh, method, group, stage)
    whole = zf.gather_tree(sliced, mesh)
    assert tree.paths(whole) == tree.paths(q)
    assert all(map(torch.equal, tree.leaves(whole), tree.leaves(q)))
    want = gpt.apply(q, TOKENS, CONFIG)
    # kernels against blocks, and partial sums of two ranks
    torch.testing.assert_close(sliced_logits(mesh, sliced), want, rtol=1e-3, atol=1e-4)


def test_sections_and_padding_of_slices() -> None:
    w = normal(6, 24)
    for rule, group in ((zf.SliceRule(1, sections=(8, 16)), 4), (zf.SliceRule(1), 0)):
        for method in METHODS:
            mesh = zf.Mesh(tp=2)

            def cut(p: Any, rule: Any = rule, method: Any = method, group: Any = group) -> Any:
                return zf.quantize(zf.slice_params(p, {"w": rule}), method, group=group)

            whole = zf.gather_tree(zf.spmd(cut, mesh)({"w": w}), mesh)["w"]
            want = zf.quantize(w, method, group=group)
            assert torch.equal(zf.dequantize(whole), zf.dequantize(want))
    with pytest.raises(
        ValueError, match=r"'w' .* groups of 5 values don't divide its slices, of 12"
    ):
        zf.spmd(lambda p: zf.quantize(zf.slice_params(p, {"w": 1}), group=5), mesh)({"w": w})


def test_slices_on_processes() -> None:
    want = gpt.apply(zf.quantize(gpt.init(CONFIG)), TOKENS, CONFIG)
    for found in run_on_processes(2, sliced_on_processes):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_sharded_trees_are_quantised_before() -> None:
    params = {"w": torch.ones(4, 4)}
    pieces = zf.spmd(lambda p: zf.shard(p, 3), zf.Mesh(dp=2))(params)
    with pytest.raises(ValueError, match=r"zf.shard\(zf.quantize"):
        zf.quantize(pieces)


def test_policies_leave_integers_alone() -> None:
    mesh = zf.Mesh(dp=2)
    q = zf.quantize({"w": normal(5, 8)})
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(q)

    def whole(pieces: Any) -> Any:
        return zf.pmean(F.linear(torch.ones(8), zf.unshard(pieces, torch.bfloat16)["w"]), "dp")

    found = zf.spmd(whole, mesh)(pieces)
    # bfloat16 scales: 2^-9
    torch.testing.assert_close(found, F.linear(torch.ones(8), q["w"]), rtol=1e-2, atol=1e-2)


def placed(mesh: zf.Mesh, stage: int, method: Any, seed: int = 0) -> Any:
    """A quantised model at rest on a mesh, its weights those of the seed."""
    params, rules = gpt.init(CONFIG, seed), gpt.rules(CONFIG)
    group = 8 if method == "int4" else None

    def cut(params: Any) -> Any:
        sliced = zf.slice_params(params, rules) if "tp" in mesh.shape else params
        return zf.shard(zf.quantize(sliced, method, group=group), stage)

    return zf.spmd(cut, mesh)(params)


MESHES = [({"dp": 1}, 0), ({"dp": 3}, 3), ({"dp": 2}, 1), ({"dp": 2, "tp": 2}, 3)]


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_read_on_every_mesh(method: Any, tmp_path: Path) -> None:
    want = zf.quantize(gpt.init(CONFIG), method, group=8 if method == "int4" else None)
    for number, (sizes, stage) in enumerate(MESHES):
        mesh = zf.Mesh(**sizes)
        zf.save(tmp_path, placed(mesh, stage, method), mesh, step=number)
    for number in range(len(MESHES)):
        sizes, stage = MESHES[(number + 1) % len(MESHES)]
        mesh = zf.Mesh(**sizes)
        back = zf.load(tmp_path, placed(mesh, stage, method, seed=1), mesh, step=number)
        whole = zf.gather_tree(back, mesh)
        assert repr(whole["blocks"][0]["qkv"]) == repr(want["blocks"][0]["qkv"])
        assert all(map(torch.equal, tree.leaves(whole), tree.leaves(want)))


def test_another_method_is_an_error(tmp_path: Path) -> None:
    mesh = zf.Mesh(dp=2)
    zf.save(tmp_path, placed(mesh, 3, "int8"), mesh, step=0)
    with pytest.raises(
        ValueError, match=r"head\.values' has dtype torch\.uint8, saved is torch\.int8"
    ):
        zf.load(tmp_path, placed(mesh, 3, "fp8"), mesh)
    plain = zf.spmd(lambda p: zf.shard(p, 3), mesh)(gpt.init(CONFIG))
    with pytest.raises(ValueError, match=r"'head' is in `like` and not in the checkpoint"):
        zf.load(tmp_path, plain, mesh)
    rows, groups = ({"w": zf.quantize(normal(4, 8), group=n)} for n in (0, 4))
    zf.save(tmp_path, rows, mesh, step=1)
    with pytest.raises(ValueError, match=r"'w\.scales' has shape \(4, 2\), saved is \(4, 1\)"):
        zf.load(tmp_path, groups, mesh)


def save_there(folder: Path) -> None:
    mesh = zf.Mesh(dp=2)
    zf.save(folder, placed(mesh, 3, "int8"), mesh, step=7)


def load_there(folder: Path) -> list[Tensor]:
    mesh = zf.Mesh(dp=1, tp=2)
    like = placed(mesh, 0, "int8", seed=1)
    return tree.leaves(zf.gather_tree(zf.load(folder, like, mesh), mesh))


def test_processes_save_and_load(tmp_path: Path) -> None:
    run_on_processes(2, save_there, tmp_path)
    for found in run_on_processes(2, load_there, tmp_path):
        want = tree.leaves(zf.quantize(gpt.init(CONFIG)))
        assert all(map(torch.equal, found, want))
