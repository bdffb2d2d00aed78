"""Structure of an unscheduled function: what its blocks compute and how they are connected.

Blocks are classified by their iterators and access patterns, never by their names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import tvm_ffi

from ..compat import ir, s_tir, tirx, tvm

_KINDS = {
    tirx.IterVar.DataPar: "S",
    tirx.IterVar.CommReduce: "R",
}


#: Blocks of the last functions that were read. Templates ask about the same one some dozen times, and reading
#: takes a millisecond a block. Each function is kept, so that its handle names no other one.
_DESCRIBED: dict[int, tuple[tirx.PrimFunc, tuple[Block, ...]]] = {}
_MOST_DESCRIBED = 64


@dataclasses.dataclass(frozen=True)
class Access:
    """A buffer read or written by a block.

    Parameters
    ----------
    buffer : str
        Key of the buffer, the same wherever the same buffer is accessed.
    shape : tuple of (int or None)
        Extents, None where symbolic.
    dtype : str
        Element type.
    scope : str
        Memory scope, ``"global"`` for parameters and unscheduled intermediates.
    indices : tuple of frozenset of int
        For each dimension the numbers of the block's iterators that occur in the index.
    plain : tuple of (int or None)
        For each dimension the number of the iterator that IS the index, or None.
    """

    buffer: str
    shape: tuple[int | None, ...]
    dtype: str
    scope: str
    indices: tuple[frozenset[int], ...]
    plain: tuple[int | None, ...]

    @property
    def nbytes(self) -> int | None:
        """Size of the whole buffer in bytes, None when symbolic."""
        return None if None in self.shape else math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a function.

    Parameters
    ----------
    name : str
        Its name, made unique within the structure. Stable while the schedule adds no block of the same name.
    handle : SBlockRV
        What schedule primitives take. Unlike names it stays valid through every change, and in copies of the
        schedule.
    kinds : str
        One letter per iterator: S spatial, R reduction, O anything else.
    extents : tuple of (int or None)
        Iterator extents, None where symbolic.
    reads, writes : tuple of Access
        Accesses; an accumulation's own buffer is not among the reads.
    is_output : bool
        Whether it writes a parameter of the function.
    is_injective : bool
        Whether it can be inlined into its consumers: all iterators spatial, one write, one plain store.
    is_nested : bool
        Whether it has blocks of its own (adaptive pooling, whose windows differ in size).
    """

    name: str
    handle: s_tir.schedule.SBlockRV = dataclasses.field(compare=False, repr=False)
    kinds: str
    extents: tuple[int | None, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    is_output: bool
    is_injective: bool
    is_nested: bool

    @property
    def is_reduction(self) -> bool:
        """Whether any iterator is a reduction."""
        return "R" in self.kinds

    @property
    def has_window(self) -> bool:
        """Whether an index adds a reduction iterator to a spatial one: a window that slides, or a group of channels."""
        reduced, spatial = set(self.reduced), set(self.spatial)
        return any(
            used & reduced and used & spatial for access in self.reads for used in access.indices
        )

    @property
    def spatial(self) -> tuple[int, ...]:
        """Numbers of the spatial iterators."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "S")

    @property
    def reduced(self) -> tuple[int, ...]:
        """Numbers of the reduction iterators."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "R")

    def extent(self, numbers: Iterable[int]) -> int:
        """Product of the extents of some iterators (all must be static)."""
        return math.prod(self.extents[i] for i in numbers)


@dataclasses.dataclass(frozen=True)
class Structure:
    """All blocks of a function, in program order, and the buffers between them."""

    blocks: tuple[Block, ...]

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        return all(None not in block.extents for block in self.blocks)

    @property
    def is_regular(self) -> bool:
        """Whether every block is one loop nest with only spatial and reduction iterators."""
        return self.is_ordered and not any(block.is_nested for block in self.blocks)

    @property
    def is_ordered(self) -> bool:
        """Whether every block has only spatial and reduction iterators, whatever its body does."""
        return all("O" not in block.kinds for block in self.blocks)

    @property
    def reductions(self) -> tuple[Block, ...]:
        """Blocks that reduce."""
        return tuple(block for block in self.blocks if block.is_reduction)

    @property
    def outputs(self) -> tuple[Block, ...]:
        """Blocks that write a parameter."""
        return tuple(block for block in self.blocks if block.is_output)

    def __getitem__(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    def producers(self, block: Block) -> tuple[Block, ...]:
        """Blocks that write what ``block`` reads."""
        read = {access.buffer for access in block.reads}
        return tuple(
            other
            for other in self.blocks
            if other is not block and read & {w.buffer for w in other.writes}
        )

    def consumers(self, block: Block) -> tuple[Block, ...]:
        """Blocks that read what ``block`` writes."""
        written = {access.buffer for access in block.writes}
        return tuple(
            other
            for other in self.blocks
            if other is not block and written & {r.buffer for r in other.reads}
        )

    def ancestors(self, block: Block) -> set[str]:
        """Names of all blocks that ``block`` depends on."""
        found: set[str] = set()
        todo = [block]
        while todo:
            for producer in self.producers(todo.pop()):
                if producer.name not in found:
                    found.add(producer.name)
                    todo.append(producer)
        return found


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element (a bool takes one)."""
    return max(1, (tvm.DataType(dtype).bits + 7) // 8)


def structure(sch: s_tir.Schedule) -> Structure | None:
    """Read the structure of the function that a schedule works on.

    Parameters
    ----------
    sch : s_tir.Schedule
        Schedule of a module with one function, ``main``. It is not changed.

    Returns
    -------
    Structure or None
        None when the function is not in block form.
    """
    func = sch.mod["main"]
    if root_block(func) is None:
        return None
    handles = sch.get_child_blocks(sch.get_sblock("root"))
    key = func.__chandle__()
    if key in _DESCRIBED:
        known = _DESCRIBED[key][1]
        pairs = zip(known, handles, strict=True)
        return Structure(tuple(dataclasses.replace(b, handle=handle) for b, handle in pairs))
    params = {buffer_key(param) for param in func.params}
    blocks: list[Block] = []
    names: set[str] = set()
    for handle in handles:
        block = sch.get(handle)
        name = block.name_hint
        while name in names:
            name += "'"
        names.add(name)
        blocks.append(_describe(block, name, handle, params))
    while len(_DESCRIBED) >= _MOST_DESCRIBED:
        _DESCRIBED.pop(next(iter(_DESCRIBED)), None)
    _DESCRIBED[key] = func, tuple(blocks)
    return Structure(tuple(blocks))


def without_inlined(sch: s_tir.Schedule, info: Structure, block: Block) -> Structure:
    """Return the structure once ``compute_inline`` has removed ``block``: only its consumers are read again.

    Parameters
    ----------
    sch : Schedule
        The schedule, after inlining.
    info : Structure
        What it was before.
    block : Block
        The block of ``info`` that was inlined.
    """
    consumers = {consumer.name for consumer in info.consumers(block)}
    blocks = []
    for other in info.blocks:
        if other.name in consumers:
            read = _describe(sch.get(other.handle), other.name, other.handle, set())
            blocks.append(dataclasses.replace(read, is_output=other.is_output))
        elif other is not block:
            blocks.append(other)
    return Structure(tuple(blocks))


def root_block(func: tirx.PrimFunc) -> s_tir.SBlock | None:
    """Return the root block of a function in block form, None for any other function."""
    realize = func.body
    return realize.block if isinstance(realize, s_tir.SBlockRealize) else None


def buffer_key(buffer: tirx.Buffer) -> str:
    """Return a key that is equal for the same buffer object only."""
    return f"{buffer.name}@{buffer.__chandle__()}"


def nodes_of(root: tirx.Stmt | tirx.PrimExpr, kind: type | tuple[type, ...]) -> list:
    """Return every node of one type, or of one of several, below ``root``, in post order."""
    nodes: list = []
    tvm_ffi.structural_walk(root, (kind, nodes.append))
    return nodes


def _describe(
    block: s_tir.SBlock, name: str, handle: s_tir.schedule.SBlockRV, params: set[str]
) -> Block:
    numbers = {iter_var.var.__chandle__(): i for i, iter_var in enumerate(block.iter_vars)}
    kinds = "".join(_KINDS.get(iter_var.iter_type, "O") for iter_var in block.iter_vars)
    writes = tuple(_access(region, numbers) for region in block.writes)
    written = {write.buffer for write in writes}
    reads = tuple(
        access
        for access in (_access(region, numbers) for region in block.reads)
        if access.buffer not in written
    )
    injective = (
        set(kinds) <= {"S"}
        and len(writes) == 1
        and block.init is None
        and isinstance(block.body, tirx.BufferStore)
        and _is_permutation(writes[0])
    )
    return Block(
        name=name,
        handle=handle,
        kinds=kinds,
        extents=tuple(static_extent(iter_var.dom.extent) for iter_var in block.iter_vars),
        reads=reads,
        writes=writes,
        is_output=any(write.buffer in params for write in writes),
        is_injective=injective,
        is_nested=bool(nodes_of(block.body, s_tir.SBlock)),
    )


def _is_permutation(write: Access) -> bool:
    """Whether every index is one iterator alone or constant, and no iterator occurs twice."""
    used = [number for number in write.plain if number is not None]
    simple = all(p is not None or not i for p, i in zip(write.plain, write.indices, strict=True))
    return simple and len(set(used)) == len(used)


def _access(region: ir.TensorRegion, numbers: dict) -> Access:
    buffer = region.source
    used, plain = [], []
    for dim in region.region:
        used.append(_iterators(dim.min, numbers) | _iterators(dim.extent, numbers))
        is_point = isinstance(dim.extent, tirx.IntImm) and int(dim.extent) == 1
        is_var = is_point and isinstance(dim.min, tirx.Var)
        plain.append(numbers.get(dim.min.__chandle__()) if is_var else None)
    return Access(
        buffer=buffer_key(buffer),
        shape=tuple(static_extent(extent) for extent in buffer.shape),
        dtype=str(buffer.dtype),
        scope=buffer.scope(),
        indices=tuple(used),
        plain=tuple(plain),
    )


def _iterators(expr: tirx.PrimExpr, numbers: dict) -> frozenset[int]:
    """Numbers of the block's iterators in an index; most are one variable or a number and need no walk."""
    if isinstance(expr, tirx.IntImm):
        return frozenset()
    nodes = [expr] if isinstance(expr, tirx.Var) else nodes_of(expr, tirx.Var)
    return frozenset(numbers[n.__chandle__()] for n in nodes if n.__chandle__() in numbers)


def static_extent(extent: tirx.PrimExpr | int) -> int | None:
    """Return an extent as a number, None where it is symbolic."""
    if isinstance(extent, int | tirx.IntImm):
        return int(extent)
    return None


def axis_classes(
    info: Structure, names: Sequence[str], *, through_params: bool = False
) -> dict[tuple[str, int], int] | None:
    """Group the iterators of some blocks that walk the same axis of the buffers between these blocks.

    An iterator and a buffer dimension belong together where the iterator alone is the index. ``softmax`` over rows
    of ``x[i, j]`` gives two classes: ``i`` of every stage, and ``j`` of every stage.

    Parameters
    ----------
    info : Structure
        The function.
    names : sequence of str
        The blocks to look at.
    through_params : bool
        Whether two blocks that read the same parameter are connected too, and not only by buffers that one of the
        blocks writes.

    Returns
    -------
    dict of (block name, iterator number) to int, or None
        Class numbers. None when two iterators of one block fall into the same class (``x @ x.T``), where
        "the same axis" has no meaning.
    """
    parent: dict = {}

    def find(item):
        parent.setdefault(item, item)
        while parent[item] != item:
            item = parent[item]
        return item

    inner = {write.buffer for name in names for write in info[name].writes}
    for name in names:
        block = info[name]
        for access in (*block.reads, *block.writes):
            if through_params or access.buffer in inner:
                for dim, number in enumerate(access.plain):
                    if number is not None:
                        parent[find((name, number))] = find((access.buffer, dim))
    labels: dict = {}
    classes = {}
    for name in names:
        seen = set()
        for number, extent in enumerate(info[name].extents):
            label = labels.setdefault(find((name, number)), len(labels))
            if label in seen and extent != 1:
                return None
            seen.add(label)
            classes[name, number] = label
    return classes
