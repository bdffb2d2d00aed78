"""``tvm-fusion bench``: fused against unfused, interleaved."""

from __future__ import annotations

from .command import ModelOptions, PlanOption, SeedOption, decisions, stage


def bench(
    options: ModelOptions,
    plan: PlanOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time the fused and the unfused model in turns and print medians and their ratio.

    Examples
    --------
    tvm-fusion bench resnet50.onnx
    tvm-fusion bench resnet50.onnx --target cuda --dtype float16
    tvm-fusion bench resnet50.onnx --plan plan.json
    """
    from .. import plan as make_plan
    from ..build.bench import compare

    config, target = options.config(), options.parsed_target()
    decided = decisions(options, plan)
    module = options.load()
    if decided is None:
        with stage("planning"):
            decided = make_plan(module, target, config, name=options.name)
    with stage("compiling and timing") as progress:
        result = compare(module, target, decided, seed=seed, progress=progress)
    print(result)
