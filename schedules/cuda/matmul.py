"""Matrix products: dense, batched, transposed, with any elementwise epilogue; products with few rows as reductions."""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..analysis import Block, structure
from ..base import ScheduleTemplate, limits
from .contraction import apply_contraction
from .row_blocks import apply_rows
from .rows import row_kernel

#: Up to so many rows every weight is used so rarely that reading the weights is all the time there is.
_FEW_ROWS = 2


class MatrixVector(ScheduleTemplate):
    """Products with one or two rows: bound by reading the weights, so a row of them is spread over many threads."""

    name = "matrix_vector"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Return the kernel; None unless every reduction is a product that uses its weights at most twice."""
        info = structure(s_tir.Schedule(func))
        if info is None or not info.is_static or not info.reductions:
            return None
        if not all(is_product(block) and _reuse(block) <= _FEW_ROWS for block in info.reductions):
            return None
        kernel = row_kernel(func, target)
        return apply_rows(func, limits(target)) if kernel is None else kernel


class Matmul(ScheduleTemplate):
    """Products with operands staged in shared memory and accumulators in registers."""

    name = "matmul"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the schedule; None when a reduction is no product, or feeds another."""
        info = structure(s_tir.Schedule(func))
        if info is None or not info.reductions or not all(map(is_product, info.reductions)):
            return None
        return apply_contraction(func, limits(target))


def is_product(block: Block) -> bool:
    """Whether a block reduces two operands over the iterators that both have."""
    if len(block.reads) != 2 or len(block.writes) != 1:
        return False
    wide = {i for i in block.reduced if block.extents[i] != 1}
    return all(wide <= set().union(*access.indices) for access in block.reads)


def _reuse(block: Block) -> int:
    """How often each element of the larger operand is used."""
    larger = max(block.reads, key=lambda access: access.nbytes)
    return block.extent(set(block.spatial) - set().union(*larger.indices))
