"""The demo, in small: it trains, reports and checks; on two processes it prints the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_fn.__main__ import main
from zero_fn.demo import byte_entropy, read_text, sample

TINY = ["demo", "--preset", "tiny", "--steps", "25"]


def losses(text: str) -> list[str]:
    return re.findall(r"step +\d+: loss [\d.]+|held-out loss [\d.]+", text)


@pytest.mark.parametrize(("dp", "tp", "stage"), [(1, 1, 0), (3, 1, 2), (4, 1, 3), (2, 2, 1)])
def test_trains_reports_and_checks(
    dp: int, tp: int, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--dp", str(dp), "--tp", str(tp), "--stage", str(stage)]) == 0
    out = capsys.readouterr().out
    assert "the first 20 steps run dense, with torch.optim alone: losses agree" in out
    found = losses(out)
    first, last = (float(line.split()[-1]) for line in (found[0], found[-2]))
    assert last < first - 1
    assert len(re.findall(r"│ rank \d", out)) == dp * tp
    rows = [re.findall(r"\d+\.\d+", line) for line in out.splitlines() if "│" in line]
    measured, formula = rows[0], rows[-1]
    # padding adds less than one value a leaf; what stages 1 and 2 say is whole rests as pieces
    for column in {0: (0, 1, 2), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}[stage]:
        assert float(measured[column]) == pytest.approx(float(formula[column]), abs=0.002)


def test_trains_on_three_axes(capsys: pytest.CaptureFixture[str]) -> None:
    """8 simulated ranks in one process, which all hold all stages; processes are below."""
    arguments = ["--steps", "3", "--pp", "2", "--dp", "2", "--tp", "2"]
    assert main([*TINY, *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 stages, 4 micro-batches: 1f1b" in out
    assert "the first 3 steps run dense, with torch.optim alone: losses agree" in out
    assert len(re.findall(r"│ rank \d", out)) == 8


def test_trains_on_one_bit_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps", "10", "--dp", "2", "--compress", "1bit"]) == 0
    out = capsys.readouterr().out
    assert "2 steps at full precision, then one bit a value" in out
    assert "the first 2 steps run dense, with torch.optim alone: losses agree" in out
    assert main([*TINY, "--dp", "2", "--compress", "1bit", "--stage", "3"]) == 2
    assert "use stage 0 or 1" in capsys.readouterr().err


def test_trains_with_sparse_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps", "10", "--dp", "2", "--attention", "bigbird"]) == 0
    out = capsys.readouterr().out
    assert "bigbird: Layout(128 × 128, any heads, block 16, 25 blocks" in out
    assert "the first 10 steps run dense, with torch.optim alone: losses agree" in out


@pytest.mark.parametrize(
    ("processes", "axes"),
    [
        (2, ["--dp", "2"]),
        (2, ["--dp", "1", "--tp", "2"]),
        (2, ["--dp", "1", "--pp", "2"]),
        pytest.param(4, ["--dp", "2", "--tp", "2"], marks=pytest.mark.slow),
        pytest.param(4, ["--dp", "2", "--pp", "2"], marks=pytest.mark.slow),
        pytest.param(4, ["--dp", "1", "--pp", "2", "--tp", "2"], marks=pytest.mark.slow),
        pytest.param(8, ["--dp", "2", "--pp", "2", "--tp", "2"], marks=pytest.mark.slow),
    ],
)
def test_processes_print_the_same_losses(
    processes: int, axes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "zero_fn", *TINY, *axes],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert main([*TINY, *axes]) == 0
    simulated = losses(capsys.readouterr().out)
    assert losses(done.stdout) == simulated
    assert len(simulated) == 4


def test_trains_on_any_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 60)
    assert main([*TINY, "--steps", "2", "--dp", "1", "--text", str(tmp_path)]) == 0
    assert "text of 15,360 bytes" in capsys.readouterr().out


def test_wrong_arguments_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("short")
    for arguments, message in (
        (["--tp", "4"], "heads=2 is not divisible by the 4 ranks of 'tp'"),
        (["--tp", "2", "--compress", "1bit"], "gradients of slices do not travel compressed"),
        (["--pp", "5"], "cannot be cut into 5 stages"),
        (["--preset", "huge"], "no preset 'huge'; there are tiny, small"),
        (["--attention", "sparse"], "no attention 'sparse'; there are dense, fixed"),
        (["--text", str(tmp_path / "none")], "no such file or folder"),
        (["--text", str(tmp_path / "short")], "5 bytes are too few"),
    ):
        assert main([*TINY, *arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments in (
        ["--stage", "4"],
        ["--dp", "0"],
        ["--tp", "0"],
        ["--pp", "0"],
        ["--steps", "x"],
        ["--unknown"],
    ):
        with pytest.raises(SystemExit):
            main(["demo", *arguments])


def test_batches_are_pieces_of_the_text() -> None:
    trained, held_out = read_text(None)
    assert len(held_out) * 8 < len(trained)
    tokens, targets = sample(trained, 3, 10, 0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(tokens[0].tolist()) in bytes(trained.numpy())
    assert byte_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(5.545, abs=1e-3)
