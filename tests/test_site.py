"""The documentation site: its generated pages have what the code has, and it builds without a warning."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

from tvm_fusion.cli.app import app
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.registry import GUARDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The pages that are made from the code."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/site/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.generated_pages())


def test_page_of_options(pages) -> None:
    text = pages["cli-options.md"]
    for name, command in typer.main.get_command(app).commands.items():
        children = getattr(command, "commands", {"": command})
        for child, found in children.items():
            words = f"tvm-fusion {name} {child}".strip()
            section = text.split(f"## `{words}`\n")[1].split("\n## ")[0]
            assert f"tvm-fusion {name}" in section.split("```sh\n")[1], words
            for param in found.params:
                if param.param_type_name == "option" and param.name != "help":
                    assert max(param.opts, key=len) in section, (words, param.name)
    assert "None" not in text


def test_page_of_guards(pages) -> None:
    text = pages["guards.md"]
    rows = [line for line in text.split("## Defaults")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == len(GUARDS)
    assert all(f"`{guard.reason}`" in row for guard, row in zip(GUARDS, rows, strict=True))
    for row in rows:  # each guard says what it refuses
        assert len(row.strip("|").split(" | ")[2]) > 20, row
    defaults = text.split("## Defaults")[1].splitlines()
    for field in dataclasses.fields(FusionConfig):
        (row,) = [line for line in defaults if line.startswith(f"| `{field.name}` |")]
        cells = row.strip("|").split(" | ")
        assert cells[2].strip() == f"`{field.default!r}`" and len(cells[3]) > 20, row


def test_page_of_devices(pages) -> None:
    text = pages["devices.md"]
    for arch, device in DEVICES.items():
        assert f"| `{arch}` | {device.name} |" in text
        assert f"- `{arch}`: {device.source}" in text


class Links(HTMLParser):
    """Collects what a page loads (not what it links to)."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(found.get("src") or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found.get("href") or "")


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path) -> None:
    """As ``make docs`` does; a page loads nothing from a network."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the package's docs extra is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    made = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    written = {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert written | {"cli-options.html", "guards.html", "devices.html"} <= made
    for name in made:
        parser = Links()
        parser.feed((tmp_path / name).read_text(encoding="utf-8"))
        assert not [url for url in parser.loaded if re.match(r"(https?:)?//", url)], name
    check_notebooks(tmp_path)
    text = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in ("tvm_fusion.api.compile", "tvm_fusion.config.FusionConfig", "Fuse", "max_depth"):
        assert name in text


def check_notebooks(site: Path) -> None:
    """Each notebook is a page with its code, results and plots, and is in the navigation."""
    notebooks = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.ipynb"))
    home = (site / "index.html").read_text(encoding="utf-8")
    assert len(notebooks) >= 8
    for notebook in notebooks:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        plots = sum("image/png" in output.get("data", ()) for output in outputs)
        page = site / "tutorials" / f"{notebook.stem}.html"
        parser = Links()
        text = page.read_text(encoding="utf-8")
        parser.feed(text)
        shown = [url for url in parser.loaded if url.startswith(notebook.stem)]
        assert len(shown) == plots and all((page.parent / url).is_file() for url in shown)
        assert f"tutorials/{notebook.stem}.html" in home and "tvm_fusion" in text
