"""Makes the notebooks from their texts: runs each and writes the ``.ipynb`` beside the ``.py``.

    python tutorials/build.py                 # all
    python tutorials/build.py 01 05           # some
    python tutorials/build.py --check 01      # run only, write nothing

Edit the ``.py`` (jupytext's percent format), or the notebook in Jupyter with jupytext, which keeps both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent

#: Longest time of one cell in seconds, on a slow and busy machine.
CELL_SECONDS = 600


def texts(wanted: list[str]) -> list[Path]:
    """The texts of the notebooks whose names begin with one of the words (all without a word)."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    return [file for file in found if not wanted or file.name.startswith(tuple(wanted))]


def executed(text: Path) -> nbformat.NotebookNode:
    """Run a notebook from its text in its own folder; an error in a cell is raised."""
    notebook = jupytext.read(text)
    where = {"metadata": {"path": str(FOLDER)}}
    with tempfile.TemporaryDirectory() as sockets:
        # Sockets in files, so that nobody else on the machine can reach the kernel.
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        NotebookClient(notebook, km=kernel, timeout=CELL_SECONDS, resources=where).execute()
    for number, cell in enumerate(notebook.cells):
        # Nothing that differs from run to run but the results themselves.
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        # Progress and logging of libraries is not part of a lesson.
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> int:
    """Run the notebooks that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names, as 01")
    parser.add_argument("--check", action="store_true", help="run only, write nothing")
    options = parser.parse_args()
    for text in texts(options.names):
        started = time.perf_counter()
        try:
            notebook = executed(text)
        except CellExecutionError as error:
            print(f"{text.name}: {error}", file=sys.stderr)
            return 1
        print(f"{text.name}: {time.perf_counter() - started:.0f} s")
        if not options.check:
            nbformat.write(notebook, text.with_suffix(".ipynb"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
