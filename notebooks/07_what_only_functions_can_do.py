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
# # What can a sharded step do because it is a function?
#
# What any function can: `torch.func` goes through it. Below, `vmap` trains eight learning rates in
# one program; per-sample gradients come out of ZeRO's stage 3; a Hessian-vector product goes
# through layers that are sliced over three ranks; and the learning rate itself is learned, by the
# derivative through two sharded steps. Each is held against the dense formula, in plain torch, in
# an assertion.

# %%
import torch
from matplotlib import pyplot

import zero_fn as zf
from zero_fn import tree

mesh = zf.Mesh(dp=4)
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


params = {"hidden": normal(5, 9) / 2, "bias": normal(9) / 2, "out": normal(9, 1) / 3}
x = normal(24, 5)
batch = x, x.sin().sum(1, keepdim=True) + normal(24, 1) / 5


def loss_fn(params, batch):
    x, y = batch
    hidden = torch.tanh(x @ params["hidden"] + params["bias"])
    return (hidden @ params["out"] - y).square().mean()


# %% [markdown]
# ## A sweep is a vmap over the whole run
#
# `run` is one rank's program of thirty AdamW steps at stage 3, a function of the learning rate
# among others. `torch.func.vmap` over that argument makes eight runs one program: every gather and
# reduction moves the eight together.

# %%
STEPS = 30


def run(rate, params, batch):
    optimizer = zf.adamw(rate, weight_decay=0.1)

    def program(params, batch):
        pieces = zf.shard(params, stage=3)
        state, losses = optimizer.init(pieces), []

        def loss(pieces):
            return zf.pmean(loss_fn(zf.unshard(pieces), batch), "dp")

        for _ in range(STEPS):
            grads, value = zf.grad_and_value(loss)(pieces)
            updates, state = optimizer.update(grads, state, pieces)
            pieces = zf.apply_updates(pieces, updates)
            losses.append(value)
        return torch.stack(losses)

    return zf.spmd(program, mesh)(params, batch)


rates = torch.logspace(-3, 0, 8)
curves = torch.func.vmap(run, (0, None, None))(rates, params, batch)

figure, axes = pyplot.subplots(figsize=(7, 3.4))
for place, (rate, curve) in enumerate(zip(rates.tolist(), curves, strict=True)):
    axes.plot(curve, label=f"{rate:.3f}", color=pyplot.cm.viridis(place / 8))
axes.set_yscale("log")
axes.set_xlabel("step")
axes.set_ylabel("loss")
axes.legend(title="learning rate", ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
pyplot.show()

# %% [markdown]
# Each is the run that `torch.optim.AdamW` makes alone, on the whole batch:


# %%
def dense(rate):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=rate, weight_decay=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(leaves, batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


want = torch.tensor([list(dense(rate)) for rate in rates.tolist()], dtype=torch.float64)
torch.testing.assert_close(curves, want, rtol=1e-5, atol=0)  # rates are float32
best = curves[:, -1].argmin()
assert 0 < best < 7  # one in the middle

# %% [markdown]
# ## Per-sample gradients under stage 3
#
# Differential privacy, influence and gradient noise need the gradient of every sample. It is a vmap
# of a gradient, of the parameters that stage 3 gathers; here each is clipped to norm 1 before the
# mean.


# %%
def one(params, x, y):
    return loss_fn(params, (x[None], y[None]))


def clipped(pieces, batch):
    grads = torch.func.vmap(zf.grad(one), (None, 0, 0))(zf.unshard(pieces), *batch)
    squares = [g.flatten(1).square().sum(1) for g in tree.leaves(grads)]
    norms = torch.stack(squares).sum(0).sqrt()  # of this rank's six samples
    factors = (1 / norms).clamp(max=1)
    mean = tree.map(
        lambda g: zf.pmean(torch.einsum("n,n...->...", factors, g) / len(g), "dp"), grads
    )
    return mean, zf.all_gather_invariant(norms, "dp")


pieces = zf.spmd(lambda p: zf.shard(p, stage=3), mesh)(params)
mean, norms = zf.spmd(clipped, mesh)(pieces, batch)

figure, axes = pyplot.subplots(figsize=(7, 2.6))
colours = [f"C{sample // 6}" for sample in range(24)]  # of the rank that has it
axes.bar(range(24), norms, color=colours)
axes.axhline(1, color="black", linestyle="--")
axes.set_xlabel("sample (a colour is a rank)")
axes.set_ylabel("norm of its gradient")
pyplot.show()

# %%
alone = [torch.func.grad(one)(params, *sample) for sample in zip(*batch, strict=True)]
lengths = torch.stack([torch.cat([g.flatten() for g in tree.leaves(g)]).norm() for g in alone])
torch.testing.assert_close(norms, lengths)
for name in params:
    each = torch.stack([g[name] / max(1, length) for g, length in zip(alone, lengths, strict=True)])
    torch.testing.assert_close(mean[name], each.mean(0))
assert (norms > 1).any()
print(f"{int((norms > 1).sum())} of 24 samples are clipped")

# %% [markdown]
# ## A Hessian-vector product through tensor slices
#
# The same network in Megatron's layers, its hidden units divided over three ranks of `tp`. The
# derivative of `jvp` is $Hv$; power iteration with it finds the sharpest curvature, without $H$.

# %%
units = zf.Mesh(tp=3)
rules = {"hidden": 1, "bias": 0, "out": 0}  # the dimension that is cut


def sliced_loss(params, batch):
    x, y = batch
    hidden = zf.column_linear(x, params["hidden"].T, params["bias"], axis="tp").tanh()
    return (zf.row_linear(hidden, params["out"].T, axis="tp") - y).square().mean()


def product(state, batch):
    at, direction = (zf.slice_params(part, rules) for part in state)

    def loss(p):
        return sliced_loss(zf.local_slices(p), batch)

    return zf.grad(lambda p: torch.func.jvp(loss, (p,), (direction,))[1])(at)


def hessian_vector(direction):
    sliced = zf.spmd(product, units, batch="replicated")((params, direction), batch)
    return zf.gather_tree(sliced, units)


def flat(values):
    return torch.cat([leaf.flatten() for leaf in tree.leaves(values)])


direction = tree.map(torch.ones_like, params)
found = []
for _ in range(25):
    image = hessian_vector(direction)
    found.append((flat(direction) @ flat(image) / flat(direction).square().sum()).item())
    length = flat(image).norm()
    direction = tree.map(lambda leaf, length=length: leaf / length, image)

# %%
blocks = torch.func.hessian(loss_fn)(params, batch)
order = sorted(params)
rows = [
    torch.cat([blocks[a][b].reshape(params[a].numel(), -1) for b in order], dim=1) for a in order
]
hessian = torch.cat(rows)
eigenvalues = torch.linalg.eigvalsh(hessian)

torch.testing.assert_close(flat(hessian_vector(direction)), hessian @ flat(direction))
print(f"power iteration {found[-1]:.4f}, largest of all {len(eigenvalues)}: {eigenvalues[-1]:.4f}")
assert abs(found[-1] / eigenvalues[-1] - 1) < 0.01

figure, axes = pyplot.subplots(figsize=(7, 2.6))
axes.plot(range(1, len(found) + 1), found, marker=".")
axes.axhline(eigenvalues[-1], color="black", linestyle="--", label="the dense Hessian's")
axes.set_xlabel("Hessian-vector products")
axes.set_ylabel("largest eigenvalue")
axes.legend(loc="lower right")
pyplot.show()

# %% [markdown]
# ## Learning the learning rate
#
# The loss after two sharded SGD steps is a function of the rate; its derivative goes back through
# updates, reductions and gathers of both.


# %%
def after_two(rate, params, batch):
    optimizer = zf.sgd(rate)

    def program(params, batch):
        def loss(pieces):
            return zf.pmean(loss_fn(zf.unshard(pieces), batch), "dp")

        pieces = zf.shard(params, stage=3)
        state = optimizer.init(pieces)
        for _ in range(2):
            updates, state = optimizer.update(zf.grad(loss)(pieces), state, pieces)
            pieces = zf.apply_updates(pieces, updates)
        return loss(pieces)

    return zf.spmd(program, mesh)(params, batch)


def dense_after_two(rate):
    values = params
    for _ in range(2):
        grads = torch.func.grad(loss_fn)(values, batch)
        values = {name: values[name] - rate * grads[name] for name in values}
    return loss_fn(values, batch)


rate = torch.tensor(0.02, dtype=torch.float64)
path = []
for _ in range(12):
    slope, value = torch.func.grad_and_value(after_two)(rate, params, batch)
    torch.testing.assert_close(slope, torch.func.grad(dense_after_two)(rate))
    path.append((rate.item(), value.item()))
    rate = rate - 0.02 * slope

grid = torch.linspace(0.005, 0.4, 40, dtype=torch.float64)
scan = torch.func.vmap(after_two, (0, None, None))(grid, params, batch)
first, last = path[0], path[-1]
print(f"rate {first[0]:.3f}, loss {first[1]:.4f}; then {last[0]:.3f}, {last[1]:.4f}")
assert last[1] < first[1]
assert last[1] < scan.min() * 1.02

figure, axes = pyplot.subplots(figsize=(7, 2.8))
axes.plot(grid, scan, label="all rates, by vmap")
axes.plot(*zip(*path, strict=True), "o-", markersize=4, label="the path of the derivative")
axes.set_xlabel("learning rate")
axes.set_ylabel("loss after two steps")
axes.legend()
pyplot.show()

# %% [markdown]
# ## On real GPUs
#
# `after_two`, `clipped` and `product` are programs of one rank: under `torchrun` the same functions
# run on a GPU each. `zf.jit` around a Hessian-vector product traces the whole of it into one graph,
# whose collectives it places and joins:
#
# ```
# product = zf.jit(zf.spmd(product, zf.Mesh(tp=3), batch="replicated"))
#
# torchrun --nproc-per-node 3 curvature.py
# ```
