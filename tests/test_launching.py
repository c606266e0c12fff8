"""Processes started from Python and from a shell: results, failures, restarts, two hosts."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.benchmarks.network import Unavailable, two_hosts
from zero_fn.__main__ import main
from zero_fn.launching.starting import Failure

TIMEOUT = 4.0  # seconds that ranks wait for each other in the tests of failures


def total(mesh: zf.Mesh) -> float:
    return zf.spmd(lambda _, x: zf.psum(x.sum(), "dp"), mesh)((), torch.ones(4)).item()


def report(mesh: zf.Mesh, word: str) -> Any:
    print(f"{word} from {mesh.rank}")
    return {"rank": mesh.rank, "sum": total(mesh), "x": torch.full((2,), float(mesh.rank))}


def test_launch_returns_what_all_ranks_return(capfd: pytest.CaptureFixture[str]) -> None:
    found = zf.launch(report, zf.Mesh(dp=2), "hello")
    assert [(x["rank"], x["sum"], x["x"].tolist()) for x in found] == [
        (0, 4.0, [0.0, 0.0]),
        (1, 4.0, [1.0, 1.0]),
    ]
    assert sorted(capfd.readouterr().out.splitlines()) == ["hello from 0", "rank 1: hello from 1"]


def interleave(mesh: zf.Mesh) -> None:
    """Rank 0 prints half a line, rank 1 a whole one, rank 0 the rest; then an open bar."""
    if mesh.rank == 0:
        print("one ü", end="")
    total(mesh)
    if mesh.rank == 1:
        print("two")
    time.sleep(0.05)
    total(mesh)
    if mesh.rank == 0:
        print(" line")
        print("bar: 50 %", end="")
    total(mesh)
    if mesh.rank == 1:
        time.sleep(0.05)
        print("three", end="")


def test_lines_of_other_ranks_come_between_rank_0s(capfd: pytest.CaptureFixture[str]) -> None:
    zf.launch(interleave, zf.Mesh(dp=2))
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["bar: 50 %", "one ü line", "rank 1: three", "rank 1: two"]
    assert lines[0] == "one ü line"


class OwnError(Exception):
    """An exception that cannot be read from a pickle: it takes two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail(mesh: zf.Mesh, how: str) -> float:
    total(mesh)
    if mesh.rank == 1:
        if how == "raise":
            raise ValueError("no good")
        if how == "own":
            raise OwnError(1, 2)
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    return total(mesh)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 of 2 raised ValueError: no good\n\n.*in fail"),
        ("own", r"rank 1 of 2 raised RuntimeError: OwnError: 1 and 2"),
        ("exit", r"rank 1 of 2: its process ended with exit code 3 before"),
        ("kill", r"rank 1 of 2: its process was ended by SIGKILL"),
        ("hang", r"rank 0 of 2 raised .*(T|t)imed out.*\nno word from rank 1"),
    ],
)
def test_the_first_failure_is_what_one_sees(how: str, message: str) -> None:
    with pytest.raises(zf.RankError, match=f"(?s){message}") as found:
        zf.launch(fail, zf.Mesh(dp=2), how, timeout=TIMEOUT)
    assert found.value.rank == (0 if how == "hang" else 1)
    if how == "raise":
        assert isinstance(found.value.__cause__, ValueError)


def test_causes_come_before_echoes() -> None:
    raised = Failure(3, "ValueError", ValueError(), 2.0)
    gone = Failure(2, "ended by SIGKILL", None, 1.0)
    lost = Failure(0, "Connection closed by peer", RuntimeError(), 0.0)
    assert min((lost, gone), key=lambda x: x.order) is gone
    assert min((lost, raised), key=lambda x: x.order) is raised


def test_all_are_ended_within_seconds(tmp_path: Path) -> None:
    """The others, and what they started; of a launch that raises or is killed itself."""
    script = tmp_path / "start.py"
    script.write_text(
        textwrap.dedent("""
        import os, subprocess, sys, time, zero_fn as zf

        def wait(mesh, how):
            child = subprocess.Popen(["sleep", "100"])
            if mesh.rank == 1 and how == "raise":
                time.sleep(1)
                raise ValueError
            print("pids", os.getpid(), child.pid, flush=True)
            time.sleep(100)

        zf.launch(wait, zf.Mesh(dp=2), sys.argv[1])
        """)
    )
    for how in ("raise", "kill"):
        child = subprocess.Popen(
            [sys.executable, script, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None
        line = child.stdout.readline()
        pids = [int(word) for word in line.split() if word.isdigit()]
        assert len(pids) == 2, line
        start = time.monotonic()
        if how == "kill":
            child.kill()
            pids = pids[:1]  # what a rank started is its own to end then
        child.wait(20)
        while any(map(alive, pids)):
            assert time.monotonic() - start < 15
            time.sleep(0.05)
        child.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_functions_of_a_script_and_lambdas_are_sent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import zero_fn as zf\n"
        "factor = 3\n"
        "def f(mesh, x):\n"
        "    return factor * x + mesh.rank\n"
        "print(zf.launch(f, zf.Mesh(dp=2), 5), zf.launch(lambda m: m.shape, zf.Mesh(tp=1)))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.stdout == "[15, 16] [{'tp': 1}]\n", done.stderr
    assert done.stderr == ""


def test_without_cloudpickle_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"pip install 'zero-fn\[launch\]'"):
        zf.launch(lambda mesh: 1, zf.Mesh(dp=2))


def nested(mesh: zf.Mesh) -> str:
    try:
        zf.launch(total, mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_arguments_are_checked() -> None:
    assert all("processes that run already" in x for x in zf.launch(nested, zf.Mesh(dp=2)))
    with pytest.raises(ValueError, match="max_restarts is -1"):
        zf.launch(total, zf.Mesh(dp=2), max_restarts=-1)
    with pytest.raises(TypeError, match="cannot be sent to processes"):
        zf.launch(total, zf.Mesh(dp=2), threading.Lock())


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().mean()


def train(mesh: zf.Mesh, folder: Path, kill: bool) -> list[float]:
    """Eight steps; at the sixth, rank 1 of the first start is killed."""
    init, step = zf.train_step(loss_fn, zf.adamw(0.1), mesh, stage=3)
    data = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(0))

    def batches() -> Any:
        for place, batch in enumerate(data):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if kill and place == 5 and first and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    run = zf.Checkpoints(folder, mesh, every=2)
    return zf.fit(step, init(torch.ones(5)), batches(), checkpoint=run, show=False)[1]


def test_a_launch_goes_on_after_a_kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mesh = zf.Mesh(dp=2)
    want = zf.launch(train, mesh, tmp_path / "a", False)
    assert zf.launch(train, mesh, tmp_path / "b", True, max_restarts=1) == want
    assert "ended by SIGKILL" in capfd.readouterr().err
    with pytest.raises(zf.RankError, match="SIGKILL"):
        zf.launch(train, mesh, tmp_path / "c", True)


RUN = """
    import json, os, sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    import zero_fn as zf
    from tests.test_launching import fail, train

    folder, how = sys.argv[1:]
    mesh = zf.Mesh(dp=2, timeout=60)
    if how in ("kill", "no"):
        losses = train(mesh, Path(folder), how == "kill")
        if not mesh.rank:
            Path(folder, "losses.json").write_text(json.dumps(losses))
    else:
        fail(mesh, how.removeprefix("then "))
"""
ROOT = str(Path(__file__).parent.parent)


def run_script(tmp_path: Path, *options: str, how: str, folder: str = "run") -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RUN.format(root=ROOT)))
    command = [sys.executable, "-m", "zero_fn", "run", "--nproc", "2", *options]
    done = subprocess.run(
        [*command, script, tmp_path / folder, how], capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stderr


def test_run_goes_on_after_a_kill(tmp_path: Path) -> None:
    code, error = run_script(tmp_path, how="no", folder="a")
    assert (code, error) == (0, "")
    code, error = run_script(tmp_path, "--max-restarts", "1", how="kill", folder="b")
    assert code == 0, error
    losses = [(tmp_path / folder / "losses.json").read_text() for folder in "ab"]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "zero-fn run: rank 1 raised\n\nTraceback"),
        pytest.param(
            "then kill", "rank 1: its process was ended by SIGKILL", marks=pytest.mark.slow
        ),
    ],
)
def test_run_shows_the_first_failure(how: str, message: str, tmp_path: Path) -> None:
    start = time.monotonic()
    code, error = run_script(tmp_path, how=how)
    assert code == 1
    assert message in error
    assert error.count("Traceback") == (how == "raise")
    assert time.monotonic() - start < 60


def test_run_checks_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    for arguments, message in (
        (["none.py"], "none.py: no such script; -m is for modules"),
        (["--nproc", "0", str(script)], "--nproc is 0; it must be 1 or more"),
        (["--max-restarts", "-1", str(script)], "--max-restarts is -1"),
        (["--nnodes", "2", str(script)], "on which host do they meet?"),
        (["--nnodes", "2", "--host", "no such.host", str(script)], "cannot be reached from here"),
    ):
        assert main(["run", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_hosts(tmp_path: Path) -> None:
    """Two network namespaces: they meet at one address, train, and agree with one host."""
    code, error = run_script(tmp_path, how="no", folder="one")
    assert code == 0, error
    script = tmp_path / "train.py"
    try:
        with two_hosts() as ends:
            command = [sys.executable, "-m", "zero_fn", "run", "--nproc", "1", "--nnodes", "2"]
            command += ["--host", f"{ends[0].address}:29517", "--max-restarts", "1"]
            hosts = [
                subprocess.Popen(
                    [*end.prefix, *command, script, tmp_path / "two", "kill"],
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for end in reversed(ends)
            ]
            for host in hosts:
                _, error = host.communicate(timeout=200)
                assert host.returncode == 0, error
    except Unavailable as reason:
        pytest.skip(str(reason))
    losses = [(tmp_path / folder / "losses.json").read_text() for folder in ("one", "two")]
    assert losses[0] == losses[1]
