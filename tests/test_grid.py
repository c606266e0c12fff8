"""Every combination of a step's settings against a dense loop that uses none of this library."""

import itertools
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree

from .test_precision import DTYPES
from .test_training import batches, mlp

STEPS = 3
CLIP = 0.05
RANKS = 2


def layer(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return h + torch.tanh(h @ weight + bias)


def loss(params: Any, batch: Any, remat: bool) -> torch.Tensor:
    """In the parameters' dtype up to the logits, in float32 from there."""
    x, y = batch
    inner = zf.remat(layer) if remat else layer
    h = torch.tanh(x @ params["in"]["weight"] + params["in"]["bias"]) * params["scale"]
    for weight, bias in params["layers"]:
        h = inner(h, weight, bias)
    return torch.nn.functional.cross_entropy((h @ params["out"]).float(), y)


def dense(compute: str, microbatches: int, clip: bool) -> tuple[list[float], list[float], Any]:
    """Each part's gradients by low-precision copies, added in float32; AdamW on float32."""
    dtype, params = DTYPES[compute], tree.map(torch.clone, mlp())
    leaves = tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    parts = RANKS * microbatches
    for x, y in batches(STEPS):
        low = tree.map(lambda p: p.to(dtype).requires_grad_(), params)
        for p in leaves:
            p.grad = torch.zeros_like(p)
        total = 0.0
        for rows, labels in zip(x.to(dtype).chunk(parts), y.chunk(parts), strict=True):
            value = loss(low, (rows, labels), False) / parts
            grads = torch.autograd.grad(value * 128, tree.leaves(low))
            for p, g in zip(leaves, grads, strict=True):
                p.grad += g.float() / 128
            total += value.item()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(leaves, CLIP).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, params


COMPUTE = ("float32", "bf16", "fp16")
SWITCH = (False, True)
GRID = list(itertools.product((0, 1, 2, 3), COMPUTE, (1, 4), SWITCH, SWITCH))


def among_few(stage: int, compute: str, microbatches: int, clip: bool, remat: bool) -> bool:
    """Every stage in every dtype, with each other setting in half of them."""
    place = COMPUTE.index(compute)
    return (microbatches, clip, remat) == (
        (1, 4)[(stage + place) % 2],
        place % 2 == stage // 2,
        (stage + place // 2) % 2 == 0,
    )


@pytest.mark.parametrize(
    ("stage", "compute", "microbatches", "clip", "remat"),
    [pytest.param(*p, marks=() if among_few(*p) else pytest.mark.slow) for p in GRID],
)
def test_a_step_is_the_dense_one(
    stage: int, compute: str, microbatches: int, clip: bool, remat: bool
) -> None:
    """Run eagerly: what ``jit`` does to a step has tests of its own."""
    data = batches(STEPS)
    mesh = zf.Mesh(dp=RANKS)
    init, step = zf.train_step(
        lambda p, b: loss(p, b, remat),
        zf.adamw(1e-2, weight_decay=0.1),
        mesh,
        stage=stage,
        microbatches=microbatches,
        clip=CLIP if clip else None,
        policy=None if compute == "float32" else zf.policy(compute=compute),
        loss_scale=zf.LossScale.static(128.0) if compute == "fp16" else None,
    )
    run = step.f  # type: ignore[attr-defined]
    evaluate = zf.spmd(lambda s, b: zf.pmean(loss(zf.unshard(s.params), b, remat), "dp"), mesh)
    state, losses, norms = init(mlp()), [], []
    for batch in data:
        before = evaluate(state, data[0])
        state, metrics = run(state, batch)
        evaluate(state, data[1])  # evaluating before, between and after changes nothing
        if clip:
            norms.append(metrics["grad_norm"].item())
            assert metrics["grad_norm_clipped"] <= CLIP * (1 + 1e-5)
        losses.append(metrics["loss"].item())
        assert before.isfinite()
    want = dense(compute, microbatches, clip)
    # float32: other orders of summation. Else the same products in other orders, each rounded to
    # 2^-8 of it in bf16, and Adam's first steps follow the sign of small gradients.
    exact = compute == "float32"
    assert losses == pytest.approx(want[0], rel=1e-5 if exact else 5e-3)
    assert norms == pytest.approx(want[1], rel=1e-5 if exact else 2e-2)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 0.02, "atol": 5e-3}
    torch.testing.assert_close(zf.gather_tree(state.params, mesh), want[2], **tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_are_equal_at_every_stage(stage: int) -> None:
    """float64, and a mesh of two axes: the global norm is the dense one."""
    params = mlp(torch.float64)
    leaves = [x.requires_grad_() for x in tree.leaves(params)]
    batch = batches(1, dtype=torch.float64)[0]
    torch.nn.functional.cross_entropy(forward(params, batch[0]), batch[1]).backward()
    want = torch.nn.utils.get_total_norm([x.grad for x in leaves if x.grad is not None])
    init, step = zf.train_step(
        lambda p, b: torch.nn.functional.cross_entropy(forward(p, b[0]), b[1]),
        zf.sgd(0.1),
        zf.Mesh(dp_outer=2, dp_inner=3),
        stage=stage,
        axis=("dp_outer", "dp_inner"),
        clip=float("inf"),
    )
    state = init(tree.map(torch.Tensor.detach, params))
    _, metrics = step.f(state, batch)  # type: ignore[attr-defined]
    torch.testing.assert_close(metrics["grad_norm"], want, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["grad_norm_clipped"], want, rtol=1e-6, atol=0)


def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ params["in"]["weight"] + params["in"]["bias"]) * params["scale"]
    for weight, bias in params["layers"]:
        h = layer(h, weight, bias)
    return h @ params["out"]
