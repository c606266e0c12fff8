"""safetensors files: written from any mesh and stage, read by others' code, read back anywhere."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zero_fn as zf
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.models import gpt

from .test_checkpoint import MESHES, Rows, params, train, wholes

DTYPES = [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]


def whole_params(mesh: zf.Mesh, stage: Any, seed: int = 0) -> Any:
    return train(mesh, stage, seed)[0].params


@pytest.mark.parametrize("stage", [0, 3, Rows()], ids=["stage 0", "stage 3", "own scheme"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_others_read_it_and_we_read_it_back(
    sizes: dict[str, int], stage: Any, tmp_path: Path
) -> None:
    mesh, file = zf.Mesh(**sizes), tmp_path / "model.safetensors"
    zf.export_safetensors(file, whole_params(mesh, stage), mesh)
    found = load_file(file)
    assert found.keys() == params().keys()
    for name, x in params().items():
        assert torch.equal(found[name], x)
    assert list(tmp_path.iterdir()) == [file]
    for other in MESHES:
        there = zf.Mesh(**other)
        back = zf.import_safetensors(file, whole_params(there, stage, seed=1), there)
        for name, x in wholes(back, there).items():
            assert torch.equal(x, found[name])


def export_there(file: Path, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    mesh = zf.Mesh(**sizes)
    zf.export_safetensors(file, whole_params(mesh, 3), mesh)
    return wholes(zf.import_safetensors(file, whole_params(mesh, 1, seed=1), mesh), mesh)


def test_processes_write_and_read(tmp_path: Path) -> None:
    for sizes in ({"dp": 2}, {"dp": 1, "tp": 2}):
        file = tmp_path / f"{len(sizes)}.safetensors"
        for found in run_on_processes(2, export_there, file, sizes):
            assert all(torch.equal(x, found[name]) for name, x in load_file(file).items())
            assert found.keys() == params().keys()


def export_to_nowhere(folder: Path) -> str:
    mesh = zf.Mesh(dp=2)
    try:
        zf.export_safetensors(folder / "none" / "x", whole_params(mesh, 3), mesh)
    except OSError as error:
        return str(error)
    return ""


def test_all_ranks_learn_that_it_cannot_be_written(tmp_path: Path) -> None:
    for text in run_on_processes(2, export_to_nowhere, tmp_path):
        assert "none/x cannot be written" in text


def test_a_pipelines_stages_are_one_file(tmp_path: Path) -> None:
    config = gpt.Config(vocabulary=11, length=8, layers=2, heads=2, width=8)
    mesh = zf.Mesh(pp=2, dp=2)
    pipe = zf.pipeline(gpt.stages(config, 2), 2)
    init, _ = zf.train_step(pipe, zf.adamw(1e-3), mesh, stage=1)
    whole = gpt.split_params(gpt.init(config), config, 2)
    zf.export_safetensors(tmp_path / "x", init(whole).params, mesh)
    found = load_file(tmp_path / "x")
    for name, x in zip(tree.paths(whole), tree.leaves(whole), strict=True):
        if name in found:  # a tie may be there under one of its names
            assert torch.equal(found[name], x)
    assert "0.tokens" in found
    assert {"1.positions", "1.blocks.0.qkv.weight"} & set(found) == {"1.blocks.0.qkv.weight"}


@pytest.mark.parametrize("shapes", [[(3,), (), (0, 2), (5, 1)], [(7,)]], ids=str)
def test_dtypes_and_names(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Odd lengths of narrow dtypes beside wide ones: all are aligned."""
    mesh = zf.Mesh(dp=2)
    state = {
        f"{dtype}".removeprefix("torch."): {
            str(k): torch.arange(math.prod(shape)).view(shape).to(dtype)
            for k, shape in enumerate(shapes)
        }
        for dtype in (*DTYPES, torch.float64)
    }
    zf.export_safetensors(tmp_path / "x", state, mesh)
    found = load_file(tmp_path / "x")
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        assert found[path].dtype == x.dtype
        assert torch.equal(found[path].double(), x.double())
    # written by others: other order, and a header of any length
    for name in ("a", "ab", "abc"):
        save_file({name: torch.ones(3), "n": torch.ones(1, dtype=torch.uint8)}, tmp_path / name)
        like = {name: torch.zeros(3), "n": torch.zeros(1, dtype=torch.uint8)}
        back = zf.import_safetensors(tmp_path / name, like, mesh)
        assert back[name].tolist() == [1.0, 1.0, 1.0]
        raw = (tmp_path / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.dumps(json.loads(raw[8 : 8 + length])).encode()
        header += b" " * ((1 - len(header)) % 8)  # nothing after it is aligned
        (tmp_path / name).write_bytes(
            len(header).to_bytes(8, "little") + header + raw[8 + length :]
        )
        assert torch.equal(zf.import_safetensors(tmp_path / name, like, mesh)[name], torch.ones(3))


def test_a_tie_needs_one_name_and_floats_are_converted(tmp_path: Path) -> None:
    mesh, x = zf.Mesh(dp=2), torch.zeros(2)
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "x")
    back = zf.import_safetensors(tmp_path / "x", {"a": x, "b": x}, mesh)
    assert back["a"] is back["b"]
    assert back["b"].tolist() == [1.0, 1.0]
    assert back["b"].dtype == torch.float32
    zf.export_safetensors(tmp_path / "y", back, mesh)
    assert sorted(load_file(tmp_path / "y")) == ["a", "b"]
    assert x.tolist() == [0.0, 0.0]


def test_errors_name_every_difference(tmp_path: Path) -> None:
    mesh, file = zf.Mesh(dp=2), tmp_path / "x"
    zf.export_safetensors(file, {"a": torch.ones(3), "b": torch.ones(2), "old": x_of(1)}, mesh)
    like = {"a": torch.ones(4), "b": torch.ones(2, dtype=torch.int64), "new": torch.ones(1)}
    with pytest.raises(ValueError, match="nothing was read") as error:
        zf.import_safetensors(file, like, mesh)
    for words in (
        "'a' has shape (4,), in the file (3,)",
        "'b' has dtype torch.int64, in the file torch.float32",
        "'new' is in `like` and not in the file",
        "'old' is in the file and not in `like`",
    ):
        assert words in str(error.value)
    fresh = ["a", "b", "new", "old"]
    assert zf.import_safetensors(file, like, mesh, fresh=fresh)["a"].tolist() == [1.0] * 4
    for text, message in ((b"", "is no safetensors file"), (file.read_bytes()[:-4], "cut short")):
        (tmp_path / "bad").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            zf.import_safetensors(tmp_path / "bad", like, mesh)
    with pytest.raises(FileNotFoundError):
        zf.import_safetensors(tmp_path / "none", like, mesh)
    with pytest.raises(TypeError, match="'n' is 3"):
        zf.export_safetensors(file, {"n": 3}, mesh)
    quantised = {"w": zf.quantize({"w": torch.randn(4, 8)}, "int8")["w"]}
    with pytest.raises(ValueError, match=r"'w' is quantised.*zf\.dequantize"):
        zf.export_safetensors(file, quantised, mesh)


def x_of(size: int) -> torch.Tensor:
    return torch.ones(size)


def test_hugging_face_loads_what_was_trained_here(tmp_path: Path) -> None:
    """A model of theirs, trained at stage 3, exported, and loaded by their class."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).eval()
    params, _ = zf.from_module(module)
    mesh = zf.Mesh(dp=2)
    tokens = torch.arange(8).view(1, 8)
    sharded = zf.spmd(lambda p: zf.shard(p, 3), mesh)(params)
    zf.export_safetensors(tmp_path / "model.safetensors", sharded, mesh)
    other = transformers.GPT2LMHeadModel(config).eval()
    missing, unexpected = other.load_state_dict(
        load_file(tmp_path / "model.safetensors"), strict=False
    )
    assert not unexpected
    assert not [name for name in missing if name != "lm_head.weight"]
    assert torch.equal(other(tokens).logits, module(tokens).logits)
