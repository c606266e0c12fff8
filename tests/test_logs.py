"""What a run says of each step."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt

from .processes import run_on_processes

CONFIG = gpt.Config(vocabulary=32, length=8, layers=1, heads=2, width=8)


def logged(steps: int) -> list[dict[str, float]]:
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(
        lambda p, b: gpt.loss(p, b, CONFIG), zf.adamw(1e-2), mesh, stage=1, clip=1.0
    )
    tokens = torch.arange(4 * 9).view(4, 9) % 32
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    rows: list[dict[str, float]] = []
    zf.fit(
        step,
        init(gpt.init(CONFIG)),
        [batch] * steps,
        show=False,
        log=rows.append,
        flops_per_token=6.0,
        peak_flops=1e12,
    )
    return rows


def test_numbers_of_a_step() -> None:
    rows = logged(3)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert row["flops_per_second"] == pytest.approx(6 * 32 / row["seconds"])
        assert row["model_flops_utilisation"] == pytest.approx(row["flops_per_second"] / 1e12)
        assert 0 < row["grad_norm_clipped"] <= 1.001
        assert row["grad_norm_clipped"] <= row["grad_norm"]
        assert row["memory_bytes"] > 10 << 20
        assert row["wire_bytes"] == 0  # in one process nothing travels
    assert rows[2]["loss"] < rows[0]["loss"]


def test_on_processes_rank_0_logs_what_it_sends() -> None:
    first, second = run_on_processes(2, logged, 2)
    assert second == []
    # Each leaf is gathered and its gradient scattered, padded to an even length; and three numbers.
    leaves = {id(x): x for x in tree.leaves(gpt.init(CONFIG))}  # tied ones once
    sizes = [x.numel() for x in leaves.values()]
    pieces = sum(-(-n // 2) for n in sizes) * 4
    assert 2 * pieces < first[0]["wire_bytes"] <= 2 * pieces + 3 * 8


def test_what_the_program_counts() -> None:
    rows: list[dict[str, float]] = []

    def step(state: Any, batch: Any) -> Any:
        return state, batch.sum()

    zf.fit(step, 0, [torch.ones(2)], show=False, log=rows.append)
    assert "flops_per_second" not in rows[0]  # a step that nobody can count
    jitted = zf.jit(lambda w, x: (w, (x @ w).sum()))
    zf.fit(jitted, torch.ones(3, 4), [torch.ones(2, 3)], show=False, log=rows.append)
    assert rows[1]["flops_per_second"] * rows[1]["seconds"] == pytest.approx(2 * 2 * 3 * 4)


def test_a_csv_file(tmp_path: Path) -> None:
    log = zf.csv_log(tmp_path / "run.csv")
    for i in range(3):
        log({"step": i, "loss": i / 4})
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [(row["step"], row["loss"]) for row in rows] == [
        ("0", "0.0"),
        ("1", "0.25"),
        ("2", "0.5"),
    ]
    with pytest.raises(ValueError, match=r"the columns are those of the first step; \['norm'\]"):
        log({"step": 3, "loss": 0.0, "norm": 1.0})


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a writer that remembers: the package itself is no dependency."""
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == "runs"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

    fake = type(sys)("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    zf.tensorboard_log("runs")({"step": 4, "loss": 0.5})
    assert written == [("loss", 0.5, 4)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        zf.tensorboard_log("runs")
