"""Two sums of products of which the second reads the first: their form, and what the tile search knows of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ...compat import s_tir, tirx, tvm
from ..analysis import (
    Block,
    Structure,
    axis_classes,
    buffer_key,
    dtype_bytes,
    nodes_of,
    structure,
)
from ..steps import isolate_outputs
from .halo import widen_first


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of a sum of products.

    Parameters
    ----------
    dims : tuple of (int, tuple of (int, int) or None)
        For each dimension its size, and the iterators in its index with their strides; None where the index is not
        linear (the channel of a group).
    nbytes : int
        Bytes of an element.
    """

    dims: tuple[tuple[int, tuple[tuple[int, int], ...] | None], ...]
    nbytes: int

    @property
    def is_linear(self) -> bool:
        """Whether every index is a linear function of the iterators."""
        return all(terms is not None for _, terms in self.dims)

    def sizes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Extents of the box that is read while each iterator takes ``counts`` neighbouring values."""
        return tuple(
            min(size, 1 + sum(stride * (counts[i] - 1) for i, stride in terms or ()))
            for size, terms in self.dims
        )

    def footprint(self, counts: Sequence[int]) -> int:
        """Elements of that box."""
        return math.prod(self.sizes(counts))

    def lines(self, lanes: Sequence[int], strides: Sequence[int]) -> int:
        """Cache lines of 128 bytes that a warp touches, from the lanes that walk each iterator and their strides."""
        lines = 1
        for _, terms in self.dims:
            span = sum(stride * strides[i] * (lanes[i] - 1) for i, stride in terms or ())
            apart = math.prod(lanes[i] for i, _ in terms or ())
            lines = lines * apart if terms is not self.dims[-1][1] else lines
            last = min(apart, 1 + span * self.nbytes // 128)
        return lines * last


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of products: extents of its iterators, which of them it reduces, and its operands."""

    extents: tuple[int, ...]
    reduced: tuple[int, ...]
    operands: tuple[Operand, ...]

    @property
    def depth(self) -> int:
        """Products in one sum."""
        return math.prod(self.extents[i] for i in self.reduced)

    @property
    def count(self) -> int:
        """Number of sums."""
        return math.prod(self.extents) // self.depth


@dataclasses.dataclass(frozen=True)
class PairProblem:
    """What the tile search knows.

    Parameters
    ----------
    axes : tuple of int
        Extents of the output axes.
    walked : tuple of int
        For each output axis the iterator of the second sum that walks it, -1 for none.
    first, second : Sum
        The sums.
    middle : int
        Which operand of the second sum the first one makes.
    made : tuple of int
        For each dimension of that operand the iterator of the first sum that walks it, -1 for none.
    """

    axes: tuple[int, ...]
    walked: tuple[int, ...]
    first: Sum
    second: Sum
    middle: int
    made: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A function of this form.

    Parameters
    ----------
    info : Structure
        Its structure: outputs isolated, and nothing but injective blocks beside the sums.
    first, second : Block
        The sums; the second one reads the first through injective blocks, and nothing else does.
    middle : int
        Which operand of the second is made of the first.
    outputs : tuple of Block
        Outputs of equal extents.
    walked : tuple of int
        For each output axis the iterator of ``second`` that walks it, -1 for none.
    """

    info: Structure
    first: Block
    second: Block
    middle: int
    outputs: tuple[Block, ...]
    walked: tuple[int, ...]


def recognise(func: tirx.PrimFunc) -> tuple[s_tir.Schedule, Pair, PairProblem] | None:
    """Bring a function into the form of a pair.

    Where the second sum reads padding around the first one's result, the first is made to compute the whole padded
    box (``widen_first``), so that every position has a fixed place in a thread's registers.

    Returns
    -------
    tuple of (Schedule, Pair, PairProblem) or None
        A fresh schedule with isolated outputs, in which one block at most is left between the sums. None when the
        function has another form.
    """
    sch = s_tir.Schedule(func)
    pair = _pair(sch)
    if pair is None:
        return None
    _inline_between(sch, pair)
    places = _places(sch, pair)
    if places is None:
        return None
    box = pair.second.reads[pair.middle].shape
    if any(
        place is not None and (shift < 0 or pair.first.extents[place] < size + shift)
        for (place, shift), size in zip(places, box, strict=True)
    ):
        widened = widen_first(sch, pair.first, _middle_block(sch, pair), places)
        return None if widened is None else recognise(widened)
    problem = _problem(sch, pair, tuple(-1 if p is None else p for p, _ in places))
    return None if problem is None else (sch, pair, problem)


def _pair(sch: s_tir.Schedule) -> Pair | None:
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or len(info.reductions) != 2:
        return None
    if any(len(block.reads) != 2 or len(block.writes) != 1 for block in info.reductions):
        return None
    if any(
        not (block.is_injective or block.is_reduction or block.is_output) for block in info.blocks
    ):
        return None
    info = isolate_outputs(sch)
    first, second = info.reductions
    middle = [i for i in range(2) if first.name in _sources(info, second, i)]
    if len(middle) != 1 or len({output.extents for output in info.outputs}) != 1:
        return None
    # Whatever else reads the first sum, or a block on the way to the second, would need it whole.
    before = info.ancestors(second)
    inside = {n for n in before if first.name in info.ancestors(info[n])} | {first.name}
    for block in info.blocks:
        if block.name not in before and block is not second:
            if inside & {producer.name for producer in info.producers(block)}:
                return None
    walked = _walked(info, second)
    return None if walked is None else Pair(info, first, second, middle[0], info.outputs, walked)


def _sources(info: Structure, block: Block, index: int) -> set[str]:
    """Names of the blocks that one operand of a block depends on."""
    names: set[str] = set()
    for other in info.blocks:
        if any(write.buffer == block.reads[index].buffer for write in other.writes):
            names |= {other.name} | info.ancestors(other)
    return names


def _walked(info: Structure, second: Block) -> tuple[int, ...] | None:
    """For each output axis the iterator of the second sum that walks it; None unless positions agree."""
    names = [second.name] + [b.name for b in info.blocks if second.name in info.ancestors(b)]
    written = {write.buffer for name in names for write in info[name].writes}
    for name in names[1:]:
        for access in info[name].reads:
            whole = zip(access.plain, access.indices, strict=True)
            if access.buffer in written and any(p is None and used for p, used in whole):
                return None
    classes = axis_classes(info, names)
    if classes is None:
        return None
    of_class = {classes[second.name, i]: i for i in second.spatial if second.extents[i] != 1}
    found = []
    for output in info.outputs:
        axes = range(len(output.extents))
        found.append(tuple(of_class.get(classes[output.name, axis], -1) for axis in axes))
    if len(set(found)) != 1 or set(found[0]) - {-1} != set(of_class.values()):
        return None
    return found[0]


def _inline_between(sch: s_tir.Schedule, pair: Pair) -> None:
    """Inline what stands between the sums, but for the block that writes what the second one reads."""
    read = pair.second.reads[pair.middle].buffer
    between = _sources(pair.info, pair.second, pair.middle)
    for block in pair.info.blocks:
        made = pair.first.name in pair.info.ancestors(block)
        if block.name in between and made and block.writes[0].buffer != read:
            sch.compute_inline(block.handle)


def _middle_block(sch: s_tir.Schedule, pair: Pair) -> Block | None:
    """The block that writes what the second sum reads, None where that is the first sum."""
    read = pair.second.reads[pair.middle].buffer
    for block in structure(sch).blocks:
        if block.writes[0].buffer == read:
            return None if block.name == pair.first.name else block
    return None


def _places(sch: s_tir.Schedule, pair: Pair) -> list[tuple[int | None, int]] | None:
    """For each dimension of what lies between the sums: the first one's iterator that walks it, and how far behind.

    Returns
    -------
    list of (int or None, int), or None
        ``(i, s)`` where position ``x`` needs the sum at iterator value ``x + s``. None when a position needs several
        sums, or an index is no iterator plus a number.
    """
    first, middle = pair.first, _middle_block(sch, pair)
    number_of_dim = first.writes[0].plain
    rank = len(pair.second.reads[pair.middle].shape)
    if middle is None:
        return [(number_of_dim[d], 0) for d in range(rank)]
    block = sch.get(middle.handle)
    loads = [
        load
        for load in nodes_of(block.body, tvm.ir.TensorLoad)
        if buffer_key(load.source) == first.writes[0].buffer
    ]
    variables = [iter_var.var for iter_var in block.iter_vars]
    found = {_offsets(list(load.indices), variables) for load in loads}
    offsets = found.pop() if len(found) == 1 else None
    if offsets is None:
        return None
    places: list[tuple[int | None, int]] = [(None, 0)] * rank
    position = {number: d for d, number in enumerate(middle.writes[0].plain) if number is not None}
    for dim, (number, shift) in enumerate(offsets):
        extent = first.writes[0].shape[dim]
        if number is None and extent != 1:
            return None
        if number is not None:
            if number not in position or places[position[number]][0] is not None:
                return None
            places[position[number]] = (number_of_dim[dim], shift)
    return places


def _offsets(
    indices: list[tirx.PrimExpr], variables: list[tirx.Var]
) -> tuple[tuple[int | None, int], ...] | None:
    """Each index as one variable plus a number, or a number alone; None when it is neither."""
    found: list[tuple[int | None, int]] = []
    for index in indices:
        coefficients = [int(c) for c in tvm.sym.detect_linear_equation(index, variables)]
        used = [(i, c) for i, c in enumerate(coefficients[:-1]) if c]
        if not coefficients or len(used) > 1 or any(c != 1 for _, c in used):
            return None
        found.append((used[0][0] if used else None, coefficients[-1]))
    return tuple(found)


def _problem(sch: s_tir.Schedule, pair: Pair, made: tuple[int, ...]) -> PairProblem | None:
    first, second = _sum(sch, pair.first), _sum(sch, pair.second)
    if not all(operand.is_linear for operand in second.operands):
        return None
    # Everything that the first sum makes has to be found by its place in what the second one reads.
    wide = {i for i in pair.first.spatial if pair.first.extents[i] != 1}
    if not wide <= set(made):
        return None
    return PairProblem(pair.outputs[0].extents, pair.walked, first, second, pair.middle, made)


def _sum(sch: s_tir.Schedule, block: Block) -> Sum:
    """Describe a reduction of two operands."""
    body = sch.get(block.handle)
    variables = [iter_var.var for iter_var in body.iter_vars]
    operands = []
    for access in block.reads:
        region = next(r for r in body.reads if buffer_key(r.source) == access.buffer)
        dims = []
        for size, dim in zip(access.shape, region.region, strict=True):
            coefficients = tvm.sym.detect_linear_equation(dim.min, variables)
            terms = None
            if coefficients and isinstance(dim.extent, tirx.IntImm) and int(dim.extent) == 1:
                terms = tuple(
                    (i, abs(int(c)))
                    for i, c in enumerate(coefficients[:-1])
                    if int(c) and block.extents[i] != 1
                )
            dims.append((size, terms))
        operands.append(Operand(tuple(dims), dtype_bytes(access.dtype)))
    return Sum(block.extents, block.reduced, tuple(operands))
