"""Whole plans run on the CPU: every kernel of a compilation by its generated CUDA source, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tvm_ffi

from ..build.model import lower_plan
from ..compat import Constant, Target, ir, relax, tirx, tvm
from ..config import FusionConfig
from ..pipeline import before_lowering
from ..planner.plan import Plan
from ..schedules import remembering, schedule
from ..schedules.analysis import nodes_of
from ..transform.fuse import plan_module
from ..transform.schedule_groups import TEMPLATE
from . import cuda_emulation


class EmulatedPlan:
    """A model as its plan's kernels compute it, without a GPU.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        A complete CUDA target.
    config : FusionConfig, optional
        Strategies and limits.

    Attributes
    ----------
    plan : Plan
        The groups that are left, with their templates.
    templates : dict of str to str
        Template by kernel; ``"default"`` where none took a function.
    """

    plan: Plan
    templates: dict[str, str]

    def __init__(
        self, mod: tvm.IRModule, target: Target, config: FusionConfig | None = None
    ) -> None:
        config = config or FusionConfig()
        with target:
            mod = tvm.transform.Sequential(before_lowering())(mod)
        with remembering():  # as `compile` does
            plan = plan_module(mod, target, config, model="emulated")
            lowered = lower_plan(mod, plan, target, strict=True)
        self.target, self.plan, self.mod = target, lowered.plan, lowered.mod
        self.templates = {
            gv.name_hint: str((func.attrs or {}).get(TEMPLATE, "default"))
            for gv, func in self.mod.functions_items()
            if isinstance(func, tirx.PrimFunc)
        }

    def __call__(self, *inputs: np.ndarray, backward: bool = False) -> list[np.ndarray]:
        """Run the model (bfloat16 arrays are of ``ml_dtypes.bfloat16``)."""
        main = self.mod["main"]
        values = dict(zip(main.params, inputs, strict=True))

        def value(expr) -> object:
            if isinstance(expr, Constant):
                return expr.value.numpy()
            if isinstance(expr, relax.Tuple):
                return [value(field) for field in expr.fields]
            if isinstance(expr, relax.TupleGetItem):
                return value(expr.tuple_value)[expr.index]
            return values[expr]

        for block in main.body.blocks:
            for binding in block.bindings:
                bound = binding.value
                if isinstance(bound, relax.Call):
                    assert bound.op == ir.Op.get("relax.call_tir")
                    given = [value(arg) for arg in bound.args[1].fields]
                    results = self._run(bound.args[0].name_hint, given, backward)
                    single = not isinstance(binding.var.ty, ir.TupleType)
                    values[binding.var] = results[0] if single else results
                else:
                    values[binding.var] = value(bound)
        result = value(main.body.body)
        return result if isinstance(result, list) else [result]

    def kernels(self) -> dict[str, tirx.PrimFunc]:
        """Functions that are emulated, by name, without those left to TVM's default schedule.

        Their parameters are named ``p0``, ``p1`` and so on.
        """
        return {
            name: _with_own_names(self.mod[name])
            for name, template in self.templates.items()
            if template != "default"
        }

    def _run(self, name: str, given: Sequence[np.ndarray], backward: bool) -> list[np.ndarray]:
        func = self.mod[name]
        kinds = [str(param.ty.dtype) for param in func.params[len(given) :]]
        if self.templates[name] == "default":
            return _on_cpu(func, given)
        bits = [a.view("uint16") if a.dtype == ml_dtypes.bfloat16 else a for a in given]
        results = cuda_emulation.run(_with_own_names(func), bits, self.target, backward=backward)
        return [
            result.view(ml_dtypes.bfloat16) if kind == "bfloat16" else result
            for result, kind in zip(results, kinds, strict=True)
        ]


def _with_own_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every parameter a name of its own: the emulator finds arrays by name."""
    names = {p: tirx.Var(f"p{number}", p.ty) for number, p in enumerate(func.params)}

    def view(node: tirx.DeclBuffer) -> None:
        for var in nodes_of(node.data, tirx.Var):
            if var in names:
                # A kernel's parameters are named after the views of the function's.
                names[node.buffer] = tirx.Var(names[var].name, node.buffer.ty)

    tvm_ffi.structural_walk(func.body, [(tirx.DeclBuffer, view)])
    params = [names[p] for p in func.params]
    body = tvm_ffi.structural_map(func.body, [(tirx.Var, lambda var: names.get(var, var))])
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def _on_cpu(func: tirx.PrimFunc, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run what is left to TVM's default schedule, such as a reshape."""
    target = tvm.target.Target("llvm")
    scheduled, _ = schedule(func.without_attr("tirx.is_scheduled"), target)
    built = tvm.compile(
        tvm.IRModule({"f": scheduled.with_attr("global_symbol", "f")}), target=target
    )
    results = [
        tvm.runtime.tensor(np.zeros([int(e) for e in p.ty.shape], str(p.ty.dtype)))
        for p in func.params[len(given) :]
    ]
    built["f"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in given], *results)
    return [result.numpy() for result in results]
