"""How an operand of an anchor is read: what is contiguous in its tensor, and the order of the reduction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from ....compat import ir
from ....guards.fma_tiles import VECTOR
from ...analysis import nodes_of
from ..tensor_core.affine import Copy, as_copy, flat_offset, steps_in, uses
from ..tensor_core.form import InnerSum, Iterator, Operand


@dataclasses.dataclass(frozen=True)
class Access:
    """How an operand is read.

    Attributes
    ----------
    copy : Copy or None
        The guarded read that it is; None where it has to be computed.
    steps : dict of int to int
        Coefficient of each variable in the read's offset, by the variable's handle.
    transposed : bool
        Whether the reduction is contiguous and lines are not.
    width : int
        Neighbouring lines that are copied at once.
    """

    copy: Copy | None
    steps: dict[int, int]
    transposed: bool
    width: int

    def step(self, iterator: Iterator) -> int:
        """How far apart in the tensor neighbours along an iterator are."""
        return self.steps.get(iterator.var.__chandle__(), 0)


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
        Its lines.
    reduced : sequence of Iterator
        The reduction.
    inner : sequence of InnerSum
        Sums that it may be computed from.
    """
    last = next((i for i in reversed(across) if i.extent > 1), None)
    copy = as_copy(operand.value, inner)
    steps = None if copy is None else steps_in(copy.offset)
    if copy is None or steps is None:
        found = [
            steps_in(flat_offset(load)) or {} for load in nodes_of(operand.value, ir.TensorLoad)
        ]
        along = [any(_is_one(numbers, i) for i in reduced) for numbers in found]
        lines = [last is not None and _is_one(numbers, last) for numbers in found]
        return Access(None, {}, any(along) and not any(lines), 1)
    if last is not None and _is_one(steps, last):
        still = [i.var.__chandle__() for i in (*across, *reduced) if i.extent == 1]
        rest = [step for var, step in steps.items() if var not in (last.var.__chandle__(), *still)]
        width = math.gcd(VECTOR, last.extent, *rest)
        if any(uses(condition, last.var) for condition in copy.conditions):
            width = 1
        return Access(copy, steps, False, width)
    return Access(copy, steps, any(_is_one(steps, i) for i in reduced), 1)


def _is_one(steps: Mapping[int, int], iterator: Iterator) -> bool:
    return iterator.extent > 1 and steps.get(iterator.var.__chandle__()) == 1


def reduction_order(reduced: Sequence[Iterator], accesses: Iterable[Access]) -> tuple:
    """Order of a reduction: the longest iterator innermost, one that is contiguous in an operand among equals.

    The others are then the same for a whole tile, and with them what a window's position decides.
    """
    contiguous = {
        iterator.var.__chandle__()
        for access in accesses
        for iterator in reduced
        if _is_one(access.steps, iterator)
    }
    inner = max(reduced, key=lambda i: (i.extent, i.var.__chandle__() in contiguous))
    return (*(i for i in reduced if i is not inner), inner)
