"""Stages of a function as functions of their own, and back."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi

from ...compat import s_tir, tirx
from ..analysis import Block, Structure, structure


def split_stages(sch: s_tir.Schedule) -> list[tirx.PrimFunc]:
    """Cut an unscheduled function into its stages.

    Parameters
    ----------
    sch : Schedule
        One loop nest for each block.

    Returns
    -------
    list of PrimFunc
        In an order that respects dependence: for each reduction a function of it and of the elementwise block that
        reads nothing of it but its own element, where there is one; for each other block a function of its own. What
        stages share are parameters, the same ``Var`` objects as in the function.
    """
    func, info = sch.mod["main"], structure(sch)
    nests = tirx.stmt_list(func.body.block.body)
    taken: dict[int, int] = {}
    for number, block in enumerate(info.blocks):
        consumer = own_consumer(info, block) if block.is_reduction else None
        if consumer is not None and consumer not in taken:
            taken[consumer] = number
    stages: dict[int, list[int]] = {}
    for number in range(len(info.blocks)):
        stages.setdefault(taken.get(number, number), []).append(number)
    parts = [[nests[number] for number in numbers] for numbers in stages.values()]
    touched = [_buffers(part) for part in parts]
    return [
        _extract(func, part, touched[i], touched[:i] + touched[i + 1 :])
        for i, part in enumerate(parts)
    ]


def own_consumer(info: Structure, block: Block) -> int | None:
    """Return the number of the only consumer if it reads just its own element of the result, and nothing made later."""
    consumers = info.consumers(block)
    if block.is_output or len(consumers) != 1 or not stores_elements(consumers[0]):
        return None
    (consumer,) = consumers
    position = info.blocks.index(block)
    if any(info.blocks.index(other) > position for other in info.producers(consumer)):
        return None
    written = block.writes[0]
    reads = [read for read in consumer.reads if read.buffer == written.buffer]
    fits = all(read.plain == consumer.spatial for read in reads)
    return info.blocks.index(consumer) if fits and written.shape == consumer.extents else None


def stores_elements(block: Block) -> bool:
    """Whether a block computes one element at a time, each dimension by an iterator of its own.

    Besides what can be inlined that is a store at an offset: that of a member into its slice of a concatenation, and
    that of a merged result into the tensor of the member that an element belongs to.
    """
    if "R" in block.kinds or block.is_nested:
        return False
    own = tuple(frozenset({i}) for i in block.spatial)
    return all(write.indices == own for write in block.writes)


def is_epilogue(info: Structure, block: Block) -> bool:
    """Whether a block is computed in the tile of the reduction whose result it takes on."""
    number = info.blocks.index(block)
    producers = (other for other in info.producers(block) if other.is_reduction)
    return any(own_consumer(info, producer) == number for producer in producers)


def _buffers(nests: Sequence[tirx.Stmt]) -> list[tirx.Var]:
    """Buffers that some loop nests read and write, in the order of their first use."""
    found: dict[tirx.Var, None] = {}

    def visit(block: s_tir.SBlock) -> None:
        for region in (*block.reads, *block.writes):
            found.setdefault(region.source)

    tvm_ffi.structural_walk(list(nests), [(s_tir.SBlock, visit)])
    return list(found)


def _extract(
    func: tirx.PrimFunc,
    nests: Sequence[tirx.Stmt],
    own: Sequence[tirx.Var],
    others: Sequence[Sequence[tirx.Var]],
) -> tirx.PrimFunc:
    """A function of some nests: buffers that nothing else touches are its intermediates."""
    shared = {*func.params, *(buffer for buffers in others for buffer in buffers)}
    inner = [buffer for buffer in own if buffer not in shared]
    root = _root(nests, inner, func.body.block)
    params = [buffer for buffer in own if buffer in shared]
    return tirx.PrimFunc(params, root).with_attrs({"tirx.noalias": True, "s_tir": True})


def join_stages(func: tirx.PrimFunc, stages: Sequence[tirx.PrimFunc]) -> tirx.PrimFunc:
    """Put scheduled stages back into the function from which ``split_stages`` cut them."""
    nests = [nest for stage in stages for nest in tirx.stmt_list(stage.body.block.body)]
    inner = [buffer for stage in stages for buffer in stage.body.block.alloc_buffers]
    params = {*func.params}
    used = {buffer for stage in stages for buffer in stage.params if buffer not in params}
    shared = [buffer for buffer in func.body.block.alloc_buffers if buffer in used]
    return func.with_body(_root(nests, [*shared, *inner], func.body.block))


def _root(
    nests: Sequence[tirx.Stmt], allocated: Sequence[tirx.Var], like: s_tir.SBlock
) -> s_tir.SBlockRealize:
    body = nests[0] if len(nests) == 1 else tirx.SeqStmt(list(nests))
    block = s_tir.SBlock(
        [], [], [], like.name_hint, body, alloc_buffers=list(allocated),
        annotations=like.annotations,
    )  # fmt: skip
    return s_tir.SBlockRealize([], True, block)
