"""``tvm-fusion bench``: fused against unfused, interleaved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command import ModelOptions, stage


def bench(
    options: ModelOptions,
    plan: Annotated[
        Path | None,
        typer.Option(help="Take the decisions from this plan (JSON) instead of planning."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """Time the fused and the unfused model in turns and print medians and their ratio.

    Examples
    --------
    tvm-fusion bench resnet50.onnx
    tvm-fusion bench resnet50.onnx --target cuda --dtype float16 --repeat 100
    """
