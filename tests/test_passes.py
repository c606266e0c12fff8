"""Passes: fewer bytes, the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt
from zero_fn.passes import (
    BUILT_IN,
    Pass,
    bucketing,
    gather_late,
    overlapping,
    placement,
    reduce_early,
)
from zero_fn.program import Program, base, trace

from .memory import peak
from .processes import run_on_processes

CONFIG = gpt.Config(vocabulary=64, length=16, layers=3, heads=2, width=64)


def loss_fn(params: Any, batch: Any) -> Tensor:
    return gpt.loss(params, batch, CONFIG)


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, CONFIG.vocabulary, (rows, CONFIG.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextmanager
def every_leaf_counts() -> Iterator[None]:
    """Treat small leaves like large ones: gathered again, one by one, and as late as may be."""
    before = placement.SMALL, bucketing.LARGE, overlapping.AHEAD, overlapping.UNDER_WAY
    placement.SMALL = bucketing.LARGE = overlapping.AHEAD = overlapping.UNDER_WAY = 0
    try:
        yield
    finally:
        placement.SMALL, bucketing.LARGE, overlapping.AHEAD, overlapping.UNDER_WAY = before


def stepped(mesh: zf.Mesh, stage: int, microbatches: int = 1) -> tuple[Any, Any]:
    """A step and a state for it, not yet traced."""
    init, step = zf.train_step(
        loss_fn, zf.adamw(1e-2), mesh, stage=stage, microbatches=microbatches, clip=0.5
    )
    return step.f, init(gpt.init(CONFIG))  # type: ignore[attr-defined]


def passed(program: Program, passes: tuple[Pass, ...]) -> Program:
    for transform in passes:
        program = transform(program)
    return program


def with_and_without(stage: int, microbatches: int) -> list[str]:
    """On processes: what differs between the step as it is and after the passes."""
    wrong = []
    mesh = zf.Mesh(dp=2)
    step, state = stepped(mesh, stage, microbatches)
    want = step(state, batch())
    with every_leaf_counts():
        program = passed(trace(step, (state, batch()), (0,)), BUILT_IN)
        got = program(tree.map(torch.clone, state), batch())
        for path, x, y in zip(tree.paths(want), tree.leaves(want), tree.leaves(got), strict=True):
            # the fused Adam in place differs from p + u by a rounding
            if not torch.allclose(x, y, rtol=1e-6, atol=1e-7):
                wrong.append(path)
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_passes_change_no_number(stage: int) -> None:
    for wrong in run_on_processes(2, with_and_without, stage, 1):
        assert wrong == []


def test_passes_change_no_number_of_micro_batches() -> None:
    for wrong in run_on_processes(2, with_and_without, 3, 2):
        assert wrong == []


def traced(stage: int) -> Program:
    """One of 8 ranks, with so few tokens that parameters outweigh activations."""
    step, state = stepped(zf.Mesh(dp=8).abstract(), stage)
    few = tree.map(lambda x: x[:, :2], batch(8))
    return trace(step, (state, few), (0,))


def calls(program: Program) -> dict[str, int]:
    return {c.kind: c.calls for c in program.collectives(8)}


def test_stage_3_gathers_again_and_the_others_do_not() -> None:
    leaves = len({id(x) for x in tree.leaves(gpt.init(CONFIG))})
    with every_leaf_counts():
        counts = [calls(gather_late(traced(stage))).get("all_gather", 0) for stage in range(4)]
    assert counts[:3] == [0, leaves, leaves]
    assert 1.5 * leaves < counts[3] <= 2.5 * leaves
    assert calls(gather_late(traced(3)))["all_gather"] < counts[3]  # small leaves are kept


def test_stage_3_holds_few_whole_parameters() -> None:
    with every_leaf_counts():
        peaks = [passed(traced(stage), BUILT_IN).peak().bytes for stage in (2, 3)]
    whole = 4 * CONFIG.parameters
    # of three blocks, one and its neighbour's edge are whole at once
    assert peaks[1] < peaks[0] - whole / 3


def test_gradients_are_reduced_as_they_come() -> None:
    before = traced(2)
    after = reduce_early(traced(2))
    assert calls(before) == calls(after)

    def whole_gradients(program: Program) -> int:
        """The most gradients that are complete and not yet reduced, in a walk over the graph."""
        names = [node.name for node in program.graph_module.graph.nodes]
        place = {name: i for i, name in enumerate(names)}
        spans = []
        for node in program.graph_module.graph.nodes:
            if "reduce_scatter" in str(node.target):
                source = base(node.args[0])
                if source.target is torch.ops.aten.slice_backward.default:
                    source = base(source.args[0])
                spans.append((place[source.name], place[node.name]))
        return max(sum(a <= at < b for a, b in spans) for at in range(len(names)))

    assert whole_gradients(before) > 20
    assert whole_gradients(after) <= 3
    assert after.peak().bytes < before.peak().bytes


def measured(stage: int) -> tuple[int, int]:
    """On processes: predicted and measured bytes of intermediates at the peak."""
    mesh = zf.Mesh(dp=2)
    step, state = stepped(mesh, stage)
    program = passed(trace(step, (state, batch()), (0,)), BUILT_IN)
    predicted = program.peak()
    tensors = [x for x in tree.leaves((state, batch())) if isinstance(x, Tensor)]
    with torch.no_grad():
        return predicted.bytes - predicted.inputs, peak(
            lambda: program.graph_module(*tensors), tensors
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_predicted_peak_is_the_measured_one(stage: int) -> None:
    for predicted, found in run_on_processes(2, measured, stage):
        assert predicted == pytest.approx(found, rel=0.1)


def test_a_timeline_counts_views_once_and_frees_what_is_done() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2  # 400 bytes
        a, b = y.view(10, 10).T.split(5)  # views
        return (a + b).sum()  # 200 bytes, then 4

    program = trace(f, (torch.ones(100),))
    sizes = [size - 400 for _, size in program.memory_timeline()]
    assert max(sizes) == 600
    assert sizes[-1] == 4
    assert program.peak().inputs == 400
    assert "add" in program.peak().operation
