"""Interleaved timing: every contestant in every round, so that a busy minute hits all alike."""

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[str, float]:
    """The median seconds of each, after one call of each that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_on_gpu(run) if device == "cuda" else _on_cpu(run))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Callable[[], object]) -> float:
    """By events of the device, so that launching counts where it is slower than the work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def where(device: str = "cpu") -> str:
    """Versions and hardware, for the line under a table."""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    cores = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return f"torch {torch.__version__}, {cores}{gpu}"
