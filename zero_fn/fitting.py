"""The loop over batches: a progress bar, logs, checkpoints."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from tqdm.auto import tqdm

from . import tree
from .logs import Log, Meter
from .mesh import process_place
from .resuming import Checkpoints, Keeper
from .tree import PyTree, Tensor

_log = logging.getLogger("zero_fn.train")


def progress(batches: Iterable[Any], total: int | None = None, **options: Any) -> Iterator[Any]:
    """The same batches, with a progress bar in a terminal or a notebook; rank 0's only.

    Args:
        batches: anything to iterate over.
        total: how many there are, if it has no length.
        options: further arguments of ``tqdm.auto.tqdm``.
    """
    return iter(_bar(batches, total, **options))


def _bar(batches: Iterable[Any], total: int | None, **options: Any) -> Any:
    options.setdefault("disable", process_place()[0] != 0)
    return tqdm(batches, total=total, **options)


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: PyTree,
    batches: Iterable[PyTree],
    *,
    total: int | None = None,
    show: bool = True,
    log: Log | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
    checkpoint: Checkpoints | None = None,
) -> tuple[PyTree, list[float]]:
    """Run a step over batches, showing the loss and the tokens a second.

    Args:
        step: (state, batch) to (state, value), where the value is the loss, or a dict of 0-dim
            tensors with the key ``loss``.
        state: the first state.
        batches: the batches. The elements of a batch's first integer tensor count as its tokens,
            the rows of its first tensor if there is none.
        total: how many batches there are, if they have no length.
        show: whether to show a progress bar (on rank 0).
        log: called on rank 0 after each step, which then waits for the device, with a dictionary
            of numbers: ``step``, the step's metrics, ``seconds``, ``tokens_per_second``,
            ``memory_bytes`` (the most so far), ``wire_bytes`` that this process sends a step,
            ``flops_per_second``, and with ``peak_flops`` ``model_flops_utilisation``; such as
            ``zf.csv_log("run.csv")``.
        flops_per_token: see :class:`zero_fn.logs.Meter`.
        peak_flops: see there.
        checkpoint: where the run is saved, and how often, :class:`zero_fn.Checkpoints`. A run that
            was saved there goes on from its newest checkpoint that is whole, with the same data
            and random numbers: ``state`` and ``batches`` are those of the run's beginning.

    Returns:
        The last state, and the loss at each step, those of the run before included.

    Raises:
        TypeError: if the step's second result holds no loss.
    """
    values: list[Tensor | float] = []
    keeper = None if checkpoint is None else Keeper(checkpoint)
    total = len(batches) if total is None and isinstance(batches, Sized) else total
    if keeper is None:
        batches = iter(batches)  # once: each time may draw from a random generator
    else:
        state, batches, values = keeper.resume(state, batches)
    bar = _bar(
        batches,
        total,
        initial=len(values),
        unit="step",
        disable=not show or process_place()[0] != 0,
    )
    start, tokens, shown, told = time.perf_counter(), 0, 0.0, 0
    meter = (
        Meter(step, flops_per_token, peak_flops)
        if log is not None and not process_place()[0]
        else None
    )
    if meter is not None:
        meter.count = len(values)
    for batch in bar:
        if meter is not None:
            meter.before(state, batch)
        state, value = step(state, batch)
        values.append(_loss(value))
        count = count_tokens(tree.leaves(batch))
        tokens += count
        if meter is not None and log is not None:
            log(meter.after(value if isinstance(value, dict) else {"loss": value}, count))
        if keeper is not None and keeper.due(len(values)):
            values = [float(x) for x in values]
            keeper.save(state, [float(x) for x in values])
        elapsed = time.perf_counter() - start
        if elapsed - shown > 0.2:  # reading a loss waits for the device
            shown = elapsed
            bar.set_postfix_str(f"loss {float(values[-1]):.4f}, {tokens / elapsed:,.0f} tokens/s")
            told = _tell_if_stuck(value, told)
    if tokens:
        bar.set_postfix_str(f"loss {float(values[-1]):.4f}, {tokens / elapsed:,.0f} tokens/s")
        _tell_if_stuck(value, told)
    bar.close()
    losses = [float(x) for x in values]
    if keeper is not None:
        keeper.close(state, losses)
    return state, losses


def _tell_if_stuck(value: Any, told: int) -> int:
    """Warn of steps that overflow at the least loss scale: at the first, then when they doubled."""
    stuck = value.get("stuck") if isinstance(value, dict) else None
    count = 0 if stuck is None else int(stuck.item())
    if count < max(1, 2 * told):
        return told if count else 0
    if process_place()[0]:
        return count
    _log.warning(
        "the last %d steps were skipped: gradients overflow at the least loss scale, %g; the run "
        "has likely diverged, or the loss computes something float16 cannot hold",
        count,
        value["loss_scale"].item(),
    )
    return count


def count_tokens(leaves: Sequence[Any]) -> int:
    """The tokens of a batch: the elements of its first integer tensor, or its rows."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for x in tensors:
        if x.dtype in (torch.int32, torch.int64, torch.uint8, torch.int16):
            return x.numel()
    return len(tensors[0]) if tensors and tensors[0].ndim else 1


def _loss(value: Any) -> Tensor:
    loss = value.get("loss") if isinstance(value, dict) else value
    if not isinstance(loss, Tensor) or loss.ndim:
        raise TypeError(
            f"the step's second result is {value!r}; fit takes a 0-dim loss, or a dict with one "
            "under 'loss'"
        )
    return loss
