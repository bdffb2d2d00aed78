"""The same kernel with Hopper's warpgroup instructions, which read both operands from shared memory.

``wgmma`` multiplies 64 rows by up to 256 columns for four warps at a time, at twice the rate of ``mma.sync``. Tiles of
64 elements of the reduction lie in shared memory as its descriptors want them: rows of 128 bytes, their 16-byte pieces
exchanged with the number of the row. A lane's sums are those of ``mma.sync``, so that the epilogue is the same.
"""

from __future__ import annotations

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS, Tile
from ....guards.warpgroup_tiles import DEPTH, ROWS, WARPS
from .device_code import OPERAND_TYPES, call
from .evaluate import integer, keep
from .form import Anchor, Products
from .kernel import Body, Pair, write_function
from .tile import problem_of


def warpgroup_kernel(form: Products, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function (see ``kernel.kernel``) with warpgroup instructions."""
    blocks = tile.blocks(problem_of(form))
    return write_function(
        form,
        blocks,
        tile.threads,
        lambda *names: WarpgroupBody(form, tile, *names, requested).emit(),
    )


class WarpgroupBody(Body):
    """Emits what one thread does."""

    def __init__(self, form: Products, tile: Tile, views, block, thread, requested: int = 0):
        super().__init__(form, tile, views, block, thread, requested)
        aligned = call("tvmf_to_1024", self.shared.data, result="int32")
        self.base = keep(aligned, "base")

    def slot(self, number):
        """Where the ring's slot of a tile begins in shared memory, in bytes."""
        return self.base + super().slot(number)

    def pair(self, anchor: Anchor) -> Pair:
        """Return the operands of an anchor."""
        return _WarpgroupPair(self, anchor)

    def arrive(self, ahead: int) -> None:
        """Wait for the oldest tile, make it visible to the instructions, and wait for those on the previous one."""
        T.evaluate(call(f"tvmf_wait_{ahead - 1}"))
        T.evaluate(call("tvmf_fence_async"))
        self.wait()
        T.evaluate(call("tvmf_barrier"))

    def wait(self) -> None:
        """Wait until the sums are complete."""
        columns = self.tile.column_fragments * COLUMNS
        for anchor, sums in zip(self.form.anchors, self.sums, strict=True):
            for copy in range(anchor.copy_count):
                place = sums.ptr_to([copy * columns // 2])
                T.evaluate(call(f"tvmf_wgmma_wait_{columns}", place))

    def finish(self) -> None:
        """Emit what follows the sums."""
        self.wait()
        super().finish()


class _WarpgroupPair(Pair):
    def multiply(self, slot) -> None:
        """Start the multiplication of one tile."""
        tile, place = self.body.tile, self.body.place
        columns = tile.column_fragments * COLUMNS
        name = f"tvmf_wgmma_{OPERAND_TYPES[self.anchor.rows.dtype][0]}_{columns}"
        shared = self.body.shared.data
        first = place.warp_row // integer(WARPS) * integer(ROWS * 2 * DEPTH)
        T.evaluate(call("tvmf_wgmma_fence"))
        for k in range(DEPTH // 16):
            rows = self._descriptor(shared, slot + first + integer(32 * k))
            base = self.row_copy.nbytes
            for copy in range(self.anchor.copy_count):
                line = place.warp_column * integer(columns * 2 * DEPTH)
                held = self._descriptor(shared, slot + line + integer(base + 32 * k))
                target = copy * columns // 2
                T.evaluate(call(name, self.sums.data, target, rows, held))
                base += self.column_copies[copy].nbytes
        T.evaluate(call("tvmf_wgmma_commit"))

    def _descriptor(self, shared, offset) -> tirx.PrimExpr:
        return call("tvmf_wgmma_descriptor", shared, offset, result="uint64")
