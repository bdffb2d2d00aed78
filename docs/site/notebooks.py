"""The notebooks as pages of the site, with their code, results and plots as they were committed (a hook of MkDocs).

``mkdocs.yml`` names this file. Nothing is run: what the pages show is in the ``.ipynb``, which
``python tutorials/build.py`` writes and the tests run again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))

#: The navigation's entry to which the pages are added.
SECTION = "Tutorials"


def on_config(config: Any) -> Any:
    """List the notebooks in the navigation, in their order (called by MkDocs)."""
    (section,) = [entry[SECTION] for entry in config.nav if SECTION in entry]
    section += [{title_of(notebook): page_of(notebook)} for notebook in NOTEBOOKS]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook, and its plots (called by MkDocs)."""
    from mkdocs.structure.files import File

    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "tutorials/index.md", content=with_site_links(readme)))
    for notebook in NOTEBOOKS:
        text, pictures = rendered(notebook)
        files.append(File.generated(config, page_of(notebook), content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of other pages to notebooks lead to their pages (called by MkDocs)."""
    markdown = markdown.replace("](../tutorials/README.md)", "](tutorials/index.md)")
    return re.sub(r"\]\(\.\./(tutorials/\d\d_\w+)\.ipynb\)", r"](\1.md)", markdown)


def page_of(notebook: Path) -> str:
    """Where the page of a notebook stands in the site."""
    return f"tutorials/{notebook.stem}.md"


def title_of(notebook: Path) -> str:
    """The first heading of a notebook, without its ``#``."""
    first = nbformat.read(notebook, as_version=4).cells[0].source
    return first.splitlines()[0].removeprefix("# ")


def rendered(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its plots by file name.

    Parameters
    ----------
    notebook : Path
        An ``.ipynb`` with results.
    """
    from nbconvert import MarkdownExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    found = nbformat.read(notebook, as_version=4)
    found, _ = CoalesceStreamsPreprocessor().preprocess(
        found, {}
    )  # what was printed in parts is one block
    found.metadata["language_info"] = {"name": "python"}  # for the colours of the code
    # Its folder would be a second place of the pictures; their names begin with the notebook's instead.
    resources = {"unique_key": notebook.stem, "output_files_dir": ""}
    body, resources = MarkdownExporter().from_notebook_node(found, resources)
    heading, _, rest = body.strip().partition("\n")
    note = f"*The notebook `tutorials/{notebook.name}`, as it was run for this page.*"
    return with_site_links(f"{heading}\n\n{note}\n{rest}\n"), dict(resources["outputs"])


def with_site_links(markdown: str) -> str:
    """Text of ``tutorials/`` with links to the site's pages of notebooks and documentation."""
    markdown = re.sub(r"\]\((\d\d_\w+)\.ipynb\)", r"](\1.md)", markdown)
    return re.sub(r"\]\(\.\./docs/([\w-]+\.md)", r"](../\1", markdown)
