"""Expressions over several neighbouring elements at once: one wide load per tensor, then arithmetic per element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm_ffi

from ....compat import IRBuilder, ir, tirx
from ....compat import script_builder as T
from ...analysis import dtype_bytes, nodes_of
from .affine import coefficients, flat_offset, is_conditional, substitute, uses

#: Views of the parameters as one-dimensional buffers, by the handle of the parameter.
Views = Mapping[int, tirx.Buffer]

#: Gives the value of a load of something that is not a parameter, for one of the elements; None for a parameter.
Known = Callable[[ir.TensorLoad, int], object | None]

_WIDEST = 16  # bytes of one load or store


def integer(value: int) -> tirx.IntImm:
    """A 32-bit number."""
    return tirx.IntImm("int32", value)


def keep(value: tirx.PrimExpr, name: str = "kept") -> tirx.PrimExpr:
    """Compute a number once and return where it is kept.

    TVM writes what is bound to a variable wherever the variable stands, which makes long sources of short kernels.
    """
    if isinstance(value, tirx.Var | tirx.IntImm):
        return value
    kept = IRBuilder.name(name, T.alloc_buffer((1,), str(value.ty), scope="local"))
    T.buffer_store(kept, value, [0])
    return kept[0]


def evaluate(
    value: tirx.PrimExpr,
    var: tirx.Var,
    base: tirx.PrimExpr,
    width: int,
    others: Mapping[tirx.Var, tirx.PrimExpr],
    views: Views,
    known: Known,
) -> list[tirx.PrimExpr]:
    """Emit the loads of an expression and return its value at ``var = base … base + width - 1``.

    Parameters
    ----------
    value : PrimExpr
        Reads parameters, and what ``known`` knows.
    var : Var
        The iterator that runs over the elements.
    base : PrimExpr
        Its first value, a multiple of ``width``.
    width : int
        Number of elements.
    others : mapping of Var to PrimExpr
        Values of the other iterators.
    views : mapping
        The parameters.
    known : callable
        See ``Known``.

    Returns
    -------
    list of PrimExpr
        One expression an element, without further loads that could be shared.
    """
    conditions = [call.args[0] for call in nodes_of(value, ir.Call) if is_conditional(call)]
    loaded: list[tuple[ir.TensorLoad, Callable[[int], tirx.PrimExpr]]] = []

    def place(load: ir.TensorLoad) -> Callable[[int], tirx.PrimExpr]:
        for seen, get in loaded:
            if tvm_ffi.structural_equal(seen, load, map_free_vars=False):
                return get
        get = load_elements(load, var, base, width, others, views, conditions)
        loaded.append((load, get))
        return get

    parameters = {}
    for load in nodes_of(value, ir.TensorLoad):
        if known(load, 0) is None:
            parameters[load.__chandle__()] = place(load)
    values = []
    for number in range(width):
        names = {**others, var: base + integer(number) if number else base}

        def replace(load: ir.TensorLoad, number: int = number):
            get = parameters.get(load.__chandle__())
            found = known(load, number) if get is None else get(number)
            # What a load was replaced by is visited, too: its index may be read from registers.
            return load if found is None else found

        # Loads first, as they stand in the expression; then the iterators that are left outside of them.
        swapped = tvm_ffi.structural_map(value, [(ir.TensorLoad, replace)], order="pre")
        values.append(substitute(swapped, names))
    return values


def load_elements(
    load: ir.TensorLoad,
    var: tirx.Var,
    base: tirx.PrimExpr,
    width: int,
    others: Mapping[tirx.Var, tirx.PrimExpr],
    views: Views,
    conditions: Sequence[tirx.PrimExpr] = (),
) -> Callable[[int], tirx.PrimExpr]:
    """Emit the load of one parameter for all elements and say where each one's value is.

    ``conditions`` are those of the expression, under which alone the load may be inside its buffer.
    """
    view = views[load.source.__chandle__()]
    offset = flat_offset(load)
    step = step_of(offset, var, width)
    if step == 1 and conditions and not _ends_between(load, var, width, conditions):
        step = None
    dtype = str(load.ty)
    if step is None:
        return lambda number: view[
            substitute(offset, {**others, var: base + integer(number) if number else base})
        ]
    start = substitute(offset, {**others, var: base})
    inside = _inside(load, {**others, var: base}, conditions) if conditions else []
    count = width if step == 1 else 1
    kept = T.alloc_buffer((count,), dtype, scope="local")
    if inside:
        for number in range(count):
            T.buffer_store(kept, tirx.const(0, dtype), [number])
        with T.If(conjunction(inside)), T.Then():
            copy_in(kept, view, start, count)
    else:
        copy_in(kept, view, start, count)
    return lambda number: kept[number if count > 1 else 0]


def copy_in(kept: tirx.Buffer, view: tirx.Buffer, start: tirx.PrimExpr, count: int) -> None:
    """Load neighbouring elements, as many at a time as one instruction takes."""
    widest = _widest(kept)
    for first in range(0, count, widest):
        piece = min(widest, count - first)
        if piece == 1:
            T.buffer_store(kept, view[start + integer(first)], [first])
            continue
        with T.vectorized(0, piece) as lane:
            T.buffer_store(kept, view[start + integer(first) + lane], [integer(first) + lane])


def _widest(kept: tirx.Buffer) -> int:
    """How many elements one instruction loads or stores; TVM's vectors of truth values have two bytes for each."""
    dtype = str(kept.dtype)
    return 1 if dtype == "bool" else max(1, _WIDEST // dtype_bytes(dtype))


def copy_out(view: tirx.Buffer, start: tirx.PrimExpr, kept: tirx.Buffer, count: int) -> None:
    """Store neighbouring elements, as many at a time as one instruction takes."""
    widest = _widest(kept)
    for first in range(0, count, widest):
        piece = min(widest, count - first)
        if piece == 1:
            T.buffer_store(view, kept[first], [start + integer(first)])
            continue
        with T.vectorized(0, piece) as lane:
            T.buffer_store(view, kept[integer(first) + lane], [start + integer(first) + lane])


def step_of(offset: tirx.PrimExpr, var: tirx.Var, width: int) -> int | None:
    """1 where the elements are neighbours and aligned, 0 where they are the same, None otherwise."""
    variables = list({v.__chandle__(): v for v in nodes_of(offset, tirx.Var)}.values())
    if not any(v.same_as(var) for v in variables):
        return 0
    numbers = coefficients(offset, variables)
    if numbers is None:
        return None
    *steps, rest = numbers
    own = next(n for v, n in zip(variables, steps, strict=True) if v.same_as(var))
    aligned = all(
        n % width == 0 for v, n in zip(variables, steps, strict=True) if not v.same_as(var)
    )
    return 1 if own == 1 and aligned and rest % width == 0 else None


def _inside(
    load: ir.TensorLoad,
    names: Mapping[tirx.Var, tirx.PrimExpr],
    conditions: Sequence[tirx.PrimExpr],
) -> list[tirx.PrimExpr]:
    """What must hold for a load to stay inside its buffer."""
    found = []
    for extent, index in zip(load.source.shape, load.indices, strict=True):
        if not _is_guarded(index, conditions):
            continue
        at = substitute(index, names)
        found += [integer(0) <= at, at < integer(int(extent))]
    return found


def _is_guarded(index: tirx.PrimExpr, conditions: Sequence[tirx.PrimExpr]) -> bool:
    """Whether an index may leave its range where a condition does not hold: they have an iterator in common."""
    return any(uses(c, v) for v in nodes_of(index, tirx.Var) for c in conditions)


def _ends_between(
    load: ir.TensorLoad, var: tirx.Var, width: int, conditions: Sequence[tirx.PrimExpr]
) -> bool:
    """Whether of ``width`` neighbours along an iterator all or none are inside the buffer."""
    return all(
        int(extent) % width == 0
        for extent, index in zip(load.source.shape, load.indices, strict=True)
        if uses(index, var) and _is_guarded(index, conditions)
    )


def conjunction(conditions: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Conjunction of one or more conditions."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = tirx.And(result, condition)
    return result


def where(conditions: Sequence[tirx.PrimExpr], body: Callable[[], None]) -> None:
    """Write code that runs where conditions hold, if there are any."""
    if not conditions:
        body()
        return
    with T.If(conjunction(conditions)), T.Then():
        body()
