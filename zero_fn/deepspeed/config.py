"""A DeepSpeed JSON configuration, read into a step of this library, key by key.

Each key either becomes an argument of ``zf.train_step``, a mesh axis, an optimizer or a layout, or
is listed with the reason why it has no counterpart (``reasons.py``). None is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accumulation import LossFn
from ..kernels import Layout
from ..mesh import Mesh
from ..offloading import Device, offload
from ..optim import LocalOptimizer, Optimizer
from ..pipelining.run import Pipeline
from ..states import Train
from ..train import train_step
from .keys import Config, Keys
from .optimizing import read_optimizer, read_precision
from .sections import read_axes, read_batch, read_layout, read_log, read_places


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a configuration says, in this library's words; prints as a table of its keys.

    Attributes:
        axes: sizes of mesh axes; ``zf.Mesh(**axes)``.
        batch: rows of a step on all ranks; None where the configuration leaves it open.
        optimizer: an (init, update) pair, or one that exchanges gradients; None: the configuration
            has none, or one without counterpart.
        arguments: further arguments of :func:`zero_fn.train_step`.
        layout: of sparse attention, a function of (length, heads); None: dense.
        places: where parts of the state live, by patterns of key paths; else on the device.
        fraction: the part of the bytes there that does.
        log: a function that makes a log for ``zf.fit``; None: there is none.
        read: the keys that were read, and what became of them.
        unsupported: the keys that have no counterpart, and why.
    """

    axes: dict[str, int]
    batch: int | None
    optimizer: Optimizer | LocalOptimizer | None
    arguments: dict[str, Any]
    layout: Callable[[int, int], Layout] | None
    places: dict[str, Device]
    fraction: float
    log: Callable[[], Any] | None
    read: dict[str, str]
    unsupported: dict[str, str]

    def train_step(
        self,
        loss_fn: LossFn | Pipeline,
        mesh: Mesh,
        *,
        optimizer: Optimizer | LocalOptimizer | None = None,
        **changes: Any,
    ) -> Train:
        """:func:`zero_fn.train_step` with what the configuration says.

        Args:
            loss_fn: the loss, or a pipeline.
            mesh: any mesh; ``zf.Mesh(**axes)`` is the configuration's.
            optimizer: in place of the configuration's.
            changes: arguments of ``zf.train_step`` in place of the configuration's.

        Raises:
            ValueError: if there is no optimizer.
        """
        chosen = optimizer or self.optimizer
        if chosen is None:
            raise ValueError(
                "the configuration has no optimizer that is known here; pass one: "
                "train_step(loss_fn, mesh, optimizer=zf.adamw(1e-3))"
            )
        arguments = self.arguments | changes
        if isinstance(loss_fn, Pipeline):
            arguments.pop("microbatches", None)  # the pipeline says so itself
        init, step = train_step(loss_fn, chosen, mesh, **arguments)
        # files first, which are filled as leaves are computed
        for place in sorted(set(self.places.values()), key=lambda place: isinstance(place, str)):
            where = [pattern for pattern, at in self.places.items() if at == place]
            init = offload(init, place, where=where, fraction=self.fraction)
        return Train(init, step)

    def __str__(self) -> str:
        rows = [
            *self.read.items(),
            *((k, f"no counterpart: {v}") for k, v in self.unsupported.items()),
        ]
        width = max((len(key) for key, _ in rows), default=0)
        return "\n".join(f"{key:<{width}}  {became}" for key, became in rows)

    __repr__ = __str__


def from_deepspeed(
    config: Config | str | Path, ranks: int = 1, auto: Config | None = None
) -> FromDeepSpeed:
    """Read a DeepSpeed configuration.

    Args:
        config: the dictionary, or the path of the JSON file.
        ranks: how many there are in all; what ``tensor_parallel`` and ``pipeline`` do not divide is
            data-parallel.
        auto: values for keys that are ``"auto"``, by their dotted names
            (``{"optimizer.params.lr": 3e-4}``).

    Raises:
        ValueError: naming every key that nobody knows, every ``"auto"`` without a value, batch
            sizes that do not agree, or a value without meaning.
        FileNotFoundError: if there is no such file.

    >>> import zero_fn as zf
    >>> read = zf.from_deepspeed(
    ...     {
    ...         "train_micro_batch_size_per_gpu": 4,
    ...         "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    ...         "zero_optimization": {"stage": 2, "overlap_comm": True},
    ...     },
    ...     ranks=2,
    ... )
    >>> print(read)  # doctest: +NORMALIZE_WHITESPACE
    optimizer.type                  zf.adamw
    optimizer.params.lr             0.001
    zero_optimization.stage         stage=2
    train_micro_batch_size_per_gpu  8 rows a step on all ranks
    zero_optimization.overlap_comm  no counterpart: gathers and reductions are placed, joined and
                                    overlapped by zf.jit, by sizes of its own
    """
    given = config if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    keys = Keys(given, auto or {})
    axes = read_axes(keys, ranks)
    optimizer = read_optimizer(keys)
    arguments: dict[str, Any] = {}
    stage = keys.take("zero_optimization.stage", 0)
    keys.became("zero_optimization.stage", f"stage={stage}")
    arguments["stage"] = stage
    clip = keys.take("gradient_clipping", 0)
    if clip:
        arguments["clip"] = float(clip)
        keys.became("gradient_clipping", f"clip={clip}")
    arguments |= read_precision(keys)
    places, fraction = read_places(keys)
    layout = read_layout(keys)
    log = read_log(keys)
    batch, parts = read_batch(keys, axes["dp"])
    if parts > 1:
        arguments["microbatches"] = parts
    unsupported = keys.rest()
    return FromDeepSpeed(
        axes, batch, optimizer, arguments, layout, places, fraction, log, keys.read, unsupported
    )
