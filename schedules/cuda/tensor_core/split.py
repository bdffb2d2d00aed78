"""Blocks of a cluster that share the reduction: each takes a slice of it, and their sums meet in shared memory.

Every block sends each of its sums to the block that finishes it. That one adds up those of all blocks in the order of
their numbers, so that a result does not depend on which of them was first. Sums that arrive have a place behind what a
block uses itself: others may send while it still multiplies. One barrier of the cluster is enough, because nobody reads
another block's memory.
"""

from __future__ import annotations

from collections.abc import Callable

from ....compat import script_builder as T
from ....compat import tirx
from ....guards import fma_tiles
from ....guards.tensor_tiles import Tile
from .device_code import call
from .epilogue import Epilogue
from .evaluate import integer
from .form import Products
from .kernel import Body, Place, write_function
from .tile import problem_of
from .warpgroup import WarpgroupBody

#: The value of a sum: of an anchor, of its copy, by its number in the unit.
Known = Callable[[int, int, int], object]


class Meeting:
    """Where the sums of several blocks meet.

    Sums that a thread finishes together are a *unit*. Unit ``n`` is finished by block ``n % slices`` of the cluster.

    Parameters
    ----------
    form : Products
        The function.
    tile : Tile
        Sizes, of tensor-core or of multiply-add kernels.
    units, width : int
        Units of a thread, and sums of one.
    rank, thread : PrimExpr
        Number of the block in its cluster, and of the thread among those that share the outputs.
    threads : int
        How many share the outputs.
    shared : Buffer
        Shared memory.
    first : int
        Where the sums that arrive begin in it, in bytes.
    """

    def __init__(
        self,
        form: Products,
        tile: Tile | fma_tiles.Tile,
        units: int,
        width: int,
        rank: tirx.PrimExpr,
        thread: tirx.PrimExpr,
        threads: int,
        shared: tirx.Buffer,
        first: int,
    ) -> None:
        self.slices, self.warp_depth = tile.slices, tile.warp_depth
        self.planes = [
            (place, copy)
            for place, anchor in enumerate(form.anchors)
            for copy in range(anchor.copy_count)
        ]
        self.units, self.width, self.rank = units, width, rank
        self.thread, self.threads, self.shared, self.first = thread, threads, shared, first
        #: Sums of one store or load.
        self.vector = min(4, width)

    def send(self, warp: tirx.PrimExpr, own: Callable[[int | tirx.PrimExpr], Known]) -> None:
        """Emit the way of all of a thread's sums to the blocks that finish them, and wait for what the others send.

        Parameters
        ----------
        warp : PrimExpr
            Number of the warp among those that share the reduction of the block: each sends some of the units.
        own : callable
            Emits what gives this block's sums of a unit.
        """
        T.evaluate(call("tvmf_cluster_wait"))
        for turn in range(0, self.units, self.warp_depth):
            if self.warp_depth == 1:
                self._send(turn, own(turn))
                continue
            number = T.bind(integer(turn) + warp)
            if turn + self.warp_depth <= self.units:
                self._send(number, own(number))
                continue
            with T.If(number < integer(self.units)), T.Then():
                self._send(number, own(number))
        T.evaluate(call("tvmf_cluster_arrive"))
        T.evaluate(call("tvmf_cluster_wait"))

    def _send(self, number, known: Known) -> None:
        peer = number % self.slices
        for plane, (anchor, copy) in enumerate(self.planes):
            values = T.alloc_buffer((self.width,), "float32", scope="local")
            for place in range(self.width):
                T.buffer_store(values, known(anchor, copy, place), [place])
            for piece in range(0, self.width, self.vector):
                offset = self._offset(self.rank, plane, number, piece)
                name = f"tvmf_store_cluster_{4 * self.vector}"
                T.evaluate(call(name, self.shared.data, offset, values.data, piece, peer))

    def receive(self, number: tirx.PrimExpr) -> Known:
        """Emit the sum of what all blocks sent of a unit that this one finishes."""
        totals = {}
        for plane, (anchor, copy) in enumerate(self.planes):
            size = self.slices * self.width
            parts = T.alloc_buffer((size,), "float32", scope="local")
            for block in range(self.slices):
                for piece in range(0, self.width, self.vector):
                    offset = self._offset(integer(block), plane, number, piece)
                    T.evaluate(
                        call(
                            f"tvmf_load_shared_{4 * self.vector}", parts.data,
                            block * self.width + piece, self.shared.data, offset,
                        )
                    )  # fmt: skip
            total = T.alloc_buffer((self.width,), "float32", scope="local")
            for place in range(self.width):
                value = parts[place]
                for block in range(1, self.slices):
                    value = value + parts[block * self.width + place]
                T.buffer_store(total, value, [place])
            totals[anchor, copy] = total
        return lambda anchor, copy, place: totals[anchor, copy][place]

    def _offset(self, block: tirx.PrimExpr, plane: int, number, piece: int) -> tirx.PrimExpr:
        """Byte offset of a piece of a unit that a block sends: the pieces of neighbouring threads are neighbours."""
        local = number // self.slices
        local = integer(local) if isinstance(local, int) else local
        index = (block * integer(len(self.planes)) + integer(plane)) * integer(
            self.units // self.slices
        )
        pieces = self.width // self.vector
        index = (index + local) * integer(pieces) + integer(piece // self.vector)
        index = index * integer(self.threads) + self.thread
        return index * integer(4 * self.vector) + integer(self.first)


def split_kernel(form: Products, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function (see ``kernel.kernel``) with a tile of several slices."""
    body = _SplitWarpgroupBody if tile.warpgroup else _SplitBody
    return write_function(
        form,
        tile.blocks(problem_of(form)),
        tile.threads,
        lambda *names: body(form, tile, *names, requested).emit(),
        tile.slices,
    )


class _Split:
    """What a block does differently that has a slice of the reduction: added to the class of its body."""

    def _place(self, block, thread) -> Place:
        slices = integer(self.tile.slices)
        self.rank = T.bind(block % slices)
        return super()._place(T.bind(block // slices), thread)

    def step(self, pair, number):
        """The number along the reduction of the ``number``-th tile that a block copies for an anchor."""
        return self.rank * integer(pair.steps) + number

    def _group_size(self, wide: bool) -> int:
        # Every block finishes as many units.
        most, fragments = super()._group_size(wide), self.tile.column_fragments
        halves = 2 * self.tile.row_fragments
        return max(
            g
            for g in (1, 2, 4)
            if g <= most and fragments % g == 0 and halves * fragments // g % self.tile.slices == 0
        )

    def begin(self) -> None:
        """Tell the other blocks that this one runs: its shared memory can be written from now on."""
        super().begin()
        T.evaluate(call("tvmf_cluster_begin"))

    def make_epilogue(self, kind: type[Epilogue]) -> Epilogue:
        """Return an epilogue of the sums of all blocks."""
        made = super().make_epilogue(_SplitEpilogue)
        made.meet(self.rank, self.tile.own_bytes(problem_of(self.form)))
        return made


class _SplitBody(_Split, Body):
    """Emits what one thread does."""


class _SplitWarpgroupBody(_Split, WarpgroupBody):
    """Emits what one thread does, with warpgroup instructions."""


class _SplitEpilogue(Epilogue):
    """Emits the stores of a kernel, of the units that a block finishes."""

    def meet(self, rank: tirx.PrimExpr, first: int) -> None:
        """Say which block this is, and where the sums of others arrive in shared memory."""
        tile = self.tile
        self.parts = tile.warp_depth * tile.slices
        self.part = T.bind(self.place.warp_depth * integer(tile.slices) + rank)
        threads = 32 * tile.warp_rows * tile.warp_columns
        thread = T.bind(self.place.thread % integer(threads))
        self.meeting = Meeting(
            self.form, tile, self.count, self.width, rank, thread, threads, self.shared, first
        )

    def _exchange(self) -> None:
        if self.tile.warp_depth > 1:
            super()._exchange()
        self.meeting.send(self.place.warp_depth, self._own)

    def _own(self, number) -> Known:
        if self.tile.warp_depth > 1:
            return super()._summed(number)
        return self._registers(self._where(number))

    def _summed(self, number) -> Known:
        return self.meeting.receive(number)
