"""Reading the form of attention from a function's blocks.

Once elementwise blocks are inlined, attention is four reductions and a copy: products of queries and keys, the largest
score of a row, the sum of a row's exponentials, products with values. Each is read at expressions of the last product's
iterators, so that views between them (heads split off, batches flattened) are no more than indices.
"""

from __future__ import annotations

import math

from ....compat import ir, s_tir, structural_equal, tirx
from ...analysis import Block, Structure, buffer_key, nodes_of, structure
from ...steps import inline_injective, isolate_outputs
from ..fast_math import fast_math
from ..row_form import Stage, stages_of_block
from ..tensor_core.affine import flat_offset, substitute
from ..tensor_core.form import Iterator
from ..tensor_core.recognition import simple_schedule
from .form import Attention, Source, is_row_wise
from .score import split_scale, split_score
from .weights import Weights
from .zeroed_rows import without_casts

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


class _Reader(Weights):
    """Reads one function."""

    def read(self) -> Attention | None:
        """Return the form, or None."""
        (out,) = self.info.outputs
        store = self.sch.get(out.handle).body
        if not isinstance(store, tirx.BufferStore):
            return None
        final = self._last(store.value)
        if final is None:
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
        found = self.softmax(weighted.factors[0], weighted.reduced)
        if values is None or found is None:
            return None
        places = self._places(out, final, axes)
        if places is None:
            return None
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        offset = self.analyzer.simplify(substitute(offset, places))
        mixed = tirx.Var("mixed", "float32")
        ending = self._ending(store.value, final, mixed, places)
        query = self._source(found.query, row, found.reduced)
        keys = self._source(found.key, weighted.reduced, found.reduced)
        if query is None or keys is None:
            return None
        score = split_score(found.score, found.sum, found.scale, (row.var, weighted.reduced.var))
        sources = (query, keys, values)
        dtypes = {str(source.buffer.dtype) for source in sources}
        if score is None or not (math.isfinite(found.scale) and math.isfinite(value_scale)):
            return None
        if dtypes != {str(store.buffer.dtype)} or not dtypes <= set(_FLOATS):
            return None
        evaluated = [e for e in (found.score, found.hidden, found.sink, ending) if e is not None]
        read = [load.source for e in evaluated for load in nodes_of(e, ir.TensorLoad)]
        if any(store.buffer.same_as(b) for b in (*read, *(s.buffer for s in sources))):
            return None
        return Attention(
            self.params, tuple(axis for axis in batch if axis.extent > 1), row, weighted.reduced,
            query, keys, values, found.scale * score.scale, found.sum, score.whole, score.inside,
            score.limit, found.zeroed, found.hidden, found.sink, found.share, found.sink_counts,
            value_scale, mixed, ending, store.buffer, offset,
        )  # fmt: skip

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

    def _last(self, value: tirx.PrimExpr) -> ir.TensorLoad | None:
        """The only sum that a stored value is made of."""
        loads = [x for x in nodes_of(value, ir.TensorLoad) if buffer_key(x.source) in self.stages]
        same = all(structural_equal(x, loads[0], map_free_vars=False) for x in loads)
        return loads[0] if loads and same else None

    def _ending(
        self, value: tirx.PrimExpr, final: ir.TensorLoad, mixed: tirx.Var, places: dict
    ) -> tirx.PrimExpr | None:
        """What is made of the last product's sum before it is stored; None where it is stored as it is."""
        if structural_equal(without_casts(value), final, map_free_vars=False):
            return None
        own = buffer_key(final.source)

        def replace(node, visit):
            del visit
            is_own = isinstance(node, ir.TensorLoad) and buffer_key(node.source) == own
            return mixed if is_own else None

        return self._simple(substitute(fast_math(value, narrow=True, replace=replace), places))

    def _places(self, out: Block, final: ir.TensorLoad, axes: list[Iterator]) -> dict | None:
        """The iterators of the block that stores, by those of the last product; None where that is not known."""
        iters = self.sch.get(out.handle).iter_vars
        wide = [axis for axis in axes if axis.extent > 1]
        indices = [i for i, axis in zip(final.indices, axes, strict=True) if axis.extent > 1]
        own = [i.var for i in iters if int(i.dom.extent) > 1]
        fixed = {i.var: tirx.IntImm("int32", 0) for i in iters if int(i.dom.extent) == 1}
        indices = [self.analyzer.simplify(substitute(i, fixed)) for i in indices]
        extents = [int(i.dom.extent) for i in iters if int(i.dom.extent) > 1]
        if not own:
            return fixed
        try:
            inverse = tirx.IndexMap(own, indices, None).inverse(extents)
        except RuntimeError:  # TVM's InternalError, of a map that has no inverse
            return None
        names = {v: a.var for v, a in zip(inverse.initial_indices, wide, strict=True)}
        places = {v: substitute(e, names) for v, e in zip(own, inverse.final_indices, strict=True)}
        return {**fixed, **places}
