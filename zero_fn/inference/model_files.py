"""A GPT in a folder: ``config.json`` and ``model.safetensors``, its tensors named by key path.

Of tied tensors one is stored. Reading builds nothing until all names, shapes and dtypes fit.
"""

import dataclasses
import json
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from .. import tree
from ..models import gpt
from ..models.gpt_config import Config
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
    fields = {"model": "gpt", **dataclasses.asdict(config)}
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")


def load_model(path: Path | str) -> tuple[PyTree, Config]:
    """Read what :func:`save_model` wrote.

    Raises:
        FileNotFoundError: if the folder or a file of it is not there.
        ValueError: for a configuration that is no GPT's, and for tensors of another model, with
            every difference.
        ModuleNotFoundError: without safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; it is a folder that save_model wrote")
    config = _config(folder / CONFIG)
    try:
        found = load_file(folder / TENSORS)
    except SafetensorError as error:
        raise ValueError(f"{folder / TENSORS} cannot be read: {error}") from error
    expected = _expected(config)
    if config.tied and ("head" in found) != ("tokens" in found):
        both = found.get("head", found.get("tokens"))
        assert both is not None
        found |= {"head": both, "tokens": both}
    _check(found, config, str(folder / TENSORS))
    return tree.map_with_path(lambda path, _: found[path], expected), config


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
