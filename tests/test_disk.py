"""Files: what is left when a process dies, a disk is full, or a file is not what it was."""

import errno
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn import disk

from .offloaded_runs import batch, digest, made

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


class Run:
    """A process that trains with its state in a folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.offloaded_runs", "train", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().split()

    def killed(self) -> list[str]:
        """The digests of the steps that it reported, after it was killed."""
        self.process.kill()
        out, _ = self.process.communicate(timeout=60)
        whole = out.rsplit("\n", 1)[0] if out else ""
        return [line.split()[1] for line in whole.splitlines() if len(line.split()) == 2]


def expected_digests(steps: int) -> list[str]:
    """The digests of the states after 0, 1, 2, ... steps, in memory."""
    state, step = made()
    found = [digest(state)]
    for number in range(steps):
        state, _ = step(state, batch(number))
        found.append(digest(state))
    return found


def survives(folder: Path, kills: int) -> None:
    expected: list[str] = []
    chance = random.Random(0)
    reported = 0
    for _ in range(kills):
        run = Run(folder)
        time.sleep(chance.uniform(0.0, 1.0))
        told = run.killed()
        done = int(zf.restore(made()[0], folder).opt_state.step)
        if done >= len(expected):
            expected = expected_digests(done + 100)
        assert run.first[1] == expected[reported], "it began with another state"
        assert told == expected[reported + 1 : reported + 1 + len(told)]
        # The state on disk is that of the last step it reported, or of one that it finished after.
        state = zf.restore(made()[0], folder)
        assert digest(state) == expected[done], "a state that never was"
        assert done - (reported + len(told)) in (0, 1)
        reported = done
    assert reported > 5 * kills, "kills fell before the steps"


def test_a_process_that_is_killed_leaves_the_old_or_the_new_state(folder: Path) -> None:
    survives(folder, 3)


@pytest.mark.slow
def test_fifty_kills_leave_the_old_or_the_new_state(folder: Path) -> None:
    survives(folder, 50)


@pytest.mark.parametrize("stop", range(10))
def test_a_step_that_fails_at_any_write_leaves_the_old_state(
    stop: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write in turn finds the device broken; the error names its file."""
    monkeypatch.setattr(disk, "CHUNK", disk.PAGE)
    state, step = made()
    state, _ = step(zf.offload(state, folder), batch(0))
    before = digest(state)
    write, count = os.pwrite, iter(range(10**9))

    def broken(fd: int, data: Any, offset: int) -> int:
        if next(count) == stop * 3:
            raise OSError(errno.EIO, "broken")
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match=str(folder)) as caught:
        step(state, batch(1))
    assert caught.value.errno == errno.EIO
    assert "zf.restore" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="was donated"):
        state.opt_state.step + 1
    monkeypatch.setattr(os, "pwrite", write)
    state = zf.restore(made()[0], folder)
    assert digest(state) == before
    expected, run = made()
    for number in range(3):
        expected, _ = run(expected, batch(number))
    for number in (1, 2):
        state, _ = step(state, batch(number))
    assert digest(state) == digest(expected)


def spoiled(folder: Path, how: str) -> Path:
    """Spoil what a folder holds; the file that the error is to name."""
    file = folder / "00002.1.leaf"  # a slot that takes the next value
    if how == "current":
        file = folder / "00002.0.leaf"
    if how == "missing":
        file.unlink()
    elif how == "no manifest":
        file = folder / disk.MANIFEST
        file.unlink()
    elif how == "folder":
        folder.rename(folder.with_name("elsewhere"))
        file = folder / disk.MANIFEST
    else:
        os.truncate(file, 100)
    return file


@pytest.mark.parametrize("how", ["truncated", "current", "missing", "no manifest", "folder"])
def test_a_file_that_is_not_what_it_was(how: str, folder: Path) -> None:
    """The step says which, changes nothing, and goes on when the file is back."""
    home = folder / "state"
    state, step = made()
    state = zf.offload(state, home, where=lambda path, x: "opt_state" in path)
    copies = {file.name: file.read_bytes() for file in home.iterdir()}
    file = spoiled(home, how)
    with pytest.raises(OSError, match=file.name) as caught:
        step(state, batch(0))
    assert str(file) in str(caught.value)
    home.mkdir(exist_ok=True)
    for name, data in copies.items():
        with (home / name).open("r+b" if (home / name).exists() else "wb") as back:
            back.write(data)
    new, _ = step(state, batch(0))
    expected, run = made()
    expected, _ = run(expected, batch(0))
    if how not in ("missing", "folder"):  # a new file is another one than what is mapped
        assert digest(new) == digest(expected)


def test_a_truncated_file_is_not_restored(folder: Path) -> None:
    state = zf.offload({"w": torch.zeros(5000)}, folder)
    os.truncate(folder / "00000.0.leaf", 4096)
    with pytest.raises(OSError, match=r"truncated: the leaf has 20,000 bytes and the file 4,096"):
        zf.restore(state, folder)
    (folder / disk.MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"not a manifest that zf.offload wrote"):
        zf.restore(state, folder)


def test_a_file_that_may_not_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that was mounted read-only; the super-user may write any file."""
    state, step = made()
    state = zf.offload(state, folder)
    before = digest(state)
    opened = os.open

    def refused(file: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and str(file).endswith("00003.1.leaf"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(file, flags, *rest)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match=r"Read-only file system.*00003\.1\.leaf"):
        step(state, batch(0))
    monkeypatch.setattr(os, "open", opened)
    assert digest(state) == before
    step(state, batch(0))


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.shutil.disk_usage(folder)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: real._replace(free=1000))
    with pytest.raises(OSError, match=r"takes 8,192 bytes here.*1,000 are free") as caught:
        zf.offload(torch.zeros(3), folder / "state")
    assert caught.value.errno == errno.ENOSPC
    assert not (folder / "state").exists()


def test_a_disk_that_is_full_leaves_nothing_behind(folder: Path) -> None:
    """Files are limited to 8 KiB: the third leaf finds no room, after two were written."""
    code = (
        "import resource, torch, zero_fn as zf, pathlib\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        f"folder = pathlib.Path({str(folder)!r}) / 'state'\n"
        "try:\n"
        "    zf.offload([torch.zeros(9), torch.zeros(99), torch.zeros(9999)], folder)\n"
        "except OSError as error:\n"
        "    assert '00002.0.leaf' in str(error), error\n"
        "    assert not folder.exists()\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr


def limited(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.offloaded_runs", "memory", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        # So that the allocator gives back what is freed, and memory is what is in use.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )


def test_optimizer_state_that_memory_does_not_hold(folder: Path) -> None:
    """Moments of over 4 times what is allowed beside parameters and gradients, init included."""
    done = limited(folder)
    assert done.returncode == 0, done.stderr
    parameters, moments, allowed, peak = map(int, done.stdout.split())
    assert moments > 4 * allowed
    assert peak < 2 * parameters + allowed
    assert "allocate" in limited(folder / "none").stderr  # in memory it does not fit
