"""Mesh, batch, offload, sparse attention and logs, from their sections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..kernels import Layout
from ..logs import csv_log, tensorboard_log
from ..naming import suggestion
from ..offloading import Device
from .keys import Keys


def read_axes(keys: Keys, ranks: int) -> dict[str, int]:
    tp = keys.take("tensor_parallel.autotp_size", 1) or 1
    keys.became("tensor_parallel.autotp_size", f"zf.Mesh(tp={tp}); slice_rules say what is cut")
    pp = keys.take("pipeline.stages", 1)
    pp = pp if isinstance(pp, int) else 1
    keys.became("pipeline.stages", f"zf.Mesh(pp={pp}); zf.pipeline(stages, microbatches)")
    if ranks % (tp * pp):
        raise ValueError(f"ranks is {ranks}, which {pp} stages × {tp} slices do not divide")
    sizes = {"pp": pp, "dp": ranks // tp // pp, "tp": tp}
    return {name: size for name, size in sizes.items() if size > 1 or name == "dp"}


def read_batch(keys: Keys, dp: int) -> tuple[int | None, int]:
    """Rows of a step, and micro-batches; two of DeepSpeed's three sizes say the third."""
    names = (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    )  # fmt: skip
    micro, parts, batch = (keys.take(name, None) for name in names)
    if micro is None and batch is not None:
        micro, left = divmod(batch, dp * (parts or 1))
        if left:
            raise ValueError(
                f"train_batch_size is {batch}, not divisible by {dp} data-parallel ranks × "
                f"{parts or 1} gradient_accumulation_steps"
            )
    if parts is None:
        parts = 1 if batch is None or not micro else max(1, batch // (micro * dp))
    found = None if micro is None else micro * parts * dp
    if batch is not None and found != batch:
        raise ValueError(
            f"train_batch_size is {batch}, and train_micro_batch_size_per_gpu {micro} × "
            f"gradient_accumulation_steps {parts} × {dp} data-parallel ranks are {found}"
        )
    keys.became(names[0], f"{found} rows a step on all ranks")
    keys.became(names[1], f"microbatches={parts}")
    keys.became(names[2], f"{batch} rows a step on all ranks")
    return found, parts


def read_places(keys: Keys) -> tuple[dict[str, Device], float]:
    """Where parts of the state live, by patterns of key paths, and the share of the moments."""
    moments, params = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
    if keys.take("zero_optimization.cpu_offload", False):
        keys.left.setdefault(f"{moments}.device", "cpu")
        keys.not_here("zero_optimization.cpu_offload", f"read as {moments}.device: cpu")
    found: dict[str, Device] = {}
    for section, where in ((params, "params.*"), (moments, "opt_state.*")):
        device = keys.take(f"{section}.device", "none")
        folder = keys.take(f"{section}.nvme_path", None)
        if device == "nvme" and folder is None:
            raise ValueError(f"{section}.device is 'nvme', and there is no nvme_path")
        if device == "nvme":
            found[where] = Path(folder) / "zero_fn"
        elif device == "cpu":
            found[where] = "cpu"
        keys.became(f"{section}.device", f"zf.offload(init, {found.get(where)!r}, where={where!r})")
    folders = {place for place in found.values() if isinstance(place, Path)}
    if len(folders) > 1:
        raise ValueError(
            f"{moments}.nvme_path and {params}.nvme_path differ, and an update is atomic within "
            "one folder: give both the same"
        )
    fraction = float(keys.take(f"{moments}.ratio", 1.0))
    if fraction < 1 and len(found) != 1:
        keys.not_here(f"{moments}.ratio", "where parameters move, all moments do")
        fraction = 1.0
    return found, fraction


def read_layout(keys: Keys) -> Callable[[int, int], Layout] | None:
    section = "sparse_attention"
    mode = keys.take(f"{section}.mode", None)
    if mode is None:
        return None
    modes = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")
    if mode not in modes:
        raise ValueError(f"sparse_attention.mode is {mode!r}; {suggestion(mode, modes)}")
    settings = {key: keys.take(f"{section}.{key}", None) for key in keys.section(section)}
    keys.became(f"{section}.mode", f"Layout.{mode}(length, heads, ...), for block_sparse_attention")
    make = getattr(Layout, mode)
    if mode == "dense":
        settings = {key: value for key, value in settings.items() if key == "block"}
    return functools.partial(_made, make, settings)


def _made(make: Callable[..., Layout], settings: dict[str, Any], length: int, heads: int) -> Layout:
    try:
        return make(length, heads, **settings)
    except TypeError as error:
        raise ValueError(f"sparse_attention: {error}") from error


def read_log(keys: Keys) -> Callable[[], Any] | None:
    found: Callable[[], Any] | None = None
    for section, make in (("tensorboard", tensorboard_log), ("csv_monitor", csv_log)):
        if keys.is_on(section):
            folder = Path(keys.take(f"{section}.output_path", ".") or ".")
            job = keys.take(f"{section}.job_name", "DeepSpeedJobName")
            path = folder / job if section == "tensorboard" else folder / f"{job}.csv"
            keys.became(f"{section}.enabled", f"zf.fit(..., log=zf.{make.__name__}({str(path)!r}))")
            found = functools.partial(make, str(path))
    return found
