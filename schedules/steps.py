"""Schedule steps that templates share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import tvm_ffi

from ..compat import s_tir, tirx, tvm
from .analysis import Block, Structure, nodes_of, root_block, structure

LoopRV = s_tir.schedule.LoopRV
SBlockRV = s_tir.schedule.SBlockRV

#: Loads of a thread in flight together when a block fills shared memory.
_BATCH = 4

#: Statements of an innermost body that may be unrolled; more only costs instruction cache and compile time.
_UNROLL = 256


def with_simple_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Simplify the quotients and remainders of an unscheduled function's elementwise blocks.

    A reshape that only adds axes is lowered to quotients and remainders, which hide that it moves nothing. Other blocks
    stay as they are: simplified throughout, iterators of extent one would vanish, which schedule primitives refuse.
    """
    simple = s_tir.transform.StmtSimplify()(tvm.IRModule({"main": func}))["main"]
    found = {block.name_hint: block for block in nodes_of(simple.body, s_tir.SBlock)}

    def replace(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        block = realize.block
        spatial = all(i.iter_type == tirx.IterVar.DataPar for i in block.iter_vars)
        quotients = nodes_of(block.body, tirx.FloorDiv) or nodes_of(block.body, tirx.FloorMod)
        if not (block.iter_vars and spatial and quotients):
            return realize
        return s_tir.SBlockRealize(realize.iter_values, realize.predicate, found[block.name_hint])

    return tvm_ffi.structural_map(func, (s_tir.SBlockRealize, replace))


def inline_injective(sch: s_tir.Schedule, keep: Collection[str] = ()) -> Structure:
    """Inline every injective block into its consumers.

    Outputs, blocks that fill a staged buffer (any scope but global) and the named ones stay.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule, changed in place.
    keep : collection of str
        Names of more blocks to leave alone.

    Returns
    -------
    Structure
        The structure of what is left.
    """
    for block in structure(sch).blocks:
        staged = any(region.scope != "global" for region in block.writes)
        if block.is_injective and not block.is_output and not staged and block.name not in keep:
            sch.compute_inline(block.handle)
    return structure(sch)


def fuse_loops(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse any positive number of nested loops (``Schedule.fuse`` itself wants two)."""
    return loops[0] if len(loops) == 1 else sch.fuse(*loops)


def loops_of(sch: s_tir.Schedule, block: SBlockRV) -> list[LoopRV]:
    """Return the loops of a block, with a unit loop added where it has none (a scalar)."""
    return list(sch.get_loops(block)) or [sch.add_unit_loop(block)]


def isolate_outputs(sch: s_tir.Schedule) -> Structure:
    """Make every output a block that nothing else reads, and that only copies or computes elementwise.

    An output that other blocks read, and a reduction that is an output, first compute into an intermediate that a
    new block copies out. Afterwards the values never travel through global memory within the function, which one
    kernel could not synchronise.
    """
    for block in structure(sch).outputs:
        current = structure(sch)
        consumers = [other.handle for other in current.consumers(block)]
        if consumers or block.is_reduction:
            for index in range(len(block.writes)):
                sch.cache_write(block.handle, index, "global", consumer_blocks=consumers or None)
    return structure(sch)


def tile_loops(
    sch: s_tir.Schedule,
    loops: Sequence[LoopRV],
    threads: Sequence[int],
    registers: Sequence[int],
    groups: Sequence[int] | None = None,
) -> tuple[LoopRV, LoopRV, list[LoopRV]]:
    """Split each loop into block, thread and register parts, and fuse the first two kinds.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule, changed in place.
    loops : sequence of LoopRV
        Perfectly nested loops, outermost first.
    threads, registers : sequence of int
        Per loop, how many threads share it and how many iterations each keeps. Extents need not divide.
    groups : sequence of int or None
        Per loop, a divisor of its extent that no tile may straddle; 0 for none.

    Returns
    -------
    tuple of (LoopRV, LoopRV, list of LoopRV)
        The fused block loop, the fused thread loop (the last axis varies fastest, so that neighbouring threads
        touch neighbouring addresses), and the register loops.
    """
    outer, middle, inner = [], [], []
    for loop, thread, register, group in zip(
        loops, threads, registers, groups or [0] * len(loops), strict=True
    ):
        if group:
            whole, loop = sch.split(loop, [None, group])
            outer.append(whole)
        parts = sch.split(loop, [None, thread, register])
        outer.append(parts[0])
        middle.append(parts[1])
        inner.append(parts[2])
    sch.reorder(*outer, *middle, *inner)
    return fuse_loops(sch, outer), fuse_loops(sch, middle), inner


def copy_together(
    sch: s_tir.Schedule, block: SBlockRV, at: LoopRV, threads: int, rank: int
) -> bool:
    """Fill a staged buffer with all threads of the block, at the top of a loop.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule, changed in place.
    block : SBlockRV
        The block that fills the buffer.
    at : LoopRV
        Loop inside which it is filled.
    threads : int
        Threads of the block, all on ``threadIdx.x``.
    rank : int
        Dimensions of the buffer.

    Returns
    -------
    bool
        False when TVM finds no constant size for what a block needs; the schedule is then of no use.
    """
    sch.compute_at(block, at, preserve_unit_loops=True)
    fused = fuse_loops(sch, sch.get_loops(block)[-rank:])
    extent = sch.get(fused).extent
    if not isinstance(extent, tirx.IntImm):
        return False
    if int(extent) <= _BATCH * threads:
        _, lane = sch.split(fused, [None, threads])
    else:
        # Left alone, nvcc unrolls the whole loop and keeps its addresses in registers until they spill.
        rounds, _, lane = sch.split(fused, [None, _BATCH, threads])
        sch.annotate(rounds, "disable_unroll", True)
    sch.bind(lane, "threadIdx.x")
    return True


def accumulate_in_registers(
    sch: s_tir.Schedule,
    block: Block,
    thread: LoopRV,
    levels: Sequence[Sequence[int]],
    registers: int,
) -> list[LoopRV]:
    """Move a sum into the registers of a thread, its reduction cut into slices and slices of slices.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule, changed in place.
    block : Block
        The sum.
    thread : LoopRV
        Loop of the threads, inside which it is computed.
    levels : sequence of sequence of int
        Per level, the largest slices first, and per reduction iterator, the part that a slice holds.
    registers : int
        Sums of a thread.

    Returns
    -------
    list of LoopRV
        For each level the loop over its slices.
    """
    handle = block.handle
    sch.set_scope(handle, 0, "local")
    sch.compute_at(handle, thread, preserve_unit_loops=True)
    loops = sch.get_loops(handle)[-len(block.extents) :]
    spatial = [loops[i] for i in block.spatial]
    nest: list[list[LoopRV]] = [[] for _ in range(len(levels) + 1)]
    for place, number in enumerate(block.reduced):
        rest = loops[number]
        for depth, steps in enumerate(levels):
            outer, rest = sch.split(rest, [None, steps[place]])
            nest[depth].append(outer)
        nest[-1].append(rest)
    # The channels of a slice outside, the window inside: neighbours in a window share addresses.
    inner = sorted(nest.pop(), key=lambda loop: -int(sch.get(loop).extent))
    sch.reorder(*[loop for part in nest for loop in part], *inner, *spatial)
    slices = [fuse_loops(sch, part) for part in nest]
    unroll(sch, spatial)
    body = registers
    for loop in reversed(inner):
        body *= int(sch.get(loop).extent)
        if body > _UNROLL:
            break
        sch.unroll(loop)
    return slices


def unroll(sch: s_tir.Schedule, loops: Iterable[LoopRV]) -> None:
    """Unroll loops over registers: an indexed register would live in memory."""
    for loop in loops:
        sch.unroll(loop)


def read_in_order(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Let a copying block walk the memory that it reads: neighbouring iterations then read neighbouring addresses.

    To be called before ``compute_at``, which makes loops anew in the order of the block's iterators. A transposed
    weight is otherwise read with a stride.
    """
    body = sch.get(block)
    if not body.reads:
        return
    source = max(body.reads, key=lambda region: math.prod(map(_extent_of, region.source.ty.shape)))
    number = {iter_var.var.__chandle__(): i for i, iter_var in enumerate(body.iter_vars)}
    used = [
        number[var.__chandle__()]
        for dim in source.region
        for var in nodes_of(dim.min, tirx.Var)
        if var.__chandle__() in number
    ]
    order = list(dict.fromkeys(used))
    order = [i for i in range(len(number)) if i not in order] + order
    if order != sorted(order):
        sch.reorder_block_iter_var(block, order)


def _extent_of(extent: tirx.PrimExpr) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else 0


def move_into_threads(sch: s_tir.Schedule, info: Structure, threads: int) -> None:
    """Give every thread one element of each output, and all that the element needs.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule, changed in place.
    info : Structure
        Its structure. Outputs have equally many elements and nothing reads them; blocks that are left between
        inputs and outputs are computed by each thread for itself, in registers.
    threads : int
        Threads of a block.
    """
    lanes = []
    for output in info.outputs:
        fused = fuse_loops(sch, loops_of(sch, output.handle))
        lanes.append(sch.split(fused, [None, threads])[1])
    lane = sch.merge(*lanes) if len(lanes) > 1 else lanes[0]
    sch.bind(sch.get_loops(info.outputs[0].handle)[0], "blockIdx.x")
    sch.bind(lane, "threadIdx.x")
    for block in reversed(info.blocks):
        if not block.is_output:
            for index in range(len(block.writes)):
                sch.set_scope(block.handle, index, "local")
            sch.compute_at(block.handle, lane, preserve_unit_loops=True)


def guarded(
    sch: s_tir.Schedule, guards: Sequence[tuple[SBlockRV, LoopRV, LoopRV, int]]
) -> tirx.PrimFunc:
    """Finish a schedule in which threads without work should not compute what only their neighbours need.

    ``compute_at`` gives a block that is moved below a loop over threads the work of all of them, idle ones included.
    That is right, but it reads and keeps more than is needed.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    guards : sequence of (block, outer loop, thread loop, extent)
        Blocks without blocks of their own, inside both loops; they run where the loops' position is below the extent.

    Returns
    -------
    tirx.PrimFunc
        The scheduled function.
    """
    conditions = {}
    for block, outer, lane, extent in guards:
        outside, inside = sch.get(outer), sch.get(lane)
        if int(outside.extent) * int(inside.extent) != extent:
            place = outside.loop_var * inside.extent + inside.loop_var
            conditions[sch.get(block).__chandle__()] = place < tirx.IntImm(place.ty, extent)

    def guard(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        condition = conditions.get(realize.block.__chandle__())
        if condition is None:
            return realize
        both = tirx.And(realize.predicate, condition)
        return s_tir.SBlockRealize(realize.iter_values, both, realize.block)

    return tvm_ffi.structural_map(sch.mod["main"], (s_tir.SBlockRealize, guard))


def allow_registers(sch: s_tir.Schedule) -> tirx.PrimFunc:
    """Finish a schedule whose threads keep sums in registers.

    Without a bound on resident blocks, ptxas limits registers so that as many blocks as possible fit on a
    multiprocessor, and spills a few. One resident block is the weakest bound there is.

    Parameters
    ----------
    sch : s_tir.Schedule
        Schedule of one kernel whose outermost loop is bound to ``blockIdx.x``.

    Returns
    -------
    tirx.PrimFunc
        The scheduled function, its kernel declared with ``__launch_bounds__(threads, 1)``.
    """
    func = sch.mod["main"]
    root, grid = root_block(func), root_block(func).body
    hint = tirx.AttrStmt(
        tirx.IntImm("int32", 0),
        "tirx.launch_bounds_min_blocks_per_sm",
        tirx.IntImm("int32", 1),
        grid.body,
    )
    loop = tirx.For(
        grid.loop_var, grid.min, grid.extent, grid.kind, hint, grid.thread_binding, grid.annotations
    )
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        loop,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], True, block))
