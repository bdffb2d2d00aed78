"""Memory that a scheduled function allocates, by TVM's own lowering."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from ..compat import s_tir, tirx, tvm
from .analysis import dtype_bytes, nodes_of, static_extent

#: The pass that compacts what blocks allocate. Where none do it finds nothing, and takes most of the time of a lowering
#: to find that out, since it bounds the index of every access.
COMPACT = "s_tir.CompactBufferAllocation"

#: The pass that gives buffers one axis. It simplifies every index, flat or not, as a map of iterators, and in TVM 0.27
#: that loses offsets: ``((y + 784) % 816 // 408 * 24 + (y + 16) % 24 + 36) % 48`` loses both 36 and 48.
FLATTEN = "tirx.FlattenBuffer"

#: Attribute of a function whose buffers have one axis already.
IS_FLAT = "tvm_fusion.is_flat"


def idle_passes(func: tirx.PrimFunc) -> tuple[str, ...]:
    """Passes of TVM's lowering that have nothing to do in a function."""
    compact = () if allocates_in_blocks(func) else (COMPACT,)
    is_flat = func.attrs is not None and bool(func.attrs.get(IS_FLAT, False))
    return (*compact, FLATTEN) if is_flat else compact


def allocates_in_blocks(func: tirx.PrimFunc) -> bool:
    """Whether a block of a function allocates buffers; what templates write statement by statement has none."""
    return any(block.alloc_buffers for block in nodes_of(func.body, s_tir.SBlock))


@contextlib.contextmanager
def without_passes(*names: str) -> Iterator[None]:
    """Let pipelines leave out passes, beside those that the context leaves out already."""
    context = tvm.transform.PassContext.current()
    with tvm.transform.PassContext(
        opt_level=context.opt_level,
        required_pass=context.required_pass,
        disabled_pass=[*context.disabled_pass, *names],
        config=dict(context.config.items()),
    ):
        yield


def shared_bytes(func: tirx.PrimFunc) -> int:
    """Return the static shared memory in bytes that a scheduled function allocates per thread block.

    An upper bound: StorageRewrite may still let buffers share space (see `planned_shared_bytes`).
    """
    return _allocated(func, "shared")


def local_bytes(func: tirx.PrimFunc) -> int:
    """Return the bytes of the per-thread buffers of a scheduled function."""
    return _allocated(func, "local")


def planned_shared_bytes(func: tirx.PrimFunc) -> int:
    """Return the static shared memory in bytes of a scheduled function once TVM lets its buffers share space.

    Buffers that are never in use at the same time (slices of anchors that run one after the other) get one place.
    """
    lower, flat = s_tir.transform, tirx.transform
    blocks = [lower.UnifyThreadBinding(), lower.StmtSimplify(), lower.LowerOpaqueBlock()]
    loops = [flat.FlattenBuffer(), flat.VectorizeLoop(), flat.StorageRewrite()]
    passes = tvm.transform.Sequential([*_COMPACTION, *blocks, *loops])
    lowered = passes(tvm.IRModule({"main": func}))["main"]
    allocated = [node.buffer for node in nodes_of(lowered.body, tirx.AllocBuffer)]
    return sum(_buffer_bytes(buffer) for buffer in allocated if buffer.scope().startswith("shared"))


#: The head of TVM's lowering: every buffer is allocated where it is used, as large as it is used.
_COMPACTION = (
    s_tir.transform.LowerCrossThreadReduction(),
    s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
    s_tir.transform.ConvertBlocksToOpaque(),
    s_tir.transform.CompactBufferAllocation(),
)


def _allocated(func: tirx.PrimFunc, scope: str) -> int:
    lowered = tvm.transform.Sequential(_COMPACTION)(tvm.IRModule({"main": func}))["main"]
    buffers = [b for block in nodes_of(lowered.body, s_tir.SBlock) for b in block.alloc_buffers]
    return sum(_buffer_bytes(b) for b in buffers if b.scope().split(".")[0] == scope)


def _buffer_bytes(buffer: tirx.Buffer) -> int | float:
    """Size of a buffer in bytes, infinite where symbolic."""
    sizes = [static_extent(extent) for extent in buffer.shape]
    return math.inf if None in sizes else math.prod(sizes) * dtype_bytes(str(buffer.dtype))
