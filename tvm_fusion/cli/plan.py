"""``tvm-fusion plan``: what would be fused, what not, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .advice import warn_of_open_inputs
from .options import ModelOptions
from .output import PIPE_WIDTH, check_output, stage, write_text

if TYPE_CHECKING:
    from ..compat import tvm
    from ..planner import Plan

#: Format of an output file by its suffix.
_FORMATS = {".json": "json", ".html": "html", ".htm": "html"}


def plan(
    options: ModelOptions,
    build: Annotated[
        bool,
        typer.Option(
            "--build", help="Compile the kernels and decide with their registers and spills."
        ),
    ] = False,
    format: Annotated[
        Literal["text", "json", "html"] | None,
        typer.Option(help="Default: by the name of the output file (*.json, *.html), else text."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")
    ] = None,
) -> None:
    """Show which operators would be fused, what that saves, and why others stay alone.

    Examples
    --------
    tvm-fusion plan resnet50.onnx
    tvm-fusion plan resnet50.onnx --target cuda:sm_90a --dtype float16 --format json -o plan.json
    tvm-fusion plan resnet50.onnx -o plan.html
    tvm-fusion plan bert.onnx --shape input_ids=1,128 --deny softmax
    """
    from .. import plan as make_plan

    if output is not None:
        check_output(output, options.model)
    config, target = options.config(), options.parsed_target()
    module = options.load()
    warn_of_open_inputs(module)
    with stage("planning"):
        result = make_plan(module, target, config, name=options.name, build=build)
    if format is None:
        format = "text" if output is None else format_of(output)
    terminal = output is None and sys.stdout.isatty()
    text = plan_text(result, module, format, terminal=terminal)
    if output is None:
        print(text)
    else:
        write_text(output, text + "\n")


def format_of(file: Path) -> str:
    """Format of a plan in a file: by its name."""
    return _FORMATS.get(file.suffix.lower(), "text")


def plan_text(result: Plan, module: tvm.IRModule, format: str, *, terminal: bool = False) -> str:
    """Return a plan as JSON, as a page, or as tables."""
    from ..report import render_html, render_plan

    if format == "json":
        return result.to_json()
    if format == "html":
        with stage("drawing"):
            return render_html(result, module)
    return render_plan(result, width=None if terminal else PIPE_WIDTH, color=terminal)
