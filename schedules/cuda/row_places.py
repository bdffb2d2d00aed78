"""Where in memory stages read and write, and which of it a chunk of neighbouring elements can share.

A chunk's elements may be neighbours in memory (one access moves several), the same element (one access serves all), or
anywhere. Reads under a condition, such as padding, are made together where the condition is the same for the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ...compat import ir, sym, tirx, tvm
from ..analysis import buffer_key, dtype_bytes
from .fast_math import function_of
from .row_form import RowFunction, Stage, substitute, uses

#: The widest load and store of a thread.
VECTOR_BYTES = 16

_CONSTANTS = (tirx.FloatImm, tirx.IntImm)


@dataclasses.dataclass(frozen=True)
class Access:
    """A read of a buffer in an expression.

    Parameters
    ----------
    node : PrimExpr
        What stands for its value: the load, or the choice between the load and a constant (padding).
    load : TensorLoad
        The load.
    condition : PrimExpr or None
        When the load may be made; None if always.
    fill : PrimExpr or None
        The constant otherwise, where ``node`` is the choice.
    """

    node: tirx.PrimExpr
    load: ir.TensorLoad
    condition: tirx.PrimExpr | None = None
    fill: tirx.PrimExpr | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a stage reads or writes a parameter.

    Parameters
    ----------
    buffer : Buffer
        The parameter.
    offset : PrimExpr
        Elements from its start, by row and column.
    is_vector : bool
        Whether the elements of a chunk are neighbours in memory, whole accesses start where they may, and the
        condition is the same for all.
    accesses : float
        Accesses for an element: less than one where a chunk needs fewer than it has elements.
    condition, fill : PrimExpr or None
        See `Access`.
    """

    buffer: tirx.Buffer
    offset: tirx.PrimExpr
    is_vector: bool
    accesses: float
    condition: tirx.PrimExpr | None = None
    fill: tirx.PrimExpr | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for places that are the same."""
        return buffer_key(self.buffer), str(self.offset), str(self.condition), str(self.fill)

    @property
    def is_uniform(self) -> bool:
        """Whether a chunk reads one element."""
        return not self.is_vector and self.accesses < 1

    @property
    def dtype(self) -> str:
        """Type of an element."""
        return str(self.buffer.ty.dtype)


def load_width(vector: int, dtype: str) -> int:
    """Elements of a type in one access of a chunk of ``vector`` elements."""
    return max(1, min(vector, VECTOR_BYTES // dtype_bytes(dtype)))


def accesses_of(expr: tirx.PrimExpr) -> list[Access]:
    """Return the reads of buffers in an expression, with the conditions under which they are made."""
    found: list[Access] = []

    def visit(node: tirx.PrimExpr, condition: tirx.PrimExpr | None) -> None:
        if isinstance(node, ir.TensorLoad):
            found.append(Access(node, node, condition))
        elif function_of(node) == "if_then_else":
            test, chosen, other = node.args
            visit(test, condition)
            inside = test if condition is None else tirx.And(condition, test)
            if isinstance(chosen, ir.TensorLoad) and isinstance(other, _CONSTANTS):
                found.append(Access(node, chosen, inside, other))
                return
            visit(chosen, inside)
            outside = tirx.Not(test)
            visit(other, outside if condition is None else tirx.And(condition, outside))
        elif isinstance(node, tirx.And | tirx.Or):
            # The second part is only looked at when the first leaves it open.
            visit(node.a, condition)
            is_open = node.a if isinstance(node, tirx.And) else tirx.Not(node.a)
            visit(node.b, is_open if condition is None else tirx.And(condition, is_open))
        else:
            for part in parts_of(node):
                visit(part, condition)

    visit(expr, None)
    return found


def parts_of(node: tirx.PrimExpr) -> list:
    """Return the operands of an expression; those of a load are its indices, which are left out."""
    if isinstance(node, ir.Call):
        return list(node.args)
    if isinstance(node, tirx.Cast):
        return [node.value]
    if isinstance(node, tirx.Select):
        return [node.condition, node.true_value, node.false_value]
    return [getattr(node, name) for name in ("a", "b") if hasattr(node, name)]


def place_of(form: RowFunction, access: Access, along: tirx.Var, vector: int) -> Place:
    """Return where in memory a parameter is read.

    Parameters
    ----------
    form : RowFunction
        The function.
    access : Access
        The read, by row and column.
    along : Var
        The row or the column, along which chunks lie.
    vector : int
        Elements of a chunk.
    """
    buffer, indices = access.load.source, access.load.indices
    return _place(form, (buffer, indices, access.condition, access.fill), along, vector)


def place_of_output(form: RowFunction, stage: Stage, along: tirx.Var, vector: int) -> Place:
    """Return where in memory a stage writes; see `place_of`."""
    return _place(form, (stage.buffer, stage.indices, None, None), along, vector)


def _place(form: RowFunction, what: tuple, along: tirx.Var, vector: int) -> Place:
    buffer, indices, condition, fill = what
    inner, inside, analyzer = _in_chunk(form, along, vector)
    offset: tirx.PrimExpr = tirx.IntImm("int64", 0)
    for index, extent in zip(indices, buffer.ty.shape, strict=True):
        offset = offset * int(extent) + index
    offset = analyzer.simplify(offset)
    width = load_width(vector, str(buffer.ty.dtype))
    if not uses(offset, along) or vector == 1:
        return Place(buffer, offset, uses(offset, along), 1 / vector, condition, fill)

    def is_same(expr: tirx.PrimExpr) -> bool:
        return not uses(analyzer.simplify(expr), inner)

    element = analyzer.simplify(substitute(offset, inside))
    known = analyzer.modular_set(analyzer.simplify(element - inner))
    aligned = known.coeff % width == 0 and known.base % width == 0
    if condition is not None and not _is_same_test(substitute(condition, inside), is_same):
        return Place(buffer, offset, False, 1.0, condition, fill)
    if is_same(element - inner) and aligned:
        return Place(buffer, offset, True, 1 / width, condition, fill)
    return Place(buffer, offset, False, 1 / vector if is_same(element) else 1.0, condition, fill)


def _is_same_test(test: tirx.PrimExpr, is_same: Callable[[tirx.PrimExpr], bool]) -> bool:
    """Whether a condition is the same where its comparisons are, some of which simplify in their opposite only."""
    if isinstance(test, tirx.And | tirx.Or):
        return _is_same_test(test.a, is_same) and _is_same_test(test.b, is_same)
    if isinstance(test, tirx.Not):
        return _is_same_test(test.a, is_same)
    return is_same(test) or is_same(tirx.Not(test))


def is_same_in_chunk(form: RowFunction, test: tirx.PrimExpr, along: tirx.Var, vector: int) -> bool:
    """Whether a condition of row and column is the same for all elements of a chunk."""
    inner, inside, analyzer = _in_chunk(form, along, vector)

    def is_same(expr: tirx.PrimExpr) -> bool:
        return not uses(analyzer.simplify(expr), inner)

    return _is_same_test(substitute(test, inside), is_same)


def _in_chunk(form: RowFunction, along: tirx.Var, vector: int) -> tuple:
    """A variable for the elements of a chunk, what it makes of ``along``, and an analyzer that knows the ranges."""
    extents = {form.row.__chandle__(): form.count, form.column.__chandle__(): form.length}
    analyzer = sym.Analyzer()
    for var in (form.row, form.column):
        analyzer.bind(var, tvm.ir.Range(0, extents[var.__chandle__()]))
    chunk, inner = tirx.Var("chunk", "int64"), tirx.Var("inner", "int64")
    analyzer.bind(chunk, tvm.ir.Range(0, -(-extents[along.__chandle__()] // vector)))
    analyzer.bind(inner, tvm.ir.Range(0, vector))
    return inner, {along.__chandle__(): chunk * vector + inner}, analyzer


def places_of(form: RowFunction, along: tirx.Var, vector: int) -> list[Place]:
    """Return where stages read and write parameters element by element, each place once."""
    params = {buffer_key(param) for param in form.params}
    found: dict[tuple[str, ...], Place] = {}
    for stage in form.stages:
        places = [
            place_of(form, access, along, vector)
            for access in accesses_of(stage.value)
            if buffer_key(access.load.source) in params
        ]
        if stage.kind == "output":
            places.append(place_of_output(form, stage, along, vector))
        found.update((place.key, place) for place in places)
    return list(found.values())
