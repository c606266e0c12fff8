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
# # How do I write a partition scheme of my own?
#
# Say how one leaf is cut (`scatter`) and how it is put together again (`gather`), in a frozen
# dataclass that derives from `zf.Scheme`: about ten lines. `zf.testing.check_scheme` then checks
# the laws, and the scheme goes wherever a stage's number goes: `zf.shard(params, MyScheme())`,
# `zf.train_step(..., stage=MyScheme())`. Gradients follow by themselves, since the transpose of
# what gathers is what reduces.

# %%
from dataclasses import dataclass

import torch
from matplotlib import colormaps, pyplot

import zero_fn as zf
from zero_fn.sharding import ZeRO3
from zero_fn.testing import check_scheme

# %% [markdown]
# ## A first one: every n-th value
#
# ZeRO's own stages cut a flattened leaf into consecutive pieces. This one deals the values out like
# cards. The code is the program of *one* rank: `zf.pscatter` takes this rank's slice of what all
# ranks share, `zf.all_gather` puts the ranks' pieces one after the other.


# %%
@dataclass(frozen=True)
class Strided(zf.Scheme):
    gather_at = "use"  # as stage 3: gathered anew in each micro-batch,
    reduce_at = "microbatch"  # and gradients reduced in each

    def scatter(self, x, axis):
        n = zf.axis_size(axis)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n))
        return zf.pscatter(flat.view(-1, n).T.reshape(-1), axis)

    def gather(self, piece, shape, axis):
        flat = zf.all_gather(piece, axis).view(zf.axis_size(axis), -1).T.reshape(-1)
        return flat[: torch.Size(shape).numel()].view(shape)


# %% [markdown]
# Who holds which of 24 values? The leaf is 1, 2, 3, ...; each of four simulated ranks shows its
# piece.


# %%
def draw(axes, scheme, mesh, axis):
    leaf = torch.arange(1.0, 25.0)
    pieces = zf.spmd(lambda x: zf.shard(x, scheme, axis), mesh)(leaf).local
    pieces = pieces.reshape(-1, pieces.shape[-1])
    pieces = pieces.repeat(mesh.size // len(pieces), 1)  # groups that hold the same
    for rank, piece in enumerate(pieces.int().tolist()):
        same = next(r for r in range(rank + 1) if torch.equal(pieces[r], pieces[rank]))
        held = [(value - 1, 1) for value in piece if value]
        axes.broken_barh(held, (rank - 0.4, 0.8), color=colormaps["tab10"](same), edgecolor="white")
    axes.set_yticks(range(mesh.size), [f"rank {rank}" for rank in range(mesh.size)])
    axes.invert_yaxis()
    axes.set_xlabel("value")
    axes.set_title(type(scheme).__name__)


mesh = zf.Mesh(dp=4)
figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 2.3))
draw(left, ZeRO3(), mesh, "dp")
draw(right, Strided(), mesh, "dp")
pyplot.show()

# %% [markdown]
# The laws: gather ∘ scatter is the identity, the gradient by the pieces is the dense gradient cut
# the same way, for leaves of odd, even, 0-dim and empty shapes, on 1, 2, 3 and 4 simulated ranks
# and in shapes on abstract ones.

# %%
check_scheme(Strided())

# %% [markdown]
# And in a training step, beside stage 3:


# %%
def loss_fn(params, batch):
    x, y = batch
    return (torch.tanh(x @ params["hidden"]) @ params["out"] - y).square().mean()


generator = torch.Generator().manual_seed(0)
params = {
    "hidden": torch.randn(13, 97, generator=generator) / 4,
    "out": torch.randn(97, 3, generator=generator) / 10,
}
x = torch.randn(60, 16, 13, generator=generator)
batches = [(x, x[:, :3].sin()) for x in x]


def losses(scheme, mesh=mesh, axis="dp"):
    init, step = zf.train_step(loss_fn, zf.adamw(1e-2), mesh, stage=scheme, axis=axis)
    return zf.fit(step, init(params), batches, show=False)[1]


stage3, strided = losses(3), losses(Strided())
print(f"after {len(batches)} steps: stage 3 {stage3[-1]:.4f}, strided {strided[-1]:.4f}")
# float32: the same sums, in pieces of other values
assert all(abs(a - b) < 1e-4 for a, b in zip(stage3, strided, strict=True))

# %% [markdown]
# ## What happens to a wrong one
#
# Forget the transposition in `gather`, and each rank's part comes out at the wrong place. The check
# says which law fails, for which leaf:


# %%
@dataclass(frozen=True)
class Wrong(Strided):
    def gather(self, piece, shape, axis):
        return zf.all_gather(piece, axis)[: torch.Size(shape).numel()].view(shape)


try:
    check_scheme(Wrong())
except AssertionError as error:
    message = str(error)
print(message.split(": tensor")[0])
assert "gather(scatter(x)) is not x" in message

# %% [markdown]
# ## ZeRO++: gather in int8
#
# ZeRO++ (arXiv 2306.10209, section 4.1) sends parameters in blocks of int8, each with a scale, and
# reduces gradients as before. Rounding has no useful derivative, so this `gather` says itself what
# its backward is: what the plain gather's would be. The codec is the one that compresses gradients,
# `zf.Int8`; its rows are multiples of 1024 values.


# %%
class Int8Gather(torch.autograd.Function):
    generate_vmap_rule = True  # simulated ranks are a vmap

    @staticmethod
    def forward(piece, axis):
        codec, n = zf.Int8(), piece.numel()
        row = torch.nn.functional.pad(piece, (0, -n % 1024)).view(1, -1)
        codes, scales = (zf.all_gather(part, axis) for part in codec.encode(row))
        return codec.decode((codes, scales), row.shape[-1], piece.dtype)[:, :n].reshape(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return zf.psum_scatter(grad.contiguous(), ctx.axis), None


@dataclass(frozen=True)
class Quantised(ZeRO3):
    def gather(self, piece, shape, axis):
        return Int8Gather.apply(piece, axis)[: torch.Size(shape).numel()].view(shape)


# %% [markdown]
# It is no identity, so the check is told how much it may lose: half a step of 127, of the largest
# value. The gradient must still be exact, the dense one at what was gathered.

# %%
check_scheme(Quantised(), loses=1 / 254)

# %% [markdown]
# What it saves, counted in one rank's program of a mesh of 64: a byte a value, and 4 bytes a block
# of 256, in place of 4 bytes a value.

# %%
wide = {"hidden": torch.zeros(1024, 4096), "out": torch.zeros(4096, 64)}


def gathered(scheme):
    init, step = zf.train_step(loss_fn, zf.sgd(0.1), zf.Mesh(dp=64).abstract(), stage=scheme)
    batch = torch.zeros(64, 1024), torch.zeros(64, 64)
    collectives = step.trace(init(wide), batch).collectives()
    return sum(c.bytes_sent for c in collectives if c.kind == "all_gather")


ratio = gathered(Quantised()) / gathered(3)
print(f"the quantised gather sends {ratio:.3f} of the bytes")
assert abs(ratio - (1 + 4 / 256) / 4) < 1e-3

quantised = losses(Quantised())
print(f"after {len(batches)} steps: stage 3 {stage3[-1]:.4f}, quantised {quantised[-1]:.4f}")
assert quantised[-1] < 1.05 * stage3[-1]

# %% [markdown]
# ## Hierarchical: a small group shards, the groups hold copies
#
# Where links within a node are fast and those between nodes slow (MiCS, arXiv 2205.00119; FSDP's
# hybrid sharding), a leaf is cut over the inner axis only. `axes` says over which mesh axes pieces
# differ. `zf.pvary` over the outer axis is free in the forward; its transpose sums the gradient
# over the groups, and since the gather is transposed first, that is a sum of pieces.


# %%
@dataclass(frozen=True)
class Hierarchical(zf.Scheme):
    gather_at = "use"
    reduce_at = "microbatch"

    def axes(self, axis):
        return axis[1:]

    def scatter(self, x, axis):
        return ZeRO3().scatter(x, axis[1:])

    def gather(self, piece, shape, axis):
        return ZeRO3().gather(zf.pvary(piece, axis[0]), shape, axis[1:])


nodes = zf.Mesh(dp_outer=2, dp_inner=4)
both = ("dp_outer", "dp_inner")
figure, axes = pyplot.subplots(figsize=(7, 2.8))
draw(axes, Hierarchical(), nodes, both)
axes.set_title("Hierarchical: ranks 0 to 3 hold a copy, ranks 4 to 7 another")
pyplot.show()

check_scheme(Hierarchical(), dp_outer=2, dp_inner=4)

# %% [markdown]
# Between the nodes travels an all-reduce of this rank's piece, and nothing else of size:

# %%
init, step = zf.train_step(loss_fn, zf.sgd(0.1), nodes.abstract(), stage=Hierarchical(), axis=both)
program = step.trace(init(wide), (torch.zeros(64, 1024), torch.zeros(64, 64)))
for collective in program.collectives():
    print(collective)
size = sum(x.nbytes for x in wide.values())
outer = sum(c.bytes_sent for c in program.collectives() if c.axis == "dp_outer")
assert abs(outer - size / 4) <= 8  # 2 (2 - 1) / 2 of a quarter; 4 bytes are the loss'

hierarchical = losses(Hierarchical(), nodes, both)
assert all(abs(a - b) < 1e-4 for a, b in zip(stage3, hierarchical, strict=True))

# %% [markdown]
# ## Yours
#
# Change this one: it cuts along the first dimension, row by row, as FSDP2 does, padded where the
# ranks don't divide it. Ideas: put it together with `Int8Gather`; cut along the longest dimension;
# keep leaves below a size whole, as `Replicated` does.


# %%
@dataclass(frozen=True)
class Mine(zf.Scheme):
    def scatter(self, x, axis):
        rows = x if x.ndim else x[None]
        missing = -len(rows) % zf.axis_size(axis)
        return zf.pscatter(torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]), axis)

    def gather(self, piece, shape, axis):
        return zf.all_gather(piece, axis)[: shape[0] if shape else 1].reshape(shape)


check_scheme(Mine())
mine = losses(Mine())
assert all(abs(a - b) < 1e-4 for a, b in zip(stage3, mine, strict=True))

# %% [markdown]
# ## On real GPUs
#
# The scheme doesn't change. Write the step to a file and start a process for each GPU; `zf.Mesh`
# takes processes where there are any, NCCL where there is CUDA:
#
# ```
# mesh = zf.Mesh(dp_outer=2, dp_inner=8)   # two nodes of eight
# init, step = zf.train_step(loss_fn, optimizer, mesh, stage=Hierarchical(), axis=tuple(mesh.shape))
#
# torchrun --nnodes 2 --nproc-per-node 8 train.py
# ```
