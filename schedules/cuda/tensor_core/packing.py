"""Constant operands in the layout that a kernel copies best: the reduction innermost, or the channels of a window.

The kernel declares the permutation of each such parameter (``schedules.base.PACKED``); whoever calls it permutes the
constant once, at compile time.
"""

from __future__ import annotations

import dataclasses

import tvm_ffi

from ....compat import ir, tirx
from ....guards.tensor_tiles import PIECE_BYTES, WORD_BYTES
from ...analysis import dtype_bytes, nodes_of
from .access import access_of
from .affine import as_copy
from .form import Anchor, InnerSum, Iterator, Operand, Products


def pack(
    form: Products,
    constants: set[int],
    *,
    reduction_first: bool = False,
    whole_words: bool = False,
) -> tuple[Products, dict[str, list[int]]]:
    """Permute the constant operands of a function where that makes copies longer.

    Parameters
    ----------
    form : Products
        The function.
    constants : set of int
        Numbers of its parameters that are constants.
    reduction_first : bool
        Whether both operands of a product have the reduction outermost, rather than its column operand innermost;
        what an operand is computed from stays as it is.
    whole_words : bool
        Whether column operands have the reduction outermost where, with it innermost, not every line would begin at a
        word of four bytes, of which asynchronous copies are made: an image's 3 channels times 3x3 places are 27
        elements of two bytes; and where rows are read element by element, whose reduction is filled to pairs
        (`patch_form`).

    Returns
    -------
    form : Products
        The same function of permuted parameters.
    packed : dict of str to list of int
        Permutation by the number of the parameter; only of those that change.
    """
    wanted: dict[int, list[int]] = {}
    for anchor in form.anchors:
        if reduction_first:
            for operand in (anchor.rows, anchor.columns):
                if as_copy(operand.value, form.inner) is not None:
                    _want(form, constants, operand.value, anchor.reduced, True, wanted)
        else:
            outermost = whole_words and (not _begins_at_words(anchor) or _fills_pairs(form, anchor))
            _want(form, constants, anchor.columns.value, anchor.reduced, outermost, wanted)
    for inner in () if reduction_first else form.inner:
        _want(form, constants, inner.value, inner.reduced, True, wanted)
    for number, axes in wanted.items():
        form = _permuted(form, number, axes)
    return form, {str(number): axes for number, axes in sorted(wanted.items())}


def _begins_at_words(anchor: Anchor) -> bool:
    """Whether lines of the whole reduction have a multiple of a word's bytes."""
    return anchor.depth * dtype_bytes(anchor.columns.dtype) % WORD_BYTES == 0


def _fills_pairs(form: Products, anchor: Anchor) -> bool:
    """Whether rows are read element by element, and columns with the reduction outermost are copied in whole pieces."""
    size = dtype_bytes(anchor.columns.dtype)
    if not form.columns or form.columns[-1].extent * size % PIECE_BYTES:
        return False
    across = (*form.batch, *form.rows)
    return access_of(anchor.rows, across, anchor.reduced, form.inner).elements is not None


def _want(
    form: Products,
    constants: set[int],
    value: tirx.PrimExpr,
    reduced: tuple[Iterator, ...],
    reduced_first: bool,
    wanted: dict[int, list[int]],
) -> None:
    for load in nodes_of(value, ir.TensorLoad):
        number = next(
            (i for i, param in enumerate(form.params) if param.same_as(load.source)), None
        )
        if number not in constants or number in wanted or _reads(form, load.source) != 1:
            continue
        axes = _axes(load, reduced, reduced_first)
        if axes is not None and axes != sorted(axes):
            wanted[number] = axes


def _axes(
    load: ir.TensorLoad, reduced: tuple[Iterator, ...], reduced_first: bool
) -> list[int] | None:
    """Dimensions with those of the reduction last (or first); None where one mixes an iterator of it with others."""
    order = {iterator.var.__chandle__(): place for place, iterator in enumerate(reduced)}
    inside, outside = [], []
    for dim, index in enumerate(load.indices):
        if isinstance(index, tirx.IntImm):
            outside.append(dim)
        elif isinstance(index, tirx.Var) and index.__chandle__() in order:
            inside.append((order[index.__chandle__()], dim))
        elif any(var.__chandle__() in order for var in nodes_of(index, tirx.Var)):
            return None
        else:
            outside.append(dim)
    ordered = [dim for _, dim in sorted(inside)]
    return [*ordered, *outside] if reduced_first else [*outside, *ordered]


def _reads(form: Products, buffer: tirx.Buffer) -> int:
    values = [
        *(operand.value for anchor in form.anchors for operand in (anchor.rows, anchor.columns)),
        *(inner.value for inner in form.inner),
        *(store.value for store in form.stores),
    ]
    return sum(
        load.source.same_as(buffer) for value in values for load in nodes_of(value, ir.TensorLoad)
    )


def _permuted(form: Products, number: int, axes: list[int]) -> Products:
    old = form.params[number]
    shape = [int(old.shape[axis]) for axis in axes]
    new = tirx.decl_buffer(shape, str(old.dtype), name=old.name)

    def replace(load: ir.TensorLoad):
        if not load.source.same_as(old):
            return load
        return tirx.BufferLoad(new, [load.indices[axis] for axis in axes])

    def rewrite(value):
        return tvm_ffi.structural_map(value, [(ir.TensorLoad, replace)])

    def operand(given: Operand) -> Operand:
        return Operand(rewrite(given.value), given.dtype)

    def anchor(given: Anchor) -> Anchor:
        return dataclasses.replace(given, rows=operand(given.rows), columns=operand(given.columns))

    def inner(given: InnerSum) -> InnerSum:
        return dataclasses.replace(given, value=rewrite(given.value))

    return dataclasses.replace(
        form,
        params=tuple(new if param.same_as(old) else param for param in form.params),
        anchors=tuple(map(anchor, form.anchors)),
        inner=tuple(map(inner, form.inner)),
    )
