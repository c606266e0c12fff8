"""The notebooks run from a clean kernel, and come out as they are committed."""

from pathlib import Path

import pytest

from notebooks import build

SOURCES = build.sources()
each = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def test_there_are_notebooks() -> None:
    assert {"01", "02", "03", "04", "05", "07"} <= {source.name[:2] for source in SOURCES}


@each
def test_source_and_notebook_agree(source: Path) -> None:
    notebook = build.committed(source)
    assert build.cells(notebook) == build.cells(build.from_source(source)), (
        f"python -m notebooks.build {source.name[:2]}"
    )
    text = source.with_suffix(".ipynb").read_text()
    assert build.text(notebook) == text, "written by another program; build it again"


@each
def test_a_notebook_asks_answers_draws_and_asserts(source: Path) -> None:
    notebook = build.committed(source)
    first = notebook.cells[0].source.splitlines()
    assert first[0].startswith("# ")
    assert first[0].endswith("?")
    pictures = [
        place
        for place, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if {"image/png", "text/html"} & set(output.get("data", {}))
    ]
    assert pictures, "nothing is drawn"
    assert pictures[0] <= 6, "a picture early"
    assert sum("assert " in source for _, source in build.cells(notebook)) >= 4
    assert "GPU" in notebook.cells[-1].source


@each
def test_outputs_hold_no_error_and_nothing_by_chance(source: Path) -> None:
    for cell in build.committed(source).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", cell.id
            assert output.get("name") != "stderr", f"{cell.id}: {output.text}"
            assert " at 0x" not in str(output), f"{cell.id} shows an address"
            data = output.get("data", {})
            shown = "image/png" in data or not data.get("text/plain", "").startswith("<Figure")
            assert shown, f"{cell.id} has a picture that nobody sees"


@each
def test_it_comes_out_as_committed(source: Path) -> None:
    assert build.differences(build.committed(source), build.execute(source)) == []
