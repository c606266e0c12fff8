"""Every kernel in every context: equal to its formula there, one op in a graph, or a loud error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import zero_fn as zf
from tests.kernels.matrix import CONTEXTS, KERNELS, Function, Kernel, grad, scalar

BATCH = 3

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
contexts = pytest.mark.parametrize("context", list(CONTEXTS))


def rows(kernel: Kernel, dim: int = 0) -> list[Tensor]:
    """Different arguments for every row of a batch, stacked at ``dim``."""
    each = [kernel.arguments() for _ in range(BATCH)]
    return [torch.stack(xs, min(dim, xs[0].ndim)) for xs in zip(*each, strict=True)]


def mapped(kernel: Kernel, which: str) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Arguments, and which of their dimensions are mapped."""
    whole = rows(kernel, 1 if which == "inner" else 0)
    places = kernel.some if which == "some" else kernel.every
    dims = [
        (min(1, x.ndim - 1) if which == "inner" else 0) if place in places else None
        for place, x in enumerate(whole)
    ]
    xs = [x if dim is not None else x[0] for x, dim in zip(whole, dims, strict=True)]
    return xs, tuple(dims)


@kernels
@contexts
def test_equals_the_formula(kernel: Kernel, context: str) -> None:
    derive, xs = CONTEXTS[context], kernel.arguments()
    torch.testing.assert_close(derive(kernel.function)(*xs), derive(kernel.formula)(*xs))


@kernels
@pytest.mark.parametrize("context", [name for name in CONTEXTS if name != "backward"])
@pytest.mark.parametrize("which", ["all", "some", "inner"])
def test_mapped(kernel: Kernel, which: str, context: str) -> None:
    derive = CONTEXTS[context]
    xs, dims = mapped(kernel, which)
    got = torch.func.vmap(derive(kernel.function), dims)(*xs)
    torch.testing.assert_close(got, torch.func.vmap(derive(kernel.formula), dims)(*xs))


@kernels
def test_mapped_over_something_else(kernel: Kernel) -> None:
    """None of the kernel's inputs is mapped."""
    xs = kernel.arguments()

    def f(function: Function) -> Function:
        return torch.func.vmap(lambda scale: grad(function)(*xs)[0] * scale)

    scales = torch.arange(3.0, dtype=torch.float64)
    torch.testing.assert_close(f(kernel.function)(scales), f(kernel.formula)(scales))


@kernels
@pytest.mark.parametrize("which", ["all", "some"])
def test_gradient_of_a_map_and_maps_within_maps(kernel: Kernel, which: str) -> None:
    xs, dims = mapped(kernel, which)

    def of_map(function: Function) -> Function:
        return grad(torch.func.vmap(function, dims))

    torch.testing.assert_close(of_map(kernel.function)(*xs), of_map(kernel.formula)(*xs))

    # the outer map is over other inputs
    outer = [None if dim is not None else 0 for dim in dims] if which == "some" else [0] * len(xs)
    wider = [
        torch.stack([x, x + 0.5]) if place is not None else x
        for x, place in zip(xs, outer, strict=True)
    ]

    def nested(function: Function) -> Function:
        return torch.func.vmap(torch.func.vmap(grad(function), dims), tuple(outer))

    torch.testing.assert_close(nested(kernel.function)(*wider), nested(kernel.formula)(*wider))


def _compiled_forms(kernel: Kernel) -> dict[str, tuple[Callable[[Function], Function], list[Any]]]:
    xs, dims = mapped(kernel, "all")
    one = kernel.arguments()
    return {
        "call": (lambda f: f, one),
        "grad": (grad, one),
        "vmap": (lambda f: torch.func.vmap(f, dims), xs),
        "vmap(grad)": (lambda f: torch.func.vmap(grad(f), dims), xs),
        "grad(vmap)": (lambda f: grad(torch.func.vmap(f, dims)), xs),
    }


COMPILED = [
    *[(form, "aot_eager") for form in ("call", "grad", "vmap", "vmap(grad)", "grad(vmap)")],
    ("vmap(grad)", "eager"),
    ("vmap(grad)", "inductor"),
]


@kernels
@pytest.mark.parametrize(("form", "backend"), COMPILED, ids=str)
def test_compiled(kernel: Kernel, form: str, backend: str) -> None:
    derive, xs = _compiled_forms(kernel)[form]
    torch._dynamo.reset()
    got = torch.compile(derive(kernel.function), fullgraph=True, backend=backend)(*xs)
    torch.testing.assert_close(got, derive(kernel.formula)(*xs))


@kernels
def test_backward_of_what_is_compiled(kernel: Kernel) -> None:
    torch._dynamo.reset()
    xs = kernel.arguments()
    ready = torch.compile(kernel.function, fullgraph=True, backend="aot_eager")
    want = CONTEXTS["backward"](kernel.formula)(*xs)
    torch.testing.assert_close(CONTEXTS["backward"](ready)(*xs), want)


@kernels
@pytest.mark.parametrize("form", ["call", "grad", "vmap", "vmap(grad)", "grad(vmap)"])
def test_traced_to_one_op(kernel: Kernel, form: str) -> None:
    derive, xs = _compiled_forms(kernel)[form]
    graph_module = make_fx(derive(kernel.function), tracing_mode="fake")(*xs)
    targets = [
        node.target._schema.name
        for node in graph_module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    # A gradient by a formula needs no result of the op: tracing keeps the call all the same.
    assert targets.count(kernel.op) == 1
    torch.testing.assert_close(graph_module(*xs), derive(kernel.formula)(*xs))


@kernels
def test_recomputed(kernel: Kernel) -> None:
    xs = kernel.arguments()
    got = grad(zf.remat(kernel.function))(*xs)
    torch.testing.assert_close(got, grad(kernel.formula)(*xs))


@kernels
def test_on_simulated_ranks(kernel: Kernel) -> None:
    xs = kernel.arguments()
    batch = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)

    def step(function: Function) -> Function:
        def local(xs: Any, batch: Tensor) -> Any:
            def loss(xs: Any) -> Tensor:
                xs = [zf.pvary(x, "dp") for x in xs]
                return zf.pmean(scalar(function)(xs[0] * batch.sum(), *xs[1:]), "dp")

            return xs, zf.grad(loss)(xs)

        return zf.spmd(local, zf.Mesh(dp=2))

    torch.testing.assert_close(
        step(kernel.function)(tuple(xs), batch), step(kernel.formula)(tuple(xs), batch)
    )


@kernels
def test_forward_mode_is_refused(kernel: Kernel) -> None:
    xs = tuple(kernel.arguments())
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(kernel.function, xs, xs)
