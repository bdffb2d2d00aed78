"""The form of a function that contraction templates take: anchors that meet in elementwise outputs."""

from __future__ import annotations

import dataclasses

from ...compat import s_tir, tirx
from ..analysis import Access, Block, Structure, nodes_of, structure
from ..steps import isolate_outputs
from .tiles import Anchor, Axis, Operand, Problem


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A function that this form fits.

    Parameters
    ----------
    info : Structure
        Its structure, outputs isolated and injective blocks not yet inlined.
    anchors : tuple of Block
        Reductions of two operands, none of which depends on another.
    outputs : tuple of Block
        Output blocks, all over the same iteration space.
    axes : tuple of dict of str to int
        For each output axis, which iterator of each anchor walks it.
    """

    info: Structure
    anchors: tuple[Block, ...]
    outputs: tuple[Block, ...]
    axes: tuple[dict[str, int], ...]


def recognise(sch: s_tir.Schedule, *, nested: bool = False) -> Contraction | None:
    """Bring a function into contraction form.

    Parameters
    ----------
    sch : s_tir.Schedule
        A fresh schedule; its outputs get isolated.
    nested : bool
        Whether anchors may depend on other reductions, which are then left out.

    Returns
    -------
    Contraction or None
        None when the function has another form.
    """
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or not info.reductions:
        return None
    if any(len(block.reads) != 2 or len(block.writes) != 1 for block in info.reductions):
        return None
    behind = set().union(*(info.ancestors(block) for block in info.reductions))
    if not nested and behind & {block.name for block in info.reductions}:
        return None
    info = isolate_outputs(sch)
    if len({output.extents for output in info.outputs}) != 1:
        return None
    anchors = tuple(block for block in info.reductions if block.name not in behind)
    axes = _axes(info, anchors)
    return None if axes is None else Contraction(info, anchors, info.outputs, axes)


def _axes(info: Structure, anchors: tuple[Block, ...]) -> tuple[dict[str, int], ...] | None:
    """Match each anchor's spatial iterators with the output axes through the elementwise blocks between them.

    An iterator that meets no output axis (a branch axis, read at constant places) stays whole in every thread.
    """
    rank = len(info.outputs[0].extents)
    axes: tuple[dict[str, int], ...] = tuple({} for _ in range(rank))
    # Blocks on the way back to the anchors, with the output axis that each of their iterators follows.
    todo = [(output, tuple(range(rank))) for output in info.outputs]
    while todo:
        block, positions = todo.pop()
        for access in block.reads:
            producer = _producer(info, access, anchors)
            if producer is None:
                continue
            mapped = _through(access, producer, positions)
            if mapped is None or not (producer.is_reduction or producer.is_injective):
                return None
            if producer.is_injective:
                todo.append((producer, mapped))
                continue
            for number, axis in enumerate(mapped):
                if axis is not None and axes[axis].setdefault(producer.name, number) != number:
                    return None
    return axes


def _producer(info: Structure, access: Access, anchors: tuple[Block, ...]) -> Block | None:
    """The block that writes what is read, where an anchor is behind it."""
    names = {anchor.name for anchor in anchors}
    for block in info.blocks:
        if any(write.buffer == access.buffer for write in block.writes):
            return block if block.name in names or names & info.ancestors(block) else None
    return None


def _through(
    access: Access, producer: Block, positions: tuple[int | None, ...]
) -> tuple[int | None, ...] | None:
    """For each iterator of ``producer`` the output axis that it follows, None where it follows none."""
    write = next(w for w in producer.writes if w.buffer == access.buffer)
    mapped: list[int | None] = [None] * len(producer.extents)
    for dim, (number, used) in enumerate(zip(access.plain, access.indices, strict=True)):
        if number is None and used:
            return None
        target = write.plain[dim]
        if target is not None and number is not None:
            mapped[target] = positions[number]
    return tuple(mapped)


def problem(form: Contraction, sch: s_tir.Schedule, *, through_shared: bool = False) -> Problem:
    """Describe a function to the tile search.

    Parameters
    ----------
    form : Contraction
        The function.
    sch : s_tir.Schedule
        Its schedule, as ``recognise`` left it.
    through_shared : bool
        Whether the anchors hand their sums to the epilogue through shared memory.
    """
    divisors: list[set[int]] = [set() for _ in form.axes]
    anchors = []
    for anchor in form.anchors:
        found = _divisors(sch, anchor)
        axis_of = {}
        for number, axes in enumerate(form.axes):
            if anchor.name in axes:
                axis_of[axes[anchor.name]] = number
                divisors[number] |= {found[i] for i in (axes[anchor.name],) if i in found}
        whole = [i for i in anchor.spatial if i not in axis_of]
        operands = tuple(_operand(anchor, access, axis_of) for access in anchor.reads)
        reduced = tuple(anchor.extents[i] for i in anchor.reduced)
        anchors.append(Anchor(reduced, operands, anchor.extent(whole)))
    axes = tuple(
        Axis(extent, tuple(sorted(sizes)))
        for extent, sizes in zip(form.outputs[0].extents, divisors, strict=True)
    )
    return Problem(axes, tuple(anchors), through_shared)


def _operand(anchor: Block, access: Access, axis_of: dict[int, int]) -> Operand:
    """Describe what an anchor stages of one operand."""
    order = gathered(anchor, access)
    if order is None:
        dims = list(zip(access.shape, access.indices, strict=True))
    else:
        dims = [(anchor.extents[i], frozenset({i})) for i in order]
    return Operand(
        tuple(
            (
                size,
                tuple(axis_of[i] for i in used if i in axis_of),
                tuple(anchor.reduced.index(i) for i in used if i in anchor.reduced),
            )
            for size, used in dims
        ),
        access.dtype,
    )


def gathered(anchor: Block, access: Access) -> tuple[int, ...] | None:
    """Iterators to stage an operand by, where a box around what is read would be mostly unread.

    A 1x1 window with a stride reads every second element of every second row: a copy indexed by the anchor's own
    iterators has these alone.
    """
    order: list[int] = []
    strided = False
    units: list[int] = []
    for size, used in zip(access.shape, access.indices, strict=True):
        wide = sorted(i for i in used if anchor.extents[i] != 1)
        if len(wide) > 1:
            return None
        order += wide
        units += [i for i in used if anchor.extents[i] == 1]
        strided |= any(size > anchor.extents[i] for i in wide)
    return (*order, *dict.fromkeys(units)) if strided else None


def _divisors(sch: s_tir.Schedule, anchor: Block) -> dict[int, int]:
    """Iterators that an index divides, with the divisor: the output channels of a group of a grouped convolution."""
    block = sch.get(anchor.handle)
    numbers = {iter_var.var.__chandle__(): i for i, iter_var in enumerate(block.iter_vars)}
    found = {}
    for node in nodes_of(block.body, tirx.FloorDiv):
        if isinstance(node.a, tirx.Var) and isinstance(node.b, tirx.IntImm):
            found[numbers.get(node.a.__chandle__(), -1)] = int(node.b)
    return found
