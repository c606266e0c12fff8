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
# # What does attention cost when it skips most blocks?
#
# What the blocks that it sees cost, in time and in memory, forward and backward. A `Layout` says
# which blocks of keys each block of queries sees; with windows, a few global and a few random
# blocks (BigBird), their number grows with the length, not with its square, so that 16384 tokens
# take little more than their inputs and gradients where the scores would fill 2 GiB.

# %%
import resource
import time

import torch
import torch.nn.functional as F
from matplotlib import pyplot

import zero_fn as zf
from zero_fn.kernels import Layout, block_sparse_attention
from zero_fn.models import gpt

# %% [markdown]
# ## Layouts
#
# By the names and parameters of DeepSpeed's sparsity configurations, and from other sources: here
# 512 tokens in blocks of 16. Rows are queries, columns keys.

# %%
layouts = {
    "fixed": Layout.fixed(512, num_local_blocks=4),
    "bigbird": Layout.bigbird(512, num_random_blocks=2),
    "bslongformer": Layout.bslongformer(512, num_sliding_window_blocks=5),
    "local_sliding_window": Layout.local_sliding_window(512, num_sliding_window_blocks=5),
    "strided": Layout.strided(512, stride=8, attention="unidirectional"),
    "document": Layout.document([130, 50, 200, 132], block=16),
}
figure, panels = pyplot.subplots(2, 3, figsize=(9, 6))
for axes, (name, layout) in zip(panels.flat, layouts.items(), strict=True):
    layout.plot(axes)
    axes.set_title(f"{name}: {layout.density:.0%}")
    axes.set_xlabel("")
    axes.set_ylabel("")
pyplot.show()

# %% [markdown]
# They combine: what both see (`&`), what either sees (`|`); and a boolean mask of blocks is a
# layout, too. `packed` is BigBird within packed documents, and causal.

# %%
packed = layouts["bigbird"] & layouts["document"].tril()
mine = Layout.from_mask(torch.eye(32, dtype=torch.bool).roll(4, 1), block=16) | packed
figure, panels = pyplot.subplots(1, 2, figsize=(6.5, 3.2))
for axes, (name, layout) in zip(panels, {"packed": packed, "mine": mine}.items(), strict=True):
    layout.plot(axes)
    axes.set_title(f"{name}: {layout.density:.0%}")
pyplot.show()
assert torch.equal(
    packed.to_dense(), layouts["bigbird"].to_dense() & layouts["document"].to_dense().tril()
)

# %% [markdown]
# ## The same numbers as dense attention with a mask
#
# Against torch's dense attention in float64, result and gradients, for each layout; two query heads
# share keys.

# %%
generator = torch.Generator().manual_seed(0)
q = torch.randn(1, 4, 512, 16, generator=generator, dtype=torch.float64)
k, v = torch.randn(2, 1, 2, 512, 16, generator=generator, dtype=torch.float64)


def sparse(q, k, v, layout):
    return block_sparse_attention(q, k, v, layout).sin().sum()


def dense(q, k, v, layout):
    mask = layout.to_dense()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).sin().sum()


for layout in (*layouts.values(), packed):
    got = torch.func.grad_and_value(sparse, (0, 1, 2))(q, k, v, layout)
    want = torch.func.grad_and_value(dense, (0, 1, 2))(q, k, v, layout)
    torch.testing.assert_close(got, want)
print("equal, for", ", ".join([*layouts, "packed"]))

# %% [markdown]
# ## Longer
#
# How many blocks of 128 each layout has, by length. Dense attention's number is the square.

# %%
lengths = [2**power for power in range(10, 16)]
counts = {
    "dense": [(length // 128) ** 2 for length in lengths],
    "bigbird": [len(Layout.bigbird(length, block=128).cols) for length in lengths],
    "window of 3": [len(Layout.local_sliding_window(length, block=128).cols) for length in lengths],
}
figure, axes = pyplot.subplots(figsize=(6, 3))
for name, blocks in counts.items():
    axes.loglog(lengths, blocks, marker=".", base=2, label=name)
axes.set_xlabel("tokens")
axes.set_ylabel("blocks")
axes.legend()
pyplot.show()
assert counts["bigbird"][-1] < 2.1 * counts["bigbird"][-2]  # linear
assert counts["dense"][-1] == 4 * counts["dense"][-2]

# %% [markdown]
# 16384 tokens, forward and backward. What the process needs at most, beside what it had before:

# %% tags=["varies"]
long = Layout.bigbird(16384, block=128, attention="unidirectional")
leaves = [torch.randn(1, 2, 16384, 64, requires_grad=True) for _ in range(3)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = block_sparse_attention(*leaves, long, causal=True)
out.sum().backward()
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(f"{used:.0f} MiB more; one matrix of scores has {2 * 16384**2 * 4 / 2**20:.0f} MiB")
assert used < 512
assert all(x.grad.isfinite().all() for x in leaves)

# %% [markdown]
# ## Speed
#
# Forward and backward on this machine, on one thread, beside torch's dense attention; the best of
# three, in turn.


# %% tags=["varies"]
def seconds(f, *leaves):
    start = time.perf_counter()
    f(*leaves).sum().backward()
    return time.perf_counter() - start


torch.set_num_threads(1)
ratios, sizes = [], (1024, 2048, 4096)
for length in sizes:
    layout = Layout.bigbird(length, block=128, num_random_blocks=1)
    leaves = [torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3)]
    ours, theirs = [], []
    for _ in range(3):
        ours.append(seconds(lambda *x, layout=layout: block_sparse_attention(*x, layout), *leaves))
        theirs.append(seconds(F.scaled_dot_product_attention, *leaves))
    ratios.append(min(theirs) / min(ours))
    print(
        f"{length:5} tokens, density {layout.density:.2f}: {ratios[-1]:.1f} times as fast as dense"
    )
figure, axes = pyplot.subplots(figsize=(6, 2.6))
axes.bar([str(length) for length in sizes], ratios)
axes.axhline(1, color="black", linestyle="--")
axes.set_xlabel("tokens")
axes.set_ylabel("times as fast")
pyplot.show()
assert ratios[-1] > 1.5

# %% [markdown]
# ## In a model
#
# A layout is a value, so it is a field of the model's configuration. A GPT with BigBird attention,
# trained at stage 3 on four simulated ranks, has the losses of the same model on one.

# %%
layout = Layout.bigbird(128, attention="unidirectional")
config = gpt.Config(vocabulary=64, length=128, layers=1, heads=2, width=32, attention=layout)
tokens = torch.arange(8 * 129).view(8, 129).square() % 61


def losses(mesh, stage):
    init, step = zf.train_step(
        lambda params, batch: gpt.loss(params, batch, config), zf.adamw(1e-2), mesh, stage=stage
    )
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 5
    return zf.fit(step, init(gpt.init(config)), batches, show=False)[1]


four, alone = losses(zf.Mesh(dp=4), 3), losses(zf.Mesh(dp=1), 0)
print([f"{loss:.4f}" for loss in four])
assert four[-1] < four[0]
assert all(abs(a - b) < 1e-4 for a, b in zip(four, alone, strict=True))  # float32

# %% [markdown]
# ## On real GPUs
#
# CUDA tensors run in Triton kernels, through the same function and the same layouts:
#
# ```
# q, k, v = (x.cuda().bfloat16() for x in (q, k, v))
# block_sparse_attention(q, k, v, layout, causal=True)
# ```
#
# `python -m tests.benchmarks.gpu` measures it there; `zero-fn demo --attention bigbird` trains.
