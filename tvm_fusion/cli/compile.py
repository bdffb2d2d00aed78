"""``tvm-fusion compile``: a model file in, a library that plain TVM runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .advice import warn_of_open_inputs
from .options import ModelOptions, PlanOption, WorkDirOption, decisions
from .output import check_output, stage


def compile_model(
    options: ModelOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Library to write, as model.so.")],
    plan: PlanOption = None,
    work_dir: WorkDirOption = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="A group that fails is an error, not a warning."),
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not compare the groups with the unfused operators."),
    ] = False,
    no_records: Annotated[
        bool,
        typer.Option(
            "--no-records", help="Leave out the tuned kernels that come with the package."
        ),
    ] = False,
) -> None:
    """Compile a model, every group one kernel, into a library that runs with plain TVM.

    Examples
    --------
    tvm-fusion compile resnet50.onnx -o resnet50.so
    tvm-fusion compile resnet50.onnx -o resnet50.so --target cuda:sm_90a --dtype float16
    tvm-fusion compile resnet50.onnx -o resnet50.so --plan plan.json --strict
    tvm-fusion compile resnet50.onnx -o resnet50.so --target cuda --work-dir tuned
    """
    from .. import compile as compile_module
    from ..build.library import find_linker

    check_output(output, options.model)
    find_linker()
    config, target = options.config(), options.parsed_target()
    decided = decisions(options, plan)
    module = options.load()
    warn_of_open_inputs(module)
    with stage("verifying groups and compiling") as progress:
        executable = compile_module(
            module,
            target,
            plan=decided,
            config=config if decided is None else None,
            strict=strict,
            verify=not no_verify,
            work_dir=work_dir,
            records=not no_records,
            name=options.name,
            progress=progress,
        )
    with stage(f"writing {output.name}"):
        executable.export(output)
    totals = executable.plan.totals
    print(
        f"{output}: {totals.launches_before} kernel launches unfused, {totals.launches_after} fused"
    )
