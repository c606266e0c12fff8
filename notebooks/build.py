"""Executes the notebooks: each ``NN_question.py`` in a clean kernel, into the ``.ipynb`` beside it.

    python -m notebooks.build          # all of them
    python -m notebooks.build 01 03    # some

The ``.py`` (py:percent) is what is written and reviewed; jupytext pairs it with the ``.ipynb``,
whose outputs readers see. What varies from run to run is left out of it: execution counts, times,
random cell ids. The outputs of cells with the tag ``varies`` (wall-clock figures, say) are kept,
but not compared.
"""

import base64
import copy
import io
import os
import sys
import tempfile
from pathlib import Path

import jupytext
import matplotlib.pyplot  # builds the font cache here, where its notice is in no output
import nbformat
import numpy
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
TIME_LIMIT = 300  # seconds for one cell
# What settings of the machine would change in outputs.
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "COLUMNS": "100"}
OURS = ("MPLBACKEND", "MATPLOTLIBRC")


def sources(*numbers: str) -> list[Path]:
    """The sources, all or those of the numbers.

    Raises:
        ValueError: for a number that there is no notebook of.
    """
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    known = [path.name[:2] for path in found]
    for number in numbers:
        if number not in known:
            raise ValueError(f"no notebook {number!r}; there are {', '.join(known)}")
    return [path for path in found if not numbers or path.name[:2] in numbers]


def from_source(source: Path) -> NotebookNode:
    """The notebook of a source, without outputs."""
    return _normalised(jupytext.read(source), source)


def committed(source: Path) -> NotebookNode:
    """The executed notebook beside a source, as it was written."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def execute(source: Path) -> NotebookNode:
    """The notebook of a source, executed in a clean kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    notebook = from_source(source)
    client = NotebookClient(
        notebook,
        timeout=TIME_LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        coalesce_streams=True,  # a stream comes in pieces, cut by chance
    )
    with tempfile.TemporaryDirectory() as empty:
        kept = {name: value for name, value in os.environ.items() if name not in OURS}
        client.execute(env={**kept, **SETTINGS, "IPYTHONDIR": empty})
    return _normalised(notebook, source)


def text(notebook: NotebookNode) -> str:
    """The bytes of an ``.ipynb``, as text."""
    return nbformat.writes(notebook) + "\n"


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    """What source and notebook must agree in."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def differences(before: NotebookNode, after: NotebookNode) -> list[str]:
    """Where the outputs of two executions differ, but for the cells that say that theirs do."""
    found = []
    for old, new in zip(before.cells, after.cells, strict=True):
        if new.cell_type != "code" or "varies" in new.metadata.get("tags", []):
            continue
        olds, pictures = _without_pictures(old.outputs)
        news, others = _without_pictures(new.outputs)
        if olds != news:
            found.append(f"{new.id} wrote {news}, and {olds} is committed")
        if len(pictures) != len(others) or not all(map(_same_picture, pictures, others)):
            found.append(f"{new.id} drew another picture than the one that is committed")
    return found


def _normalised(notebook: NotebookNode, source: Path) -> NotebookNode:
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for place, cell in enumerate(notebook.cells):
        cell.id = f"{source.name[:2]}-{place:02}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def _without_pictures(outputs: list[NotebookNode]) -> tuple[list[NotebookNode], list[str]]:
    outputs, pictures = copy.deepcopy(outputs), []
    for output in outputs:
        if "image/png" in output.get("data", {}):
            pictures.append(output.data.pop("image/png"))
    return outputs, pictures


def _same_picture(a: str, b: str) -> bool:
    """Whether two PNGs show the same.

    Their bytes depend on the library that packs them. A curve whose values differ in the last
    digit, as sums do from one processor to another, has the edges of its line a shade apart.
    """
    x, y = (matplotlib.pyplot.imread(io.BytesIO(base64.b64decode(png))) for png in (a, b))
    return x.shape == y.shape and bool((numpy.abs(x - y) <= 0.05).all())


def main() -> None:
    for source in sources(*sys.argv[1:]):
        print(source.stem, flush=True)
        source.with_suffix(".ipynb").write_text(text(execute(source)))


if __name__ == "__main__":
    main()
