"""``tvm-fusion bench``: fused against unfused, interleaved."""

from __future__ import annotations

from .options import ModelOptions, PlanOption, SeedOption, WorkDirOption, decisions
from .output import stage


def bench(
    options: ModelOptions,
    plan: PlanOption = None,
    work_dir: WorkDirOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time the fused and the unfused model in turns and print medians and their ratio.

    Examples
    --------
    tvm-fusion bench resnet50.onnx
    tvm-fusion bench resnet50.onnx --target cuda --dtype float16
    tvm-fusion bench resnet50.onnx --plan plan.json
    tvm-fusion bench resnet50.onnx --target cuda --work-dir tuned
    """
    from .. import plan as make_plan
    from ..api import plan_with_records, resolve
    from ..build.bench import compare
    from ..schedules import remembering
    from ..schedules.registry import deciding_by
    from ..tuning.lookup import lookup_in, records_for, tuned_records
    from ..tuning.workbench import device_of

    config, target = options.config(), options.parsed_target()
    decided = decisions(options, plan)
    target, module = resolve(options.load(), target, config, decided)
    records = tuned_records(module, target, work_dir)
    device = device_of(target, None)
    with remembering():
        if decided is None:
            with stage("planning"), deciding_by(lookup_in(records, device)):
                decided = plan_with_records(
                    module, target, records, tuned=work_dir is not None, config=config,
                    name=options.name,
                ) or make_plan(module, target, config, name=options.name)  # fmt: skip
        deciding = deciding_by(lookup_in(records_for(decided, records), device))
        with stage("compiling and timing") as progress, deciding:
            result = compare(module, target, decided, seed=seed, progress=progress)
    print(result)
