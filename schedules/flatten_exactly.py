"""Flattening of buffers with every offset kept, for functions in which TVM's own pass loses some.

``FlattenBuffer`` of TVM 0.27 simplifies indices as maps of iterators, and makes others of some forms
(``index_forms.py``): ``a[((i + 1) % 5 + 3) % 5]`` became ``a[(i + 3) % 5]``. Functions that have such forms are lowered
as far as to that pass here, and each index that it changes is compared with what it was: by TVM's analyzer, else by
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
from .analysis import nodes_of, static_extent
from .index_forms import IndexForms, accesses, bindings, ranges
from .integer_values import values_of

#: How many values of iterators are tried for one function, in all its indices together. Beyond, an index is not proved.
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
        The same function, where TVM's lowering is right or has been done. Otherwise the function lowered up to where
        its buffers have one axis, marked as such (``idle_passes`` then leaves out what has been done).
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
    forms, old = IndexForms(before), accesses(before.body)
    suspects = {n: a for n, a in enumerate(old) if forms.of(a.indices).is_suspect()}
    new = [] if after is None else accesses(after.body)
    if not suspects or after is None or len(new) != len(old):
        # The pass failed, or left out what cannot be reached.
        return set(map(_key, suspects.values()))
    comparison, found = _Comparison(before, after), set()
    for number, access in enumerate(
        old
    ):  # what is loaded for an index comes before what is loaded there
        if number in suspects and not comparison.is_same(access, new[number]):
            found.add(_key(access))
        elif isinstance(access, ir.TensorLoad):
            comparison.note_same(access, new[number])
    return found


def _key(access: ir.TensorLoad | tirx.BufferStore) -> int:
    """Equal for accesses with the same indices."""
    return hash(tuple(structural_hash(index) for index in access.indices))


class _Comparison:
    """Whether accesses are to the same element before and after flattening.

    Parameters
    ----------
    before, after : PrimFunc
        The function before flattening, whose loops bound the indices, and after it.
    """

    def __init__(self, before: tirx.PrimFunc, after: tirx.PrimFunc):
        self.ranges = ranges(before.body)
        self.bindings = {**bindings(before.body), **bindings(after.body)}
        self.memory = {**_memory(before), **_memory(after)}
        self.left = _MOST_VALUES
        self.analyzer = sym.Analyzer()
        self.known: dict[tuple[int, int], bool] = {}
        self.loaded: dict[tuple[object, ...], tirx.Var] = {}
        self.has_nested = any(
            nodes_of(index, ir.TensorLoad)
            for access in accesses(before.body)
            for index in access.indices
        )
        for variable, values in self.ranges.items():
            self.analyzer.bind(variable, values)

    def is_same(
        self, before: ir.TensorLoad | tirx.BufferStore, after: ir.TensorLoad | tirx.BufferStore
    ) -> bool:
        """Whether two accesses are to one element for all values of the iterators."""
        offsets = _buffer(before).offset_of(list(before.indices))
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
        """An index in terms of iterators, and of variables for what is loaded; of a vector the first."""
        if isinstance(index, tirx.Ramp):
            index = index.base
        names = self.bindings
        while any(variable in names for variable in tirx.analysis.undefined_vars(index)):
            index = tvm_ffi.structural_map(index, [(tirx.Var, lambda var: names.get(var, var))])
        return tvm_ffi.structural_map(index, [(ir.TensorLoad, self._variable)])

    def note_same(self, before: ir.TensorLoad, after: ir.TensorLoad) -> None:
        """Two loads are of the same element, whatever their indices look like."""
        if self.has_nested:
            self.loaded[self._place(after)] = self._variable(before)

    def _variable(self, load: ir.TensorLoad) -> tirx.Var:
        """Stands for what is loaded, before and after flattening."""
        return self.loaded.setdefault(self._place(load), tirx.Var("loaded", str(load.ty.dtype)))

    def _place(self, load: ir.TensorLoad) -> tuple[object, ...]:
        offsets = map(self._plain, load.source.offset_of(list(load.indices)))
        place = [structural_hash(self.analyzer.simplify(offset)) for offset in offsets]
        return (self.memory.get(load.source, load.source), str(load.ty.dtype), *place)

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


def _buffer(access: ir.TensorLoad | tirx.BufferStore) -> tirx.Buffer:
    return access.source if isinstance(access, ir.TensorLoad) else access.buffer


def _memory(func: tirx.PrimFunc) -> dict[tirx.Buffer, tuple[str, int]]:
    """Which parameter or allocation each buffer is in, equal before and after flattening."""
    found = {param: ("parameter", number) for number, param in enumerate(func.params)}
    allocations = enumerate(nodes_of(func.body, tirx.AllocBuffer))
    found |= {node.buffer: ("allocation", number) for number, node in allocations}
    for view in reversed(
        nodes_of(func.body, tirx.DeclBuffer)
    ):  # the first stands around the others
        pointer = view.data
        if isinstance(pointer, ir.Call) and getattr(pointer.op, "name", "") == "tirx.buffer_data":
            found[view.buffer] = found.get(pointer.args[0], ("view", 0))
    return found


def _hidden(func: tirx.PrimFunc, wrong: set[int]) -> tirx.PrimFunc:
    """Write the indices of some accesses so that nothing sees through them: ``index | 0``."""

    def indices(access: ir.TensorLoad | tirx.BufferStore) -> Sequence[tirx.PrimExpr]:
        return list(map(_hide, access.indices))

    def load(access: ir.TensorLoad) -> ir.TensorLoad:
        is_wrong = _key(access) in wrong
        return tirx.BufferLoad(access.source, indices(access)) if is_wrong else access

    def store(access: tirx.BufferStore) -> tirx.BufferStore:
        is_wrong = _key(access) in wrong
        return (
            tirx.BufferStore(access.buffer, access.value, indices(access)) if is_wrong else access
        )

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
