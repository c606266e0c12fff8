"""Training on the demo's text with compressed communication, beside AdamW: the held-out losses.

python -m tests.benchmarks.convergence --steps 300 --seeds 3
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

import zero_fn as zf
from zero_fn import tree
from zero_fn.demo import read_text, sample
from zero_fn.models import gpt

RANKS, ROWS = 4, 16
SETTINGS: dict[str, Any] = {"weight_decay": 0.1, "mask": lambda path, shape: len(shape) > 1}


def optimizers(steps: int) -> dict[str, Callable[[], Any]]:
    """Each by name; warm-up and frozen variance by the same share of the steps."""
    rate = zf.warmup_cosine(2e-3, min(20, steps // 5), steps)
    settings = {**SETTINGS, "b2": 0.99}  # 1 / (1 - b2) fits into the warm-up
    warm = steps // 5
    return {
        "AdamW": lambda: zf.adamw(rate, **settings),
        "1-bit Adam": lambda: zf.onebit_adam(rate, warm, **settings),
        "0/1 Adam": lambda: zf.zero_one_adam(
            rate, steps * 2 // 5, **settings, local_step_scaler=steps // 5, local_step_clipper=4
        ),
        "signs without feedback": lambda: without_feedback(zf.adamw(rate, **settings)),
    }


def without_feedback(optimizer: Any) -> Any:
    """The optimizer on one-bit gradients whose losses nobody makes up for."""
    base = zf.compressed(optimizer, "1bit")

    def update(grads: Any, state: Any, params: Any) -> Any:
        forgotten = tree.map(
            lambda x: torch.zeros_like(x) if x.is_floating_point() else x, state.error
        )
        return base.update(grads, state._replace(error=forgotten), params)

    return base._replace(update=update)


def held_out_loss(name: str, steps: int, seed: int, preset: str = "tiny") -> float:
    """The mean loss on text that was not trained on, after ``steps`` steps."""
    mesh, config = zf.Mesh(dp=RANKS, backend="simulated"), gpt.preset(preset)
    trained, held_out = read_text(None)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return gpt.loss(params, batch, config)

    init, step = zf.train_step(loss_fn, optimizers(steps)[name](), mesh)
    state = init(gpt.init(config, seed))
    batches = (sample(trained, ROWS, config.length, seed * steps + i) for i in range(steps))
    state, _ = zf.fit(step, state, batches, total=steps, show=False)
    params = zf.gather_tree(state.params, mesh)
    tests = [sample(held_out, 64, config.length, i) for i in range(4)]
    with torch.no_grad():
        return sum(gpt.loss(params, batch, config).item() for batch in tests) / len(tests)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", default="tiny")
    given = parser.parse_args()
    for seed in range(given.seeds):
        losses = {
            name: held_out_loss(name, given.steps, seed, given.preset)
            for name in optimizers(given.steps)
        }
        print(f"seed {seed}: " + ", ".join(
            f"{name} {loss:.4f} ({loss / losses['AdamW'] - 1:+.2%})"
            for name, loss in losses.items()), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
