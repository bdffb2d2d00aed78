"""The unfused reference: TVM's own lowering, one kernel per operator, in a wider type.

Nothing of this package's legalisation, rewriting or schedules takes part, so an error there cannot
hide; only what maxima, minima and their places are of NaN and infinities, as frameworks define it,
is asked of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..build import tir_pipeline
from ..build.inputs import numpy_dtype
from ..build.model import BUILD_ERRORS
from ..compat import ir, relax, s_tir, tirx, tvm, with_functions
from ..frontend.canonical.convert_dtype import ConvertDtype
from ..frontend.rename import Substitute
from ..transform.infinite_identities import InfiniteIdentities
from ..transform.legalize import NARROW_TYPES, legalize
from ..transform.legalize_places import PLACES
from .batch import join_modules
from .plain_norms import WriteOutNorms

#: Type that a model of each type is referred to: float32 sums lose digits of their own.
REFERENCE_TYPE = {"float32": "float64", "float16": "float32", "bfloat16": "float32"}


def reference_type(dtype: str) -> str:
    """Return the type in which a model of type ``dtype`` is computed for reference."""
    return REFERENCE_TYPE.get(dtype, dtype)


def _compiled(mod: tvm.IRModule) -> Any:
    return tvm.compile(mod, target="llvm", tir_pipeline=tir_pipeline.NAME)


class Reference:
    """A function of a canonical module, compiled unfused in a wider type.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with one canonical function ``main``.
    dtype : str
        The model's type; `reference_type` of it is computed with.
    widen : bool
        False computes in the model's own type, with sums in float32: what rounding between the
        operators alone does.
    """

    def __init__(self, mod: tvm.IRModule, dtype: str, *, widen: bool = True) -> None:
        if widen:
            lowered, self.dtype = lower_reference(mod, dtype)
        else:
            lowered, self.dtype = _ParallelLoops()(legalize(mod)), dtype
        self._function = "main"
        self._vm: Any = relax.VirtualMachine(_compiled(lowered), tvm.cpu())

    @staticmethod
    def of_all(modules: Mapping[str, tvm.IRModule], dtype: str) -> dict[str, Reference]:
        """Compile the references of several modules together."""
        lowered = {name: lower_reference(mod, dtype) for name, mod in modules.items()}
        joined = join_modules({name: mod for name, (mod, _) in lowered.items()})
        vm = relax.VirtualMachine(_compiled(joined), tvm.cpu())
        out = {}
        for name, (_, wide) in lowered.items():
            out[name] = Reference.__new__(Reference)
            out[name].dtype, out[name]._function, out[name]._vm = wide, name, vm
        return out

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Compute the outputs, in the wider type."""
        inputs = [
            tvm.runtime.tensor(a if a.dtype.kind in "iub" else a.astype(numpy_dtype(self.dtype)))
            for a in arrays
        ]
        result = self._vm[self._function](*inputs)
        return [r.numpy() for r in ([result] if hasattr(result, "numpy") else result)]


def lower_reference(mod: tvm.IRModule, dtype: str) -> tuple[tvm.IRModule, str]:
    """Lower a module unfused in the wider type; in its own where TVM has no wider form of an operator.

    Narrow types then still add in float32: what TVM computes of them itself is no reference.

    Returns
    -------
    mod : tvm.IRModule
        The lowered module.
    dtype : str
        The type that it computes in.
    """
    wide = reference_type(dtype)
    passes = [relax.transform.LegalizeOps(PLACES), InfiniteIdentities(), _ParallelLoops()]
    if wide == dtype:
        return tvm.transform.Sequential(passes)(mod), dtype
    try:
        widen = [ConvertDtype(wide), WriteOutNorms(), *passes]
        return tvm.transform.Sequential(widen)(mod), wide
    except BUILD_ERRORS:  # quantisation, for one, is defined on float32 alone
        if dtype in NARROW_TYPES:
            return _ParallelLoops()(legalize(mod)), dtype
        return tvm.transform.Sequential(passes)(mod), dtype


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ParallelReference")
class _ParallelLoops:
    """Run the outer spatial loops of every block in parallel: same arithmetic in the same order, less waiting."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        out = with_functions(mod)
        for gv, func in mod.functions.items():
            if isinstance(func, tirx.PrimFunc) and not relax.analysis.has_reshape_pattern(func):
                out.update_func(gv, parallel_loops(func))
        return out


def parallel_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Run the outer spatial loops of every block of a function in parallel.

    A function that is one block of written loops (TVM's scatter) has no blocks to schedule, and stays as it is.
    """
    body = func.body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.name_hint != "root":
        return func
    sch = s_tir.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        kinds = [v.iter_type for v in sch.get(block).iter_vars]
        loops = sch.get_loops(block)
        spatial = 0
        while spatial < min(len(kinds), len(loops), 2) and kinds[spatial] == tirx.IterVar.DataPar:
            spatial += 1
        if spatial and len(kinds) == len(loops):
            try:
                sch.parallel(sch.fuse(*loops[:spatial]))
            except s_tir.ScheduleError:
                continue  # a block that is not independent in its outer loops stays serial
    result = sch.mod["main"]
    named = func.attrs is not None and "global_symbol" in func.attrs
    return result if named else result.without_attr("global_symbol")


def group_module(func: relax.Function, constants: list[Any]) -> tvm.IRModule:
    """Make a module whose ``main`` is a group's body, with its weights bound.

    Parameters
    ----------
    func : relax.Function
        The group function.
    constants : list
        For each parameter the constant operand of its call, or None where it is an input.
    """
    params, renamed = [], {}
    for param, constant in zip(func.params, constants, strict=True):
        if constant is None:
            fresh = relax.Var(param.name, param.ty)
            params.append(fresh)
            renamed[param] = fresh
        else:
            renamed[param] = constant
    rename = Substitute(renamed)
    bindings = []
    for binding in func.body.blocks[0].bindings:
        fresh = type(binding.var)(binding.var.name, binding.var.ty)
        bindings.append(relax.VarBinding(fresh, rename.visit_expr(binding.value)))
        rename.names[binding.var] = fresh
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], rename.names[func.body.body])
    main = relax.Function(
        params,
        body,
        func.ret_ty,
        attrs=ir.DictAttrs({"global_symbol": "main", "num_input": len(params)}),
    )
    return relax.transform.Normalize()(tvm.IRModule({"main": main}))
