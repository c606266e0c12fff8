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
# # What becomes of a DeepSpeed configuration?
#
# `zf.from_deepspeed(config)` reads it key by key. A key becomes an argument of `zf.train_step`, a
# mesh axis, an optimizer, a layout of sparse attention or a log; or it is listed with the reason
# why it has no counterpart. None is dropped, and a key that nobody knows is an error.

# %%
import torch
from matplotlib import pyplot

import zero_fn as zf

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-2},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
    "activation_checkpointing": {"partition_activations": True},
}
read = zf.from_deepspeed(CONFIG, ranks=4)
print(read)

# %% [markdown]
# What was read is data: sizes of axes, an optimizer, arguments.

# %%
print(read.axes, read.batch, read.arguments)
assert read.axes == {"dp": 4}
assert read.arguments == {"stage": 2, "clip": 1.0, "microbatches": 2}
assert "steps_per_print" in read.unsupported

# %% [markdown]
# The scheduler became a function of the number of steps made, `zf.warmup_lr`, with DeepSpeed's
# meanings: the rate grows with the logarithm of the count.

# %%
rate = zf.warmup_lr(0, 1e-2, 4)
rates = [rate(torch.tensor(count)).item() for count in range(8)]
figure, axes = pyplot.subplots(figsize=(5, 2.5))
axes.step(range(8), rates, where="post", marker="o")
axes.set(xlabel="steps made", ylabel="learning rate", title="WarmupLR, 4 steps")
assert rates == sorted(rates)
assert abs(rates[-1] - 1e-2) < 1e-9

# %% [markdown]
# ## The step
#
# `read.train_step(loss_fn, mesh)` is `zf.train_step` with these. Any of them can be given in its
# place: `read.train_step(loss_fn, mesh, stage=3)`.


# %%
def loss_fn(params, batch):
    x, y = batch
    return (torch.tanh(x @ params["hidden"]) @ params["out"] - y).square().mean()


def new_params():
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"hidden": make(5, 7), "out": make(7, 1)}


x = torch.randn(8, 16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
batches = [(each, each.sum(-1, keepdim=True)) for each in x]

mesh = zf.Mesh(**read.axes)  # 4 simulated ranks; the same under torchrun on 4 processes
init, step = read.train_step(loss_fn, mesh)
state, losses = init(new_params()), []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics["loss"].item())
print([round(loss, 4) for loss in losses])

# %% [markdown]
# ## The same with `torch.optim` alone
#
# No ranks, no micro-batches, no library: the same losses, up to the order of sums.

# %%
params = {name: p.requires_grad_() for name, p in new_params().items()}
optimizer = torch.optim.AdamW(params.values(), betas=(0.8, 0.99), eps=1e-6, weight_decay=3e-2)
plain = []
for count, batch in enumerate(batches):
    optimizer.param_groups[0]["lr"] = rate(torch.tensor(count)).item()
    optimizer.zero_grad()
    loss = loss_fn(params, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([*params.values()], 1.0)
    optimizer.step()
    plain.append(loss.item())
worst = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
print(f"largest relative difference below 1e-6: {worst < 1e-6}")
assert worst < 1e-6  # the rate is float32

# %% [markdown]
# ## Which rank holds what
#
# Stage 2 keeps parameters and moments as pieces.

# %%
zf.show_sharding(state, mesh)

# %% [markdown]
# ## Mistakes are told
#
# An unknown key is an error that names the nearest known one, and `"auto"` needs a value.

# %%
for wrong in (
    {"gradient_cliping": 1.0},
    {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3},
):
    try:
        zf.from_deepspeed(wrong)
    except ValueError as error:
        print(error, end="\n\n")
    else:
        raise AssertionError(wrong)

# %% [markdown]
# ## What it will cost, before it runs

# %%
abstract = mesh.abstract()
init, step = read.train_step(loss_fn, abstract)
plan = zf.plan(step, init(zf.eval_shape(new_params)), batches[0])
print(plan)
assert {collective.axis for collective in plan.collectives} == {"dp"}

# %% [markdown]
# On GPUs: the same file under `torchrun --nproc-per-node 4`, with `zf.Mesh(**read.axes)` made in
# each process. `"bf16": {"enabled": true}` becomes `zf.policy(compute="bfloat16")`, `"fp16"` a
# loss scale as state, `"OneBitAdam"` becomes `zf.onebit_adam`.
