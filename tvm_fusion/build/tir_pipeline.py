"""TVM's lowering of kernels, with launches that overlap where kernels say so, and without a pass where it is idle.

A kernel that waits for its predecessor by itself (``griddepcontrol.wait``, sm_90 and later) may be launched before the
predecessor is complete ("programmatic dependent launch"): its launch, its set-up and its reads of constants then cost
nothing. TVM's runtime launches so when the kernel's launch parameters have a tag, which TVM 0.27 has no way to write
from a function that is not split into host and device yet; a pass below adds it afterwards.

Buffers that blocks allocate are compacted to what is used of them. Kernels that templates write statement by statement
have none and are lowered without that pass (``schedules/allocation.py``), which saves 3 of 4 seconds for a convolution
that reads through a ReLU.

Functions that ``--use_fast_math`` gets wrong are replaced (``schedules/cuda/exact_math.py``), reads of what other
kernels wrote are kept behind the wait for them (``ordered_reads.py``), and maxima and minima keep NaN
(``propagate_nan.py``); for the CPU that is done too, tangents of small numbers are exact (``exact_tanh.py``), and
functions that float16 lacks there are float32's (``float32_functions.py``). Integers are divided by what tensors hold
without a signal (``safe_division.py``).
Infinities of bfloat16 are spelled as C++ has them (``spelled_infinities.py``). Functions whose indices TVM would get
wrong where it flattens buffers come with flat ones (``schedules/flatten_exactly.py``).
"""

from __future__ import annotations

from ..compat import Target, ir, s_tir, tirx, tvm
from ..schedules.allocation import FLATTEN, idle_passes, without_passes
from ..schedules.analysis import nodes_of
from ..schedules.base import arch_number
from ..schedules.cuda.exact_math import exact_functions
from ..schedules.cuda.widened import widened
from ..schedules.flatten_exactly import flatten_exactly
from ..strategies.attributes import NUMERICS
from ..targets import with_variant
from .exact_tanh import ExactTanh
from .float32_functions import Float32Functions
from .ordered_reads import WAIT, device_function, ordered_reads
from .propagate_nan import PropagateNaN
from .safe_division import safe_division
from .spelled_infinities import SpelledInfinities

#: Name under which the pipeline is registered with TVM.
NAME = "tvm_fusion"

#: TVM's spelling.
_TAG = "tirx.use_programtic_dependent_launch"
_PARAMETERS = "tirx.kernel_launch_params"
_DYNAMIC = "tirx.use_dyn_shared_memory"
#: First arch that can.
_LEAST_ARCH = 90
#: How the names of device functions with warpgroup instructions begin.
_WARPGROUP = "tvmf_wgmma"

#: The pass that marks the only function of a module.
_MARK_ONLY = "tirx.AnnotateEntryFunc"


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.LowerKernels")
class LowerKernels:
    """TVM's lowering; functions in which a pass is idle, or does harm, are lowered by themselves, without it."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Lower a module of PrimFuncs."""
        lower, _, _ = s_tir.pipeline.default_s_tir_pipeline()
        # Templates have done this; TVM's default schedules have not.
        functions = {
            gv: flatten_exactly(
                ordered_reads(exact_functions(_rounding_once(f))) if _is_for_cuda(f) else f
            )
            for gv, f in ((gv, safe_division(f)) for gv, f in mod.functions_items())
        }
        mod = tvm.IRModule(functions, attrs=mod.attrs)
        groups: dict[tuple[str, ...], dict] = {}
        for gv, f in functions.items():
            groups.setdefault(_left_out(f), {})[gv] = f
        if len(groups) == 1:
            with without_passes(*next(iter(groups))):
                return lower(mod)
        parts = []
        for idle, some in groups.items():
            with without_passes(_MARK_ONLY, *idle):
                parts.append(lower(tvm.IRModule(some, attrs=mod.attrs)))
        names = [gv.name_hint for part in parts for gv in part.functions]
        if len(set(names)) < len(names):  # a kernel of one has the name of a function of the other
            flat = {gv: flatten_exactly(f, always=True) for gv, f in functions.items()}
            with without_passes(*idle_passes(next(iter(flat.values())))):
                return lower(tvm.IRModule(flat, attrs=mod.attrs))
        for part in parts[1:]:
            parts[0].update(part)
        return parts[0]


def _left_out(func: tirx.PrimFunc) -> tuple[str, ...]:
    idle = idle_passes(func)
    return idle if _is_for_cuda(func) or FLATTEN in idle else ()


def _is_for_cuda(func: tirx.PrimFunc) -> bool:
    target = func.attrs.get("target") if func.attrs is not None else None
    return target is not None and target.kind.name == "cuda"


def _rounding_once(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """With ``numerics="strict"``, an operator in float32: only its result is rounded."""
    return widened(func) if func.attrs.get(NUMERICS) == "strict" else func


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.OverlapLaunches")
class OverlapLaunches:
    """Tag the kernels that wait for their predecessor by themselves."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Tag the kernels of a device module."""
        for gv, func in mod.functions_items():
            if func.attrs is None or _PARAMETERS not in func.attrs:
                continue
            if arch_number(func.attrs["target"]) < _LEAST_ARCH or WAIT not in _device_functions(
                func
            ):
                continue
            tags = [str(tag) for tag in func.attrs[_PARAMETERS]]
            if _TAG not in tags:
                # TVM's runtime wants the size of dynamic shared memory last.
                place = len(tags) - (_DYNAMIC in tags)
                tags.insert(place, _TAG)
                mod.update_func(gv, func.with_attr(_PARAMETERS, tags))
        return mod


def _device_functions(func: tirx.PrimFunc) -> list[str]:
    """Names of the device functions that a function calls."""
    return [device_function(call) for call in nodes_of(func.body, ir.Call)]


def target_of(mod: tvm.IRModule, target: Target) -> Target:
    """The target to compile a module for: warpgroup instructions need the ``a`` variant of an arch."""
    needs = any(
        name.startswith(_WARPGROUP)
        for _, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
        for name in _device_functions(func)
    )
    return with_variant(target) if needs else target


def pipeline():
    """TVM's default pipeline of TensorIR with the passes above at its beginning and end."""
    _, host, device = s_tir.pipeline.default_s_tir_pipeline()

    def finish_host():
        return tvm.transform.Sequential([Float32Functions(), ExactTanh(), host(), PropagateNaN()])

    def finish():
        return tvm.transform.Sequential(
            [device(), PropagateNaN(), SpelledInfinities(), OverlapLaunches()]
        )

    return LowerKernels(), finish_host, finish


tirx.register_tir_pipeline(NAME, pipeline)
