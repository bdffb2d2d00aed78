"""The reference pages name everything that the code has, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tvm_fusion.schedules.cuda import TEMPLATES

import tvm_fusion as tf
from tvm_fusion import config
from tvm_fusion.cli.app import app
from tvm_fusion.cli.options import ModelOptions, option
from tvm_fusion.cli.tune import tune_model
from tvm_fusion.guards.base import OUTCOMES, REASONS
from tvm_fusion.planner import plan as schema
from tvm_fusion.strategies.base import OPTIONS
from tvm_fusion.tuning.allocation import TRIALS
from tvm_fusion.tuning.trials import SCHEMA as TRIAL_SCHEMA
from tvm_fusion.tuning.trials import Trial

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def documented(text: str) -> set[str]:
    """Names in backquotes in the first cells of the tables of a text."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows that begin with a name in backquotes."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_reason_codes() -> None:
    assert documented(page("reason-codes.md")) == set(REASONS)


def test_reason_codes_have_an_outcome_and_an_option_that_exists() -> None:
    known = {option(field.name) for field in dataclasses.fields(ModelOptions)}
    for cells in rows(page("reason-codes.md")):
        assert len(cells) == 5, cells
        assert any(outcome in cells[2] for outcome in OUTCOMES[1:]), cells
        assert set(re.findall(r"--[a-z-]+", cells[4])) <= known, cells


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("Top level", schema.Plan),
        ("`target`", schema.TargetInfo),
        ("`groups`", schema.Group),
        ("`parts`", schema.Part),
        ("`search`", schema.Search),
        ("`regions`", schema.Region),
        ("`rejected`", schema.Rejection),
        ("`ungrouped`", schema.Ungrouped),
        ("`totals`", schema.Totals),
    ],
)
def test_plan_schema(heading: str, cls: type) -> None:
    section = page("plan-schema.md").split(f"## {heading}\n")[1].split("\n## ")[0]
    assert documented(section) == {field.name for field in dataclasses.fields(cls)}


def test_options_of_a_group() -> None:
    section = page("plan-schema.md").split("## `options`\n")[1].split("\n## ")[0]
    found = {cells[0].strip("`"): set(re.findall(r"`(\w+)`", cells[1])) for cells in rows(section)}
    assert found == {key: set(values) for key, values in OPTIONS.items()}


def test_schema_version() -> None:
    assert f"this page: **{schema.SCHEMA}**" in page("plan-schema.md")


def test_fields_of_a_trial() -> None:
    section = page("database.md").split("## `trials.jsonl`\n")[1].split("\n## ")[0]
    assert documented(section) == {f.name for f in dataclasses.fields(Trial)} | {"schema", "trial"}
    assert f"the number **{TRIAL_SCHEMA}**" in section


def test_every_cuda_template_is_told() -> None:
    assert documented(page("kernels.md")) == {template.name for template in TEMPLATES}


def test_files_named_in_the_docs_exist() -> None:
    """Names with a folder or of a module, as ``guards/tiling.py``, are files of the package."""
    folders = (
        ROOT, ROOT / "tvm_fusion", ROOT / "tvm_fusion/guards", ROOT / "schedules/cuda/tensor_core", ROOT / "benchmarks",
    )  # fmt: skip
    pages = (*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md")
    for file in pages:
        for name in re.findall(r"`([\w/]+\.(?:py|cc))`", file.read_text(encoding="utf-8")):
            assert any((folder / name).exists() for folder in folders), f"{file.name}: {name}"


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    """Each table names its commit, and every row of it stands in the page of that commit's measurements."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [file.read_text(encoding="utf-8") for file in ROOT.glob("benchmarks/results/h200-*.md")]
    tables = re.findall(r"^\*\*.*\*\* \(commit (\w+).*\)\n\n((?:\|.*\n)+)", readme, re.MULTILINE)
    assert len(tables) == readme.count("\n| row | ours")
    for commit, table in tables:
        rows = set(table.splitlines())
        assert len(rows) > 5
        found = [
            text for text in pages if f"commit {commit}" in text and rows <= set(text.splitlines())
        ]
        assert found, commit


def test_options_of_tune() -> None:
    section = page("cli.md").split("## `tune`\n")[1].split("\n## ")[0]
    own = set(inspect.signature(tune_model).parameters) - {"options"}
    assert {name.split()[0] for name in documented(section)} == {*map(option, own), "-o"}
    (trials,) = [cells for cells in rows(section) if "--trials" in cells[0]]
    assert trials[-1] == str(TRIALS)


def test_model_options() -> None:
    section = page("cli.md").split("## Options of a model\n")[1].split("\n## ")[0]
    options = {name.split()[0] for name in documented(section)}
    fields = {option(field.name) for field in dataclasses.fields(ModelOptions)}
    assert options == fields - {"--model"} | {"--debug"}


def test_every_field_of_the_configuration_is_an_option_with_its_default() -> None:
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    section = page("cli.md").split("## Options of a model\n")[1].split("\n## ")[0]
    told = {cells[0].strip("`").split()[0]: cells[-1] for cells in rows(section)}
    for field in dataclasses.fields(config.FusionConfig):
        assert field.name in names
        value = told[option(field.name)]
        if isinstance(field.default, int | float):
            assert value == f"{field.default:g}", field.name
        elif isinstance(field.default, str):
            assert value.startswith(field.default), field.name


def test_every_public_name_is_on_the_page_of_python() -> None:
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page("api.md"), re.M)}
    modules = {"__version__", "frontend", "report", "transform"}
    assert {*tf.__all__, *tf.transform.__all__} - modules <= shown


def test_modules_that_the_page_of_python_names_need_no_import_of_their_own() -> None:
    """In a fresh process: here the tests have imported them already."""
    code = "import tvm_fusion as tf; tf.frontend.load, tf.report.render_html, tf.transform.Fuse"
    subprocess.run([sys.executable, "-c", code], check=True)


def shown_functions() -> Iterator[tuple[str, object]]:
    """Name and object of each function, class and public method on the page of Python."""
    for path in re.findall(r"^::: (\S+)", page("api.md"), re.M):
        module, _, name = re.sub("^schedules", "tvm_fusion.schedules", path).rpartition(".")
        found = getattr(importlib.import_module(module), name)
        if inspect.ismodule(found):
            continue
        yield path, found
        for key, value in vars(found).items() if inspect.isclass(found) else ():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and not key.startswith("_"):
                yield f"{path}.{key}", function


@pytest.mark.parametrize(("path", "function"), [*shown_functions()])
def test_what_the_page_of_python_shows_is_documented(path: str, function: object) -> None:
    """A docstring, and in it each parameter that a caller gives."""
    text = inspect.getdoc(function)
    assert text and text[0].isupper(), path
    if inspect.isclass(
        function
    ):  # its fields are in the class's own table, its other methods looked at apart
        return
    given = set(inspect.signature(function).parameters) - {"self", "cls"}
    names = re.findall(r"^(\**\w+(?:, \**\w+)*) : ", text.partition("Returns\n---")[0], re.M)
    told = {name.strip("* ") for line in names for name in line.split(",")}
    assert given <= told, (path, given - told)


#: Pages that the site's build makes from the code (tests/test_site.py).
GENERATED = ("cli-options.md", "devices.md", "guards.md")


def test_links_lead_somewhere() -> None:
    folders = ("", "docs/", "tutorials/", "benchmarks/", "benchmarks/results/")
    for file in [file for folder in folders for file in ROOT.glob(f"{folder}*.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            made = file.parent.name == "docs" and link in GENERATED
            assert "://" in link or made or (file.parent / link).exists(), f"{file.name}: {link}"


def commands() -> list[str]:
    """Calls of the program in the code blocks of the README and the pages."""
    texts = [
        (ROOT / "README.md").read_text(encoding="utf-8"),
        *(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("docs/*.md"))),
    ]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return re.findall(r"^tvm-fusion (.+)$", "\n".join(blocks), re.MULTILINE)


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    name, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(app).commands[name]
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    assert command.make_context(name, words).params  # an unknown option is an exception
