"""The README's Python blocks run as pasted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parent.parent / "README.md").read_text(), re.M | re.S
)


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_a_block_runs_as_pasted(place: int, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[place])
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if place == 0:
        (loss,) = re.findall(r"loss ([\d.]+)", done.stdout)
        assert float(loss) < 1.0  # the targets have a variance of 3.5
        assert "f32[8,32] as 1/4 of dp" in done.stdout


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 19
