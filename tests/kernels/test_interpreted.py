"""The kernels' arithmetic in Triton's interpreter, a process of its own for each file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parent.parent.parent


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_in_the_interpreter(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout  # and not a file that collected nothing
