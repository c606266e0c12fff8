"""Saves beside the steps that follow: one thread, one save at a time, a process group of its own.

The group is Gloo's and nobody else's: a save speaks with other ranks while a step does, and each
of the two in an order of its own.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .mesh import Mesh

_log = logging.getLogger("zero_fn.checkpoint")


class Saving:
    """A save under way, made by :func:`zero_fn.save_async`."""

    def __init__(self, write: Callable[[], None], what: str) -> None:
        self._write, self._what = write, what
        self._error: BaseException | None = None
        self._told = False
        # Not a daemon: Python waits for it at its end, before process groups are closed.
        self._thread = threading.Thread(target=self._run, name=f"zero_fn saves {what}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            _log.error("the save of %s failed: %s", self._what, error)
        del self._write  # and the copy of the state that it holds

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is there.

        Raises:
            Exception: what went wrong in the save.
        """
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "failed" if self._error else "done"
        return f"<the save of {self._what}, {how}>"


_last: Saving | None = None
_group: tuple[Any, Any] = (None, None)  # the default group it was made beside, and the group


def start(write: Callable[[], None], what: str) -> Saving:
    """Run ``write`` in the background; :func:`finish` was called before."""
    global _last
    _last = Saving(write, what)
    return _last


def settle() -> None:
    """Wait for the save under way, if there is one, however it ends."""
    if _last is not None:
        _last._thread.join()


def finish() -> None:
    """Wait for the save under way, if there is one; raises what nobody was told of."""
    global _last
    last, _last = _last, None
    if last is not None and not last._told:
        last.wait()


def group_of(mesh: Mesh) -> Any:
    """The process group of saves; all ranks call it, in the same order as everything else."""
    global _group
    if _group[0] is not dist.group.WORLD:
        limit = None if mesh.timeout is None else timedelta(seconds=mesh.timeout)
        _group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=limit)
    return _group[1]
