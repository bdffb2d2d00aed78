"""What the compiler says of groups: whether each is one kernel, and what that kernel takes."""

from __future__ import annotations

import concurrent.futures
import math
import re
from collections.abc import Sequence

from ..compat import Target, process_cpu_count, s_tir, structural_equal, structural_hash, tirx, tvm
from ..errors import CompilerError, LoweringError
from ..graph.relax import from_relax
from ..guards import Resources
from ..schedules import schedule
from ..schedules.analysis import dtype_bytes, nodes_of
from ..strategies.base import Proposal
from ..targets import with_variant
from ..transform.annotate import annotate
from ..transform.lower_groups import lower_groups
from ..transform.strip_fusion import strip
from .cuda_source import cuda_source
from .model import BUILD_ERRORS, last_line
from .ptxas import KernelResources, kernel_resources

#: A kernel's launch bound, which is its number of threads, and its name.
_BOUND = re.compile(r"__launch_bounds__\((\d+)[^)]*\)\s+(\w+)\(")


class KernelCompiler:
    """The planner's ``compiler``: lowers and builds proposals of one model for one target.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module, annotated or not.
    target : Target
        Complete target. For a CPU there are no registers to report; proposals are lowered all the
        same, so that those without a kernel are known.
    """

    def __init__(self, mod: tvm.IRModule, target: Target) -> None:
        self._mod, _ = strip(mod)
        self._found = from_relax(self._mod)
        self._target = target
        #: Kernels known so far, by structural hash: equal groups are compiled once.
        self._known: dict[int, list[tuple[tirx.PrimFunc, Resources]]] = {}

    def __call__(self, proposals: Sequence[Proposal]) -> list[Resources | None]:
        """Say what each proposal takes.

        Parameters
        ----------
        proposals : sequence of Proposal
            Disjoint and jointly acyclic.

        Raises
        ------
        CompilerError
            If nvcc is missing, for a CUDA target.
        """
        lowered = self.lower(proposals)
        new: dict[str, tirx.PrimFunc] = {}
        out: list[Resources | None] = [None] * len(proposals)
        for index, func in enumerate(lowered):
            if isinstance(func, Resources):
                out[index] = func
            elif self._lookup(func) is None:
                same = (f for f in new.values() if structural_equal(f, func))
                if next(same, None) is None:
                    new[f"kernel_{index}"] = func
        self._build(new)
        for index, func in enumerate(lowered):
            if isinstance(func, tirx.PrimFunc):
                out[index] = self._lookup(func)
        return out

    def _lookup(self, func: tirx.PrimFunc) -> Resources | None:
        twins = self._known.get(structural_hash(func), ())
        return next((r for f, r in twins if structural_equal(f, func)), None)

    def lower(self, proposals: Sequence[Proposal]) -> list[tirx.PrimFunc | Resources]:
        """One unscheduled PrimFunc per proposal, or why there is none."""
        try:
            return self._lower_together(proposals)
        except (LoweringError, *BUILD_ERRORS) as err:
            if len(proposals) == 1:
                return [Resources(error=last_line(err))]
        return [self.lower([proposal])[0] for proposal in proposals]

    def _lower_together(self, proposals: Sequence[Proposal]) -> list[tirx.PrimFunc | Resources]:
        groups = {f"group_{i}": p for i, p in enumerate(proposals)}
        mod, kernels = lower_groups(annotate(self._mod, self._found, groups))
        return [mod[kernels[name]] for name in groups]

    def _build(self, funcs: dict[str, tirx.PrimFunc]) -> None:
        """Schedule and compile functions and note what they take."""
        scheduled: dict[str, tirx.PrimFunc] = {}
        templates: dict[str, str] = {}
        for name, func in funcs.items():
            try:
                made, templates[name] = schedule(func, with_variant(self._target))
                scheduled[name] = made.with_attr("global_symbol", name)
            except LoweringError as err:
                self._note(func, Resources(error=str(err)))
        if self._target.kind.name != "cuda":
            for name in scheduled:
                self._note(funcs[name], Resources(template=templates[name]))
            return
        for name, found in self._assemble(scheduled).items():
            if isinstance(found, str):
                self._note(funcs[name], Resources(error=found))
                continue
            used, threads = found
            dynamic = dynamic_shared_bytes(scheduled[name])
            self._note(
                funcs[name],
                Resources(
                    used.registers,
                    used.spill_bytes,
                    used.shared_bytes + dynamic,
                    threads,
                    templates[name],
                    dynamic_shared=dynamic > 0,
                ),
            )

    def _note(self, func: tirx.PrimFunc, found: Resources) -> None:
        self._known.setdefault(structural_hash(func), []).append((func, found))

    def _assemble(
        self, scheduled: dict[str, tirx.PrimFunc]
    ) -> dict[str, tuple[KernelResources, int | None] | str]:
        """Compile functions, some at a time on each core; a message for each that fails."""
        names = list(scheduled)
        workers = max(1, min(process_cpu_count(), len(names)))
        chunks = [names[i::workers] for i in range(workers) if names[i::workers]]
        out: dict[str, tuple[KernelResources, int | None] | str] = {}
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for result in pool.map(lambda c: self._assemble_chunk(scheduled, c), chunks):
                out |= result
        return out

    def _assemble_chunk(
        self, scheduled: dict[str, tirx.PrimFunc], names: Sequence[str]
    ) -> dict[str, tuple[KernelResources, int | None] | str]:
        arch = str(self._target.attrs["arch"])
        try:
            source = cuda_source(tvm.IRModule({n: scheduled[n] for n in names}), self._target)
            found = kernel_resources(source, arch)
        except (CompilerError, *BUILD_ERRORS) as err:
            if len(names) > 1:
                out: dict[str, tuple[KernelResources, int | None] | str] = {}
                for name in names:
                    out |= self._assemble_chunk(scheduled, [name])
                return out
            if isinstance(err, CompilerError) and "nvcc is not installed" in str(err):
                raise
            return {names[0]: f"the compiler rejects the generated code: {last_line(err)}"}
        threads = {kernel: int(count) for count, kernel in _BOUND.findall(source)}
        out = {}
        for name in names:
            kernel = f"{name}_kernel"
            several = [k for k in found if k.startswith(kernel)]
            if several != [kernel]:
                out[name] = f"the group became {len(several)} kernels instead of one"
            else:
                out[name] = (found[kernel], threads.get(kernel))
        return out


def dynamic_shared_bytes(func: tirx.PrimFunc) -> int:
    """Bytes of shared memory that a scheduled function's kernel gets at launch, or at most gets where it has blocks."""
    buffers = [alloc.buffer for alloc in nodes_of(func.body, tirx.AllocBuffer)]
    for block in nodes_of(func.body, s_tir.SBlock):
        buffers += block.alloc_buffers
    return sum(
        math.prod(int(extent) for extent in buffer.shape) * dtype_bytes(str(buffer.dtype))
        for buffer in buffers
        if buffer.scope() == "shared.dyn"
    )
