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
# # What does it take to train a trillion parameters?
#
# 800 GPUs of 32 GB, if each holds a share of its own: 16 bytes a parameter are 16 TB, 20 GB a
# GPU. That takes every axis there is, and leaves little room. Nothing below runs: one rank's
# program is traced on sizes, and its bytes, messages and operations are counted.

# %%
import dataclasses

from matplotlib import pyplot

import zero_fn as zf
from zero_fn.costs.formulas import least_memory
from zero_fn.costs.presets import MODELS, model
from zero_fn.costs.search import search
from zero_fn.costs.setups import Setup, plan_setup

for name, (config, source) in MODELS.items():
    print(f"{name:15} {config.parameters / 1e9:8.1f} billion   {source}")

# %% [markdown]
# ## ZeRO's formulas, from traces
#
# Bytes a parameter on one of 64 ranks with mixed-precision Adam: 16 at stage 0, 4 + 12/64, 2 +
# 14/64 and 16/64 at stages 1, 2 and 3 (arXiv 1910.02054). A trace has what a formula leaves out:
# activations, the gathered layer, gradients on their way.

# %%
config = model("7.5b").config
plans = [
    dataclasses.replace(
        plan_setup(Setup(config, stage, dp=64), "a100-80gb"), label=f"stage {stage}"
    )
    for stage in (0, 1, 3)  # with one micro-batch stage 2 is stage 1
]
_ = zf.compare(*plans).plot()

# %%
zf.compare(*plans)

# %% [markdown]
# Stage 0 holds 16 bytes a parameter and does not fit. At stage 3 activations are most of the peak.

# %%
n = config.parameters
assert abs(plans[0].states / n - 16) < 0.2
assert [plan.fits for plan in plans] == [False, True, True]
assert plans[2].peak.bytes < plans[1].peak.bytes < plans[0].peak.bytes
assert plans[2].peak.parts["activations"] > plans[2].peak.bytes / 2

# %% [markdown]
# ## Why small traces are enough
#
# A model repeats one block, a step one micro-batch. What is traced are models of 3 and 4 blocks;
# what is alive at an operation is affine in their number, and so is all that is sent and computed.
# A model of 5 shows at which operations that fails. Here against the whole trace of a small model.

# %%
small = dataclasses.replace(model("gpt2-124m").config, layers=6, vocabulary=5000)
setup = Setup(small, dp=8)
quick, whole = plan_setup(setup, "a100-80gb"), plan_setup(setup, "a100-80gb", whole=True)
print(quick.peak.bytes, whole.peak.bytes)
assert quick.peak.bytes == whole.peak.bytes
assert quick.collectives == whole.collectives

# %% [markdown]
# ## What fits 4 V100s, and is fastest?
#
# Formulas throw out what cannot fit; the rest is traced, the fastest first.

# %%
v100 = zf.hardware("v100-32gb")
found = search(model("gpt2-124m").config, v100, 4, 16, dtype="fp16", wanted=1, seconds=1000)
found.table()

# %%
assert all(plan.fits for _, plan in found.ranking)

# %% [markdown]
# ## A trillion
#
# 298 layers of width 17408, over 100 stages of a pipeline and slices of 8. No rank has a partner
# that holds the same parameters, so there is nothing for ZeRO to cut: the three axes do it alone.

# %%
trillion = Setup(
    model("1t").config, tp=8, pp=100, microbatches=256, remat=True, dtype="fp16", loss_scale=False
)
print(f"{trillion.config.parameters:.4g} parameters on {trillion.ranks} GPUs")
print(f"by formula {least_memory(trillion) / 1e9:.1f} GB at least on the rank with the most layers")
plan = plan_setup(trillion, v100)
print(plan)

# %%
assert plan.fits
assert plan.bubble < 0.3

# %% [markdown]
# It fits. The share of its time that a rank waits is the pipeline's bubble, (P - 1) / (M + P - 1)
# for P equal stages and M micro-batches, so it falls as the batch grows.

# %%
figure, axes = pyplot.subplots(figsize=(6, 3))
counts = [64, 128, 256, 512, 1024]
axes.plot(counts, [99 / (m + 99) for m in counts], marker="o")
axes.axhline(plan.bubble, linestyle="--", color="grey")
axes.annotate("traced stages, 256 micro-batches", (1024, plan.bubble), ha="right", va="bottom")
_ = axes.set(xlabel="micro-batches", ylabel="bubble", xscale="log", ylim=(0, 0.7))

# %% [markdown]
# On the command line: `zero-fn plan --model 1t --tp 8 --pp 100 --microbatches 256 --remat
# --hardware v100-32gb --no-loss-scale`, and `zero-fn plan --claims` for this and five more of
# DeepSpeed's claims, each with the assumption that it hangs on. On real GPUs the same set-up is
# `zf.train_step(zf.pipeline(...), ...)` with `zf.Mesh(pp=100, tp=8)` under `torchrun`, and
# `plan.table(measured={"peak": ...})` shows what was measured beside what was planned.
