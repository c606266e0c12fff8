"""Runs that are saved as they go, and go on where they were: state, place in the data, randomness.

A checkpoint of a run holds the train state, the losses so far, whose number is the place in the
data, and the random generators of Python, numpy and torch: as they were when the batches began,
since a loader may shuffle by them, and as they are.
"""

import base64
import itertools
import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .background import Saving
from .checkpoint import (
    DamagedError,
    load,
    ranks_values,
    save,
    save_async,
    saved_steps,
    set_aside,
)
from .mesh import Mesh
from .tree import PyTree, Tensor

_log = logging.getLogger("zero_fn.checkpoint")


@dataclass(frozen=True)
class Checkpoints:
    """Where :func:`zero_fn.fit` saves a run, and how often.

    Attributes:
        folder: one for each run; on all hosts the same one.
        mesh: the mesh that the state lives on.
        every: how many steps from one checkpoint to the next; the last step is saved, too.
        keep: how many of the newest stay; None: all.
        background: whether files are written beside the next steps, see
            :func:`zero_fn.save_async`.
        fresh: key paths that are not taken from the checkpoint, as for :func:`zero_fn.load`; the
            train state's begin with ``train``: ``train.opt_state.error.*``.

    Raises:
        ValueError: if ``every`` or ``keep`` is below 1.

    >>> import tempfile, torch, zero_fn as zf
    >>> mesh = zf.Mesh(dp=2)
    >>> init, step = zf.train_step(lambda w, x: (x @ w).square().mean(), zf.sgd(0.1), mesh)
    >>> run = zf.Checkpoints(tempfile.mkdtemp(), mesh, every=2, keep=2)
    >>> batches = torch.ones(5, 4, 3)
    >>> _, losses = zf.fit(step, init(torch.ones(3)), batches[:3], checkpoint=run, show=False)
    >>> state, more = zf.fit(step, init(torch.ones(3)), batches, checkpoint=run, show=False)
    >>> more[:3] == losses, len(more), zf.saved_steps(run.folder)
    (True, 5, [4, 5])
    """

    folder: str | Path
    mesh: Mesh
    every: int
    keep: int | None = None
    background: bool = False
    fresh: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be an int of 1 or more")


class Keeper:
    """What one call of ``fit`` does with its checkpoints."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.saved = -1  # the step of the newest checkpoint
        self.resumed = False
        self.saving: Saving | None = None
        self.began = ""

    def due(self, step: int) -> bool:
        return step % self.checkpoints.every == 0

    def resume(
        self, state: PyTree, batches: Iterable[Any]
    ) -> tuple[PyTree, Iterator[Any], list[Tensor | float]]:
        """The newest state that can be read, the batches after it, and the losses up to it."""
        mesh = self.checkpoints.mesh
        self.began = _json_of_ranks(generators(), mesh)
        found = self._newest(state)
        if found is None:
            return state, iter(batches), []
        losses = json.loads(found["losses"])
        self.saved, self.began, self.resumed = len(losses), found["began"], True
        _restore(self.began, mesh)
        rest = _after(batches, len(losses))
        _restore(found["generators"], mesh)
        return found["train"], rest, losses

    def save(self, state: PyTree, losses: Sequence[float]) -> None:
        """Save it as the checkpoint of the step after as many losses."""
        where = self.checkpoints
        run = {
            "train": state,
            "losses": json.dumps(losses),
            "began": self.began,
            "generators": _json_of_ranks(generators(), where.mesh),
        }
        self.saved, self.resumed = len(losses), False
        if where.background:
            self.saving = save_async(
                where.folder, run, where.mesh, step=self.saved, keep=where.keep
            )
        else:
            save(where.folder, run, where.mesh, step=self.saved, keep=where.keep)

    def close(self, state: PyTree, losses: Sequence[float]) -> None:
        """Save the last step, if it is not, and wait until everything is written."""
        where = self.checkpoints
        if self.saved != len(losses):
            self.save(state, losses)
        elif self.resumed and not where.mesh.rank:
            _log.warning(
                "the run in %s is at step %d already, and no batch was left to train on; another "
                "run takes another folder",
                where.folder,
                self.saved,
            )
        if self.saving is not None:
            self.saving.wait()

    def _newest(self, state: PyTree) -> dict[str, Any] | None:
        where = self.checkpoints
        like = {"train": state, "losses": "", "began": "", "generators": ""}
        # rank 0's view of the folder, so that all read the same
        steps = ranks_values(saved_steps(where.folder), where.mesh)[0]
        for place, step in reversed(list(enumerate(steps))):
            try:
                return load(where.folder, like, where.mesh, step=step, fresh=where.fresh)
            except DamagedError as error:
                if not place:
                    raise
                if not where.mesh.rank:
                    _log.warning("going back to step %d, since %s", steps[place - 1], error)
                    set_aside(where.folder, step)  # it would count among those that are kept
        return None


def _after(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """The batches after the first ``count``; those of a loader are loaded and left."""
    if isinstance(batches, Sequence | Tensor):
        return (batches[place] for place in range(count, len(batches)))
    rest = iter(batches)
    for _ in itertools.islice(rest, count):
        pass
    return rest


def generators() -> dict[str, Any]:
    """The states of the default random generators of this process, as plain values."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        states["numpy"] = [name, words.tolist(), *rest]
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Bring the default random generators of this process into these states."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy"]))


def _text(state: Tensor) -> str:
    return base64.b85encode(bytes(state.tolist())).decode()


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(base64.b85decode(text)), dtype=torch.uint8)


def _json_of_ranks(value: Any, mesh: Mesh) -> str:
    """Every rank's value; once if all are equal."""
    values = ranks_values(value, mesh)
    return json.dumps(values[:1] if all(v == values[0] for v in values) else values)


def _restore(text: str, mesh: Mesh) -> None:
    """This rank's generators; a rank that was not there keeps what it has."""
    states = json.loads(text)
    place = 0 if len(states) == 1 else mesh.rank
    if place < len(states):
        set_generators(states[place])
