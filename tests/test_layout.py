"""Rules of the tree: order of folders, size of files, docstrings, nothing of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Stages in processing order: a folder imports from itself and from those before it.
ORDER = [
    "frontend", "graph", "strategies", "guards", "planner", "relay", "schedules", "transform", "build",
    "verification", "tuning", "report", "cli",
]  # fmt: skip

#: Modules that every folder may import.
COMMON = {"_version", "config", "errors", "compat", "devices", "targets"}

MAX_LINES = 400


def sources() -> list[Path]:
    """Python files of the package."""
    return sorted([*(ROOT / "tvm_fusion").rglob("*.py"), *(ROOT / "schedules").rglob("*.py")])


def module_name(file: Path) -> str:
    """Dotted name of a package file; ``schedules/`` is part of the package."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "schedules":
        parts.insert(0, "tvm_fusion")
    return ".".join(parts)


def imported_parts(file: Path) -> set[str]:
    """First-level parts of the package (folders and modules) that a file imports anywhere."""
    module = module_name(file).split(".")
    package = module[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            # "from .. import config" imports parts by name, "from ..config import x" does not.
            names = [f"{full}.{alias.name}" for alias in node.names] if full else []
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tvm_fusion.")}
    return found


@pytest.mark.parametrize("file", sources(), ids=module_name)
def test_imports_follow_the_order_of_folders(file: Path) -> None:
    own = module_name(file).split(".")[1]
    imported = imported_parts(file) & {*ORDER, "testing"}
    if own in ("__init__", "api", "pipeline"):
        # The package's face and the list of passes stand above all stages.
        allowed = set(ORDER)
    elif own in COMMON:
        allowed = set()
    elif own == "testing":
        allowed = {*ORDER, "testing"}
    else:
        assert own in ORDER, f"{own} is not in the order of folders; add it to ORDER"
        allowed = set(ORDER[: ORDER.index(own) + 1])
    assert imported <= allowed, f"{own} must not import {sorted(imported - allowed)}"


@pytest.mark.parametrize("file", sources(), ids=module_name)
def test_files_are_short_and_documented(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "a module docstring is missing"


def test_schedules_import_relatively() -> None:
    """An absolute import would make a second module object when the checkout is on sys.path."""
    wrong = [
        module_name(file)
        for file in (ROOT / "schedules").rglob("*.py")
        if re.search(r"^\s*(import|from) (schedules|tvm_fusion)\b", file.read_text(), re.MULTILINE)
    ]
    assert not wrong


def test_version_dependent_names_come_from_compat() -> None:
    """TVM's renamed submodules are named in compat.py only."""
    pattern = re.compile(
        r"^\s*from tvm(\.\w+)* import .*\b(tirx|s_tir|relax|topi|te)\b", re.MULTILINE
    )
    wrong = [
        module_name(file)
        for file in sources()
        if file.name != "compat.py" and pattern.search(file.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_no_path_of_one_machine() -> None:
    """Tracked files name no folder or host of the machine on which they were written."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # Assembled from pieces, so that this file does not match itself.
    roots = "|".join(["work", "farm", "root", "home"])
    pattern = re.compile(rf"(?<![\w.])/({roots})/\w|/tm" r"p/\w|pytho" r"nhosted\.org")
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert not wrong
