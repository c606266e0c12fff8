"""The package as a newcomer meets it: import, wheel, public surface, arrows between rooms."""

import ast
import inspect
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import zero_fn as zf

ROOT = Path(__file__).parent.parent


def python(code: str, *, interpreter: str = sys.executable, cwd: Path | None = None) -> str:
    """Run code in a fresh interpreter; what it printed, with standard error."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


IMPORT = """
import os, sys
import torch
before = dict(os.environ)
import zero_fn, zero_fn.kernels
assert dict(os.environ) == before, "the environment changed"
assert not torch.cuda.is_initialized(), "CUDA was started"
slow = "triton", "torch._dynamo", "torch.distributed.checkpoint", "matplotlib", "rich"
for name in (*slow, "transformers", "starlette", "safetensors", "cloudpickle"):
    assert name not in sys.modules, f"{name} was imported"
"""


def test_import_is_silent_quick_and_leaves_things_alone() -> None:
    assert python(IMPORT) == ""


def test_import_works_without_triton(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')\n")
    code = (
        "import torch, zero_fn as zf\n"
        "mesh = zf.Mesh(dp=2)\n"
        "init, step = zf.train_step(lambda p, x: (x @ p).square().mean(), zf.adamw(0.1), mesh)\n"
        "state, metrics = step(init(torch.ones(3)), torch.ones(4, 3))\n"
        "assert metrics['loss'] == 9\n"
    )
    assert python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}") == ""


def test_a_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", tmp_path, ROOT], check=True, timeout=120, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=False)
    interpreter = str(tmp_path / "empty" / "bin" / "python")
    (site,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel],
        check=True,
        timeout=120,
    )
    # The dependencies of this environment, without its own (editable) zero_fn: nested .pth files
    # are not read.
    dependencies = Path(torch.__file__).parent.parent
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    where = python(
        "import zero_fn, zero_fn.kernels, zero_fn.models.gpt\n"
        "print(zero_fn.__file__, zero_fn.kernels.__file__)",
        interpreter=interpreter,
        cwd=tmp_path,
    )
    assert where.count(str(site)) == 2
    assert (site / "zero_fn" / "py.typed").exists()
    assert (site / "zero_fn" / "kernels" / "sign_packing.c").exists()


def test_the_public_names_are_these() -> None:
    """A change of this list is a deliberate edit; every name is documented."""
    assert zf.__all__ == sorted(zf.__all__)
    assert set(zf.__all__) == {
        *("Mesh", "spmd"),
        *("psum", "pmean", "pvary", "all_gather", "all_gather_invariant", "psum_scatter"),
        *("pscatter", "ppermute", "all_to_all", "axis_index", "axis_size"),
        *("grad", "grad_and_value", "remat", "checkpoint_name", "accumulate"),
        *("activation_offload",),
        *("Scheme", "Sharded", "shard", "unshard", "tied", "gather_tree"),
        *("Sliced", "SliceRule", "slice_params", "local_slices"),
        *("column_linear", "row_linear", "vocab_embedding", "vocab_cross_entropy"),
        *("Optimizer", "adam", "adamw", "sgd", "chain", "clip_by_global_norm", "global_norm"),
        *("add_decayed_weights", "apply_updates", "scale_by_adam", "scale_by_learning_rate"),
        *("delayed_update",),
        *("constant", "warmup_cosine", "warmup_linear"),
        *("warmup_lr", "warmup_decay_lr", "warmup_cosine_lr"),
        *("Policy", "policy", "LossScale", "all_finite", "select"),
        *("compress", "compression_state", "ErrorFeedback", "Codec", "OneBit", "BFloat16"),
        *("Int8", "TopK", "PowerSGD"),
        *("LocalOptimizer", "onebit_adam", "onebit_lamb", "zero_one_adam", "compressed"),
        *("offload", "restore", "discard", "residency", "Residency"),
        *("random", "from_module", "to_module", "by_path", "freeze", "merge", "unfreeze"),
        *("csv_log", "tensorboard_log"),
        *("jit", "Program"),
        *("plan", "Plan", "compare", "eval_shape", "hardware", "Hardware"),
        *("from_deepspeed", "FromDeepSpeed", "show_sharding", "ShardingPicture"),
        *("pipeline", "pipeline_schedule", "check_schedule", "timeline", "partition"),
        *("Quantized", "quantize", "dequantize", "quantization_error", "linear", "generate"),
        *("distillation_loss", "Batcher", "ContinuousBatcher"),
        *("Train", "TrainState", "train_step", "fit", "progress"),
        *("save", "save_async", "Saving", "load", "saved_steps", "Checkpoints"),
        *("export_safetensors", "import_safetensors"),
        *("launch", "RankError"),
        *("register_dataclass", "testing"),
    }
    for name in zf.__all__:
        assert inspect.getdoc(getattr(zf, name)), f"zf.{name} has no docstring"


# The rooms from the ground floor up: each imports only those before it.
ROOMS = [
    "naming",
    "tree",
    "placed",
    "random",
    "mesh",
    "transport",
    "primitives",
    "collectives",
    "ranks",
    "pure_layers",
    "module_calls",
    "modules",
    "captures",
    "marks",
    "autodiff",
    "activations",
    "sharding",
    "slicing",
    "sliced_layers",
    "freezing",
    "finiteness",
    "carrying",
    "accumulation",
    "codecs",
    "feedback",
    "low_rank",
    "signs",
    "compression",
    "testing",
    "optim",
    "precision",
    "disk",
    "chunks",
    "streaming",
    "graphs",
    "pipelining",
    "regions",
    "storage",
    "background",
    "checkpoint",
    "safetensors_files",
    "accounting",
    "memory_drawing",
    "program",
    "agreeing",
    "offloading",
    "passes",
    "compiler",
    "hardware",
    "planning",
    "sharding_pictures",
    "states",
    "exchanging",
    "logs",
    "resuming",
    "fitting",
    "train",
    "launching",
    "models",
    "deepspeed",
    "inference",
    "costs",
    "demo",
    "__main__",
]


def imports_of(path: Path, package: str) -> set[str]:
    """The rooms that a file imports."""
    found = set()
    depth = len(path.relative_to(ROOT / package).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == depth:
                names = [module] if module else [alias.name for alias in node.names]
                found |= {name.split(".")[0] for name in names}
            elif module.startswith("zero_fn"):
                found.add(module.split(".")[1] if "." in module else "zero_fn")
    return found


def test_arrows_run_downwards() -> None:
    for path in (ROOT / "zero_fn").rglob("*.py"):
        room = path.relative_to(ROOT / "zero_fn").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ROOMS, f"{room} has no place in the order of the rooms"
        below = set(ROOMS[: ROOMS.index(room)]) | {"kernels"}
        assert imports_of(path, "zero_fn") - {room} <= below, f"{path} imports upwards"


def test_kernels_import_nothing_of_the_library() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "zero_fn" for name in names), path


def test_only_few_rooms_speak_of_torch_distributed() -> None:
    for path in (ROOT / "zero_fn").rglob("*.py"):
        few = ("mesh", "messages", "checkpoint", "storage", "background")
        few += ("safetensors_files", "starting", "script", "scripts")
        if path.stem not in few:
            assert "distributed" not in path.read_text().replace("torch.distributed.checkpoint", "")


@pytest.mark.parametrize("path", sorted((ROOT / "zero_fn").rglob("*.py")), ids=lambda p: p.stem)
def test_a_room_says_what_it_is_for_and_fits_on_a_few_pages(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert len(text.splitlines()) <= 420, f"{path} wants splitting"
