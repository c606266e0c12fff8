"""A GPT of 10¹² parameters on 800 ranks, on paper: one abstract rank's program, traced here.

    python -m tests.benchmarks.trillion

128 layers of width 25600 on pp × dp × tp = 10 × 10 × 8, with sequence parallelism and recomputed
stages: how long the trace takes, in seconds and in seconds of a CPU, the most bytes that are alive
at once, by what they are, and what the rank sends in a step. Nothing has values; the figures are
those of rank 0, which has the embedding and as many micro-batches under way as there are stages.
"""

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_fn as zf
from zero_fn.models import gpt

from .timing import where

LIMIT = 32e9  # bytes of memory that a rank has
ROWS = ((1, "fp32"), (1, "bf16"), (3, "bf16"))  # ZeRO's stage, the dtype of computing
KINDS = ("parameters", "gathered parameters", "gradients", "optimizer state", "activations")


def traced(
    config: gpt.Config, axes: dict[str, int], microbatches: int, stage: int, compute: str
) -> tuple[float, float, zf.Program]:
    """Seconds, seconds of a CPU, and the program of rank 0's step."""
    mesh = zf.Mesh(backend="simulated", **axes).abstract()
    *inner, last = gpt.stages(config, axes["pp"], "tp", sequence_parallel=True)
    init, step = zf.train_step(
        zf.pipeline([*map(zf.remat, inner), last], microbatches),
        zf.adamw(1e-4),
        mesh,
        stage=stage,
        clip=1.0,
        slice_rules=gpt.rules(config, staged=True),
        policy=None if compute == "fp32" else zf.policy(compute=compute),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = gpt.split_params(gpt.init(config), config, axes["pp"])
        tokens = torch.zeros(axes["dp"] * microbatches, config.length, dtype=torch.int64)
    state = init(params)
    wall, cpu = time.perf_counter(), time.process_time()
    program = step.trace(state, (tokens, tokens))  # type: ignore[attr-defined]
    return time.perf_counter() - wall, time.process_time() - cpu, program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=10, help="of one sequence each")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="rows of the table")
    parser.add_argument("--tiny", action="store_true", help="4 layers of width 64 on 8 ranks")
    options = parser.parse_args()
    axes = {"pp": 2, "dp": 2, "tp": 2} if options.tiny else {"pp": 10, "dp": 10, "tp": 8}
    layers, width = (4, 64) if options.tiny else (128, 25600)
    config = gpt.Config(50257, options.length, layers, width // 32, width)
    title = (
        f"{config.parameters:.3g} parameters, {' × '.join(f'{k} {v}' for k, v in axes.items())}, "
        f"{options.microbatches} micro-batches of {options.length} tokens; GB at the peak of rank 0"
    )
    columns = ("stage", "compute", "traced, s", "CPU, s", "nodes", *KINDS, "other", "in all")
    table = Table(*columns, "of 32 GB", "sent, GB", title=title)
    for stage, compute in ROWS[: options.rows]:
        wall, cpu, program = traced(config, axes, options.microbatches, stage, compute)
        peak = program.peak()
        parts = dict(peak.parts)
        shown = [parts.pop(kind, 0) for kind in KINDS] + [sum(parts.values()), peak.bytes]
        sent = sum(c.bytes_sent for c in program.collectives())
        table.add_row(
            str(stage),
            compute,
            f"{wall:.0f}",
            f"{cpu:.0f}",
            f"{len(program.graph_module.graph.nodes):,}",
            *[f"{size / 1e9:.1f}" for size in shown],
            "fits" if peak.bytes <= LIMIT else f"× {peak.bytes / LIMIT:.1f}",
            f"{sent / 1e9:.0f}",
        )
    console = Console(width=170)
    console.print(table)
    console.print(f"python -m tests.benchmarks.trillion {' '.join(sys.argv[1:])}; {where()}")


if __name__ == "__main__":
    main()
