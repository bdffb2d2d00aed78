"""Gates: small products whose values scale or shift a large tensor, as in squeeze-and-excite.

A block writes a tile of the large output. It first computes the gates that its tile needs, together, into shared
memory: partial sums by all threads, then one value each. Blocks that share gates compute them again; that is cheap,
because an output element costs a few products at most. The elementwise part runs coalesced, 16 bytes at a time where
rows allow it.
"""

from __future__ import annotations

import dataclasses
import functools

from ...compat import Target, s_tir, tirx
from ..allocation import planned_shared_bytes
from ..analysis import Access, Block, Structure, structure
from ..base import ScheduleTemplate, limits
from ..decisions import alternatives
from ..index_forms import IndexForms
from ..steps import (
    LoopRV,
    SBlockRV,
    fuse_loops,
    guarded,
    inline_injective,
    isolate_outputs,
    loops_of,
    with_simple_indices,
)
from .gate_tiles import Gate, GateProblem, GateTile, gate_tiles, is_aligned, vector_width
from .matmul import is_product

#: Products per output element beyond which a gate is an anchor of its own, for which registers are tiled.
_SHARE = 16

#: Up to so many rows a weight is read once or twice anyway, and computing gates here costs no reuse.
_FEW_ROWS = 2

#: How many tiles to try until one fits into shared memory.
_ATTEMPTS = 8


class Gated(ScheduleTemplate):
    """Products of which every value meets many elements of the output, any number of them, with one grid.

    Each product may have a prologue and an elementwise epilogue of its own (a sigmoid), and be reshaped. What
    combines the gates with the large operands, and what follows, is elementwise; outputs are of one shape.
    """

    name = "gated"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the schedule; None when a product is not broadcast, costs too much, or feeds another."""
        base = s_tir.Schedule(with_simple_indices(func))
        form = recognise(base)
        if form is None:
            return None
        bounds = limits(target)
        ranked = functools.partial(gate_tiles, form.problem, bounds)
        for tile in alternatives("tile", ranked, count=_ATTEMPTS):
            scheduled = _schedule(base.copy(), form, tile)
            if planned_shared_bytes(scheduled) <= bounds.shared_bytes:
                return scheduled
        return None


@dataclasses.dataclass(frozen=True)
class GatedForm:
    """A function that the template fits.

    Parameters
    ----------
    outputs : tuple of Block
        Elementwise, all over the same iteration space; they read gates and parameters.
    gates : tuple of (Block, tuple of Block)
        Each block that computes gates, and the products that it reads.
    runs : tuple of tuple of int
        The output's axes, neighbours that no gate depends on taken together.
    problem : GateProblem
        The same for the tile search.
    """

    outputs: tuple[Block, ...]
    gates: tuple[tuple[Block, tuple[Block, ...]], ...]
    runs: tuple[tuple[int, ...], ...]
    problem: GateProblem


def recognise(sch: s_tir.Schedule) -> GatedForm | None:
    """Bring a function into gated form: products, gates, and outputs with everything else inlined.

    Parameters
    ----------
    sch : s_tir.Schedule
        A fresh schedule, changed in place.

    Returns
    -------
    GatedForm or None
        None when the function has another form.
    """
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or not info.reductions:
        return None
    names = {block.name for block in info.reductions}
    for block in info.reductions:
        if not (is_product(block) and _reuses(block)) or names & info.ancestors(block):
            return None
    info = isolate_outputs(sch)
    gates = _broadcast(info)
    if gates is None or len({output.extents for output in info.outputs}) != 1:
        return None
    bare = [block for block in info.reductions if block.name in gates]
    for block in bare:
        sch.cache_write(block.handle, 0, "global")
    if bare:
        gates = _broadcast(structure(sch))
    info = inline_injective(sch, keep=gates)
    if any(IndexForms(sch.get(block.handle)).has_suspects() for block in info.blocks):
        return None
    return _form(info, gates) if _is_layered(info, gates) else None


def _broadcast(info: Structure) -> set[str] | None:
    """Blocks that the products end in before a larger block reads them; None when a product reaches an output."""
    found: set[str] = set()
    todo = list(info.reductions)
    while todo:
        block = todo.pop()
        if block.is_output:
            return None
        size = block.extent(block.spatial)
        for consumer in info.consumers(block):
            if consumer.extent(consumer.spatial) > size:
                found.add(block.name)
            else:
                todo.append(consumer)
    return found


def _is_layered(info: Structure, gates: set[str]) -> bool:
    """Whether products are read by one gate each, and gates by outputs alone."""
    for block in info.blocks:
        consumers = info.consumers(block)
        if block.is_reduction:
            fits = len(consumers) == 1 and consumers[0].name in gates
        elif block.name in gates:
            fits = block.is_injective and all(consumer.is_output for consumer in consumers)
        else:
            fits = block.is_output
        if not fits:
            return False
    return True


def _form(info: Structure, names: set[str]) -> GatedForm | None:
    extents = info.outputs[0].extents
    whole = info.outputs[0].extent(range(len(extents)))
    gates = [block for block in info.blocks if block.name in names]
    products = sum(
        block.extent(range(len(block.extents)))
        for block in info.reductions
        if not _is_read_once(block)
    )
    if products > _SHARE * whole:
        return None
    axes = {gate.name: _axes(info, gate) for gate in gates}
    used = set().union(*axes.values())
    runs: list[tuple[int, ...]] = []
    for axis in range(len(extents)):
        if runs and axis not in used and runs[-1][-1] not in used:
            runs[-1] = (*runs[-1], axis)
        else:
            runs.append((axis,))
    described = []
    for gate in gates:
        places = frozenset(i for i, run in enumerate(runs) if axes[gate.name] & set(run))
        for block in info.producers(gate):
            described.append(Gate(places, block.extent(block.reduced), _is_along(block)))
    problem = GateProblem(
        tuple(info.outputs[0].extent(run) for run in runs),
        tuple(described),
        vector_width(info.outputs),
        sum(
            access.nbytes / whole
            for output in info.outputs
            for access in (*output.reads, *output.writes)
            if access.shape == extents
        ),
    )
    pairs = tuple((gate, info.producers(gate)) for gate in gates)
    return GatedForm(info.outputs, pairs, tuple(runs), problem)


def _reuses(product: Block) -> bool:
    """Whether an operand serves several sums; without that it is a reduction of rows, which has its own template."""
    return any(_rows(product, access) > 1 for access in product.reads)


def _rows(product: Block, access: Access) -> int:
    """How many sums each element of an operand serves, windows aside."""
    return product.extent(set(product.spatial) - set().union(*access.indices))


def _is_read_once(product: Block) -> bool:
    """Whether an operand's elements are used once or twice, so that reading them is all the time there is."""
    reduced, spatial = set(product.reduced), set(product.spatial)
    for access in product.reads:
        slides = any(
            any(product.extents[i] != 1 for i in used & reduced)
            and any(product.extents[i] != 1 for i in used & spatial)
            for used in access.indices
        )
        if _rows(product, access) <= _FEW_ROWS and not slides:
            return True
    return False


def _axes(info: Structure, gate: Block) -> frozenset[int]:
    """Output axes that the gate's values depend on."""
    written = {write.buffer for write in gate.writes}
    return frozenset(
        axis
        for output in info.outputs
        for access in output.reads
        if access.buffer in written
        for used in access.indices
        for axis in used
    )


def _is_along(product: Block) -> bool:
    """Whether neighbours in memory of the larger operand belong to one sum rather than to neighbouring gates."""
    larger = max(product.reads, key=lambda access: access.nbytes)
    innermost = [used for used, size in zip(larger.indices, larger.shape, strict=True) if size != 1]
    return bool(innermost) and any(i in product.reduced for i in innermost[-1])


#: A block that some threads skip: the block, the loops around it, and how many positions of them have work.
Guard = tuple[SBlockRV, LoopRV, LoopRV, int]


def _schedule(sch: s_tir.Schedule, form: GatedForm, tile: GateTile) -> tirx.PrimFunc:
    lanes = iter(tile.lanes)
    partial = {
        product.name: _split_sum(sch, product, next(lanes))
        for _, products in form.gates
        for product in products
    }
    guards: list[Guard] = []
    grids = [_tile_output(sch, form, output, tile, guards) for output in form.outputs]
    grid = sch.merge(*grids) if len(grids) > 1 else grids[0]
    sch.bind(grid, "blockIdx.x")
    for gate, products in reversed(form.gates):
        sch.compute_at(gate.handle, grid, preserve_unit_loops=True)
        sch.set_scope(gate.handle, 0, "shared")
        for product in products:
            # Moved here first: below the loop over threads, partial sums for idle ones would be needed too.
            sch.compute_at(product.handle, grid, preserve_unit_loops=True)
            if partial[product.name] is not None:
                guards.append(
                    _compute_partial(sch, product, partial[product.name], grid, tile.threads)
                )
        spread = _spread(sch, sch.get_loops(gate.handle)[1:], tile.threads)
        for product in products:
            sch.compute_at(product.handle, spread[1], preserve_unit_loops=True)
            sch.set_scope(product.handle, 0, "local")
            guards.append((product.handle, *spread))
    return guarded(sch, guards)


def _split_sum(sch: s_tir.Schedule, product: Block, lanes: int) -> SBlockRV | None:
    """Split a product into sums of every so many-th element and their sum; None where one thread sums all."""
    if lanes == 1:
        return None
    loops = sch.get_loops(product.handle)
    spatial = [loops[i] for i in product.spatial]
    reduced = [loops[i] for i in product.reduced]
    sch.reorder(*spatial, *reduced)
    _, lane = sch.split(fuse_loops(sch, reduced), [None, lanes])
    return sch.rfactor(lane, 0)


def _compute_partial(
    sch: s_tir.Schedule, product: Block, partial: SBlockRV, grid: LoopRV, threads: int
) -> Guard:
    """Let all threads of a block compute partial sums in registers and store them in shared memory."""
    sch.cache_write(partial, 0, "local")
    (store,) = sch.get_consumers(partial)
    sch.set_scope(store, 0, "shared")
    sch.compute_at(store, grid, preserve_unit_loops=True)
    first, *rest = sch.get_loops(store)[1:]
    # Neighbouring threads read neighbouring elements.
    order = [*rest, first] if _is_along(product) else [first, *rest]
    sch.reorder(*order)
    spread = _spread(sch, order, threads)
    sch.compute_at(partial, spread[1], preserve_unit_loops=True)
    return (partial, *spread)


def _spread(sch: s_tir.Schedule, loops: list[LoopRV], threads: int) -> tuple[LoopRV, LoopRV, int]:
    """Divide loops among threads; return the rounds, the loop over threads, and the number of iterations."""
    fused = fuse_loops(sch, loops)
    extent = int(sch.get(fused).extent)
    rounds, lane = sch.split(fused, [None, threads])
    sch.bind(lane, "threadIdx.x")
    return rounds, lane, extent


def _tile_output(
    sch: s_tir.Schedule, form: GatedForm, output: Block, tile: GateTile, guards: list[Guard]
) -> LoopRV:
    """Divide an output into tiles, and a tile among threads; return the loop over tiles."""
    copies: list[SBlockRV] = []
    last = output.handle
    if tile.vector > 1:
        # Only copies are vectorised, so that any function may be computed between them.
        copies = [
            sch.cache_read(output.handle, index, "local", consumer_blocks=[output.handle])
            for index, access in enumerate(output.reads)
            if is_aligned(output, access)
        ]
        last = sch.cache_write(output.handle, 0, "local")
        flat = _flatten(output.extents, form.runs)
        for block in (*copies, output.handle):
            sch.transform_layout(block, ("write", 0), flat)
        for block in (*copies, output.handle, last):
            sch.transform_block_layout(block, flat)
        loops = list(sch.get_loops(last))
    else:
        nest = loops_of(sch, output.handle)
        loops = [fuse_loops(sch, [nest[axis] for axis in run]) for run in form.runs]
    sizes = list(tile.sizes)
    loops[-1], vector = sch.split(loops[-1], [None, tile.vector])
    sizes[-1] //= tile.vector
    parts = [sch.split(loop, [None, size]) for loop, size in zip(loops, sizes, strict=True)]
    sch.reorder(*[part[0] for part in parts], *[part[1] for part in parts], vector)
    grid = fuse_loops(sch, [part[0] for part in parts])
    spread = _spread(sch, [part[1] for part in parts], tile.threads)
    if tile.vector > 1:
        lane = spread[1]
        guards += [(block, *spread) for block in (*copies, output.handle)]
        sch.compute_at(output.handle, lane, preserve_unit_loops=True)
        sch.unroll(sch.get_loops(output.handle)[-1])
        for copy in copies:
            sch.compute_at(copy, lane, preserve_unit_loops=True)
            sch.vectorize(sch.get_loops(copy)[-1])
        sch.vectorize(vector)
    return grid


def _flatten(extents: tuple[int, ...], runs: tuple[tuple[int, ...], ...]) -> tirx.IndexMap:
    """The map from an element's coordinates to its place in each run."""

    def places(*coordinates):
        found = []
        for run in runs:
            place = 0
            for axis in run:
                place = place * extents[axis] + coordinates[axis]
            found.append(place)
        return found

    # TVM counts the parameters of the function, which therefore cannot be variadic.
    return tirx.IndexMap.from_func(places, ndim=len(extents))
