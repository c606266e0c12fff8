"""Dense attention in every context of torch.func, against the plain formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from zero_fn.kernels import dense_attention
from zero_fn.kernels.flash_attention import attention_formula


def inputs(*lead: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*lead, 2, 3, 9, 5, dtype=dtype) for _ in range(3)]


def ours(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: dense_attention(q, k, v, causal=causal)


def formula(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: attention_formula(q, k, v, causal, None)


def gradient(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return torch.func.grad(lambda *qkv: f(*qkv).sin().sum(), argnums=(0, 1, 2))


def second(f: Callable[..., Tensor]) -> Callable[..., Any]:
    def norm(*qkv: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in gradient(f)(*qkv)]).sum()

    return torch.func.grad(norm, argnums=(0, 1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("derive", [lambda f: f, gradient, second], ids=["value", "grad", "second"])
def test_equals_the_formula(derive: Callable[..., Any], causal: bool) -> None:
    qkv = inputs()
    torch.testing.assert_close(derive(ours(causal))(*qkv), derive(formula(causal))(*qkv))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, None), (0, None, 0)])
@pytest.mark.parametrize("derive", [lambda f: f, gradient, second], ids=["value", "grad", "second"])
def test_maps_over_a_batch(derive: Callable[..., Any], in_dims: Any) -> None:
    qkv = [x if dim == 0 else x[0] for x, dim in zip(inputs(4), in_dims, strict=True)]
    got = torch.func.vmap(derive(ours(True)), in_dims)(*qkv)
    torch.testing.assert_close(got, torch.func.vmap(derive(formula(True)), in_dims)(*qkv))


def test_gradient_of_a_map() -> None:
    qkv = inputs(4)
    got = gradient(torch.func.vmap(ours(True)))(*qkv)
    torch.testing.assert_close(got, gradient(torch.func.vmap(formula(True)))(*qkv))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles(backend: str) -> None:
    qkv = inputs(4)
    mapped = torch.func.vmap(gradient(ours(True)))
    got = torch.compile(mapped, fullgraph=True, backend=backend)(*qkv)
    torch.testing.assert_close(got, torch.func.vmap(gradient(formula(True)))(*qkv))


def test_traces_to_one_node_a_direction() -> None:
    qkv = inputs(4)
    graph = make_fx(torch.func.vmap(gradient(ours(True))), tracing_mode="fake")(*qkv).graph
    flash = [node for node in graph.nodes if "flash" in str(node.target)]
    assert len(flash) == 2


def test_ordinary_backward() -> None:
    qkv = [x.requires_grad_() for x in inputs()]
    ours(True)(*qkv).sin().sum().backward()
    want = gradient(formula(True))(*[x.detach() for x in qkv])
    torch.testing.assert_close(tuple(x.grad for x in qkv), want)


def test_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"q has shape \(2, 3, 4\)"):
        dense_attention(*[torch.randn(2, 3, 4)] * 3)
