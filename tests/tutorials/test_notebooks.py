"""The notebooks: paired with their texts, made of the parts that each lesson has, and run from end to end."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "tutorials"
TEXTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
#: What running a notebook needs besides the package: its extra "tutorials".
NEEDED = ("jupytext", "matplotlib", "nbclient", "nbformat", "ipykernel", "onnx", "onnxruntime")

lessons = pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)


def cells_of(text: Path) -> list[tuple[str, str]]:
    """Kind and source of each cell of a text in jupytext's percent format."""
    body = text.read_text(encoding="utf-8").split("# ---\n", 2)[2]
    found = []
    for part in re.split(r"^# %%", body, flags=re.MULTILINE)[1:]:
        head, _, source = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        found.append((kind, source.strip()))
    return found


def notebook_of(text: Path) -> dict:
    return json.loads(text.with_suffix(".ipynb").read_text(encoding="utf-8"))


def test_there_are_lessons() -> None:
    assert len(TEXTS) >= 6


@lessons
def test_notebook_and_text_are_the_same(text: Path) -> None:
    """``python tutorials/build.py`` makes the one from the other."""
    cells = [
        (cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook_of(text)["cells"]
    ]
    assert cells == cells_of(text)


@lessons
def test_the_parts_of_a_lesson(text: Path) -> None:
    """A claim with a count, asserts, a measurement on the reader's machine, an honest reading."""
    cells = cells_of(text)
    prose = "\n".join(source for kind, source in cells if kind == "markdown")
    code = "\n".join(source for kind, source in cells if kind == "code")
    assert re.match(rf"# {text.name[:2]} · ", prose)
    claim = prose.split("**The claim.**")[1].split("\n\n")[0]
    assert re.search(r"\d|[Tt]welve|[Ff]our|three", claim)
    assert "## Reading it honestly" in prose
    assert code.count("assert ") >= 4
    assert "bench(" in code and "this_machine()" in code
    # Plots have names on both axes, and a caption.
    assert code.count("set_ylabel") >= code.count("plt.subplots(")
    assert code.count("set_xlabel") >= code.count("plt.subplots(")
    assert code.count("caption(") == code.count("plt.subplots(")


@lessons
def test_results_are_there_and_name_no_machine(text: Path) -> None:
    """What a run printed is in the notebook: no error, no path of the machine that made it."""
    cells = [cell for cell in notebook_of(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert not re.search(r"/(home|root|tmp|work|usr)/", printed)


def test_a_plot_without_data_is_an_error(monkeypatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(plt, "show", lambda: None)
    lesson = importlib.import_module("lesson")
    try:
        _, (full, empty) = plt.subplots(1, 2)
        full.plot([1, 2], [3, 4])
        with pytest.raises(ValueError, match="without data"):
            lesson.caption("half of it")
        empty.plot([1, 2], [3, 4])
        lesson.caption("all of it")
    finally:
        plt.close("all")


@pytest.mark.slow
@lessons
def test_it_runs(text: Path) -> None:
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; install the package's tutorials extra")
    words = [sys.executable, str(FOLDER / "build.py"), "--check", text.name]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
