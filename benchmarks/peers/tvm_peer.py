"""Stock TVM on the same canonical modules: its default CUDA pipeline, and meta-schedule."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import tvm
from tvm import relax

from .base import Context, Peer, Ready, gpu_alone
from .ours import arranged, imported
from .tvm_run import versions, vm_ready


class StockTVM(Peer):
    """TVM's default pipeline: its fusion of operators and its default schedules."""

    def versions(self) -> dict[str, str]:
        return versions()

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        module, target = imported(self.context, row, dtype), stock_target(self.context.device)
        executable, about = self.build(module, target)
        # The virtual machine reads device code from a library as it is exported.
        inputs, last = arranged(self.context, row, dtype)
        with gpu_alone(self.context):
            return vm_ready(executable, inputs, last, self.context.device), about

    def build(self, module: tvm.IRModule, target: Any) -> tuple[Any, dict[str, Any]]:
        """Compile; also return what is to be known of it."""
        with target:
            return tvm.compile(module, target, relax_pipeline=pipeline(target)), {}


class TunedTVM(StockTVM):
    """Meta-schedule with a number of trials (``--stock-tvm-trials``) for a row, its candidates alone on the GPU."""

    def build(self, module: tvm.IRModule, target: Any) -> tuple[Any, dict[str, Any]]:
        trials = int(self.context.options.get("stock_tvm_trials") or 0)
        if not trials:
            raise LookupError("not asked for: give --stock-tvm-trials")
        from tvm.s_tir import meta_schedule

        from tvm_fusion.compat import import_tensor_intrinsics

        import_tensor_intrinsics()
        alone = runner_alone(self.context)
        if target.kind.name == "llvm":  # its rules ask for the number of cores
            cores = os.cpu_count() or 1
            target = tvm.target.Target({"kind": "llvm", "num-cores": cores})
        with target, tempfile.TemporaryDirectory() as folder:
            module = relax.get_pipeline("zero")(module)
            found = meta_schedule.relax_integration.tune_relax(
                mod=module,
                params={},
                target=target,
                work_dir=folder,
                max_trials_global=trials,
                num_trials_per_iter=min(32, trials),
                seed=1,
                builder=meta_schedule.builder.LocalBuilder(
                    initializer=import_tensor_intrinsics, timeout_sec=120
                ),
                runner=alone,
            )
            with found:
                module = relax.transform.MetaScheduleApplyDatabase()(module)
            return tvm.compile(module, target, relax_pipeline=pipeline(target)), {"trials": trials}


def runner_alone(context: Context) -> Any:
    """Meta-schedule's own runner, which holds the GPU while candidates run; other rows are searched and built then."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule

    @derived_object
    class RunnerAlone(meta_schedule.runner.PyRunner):
        def __init__(self) -> None:
            super().__init__()
            self.runner = meta_schedule.runner.LocalRunner()

        def run(self, runner_inputs: list[Any]) -> list[Any]:
            with gpu_alone(context):
                return self.runner.run(runner_inputs)  # they have run when it returns

    return RunnerAlone()


def stock_target(device: str) -> Any:
    """TVM's own description of this machine's GPU (with the limits that its rules ask for), or the CPU."""
    from tvm_fusion.targets import parse_target

    return parse_target("cuda" if device == "cuda" else "llvm")


def pipeline(target: Any) -> Any:
    """TVM's default Relax pipeline for a target."""
    return relax.get_default_pipeline(target)
