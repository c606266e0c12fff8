# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What do ZeRO's four stages cost in one step?
#
# Memory for bytes on the wire. With Adam in float32, $P$ parameters and $N$ ranks, a rank keeps
# between steps $12P$ bytes at stage 0 and $12P/N$ at stages 1, 2 and 3. What they differ in is the
# peak *within* the step, and what is sent for it when a batch is computed in $M$ micro-batches, in
# units of $4P(N-1)/N$ bytes:
#
# | stage | whole during the step | sent |
# |---|---|---|
# | 0 | parameters, moments, gradients | 2 |
# | 1 | parameters, gradients | 2 |
# | 2 | parameters | $1 + M$ |
# | 3 | a layer's parameters | at most $3M$ |
#
# Below, one step of a GPT with $M = 2$ is traced for one rank of four, drawn, counted, checked
# against a dense step, and measured on two processes.

# %%
import json
import subprocess
import sys

import torch
from matplotlib import pyplot
from one_step import CONFIG, MICROBATCHES, a_batch, build

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt

RANKS = 4
MIB = 2**20
P = CONFIG.parameters
print(f"{P:,} parameters, {4 * P / MIB:.1f} MiB in float32")

# %% [markdown]
# ## One rank's step, traced
#
# `zf.Mesh(...).abstract()` has sizes and no ranks: the whole step (forward, backward, collectives,
# update) is traced on shapes, into one flat program of one rank. The only thing that changes from
# stage to stage is the number that is handed to `zf.train_step`.

# %%
mesh = zf.Mesh(dp=RANKS).abstract()


def traced(stage):
    init, step = build(mesh, stage)
    return step.trace(init(zf.eval_shape(gpt.init, CONFIG)), a_batch(RANKS))


programs = [traced(stage) for stage in range(4)]

# %% [markdown]
# What is alive while each operation runs:

# %%
KINDS = {
    "parameters": "#4477AA",
    "optimizer state": "#AA3377",
    "gathered parameters": "#66CCEE",
    "gradients": "#EE6677",
    "activations": "#CCBB44",
}
figure, panels = pyplot.subplots(1, 4, figsize=(11, 3.4), sharey=True)
for stage, (program, axes) in enumerate(zip(programs, panels, strict=True)):
    moments = program.memory_timeline()
    time = [place / len(moments) for place in range(len(moments))]
    sizes = [[moment.parts[kind] / MIB for moment in moments] for kind in KINDS]
    axes.stackplot(time, sizes, labels=KINDS, colors=KINDS.values())
    axes.set_title(f"stage {stage}: peak {program.peak().bytes / MIB:.0f} MiB")
    axes.set_xticks([])
    axes.set_xlabel("operations of the step →")
    axes.margins(x=0)
panels[0].set_ylabel("MiB on one rank of 4")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
pyplot.show()

# %% [markdown]
# Blue and purple at the left is what rests between steps. Light blue is what is gathered: at stages
# 1 and 2 until the end of the backward, at stage 3 a layer at a time, twice. Yellow is what is kept
# from the forward for the backward; at stages 0 and 1 it also holds the gradients of the first
# micro-batch, which wait, whole, for those of the second.
#
# So each stage needs less than the one before:

# %%
peaks = [program.peak().bytes for program in programs]
assert peaks[0] > peaks[1] > peaks[2] > peaks[3]
for stage in range(4):
    print(f"stage {stage}: {peaks[stage] / peaks[0]:4.0%} of stage 0")

# %% [markdown]
# ## At rest
#
# Parameters and Adam's two moments, 4 bytes each: $12P$, or a quarter of it. (With bfloat16
# parameters beside float32 ones it would be the paper's $16P$; see `zf.policy`.)

# %%
for stage, program in enumerate(programs):
    rest = program.at_rest()
    held = rest["parameters"] + rest["optimizer state"]
    formula = 12 * P / (RANKS if stage else 1)
    print(f"stage {stage}: {held / MIB:6.2f} MiB, the formula {formula / MIB:6.2f} MiB")
    assert abs(held / formula - 1) < 0.001  # a step count, and padding to multiples of 4

# %% [markdown]
# ## On the wire
#
# The ring algorithm's bytes, counted in the programs. Stages 0 and 1 send the same: an all-reduce
# is a reduce-scatter and an all-gather. Stage 2 reduces each micro-batch. Stage 3 gathers twice for
# each, but for the last parameters, which the backward needs right after the forward.

# %%
unit = 4 * P * (RANKS - 1) / RANKS
kinds = ("all_reduce", "all_gather", "reduce_scatter")
sent = [
    {
        kind: sum(c.bytes_sent for c in program.collectives() if c.kind == kind) / unit
        for kind in kinds
    }
    for program in programs
]
print("in units of 4P(N-1)/N bytes")
for stage, sizes in enumerate(sent):
    print(
        f"stage {stage}:", *[f"{kind} {size:.2f}" for kind, size in sizes.items() if size > 0.001]
    )
totals = [sum(sizes.values()) for sizes in sent]
for total, formula in zip(totals[:3], (2, 2, 1 + MICROBATCHES), strict=True):
    assert abs(total - formula) < 1e-6  # the loss' mean is 4 bytes more
assert 2.5 * MICROBATCHES < totals[3] <= 3 * MICROBATCHES

# %%
figure, axes = pyplot.subplots(figsize=(7, 2.4))
floors = [0.0] * 4
for kind, colour in zip(kinds, ("#BBBBBB", "#66CCEE", "#EE6677"), strict=True):
    bars = [sizes[kind] * unit / MIB for sizes in sent]
    axes.barh(range(4), bars, left=floors, label=kind.replace("_", "-"), color=colour)
    floors = [floor + bar for floor, bar in zip(floors, bars, strict=True)]
axes.set_yticks(range(4), [f"stage {stage}" for stage in range(4)])
axes.invert_yaxis()
axes.set_xlabel("MiB that one rank sends in a step")
axes.legend(loc="upper right")
pyplot.show()

# %% [markdown]
# ## The same numbers
#
# A stage changes cost, never results. Four simulated ranks, in this one process, make three steps;
# beside them a loop of `torch.optim.AdamW` on the whole batch, which knows nothing of this library.

# %%
small = gpt.Config(vocabulary=251, length=64, layers=1, heads=2, width=32)


def loss_fn(params, batch):
    return gpt.loss(params, batch, small)


def dense():
    params = gpt.init(small)
    leaves = list({id(x): x.requires_grad_() for x in tree.leaves(params)}.values())  # tied: once
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(params, a_batch(RANKS))
        loss.backward()
        optimizer.step()
        yield loss.item()


want = list(dense())
print("dense:  ", *[f"{loss:.5f}" for loss in want])
for stage in range(4):
    init, step = zf.train_step(
        loss_fn,
        zf.adamw(1e-3, weight_decay=0.01),
        zf.Mesh(dp=RANKS),
        stage=stage,
        microbatches=MICROBATCHES,
    )
    _, losses = zf.fit(step, init(gpt.init(small)), [a_batch(RANKS)] * 3, show=False)
    print(f"stage {stage}:", *[f"{loss:.5f}" for loss in losses])
    # float32: sums in another order
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, want, strict=True))

# %% [markdown]
# ## Measured
#
# The first model again, on two processes that talk over Gloo: `one_step.py` makes the step at each
# stage, with the bytes that torch's allocator gives out written down. Beside it, what is counted in
# the very program that ran.

# %% tags=["varies"]
run = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "one_step.py"],
    capture_output=True,
    text=True,
)
assert run.returncode == 0, run.stderr
found = json.loads(run.stdout.splitlines()[-1])
for stage, peak in enumerate(found):
    counted, measured = peak["counted"], peak["measured"]
    print(f"stage {stage}: counted {counted / MIB:6.1f} MiB, measured {measured / MIB:6.1f} MiB")
    # Gloo's threads let go of what they sent a little later than the program says.
    assert abs(measured / counted - 1) < 0.1
measures = [peak["measured"] for peak in found]
assert measures[0] > measures[1] > measures[3]

# %% [markdown]
# ## On real GPUs
#
# The same file, on as many as there are; nothing in it changes but the size of the model:
#
# ```
# torchrun --nproc-per-node 8 one_step.py
# ```
#
# There `torch.cuda.max_memory_allocated()` is the measure. What a step will cost on hardware that
# you don't have is the question of notebook 06.
