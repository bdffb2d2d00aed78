"""``tvm-fusion plan``: what would be fused, what not, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from .command import ModelOptions, check_output, stage

#: Columns of the tables in a file or a pipe.
PIPE_WIDTH = 160


def plan(
    options: ModelOptions,
    build: Annotated[
        bool,
        typer.Option(
            "--build", help="Compile the kernels and decide with their registers and spills."
        ),
    ] = False,
    format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Default: text, but json for an output file named *.json."),
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
    tvm-fusion plan bert.onnx --shape input_ids=1,128 --deny softmax
    """
    from .. import plan as make_plan
    from ..report import render_plan

    if output is not None:
        check_output(output, options.model)
    config, target = options.config(), options.parsed_target()
    module = options.load()
    with stage("planning"):
        result = make_plan(module, target, config, name=options.name, build=build)
    if format is None:
        format = "json" if output is not None and output.suffix == ".json" else "text"
    terminal = output is None and sys.stdout.isatty()
    if format == "json":
        text = result.to_json()
    else:
        text = render_plan(result, width=None if terminal else PIPE_WIDTH, color=terminal)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
