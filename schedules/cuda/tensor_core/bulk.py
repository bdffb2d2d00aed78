"""The product with Hopper's copy engine: one warp starts copies, two warpgroups multiply, blocks stay for many tiles.

Bytes and operations: see ``guards/bulk_tiles.py``. A ring of slots in shared memory has, for each, a barrier that says
*full* and one that says *empty*. The producer waits until a slot is empty, says how many bytes will come, and starts
two copies, whose arrival ends the phase of *full*. The consumers wait for that, multiply, and when the instructions
that read the slot before are complete, each of their warps arrives at that one's *empty*. So nobody waits for anybody
but for data or for room, and the copies of a tile run while the tile before it is stored.

A slot's use number ``n`` (0, 1, …, over all tiles of the block) has the parity ``n // stages % 2``; the producer's
first wait for each slot asks for the phase before the first one, which counts as over.

Where the consumers take turns, each multiplies tiles of its own, one after the other: a parity tells a phase from the
next one only, so nobody may wait for a slot while a use before the last one is to come. A third kind of barrier, one
for each of the two, says whose turn it is; a turn ends when all copies of its tile have arrived, and while the other
one multiplies, this one stores.
"""

from __future__ import annotations

import dataclasses

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ....devices import DeviceSpec
from ....guards.bulk_tiles import (
    BARRIER_BYTES,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    BulkTile,
)
from ....guards.warpgroup_tiles import DEPTH, ROWS, WARPS
from .bulk_code import call, multiply, registers
from .bulk_epilogue import BulkEpilogue
from .bulk_operand import SLAB_BYTES, Axis, BulkOperand, bulk_operands
from .device_code import OPERAND_TYPES
from .evaluate import integer, keep
from .form import Products
from .kernel import GROUP, Place, write_function
from .operand import decode
from .tile import problem_of

#: ``CU_TENSOR_MAP_SWIZZLE_128B`` and ``CU_TENSOR_MAP_L2_PROMOTION_L2_256B`` of CUDA's driver.
_SWIZZLE_128, _PROMOTION_256 = 3, 3


def bulk_kernel(form: Products, tile: BulkTile, device: DeviceSpec) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Products
        The function, of one product.
    tile : BulkTile
        Sizes.
    device : DeviceSpec
        How many blocks stay.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function, and the tensor maps that its host part
        makes.

    Raises
    ------
    ValueError
        If the copy engine cannot bring the operands.
    """
    operands = bulk_operands(form)
    if operands is None or not takes(operands, tile):
        raise ValueError("the operands are no plain reads that tensor maps describe")
    maps: list[tirx.Var] = []
    sides = _sides(operands, tile)

    def encode(arguments: dict) -> None:
        maps.extend(_encode(side, arguments) for side in sides)

    grid = tile.grid(problem_of(form), device)
    return write_function(
        form,
        grid,
        tile.block_threads,
        lambda *names: _BulkBody(form, tile, grid, sides, maps, *names).emit(),
        host=encode,
    )


def takes(operands: tuple[BulkOperand, BulkOperand], tile: BulkTile) -> bool:
    """Whether the copy engine can bring the operands of a tile."""
    rows, columns = operands
    return rows.takes(tile.rows) and columns.takes(tile.columns, tile.bulk)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of a tile: its map's name and axes, its bytes, and the copies that bring them."""

    name: str
    operand: BulkOperand
    axes: tuple[Axis, ...]
    nbytes: int
    slabs: int


def _sides(operands: tuple[BulkOperand, BulkOperand], tile: BulkTile) -> list[_Side]:
    parts = zip(
        ("rows_map", "columns_map"),
        operands,
        (tile.rows, tile.columns),
        (1, tile.bulk),
        strict=True,
    )
    return [
        _Side(name, own, own.axes(lines, group), 2 * DEPTH * lines, own.slabs(lines))
        for name, own, lines, group in parts
    ]


def _encode(side: _Side, arguments: dict) -> tirx.Var:
    """Emit, on the host, what fills a tensor map."""
    place = T.bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap"))
    IRBuilder.name(side.name, place)
    buffer, axes = side.operand.buffer, side.axes
    T.evaluate(
        T.tensormap_encode_tiled(
            place,
            arguments[buffer.__chandle__()].data,
            *(axis.extent for axis in axes),
            *(2 * axis.step for axis in axes[1:]),
            *(axis.box for axis in axes),
            *(1 for _ in axes),
            descriptor_dtype=str(buffer.dtype),
            rank=len(axes),
            swizzle=_SWIZZLE_128,
            l2_promotion=_PROMOTION_256,
        )
    )
    return place


class _BulkBody:
    """Emits what one thread does."""

    def __init__(self, form, tile: BulkTile, grid: int, sides, maps, views, block, thread) -> None:
        self.form, self.tile, self.grid, self.views = form, tile, grid, views
        self.sides, self.maps, self.block, self.thread = sides, maps, block, thread
        problem = problem_of(form)
        self.stage_bytes = tile.stage_bytes(problem)
        self.tiles = tile.blocks(problem)
        self.steps = -(-form.anchors[0].depth // DEPTH)
        self.fragments = tile.rows // tile.warp_rows // (ROWS // WARPS)
        size = tile.shared_bytes(problem)
        self.shared = IRBuilder.name("shared", T.alloc_buffer((size,), "uint8", scope="shared.dyn"))
        aligned = call("tvmf_to_1024", self.shared.data, result="int32")
        self.base = keep(aligned, "base")
        self.sums = IRBuilder.name("sums", T.alloc_buffer((tile.sums,), "float32", scope="local"))

    def emit(self) -> None:
        """Emit everything."""
        tile, at = self.tile, self.shared.data
        with T.If(self.thread.equal(integer(0))), T.Then():
            for stage in range(tile.stages):
                number = integer(stage)
                T.evaluate(call("tvmf_mbarrier_init", at, self._full(number), 1))
                T.evaluate(call("tvmf_mbarrier_init", at, self._empty(number), tile.warp_rows))
            for group in range(tile.turns if tile.turns > 1 else 0):
                place = self._turn(integer(group))
                T.evaluate(call("tvmf_mbarrier_init", at, place, tile.warp_rows))
            T.evaluate(call("tvmf_mbarrier_fence"))
        T.evaluate(call("tvmf_let_next_start"))
        T.evaluate(call("tvmf_barrier"))
        with T.If(self.thread >= integer(tile.consumers)):
            with T.Then():
                T.evaluate(registers("dec", PRODUCER_REGISTERS))
                with T.If(self.thread.equal(integer(tile.consumers))), T.Then():
                    self._produce()
            with T.Else():
                T.evaluate(registers("inc", CONSUMER_REGISTERS))
                T.evaluate(call("tvmf_wait_for_previous"))
                self._consume()

    # -- the ring ---------------------------------------------------------------------------------

    def _full(self, stage) -> tirx.PrimExpr:
        first = self.tile.stages * self.stage_bytes
        return self.base + integer(first) + stage * integer(BARRIER_BYTES)

    def _empty(self, stage) -> tirx.PrimExpr:
        return self._full(stage) + integer(BARRIER_BYTES * self.tile.stages)

    def _turn(self, group) -> tirx.PrimExpr:
        return self._full(integer(2 * self.tile.stages)) + group * integer(BARRIER_BYTES)

    def _slot(self, number) -> tuple:
        """The slot of a use, and the parity of the phase that completes it."""
        stages = integer(self.tile.stages)
        stage = keep(number % stages, "stage")
        return stage, number // stages % integer(2)

    @property
    def count(self) -> tirx.PrimExpr:
        """Tiles of this block."""
        return (integer(self.tiles + self.grid - 1) - self.block) // integer(self.grid)

    def _place(self, turn) -> tuple:
        """Row and column of tiles, and the batch, of a block's tile."""
        form, tile = self.form, self.tile
        down, across = -(-form.row_count // tile.rows), -(-form.column_count // tile.columns)
        number = keep(self.block + turn * integer(self.grid), "tile")
        batch = decode(number // integer(down * across), form.batch) if form.batch else {}
        inside = number % integer(down * across) if form.batch_count > 1 else number
        # Blocks that run together share columns in the second-level cache, see `kernel`.
        group = max(g for g in range(1, GROUP + 1) if down % g == 0) if across > 1 else 1
        outer, rest = inside // integer(group * across), inside % integer(group * across)
        row = keep((outer * integer(group) + rest % integer(group)) * integer(tile.rows), "row")
        column = keep(rest // integer(group) * integer(tile.columns), "column")
        return row, column, {var: keep(value, "batch") for var, value in batch.items()}

    # -- the warp that copies ---------------------------------------------------------------------

    def _produce(self) -> None:
        """Start the copies; those of constants that fill the ring first, while the previous kernel may still run."""
        for side_map in self.maps:
            T.evaluate(call("tvmf_map_prefetch", side_map))
        early = min(self.tile.stages, self.steps) if self._is_constant(1) else 0
        if early:
            place = self._place(integer(0))
            for step in range(early):
                self._expect(integer(step))
                self._copy(1, integer(step), integer(step), place)
        T.evaluate(call("tvmf_wait_for_previous"))
        for step in range(early):
            self._copy(0, integer(step), integer(step), place)
        with T.serial(0, self.count) as turn:
            place = self._place(turn)
            with T.serial(0, self.steps) as step:
                number = turn * integer(self.steps) + step
                if early:
                    with T.If(number >= integer(early)), T.Then():
                        self._copy_step(number, step, place)
                else:
                    self._copy_step(number, step, place)

    def _copy_step(self, number, step, place) -> None:
        """Wait for room, and start the copies of one step."""
        stage, parity = self._slot(number)
        at, free = self.shared.data, integer(1) - parity
        T.evaluate(call("tvmf_mbarrier_wait", at, self._empty(stage), free))
        self._expect(stage)
        for side in range(len(self.sides)):
            self._copy(side, stage, step, place)

    def _expect(self, stage) -> None:
        """Say how many bytes will come into a slot."""
        nbytes = sum(side.nbytes for side in self.sides)
        T.evaluate(call("tvmf_mbarrier_expect", self.shared.data, self._full(stage), nbytes))

    def _copy(self, number: int, stage, step, place) -> None:
        """Start the copies of one operand."""
        side, batch = self.sides[number], place[2]
        offset = self.base + stage * integer(self.stage_bytes)
        if number:
            offset = offset + integer(self.sides[0].nbytes)
        for slab in range(side.slabs):
            line = place[number] + integer(DEPTH * slab) if slab else place[number]
            places = [_coordinate(axis, step, line, batch) for axis in side.axes]
            name = f"tvmf_bulk_load_{len(places)}"
            at, full = self.shared.data, self._full(stage)
            T.evaluate(call(name, at, offset, self.maps[number], full, *places))
            offset = offset + integer(side.nbytes // side.slabs)

    def _is_constant(self, number: int) -> bool:
        """Whether an operand is the same at every call."""
        buffer = self.sides[number].operand.buffer
        return any(buffer.same_as(constant) for constant in self.form.constants)

    # -- the warps that multiply ------------------------------------------------------------------

    def _consume(self) -> None:
        tile, sums, turns = self.tile, self.sums, self.tile.turns
        lane = keep(self.thread % integer(32), "lane")
        warp = self.thread // integer(32)
        group = keep(warp // integer(tile.warp_rows), "group") if turns > 1 else integer(0)
        warp = keep(warp % integer(tile.warp_rows), "warp")
        own = (self.count + integer(turns - 1) - group) // integer(turns)
        with T.serial(0, own) as time:
            turn = time * integer(turns) + group
            row, column, batch = self._place(turn)
            with T.unroll(0, tile.sums) as number:
                T.buffer_store(sums, tirx.const(0, "float32"), [number])
            if turns > 1:
                # The first turn of the first group is its own from the beginning.
                parity = (time + integer(1) - group) % integer(2)
                place = self._turn(group)
                T.evaluate(call("tvmf_mbarrier_wait", self.shared.data, place, parity))
            last = self._multiply_all(turn * integer(self.steps), warp, lane)
            if turns > 1:
                self._arrive(self._turn(integer(1) - group), lane)
            T.evaluate(call(f"tvmf_wgmma_wait_{2 * tile.sums}", sums.ptr_to([0])))
            self._free(last, lane)
            zero = integer(0)
            place = Place(self.thread, lane, warp, zero, zero, row, column, batch)
            BulkEpilogue(self.form, tile, place, [sums], self.shared, self.views, tile.bulk).emit()

    def _multiply_all(self, first, warp, lane) -> tirx.PrimExpr:
        """Start the multiplications of all steps of a tile; return the number of the last one's use of a slot."""
        with T.serial(0, self.steps) as step:
            stage, parity = self._slot(first + step)
            T.evaluate(call("tvmf_mbarrier_wait", self.shared.data, self._full(stage), parity))
            self._multiply(stage, warp // integer(WARPS))
            T.evaluate(call("tvmf_wgmma_keep_1"))
            with T.If(step > integer(0)), T.Then():
                self._free(first + step - integer(1), lane)
        return first + integer(self.steps - 1)

    def _multiply(self, stage, warpgroup) -> None:
        """Start the multiplication of one step."""
        kind = OPERAND_TYPES[self.form.anchors[0].rows.dtype][0]
        columns_of = self.tile.columns
        slot = self.base + stage * integer(self.stage_bytes)
        lines = slot + warpgroup * integer(SLAB_BYTES * self.fragments)
        second = slot + integer(self.sides[0].nbytes)
        rows, columns = self._descriptor(0, lines), self._descriptor(1, second)
        across = tuple(side.operand.is_transposed for side in self.sides)
        # Descriptors count units of 16 bytes; an instruction takes 32 of a line, or 16 lines.
        row_step, column_step = (16 * 2 * DEPTH // 16 if is_across else 2 for is_across in across)
        T.evaluate(call("tvmf_wgmma_fence"))
        for k in range(DEPTH // 16):
            for fragment in range(self.fragments):
                skipped = row_step * k + SLAB_BYTES // 16 * fragment
                left = rows + tirx.const(skipped, "uint64")
                right = columns + tirx.const(column_step * k, "uint64")
                target = fragment * columns_of // 2
                T.evaluate(multiply(kind, columns_of, across, self.sums.data, target, left, right))
        T.evaluate(call("tvmf_wgmma_commit"))

    def _descriptor(self, number: int, offset) -> tirx.PrimExpr:
        across = "_across" if self.sides[number].operand.is_transposed else ""
        name = f"tvmf_wgmma_descriptor{across}"
        made = call(name, self.shared.data, offset, result="uint64")
        return keep(made, ("rows", "columns")[number])

    def _free(self, number, lane) -> None:
        """Say that this warp has read a slot."""
        stage, _ = self._slot(number)
        self._arrive(self._empty(stage), lane)

    def _arrive(self, barrier, lane) -> None:
        """Arrive at a barrier, once for the warp."""
        T.evaluate(call("tvmf_warp_barrier"))
        with T.If(lane.equal(integer(0))), T.Then():
            T.evaluate(call("tvmf_mbarrier_arrive", self.shared.data, barrier))


def _coordinate(axis: Axis, step, first, batch: dict) -> tirx.PrimExpr:
    """Where a copy begins along an axis."""
    if axis.follows == "zero":
        return integer(0)
    if axis.follows == "depth":
        return step * integer(DEPTH)
    if axis.follows == "line":
        return first // integer(axis.scale)
    return next(value for var, value in batch.items() if var.same_as(axis.follows))
