"""Stock TVM on the same canonical modules: its default CUDA pipeline, and meta-schedule."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from .base import Peer, Ready, gpu_alone
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
    """Meta-schedule with a number of trials (``--stock-tvm-trials``) for a row."""

    def build(self, module: tvm.IRModule, target: Any) -> tuple[Any, dict[str, Any]]:
        trials = int(self.context.options.get("stock_tvm_trials") or 0)
        if not trials:
            raise LookupError("not asked for: give --stock-tvm-trials")
        quick_inspection()()
        import tvm.s_tir.tensor_intrin
        from tvm.s_tir import meta_schedule

        if target.kind.name == "llvm":  # its rules ask for the number of cores
            cores = os.cpu_count() or 1
            target = tvm.target.Target({"kind": "llvm", "num-cores": cores})
        with target, gpu_alone(self.context), tempfile.TemporaryDirectory() as folder:
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
                    initializer=quick_inspection(), timeout_sec=120
                ),
            )
            with found:
                module = relax.transform.MetaScheduleApplyDatabase()(module)
            return tvm.compile(module, target, relax_pipeline=pipeline(target)), {"trials": trials}


def quick_inspection() -> Callable[[], None]:
    """A function that lets ``inspect.stack`` leave out the source text.

    TVM calls it for each of its hundreds of tensor intrinsics, and reading the text takes a minute.
    A closure, because it is sent to the builder's processes by value.
    """

    def use() -> None:
        import inspect
        import sys

        def stack(context: int = 1) -> list[inspect.FrameInfo]:
            del context
            frame, out = sys._getframe(1), []
            while frame:
                code = frame.f_code
                info = inspect.FrameInfo(
                    frame, code.co_filename, frame.f_lineno, code.co_name, None, None
                )
                out.append(info)
                frame = frame.f_back
            return out

        inspect.stack = stack

    return use


def stock_target(device: str) -> Any:
    """TVM's own description of this machine's GPU (with the limits that its rules ask for), or the CPU."""
    from tvm_fusion.targets import parse_target

    return parse_target("cuda" if device == "cuda" else "llvm")


def pipeline(target: Any) -> Any:
    """TVM's default Relax pipeline for a target."""
    return relax.get_default_pipeline(target)
