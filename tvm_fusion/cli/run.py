"""``tvm-fusion run``: call a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import SeedOption
from .output import stage


def run_model(
    library: Annotated[
        Path, typer.Argument(metavar="MODEL.so", help="Library written by tvm-fusion compile.")
    ],
    input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE.npy",
            help="Value of an input; repeat for more. Inputs without one are random.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", file_okay=False, help="Folder for the outputs, one .npy file each."
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Run a compiled model once and show (or save) its outputs.

    Examples
    --------
    tvm-fusion run resnet50.so
    tvm-fusion run resnet50.so --input data=image.npy --output results
    """
    from .. import load
    from .arrays import collect_inputs, parse_inputs, save_outputs, summary

    files = parse_inputs(input or [])
    with stage(f"loading {library.name}"):
        executable = load(library)
    signature = executable.signature
    arrays = collect_inputs(signature.inputs, files, seed)
    with stage("running"):
        results = executable(*arrays)
    for tensor, array in zip(signature.outputs, results, strict=True):
        print(f"{tensor.name}: {summary(array)}")
    if output is not None:
        for file in save_outputs(output, signature.outputs, results):
            print(f"wrote {file}")
