"""The form of a function that strip kernels compute: sums over windows of few channels that meet in outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tvm_ffi

from ....compat import ir, tirx
from ....guards.strip_model import WIDEST, Problem
from ...analysis import dtype_bytes, nodes_of, structure
from ...steps import inline_injective
from ..contraction_form import recognise
from ..tensor_core.affine import conjuncts, flat_offset, is_conditional, steps_in, substitute, uses
from ..tensor_core.form import Iterator, Store
from ..tensor_core.groups import RawAnchor, split_groups
from ..tensor_core.recognition import flat_stores, raw_anchors, simple_schedule

#: Types of what a window reads.
TYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A sum over a window.

    Attributes
    ----------
    buffer : Buffer
        What the outputs read the sums from.
    conditions : tuple of PrimExpr
        Where they do not all hold, a factor is zero: padding.
    data, weight : PrimExpr
        The factors.
    down, across : Iterator or None
        Positions of the window along the form's rows and columns.
    rest : tuple of Iterator
        The rest of the reduction.
    """

    buffer: tirx.Buffer
    conditions: tuple[tirx.PrimExpr, ...]
    data: tirx.PrimExpr
    weight: tirx.PrimExpr
    down: Iterator | None
    across: Iterator | None
    rest: tuple[Iterator, ...]

    @property
    def loads(self) -> list[ir.TensorLoad]:
        """What both factors read."""
        return [*nodes_of(self.data, ir.TensorLoad), *nodes_of(self.weight, ir.TensorLoad)]


@dataclasses.dataclass(frozen=True)
class Strips:
    """A function in the form of this file; all expressions are in terms of the iterators below.

    Attributes
    ----------
    params : tuple of Buffer
        Parameters of the function.
    axes : tuple of Iterator
        The output's axes, the last one contiguous.
    rows, columns : Iterator or None
        The axes along which windows slide.
    anchors : tuple of Anchor
        The sums.
    stores : tuple of Store
        What is written for each output element.
    constants : tuple of Buffer
        Parameters that are the same at every call.
    """

    params: tuple[tirx.Buffer, ...]
    axes: tuple[Iterator, ...]
    rows: Iterator | None
    columns: Iterator | None
    anchors: tuple[Anchor, ...]
    stores: tuple[Store, ...]
    constants: tuple[tirx.Buffer, ...] = ()

    @property
    def channels(self) -> Iterator | None:
        """The axis of neighbouring channels; None where columns are neighbours."""
        last = next((axis for axis in reversed(self.axes) if axis.extent > 1), None)
        return None if last is self.columns or last is self.rows else last


def strips(func: tirx.PrimFunc) -> Strips | None:
    """Bring a function into this form; None when it has another one, or its channels are not grouped.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function in block form.
    """
    sch = simple_schedule(func)
    if sch is None:
        return None
    form = recognise(sch)
    if form is None:
        return None
    inline_injective(sch)
    names = {block.name for block in (*form.anchors, *form.outputs)}
    if any(block.name not in names for block in structure(sch).blocks):
        return None
    axes = [Iterator(tirx.Var(f"o{n}", "int32"), e) for n, e in enumerate(form.outputs[0].extents)]
    stores: list[Store] = []
    for output in form.outputs:
        block = sch.get(output.handle)
        names = {i.var: axis.var for i, axis in zip(block.iter_vars, axes, strict=True)}
        found = flat_stores(substitute(block.body, names))
        if found is None:
            return None
        stores += found
    raw = raw_anchors(sch, form, axes)
    if raw is None or any(anchor.copies for anchor in raw):
        return None
    axes, raw, stores = split_groups(axes, raw, stores)
    return _described(tuple(sch.mod["main"].params), axes, raw, tuple(stores))


def _described(params, axes: list[Iterator], raw: list[RawAnchor], stores) -> Strips | None:
    slides = [_slides(anchor, axes) for anchor in raw]
    if None in slides:
        return None
    sliding = [a for a in axes if any(a.var.__chandle__() in found for _, found in slides)]
    if not sliding:
        return None
    columns = sliding[-1]
    rows = sliding[-2] if len(sliding) > 1 else None
    anchors = []
    for anchor, (which, found) in zip(raw, slides, strict=True):
        described = _anchor(anchor, which, found, rows, columns)
        if described is None:
            return None
        anchors.append(described)
    return Strips(params, tuple(axes), rows, columns, tuple(anchors), stores)


def _slides(anchor: RawAnchor, axes: list[Iterator]) -> tuple[int, dict[int, Iterator]] | None:
    """Which factor is the data, and the iterator that slides along each axis, by the handle of the axis.

    Only groups count, whose channels are an axis of both factors.
    """
    wide = [axis for axis in axes if axis.extent > 1]
    if not any(all(uses(f, axis.var) for f in anchor.factors) for axis in wide):
        return None
    for which, factor in enumerate(anchor.factors):
        own = [
            a for a in wide if uses(factor, a.var) and not uses(anchor.factors[1 - which], a.var)
        ]
        found: dict[int, Iterator] = {}
        for load in nodes_of(factor, ir.TensorLoad):
            for index in load.indices:
                moved = [a for a in own if uses(index, a.var)]
                along = [r for r in anchor.reduced if r.extent > 1 and uses(index, r.var)]
                if len(moved) == len(along) == 1:
                    found[moved[0].var.__chandle__()] = along[0]
        if found:
            return which, found
    return None


def _anchor(anchor: RawAnchor, which: int, found, rows, columns) -> Anchor | None:
    down = None if rows is None else found.get(rows.var.__chandle__())
    across = found.get(columns.var.__chandle__())
    rest = tuple(r for r in anchor.reduced if r is not down and r is not across and r.extent > 1)
    still = {r.var: tirx.IntImm("int32", 0) for r in anchor.reduced if r.extent == 1}
    conditions, data = _without_padding(substitute(anchor.factors[which], still))
    weight = substitute(anchor.factors[1 - which], still)
    made = Anchor(anchor.buffer, conditions, data, weight, down, across, rest)
    for load in made.loads:
        if str(load.ty.dtype) not in TYPES or steps_in(flat_offset(load)) is None:
            return None
    pairs = [(rows, down), (columns, across)]
    if not all(_in_step(made, a, i) for a, i in pairs if a is not None and i is not None):
        return None
    return made


def _without_padding(value: tirx.PrimExpr) -> tuple[tuple, tirx.PrimExpr]:
    """Take the conditions off a value that is zero where they do not hold, in whatever type."""
    conditions: list[tirx.PrimExpr] = []
    cast = None
    if isinstance(value, tirx.Cast) and is_conditional(value.value):
        cast, value = str(value.ty), value.value
    while is_conditional(value):
        test, chosen, other = value.args
        if not (isinstance(other, tirx.FloatImm) and float(other.value) == 0.0):
            break
        if nodes_of(test, ir.TensorLoad):
            break
        conditions += conjuncts(test)
        value = chosen
    return tuple(conditions), value if cast is None else tirx.Cast(cast, value)


def _in_step(anchor: Anchor, axis: Iterator, along: Iterator) -> bool:
    """Whether an axis and the window's positions along it move everything in one proportion."""
    step = steps_of(anchor, axis, along)
    if step is None:
        return False
    moved = [index for load in nodes_of(anchor.data, ir.TensorLoad) for index in load.indices]
    for condition in anchor.conditions:
        if not isinstance(condition, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
            return False
        moved.append(condition.a - condition.b)
    for value in moved:
        numbers = _pair(value, axis, along)
        if numbers is None or numbers[0] * step[1] != numbers[1] * step[0]:
            return False
    return True


def steps_of(anchor: Anchor, axis: Iterator, along: Iterator) -> tuple[int, int] | None:
    """Stride and dilation of a window along an axis."""
    for load in nodes_of(anchor.data, ir.TensorLoad):
        for index in load.indices:
            if uses(index, axis.var) and uses(index, along.var):
                numbers = _pair(index, axis, along)
                return None if numbers is None or min(numbers) < 1 else numbers
    return None


def _pair(value: tirx.PrimExpr, axis: Iterator, along: Iterator) -> tuple[int, int] | None:
    """Coefficients of two iterators in an affine expression."""
    steps = steps_in(value)
    return steps and tuple(steps.get(i.var.__chandle__(), 0) for i in (axis, along))


def problem_of(form: Strips) -> Problem:
    """Describe a function to the search; of several sums, the one with the largest window."""
    anchor = max(form.anchors, key=_size)
    last = form.channels
    rows, columns = form.rows, form.columns
    steps = [((1, 1), 1)] * 2
    for place, (axis, along) in enumerate(((rows, anchor.down), (columns, anchor.across))):
        if axis is not None and along is not None:
            steps[place] = steps_of(anchor, axis, along), along.extent
    total = math.prod(axis.extent for axis in form.axes)
    counts = [1 if a is None else a.extent for a in (last, rows, columns)]
    return Problem(
        counts[0],
        counts[1],
        counts[2],
        total // math.prod(counts),
        (steps[0][1], steps[1][1]),
        (steps[0][0][0], steps[1][0][0]),
        (steps[0][0][1], steps[1][0][1]),
        math.prod(i.extent for i in anchor.rest),
        max(dtype_bytes(str(load.ty.dtype)) for a in form.anchors for load in a.loads),
        last is not None and uses(anchor.data, last.var),
        last is not None,
        vector_of(form),
        len(form.anchors),
    )


def _size(anchor: Anchor) -> int:
    return math.prod(i.extent for i in (anchor.down, anchor.across, *anchor.rest) if i is not None)


def vector_of(form: Strips) -> int:
    """Neighbouring channels that every tensor has as neighbours, where wide loads and stores may begin."""
    last = form.channels
    if last is None:
        return 1
    width = math.gcd(WIDEST, last.extent)
    loads = [load for anchor in form.anchors for load in anchor.loads]
    loads += [tirx.BufferLoad(store.buffer, store.indices) for store in form.stores]
    for load in loads:
        width = math.gcd(width, WIDEST // dtype_bytes(str(load.ty.dtype)))
        width = math.gcd(width, aligned_run(flat_offset(load), last, width))
    return width


def aligned_run(offset: tirx.PrimExpr, iterator: Iterator, width: int) -> int:
    """The largest divisor of a width at which neighbours along an iterator may be loaded at once; 0 for any."""
    steps = steps_in(offset) or {}
    own = steps.pop(iterator.var.__chandle__(), 0)
    # What is no neighbour is loaded one by one, which any width may do.
    return math.gcd(width, *steps.values()) if own == 1 else 0


def pack(form: Strips, constants: set[int]) -> tuple[Strips, dict[str, list[int]]]:
    """Permute constant weights so that neighbouring channels are neighbours, the window's positions outside of them.

    Parameters
    ----------
    form : Strips
        The function.
    constants : set of int
        Numbers of its parameters that are constants.

    Returns
    -------
    form : Strips
        The same function of permuted parameters.
    packed : dict of str to list of int
        Permutation by the number of the parameter; only of those that change.
    """
    last, packed = form.channels, {}
    for anchor in form.anchors if last is not None else ():
        for load in nodes_of(anchor.weight, ir.TensorLoad):
            place = next((i for i, p in enumerate(form.params) if p.same_as(load.source)), None)
            if place not in constants or str(place) in packed or _reads(form, load.source) != 1:
                continue
            channel = [dim for dim, index in enumerate(load.indices) if uses(index, last.var)]
            if len(channel) != 1:
                continue
            order = [d for d in range(len(load.indices)) if d not in channel] + channel
            if order != sorted(order):
                packed[str(place)] = order
    for place, order in packed.items():
        form = _permuted(form, int(place), order)
    known = tuple(form.params[number] for number in sorted(constants))
    return dataclasses.replace(form, constants=known), dict(sorted(packed.items()))


def _reads(form: Strips, buffer: tirx.Buffer) -> int:
    values: Sequence = [
        *(value for anchor in form.anchors for value in (anchor.data, anchor.weight)),
        *(store.value for store in form.stores),
    ]
    loads = [load for value in values for load in nodes_of(value, ir.TensorLoad)]
    return sum(load.source.same_as(buffer) for load in loads)


def _permuted(form: Strips, place: int, order: list[int]) -> Strips:
    old = form.params[place]
    new = tirx.decl_buffer([int(old.shape[d]) for d in order], str(old.dtype), name=old.name)

    def replace(load: ir.TensorLoad):
        if not load.source.same_as(old):
            return load
        return tirx.BufferLoad(new, [load.indices[d] for d in order])

    def anchor(given: Anchor) -> Anchor:
        weight = tvm_ffi.structural_map(given.weight, [(ir.TensorLoad, replace)])
        return dataclasses.replace(given, weight=weight)

    return dataclasses.replace(
        form,
        params=tuple(new if param is old or param.same_as(old) else param for param in form.params),
        anchors=tuple(map(anchor, form.anchors)),
    )
