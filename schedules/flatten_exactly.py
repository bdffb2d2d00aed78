"""Flattening of buffers with every offset kept, for functions in which TVM's own pass loses some.

``FlattenBuffer`` of TVM 0.27 simplifies indices as maps of iterators, and of some forms of indices (``index_forms.py``)
it makes other ones: ``a[((i + 1) % 5 + 3) % 5]`` became ``a[(i + 3) % 5]``. Functions that have such forms are lowered as
far as to that pass here, and each index that it changes is compared with what it was: by TVM's analyzer, else by
trying all values. Where all are the same, the function goes through TVM's lowering as ever. In the others every index
that is not proved right is hidden from the pass, which then only adds up strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tvm_ffi

from ..compat import ir, s_tir, structural_equal, structural_hash, sym, tirx, tvm
from .allocation import FLATTEN, IS_FLAT, idle_passes, without_passes
from .analysis import static_extent
from .index_forms import IndexForms, accesses, bindings, ranges
from .integer_values import values_of

#: How many values of iterators are tried for one function, in all its indices together. Beyond, an index counts as wrong.
_MOST_VALUES = 1 << 22


def passes_before_flattening() -> list[tvm.transform.Pass]:
    """TVM's lowering of a scheduled function up to where its buffers are flattened, in TVM's order."""
    lower = s_tir.transform
    return [
        lower.CanonicalizeLoop(),
        lower.LowerCrossThreadReduction(),
        lower.LowerInitBlock(),
        lower.PlanAndUpdateBufferAllocationLocation(),
        lower.ConvertBlocksToOpaque(),
        lower.LiftThreadBinding(),
        lower.ManifestSharedMemoryLocalStage(),
        lower.CompactBufferAllocation(),
        lower.LowerAutoCopy(),
        lower.UnifyThreadBinding(),
        lower.LowerMatchBuffer(),
        lower.StmtSimplify(),
        lower.InjectPermutedLayout(),
        lower.AnnotateIrregularLoop(),
        lower.InjectSoftwarePipeline(),
        lower.TransformMmaBufferLayout(),
        lower.LowerOpaqueBlock(),
    ]


def flatten_exactly(func: tirx.PrimFunc, *, always: bool = False) -> tirx.PrimFunc:
    """Flatten the buffers of a function in which TVM would lose offsets.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function.
    always : bool
        Whether to flatten the buffers of other functions here as well.

    Returns
    -------
    PrimFunc
        The same function, where TVM's lowering is right or has been done. Otherwise the function lowered up to where its buffers
        have one axis, marked as such (``idle_passes`` then leaves out what has been done).
    """
    idle = idle_passes(func)
    if FLATTEN in idle or not (always or IndexForms(func).has_suspects()):
        return func
    with without_passes(*idle):
        lowered = tvm.transform.Sequential(passes_before_flattening())(_module(func))["main"]
    try:
        flat = _flattened(lowered)
    except tvm.error.InternalError:  # "Divide by zero", of an iterator that runs down
        flat = None
    changed = _changed(lowered, flat)
    if changed:
        hidden = _flattened(_hidden(lowered, changed))
        flat = hidden.with_body(_shown(hidden.body))
    return flat.with_attr(IS_FLAT, True) if changed or always else func


def _module(func: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({"main": func})


def _flattened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return tirx.transform.FlattenBuffer()(_module(func))["main"]


def _changed(before: tirx.PrimFunc, after: tirx.PrimFunc | None) -> set[int]:
    """Hashes of the accesses whose index is not the same for sure after flattening, if that was possible."""
    forms, comparison = IndexForms(before), _Comparison(before)
    old, new = accesses(before.body), [] if after is None else accesses(after.body)
    is_paired = len(old) == len(new)  # the pass may have left out what cannot be reached
    found = set()
    for number, access in enumerate(old):
        if not forms.of(access.indices).is_suspect():
            continue
        if not is_paired or not comparison.is_same(access, new[number]):
            found.add(_key(access))
    return found


def _key(access: ir.TensorLoad | tirx.BufferStore) -> int:
    """Equal for accesses with the same indices."""
    return hash(tuple(structural_hash(index) for index in access.indices))


class _Comparison:
    """Whether accesses are to the same element before and after flattening.

    Parameters
    ----------
    func : PrimFunc
        The function before flattening, whose loops bound the indices.
    """

    def __init__(self, func: tirx.PrimFunc):
        self.ranges = ranges(func.body)
        self.bindings = bindings(func.body)
        self.left = _MOST_VALUES
        self.analyzer = sym.Analyzer()
        self.known: dict[tuple[int, int], bool] = {}
        for variable, values in self.ranges.items():
            self.analyzer.bind(variable, values)

    def is_same(self, before: ir.TensorLoad, after: ir.TensorLoad) -> bool:
        """Whether two accesses are to one element for all values of the iterators."""
        buffer = before.source if isinstance(before, ir.TensorLoad) else before.buffer
        offsets = buffer.offset_of(list(before.indices))
        if len(offsets) != len(after.indices):
            return False
        return all(map(self._is_equal, offsets, after.indices))

    def _is_equal(self, one: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
        one, other = self._plain(one), self._plain(other)
        key = (structural_hash(one), structural_hash(other))
        if key not in self.known:
            self.known[key] = (
                structural_equal(one, other)
                or self.analyzer.can_prove_equal(one, other)
                or self._agree(one, other)
            )
        return self.known[key]

    def _plain(self, index: tirx.PrimExpr) -> tirx.PrimExpr:
        """An index in terms of iterators alone; of a vector the first."""
        if isinstance(index, tirx.Ramp):
            index = index.base
        while True:
            plain = _replaced(index, self.bindings)
            if plain.same_as(index):
                return plain
            index = plain

    def _agree(self, one: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
        """Whether two indices have one value at every point."""
        variables = list({*tirx.analysis.undefined_vars(one), *tirx.analysis.undefined_vars(other)})
        if any(variable not in self.ranges for variable in variables):
            return False
        limits = [self.ranges[variable] for variable in variables]
        sizes = [(static_extent(limit.min), static_extent(limit.extent)) for limit in limits]
        if any(None in size for size in sizes):
            return False
        points = math.prod(extent for _, extent in sizes)
        if points > self.left:
            return False
        self.left -= points
        grid = np.ogrid[tuple(slice(least, least + extent) for least, extent in sizes)]
        names = dict(zip(variables, grid, strict=True))
        first, second = values_of(one, names), values_of(other, names)
        return first is not None and second is not None and bool(np.all(first == second))


def _replaced(index: tirx.PrimExpr, values: dict) -> tirx.PrimExpr:
    return tvm_ffi.structural_map(index, [(tirx.Var, lambda var: values.get(var, var))])


def _hidden(func: tirx.PrimFunc, wrong: set[int]) -> tirx.PrimFunc:
    """Write the indices of some accesses so that nothing sees through them: ``index | 0``."""

    def indices(access: ir.TensorLoad | tirx.BufferStore) -> Sequence[tirx.PrimExpr]:
        return list(map(_hide, access.indices))

    def load(access: ir.TensorLoad) -> ir.TensorLoad:
        is_wrong = _key(access) in wrong
        return tirx.BufferLoad(access.source, indices(access)) if is_wrong else access

    def store(access: tirx.BufferStore) -> tirx.BufferStore:
        is_wrong = _key(access) in wrong
        return tirx.BufferStore(access.buffer, access.value, indices(access)) if is_wrong else access

    hidden = tvm_ffi.structural_map(func.body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
    return func.with_body(hidden)


def _hide(index: tirx.PrimExpr) -> tirx.PrimExpr:
    if isinstance(index, tirx.Ramp):
        return tirx.Ramp(_hide(index.base), index.stride, index.lanes)
    if isinstance(index, tirx.Broadcast):
        return tirx.Broadcast(_hide(index.value), index.lanes)
    return tirx.BitwiseOr(index, tirx.const(0, str(index.ty.dtype)))


def _shown(body: tirx.Stmt) -> tirx.Stmt:
    """Undo `_hidden`."""

    def show(both: tirx.BitwiseOr) -> tirx.PrimExpr:
        return both.a if static_extent(both.b) == 0 else both

    return tvm_ffi.structural_map(body, [(tirx.BitwiseOr, show)])
