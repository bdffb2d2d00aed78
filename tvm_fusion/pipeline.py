"""The passes between a canonical module and machine code, in order."""

from __future__ import annotations

from .compat import Target, relax, tvm


def before_lowering() -> list[tvm.transform.Pass]:
    """Passes on operators that must run before they are lowered."""
    return [
        # Sorting and sampling have library kernels; legalising them first would hide the operators.
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
    ]


def after_scheduling(target: Target) -> list[tvm.transform.Pass]:
    """Passes from scheduled PrimFuncs to what TVM's VM runs.

    TVM's own default pipeline without LegalizeOps (done, with float32 accumulation) and without
    FuseOps and FuseTIR: the plan has decided what is one kernel, and the unfused baseline must stay
    unfused.
    """
    passes: list[tvm.transform.Pass] = []
    if target.kind.name == "cuda":
        # Only for functions that no template of ours accepted.
        from tvm.s_tir import dlight

        passes.append(
            dlight.ApplyDefaultSchedule(
                dlight.gpu.Matmul(),
                dlight.gpu.GEMV(),
                dlight.gpu.Reduction(),
                dlight.gpu.GeneralReduction(),
                dlight.gpu.Fallback(),
            )
        )
    passes += [
        relax.transform.RewriteDataflowReshape(),  # reshapes become views: needs the dataflow block
        relax.transform.DeadCodeElimination(),  # their functions would become kernels that nobody calls
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),  # calls that write into buffers are impure
        relax.transform.CallTIRRewrite(),  # allocations become explicit
        relax.transform.StaticPlanBlockMemory(),  # needs explicit allocations
    ]
    if target.kind.name == "cuda":
        passes.append(relax.transform.RewriteCUDAGraph())  # needs planned memory
    passes += [
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    return passes


def build_pipeline(target: Target) -> tvm.transform.Pass:
    """`after_scheduling` as one pass, for ``tvm.compile(..., relax_pipeline=…)``."""

    @tvm.transform.module_pass(opt_level=0, name="tvm_fusion.BuildPipeline")
    def pipeline(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        with target:
            return tvm.transform.Sequential(after_scheduling(target))(mod)

    return pipeline
