"""The reference pages name everything that the code has, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tvm_fusion.cli.command import ModelOptions
from tvm_fusion.guards.base import REASONS
from tvm_fusion.planner import plan as schema

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def documented(text: str) -> set[str]:
    """Names in backquotes in the first cells of the tables of a text."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_reason_codes() -> None:
    assert documented(page("reason-codes.md")) == set(REASONS)


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("Top level", schema.Plan),
        ("`target`", schema.TargetInfo),
        ("`groups`", schema.Group),
        ("`regions`", schema.Region),
        ("`rejected`", schema.Rejection),
        ("`ungrouped`", schema.Ungrouped),
        ("`totals`", schema.Totals),
    ],
)
def test_plan_schema(heading: str, cls: type) -> None:
    section = page("plan-schema.md").split(f"## {heading}\n")[1].split("\n## ")[0]
    assert documented(section) == {field.name for field in dataclasses.fields(cls)}


def test_schema_version() -> None:
    assert f"this page: **{schema.SCHEMA}**" in page("plan-schema.md")


def test_model_options() -> None:
    section = page("cli.md").split("## Options of a model\n")[1].split("\n## ")[0]
    options = {name.split()[0] for name in documented(section)}
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(ModelOptions)}
    assert options == {f"--{name}" for name in fields - {"model"}} | {"--debug"}


def test_links_lead_somewhere() -> None:
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tutorials/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
            assert "://" in link or (file.parent / link).exists(), f"{file.name}: {link}"
