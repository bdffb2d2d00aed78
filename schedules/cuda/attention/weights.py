"""Reading the softmax of attention: its scores, what makes its rows 0, and a sink."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ....compat import ir, structural_equal, tirx
from ...analysis import buffer_key, nodes_of
from ..fast_math import fast_math, function_of
from ..tensor_core.affine import substitute, uses
from ..tensor_core.form import Iterator
from .blocks import Blocks
from .score import split_scale
from .zeroed_rows import Selection, infinite, not_infinite, selection, terms, without_casts


@dataclasses.dataclass(frozen=True)
class Scored:
    """The first half of attention: the first product's factors, and the softmax's argument of its sum."""

    query: tirx.PrimExpr
    key: tirx.PrimExpr
    reduced: Iterator
    scale: float
    sum: tirx.Var
    score: tirx.PrimExpr
    zeroed: Literal["", "masked", "undefined", "hidden"] = ""
    hidden: tirx.PrimExpr | None = None
    sink: tirx.PrimExpr | None = None
    share: float = 0.0
    sink_counts: bool = True


@dataclasses.dataclass(frozen=True)
class _Beside:
    """The sum of a row's exponentials and its largest score, and what is beside them (see `Attention`)."""

    total: ir.TensorLoad
    largest: ir.TensorLoad
    sink: tirx.PrimExpr | None = None
    share: float = 0.0
    counts: bool = False


class Weights(Blocks):
    """Reads the weights of one function."""

    def softmax(self, weight: tirx.PrimExpr, key: Iterator) -> Scored | None:
        """Read the factor that is ``exp(score - largest) / sum``, or with a sink beside the largest and the sum."""
        selected = selection(weight)
        if selected is None:
            return None
        value = selected.kept
        if not isinstance(value, tirx.Div):
            return None
        power, whole = without_casts(value.a), without_casts(value.b)
        if function_of(power) != "exp" or not isinstance(power.args[0], tirx.Sub):
            return None
        score, bound = power.args[0].a, power.args[0].b
        beside = self._beside(whole, bound)
        if beside is None:
            return None
        total, largest = beside.total, beside.largest
        sums, most = (
            self._at(total.source, total.indices),
            self._at(largest.source, largest.indices),
        )
        if sums is None or most is None or {sums[1].extent, most[1].extent} != {key.extent}:
            return None
        if not self._same(most[0], score, most[1], key) or not self._same(
            sums[0], power, sums[1], key
        ):
            return None
        hidden = self._hidden(selected, score, key)
        zeroed = "hidden" if hidden is not None else self._zeroed(selected, score, key)
        found = None if zeroed is None else self._scores(score)
        if found is None:
            return None
        return dataclasses.replace(
            found, zeroed=zeroed, hidden=hidden, sink=beside.sink, share=beside.share,
            sink_counts=beside.counts,
        )  # fmt: skip

    def _beside(self, whole: tirx.PrimExpr, bound: tirx.PrimExpr) -> _Beside | None:
        """Take apart what exponentials are divided by, and what is subtracted in them: sum and largest, and a sink."""
        if self._is(whole, tirx.Add) and self._is(bound, tirx.Max):
            return _Beside(whole, bound)
        if not isinstance(whole, tirx.Add) or not self._is(whole.a, tirx.Add):
            return None
        more = without_casts(whole.b)
        if isinstance(more, tirx.FloatImm) and self._is(bound, tirx.Max):
            return _Beside(whole.a, bound, None, float(more.value))
        counts = isinstance(bound, tirx.Max)
        largest = bound.a if counts else bound
        if function_of(more) != "exp" or not self._is(largest, tirx.Max):
            return None
        less = more.args[0]
        if not isinstance(less, tirx.Sub) or not self._equal(less.b, bound):
            return None
        if self._reads_results(less.a) or (counts and not self._equal(less.a, bound.b)):
            return None
        return _Beside(whole.a, largest, fast_math(less.a, narrow=True), counts=counts)

    def _equal(self, one: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
        parts = [self._simple(expr) for expr in (one, other)]
        return structural_equal(*parts, map_free_vars=False)

    def _is(self, load, combine: type) -> bool:
        if not isinstance(load, ir.TensorLoad):
            return False
        stage = self.stages.get(buffer_key(load.source))
        return (
            stage is not None and stage.combine is combine and str(stage.buffer.dtype) == "float32"
        )

    def _same(self, one, other, one_key: Iterator, key: Iterator) -> bool:
        moved = self._simple(substitute(one, {one_key.var: key.var}))
        return structural_equal(moved, self._simple(other), map_free_vars=False)

    def _zeroed(
        self, selected: Selection, score: tirx.PrimExpr, key: Iterator
    ) -> Literal["", "masked", "undefined"] | None:
        """Which rows become 0; None where it is another selection."""
        if selected.condition is None:
            return ""
        if selected.of_nan is not None:
            parts = [self._simple(e) for e in (selected.of_nan, selected.kept)]
            return "undefined" if structural_equal(*parts, map_free_vars=False) else None
        return "masked" if self._is_all_masked(selected, score, key) else None

    def _hidden(
        self, selected: Selection, score: tirx.PrimExpr, key: Iterator
    ) -> tirx.PrimExpr | None:
        """The condition on a row, or on all of its keys, that makes it 0; None for another one.

        On keys it says that a mask is minus infinity: the largest of the mask is, and the mask is added to the scores.
        """
        condition = selected.condition
        if condition is None:
            return None
        if not self._reads_results(condition):
            is_of_row = not uses(condition, key.var)
            return fast_math(selected.zeros, narrow=True) if is_of_row else None
        largest = infinite(condition, selected.negated)
        if not self._is_largest(largest):
            return None
        found = self._at(largest.source, list(largest.indices))
        if found is None or found[1].extent != key.extent or self._reads_results(found[0]):
            return None
        mask = without_casts(self._simple(substitute(found[0], {found[1].var: key.var})))
        parts = [self._simple(term) for term in terms(score)]
        if not any(structural_equal(mask, part, map_free_vars=False) for part in parts):
            return None
        return fast_math(mask, narrow=True).equal(tirx.FloatImm("float32", -math.inf))

    def _is_largest(self, load: tirx.PrimExpr | None) -> bool:
        """Whether a value is the largest of a row."""
        if not isinstance(load, ir.TensorLoad):
            return False
        stage = self.stages.get(buffer_key(load.source))
        return stage is not None and stage.combine is tirx.Max

    def _is_all_masked(self, selected: Selection, score: tirx.PrimExpr, key: Iterator) -> bool:
        """Whether a condition says that no score of a row is anything but minus infinity.

        That is the largest of truth values, as numbers: TVM's largest of floating-point values is never infinite.
        """
        largest = selected.condition
        if not selected.negated or not self._is_largest(largest):
            return False
        found = self._at(largest.source, list(largest.indices))
        if found is None or found[1].extent != key.extent:
            return False
        value = not_infinite(substitute(found[0], {found[1].var: key.var}))
        if value is None:
            return False
        parts = [self._simple(part) for part in (value, without_casts(score))]
        return structural_equal(*parts, map_free_vars=False)

    def _scores(self, score: tirx.PrimExpr) -> Scored | None:
        """Read the products of queries and keys in a score."""
        loads = [
            load
            for load in nodes_of(score, ir.TensorLoad)
            if buffer_key(load.source) in self.stages
        ]
        if not loads or not all(structural_equal(x, loads[0], map_free_vars=False) for x in loads):
            return None
        found = self._product(loads[0].source, list(loads[0].indices))
        if found is None or any(self._reads_results(f) for f in found.factors):
            return None
        one, query = split_scale(found.factors[0])
        two, key = split_scale(found.factors[1])
        total = tirx.Var("sum", "float32")
        own = buffer_key(loads[0].source)

        def replace(node, visit):
            del visit
            if isinstance(node, ir.TensorLoad) and buffer_key(node.source) == own:
                return total
            return None

        value = fast_math(score, narrow=True, replace=replace)
        return Scored(query, key, found.reduced, one * two, total, value)
