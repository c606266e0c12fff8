"""What a run says of each step: a dictionary of numbers, for ``fit(..., log=...)``.

A log is any function of such a dictionary; here are two, for a CSV file and for TensorBoard.
"""

import csv
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .tree import PyTree, Tensor

Scalars = dict[str, float]
Log = Callable[[Scalars], None]


class Meter:
    """The numbers of each step of a run.

    Args:
        step: the step; one from ``zf.jit`` or ``zf.train_step`` is traced once more, to be counted.
        flops_per_token: floating-point operations that the model needs a token, forward and
            backward (6 times its parameters, roughly); None: those of the traced program, which
            counts what is computed again, and all ranks where they are simulated.
        peak_flops: those that the device can do a second; None: no utilisation is given.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.step, self.flops_per_token, self.peak_flops = step, flops_per_token, peak_flops
        self.count, self.start = 0, 0.0
        self.counted: Scalars | None = None

    def before(self, state: PyTree, batch: PyTree) -> None:
        """Call it before a step, with what the step gets."""
        if self.counted is None:
            trace = getattr(self.step, "trace", None)
            self.counted = {}
            if trace is not None:
                program = trace(state, batch)
                sent = sum(c.bytes_sent for c in program.collectives())
                self.counted = {"wire_bytes": sent, "flops": program.flops()}
        self.start = time.perf_counter()

    def after(self, metrics: dict[str, Tensor], tokens: int) -> Scalars:
        """The numbers of the step that was made; waits for the device."""
        values = {name: value.item() for name, value in metrics.items()}
        seconds = time.perf_counter() - self.start
        self.count += 1
        counted = dict(self.counted or {})
        flops = counted.pop("flops", None)
        if self.flops_per_token is not None:
            flops = self.flops_per_token * tokens
        scalars = {"step": self.count, **values, "seconds": seconds}
        scalars |= {"tokens_per_second": tokens / seconds, "memory_bytes": memory_bytes()}
        scalars |= counted
        if flops is not None:
            scalars["flops_per_second"] = flops / seconds
            if self.peak_flops is not None:
                scalars["model_flops_utilisation"] = flops / seconds / self.peak_flops
        return scalars


def memory_bytes() -> int:
    """The most memory that was in use: of the CUDA device if it was used, else of the process."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def csv_log(path: str | Path) -> Log:
    """A log that writes each step as a row of a CSV file, a new one, at once.

    The first step's names are the columns.

    Raises:
        ValueError: from the log, for a step with other names.
    """
    columns: list[str] = []

    def log(scalars: Scalars) -> None:
        first = not columns
        columns.extend(scalars if first else ())
        if set(columns) != set(scalars):
            other = sorted(set(columns) ^ set(scalars))
            raise ValueError(f"{path}: the columns are those of the first step; {other}")
        with Path(path).open("w" if first else "a", newline="") as file:
            writer = csv.DictWriter(file, columns)
            if first:
                writer.writeheader()
            writer.writerow(scalars)

    return log


def tensorboard_log(folder: str | Path) -> Log:
    """A log that writes each number as a curve for TensorBoard.

    Raises:
        ImportError: without the package ``tensorboard``.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard_log needs tensorboard: pip install tensorboard") from error
    writer = SummaryWriter(str(folder))

    def log(scalars: Scalars) -> None:
        for name, value in scalars.items():
            if name != "step":
                writer.add_scalar(name, value, int(scalars["step"]))
        writer.flush()

    return log
