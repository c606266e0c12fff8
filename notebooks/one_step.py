"""One step at each stage on processes: the most bytes that its tensors take on one of them.

    torchrun --nproc-per-node 2 one_step.py

Prints for each stage what is counted in the program and what the allocator gave out. Notebook 01
takes its model from here and runs it.
"""

import json
import os
import tempfile

import torch
from torch.profiler import ProfilerActivity, profile

import zero_fn as zf
from zero_fn.models import gpt

CONFIG = gpt.Config(vocabulary=256, length=64, layers=3, heads=8, width=512)
ROWS = 4  # of one rank's batch
MICROBATCHES = 2


def loss_fn(params, batch):
    return gpt.loss(params, batch, CONFIG)


def a_batch(ranks):
    tokens = torch.arange(ROWS * ranks * (CONFIG.length + 1)).view(-1, CONFIG.length + 1) % 251
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(mesh, stage):
    return zf.train_step(loss_fn, zf.adamw(1e-3), mesh, stage=stage, microbatches=MICROBATCHES)


def measured(mesh, stage):
    """The most bytes at once: as the program says, and as the allocator gave them out."""
    init, step = build(mesh, stage)
    batch = a_batch(mesh.size)
    state, _ = step(init(gpt.init(CONFIG)), batch)  # traced and run once
    held = sum(x.nbytes for x in zf.tree.leaves(state)) + sum(x.nbytes // mesh.size for x in batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(state, batch)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    given = most = 0
    for event in events:
        given += event["args"]["Bytes"]
        most = max(most, given)
    (program, _), *_ = step.programs.values()
    return {"counted": program.peak().bytes, "measured": held + most}


if __name__ == "__main__":
    mesh = zf.Mesh(dp=int(os.environ["WORLD_SIZE"]))
    found = [measured(mesh, stage) for stage in range(4)]
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
