"""Multiply-add kernels whose reduction the blocks of a cluster share; see ``tensor_core/split.py``."""

from __future__ import annotations

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.fma_tiles import Tile
from ..tensor_core.evaluate import integer, keep
from ..tensor_core.form import Products
from ..tensor_core.kernel import write_function
from ..tensor_core.split import Known, Meeting
from .device_code import common
from .epilogue import Epilogue
from .kernel import Body, Place
from .problem import problem_of


def split_kernel(form: Products, tile: Tile, shared_bytes: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function (see ``kernel.kernel``) with a tile of several slices."""
    return write_function(
        form,
        tile.blocks(problem_of(form)),
        tile.threads,
        lambda *names: _SplitBody(form, tile, shared_bytes, *names).emit(),
        tile.slices,
    )


class _SplitBody(Body):
    """Emits what one thread does."""

    def _place(self, block, thread) -> Place:
        slices = integer(self.tile.slices)
        self.rank = keep(block % slices)
        return super()._place(keep(block // slices), thread)

    def step(self, pair, number):
        """The number along the reduction of the ``number``-th tile that a block copies for an anchor."""
        return self.rank * integer(pair.steps) + number

    def begin(self) -> None:
        """Tell the other blocks that this one runs: its shared memory can be written from now on."""
        T.evaluate(common("tvmf_cluster_begin"))

    def make_epilogue(self, kind: type[Epilogue]) -> Epilogue:
        """Return an epilogue of the sums of all blocks."""
        made = super().make_epilogue(_SplitEpilogue)
        made.meet(self.rank, self.tile.own_bytes(self.problem))
        return made


class _SplitEpilogue(Epilogue):
    """Emits the stores of a kernel, of the vectors that a block finishes."""

    def meet(self, rank: tirx.PrimExpr, first: int) -> None:
        """Say which block this is, and where the sums of others arrive in shared memory."""
        tile = self.tile
        self.parts = tile.warp_depth * tile.slices
        self.part = keep(self.place.warp_depth * integer(tile.slices) + rank)
        self.meeting = Meeting(
            self.form, tile, self.count, tile.column_vector, rank, self.place.slice_thread,
            tile.slice_threads, self.shared, first,
        )  # fmt: skip

    def _exchange(self) -> None:
        if self.tile.warp_depth > 1:
            super()._exchange()
        self.meeting.send(self.place.warp_depth, self._own)

    def _own(self, number) -> Known:
        if self.tile.warp_depth > 1:
            return self._met(number)
        return self._registers(*divmod(number, self.groups))

    def _summed(self, number) -> Known:
        return self.meeting.receive(number)
