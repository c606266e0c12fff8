"""Models cut into stages for the tests of pipelines, and the dense step in plain torch.

The stages are of different kinds and shapes: an embedding, blocks with carries that are trees of
several dtypes, a stage without parameters, and a head that returns the loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from zero_fn import tree

VOCABULARY, WIDTH, HIDDEN = 7, 5, 6
ROWS = 16  # divisible by 2 ranks of dp times 8 micro-batches
Stage = Callable[[Any, Any, Any], Any]


def embed(params: Any, carry: None, batch: Any) -> Any:
    tokens, _ = batch
    return {"x": params["embedding"][tokens], "even": tokens % 2 == 0}


def block(params: Any, carry: Any, batch: Any) -> Any:
    hidden = torch.tanh(carry["x"] @ params["up"] + params["bias"])
    return {"x": carry["x"] + hidden @ params["down"], "even": carry["even"]}


def plain(params: Any, carry: Any, batch: Any) -> Any:
    """No parameters, another tree of carries."""
    return carry["x"].sin() * torch.where(carry["even"], 1.0, 0.5).unsqueeze(-1), "a constant"


def head(params: Any, carry: Any, batch: Any) -> torch.Tensor:
    x, _ = carry
    return F.cross_entropy(x @ params["out"].T, batch[1])


def tail(params: Any, carry: Any, batch: Any) -> torch.Tensor:
    return head(params, plain((), carry, batch), batch)


def whole(params: Any, carry: None, batch: Any) -> torch.Tensor:
    return tail(params, block(params, embed(params, None, batch), batch), batch)


CUTS: dict[int, list[Stage]] = {
    1: [whole],
    2: [embed, tail],
    3: [embed, block, tail],
    4: [embed, block, plain, head],
    8: [embed, block, block, block, block, block, plain, head],
}


def make(stages: Sequence[Stage], seed: int = 0, tied: bool = False) -> tuple[Any, ...]:
    """The parameters of stages, float64; the same tensor at both ends where they are tied."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    embedding = normal(VOCABULARY, WIDTH)

    def of_block() -> Any:
        return {"up": normal(WIDTH, HIDDEN), "bias": normal(HIDDEN), "down": normal(HIDDEN, WIDTH)}

    def of_stage(stage: Stage) -> Any:
        out = embedding if tied else normal(VOCABULARY, WIDTH)
        if stage is whole:
            return {"embedding": embedding, **of_block(), "out": out}
        if stage is embed:
            return {"embedding": embedding}
        if stage is block:
            return of_block()
        return () if stage is plain else {"out": out}

    return tuple(of_stage(stage) for stage in stages)


def batches(steps: int = 1, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (steps, 2, ROWS), generator=generator)
    return [(step[0], step[1]) for step in tokens]


def loss(stages: Sequence[Stage], params: Any, batch: Any) -> torch.Tensor:
    """The unpipelined loss."""
    carry = None
    for stage, of_stage in zip(stages, params, strict=True):
        carry = stage(of_stage, carry, batch)
    assert isinstance(carry, torch.Tensor)
    return carry


def dense(stages: Sequence[Stage], params: Any, batch: Any) -> tuple[Any, torch.Tensor]:
    """The gradients and value by torch.autograd; a tensor at two places has one gradient."""
    copies: dict[int, torch.Tensor] = {}
    needing = tree.map(lambda x: copies.setdefault(id(x), x.clone().requires_grad_()), params)
    value = loss(stages, needing, batch)
    value.backward()
    return tree.map(lambda x: x.grad, needing), value.detach()


def dense_run(
    stages: Sequence[Stage], params: Any, data: Sequence[Any], clip: float | None = None
) -> tuple[list[float], Any]:
    """Losses and parameters of torch.optim.AdamW."""
    copies: dict[int, torch.Tensor] = {}
    needing = tree.map(lambda x: copies.setdefault(id(x), x.clone().requires_grad_()), params)
    optimizer = torch.optim.AdamW(list(copies.values()), lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = loss(stages, needing, batch)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(copies.values()), clip)
        optimizer.step()
        losses.append(value.item())
    return losses, tree.map(lambda x: x.detach(), needing)


def assert_same(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Trees of the same structure and numbers; the default is float64 in another order of sums."""
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for path, x, y in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        message = f"{path}: {x} against {y}"
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), message
