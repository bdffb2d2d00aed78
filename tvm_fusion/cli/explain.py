"""``tvm-fusion explain``: why a node is fused as it is."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from .advice import warn_of_open_inputs
from .options import ModelOptions
from .output import PIPE_WIDTH, stage


def explain(
    options: ModelOptions,
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Node of the model (default: sum up the whole model)."),
    ] = None,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="How to print the answer.")
    ] = "text",
) -> None:
    """Say which groups a node could have joined, and what stopped each.

    Examples
    --------
    tvm-fusion explain resnet50.onnx
    tvm-fusion explain resnet50.onnx --node conv1
    tvm-fusion explain bert.onnx --node /encoder/layer.0/MatMul --target cuda:sm_90 --format json
    """
    from .. import explain as make_explanation
    from ..report import render_explanation

    config, target = options.config(), options.parsed_target()
    module = options.load()
    warn_of_open_inputs(module)
    with stage("planning"):
        result = make_explanation(module, target, config, node=node)
    if format == "json":
        print(json.dumps(result.to_dict(), indent=2))
        return
    terminal = sys.stdout.isatty()
    width = None if terminal else PIPE_WIDTH
    print(render_explanation(result, model=options.name, width=width, color=terminal))
