"""The driver of the CPU templates: one loop nest per stage of a function, each parallel.

A function stays one PrimFunc whatever it contains. What is cheap is inlined; every reduction that remains is a stage,
scheduled by kind, with the elementwise block that consumes it in its tile; everything else is an elementwise stage.
"""

from __future__ import annotations

from ...compat import Target, ir, s_tir, tirx
from ..analysis import Block, Structure, buffer_key, nodes_of, structure, without_inlined
from .contraction import is_contraction, schedule_contraction
from .loops import has_vector_of_results, parallel_outer, schedule_elementwise, schedule_reduction
from .narrow import widen_operands, widens
from .split import is_epilogue, join_stages, own_consumer, split_stages
from .vectors import lanes

#: Calls that cost no more than arithmetic and may be repeated where their value is used.
_CHEAP = {"prim.if_then_else", "prim.likely", "tirx.fabs"}

#: Functions that TVM computes by a polynomial on CPUs, and how often that reads its argument.
_POLYNOMIALS = {"tirx.tanh", "tirx.erf"}
_POLYNOMIAL_USES = 10

#: What counts as an operation, and how many a block may hold after inlining.
_OPERATIONS = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Select, ir.Call, ir.TensorLoad,
)  # fmt: skip
_MOST_OPERATIONS = 400

#: Reads of an element up to which arithmetic is repeated rather than stored: a small pooling window.
_FEW = 4


def schedule_stages(func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
    """Schedule every stage of a function; None when the function is not in block form or has symbolic extents.

    A stage is scheduled as a function of its own, whose parameters are all that it shares with the others: TVM's
    primitives then ask nothing of how those are scheduled (``reverse_compute_at`` wants every producer of an epilogue
    in its loop, which the first of two joined convolutions never is).
    """
    sch = s_tir.Schedule(widen_operands(func))
    info = structure(sch)
    if info is None or not _is_supported(info):
        return None
    inline_cheap(sch)
    width = lanes(target)
    whole = sch.mod["main"]
    stages = [schedule_stage(part, width) for part in split_stages(sch)]
    return s_tir.Schedule(join_stages(whole, stages))


def schedule_stage(func: tirx.PrimFunc, width: int) -> tirx.PrimFunc:
    """Schedule a reduction with the block that takes its result on, or a block without reduction.

    Parameters
    ----------
    func : PrimFunc
        One or two blocks.
    width : int
        float32 lanes of a vector register.
    """
    sch = s_tir.Schedule(func)
    info = structure(sch)
    for block in info.reductions:
        sch = _schedule_one(sch, info, block, width)
    for block in structure(sch).blocks:
        if not block.is_reduction and not is_scheduled(sch, block):
            schedule_elementwise(sch, block.handle, width)
    return sch.mod["main"]


def kind_of(func: tirx.PrimFunc) -> str | None:
    """Return what the most demanding stage of a function is.

    Returns
    -------
    {"contraction", "window", "rows", "elementwise"} or None
        A convolution or product; a reduction with a vector of results (pooling, depthwise convolution); another
        reduction; no reduction. None when ``schedule_stages`` does not handle the function.
    """
    sch = s_tir.Schedule(widen_operands(func))
    info = structure(sch)
    if info is None or not _is_supported(info):
        return None
    if any(is_contraction(sch, block) for block in info.reductions):
        return "contraction"
    if any(has_vector_of_results(block) for block in info.reductions):
        return "window"
    return "rows" if info.reductions else "elementwise"


def _is_supported(info: Structure) -> bool:
    """Whether all extents are positive numbers and all iterators spatial or reductions."""
    return (
        info.is_static and info.is_regular and all(0 not in block.extents for block in info.blocks)
    )


def is_scheduled(sch: s_tir.Schedule, block: Block) -> bool:
    """Whether the block is inside a parallel loop nest, or is a scalar."""
    loops = sch.get_loops(block.handle)
    return not loops or sch.get(loops[0]).kind == tirx.ForKind.PARALLEL


def inline_cheap(sch: s_tir.Schedule) -> None:
    """Inline intermediate injective blocks whose value is cheap, or is used once for each element."""
    info, place = structure(sch), 0
    while place < len(info.blocks):
        block = info.blocks[place]
        place += 1
        if block.is_output or not block.is_injective or not _worth_inlining(sch, info, block):
            continue
        try:
            sch.compute_inline(block.handle)
        except s_tir.ScheduleError:
            # Some consumers cannot take it (an index that the inliner does not invert): it stays a stage.
            continue
        info, place = without_inlined(sch, info, block), place - 1  # the others keep their order


def _worth_inlining(sch: s_tir.Schedule, info: Structure, block: Block) -> bool:
    consumers = info.consumers(block)
    if _would_explode(sch, block, consumers):
        return False
    if any(consumer.is_reduction for consumer in consumers) and is_epilogue(info, block):
        return False  # a row operator would compute it anew in each of its passes
    body = sch.get(block.handle).body
    calls = [node for node in nodes_of(body, ir.Call) if hasattr(node.op, "name")]
    if all(call.op.name in _CHEAP for call in calls):
        # A reduction reads elements often: it takes padding (a condition on every element) and
        # float16 (a conversion, which can be a call) from memory.
        padding = any(call.op.name == "prim.if_then_else" for call in calls)
        costly = padding or widens(body)
        rereads = any(
            consumer.is_reduction and _reads_per_element(block, consumer) > _FEW
            for consumer in consumers
        )
        if rereads and _computes(body):
            return False  # a prologue is computed once, ahead of the convolution
        return not costly or not any(consumer.is_reduction for consumer in consumers)
    size = block.extent(block.spatial)
    return (
        len(consumers) == 1
        and not consumers[0].is_reduction
        and consumers[0].extent(consumers[0].spatial) <= size
    )


def _would_explode(sch: s_tir.Schedule, block: Block, consumers: tuple[Block, ...]) -> bool:
    """Whether inlining repeats so much code that compiling it would take long."""
    size = len(nodes_of(sch.get(block.handle).body, _OPERATIONS))
    written = {access.buffer for access in block.writes}
    for consumer in consumers:
        body = sch.get(consumer.handle).body
        loads = nodes_of(body, ir.TensorLoad)
        uses = sum(buffer_key(load.source) in written for load in loads)
        calls = [node.op.name for node in nodes_of(body, ir.Call) if hasattr(node.op, "name")]
        if any(name in _POLYNOMIALS for name in calls):
            uses *= _POLYNOMIAL_USES
        if uses > 1 and uses * size > _MOST_OPERATIONS:
            return True
    return False


def _reads_per_element(block: Block, consumer: Block) -> float:
    """How often a reduction reads each element of what a block writes."""
    reads = consumer.extent((*consumer.spatial, *consumer.reduced))
    return reads / max(block.extent(block.spatial), 1)


def _computes(body: tirx.Stmt) -> bool:
    """Whether a block does arithmetic on floating values (that on its indices does not count)."""
    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
    return any("float" in str(node.ty) for node in nodes_of(body, kinds))


def _schedule_one(sch: s_tir.Schedule, info: Structure, block: Block, width: int) -> s_tir.Schedule:
    """Schedule one reduction on a copy, so that a refusal half-way leaves no trace."""
    number = own_consumer(info, block)
    consumer = None if number is None else info.blocks[number].handle
    trial = sch.copy()
    try:
        if schedule_contraction(trial, block.handle, consumer, width):
            return trial
    except s_tir.ScheduleError:
        # A primitive found no way to keep the meaning; the plain reduction is always legal.
        pass
    trial = sch.copy()
    try:
        schedule_reduction(trial, block.handle, consumer, width)
        return trial
    except s_tir.ScheduleError:
        parallel_outer(sch, block.handle)
        return sch
