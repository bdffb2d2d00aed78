"""Kernels of functions without reductions: a thread computes a few chunks of neighbouring elements.

All that a thread reads is loaded before it computes anything, as many bytes at once as a load can have. A broadcast
operand is loaded once for a chunk where it is the same for all of it, and as a chunk where its elements are neighbours.
"""

from __future__ import annotations

import itertools

from ...compat import Target, tirx
from ...devices import device_for
from ..analysis import dtype_bytes
from ..base import limits
from ..decisions import alternatives
from .early_bfloat16 import widens_bfloat16
from .row_along import AlongRows
from .row_pieces import RowShape
from .row_shape import RowWork, row_work
from .window_stages import window_function

_THREADS = 256

#: Threads of a small block, and bytes that a thread moves at least, where the work is spread thinly.
_FEW_THREADS, _FEW_BYTES = 64, 4

#: The most chunks of a thread, and blocks of a multiprocessor from which on more chunks are better than more blocks.
_CHUNKS, _BLOCKS = 4, 8


class Elements(AlongRows):
    """The only row is divided among the blocks."""

    @property
    def blocks(self) -> int:
        shape = self.shape
        return -(-self.form.length // (shape.lanes * shape.vector * shape.chunks))

    @property
    def repeats(self) -> int:
        return self.blocks

    def row(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.IntImm("int64", 0)

    def column(self, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        chunk = self.block * self.shape.chunks + chunk
        return (chunk * self.shape.lanes + self.lane) * self.shape.vector + i


def element_kernel(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Write the kernel of a function without reductions.

    Parameters
    ----------
    func : PrimFunc
        The function; left untouched.
    target : Target
        Where it will run.

    Returns
    -------
    PrimFunc or None
        None when the function has another form: a reduction, outputs of different sizes, or indices that are read.
    """
    # Before sm_80 TVM computes bfloat16 on integers, which has no vectors.
    form = None if widens_bfloat16(func, target) else window_function(func)
    if form is None or form.reductions:
        return None
    work = row_work(form, across=False)
    bounds, device = limits(target), device_for(target)

    def ranked(count: int) -> list[RowShape]:
        return element_shapes(work, bounds.threads, device.multiprocessors)[:count]

    (shape,) = alternatives("shape", ranked)[:1]
    return Elements(form, shape).function()


def element_shapes(work: RowWork, most_threads: int, multiprocessors: int) -> list[RowShape]:
    """Ways in which threads can divide the elements: that of `element_shape`, then others."""
    first = element_shape(work, most_threads, multiprocessors)
    lanes = [n for n in (64, 128, 256, 512) if n <= most_threads]
    vectors = [v for v in (1, 2, 4, 8) if work.vector % v == 0]
    others = itertools.product(lanes, reversed(vectors), (1, 2, 4))
    shapes = [RowShape(n, 1, vector, chunks) for n, vector, chunks in others]
    return [first, *(shape for shape in shapes if shape != first)]


def element_shape(work: RowWork, most_threads: int, multiprocessors: int) -> RowShape:
    """Choose how threads divide the elements.

    Parameters
    ----------
    work : RowWork
        The function.
    most_threads : int
        Threads that a block may have.
    multiprocessors : int
        Of the chip: each should have a block, and then threads should have more than one chunk.
    """
    lanes, vector, chunks = min(_THREADS, most_threads), work.vector, 1

    def blocks() -> int:
        return -(-work.form.length // (lanes * vector * chunks))

    narrowest = min((dtype_bytes(p.dtype) for p in work.places if p.is_vector), default=4)
    while blocks() < multiprocessors and lanes > _FEW_THREADS:
        lanes //= 2
    while blocks() < multiprocessors and vector * narrowest > _FEW_BYTES and vector > 1:
        vector //= 2
    while chunks < _CHUNKS and blocks() >= 2 * _BLOCKS * multiprocessors:
        chunks *= 2
    return RowShape(lanes, 1, vector, chunks)
