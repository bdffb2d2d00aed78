"""Row operands whose windows are read from a patch of the image in shared memory: the patch, and where pairs lie in it.

Of an image of few channels a copy of 16 bytes brings no whole piece of a window, but a *line* of it is contiguous: 7
places of 3 channels are 21 neighbours where channels are last. Windows of neighbouring outputs overlap, so that the
patch that they all read is much smaller than the matrix of their elements. A register of a matrix instruction has two
elements of the reduction: a *pair*, one word of the patch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from ....compat import ir, sym, tirx
from ....guards.patch_tiles import PatchProblem, padded_depth
from ...analysis import dtype_bytes
from .access import access_of
from .affine import Copy, conjuncts, flat_offset, is_conditional, steps_in, substitute
from .evaluate import integer
from .form import Anchor, Iterator, Products

_COMPARISONS = {tirx.LT: (1, 1), tirx.LE: (1, 0), tirx.GT: (-1, 1), tirx.GE: (-1, 0)}


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of the image, or its last ones as one, which a line of the patch is a part of.

    Attributes
    ----------
    step : int
        Elements from one place to the next.
    rows, reduced : tuple of int
        What each row iterator, and each iterator of the reduction, adds to the place.
    first : int
        The place at which all of them are 0.
    begin, end : int
        The places that are read; others are zeros.
    """

    step: int
    rows: tuple[int, ...]
    reduced: tuple[int, ...]
    first: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class PatchForm:
    """How the row operand of a function's only anchor is read from a patch.

    Attributes
    ----------
    buffer : Buffer
        The image.
    dimensions : tuple of Dimension
        Those of the image; of the last, places are elements of a line.
    outer : tuple of Iterator
        The iterators of the reduction that do not walk along a line, as they run.
    line : tuple of Iterator
        Those that do, the last one fastest.
    weights : Copy
        The column operand, in terms of ``outer`` and of ``pairs``.
    pairs : Iterator
        Walks along the elements of a line, and one more where their number is odd.
    """

    buffer: tirx.Buffer
    dimensions: tuple[Dimension, ...]
    outer: tuple[Iterator, ...]
    line: tuple[Iterator, ...]
    weights: Copy
    pairs: Iterator

    @property
    def length(self) -> int:
        """Elements of a window's line."""
        return math.prod(i.extent for i in self.line)

    @property
    def depth(self) -> int:
        """Elements of the reduction that are multiplied, with what fills pairs and instructions."""
        return padded_depth(math.prod(i.extent for i in self.outer) * self.pairs.extent)

    def offsets(self, steps: tuple[int, ...]) -> list[tuple[int, int]]:
        """Where each pair of a window lies in the patch, in elements, and how many elements of it are the window's.

        ``steps`` are the elements from one place to the next of the patch, by dimension.
        """
        found = []
        for places in itertools.product(*(range(i.extent) for i in self.outer)):
            start = sum(
                step * sum(c * p for c, p in zip(dim.reduced, places, strict=True))
                for dim, step in zip(self.dimensions, steps, strict=True)
            )
            for first in range(0, self.pairs.extent, 2):
                found.append((start + first, min(2, self.length - first)))
        return found + [(0, 0)] * (self.depth // 2 - len(found))


def patch_form(form: Products) -> PatchForm | None:
    """Describe the row operand of a function as read from patches; None where it cannot be."""
    if len(form.anchors) != 1 or form.inner or form.batch_count != 1:
        return None
    (anchor,) = form.anchors
    if anchor.copy_count != 1 or dtype_bytes(anchor.rows.dtype) != 2:
        return None
    gathered = access_of(anchor.rows, form.rows, anchor.reduced).elements
    columns = access_of(anchor.columns, form.columns, anchor.reduced)
    if gathered is None or columns.copy is None or (columns.major, columns.width) != ("mn", 8):
        return None
    value = anchor.rows.value
    while is_conditional(value):
        value = value.args[1]
    line = _line(value, anchor)
    outer = tuple(i for i in anchor.reduced if i.extent > 1 and i not in line)
    dimensions = _dimensions(value, gathered, (*form.batch, *form.rows), form, anchor, outer, line)
    if dimensions is None:
        return None
    length = math.prod(i.extent for i in line)
    pairs = Iterator(tirx.Var("pairs", "int32"), length + length % 2)
    weights = _weights(columns.copy, anchor, line, length, pairs)
    return PatchForm(gathered.buffer, dimensions, outer, line, weights, pairs)


def _line(load: ir.TensorLoad, anchor: Anchor) -> tuple[Iterator, ...]:
    """The iterators of the reduction that walk along neighbours, the last one fastest."""
    steps = steps_in(flat_offset(load)) or {}
    found: list[Iterator] = []
    run = 1
    while True:
        following = [
            i
            for i in anchor.reduced
            if i.extent > 1 and i not in found and steps.get(i.var.__chandle__()) == run
        ]
        if len(following) != 1:
            return tuple(found)
        found.insert(0, following[0])
        run *= following[0].extent


def _dimensions(
    load: ir.TensorLoad, read: Copy, across, form: Products, anchor: Anchor, outer, line
) -> tuple[Dimension, ...] | None:
    """Read the dimensions; None where an index or a condition is not of the form that they have."""
    shape = [int(extent) for extent in load.source.shape]
    indices = [steps_in(index) for index in load.indices]
    if None in indices:
        return None
    known = {i.var.__chandle__() for i in (*across, *anchor.reduced)} | {0}
    single = {i.var.__chandle__() for i in (*across, *anchor.reduced) if i.extent == 1}
    indices = [{h: n for h, n in index.items() if h not in single} for index in indices]
    if any(
        not set(index) <= known or min([0, *(n for h, n in index.items() if h)]) < 0
        for index in indices
    ):
        return None
    bounds = [[0, extent] for extent in shape]
    for condition in read.conditions:
        for part in conjuncts(condition):
            if not _bound(part, indices, bounds):
                return None
    inside = {i.var.__chandle__() for i in line}
    first = min(
        (d for d, index in enumerate(indices) if inside & set(index)), default=len(shape) - 1
    )
    # Behind the dimension in which a line begins there is nothing but the line.
    for index, (begin, end), extent in zip(
        indices[first + 1 :], bounds[first + 1 :], shape[first + 1 :], strict=True
    ):
        if not set(index) - {0} <= inside or index[0] or (begin, end) != (0, extent):
            return None
    if any(inside & set(index) for index in indices[:first]):
        return None
    made = []
    for d in range(first + 1):
        scale = math.prod(shape[d + 1 :]) if d == first else 1
        index, (begin, end) = indices[d], bounds[d]
        rows = tuple(scale * index.get(i.var.__chandle__(), 0) for i in form.rows)
        reduced = tuple(scale * index.get(i.var.__chandle__(), 0) for i in outer)
        step = 1 if d == first else math.prod(shape[d + 1 :])
        made.append(Dimension(step, rows, reduced, scale * index[0], scale * begin, scale * end))
    # A pair is one word, wherever the iterators outside of the line stand.
    return None if any(n % 2 for n in made[-1].reduced) else tuple(made)


def _bound(condition: tirx.PrimExpr, indices: list[dict], bounds: list[list[int]]) -> bool:
    """Take a condition as a bound of the place in one dimension; whether it is one."""
    kind = _COMPARISONS.get(type(condition))
    if kind is None:
        return False
    sign, strict = kind
    # What must not be negative.
    steps = steps_in((condition.b - condition.a) * integer(sign) - integer(strict))
    if steps is None:
        return False
    for index, bound in zip(indices, bounds, strict=True):
        own = {h: n for h, n in index.items() if h and n}
        for direction in (1, -1):
            if own and own == {h: direction * n for h, n in steps.items() if h and n}:
                if direction == 1:
                    bound[0] = max(bound[0], index[0] - steps[0])
                else:
                    bound[1] = min(bound[1], index[0] + steps[0] + 1)
                return True
    return False


def _weights(
    copy: Copy, anchor: Anchor, line: tuple[Iterator, ...], length: int, pairs: Iterator
) -> Copy:
    """The column operand in terms of the place in a line."""
    values, rest = {}, pairs.var
    for iterator in reversed(line):
        values[iterator.var] = rest % integer(iterator.extent)
        rest = rest // integer(iterator.extent)
    if line:
        # What fills a pair lies behind the line.
        values[line[0].var] = pairs.var // integer(length // line[0].extent)
    values |= {i.var: integer(0) for i in anchor.reduced if i.extent == 1}
    conditions = tuple(substitute(c, values) for c in copy.conditions)
    if pairs.extent > length:
        conditions += (pairs.var < integer(length),)
    offset = sym.Analyzer().simplify(substitute(copy.offset, values))
    return Copy(copy.buffer, offset, conditions)


def patch_problem(form: Products) -> PatchProblem | None:
    """Describe a function to the search for a tile; None where its rows are read in another way."""
    found = patch_form(form)
    if found is None:
        return None
    extents = tuple(i.extent for i in form.rows)
    spans = tuple(
        1
        + sum(c * (i.extent - 1) for c, i in zip(dim.reduced, found.outer, strict=True))
        + (found.length - 1 if dim is found.dimensions[-1] else 0)
        for dim in found.dimensions
    )
    steps = tuple(dim.rows for dim in found.dimensions)
    return PatchProblem(extents, steps, spans, form.column_count, found.depth)
