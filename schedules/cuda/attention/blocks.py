"""What the blocks of an attention's function compute, at any place: sums of products, largest values."""

from __future__ import annotations

import dataclasses

import tvm_ffi

from ....compat import ir, s_tir, sym, tirx
from ...analysis import Block, Structure, buffer_key, nodes_of
from ..row_form import Stage
from ..tensor_core.affine import substitute
from ..tensor_core.form import Iterator


@dataclasses.dataclass(frozen=True)
class Product:
    """A sum of products at a place: the factors, and what they are summed over."""

    factors: tuple[tirx.PrimExpr, tirx.PrimExpr]
    reduced: Iterator


class Blocks:
    """Reads values of one function's blocks."""

    def __init__(self, sch: s_tir.Schedule, info: Structure, stages: dict[str, Stage]) -> None:
        self.sch, self.info, self.stages = sch, info, stages
        self.params = tuple(sch.mod["main"].params)
        self.analyzer = sym.Analyzer()

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

    def _product(self, source: tirx.Buffer, indices: list) -> Product | None:
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
        return Product((one, other), found[1])

    def _reads_results(self, expr: tirx.PrimExpr) -> bool:
        return any(buffer_key(load.source) in self.stages for load in nodes_of(expr, ir.TensorLoad))


def _replaced(expr: tirx.PrimExpr, replace) -> tirx.PrimExpr:
    """An expression with other loads."""

    def visit(load):
        found = replace(load)
        return load if found is None else found

    return tvm_ffi.structural_map(expr, [(ir.TensorLoad, visit)], order="pre")
