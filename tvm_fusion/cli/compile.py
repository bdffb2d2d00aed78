"""``tvm-fusion compile``: a model file in, a library that plain TVM runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command import ModelOptions, stage


def compile_model(
    options: ModelOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Library to write, as model.so.")],
    plan: Annotated[
        Path | None,
        typer.Option(help="Take the decisions from this plan (JSON) instead of planning."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="A group that fails verification or lowering is an error."),
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
    from ..planner import Plan

    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(output.absolute().parent))
    config, target = options.config(), options.parsed_target()
    decided = None
    if plan is not None:
        if any((options.strategies, options.deny, options.max_members, options.max_depth)):
            raise ValueError(
                "--plan holds the decisions already; leave out --strategies, --deny, "
                "--max-members and --max-depth"
            )
        decided = Plan.from_json(plan.read_text(encoding="utf-8"))
    module = options.load()
    with stage("compiling"):
        executable = compile_module(module, target, plan=decided, config=config, strict=strict)
    with stage(f"writing {output.name}"):
        executable.export(output)
    totals = executable.plan.totals
    print(
        f"{output}: {totals.launches_before} kernel launches unfused, {totals.launches_after} now"
    )
