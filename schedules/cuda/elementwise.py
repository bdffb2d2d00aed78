"""Elementwise and other injective functions: every output element depends on inputs alone.

Outputs of one size are one kernel of ``elements``. The rest is scheduled here: everything is inlined into the outputs,
which share one grid. Where rows are long enough, a thread moves 16 bytes at a time: inputs and outputs pass through
registers, so that only copies are vectorised and any function may be computed.
"""

from __future__ import annotations

import math

from ...compat import Target, s_tir, tirx
from ..allocation import local_bytes
from ..analysis import Access, Block, Structure, dtype_bytes, structure
from ..base import Limits, ScheduleTemplate, limits
from ..index_forms import IndexForms
from ..steps import fuse_loops, inline_injective, isolate_outputs, loops_of
from .elements import element_kernel

_THREADS = 256

#: The widest load and store of a thread.
_VECTOR_BYTES = 16


class Elementwise(ScheduleTemplate):
    """Any number of outputs of any shapes, computed from inputs without a reduction."""

    name = "elementwise"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Return the schedule; None when a block reduces, or is no plain loop nest, or a shape is symbolic."""
        sch = s_tir.Schedule(func)
        info = structure(sch)
        if info is None or not (info.is_static and info.is_regular) or info.reductions:
            return None
        kernel = element_kernel(func, target)
        if kernel is not None:
            return kernel
        isolate_outputs(sch)
        info = inline_injective(sch)
        if any(not block.is_output for block in info.blocks):
            return None
        bounds = limits(target)
        vectors = {output.name: _vector(output, bounds) for output in info.outputs}
        if any(IndexForms(sch.get(output.handle)).has_suspects() for output in info.outputs):
            vectors = dict.fromkeys(vectors, 1)  # vectors need another layout of the block
        if max(vectors.values(), default=1) > 1:
            wide = sch.copy()
            _schedule(wide, info, vectors, bounds)
            # What passes through registers must have been recognised as a few of them.
            accesses = sum(len(output.reads) + 1 for output in info.outputs)
            if local_bytes(wide.mod["main"]) <= accesses * _VECTOR_BYTES:
                return wide
        _schedule(sch, info, dict.fromkeys(vectors, 1), bounds)
        return sch


def _schedule(
    sch: s_tir.Schedule, info: Structure, vectors: dict[str, int], bounds: Limits
) -> None:
    threads = min(_THREADS, bounds.threads)
    blocks = max(
        math.ceil(_size(output) / (threads * vectors[output.name])) for output in info.outputs
    )
    grids = []
    for output in info.outputs:
        vector = vectors[output.name]
        copies, last = [], output.handle
        if vector > 1:
            copies = [
                sch.cache_read(output.handle, index, "local")
                for index, access in enumerate(output.reads)
                if _is_aligned(output, access)
            ]
            last = sch.cache_write(output.handle, 0, "local")
            # One dimension everywhere: quotients of a fused loop would hide from TVM how few registers are used.
            flat = _flat(output.extents)
            for block in (*copies, output.handle):
                sch.transform_layout(block, ("write", 0), flat)
            for block in (*copies, output.handle, last):
                sch.transform_block_layout(block, flat)
        fused = fuse_loops(sch, loops_of(sch, last))
        # Outputs of different sizes have different numbers of elements per block; a condition cuts off the rest.
        grid, lane, inner = sch.split(fused, [blocks, threads, vector])
        if vector > 1:
            sch.compute_at(output.handle, lane, preserve_unit_loops=True)
            sch.unroll(_innermost(sch, output.handle))
            for copy in copies:
                sch.compute_at(copy, lane, preserve_unit_loops=True)
                sch.vectorize(_innermost(sch, copy))
            sch.vectorize(inner)
        sch.bind(lane, "threadIdx.x")
        grids.append(grid)
    grid = sch.merge(*grids) if len(grids) > 1 else grids[0]
    sch.bind(grid, "blockIdx.x")


def _flat(extents: tuple[int, ...]):
    def position(*coordinates):
        index = 0
        for coordinate, extent in zip(coordinates, extents, strict=True):
            index = index * extent + coordinate
        return [index]

    # TVM counts the parameters of the function, which therefore cannot be variadic.
    return tirx.IndexMap.from_func(position, ndim=len(extents))


def _innermost(sch: s_tir.Schedule, block):
    return sch.get_loops(block)[-1]


def _size(block: Block) -> int:
    return block.extent(range(len(block.extents)))


def _is_aligned(output: Block, access: Access) -> bool:
    """Whether the block reads a buffer at the place that it writes."""
    return access.shape == output.extents and access.plain == tuple(range(len(access.shape)))


def _vector(output: Block, bounds: Limits) -> int:
    """Elements that a thread handles at once: as many as 16 bytes hold, while rows divide and all chips have work."""
    if not (output.extents and output.is_injective and _is_aligned(output, output.writes[0])):
        return 1
    accesses = [a for a in (*output.reads, *output.writes) if _is_aligned(output, a)]
    if any("bool" in access.dtype for access in accesses):
        return 1
    width = _VECTOR_BYTES // max(dtype_bytes(access.dtype) for access in accesses)
    threads = min(_THREADS, bounds.threads)
    while width > 1:
        enough = _size(output) >= width * threads * bounds.multiprocessors
        if output.extents[-1] % width == 0 and enough:
            return width
        width //= 2
    return 1
