"""The shape of a kernel of rows, and small pieces of its code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...compat import tirx
from .fast_math import NARROW

#: Partial results of a thread in a reduction: a sum of many terms is not one long chain.
_PARTS = 4


@dataclasses.dataclass(frozen=True)
class RowShape:
    """How threads divide rows.

    Parameters
    ----------
    lanes, lines : int
        Threads of a block along x and y. Along rows, a row has the lanes (a power of two below a warp, or whole warps)
        and a block as many rows as lines; across rows, a row has the lines.
    vector : int
        Neighbouring elements that a thread holds.
    chunks : int
        How often it does.
    rounds : int
        How often it does that: more than once if a row is walked in rounds.
    """

    lanes: int
    lines: int
    vector: int
    chunks: int
    rounds: int = 1

    @property
    def elements(self) -> int:
        """Elements that a thread holds."""
        return self.vector * self.chunks


def integer(value: int) -> tirx.IntImm:
    """An index."""
    return tirx.IntImm("int64", value)


def register_type(buffer: tirx.Buffer) -> str:
    """Type in which registers hold what a buffer would."""
    dtype = str(buffer.ty.dtype)
    return "float32" if dtype in NARROW else dtype


def tree(combine: type, values: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Join values pairwise."""
    values = list(values)
    while len(values) > 1:
        pairs = [combine(*values[n : n + 2]) for n in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def size_of(buffer: tirx.Buffer) -> int:
    """Elements of a buffer."""
    size = 1
    for extent in buffer.ty.shape:
        size *= int(extent)
    return size


def vector_at(start: tirx.PrimExpr, width: int) -> tirx.PrimExpr:
    """Indices of neighbouring elements."""
    return tirx.Ramp(start, integer(1), width) if width > 1 else start


def part_count(elements: int, vector: int) -> int:
    """How many partial results a thread keeps that holds so many elements in chunks of ``vector``."""
    fits = (n for n in (_PARTS, 2) if elements >= 2 * n and (vector % n == 0 or vector == 1))
    return next(fits, 1)


def unrolled(var: tirx.Var, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    """Return a loop that is written out."""
    return tirx.For(var, integer(0), integer(extent), tirx.ForKind.UNROLLED, body)


def sequence(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return one statement that runs several."""
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)
