"""Merge lowered members into one kernel whose blocks are divided among them.

Block ``b`` of the merged grid runs member ``m`` when ``b`` lies in the range of blocks that ``m`` was given; the range
is uniform over a block, so a barrier inside a branch is executed by all threads of the block or by none.

Members may want different numbers of threads. The merged block has as many as the largest member wants, and a smaller
member's threads ``t >= n`` skip its work: a guard ``t < n`` is put around every statement without a barrier, never
around a barrier itself, which all threads must reach. Loops and conditions around a barrier are the same for all
threads of a block (else the member itself would have been illegal), so the surplus threads follow them.

TVM's barrier pass runs once more on the merged function, in which each barrier that it still misses would stand in a
branch, which it refuses. Then the members get barriers wherever it could want one, before they become branches.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi

from ...compat import Target, s_tir, tirx, tvm
from ..allocation import IS_FLAT
from ..base import Limits
from .partition_lower import (
    BLOCK_TAGS,
    THREAD_TAGS,
    FlatMember,
    add_barriers,
    can_be_lowered,
    contains,
    flat,
    launch,
    substitute,
)
from .tensor_core.device_code import call as device_function


class _UnsafeGuard(Exception):
    """A barrier sits where surplus threads cannot be kept from the work around it."""


def merge_members(
    func: tirx.PrimFunc,
    members: Sequence[FlatMember],
    bounds: Limits,
    target: Target,
    params: Sequence[tirx.Var] | None = None,
) -> tirx.PrimFunc | None:
    """Return one flat PrimFunc with one launch that runs all members.

    Parameters
    ----------
    func : PrimFunc
        The group function; gives the signature and the attributes.
    members : sequence of FlatMember
        Lowered members over its parameters.
    bounds : Limits
        Shared memory that a block may have.
    target : Target
        Where it will run.
    params : sequence of Var, optional
        Parameters that the members use instead of those of ``func``.

    Returns
    -------
    PrimFunc or None
        ``None`` when the members' thread counts cannot be reconciled soundly, their shared memory does not fit, or TVM
        would need another barrier inside a branch.
    """
    params = func.params if params is None else params
    threads = max(member.size(THREAD_TAGS) for member in members)
    blocks = sum(member.size(BLOCK_TAGS) for member in members)
    block, thread = tirx.Var("blockIdx_x", "int32"), tirx.Var("threadIdx_x", "int32")
    views, view_map = _merge_views(members)
    slots, slot_map = _share_slots(members)
    if not _has_room(slots, bounds):
        return None
    grid, lanes = (block, blocks), (thread, threads)
    bodies, first = [], 0
    for index, member in enumerate(members):
        place = block - first if first else block
        bodies.append(_branch(member, place, thread, view_map | slot_map[index]))
        first += member.size(BLOCK_TAGS)
    bodies = _all_waiting(bodies)
    merged = _as_branches(params, func, members, views, slots, grid, lanes, bodies)
    if merged is None or can_be_lowered(merged, target):
        return merged
    bodies = [add_barriers(params, views, slots, grid, lanes, body, target) for body in bodies]
    if any(body is None for body in bodies):
        return None
    merged = _as_branches(params, func, members, views, slots, grid, lanes, bodies)
    return merged if merged is not None and can_be_lowered(merged, target) else None


def _all_waiting(bodies: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """Let every member wait for the previous kernel where one does: the launch overlaps with it for all of them."""

    def waits(body: tirx.Stmt) -> bool:
        return contains(body, (tvm.ir.Call, lambda call: _calls(call, "tvmf_wait_for_previous")))

    waiting = [waits(body) for body in bodies]
    if not any(waiting):
        return bodies
    wait = tirx.Evaluate(device_function("tvmf_wait_for_previous"))
    return [
        body if done else flat([wait, body]) for done, body in zip(waiting, bodies, strict=True)
    ]


def _has_room(slots: Sequence[tirx.Var], bounds: Limits) -> bool:
    """Whether a block may have these shared-memory buffers, of which it asks for the dynamic ones at launch."""
    static = dynamic = 0
    for slot in slots:
        nbytes = _elements(slot) * tvm.DataType(str(slot.ty.dtype)).bits // 8
        if slot.scope() == "shared.dyn":
            dynamic += nbytes
        else:
            static += nbytes
    if static > bounds.shared_bytes:
        return False
    return not dynamic or static + dynamic <= bounds.dynamic_shared_bytes


def _as_branches(
    params: Sequence[tirx.Var],
    func: tirx.PrimFunc,
    members: Sequence[FlatMember],
    views: Sequence[tirx.Stmt],
    slots: Sequence[tirx.Var],
    grid: tuple[tirx.Var, int],
    lanes: tuple[tirx.Var, int],
    bodies: Sequence[tirx.Stmt],
) -> tirx.PrimFunc | None:
    """Make bodies the branches of one kernel; None where surplus threads cannot be kept from a member's work."""
    thread, threads = lanes
    branches, first = [], 0
    for member, body in zip(members, bodies, strict=True):
        if member.size(THREAD_TAGS) < threads:
            try:
                body = flat(_guard([body], thread < member.size(THREAD_TAGS), {thread}))
            except _UnsafeGuard:
                return None
        first += member.size(BLOCK_TAGS)
        branches.append((first, body))
    chain = branches[-1][1]
    for end, body in reversed(branches[:-1]):
        chain = tirx.IfThenElse(grid[0] < end, body, chain)
    kernel = flat([*views, launch(slots, grid, lanes, chain)])
    # TVM's analyses of PrimFuncs (is it a reshape?) expect a root block, flat as its inside may be.
    root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", kernel))
    merged = tirx.PrimFunc(params, root, func.ret_type, func.attrs).with_attr(IS_FLAT, True)
    # Members that came from one operator's template can bind the same variables; each branch needs its own.
    return tirx.transform.ConvertSSA()(tvm.IRModule({"main": merged}))["main"]


def _merge_views(members: Sequence[FlatMember]) -> tuple[list, dict]:
    """Declare each flat parameter view once, ahead of the launch."""
    views: list = []
    replaced: dict = {}
    for member in members:
        for view in member.views:
            for known in views:
                if tvm_ffi.structural_equal(known.data, view.data) and _same_type(
                    known.buffer, view.buffer
                ):
                    replaced[view.buffer] = known.buffer
                    break
            else:
                views.append(view)
    return views, replaced


def _same_type(first: tirx.Var, second: tirx.Var) -> bool:
    return tvm_ffi.structural_equal(first.ty, second.ty)


def _share_slots(members: Sequence[FlatMember]) -> tuple[list, list[dict]]:
    """Give the members common shared-memory buffers, since a block runs only one of them.

    The i-th largest buffer of each member of one scope and dtype shares a slot, so that the kernel holds about the
    maximum over the members, not their sum. Two buffers of one member never share: the barrier pass, which runs once
    more on the merged function, would ask for a barrier between them.
    """
    sizes: dict[tuple[str, str, int], int] = {}
    alignment: dict[tuple[str, str, int], int] = {}
    keys: list[dict] = []
    for member in members:
        rank: dict[tuple[str, str], int] = {}
        assigned = {}
        for buffer in sorted(member.shared, key=_elements, reverse=True):
            kind = (buffer.scope(), str(buffer.ty.dtype))
            key = (*kind, rank.setdefault(kind, 0))
            rank[kind] += 1
            sizes[key] = max(sizes.get(key, 0), _elements(buffer))
            alignment[key] = max(alignment.get(key, 0), int(buffer.ty.data_alignment))
            assigned[buffer] = key
        keys.append(assigned)
    slots = {
        key: tirx.decl_buffer(
            (size,),
            key[1],
            f"shared_{index}",
            scope=key[0],
            data_alignment=alignment[key],
            layout=None,
        )
        for index, (key, size) in enumerate(sizes.items())
    }
    return list(slots.values()), [
        {buffer: slots[key] for buffer, key in assigned.items()} for assigned in keys
    ]


def _elements(buffer: tirx.Var) -> int:
    count = 1
    for extent in buffer.ty.shape:
        count *= int(extent)
    return count


def _branch(member: FlatMember, block: tirx.Expr, thread: tirx.Var, buffers: dict) -> tirx.Stmt:
    """Return the member's body in terms of the merged launch."""
    places = {
        **_digits(member, BLOCK_TAGS, block),
        **_digits(member, THREAD_TAGS, thread),
    }
    replaced = {var: tirx.Cast(var.ty, places[tag]) if str(var.ty) != "int32" else places[tag]
                for var, tag in member.variables.items()}  # fmt: skip
    return substitute(flat(member.body), replaced | buffers)


def _digits(member: FlatMember, tags: tuple[str, ...], linear: tirx.Expr) -> dict[str, tirx.Expr]:
    """Split a linear index into the member's x, y and z indices, x fastest as in CUDA."""
    digits = {}
    used = [tag for tag in tags if member.extents.get(tag, 1) > 1]
    for tag in tags:
        digits[tag] = tirx.IntImm("int32", 0)
    for tag in used:
        extent = member.extents[tag]
        digits[tag] = linear if tag == used[-1] else tirx.floormod(linear, extent)
        linear = tirx.floordiv(linear, extent)
    return digits


def _is_block_barrier(call: tvm.ir.Expr) -> bool:
    name = getattr(getattr(call, "op", None), "name", "")
    return name == "tirx.tvm_storage_sync" or _calls(call, "tvmf_barrier")


def _calls(call: tvm.ir.Expr, name: str) -> bool:
    """Whether an expression calls a device function."""
    operator = getattr(getattr(call, "op", None), "name", "")
    return operator == "tirx.cuda.func_call" and str(call.args[0].value) == name


def _is_barrier(call: tvm.ir.Call) -> bool:
    """Whether threads wait here for others; barriers other than the plain one count their threads."""
    name = getattr(call.op, "name", "")
    return (
        _is_block_barrier(call) or "barrier" in name or name.endswith(("cta_sync", "cluster_sync"))
    )


def _has_barrier(node: object) -> bool:
    return contains(node, (tvm.ir.Call, _is_barrier))


def _guard(stmts: Sequence[tirx.Stmt], condition: tirx.Expr, lanes: set) -> list:
    """Keep threads that fail ``condition`` from every statement except barriers and what must surround them."""
    out: list = []
    run: list = []

    def close() -> None:
        if run:
            out.append(tirx.IfThenElse(condition, flat(run), None))
            run.clear()

    for stmt in (inner for part in stmts for inner in tirx.stmt_list(part)):
        if isinstance(stmt, (tirx.AllocBuffer, tirx.DeclBuffer)):
            close()
            out.append(stmt)
        elif isinstance(stmt, tirx.Bind):
            # Its scope reaches past the guard, so the binding stays outside and only its memory access is guarded.
            close()
            value = stmt.value
            if _differs(value, lanes):
                lanes.add(stmt.var)
            if contains(value, (tvm.ir.TensorLoad, lambda _: True), (tvm.ir.Call, lambda _: True)):
                if not tvm.ir.is_prim_expr(value) or _has_barrier(value):
                    raise _UnsafeGuard
                value = tirx.if_then_else(condition, value, tirx.const(0, str(value.ty)))
            out.append(tirx.Bind(stmt.var, value))
        elif not _has_barrier(stmt):
            run.append(stmt)
        else:
            close()
            out.append(_guard_around(stmt, condition, lanes))
    close()
    return out


def _differs(expr: object, lanes: set) -> bool:
    """Whether an expression may differ between the threads of a block."""
    return contains(expr, (tirx.Var, lambda var: var in lanes), (tvm.ir.TensorLoad, lambda _: True))


def _guard_around(stmt: tirx.Stmt, condition: tirx.Expr, lanes: set) -> tirx.Stmt:
    """Guard inside a statement that contains a barrier."""

    def inner(body: tirx.Stmt) -> tirx.Stmt:
        return flat(_guard([body], condition, lanes))

    if isinstance(stmt, tirx.Evaluate) and _is_block_barrier(stmt.value):
        return stmt
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, inner(stmt.body))
    if (
        isinstance(stmt, tirx.For)
        and not _differs(stmt.extent, lanes)
        and not _differs(stmt.min, lanes)
    ):
        return tirx.For(
            stmt.loop_var, stmt.min, stmt.extent, stmt.kind, inner(stmt.body),
            stmt.thread_binding, stmt.annotations, stmt.step,
        )  # fmt: skip
    if isinstance(stmt, tirx.IfThenElse) and not _differs(stmt.condition, lanes):
        return tirx.IfThenElse(
            stmt.condition, inner(stmt.then_case), stmt.else_case and inner(stmt.else_case)
        )
    raise _UnsafeGuard
