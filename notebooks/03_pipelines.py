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
# # How long do the ranks of a pipeline stand idle?
#
# With $P$ ranks and $M$ micro-batches, GPipe and 1F1B leave $(P-1)/(M+P-1)$ of all time idle. More
# micro-batches shrink it; so do schedules that cut the backward into its two halves (zero bubble)
# or give each rank several stages (interleaved, ZB-V, DualPipeV). They cost activations that are
# held or messages that are sent. A schedule is data here, a list of actions for each rank: it is
# drawn, proved free of deadlock, and timed before anything runs.

# %%
import torch
from matplotlib import pyplot

import zero_fn as zf

P, M = 4, 8

# %% [markdown]
# ## Two classics
#
# F is a forward, B a whole backward, which takes twice as long. The numbers are micro-batches.

# %%
figure, panels = pyplot.subplots(2, 1, figsize=(11, 5))
for axes, name in zip(panels, ("gpipe", "1f1b"), strict=True):
    zf.timeline(zf.pipeline_schedule(name, P, M)).draw(axes)
pyplot.show()

# %% [markdown]
# Both are idle equally long, as the formula says. 1F1B holds fewer activations: rank $r$ those of
# $P - r$ micro-batches, where every rank of GPipe holds all $M$.

# %%
gpipe, classic = (zf.timeline(zf.pipeline_schedule(name, P, M)) for name in ("gpipe", "1f1b"))
print(f"bubbles {gpipe.bubble:.1%}, {classic.bubble:.1%}, formula {(P - 1) / (M + P - 1):.1%}")
assert abs(gpipe.bubble - (P - 1) / (M + P - 1)) < 1e-9
assert abs(classic.bubble - (P - 1) / (M + P - 1)) < 1e-9
assert gpipe.peak_activations == (M,) * P
assert classic.peak_activations == tuple(P - rank for rank in range(P))

# %% [markdown]
# ## Two that fill the bubble
#
# A backward has two halves: the gradient of the input (I), for which the rank before waits, and
# that of the weights (W), for which nobody does. `zero_bubble` puts W where a rank would stand
# idle; `zbv` also places two stages on each rank in a V, so that the backward starts where the
# forward did.

# %%
figure, panels = pyplot.subplots(2, 1, figsize=(11, 5))
for axes, name in zip(panels, ("zero_bubble", "zbv"), strict=True):
    zf.timeline(zf.pipeline_schedule(name, P, M)).draw(axes)
pyplot.show()

# %% [markdown]
# ## All of them
#
# Stages of a schedule with two of them on a rank are half as long, so that ranks have the same work
# to do. Activations are in units of a rank's whole share of the layers, for one micro-batch.

# %%
names = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")


def timed(name, microbatches, comm=0.0):
    schedule = zf.pipeline_schedule(name, P, microbatches)
    part = schedule.ranks / schedule.stages  # of a rank's layers in one stage
    return zf.timeline(
        schedule, forward=part, input_grad=part, weight_grad=part, comm=comm, activation=part
    )


print(f"{'':12}  bubble  most activations")
for name in names:
    line = timed(name, M)
    print(f"{name:12} {line.bubble:7.1%} {max(line.peak_activations):9.1f}")
assert abs(timed("zero_bubble", M).bubble - (P - 1) / (3 * M + P - 1)) < 1e-9  # arXiv 2401.10241
assert abs(timed("zbv", M).bubble - (P - 1) / (6 * M + P - 1)) < 1e-9
assert max(timed("zbv", M).peak_activations) <= max(timed("1f1b", M).peak_activations)

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True)
for name in names[1:]:
    counts = range(2, 33)
    left.plot(counts, [100 * timed(name, count).bubble for count in counts], label=name)
    delays = [step / 10 for step in range(11)]
    right.plot(delays, [100 * timed(name, 16, delay).bubble for delay in delays], label=name)
left.set_xlabel("micro-batches")
left.set_ylabel("idle, %")
left.set_title(f"{P} ranks, messages that take no time")
right.set_xlabel("time of a message (a rank's forward is 1)")
right.set_title("16 micro-batches")
left.legend()
pyplot.show()

# %% [markdown]
# On the right: what a schedule wins by tight interleaving it loses where messages take long, since
# more of them stand in each other's way. GPipe, whose line on the left would be that of `1f1b`,
# waits for messages only at the start and at the turn: where a message takes as long as a forward,
# it is the least idle of all six.

# %%
slow = {name: timed(name, 16, 1.0).bubble for name in names}
assert min(slow, key=slow.get) == "gpipe"
fast = {name: timed(name, 16).bubble for name in names}
assert min(fast, key=fast.get) == "zbv"

# %% [markdown]
# ## What the checker refuses
#
# Two ranks. Rank 0 makes the backward of micro-batch 0 before the forward of micro-batch 1, and
# rank 1 wants that forward before it makes its own first backward: they wait in a circle. The
# checker says so, before anything hangs.


# %%
def circular(ranks, microbatches):
    return [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


try:
    zf.pipeline_schedule(circular, 2, 2)
except ValueError as error:
    message = str(error)
print(message)
assert "0B0" in message

# %% [markdown]
# ## One of your own
#
# 1F1B makes as few forwards ahead as it can, so where a message takes time, each pair of forward
# and backward waits for it. Twice as many forwards ahead hide it, for more activations. A schedule
# is a function from the numbers of ranks and micro-batches to a list for each rank:


# %%
def eager_1f1b(ranks, microbatches):
    lists = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank), microbatches)
        actions = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                actions.append(f"{rank}F{ahead + i}")
            actions.append(f"{rank}B{i}")
        lists.append(actions)
    return lists


ours = zf.timeline(zf.pipeline_schedule(eager_1f1b, P, M), comm=1)
classic = zf.timeline(zf.pipeline_schedule("1f1b", P, M), comm=1)
figure, panels = pyplot.subplots(2, 1, figsize=(11, 5))
classic.draw(panels[0])
ours.draw(panels[1])
pyplot.show()
assert ours.makespan < classic.makespan
assert max(ours.peak_activations) > max(classic.peak_activations)

# %% [markdown]
# ## Run it
#
# `zf.pipeline` runs any of them, with the dense gradient as result. Four stages of a small network,
# on four simulated ranks:

# %%
generator = torch.Generator().manual_seed(0)
weights = [torch.randn(9, 9, generator=generator, dtype=torch.float64) / 3 for _ in range(P)]
batch = torch.randn(16, 9, generator=generator, dtype=torch.float64)


def first(w, carry, x):
    return torch.tanh(x @ w)


def middle(w, carry, x):
    return carry + torch.tanh(carry @ w)


def last(w, carry, x):
    return (middle(w, carry, x) - x).square().mean()


def dense(weights):
    carry = None
    for stage, w in zip([first, middle, middle, last], weights, strict=True):
        carry = stage(w, carry, batch)
    return carry


want = torch.func.grad(dense)(weights)
for schedule in (eager_1f1b, "1f1b", "zero_bubble"):
    pipe = zf.pipeline([first, middle, middle, last], microbatches=M, schedule=schedule)
    run = zf.spmd(lambda w, x, pipe=pipe: pipe(w, x), zf.Mesh(pp=P))
    grads, loss = run(tuple(weights), batch)
    worst = max((a - b).abs().max().item() for a, b in zip(grads, want, strict=True))
    print(
        f"{getattr(schedule, '__name__', schedule):12} loss {loss:.6f}, dense {dense(weights):.6f}"
    )
    assert worst < 1e-12  # float64, sums of eight micro-batches

# %% [markdown]
# ## On real GPUs
#
# A process for each stage's GPU; each keeps its own stages' parameters (`pipe.place`):
#
# ```
# pipe = zf.pipeline(gpt.stages(config, 4), microbatches=8, schedule=eager_1f1b)
# init, step = zf.train_step(pipe, zf.adamw(1e-3), zf.Mesh(pp=4))
#
# torchrun --nproc-per-node 4 train.py
# ```
#
# `python -m tests.benchmarks.pipeline` measures idle time there, beside what the timeline predicts.
