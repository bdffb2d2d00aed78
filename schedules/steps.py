"""Schedule steps that templates share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..compat import s_tir, tirx
from .analysis import Structure, root_block, structure

LoopRV = s_tir.schedule.LoopRV
SBlockRV = s_tir.schedule.SBlockRV

#: Loads of a thread in flight together when a block fills shared memory.
_BATCH = 4


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
        staged = block.writes[0].scope != "global"
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
