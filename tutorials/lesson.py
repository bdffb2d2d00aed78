"""What the notebooks share: recorded results, this machine, and a look for plots."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import tvm_fusion
from tvm_fusion.build.bench import BenchResult, compare
from tvm_fusion.compat import process_cpu_count, tvm
from tvm_fusion.planner.plan import Plan
from tvm_fusion.targets import parse_target
from tvm_fusion.tuning.processor import processor_name

#: Measurements of this project's own runs; each file names its machine, date and versions.
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

#: Colours that can be told apart by most people (Okabe and Ito, 2008).
BEFORE, AFTER, THIRD, FOURTH = "#999999", "#0072B2", "#D55E00", "#009E73"

plt.rcParams.update(
    {
        "figure.figsize": (8, 4),
        "figure.dpi": 80,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.bbox": "tight",
    }
)


def recorded(name: str) -> dict[str, Any]:
    """Read a file of recorded results; a table of kernels gets ``rows`` as dicts."""
    found = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    if "columns" in found:
        texts, indexed = found["texts"], set(found["indexed"])
        found["rows"] = [
            {
                column: texts[value] if column in indexed else value
                for column, value in zip(found["columns"], row, strict=True)
            }
            for row in found["rows"]
        ]
    return found


def recorded_table(name: str, heading: str) -> list[dict[str, str]]:
    """Read the first table below a heading of a recorded page, a dict a row."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    heads = [head.strip() for head in lines[0]]
    return [dict(zip(heads, map(str.strip, row), strict=True)) for row in lines[2:]]


def source(found: Mapping[str, Any]) -> str:
    """Where recorded results come from: device, driver, versions, date, commit."""
    version = found.get("tvm") or found["versions"]["tvm"]
    return (
        f"{found['device']}, driver {found['driver']}, TVM {version}, "
        f"{found['date']}, commit {found['commit']}"
    )


def this_machine() -> str:
    """The reader's processor and versions."""
    name = re.sub(r"\s+", " ", processor_name())
    count = process_cpu_count()
    return f"{name}, {count} cores, TVM {tvm.__version__}, tvm_fusion {tvm_fusion.__version__}"


def bench(module: tvm.IRModule, plan: Plan, repeat: int = 7) -> BenchResult:
    """Time a canonical module on this CPU, with a plan's groups and with one kernel per operator, in turns."""
    return compare(module, parse_target("llvm"), plan, repeat=repeat)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns."""
    texts = [list(map(str, row)) for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for number, row in enumerate(texts):
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([first, *rest]).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def caption(text: str) -> None:
    """Write a caption below the current figure and show it; an error where there is nothing in it."""
    figure = plt.gcf()
    if not all(axis.has_data() for axis in figure.axes):
        raise ValueError("a plot without data teaches nothing; look at what was to be drawn")
    figure.canvas.draw()  # so that the labels have their places
    lowest = figure.get_tightbbox().y0 / figure.get_figheight()
    figure.text(0.02, lowest - 0.04, text, fontsize=9, va="top", wrap=True)
    plt.show()
