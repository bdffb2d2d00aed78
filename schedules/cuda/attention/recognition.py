"""Reading the form of attention from a function's blocks.

Once elementwise blocks are inlined, attention is four reductions and a copy: products of queries and keys, the largest
score of a row, the sum of a row's exponentials, products with values. Each is read at expressions of the last product's
iterators, so that views between them (heads split off, batches flattened) are no more than indices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import tvm_ffi

from ....compat import ir, s_tir, structural_equal, sym, tirx
from ...analysis import Block, Structure, buffer_key, nodes_of, structure
from ...steps import inline_injective, isolate_outputs
from ..fast_math import fast_math, function_of
from ..row_form import Stage, stages_of_block
from ..tensor_core.affine import flat_offset, substitute, uses
from ..tensor_core.form import Iterator
from ..tensor_core.recognition import simple_schedule
from .form import Attention, Source, is_row_wise
from .score import split_scale, split_score
from .zeroed_rows import Selection, infinite, not_infinite, selection, terms, without_casts

#: Reductions: products, the largest score, the sum of exponentials, products; and a second search for the largest score
#: where rows without any key become 0.
_REDUCTIONS = (4, 5)

#: Types of operands.
_FLOATS = ("float16", "bfloat16", "float32")


def attention(func: tirx.PrimFunc) -> Attention | None:
    """Bring a function into the form of attention; None when it has another one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function in block form.
    """
    sch = simple_schedule(func)
    if sch is None:
        return None
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular):
        return None
    if len(info.reductions) not in _REDUCTIONS or len(info.outputs) != 1:
        return None
    isolate_outputs(sch)
    info = inline_injective(sch)
    if len(info.blocks) != len(info.reductions) + 1:
        return None
    stages = _stages(sch, info)
    return None if stages is None else _Reader(sch, info, stages).read()


def _stages(sch: s_tir.Schedule, info: Structure) -> dict[str, Stage] | None:
    """What each reduction computes, by the buffer that it writes."""
    found: dict[str, Stage] = {}
    for block in info.reductions:
        made = stages_of_block(sch.get(block.handle), block, {}, True)
        if made is None or len(made) != 1 or len(block.reduced) != 1:
            return None
        found[buffer_key(made[0].buffer)] = made[0]
    return found


@dataclasses.dataclass(frozen=True)
class _Product:
    """A sum of products at a place: the factors, and what they are summed over."""

    factors: tuple[tirx.PrimExpr, tirx.PrimExpr]
    reduced: Iterator


class _Reader:
    """Reads one function."""

    def __init__(self, sch: s_tir.Schedule, info: Structure, stages: dict[str, Stage]) -> None:
        self.sch, self.info, self.stages = sch, info, stages
        self.params = tuple(sch.mod["main"].params)
        self.analyzer = sym.Analyzer()

    def read(self) -> Attention | None:
        """Return the form, or None."""
        (out,) = self.info.outputs
        store = self.sch.get(out.handle).body
        if not isinstance(store, tirx.BufferStore):
            return None
        final = without_casts(store.value)
        if not isinstance(final, ir.TensorLoad) or buffer_key(final.source) not in self.stages:
            return None
        axes = self._axes(self._block_of(final.source))
        zero = tirx.IntImm("int32", 0)
        places = [a.var if a.extent > 1 or a in axes[-2:] else zero for a in axes]
        weighted = self._product(final.source, places)
        if weighted is None or len(axes) < 2:
            return None
        *batch, row, width = axes
        value_scale, value = split_scale(weighted.factors[1])
        values = self._source(value, weighted.reduced, width)
        found = self._softmax(weighted.factors[0], weighted.reduced)
        if values is None or found is None:
            return None
        offset = self._output_offset(out, store, final, axes)
        query = self._source(found.query, row, found.reduced)
        keys = self._source(found.key, weighted.reduced, found.reduced)
        if offset is None or query is None or keys is None:
            return None
        score = split_score(found.score, found.sum, found.scale, (row.var, weighted.reduced.var))
        sources = (query, keys, values)
        dtypes = {str(source.buffer.dtype) for source in sources}
        if score is None or not (math.isfinite(found.scale) and math.isfinite(value_scale)):
            return None
        if dtypes != {str(store.buffer.dtype)} or not dtypes <= set(_FLOATS):
            return None
        conditions = (found.score,) if found.hidden is None else (found.score, found.hidden)
        read = [load.source for e in conditions for load in nodes_of(e, ir.TensorLoad)]
        if any(store.buffer.same_as(b) for b in (*read, *(s.buffer for s in sources))):
            return None
        return Attention(
            self.params, tuple(axis for axis in batch if axis.extent > 1), row, weighted.reduced,
            query, keys, values, found.scale * score.scale, found.sum, score.whole, score.inside,
            score.limit, found.zeroed, found.hidden, value_scale, store.buffer, offset,
        )  # fmt: skip

    # -- blocks ----------------------------------------------------------------------------------------

    def _block_of(self, buffer: tirx.Buffer) -> Block:
        key = buffer_key(buffer)
        return next(b for b in self.info.blocks if any(w.buffer == key for w in b.writes))

    def _axes(self, block: Block) -> list[Iterator]:
        """New iterators for the spatial ones of a block."""
        return [
            Iterator(tirx.Var(f"a{number}", "int32"), block.extents[i])
            for number, i in enumerate(block.spatial)
        ]

    def _at(self, source: tirx.Buffer, indices: list) -> tuple[tirx.PrimExpr, Iterator] | None:
        """What a reduction adds up for an element, and a new iterator for what it runs over."""
        stage, block = self.stages[buffer_key(source)], self._block_of(source)
        iters = self.sch.get(block.handle).iter_vars
        names = {}
        for own, index in zip(stage.indices, indices, strict=True):
            if isinstance(own, tirx.Var):
                names[own] = index
            elif not self.analyzer.can_prove_equal(own, index):
                return None
        if not all(iters[i].var in names or block.extents[i] == 1 for i in block.spatial):
            return None
        (reduced,) = block.reduced
        iterator = Iterator(tirx.Var("r", "int32"), block.extents[reduced])
        names.update(
            {
                iters[i].var: tirx.IntImm("int32", 0)
                for i in block.spatial
                if iters[i].var not in names
            }
        )
        names[iters[reduced].var] = iterator.var
        return self._simple(substitute(stage.value, names)), iterator

    def _simple(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """An expression with simplified indices of what it reads."""
        loads = {load.__chandle__(): load for load in nodes_of(expr, ir.TensorLoad)}
        simple = {
            handle: tirx.BufferLoad(load.source, [self.analyzer.simplify(i) for i in load.indices])
            for handle, load in loads.items()
        }
        return _replaced(expr, lambda load: simple.get(load.__chandle__()))

    def _product(self, source: tirx.Buffer, indices: list) -> _Product | None:
        """The factors of a sum of products, the one that reads other results first."""
        stage = self.stages[buffer_key(source)]
        if stage.combine is not tirx.Add or str(stage.buffer.dtype) != "float32":
            return None
        found = self._at(source, indices)
        if found is None or not isinstance(found[0], tirx.Mul):
            return None
        one, other = found[0].a, found[0].b
        if self._reads_results(other) and not self._reads_results(one):
            one, other = other, one
        return _Product((one, other), found[1])

    def _reads_results(self, expr: tirx.PrimExpr) -> bool:
        return any(buffer_key(load.source) in self.stages for load in nodes_of(expr, ir.TensorLoad))

    def _source(self, factor: tirx.PrimExpr, sequence: Iterator, width: Iterator) -> Source | None:
        """An operand; None where its rows are not contiguous, or begin at odd places."""
        load = without_casts(factor)
        if not isinstance(load, ir.TensorLoad) or not any(
            load.source.same_as(p) for p in self.params
        ):
            return None
        offset = flat_offset(load)
        made = Source(load.source, offset, sequence, width)
        return made if is_row_wise(made) else None

    def _output_offset(
        self, out: Block, store: tirx.BufferStore, final: ir.TensorLoad, axes: list[Iterator]
    ) -> tirx.PrimExpr | None:
        """Where an element of the last product is stored."""
        iters = self.sch.get(out.handle).iter_vars
        wide = [axis for axis in axes if axis.extent > 1]
        indices = [i for i, axis in zip(final.indices, axes, strict=True) if axis.extent > 1]
        own = [i.var for i in iters if int(i.dom.extent) > 1]
        fixed = {i.var: tirx.IntImm("int32", 0) for i in iters if int(i.dom.extent) == 1}
        indices = [self.analyzer.simplify(substitute(i, fixed)) for i in indices]
        extents = [int(i.dom.extent) for i in iters if int(i.dom.extent) > 1]
        if not own:
            return tirx.IntImm("int32", 0)
        try:
            inverse = tirx.IndexMap(own, indices, None).inverse(extents)
        except RuntimeError:  # TVM's InternalError, of a map that has no inverse
            return None
        names = {v: a.var for v, a in zip(inverse.initial_indices, wide, strict=True)}
        places = {v: substitute(e, names) for v, e in zip(own, inverse.final_indices, strict=True)}
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        return self.analyzer.simplify(substitute(offset, {**fixed, **places}))

    # -- softmax ---------------------------------------------------------------------------------------

    def _softmax(self, weight: tirx.PrimExpr, key: Iterator) -> _Softmax | None:
        """Read the factor that is ``exp(score - largest) / sum``."""
        selected = selection(weight)
        if selected is None:
            return None
        value = selected.kept
        if not isinstance(value, tirx.Div):
            return None
        power, total = without_casts(value.a), without_casts(value.b)
        if function_of(power) != "exp" or not self._is(total, tirx.Add):
            return None
        difference = power.args[0]
        if not isinstance(difference, tirx.Sub) or not self._is(difference.b, tirx.Max):
            return None
        score, largest = difference.a, difference.b
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
        return None if found is None else dataclasses.replace(found, zeroed=zeroed, hidden=hidden)

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

    def _scores(self, score: tirx.PrimExpr) -> _Softmax | None:
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
        return _Softmax(query, key, found.reduced, one * two, total, value)


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """The first half of attention: the first product's factors, and the softmax's argument of its sum."""

    query: tirx.PrimExpr
    key: tirx.PrimExpr
    reduced: Iterator
    scale: float
    sum: tirx.Var
    score: tirx.PrimExpr
    zeroed: Literal["", "masked", "undefined", "hidden"] = ""
    hidden: tirx.PrimExpr | None = None


def _replaced(expr: tirx.PrimExpr, replace) -> tirx.PrimExpr:
    """An expression with other loads."""

    def visit(load):
        found = replace(load)
        return load if found is None else found

    return tvm_ffi.structural_map(expr, [(ir.TensorLoad, visit)], order="pre")
