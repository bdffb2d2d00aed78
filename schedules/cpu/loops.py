"""Loop nests for reductions and elementwise blocks: parallel outside, a vector inside."""

from __future__ import annotations

import math

from ...compat import s_tir
from ..analysis import Block, structure
from .split import stores_elements
from .vectors import divisor

#: Parallel iterations that a nest offers to the thread pool, where it has them.
_TASKS = 64


def parallel_outer(sch: s_tir.Schedule, handle: s_tir.schedule.SBlockRV) -> None:
    """Run the leading spatial loops of a block in parallel; legal for any block, no change where none is spatial."""
    block = block_of(sch, handle)
    loops = sch.get_loops(handle)
    count = 0
    while count < len(loops) and count < len(block.kinds) and block.kinds[count] == "S":
        count += 1
    if count == 0 or 0 in block.extents:
        # Fused loops recover their indices by division, which an empty loop does not survive.
        return
    try:
        sch.parallel(sch.fuse(*loops[:count]))
    except s_tir.ScheduleError:
        # The loops may not be the iterators themselves (a block with bound indices): it runs serially.
        return


def schedule_elementwise(sch: s_tir.Schedule, handle: s_tir.schedule.SBlockRV, width: int) -> None:
    """Parallelise a block without reduction over its outer loops and vectorise its innermost."""
    block = block_of(sch, handle)
    loops = sch.get_loops(handle)
    if not loops or len(loops) != len(block.kinds):
        return
    last = _last_wide(block)
    vector = divisor(block.extents[last], 4 * width)
    if vector > 1 and (block.is_injective or stores_elements(block)):
        outer, inner = sch.split(loops[last], [None, vector])
        sch.vectorize(inner)
        loops = [*loops[:last], outer]
    _parallel_prefix(sch, loops)


def schedule_reduction(
    sch: s_tir.Schedule,
    handle: s_tir.schedule.SBlockRV,
    consumer: s_tir.schedule.SBlockRV | None,
    width: int,
) -> None:
    """Parallelise a reduction over its spatial loops, with a vector of results where its operand is contiguous there.

    Pooling and depthwise convolutions take vectors along their innermost axis; a sum along the innermost axis of its
    operand (softmax, layer norm, a global mean) has one result per iteration.
    """
    block = block_of(sch, handle)
    loops = sch.get_loops(handle)
    spatial, sums = [loops[i] for i in block.spatial], [loops[i] for i in block.reduced]
    if not spatial:
        return
    last = block.spatial.index(_last_wide(block))
    # TVM lowers no vector of bfloat16 maxima: its buffer becomes uint16, what is stored in it does not.
    has_vector = has_vector_of_results(block) and block.writes[0].dtype != "bfloat16"
    vector = divisor(block.extents[block.spatial[last]], 4 * width) if has_vector else 1
    outer, inner = sch.split(spatial[last], [None, vector])
    spatial = [*spatial[:last], outer, *spatial[last + 1 :]]
    sch.reorder(*spatial, *sums, inner)
    outer = [int(sch.get(loop).extent) for loop in spatial[:-1]]
    # The innermost loop keeps a task long, where the others are enough tasks.
    alone = math.prod(outer) >= _TASKS
    task = _parallel_prefix(sch, spatial[:-1] if alone else spatial)
    place = spatial[-1] if alone else task
    if consumer is not None:
        sch.reverse_compute_at(consumer, place)
        tail = sch.get_loops(consumer)[-1]
        if vector > 1 and int(sch.get(tail).extent) == vector:
            sch.vectorize(tail)
    if vector > 1:
        sch.vectorize(inner)
        for loop in sums:
            if 1 < int(sch.get(loop).extent) <= 4:
                sch.unroll(loop)
    first = sch.get_loops(sch.decompose_reduction(handle, sums[0]))[-1]
    if vector > 1:
        sch.vectorize(first)


def has_vector_of_results(block: Block) -> bool:
    """Whether neighbouring results of a reduction read neighbouring elements."""
    if not block.spatial or block.extents[_last_wide(block)] == 1:
        return False
    summed = [
        read for read in block.reads if frozenset(block.reduced) & frozenset().union(*read.indices)
    ]
    return any(_last_wide(block) in read.indices[-1] for read in summed)


def block_of(sch: s_tir.Schedule, handle: s_tir.schedule.SBlockRV) -> Block:
    """Return the current description of a block."""
    stmt = sch.get(handle)
    return next(block for block in structure(sch).blocks if sch.get(block.handle).same_as(stmt))


def _last_wide(block: Block) -> int:
    """Return the last spatial iterator that iterates, or the last."""
    wide = [i for i in block.spatial if block.extents[i] > 1]
    return wide[-1] if wide else block.spatial[-1]


def _parallel_prefix(sch: s_tir.Schedule, loops: list) -> s_tir.schedule.LoopRV:
    """Fuse as many leading loops as it takes to have enough tasks, and run them in parallel."""
    tasks, count = 1, 0
    while count < len(loops) and tasks < _TASKS:
        tasks *= int(sch.get(loops[count]).extent)
        count += 1
    task = sch.fuse(*loops[:count])
    sch.parallel(task)
    return task
