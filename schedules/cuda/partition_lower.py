"""Lower one scheduled member to flat statements with its barriers in place.

TVM's barrier pass refuses to put a barrier into a branch, so the members of a partitioned kernel get their barriers
before they become branches. The passes below are the head of TVM's own s_tir pipeline, up to the barriers; loops are
left rolled, because the pipeline that compiles the merged function unrolls them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import tvm_ffi

from ...compat import Target, s_tir, tirx, tvm
from ..allocation import idle_passes, without_passes
from ..flatten_exactly import flatten_exactly, passes_before_flattening

_LOG = logging.getLogger(__name__)

#: Threads of a block, or blocks of a grid, in the order in which CUDA linearises them.
THREAD_TAGS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
BLOCK_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")


@dataclasses.dataclass
class FlatMember:
    """A member as flat statements without thread launches.

    Attributes
    ----------
    views : list of DeclBuffer
        Flat views of the member's parameters.
    body : list of Stmt
        What one thread executes; refers to ``variables``.
    variables : dict
        Each launch variable (``Var``) and its tag, such as ``"threadIdx.x"``.
    extents : dict
        Extent by tag.
    shared : list of Var
        The shared-memory buffers, whose allocations are not in ``body``.
    packed : list of (Var, Var, list of int)
        Parameters of the unscheduled function that the member wants permuted: what stands for each, and how.
    """

    views: list
    body: list
    variables: dict
    extents: dict[str, int]
    shared: list
    packed: list = dataclasses.field(default_factory=list)

    def size(self, tags: tuple[str, ...]) -> int:
        """Return the number of threads or blocks along ``tags``."""
        product = 1
        for tag in tags:
            product *= self.extents.get(tag, 1)
        return product


def lower_member(func: tirx.PrimFunc, target: Target) -> FlatMember | None:
    """Lower a scheduled member; ``None`` when it is not exactly one kernel launch with constant extents."""
    body = _lowered(func, target, _passes(), exactly=True)
    return None if body is None or contains(body, (tvm.ir.Call, _is_grid_barrier)) else _peel(body)


def _lowered(
    func: tirx.PrimFunc, target: Target, passes: list, *, exactly: bool = False
) -> tirx.Stmt | None:
    """Run passes on one function, with buffers flattened ``exactly``; None where one of them refuses it."""
    func = func.with_attr("global_symbol", "member").with_attr("target", target.with_host("llvm"))
    try:
        func = flatten_exactly(func) if exactly else func
        with without_passes(*idle_passes(func)):
            module = tvm.ir.transform.Sequential(passes)(tvm.IRModule({"member": func}))
    except tvm.error.InternalError as error:
        # "Cannot insert syncs inside condition" is a failed check of TVM's, not an error of its own kind.
        _LOG.info("TVM cannot lower a member: %s", str(error).splitlines()[-1])
        return None
    return module["member"].body


def can_be_lowered(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether TVM lowers a merged function without asking for another barrier in a branch."""
    pipeline, _, _ = s_tir.pipeline.default_s_tir_pipeline()
    return _lowered(func, target, [pipeline]) is not None


def add_barriers(
    params: Sequence[tirx.Var],
    views: Sequence[tirx.Stmt],
    shared: Sequence[tirx.Var],
    grid: tuple[tirx.Var, int],
    block: tuple[tirx.Var, int],
    body: tirx.Stmt,
    target: Target,
) -> tirx.Stmt | None:
    """Add barriers to the body of a kernel wherever threads touch shared memory that others may have touched.

    TVM leaves a barrier out where it sees that a thread reads only what it wrote itself. Further passes can hide that,
    so here the index of the thread is hidden from the start.

    Parameters
    ----------
    params : sequence of Var
        Parameters of the function.
    views : sequence of DeclBuffer
        Flat views of them.
    shared : sequence of Var
        Shared-memory buffers.
    grid, block : (Var, int)
        Index and extent of the blocks and of the threads.
    body : Stmt
        What a thread executes.
    target : Target
        Where it will run.

    Returns
    -------
    Stmt or None
        The body; None when a barrier would have to stand under a condition.
    """
    lane = tirx.Var("lane", block[0].ty)
    hidden = flat([tirx.Bind(lane, block[0]), substitute(body, {block[0]: lane})])
    func = tirx.PrimFunc(params, flat([*views, launch(shared, grid, block, hidden)]))
    lower = s_tir.transform
    stmt = _lowered(func, target, [lower.ThreadSync("shared"), lower.ThreadSync("shared.dyn")])
    if stmt is None:
        return None
    stmt = tirx.stmt_list(stmt)[-1]
    while _is_launch(stmt):
        stmt = stmt.body
    rest = [part for part in tirx.stmt_list(stmt) if not _is_one_of(part, lane, shared)]
    return substitute(flat(rest), {lane: block[0]})


def _is_one_of(stmt: tirx.Stmt, lane: tirx.Var, buffers: Sequence[tirx.Var]) -> bool:
    """Whether a statement binds the hidden index or allocates one of the buffers."""
    if isinstance(stmt, tirx.Bind):
        return stmt.var.same_as(lane)
    return isinstance(stmt, tirx.AllocBuffer) and any(stmt.buffer.same_as(b) for b in buffers)


def substitute(stmt: tirx.Stmt, replaced: dict) -> tirx.Stmt:
    """Replace variables (buffers among them) in a statement."""
    return tvm_ffi.structural_map(stmt, [(tirx.Var, lambda var: replaced.get(var, var))])


def launch(
    shared: Sequence[tirx.Var],
    grid: tuple[tirx.Var, int],
    block: tuple[tirx.Var, int],
    body: tirx.Stmt,
) -> tirx.Stmt:
    """Return a kernel with a one-dimensional grid and block and its shared-memory buffers (see ``add_barriers``)."""
    kernel = flat([*(tirx.AllocBuffer(buffer) for buffer in shared), body])
    for (variable, extent), tag in ((block, "threadIdx.x"), (grid, "blockIdx.x")):
        axis = tirx.IterVar(tvm.ir.Range(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
        kernel = tirx.AttrStmt(axis, "thread_extent", tirx.IntImm("int32", extent), kernel)
    return kernel


def flat(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return one statement that runs several, without nested sequences."""
    parts = [inner for stmt in stmts for inner in tirx.stmt_list(stmt)]
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)


def _is_grid_barrier(call: tvm.ir.Call) -> bool:
    """Whether a call waits for every block of the launch, of which a member has only some."""
    is_barrier = getattr(call.op, "name", "") == "tirx.tvm_storage_sync"
    return is_barrier and str(call.args[0].value) == "global"


def _passes() -> list:
    config = tvm.transform.PassContext.current().config
    lower, flat = s_tir.transform, tirx.transform
    passes = [
        *passes_before_flattening(),
        flat.FlattenBuffer(),
        flat.BF16ComputeLegalize(),
        flat.NarrowDataType(32),
        lower.LoopPartition(),
        flat.VectorizeLoop(not bool(config.get("tirx.disable_vectorize", False))),
        lower.InjectVirtualThread(),
        lower.InjectDoubleBuffer(),
    ]
    # Storage is shared among a member's buffers here and not after merging, where a barrier could no longer be added.
    if not bool(config.get("tirx.disable_storage_rewrite", False)):
        passes.append(flat.StorageRewrite())
    if bool(config.get("tirx.use_async_copy", False)):
        passes.append(lower.LowerAsyncDMA())
    passes += [
        flat.StmtSimplify(),
        flat.RemoveNoOp(),
        lower.RewriteUnsafeSelect(),
        lower.ThreadSync("shared"),
        lower.ThreadSync("shared.dyn"),
        lower.ThreadSync("warp"),
        lower.InferFragment(),
        lower.LowerThreadAllreduce(),
    ]
    if bool(config.get("tirx.use_async_copy", False)):
        passes.append(lower.InjectPTXAsyncCopy())
    # Warp memory is addressed through threadIdx.x, which the merged kernel computes from a linear index.
    passes.append(flat.LowerWarpMemory())
    return passes


def _peel(body: tirx.Stmt) -> FlatMember | None:
    """Take the launches, the parameter views and the shared allocations off a lowered kernel."""
    outer = tirx.stmt_list(body)
    views, launches = outer[:-1], outer[-1]
    if not all(isinstance(view, tirx.DeclBuffer) for view in views) or not _is_launch(launches):
        return None
    member = FlatMember(views, [], {}, {}, [])
    try:
        member.body = _without_launches(launches, member)
    except _NotOneLaunch:
        return None
    return member


class _NotOneLaunch(Exception):
    """Launch extents differ or are not constant."""


def _is_launch(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent"


def _without_launches(stmt: tirx.Stmt, member: FlatMember) -> list:
    if _is_launch(stmt):
        tag, extent = stmt.node.thread_tag, stmt.value
        if not isinstance(extent, tirx.IntImm) or member.extents.setdefault(
            tag, int(extent)
        ) != int(extent):
            raise _NotOneLaunch
        if tag not in THREAD_TAGS + BLOCK_TAGS:
            raise _NotOneLaunch
        member.variables[stmt.node.var] = tag
        return _without_launches(stmt.body, member)
    if isinstance(stmt, tirx.AllocBuffer) and stmt.buffer.scope().startswith("shared"):
        member.shared.append(stmt.buffer)
        return []
    if isinstance(stmt, tirx.SeqStmt):
        return [inner for part in stmt.seq for inner in _without_launches(part, member)]
    if not _has_launch_or_shared(stmt):
        return [stmt]
    if isinstance(stmt, tirx.AttrStmt):
        inner = _sequence(_without_launches(stmt.body, member))
        return [tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, inner)]
    if isinstance(stmt, tirx.For):
        inner = _sequence(_without_launches(stmt.body, member))
        return [
            tirx.For(
                stmt.loop_var, stmt.min, stmt.extent, stmt.kind, inner,
                stmt.thread_binding, stmt.annotations, stmt.step,
            )
        ]  # fmt: skip
    raise _NotOneLaunch


def _has_launch_or_shared(stmt: tirx.Stmt) -> bool:
    return contains(
        stmt,
        (tirx.AttrStmt, _is_launch),
        (tirx.AllocBuffer, lambda node: node.buffer.scope().startswith("shared")),
    )


def _sequence(stmts: list) -> tirx.Stmt:
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)


def contains(root: object, *tests: tuple) -> bool:
    """Return whether a node below ``root`` has one of the types of ``tests`` and passes its predicate.

    Parameters
    ----------
    root : Object
        A statement or an expression.
    tests : tuple of (type, callable)
        Node type and predicate.
    """

    def stop_if(predicate):
        return lambda node: tvm_ffi.VisitInterrupt(node) if predicate(node) else None

    callbacks = [(kind, stop_if(predicate)) for kind, predicate in tests]
    return tvm_ffi.structural_walk(root, callbacks, order="pre") is not None
