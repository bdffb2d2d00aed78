"""Which indices TVM 0.27 may get wrong when it flattens a buffer.

Its simplification of an index as a map of iterators (``tvm.sym.iter_map_simplify``) pads an iterator that is divided
at an offset, ``(i + 1) % 5`` or ``(i + 8) // 5``, so that the offset falls on a multiple of the divisor. It keeps one
padding for an iterator. A second division of the same iterator, of the result of the first (``((i + 1) % 5 + 3) % 5``,
``(i + 8) // 5 % 6``) or beside it (``i % 3 * 3 + (i + 1) % 3``), replaces the padding of the first, and the first
offset is lost. The same happens where a sum of overlapping iterators is divided, of which one counts as an offset.
An iterator that runs down and is divided, ``(5 - i) % 8``, is wrong by itself (``i % -8 * -1``), or a division by
zero. One division of iterators that run up is simplified rightly, and so are any number of such without offsets
(``i // 12 % 5``).

Here an index is asked only whether it has such a form, which few have; ``flatten_exactly.py`` finds out whether it is
wrong. The schedule primitive ``transform_block_layout`` simplifies in the same way, so templates do without it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ..compat import ir, s_tir, tirx
from .analysis import nodes_of, static_extent

#: Stands for a number of values that is not known.
_MANY = 1 << 31

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


@dataclasses.dataclass(frozen=True)
class IndexForm:
    """What matters of an index.

    Attributes
    ----------
    terms : tuple of (int, int)
        Factor and number of values of what is summed, each from 0.
    offset : bool
        Whether something is added that is no iterator from 0.
    divisions : int
        Divisions and remainders in it.
    shifted : bool
        Whether one of them is of an offset, or of iterators that overlap.
    descending : bool
        Whether one of them is of an iterator that runs down.
    """

    terms: tuple[tuple[int, int], ...] = ()
    offset: bool = False
    divisions: int = 0
    shifted: bool = False
    descending: bool = False

    def is_suspect(self) -> bool:
        """Whether TVM may get it wrong."""
        return self.descending or (self.shifted and self.divisions > 1)

    def overlaps(self) -> bool:
        """Whether different values of the iterators may have one sum."""
        reached = 0
        for factor, count in sorted(term for term in self.terms if term[1] > 1):
            if factor <= reached:
                return True
            reached += factor * (count - 1)
        return False

    def plus(self, other: IndexForm, sign: int = 1) -> IndexForm:
        """The sum, or the difference, of two."""
        terms = tuple((sign * factor, count) for factor, count in other.terms)
        return IndexForm(
            self.terms + terms,
            self.offset or other.offset,
            self.divisions + other.divisions,
            self.shifted or other.shifted,
            self.descending or other.descending,
        )

    def times(self, factor: int) -> IndexForm:
        """The product with a number."""
        return dataclasses.replace(
            self, terms=tuple((f * factor, count) for f, count in self.terms if factor)
        )

    def divided(self, divisor: int, *, remainder: bool) -> IndexForm:
        """The quotient or the remainder of a division by a positive number."""
        if not self.terms:  # of no iterator: an offset as a whole
            return dataclasses.replace(self, offset=True)
        largest = sum(max(factor * (count - 1), 0) for factor, count in self.terms)
        count = min(divisor, largest + 1) if remainder else largest // divisor + 1
        if self.offset:
            count = divisor if remainder else count + 1
        shifted = self.shifted or self.offset or self.overlaps()
        descending = self.descending or any(factor < 0 for factor, _ in self.terms)
        return IndexForm(((1, count),), False, self.divisions + 1, shifted, descending)


class IndexForms:
    """The forms of the indices of one function or block.

    Parameters
    ----------
    of : PrimFunc or SBlock
        The function, scheduled or lowered as far as to before its buffers are flattened, or a block whose iterators
        stand for themselves.
    """

    def __init__(self, of: tirx.PrimFunc | s_tir.SBlock):
        self.body = of.body
        self._known: dict[ir.Var, IndexForm] = {}
        self._values: dict[ir.Var, ir.Range | tirx.PrimExpr] = dict(_values(of.body))
        if isinstance(of, s_tir.SBlock):
            self._values.update((iterator.var, iterator.dom) for iterator in of.iter_vars)

    def has_suspects(self) -> bool:
        """Whether any access to memory has an index that TVM may get wrong."""
        if not any(nodes_of(self.body, kind) for kind in _DIVISIONS):
            return False
        return any(self.of(access.indices).is_suspect() for access in accesses(self.body))

    def of(self, indices: Iterable[tirx.PrimExpr]) -> IndexForm:
        """The form of all indices of one access together: they become one."""
        form = IndexForm()
        for index in indices:
            form = form.plus(self._form(index))
        return form

    def _form(self, index: tirx.PrimExpr) -> IndexForm:
        if isinstance(index, tirx.IntImm):
            return IndexForm(offset=int(index.value) != 0)
        if isinstance(index, ir.Var):
            return self._of_variable(index)
        if isinstance(index, tirx.Add | tirx.Sub):
            sign = 1 if isinstance(index, tirx.Add) else -1
            return self._form(index.a).plus(self._form(index.b), sign)
        if isinstance(index, tirx.Mul):
            for factor, of in ((index.b, index.a), (index.a, index.b)):
                if isinstance(factor, tirx.IntImm):
                    return self._form(of).times(int(factor.value))
        if isinstance(index, _DIVISIONS):
            divisor = static_extent(index.b)
            if divisor is not None and divisor > 0:
                is_remainder = isinstance(index, tirx.FloorMod | tirx.Mod)
                return self._form(index.a).divided(divisor, remainder=is_remainder)
        if isinstance(index, tirx.Cast):
            return self._form(index.value)
        if isinstance(index, tirx.Ramp):
            return self._form(index.base)
        return self._of_other(index)

    def _of_variable(self, variable: ir.Var) -> IndexForm:
        if variable not in self._known:
            self._known[variable] = IndexForm(offset=True)  # of a variable without a value
            value = self._values.get(variable)
            if isinstance(value, ir.Range):
                self._known[variable] = self._of_range(value)
            elif value is not None:
                self._known[variable] = self._form(value)
        return self._known[variable]

    def _of_range(self, values: ir.Range) -> IndexForm:
        count = static_extent(values.extent)
        if count is None:
            return IndexForm(offset=True)
        least = self._form(values.min)
        return least.plus(IndexForm(((1, count),)))

    def _of_other(self, index: tirx.PrimExpr) -> IndexForm:
        """Anything else is an offset; where it depends on iterators, those may be divided in it."""
        if not any(self._of_variable(v).terms for v in tirx.analysis.undefined_vars(index)):
            return IndexForm(offset=True)
        divisions = sum(len(nodes_of(index, kind)) for kind in _DIVISIONS)
        return IndexForm(((1, _MANY),), True, divisions, divisions > 0, divisions > 0)


def accesses(body: tirx.Stmt) -> list[ir.TensorLoad | tirx.BufferStore]:
    """Loads and stores of a statement, loads first."""
    return [*nodes_of(body, ir.TensorLoad), *nodes_of(body, tirx.BufferStore)]


def ranges(body: tirx.Stmt) -> dict[ir.Var, ir.Range]:
    """What loops and threads run through."""
    found = {
        loop.loop_var: ir.Range.from_min_extent(loop.min, loop.extent)
        for loop in nodes_of(body, tirx.For)
    }
    for attribute in nodes_of(body, tirx.AttrStmt):
        if attribute.attr_key in ("thread_extent", "virtual_thread"):
            found[attribute.node.var] = ir.Range(0, attribute.value)
    return found


def bindings(body: tirx.Stmt) -> dict[ir.Var, tirx.PrimExpr]:
    """Values of the variables that statements and expressions bind."""
    bound = {bind.var: bind.value for bind in nodes_of(body, tirx.Bind)}
    return bound | {let.var: let.value for let in nodes_of(body, tirx.Let)}


def _values(body: tirx.Stmt) -> Mapping[ir.Var, ir.Range | tirx.PrimExpr]:
    values: dict = {**ranges(body), **bindings(body)}
    for realize in nodes_of(body, s_tir.SBlockRealize):
        iterators = (iterator.var for iterator in realize.block.iter_vars)
        values.update(zip(iterators, realize.iter_values, strict=True))
    return values
