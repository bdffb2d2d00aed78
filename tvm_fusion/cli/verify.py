"""``tvm-fusion verify``: is the fused model right, as a whole and group by group?"""

from __future__ import annotations

from .options import ModelOptions, PlanOption, SeedOption, decisions
from .output import stage


def verify(
    options: ModelOptions,
    plan: PlanOption = None,
    seed: SeedOption = 0,
) -> int:
    """Compare the fused model with the unfused one, as a whole and group by group.

    A group that differs is named, and the exit code is 1.

    Examples
    --------
    tvm-fusion verify resnet50.onnx
    tvm-fusion verify resnet50.onnx --target cuda --dtype float16 --seed 7
    tvm-fusion verify resnet50.onnx --plan plan.json
    """
    from .. import verify as verify_module

    config, target = options.config(), options.parsed_target()
    decided = decisions(options, plan)
    module = options.load()
    with stage("verifying") as progress:
        report = verify_module(
            module, target, plan=decided, config=config, seed=seed, progress=progress
        )
    print(report)
    return 0 if report.passed else 1
