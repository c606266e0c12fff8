"""A GPT in a folder: ``config.json`` and ``model.safetensors``, its tensors named by key path.

Of tied tensors one is stored. Reading builds nothing until all names, shapes and dtypes fit. A
folder of checkpoints (``zf.save``, of any mesh, stage and number of pipeline stages) with a
``config.json`` beside them is read, too: the parameters of the newest.
"""

import dataclasses
import glob
import json
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import tree
from ..checkpoint import load, look, saved_steps
from ..mesh import Mesh
from ..models import gpt
from ..models.gpt_config import Config
from ..pipelining.staging import Look
from ..safetensors_files import read_safetensors
from ..tree import PyTree, Tensor

CONFIG, TENSORS = "config.json", "model.safetensors"


def save_model(path: Path | str, params: PyTree, config: Config) -> None:
    """Write a GPT into a folder.

    Args:
        path: the folder; made if it is not there.
        params: whole tensors (:func:`zero_fn.gather_tree`), not quantised.
        config: its sizes, with dense attention: a layout is no JSON.

    Raises:
        ValueError: for parameters that are not those of the configuration, or sparse attention.
        ModuleNotFoundError: without safetensors.
    """
    from safetensors.torch import save_file

    if config.attention != "dense":
        raise ValueError(
            f"attention={config.attention!r} cannot be written; save with "
            "dataclasses.replace(config, attention='dense') and set it again after load_model"
        )
    given = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    _check(given, config, "params")
    unique = {id(x): path for path, x in reversed(given.items())}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: given[name].detach().contiguous() for name in unique.values()}
    save_file(tensors, folder / TENSORS)
    save_config(folder, config)


def save_config(path: Path | str, config: Config, **other: str) -> None:
    """Write a GPT's sizes into a folder, so that checkpoints there can be read as a model.

    Args:
        path: the folder; made if it is not there.
        config: the sizes, with dense attention.
        other: what stands in place of a field that is no JSON: ``attention="bigbird"``. Such a
            folder is refused by :func:`load_model`, by that name.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    named = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fields = {"model": "gpt", **named, **other}
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")


def load_model(path: Path | str) -> tuple[PyTree, Config]:
    """Read what :func:`save_model` wrote, or the newest checkpoint beside a ``config.json``.

    Raises:
        FileNotFoundError: if the folder or a file of it is not there.
        ValueError: for a configuration that is no GPT's, and for tensors of another model, with
            every difference.
        ModuleNotFoundError: without safetensors.
    """
    folder = Path(path)
    steps = saved_steps(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file() and not (name == TENSORS and steps):
            raise FileNotFoundError(
                f"{folder} has no {name}; it is a folder that save_model wrote, or one of "
                "checkpoints with a config.json (zero_fn.inference.model_files.save_config)"
            )
    config = _config(folder / CONFIG)
    expected = _expected(config)
    if (folder / TENSORS).is_file():
        found, what = read_safetensors(folder / TENSORS), str(folder / TENSORS)
    else:
        found, what = _of_checkpoint(folder, config, expected), f"{folder}, step {steps[-1]}"
    if config.tied and ("head" in found) != ("tokens" in found):
        both = found.get("head", found.get("tokens"))
        assert both is not None
        found |= {"head": both, "tokens": both}
    _check(found, config, what)
    return tree.map_with_path(lambda path, _: found[path], expected), config


def _of_checkpoint(folder: Path, config: Config, expected: PyTree) -> dict[str, Tensor]:
    """The parameters in the newest checkpoint, by their key paths in the whole model."""
    step = saved_steps(folder)[-1]
    saved = look(folder, step)
    looks = {name: x for name, x in saved.items() if isinstance(x, Look)}
    ends = (name.rpartition(".")[0] for name in looks if name.rpartition(".")[2] == "positions")
    found = [where for where in ends if _unstaged(where).rpartition(".")[2] in ("params", "")]
    if len(found) != 1:
        raise ValueError(
            f"{folder}: the newest checkpoint has {len(found) or 'no'} GPTs; one whose key paths "
            f"begin with params is wanted, and it has {', '.join(sorted(looks)[:20])} ..."
        )
    prefix = _unstaged(found[0])
    split = expected
    if found[0] != prefix:
        inside = [name.removeprefix(f"{prefix}.") for name in looks if name.startswith(prefix)]
        stages = 1 + max(int(name.partition(".")[0]) for name in inside)
        split = gpt.split_params(expected, config, stages)
    names: dict[int, str] = {}  # of the tensor with that id, as saved; ties may lie under one name
    for path, x in zip(tree.paths(split), tree.leaves(split), strict=True):
        name = tree.join_path(prefix, path)
        if name in looks:
            names[id(x)] = name
    like = {
        name: torch.empty(looks[name].shape, dtype=looks[name].dtype) for name in names.values()
    }
    rest = [glob.escape(name) for name in saved if name not in like]
    loaded = load(folder, like, Mesh(backend="simulated"), step=step, fresh=rest)
    paths = zip(tree.paths(expected), tree.leaves(expected), strict=True)
    return {path: loaded[names[id(x)]] for path, x in paths if id(x) in names}


def _unstaged(where: str) -> str:
    """A key path without the number of a pipeline's stage at its end."""
    head, _, last = where.rpartition(".")
    return head if last.isdigit() else where


def _config(file: Path) -> Config:
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(fields, dict) or fields.pop("model", None) != "gpt":
        raise ValueError(f'{file} is the configuration of another model: it has no "model": "gpt"')
    known = {field.name for field in dataclasses.fields(Config)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{file}: a GPT has no {', '.join(unknown)}; it has {sorted(known)}")
    try:
        return Config(**fields)
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {error}") from error


def _expected(config: Config) -> PyTree:
    """The parameters of a GPT, without their memory."""
    with FakeTensorMode():
        return gpt.init(config)


def _check(found: dict[str, Tensor], config: Config, what: str) -> None:
    """Refuse tensors that are not the configuration's, with every difference."""
    expected = _expected(config)
    want = dict(zip(tree.paths(expected), tree.leaves(expected), strict=True))
    wrong = [f"no {name}" for name in want if name not in found]
    wrong += [f"unknown {name}" for name in found if name not in want]
    for name in want:
        if name in found and found[name].shape != want[name].shape:
            shapes = f"{tuple(found[name].shape)}, expected {tuple(want[name].shape)}"
            wrong.append(f"{name} of shape {shapes}")
        elif name in found and not found[name].is_floating_point():
            wrong.append(f"{name} of dtype {found[name].dtype}")
    if wrong:
        raise ValueError(
            f"{what}: not the tensors of {config}, {len(wrong)} differences: {'; '.join(wrong)}"
        )
