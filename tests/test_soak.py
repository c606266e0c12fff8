"""A long run with kills at random moments, gone on each time on another mesh and stage.

python -m pytest -m slow tests/test_soak.py
"""

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf

ROWS, WIDTH, HIDDEN = 12, 6, 8
RULES = {"up.*": 0, "down.weight": 1, "down.bias": None}
SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # dp, tp


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    up, down = params["up"], params["down"]
    hidden = torch.tanh(zf.column_linear(x, up["weight"], up["bias"], axis="tp"))
    return (zf.row_linear(hidden, down["weight"], down["bias"], axis="tp") - y).square().mean()


class Data(Sequence[Any]):
    """As many batches, each a function of its place."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < self.length:
            raise IndexError(place)
        g = torch.Generator().manual_seed(place)
        x = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
        return x, x.sin().sum(1, keepdim=True)


def start(mesh: zf.Mesh, stage: int) -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = {"up": ((HIDDEN, WIDTH), (HIDDEN,)), "down": ((1, HIDDEN), (1,))}
    # float64: what meshes add up in another order stays below 1e-5 over all steps
    params = {
        name: {
            "weight": torch.randn(weight, generator=g, dtype=torch.float64) / 3,
            "bias": torch.zeros(bias, dtype=torch.float64),
        }
        for name, (weight, bias) in shapes.items()
    }
    init, step = zf.train_step(
        loss_fn, zf.adamw(1e-3), mesh, stage=stage, clip=1.0, slice_rules=RULES
    )
    return init(params), step


def train(
    mesh: zf.Mesh, folder: Path, steps: int, stage: int, victim: int, seconds: float | None
) -> list[float]:
    """Train to the end, or until a rank is killed that many seconds after its first step."""
    state, step = start(mesh, stage)
    timers: list[threading.Timer] = []

    def watched(state: Any, batch: Any) -> Any:
        found = step(state, batch)
        if not timers and seconds is not None and mesh.rank == victim:
            timers.append(threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            timers[0].daemon = True
            timers[0].start()
        return found

    run = zf.Checkpoints(folder, mesh, every=10, keep=2, background=True)
    return zf.fit(watched, state, Data(steps), checkpoint=run, show=False)[1]


@pytest.mark.slow
def test_kills_and_other_meshes_change_nothing(tmp_path: Path) -> None:
    steps = int(os.environ.get("SOAK_STEPS", "2000"))
    state, step = start(zf.Mesh(dp=1, tp=1), 0)
    _, want = zf.fit(step, state, Data(steps), show=False)
    draw, kills, losses = random.Random(0), 0, []
    while not losses:
        (dp, tp), stage = draw.choice(SIZES), draw.randrange(4)
        victim, seconds = draw.randrange(dp * tp), draw.uniform(0.2, 8.0)
        before = max(zf.saved_steps(tmp_path), default=0)
        try:
            mesh = zf.Mesh(dp=dp, tp=tp)
            losses = zf.launch(train, mesh, tmp_path, steps, stage, victim, seconds, timeout=60)[0]
        except zf.RankError as error:
            if "SIGKILL" not in str(error):
                raise
            kills += 1
        after = max(zf.saved_steps(tmp_path), default=0)
        print(f"dp {dp} tp {tp} stage {stage}: {before} to {after}, {kills} kills", flush=True)
    assert losses[-1] == pytest.approx(want[-1], rel=1e-5)
    assert losses == pytest.approx(want, rel=1e-5)
