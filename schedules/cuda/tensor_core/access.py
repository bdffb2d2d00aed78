"""How an operand is read, and how its pieces of 16 bytes lie in shared memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ....compat import tirx
from ....guards.tensor_tiles import PIECE_BYTES, WORD_BYTES
from ...analysis import dtype_bytes, nodes_of
from .affine import Copy, as_copy, coefficients, uses
from .evaluate import integer
from .form import InnerSum, Iterator, Operand


@dataclasses.dataclass(frozen=True)
class Access:
    """How an operand is read.

    Attributes
    ----------
    copy : Copy or None
        The guarded read that it is; None where it has to be computed, or read element by element.
    major : str
        ``"k"`` or ``"mn"``: what is contiguous.
    width : int
        Elements that can be copied at once.
    size : int
        Bytes of an element.
    elements : Copy or None
        The guarded read that it is, where its elements are of two bytes and no copy can bring several of them; its
        offset is a sum of what the lines and what the reduction add.
    """

    copy: Copy | None
    major: str
    width: int
    size: int = 2
    elements: Copy | None = None

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE_BYTES // self.size

    def swizzle(self, row: tirx.PrimExpr, row_bytes: int) -> tirx.PrimExpr:
        """What the piece numbers of a row of a tile are combined with (exclusive or)."""
        # Single words are read of four rows and two neighbouring pieces at once.
        return swizzle(row, row_bytes, 2 if self.size == 4 and self.major == "mn" else 1)


def access_of(
    operand: Operand,
    across: Sequence[Iterator],
    reduced: Sequence[Iterator],
    inner: Sequence[InnerSum] = (),
) -> Access:
    """Find out how an operand can be read.

    Parameters
    ----------
    operand : Operand
        The operand.
    across : sequence of Iterator
        Its rows (or columns, copies and batch included).
    reduced : sequence of Iterator
        The reduction.
    inner : sequence of InnerSum
        Sums that it may be computed from.
    """
    copy = as_copy(operand.value, inner)
    size = dtype_bytes(operand.dtype)
    piece, computed = PIECE_BYTES // size, Access(None, "k", 1, size)
    if copy is None:
        return computed
    variables = list({v.__chandle__(): v for v in nodes_of(copy.offset, tirx.Var)}.values())
    numbers = coefficients(copy.offset, variables) if variables else None
    if numbers is None:
        return computed
    steps = dict(zip([v.__chandle__() for v in variables], numbers, strict=False))
    for major, iterators in (("k", reduced), ("mn", across)):
        last = next((i for i in reversed(iterators) if i.extent > 1), None)
        if last is None or steps.get(last.var.__chandle__()) != 1:
            continue
        run, inside = _run(iterators, steps, copy)
        rest = [n for h, n in steps.items() if h not in inside]
        width = math.gcd(piece, run, *rest, numbers[-1])
        if any(uses(condition, last.var) for condition in copy.conditions):
            width = 1
        # Where lines are neighbours too, as the positions of an image that has its channels first, each would be copied
        # again for every place of the window.
        least = WORD_BYTES // size if major == "k" and 1 not in rest else piece
        if width >= least:
            return Access(copy, major, width, size)
    # Pieces of neighbours in the reduction's last iterator are computed at once, under one condition.
    single = size == 2 and reduced[-1].extent % piece and str(copy.buffer.dtype) == operand.dtype
    return dataclasses.replace(computed, elements=copy) if single else computed


def _run(
    iterators: Sequence[Iterator], steps: Mapping[int, int], copy: Copy
) -> tuple[int, set[int]]:
    """How many neighbours in memory the last iterators walk under the same conditions, and which they are."""
    run, inside = 1, set()
    for iterator in reversed([i for i in iterators if i.extent > 1]):
        conditional = any(uses(condition, iterator.var) for condition in copy.conditions)
        if steps.get(iterator.var.__chandle__()) != run or (inside and conditional):
            break
        run *= iterator.extent
        inside.add(iterator.var.__chandle__())
    return run, inside


def swizzle(row: tirx.PrimExpr, row_bytes: int, together: int = 1) -> tirx.PrimExpr:
    """What the piece numbers of a row of a tile are combined with (exclusive or).

    Parameters
    ----------
    row : PrimExpr
        Number of the row.
    row_bytes : int
        Its bytes.
    together : int
        Neighbouring pieces that are read at once, of several rows: 1 or 2.
    """
    pieces = row_bytes // PIECE_BYTES
    # Pieces are exchanged within aligned groups of a power of two, so that they stay in their row.
    group = min(8, pieces & -pieces)
    if group == 1:
        return integer(0)
    # Of shorter rows (or groups) as many lie in different banks already as fill 128 bytes.
    row = row // integer(8 // group)
    return (row if together == 1 else row * integer(together)) & integer(group - 1)
