"""API pages: they are built from the docstrings, and have every public name."""

import re
import subprocess
import sys
from pathlib import Path

import zero_fn as zf

ROOT = Path(__file__).parent.parent


def test_every_public_name_has_its_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdoc", "zero_fn", "!zero_fn.__main__", "--docformat"]
    subprocess.run(
        [*command, "google", "-o", tmp_path], check=True, capture_output=True, timeout=200, cwd=ROOT
    )
    places = set(re.findall(r'id="([\w.]+)"', (tmp_path / "zero_fn.html").read_text()))
    rooms = {path.stem for path in (tmp_path / "zero_fn").glob("*.html")}
    assert set(zf.__all__) - places <= rooms
    assert {"random", "testing"} <= rooms


def test_make_docs_is_this_command() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "-m pdoc zero_fn '!zero_fn.__main__' --docformat google -o build/docs" in text
