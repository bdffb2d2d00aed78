"""``tvm-fusion compile``: a model file in, a library that plain TVM runs out."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from .command import ModelOptions, PlanOption, decisions, stage


def compile_model(
    options: ModelOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Library to write, as model.so.")],
    plan: PlanOption = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="A group that fails is an error, not a warning."),
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not compare the groups with the unfused operators."),
    ] = False,
) -> None:
    """Compile a model, every group one kernel, into a library that runs with plain TVM.

    Examples
    --------
    tvm-fusion compile resnet50.onnx -o resnet50.so
    tvm-fusion compile resnet50.onnx -o resnet50.so --target cuda:sm_90a --dtype float16
    tvm-fusion compile resnet50.onnx -o resnet50.so --plan plan.json --strict
    """
    from .. import compile as compile_module

    folder = output.absolute().parent
    if not folder.is_dir():
        # Said now, not after minutes of compiling.
        raise FileNotFoundError(2, "No such folder", str(folder))
    config, target = options.config(), options.parsed_target()
    decided = decisions(options, plan)
    module = options.load()
    with stage("verifying groups and compiling") as progress:
        executable = compile_module(
            module,
            target,
            plan=decided,
            config=config,
            strict=strict,
            name=options.name,
            progress=progress,
        )
    with stage(f"writing {output.name}"):
        executable.export(output)
    totals = executable.plan.totals
    print(
        f"{output}: {totals.launches_before} kernel launches unfused, {totals.launches_after} fused"
    )


def check_output(output: Path, model: Path) -> None:
    """Refuse an output that cannot be a new library, before any work is done."""
    folder = output.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is not a file; name the library to write, as in -o model.so")
    if output.exists() and output.samefile(model):
        raise ValueError(f"{output} is the model itself; name another file with -o")
