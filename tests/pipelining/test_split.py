"""A stage's three programs: what is held between them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt
from zero_fn.pipelining.schedule import Action
from zero_fn.pipelining.work import Work

from .stages import batches, embed, make, tail

CONFIG = gpt.Config(vocabulary=64, length=32, layers=4, heads=4, width=64, tied=False)


def held(tensors: Sequence[Tensor], beside: Sequence[Tensor]) -> int:
    """The bytes of the tensors' memory, each once, but for what lies in other tensors' memory."""
    known = {x.untyped_storage().data_ptr() for x in beside}
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for memory, size in found.items() if memory not in known)


def started(remat: bool = False) -> tuple[Work, list[Tensor]]:
    """Both stages of a GPT after the forward of one micro-batch, and their parameters."""
    stages = gpt.stages(CONFIG, 2)
    params = gpt.split_params(gpt.init(CONFIG), CONFIG, 2)
    tokens = torch.randint(0, 64, (4, 32))
    wrapped = [zf.remat(stage) if remat else stage for stage in stages]
    work = Work(wrapped, dict(enumerate(params)), [(tokens, tokens)], [1.0], {}, eager=True)
    for stage in (0, 1):
        work.compute(Action(stage, "F", 0))
    return work, tree.leaves(params)


def test_no_more_is_saved_than_by_autograd() -> None:
    work, params = started()
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    needing = [x.requires_grad_() for x in params]
    own = tree.unflatten(tree.flatten(gpt.split_params(gpt.init(CONFIG), CONFIG, 2))[1], needing)
    (tokens, _), _ = work.parts[0]
    carry = None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for stage, of_stage in zip(gpt.stages(CONFIG, 2), own, strict=True):
            carry = stage(of_stage, carry, (tokens, tokens))
    ours = [x for _, tensors in work.saved.values() for x in tensors]
    assert held(ours, params) <= held(saved, params)


def test_what_is_due_is_what_weights_need() -> None:
    """Between I and W: the matrices' inputs and their results' gradients."""
    work, params = started()
    work.compute(Action(1, "I", 0))
    (_, saved), (_, due) = work.saved[0, 0], work.due[1, 0]
    assert (1, 0) not in work.saved
    grads = [x for x in due if x.shape[-1:] == (CONFIG.width,)]
    assert grads
    assert held(due, params) < 2 * held(saved, params)


class Called(TorchDispatchMode):
    """The operations that ran, with the shape of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shape = tuple(out.shape) if isinstance(out, Tensor) else ()
        self.found.append((func.overloadpacket.__name__, shape))
        return out


@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_products_are_added_up_where_they_are_computed(kinds: str) -> None:
    """From the second micro-batch on, no matrix's gradient is in memory of its own."""
    stages, params = gpt.stages(CONFIG, 2), gpt.split_params(gpt.init(CONFIG), CONFIG, 2)
    tokens = torch.randint(0, 64, (4, 32))
    parts = [(tokens, tokens)] * 2
    work = Work(stages, dict(enumerate(params)), parts, [0.5] * 2, {}, eager=True)
    matrices = sorted(tuple(x.shape) for x in tree.leaves(params[1]) if x.ndim == 2)
    seen = []
    for number in (0, 1):
        for stage in (0, 1):
            work.compute(Action(stage, "F", number))
        with Called() as called:
            for kind in kinds:
                work.compute(Action(1, kind, number))
        seen.append(called.found)
    once, again = ([x for x in found if x[0] == "addmm_"] for found in seen)
    assert once == []
    assert sorted(shape for _, shape in again) == matrices
    products = [sum(name == "mm" for name, _ in found) for found in seen]
    assert products[0] - products[1] == len(matrices)


def test_remat_saves_inputs_alone() -> None:
    work, params = started(remat=True)
    (_, first), (_, last) = work.saved[0, 0], work.saved[1, 0]
    assert held(first, params) == 4 * 32 * 8  # the tokens
    assert held(last, params) == 4 * 32 * 8 + 4 * 32 * 64 * 4  # and the carry


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_a_trace_with_copied_nodes_is_the_trace_of_a_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of an abstract rank, whose copied nodes are torch's own to the last shape."""
    (batch,), mesh = batches(), zf.Mesh(pp=2, dp=2).abstract()

    def last(params: Any, carry: Any, batch: Any) -> Tensor:
        return zf.pmean(tail(params, carry, batch), "dp")

    def shown() -> list[Any]:
        pipe = zf.pipeline([embed, last], 4, name)
        params = zf.spmd(lambda p: pipe.place(zf.shard(p, 3)), mesh)(make([embed, tail]))
        nodes = zf.jit(zf.spmd(pipe, mesh)).trace(params, batch).graph_module.graph.nodes
        return [
            (node.op, str(node.target), *(tuple(x.shape) for x in tensors_of(node)))
            for node in nodes
        ]

    copied, calls = shown(), []

    def refused(graph: Any, box: Any) -> None:
        calls.append(graph)

    monkeypatch.setattr("zero_fn.pipelining.split.spliced", refused)
    assert copied == shown()
    assert len(calls) >= 8  # a forward and a backward for each of 4 micro-batches


def tensors_of(node: Any) -> list[torch.Tensor]:
    val = node.meta.get("val")
    return [val] if isinstance(val, torch.Tensor) else []
