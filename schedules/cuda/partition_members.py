"""Split an unscheduled group function into its independent members.

A member is a connected component of the function's top-level loop nests: two nests belong together when one reads what
the other writes. Input parameters connect nothing, and neither does an output buffer of which each nest writes its own
slice (how a concat join of separate branches is lowered).
"""

from __future__ import annotations

import dataclasses

import tvm_ffi

from ...compat import s_tir, tirx, tvm
from ..base import MEMBER


@dataclasses.dataclass
class _Nest:
    """One top-level statement with the buffers it touches."""

    stmt: tirx.Stmt
    reads: set
    writes: set


def split_members(func: tirx.PrimFunc) -> list[tirx.PrimFunc] | None:
    """Return the independent members of an unscheduled function, in program order.

    Parameters
    ----------
    func : PrimFunc
        An unscheduled function in the block form that FuseTIR produces.

    Returns
    -------
    list of PrimFunc, or None
        One function per member, whose parameters are those of ``func`` that the member touches (the same ``Var``
        objects, in the same order). ``None`` when the function is not in that form, has a single member, or holds a
        parameter that is no buffer.
    """
    if not isinstance(func.body, s_tir.SBlockRealize) or not all(
        tirx.is_buffer_var(p) for p in func.params
    ):
        return None
    root = func.body.block
    if root.iter_vars or root.match_buffers or root.init is not None:
        return None
    nests = [_analyse(stmt) for stmt in tirx.stmt_list(root.body)]
    groups = _components(nests, set(func.params))
    if len(groups) < 2:
        return None
    return [_extract(func, [nests[i] for i in group]) for group in groups]


def _analyse(stmt: tirx.Stmt) -> _Nest:
    """Collect the buffers of a nest's blocks; a reduction does not list its own accumulator among its reads."""
    nest = _Nest(stmt, set(), set())

    def visit(block: s_tir.SBlock) -> None:
        nest.reads.update(region.source for region in block.reads)
        nest.writes.update(region.source for region in block.writes)

    tvm_ffi.structural_walk(stmt, [(s_tir.SBlock, visit)])
    return nest


def _components(nests: list[_Nest], params: set) -> list[list[int]]:
    parent = list(range(len(nests)))

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, first in enumerate(nests):
        for j in range(i + 1, len(nests)):
            second = nests[j]
            touched = (first.writes & second.reads) | (first.reads & second.writes)
            for buffer in first.writes & second.writes:
                if buffer not in params or not _disjoint(
                    _written(first, buffer), _written(second, buffer)
                ):
                    touched.add(buffer)
            if touched and find(i) != find(j):
                parent[max(find(i), find(j))] = min(find(i), find(j))
    groups: dict[int, list[int]] = {}
    for i in range(len(nests)):
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


def _written(nest: _Nest, buffer: tirx.Var) -> list[list[tuple[int, int]]]:
    """Return, for each block that writes ``buffer``, the closed interval of indices it writes in each dimension."""
    boxes: list[list[tuple[int, int]]] = []

    def visit(block: s_tir.SBlock) -> None:
        analyzer = tvm.sym.Analyzer()
        for iter_var in block.iter_vars:
            analyzer.bind(iter_var.var, iter_var.dom)
        for region in block.writes:
            if region.source.same_as(buffer):
                box = []
                for dim in region.region:
                    low = analyzer.const_int_bound(dim.min)
                    high = analyzer.const_int_bound(dim.min + dim.extent - 1)
                    box.append((low.min_value, high.max_value))
                boxes.append(box)

    tvm_ffi.structural_walk(nest.stmt, [(s_tir.SBlock, visit)])
    return boxes


def _disjoint(first: list[list[tuple[int, int]]], second: list[list[tuple[int, int]]]) -> bool:
    def apart(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
        return any(
            a_hi < b_lo or b_hi < a_lo for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True)
        )

    return bool(first) and bool(second) and all(apart(a, b) for a in first for b in second)


def _extract(func: tirx.PrimFunc, nests: list[_Nest]) -> tirx.PrimFunc:
    root = func.body.block
    used = set().union(*(nest.reads | nest.writes for nest in nests))
    allocated = [buffer for buffer in root.alloc_buffers if buffer in used]
    stmts = [nest.stmt for nest in nests]
    body = stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)
    block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=allocated)
    attrs = {key: value for key, value in func.attrs.items() if not key.startswith("tvm_fusion.")}
    attrs.pop("global_symbol", None)
    attrs[MEMBER] = True
    return tirx.PrimFunc(
        [p for p in func.params if p in used],
        s_tir.SBlockRealize([], True, block),
        func.ret_type,
        tvm.ir.make_node("ir.DictAttrs", **attrs),
    )
