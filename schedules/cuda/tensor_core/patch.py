"""The kernel that reads windows from a patch of the image in shared memory (see ``patch_form``).

A block brings its weights by asynchronous copies, and the patch by loads of single elements, with zeros where the image
ends. After one barrier its warps multiply the whole reduction: a fragment of weights by ``ldmatrix``, one of windows by
four loads of a word a lane, whose addresses are one number a row and a constant.

Where rectangles do not divide the output, the last ones begin earlier, so that they end with it; what their neighbours
have stored they do not store again.
"""

from __future__ import annotations

import math

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ....devices import DeviceSpec
from ....guards.patch_tiles import PatchTile, line_threads, resident_blocks, shared_bytes
from ....guards.tensor_tiles import ROWS
from .access import Access
from .device_code import OPERAND_TYPES, call
from .epilogue import Epilogue
from .evaluate import conjunction, integer, keep
from .form import Products
from .fragments import column_base, column_fragment, reader
from .kernel import Place, write_function
from .operand import Lines, TileCopy
from .patch_form import Dimension, PatchForm, patch_form, patch_problem

#: Elements that a thread loads before it stores the first.
_AT_ONCE = 16

#: Depths of the instruction after which what differs between lanes is computed again: of a long window, all of it
#: would take more registers than there are.
_LANES_ANEW = 4

#: What a register keeps of a pair of which so many elements are the window's.
_MASKS = (0, 0xFFFF, 0xFFFFFFFF)


def patch_kernel(form: Products, tile: PatchTile, device: DeviceSpec) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Products
        The function; its rows are such as ``patch_form`` describes.
    tile : PatchTile
        Sizes.
    device : DeviceSpec
        Says how many blocks a multiprocessor is to have room for, by which the compiler chooses registers.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.

    Raises
    ------
    ValueError
        If the rows are read in another way.
    """
    found = patch_form(form)
    problem = patch_problem(form)
    if found is None or problem is None:
        raise ValueError("the row operand is not read element by element from a patch")
    blocks = problem.blocks(tile.height, tile.width) * -(-form.column_count // tile.columns)
    return write_function(
        form,
        blocks,
        tile.threads,
        lambda *names: _PatchBody(form, found, tile, *names).emit(),
        resident=resident_blocks(problem, device, tile),
    )


class _PatchBody:
    """Emits what one thread does."""

    def __init__(self, form: Products, patch: PatchForm, tile: PatchTile, views, block, thread):
        self.form, self.patch, self.tile, self.views = form, patch, tile, views
        self.problem = patch_problem(form)
        self.box = self.problem.box(tile.height, tile.width)
        self.block, self.place = block, self._place(block, thread)
        size = shared_bytes(self.problem, tile)
        self.shared = IRBuilder.name("shared", T.alloc_buffer((size,), "uint8", scope="shared.dyn"))
        self.weight_bytes = 2 * tile.depth * tile.columns
        self.extents = self.problem.patch(tile.height, tile.width)
        pitch = self.problem.pitch(self.extents[-1])
        #: Elements from one place of the patch to the next, by dimension, and from a copy of the patch to the next.
        self.steps = (
            *(pitch * math.prod(self.extents[d + 1 : -1]) for d in range(len(self.extents) - 1)),
            1,
        )
        self.moved = pitch * math.prod(self.extents[:-1])
        self.sums = _local("sums", 4 * tile.row_fragments * tile.column_fragments, "float32")
        self.row_parts = [_local("rows", 4 * tile.row_fragments, "uint32") for _ in range(2)]
        self.column_part = _local("columns", 2 * tile.column_fragments, "uint32")

    def _place(self, block, thread) -> Place:
        """Decode where the block and the thread work."""
        form, tile = self.form, self.tile
        across = -(-form.column_count // tile.columns)
        column, number = block % integer(across), block // integer(across)
        #: First place of the rectangle along each axis, and where those that it stores begin, if later.
        self.first, self.unstored = {}, {}
        for iterator, size in reversed(list(zip(form.rows, self.box, strict=True))):
            count = -(-iterator.extent // size)
            start = number % integer(count) * integer(size)
            number = number // integer(count)
            if iterator.extent % size:
                self.unstored[iterator.var] = keep(start, "own")
                start = tirx.min(self.unstored[iterator.var], integer(iterator.extent - size))
            self.first[iterator.var] = keep(start, "first") if count > 1 else integer(0)
        rows, warp = integer(tile.warp_rows), thread // integer(32)
        places = (thread % integer(32), warp % rows, warp // rows)
        first = keep(column * integer(tile.columns), "column") if across > 1 else integer(0)
        batch = {i.var: integer(0) for i in form.batch}
        return Place(thread, *map(T.bind, places), integer(0), integer(0), first, batch)

    def emit(self) -> None:
        """Emit everything."""
        form, place, tile = self.form, self.place, self.tile
        with T.unroll(0, int(self.sums.shape[0])) as number:
            T.buffer_store(self.sums, tirx.const(0, "float32"), [number])
        lines = Lines(form.columns, form.column_count, tile.columns, place.first_column, _same)
        access = Access(self.patch.weights, "mn", 8)
        weights = TileCopy(
            form.anchors[0].columns, access, lines, place.batch,
            (*self.patch.outer, self.patch.pairs), tile.depth, place.thread, tile.threads,
            self.shared, self.views, (), form.constants,
        )  # fmt: skip
        early = weights.is_constant
        T.evaluate(call("tvmf_let_next_start"))
        if early:
            weights.issue(0, integer(0))
        T.evaluate(call("tvmf_wait_for_previous"))
        if not early:
            weights.issue(0, integer(0))
        T.evaluate(call("tvmf_commit"))
        self._fill()
        T.evaluate(call("tvmf_wait_0"))
        T.evaluate(call("tvmf_barrier"))
        self._multiply(access)
        # Places are computed again: kept, they would take registers from the products.
        place = self._place(*(_again(number) for number in (self.block, place.thread)))
        made = _PatchEpilogue(form, tile, place, [self.sums], self.shared, self.views, 1)
        made.body = self
        made.emit()

    # -- the patch --------------------------------------------------------------------------------

    def _start(self, dim: Dimension) -> tirx.PrimExpr:
        """Place in the image of the patch's first place in a dimension."""
        start = integer(dim.first)
        for iterator, step in zip(self.form.rows, dim.rows, strict=True):
            if step and iterator.extent > 1:
                start = start + self.first[iterator.var] * integer(step)
        return keep(start, "start")

    def _fill(self) -> None:
        """Read the patch: neighbouring threads take neighbouring elements of a line."""
        tile, (*outer, length) = self.tile, self.extents
        group = line_threads(length, tile.threads)
        lane = keep(self.place.thread % integer(group), "element")
        line = keep(self.place.thread // integer(group), "line")
        starts = [self._start(dim) for dim in self.patch.dimensions]
        *dims, last = self.patch.dimensions
        begins = keep(starts[-1] + lane, "begin")
        at_once = tile.threads // group
        jobs = [
            (first, part)
            for first in range(0, math.prod(outer), at_once)
            for part in range(0, length, group)
        ]
        for begin in range(0, len(jobs), _AT_ONCE):
            waiting, rows = [], {}
            if begin:  # the compiler would start all loads at once, and have no registers for what they bring
                line = _again(line)
            for first, part in jobs[begin : begin + _AT_ONCE]:
                if first not in rows:
                    rows[first] = self._line(line + integer(first), dims, starts, first + at_once)
                number, offset, valid = rows[first]
                place = begins + integer(part)
                inside = self._inside(place, last, self.patch.length - 1)
                if part + group > length:
                    inside.append(lane < integer(length - part))
                value = _local("value", 1, "uint16")
                view = self.views[self.patch.buffer.__chandle__()]
                read = call(
                    "tvmf_read_or_zero_2", view.data, offset + place,
                    conjunction([*valid, *inside] or [tirx.IntImm("bool", 1)]), result="uint16",
                )  # fmt: skip
                T.buffer_store(value, read, [0])
                needed = []
                if first + at_once > math.prod(outer):
                    needed.append(number < integer(math.prod(outer)))
                if part + group > length:
                    needed.append(lane < integer(length - part))
                waiting.append((number, lane + integer(part), value, needed))
            for number, element, value, needed in waiting:
                if needed:
                    with T.If(conjunction(needed)), T.Then():
                        self._put(number, element, value)
                else:
                    self._put(number, element, value)

    def _line(self, number, dims, starts, end: int) -> tuple:
        """Number of a line of the patch, where it begins in the image, and what must hold for it to be there."""
        outer = self.extents[:-1]
        offset, valid, rest = integer(0), [], number
        if end > math.prod(outer):
            valid.append(number < integer(math.prod(outer)))
        for d in reversed(range(len(dims))):
            dim = dims[d]
            place = starts[d]
            if outer[d] > 1:
                several = math.prod(outer[:d]) > 1
                place = place + (rest % integer(outer[d]) if several else rest)
                rest = rest // integer(outer[d]) if several else rest
            place = keep(place, "place")
            valid += self._inside(place, dim, 0)
            offset = offset + place * integer(dim.step)
        return number, keep(offset, "offset"), [keep(conjunction(valid), "valid")] if valid else []

    def _inside(self, place, dim: Dimension, more: int) -> list[tirx.PrimExpr]:
        """What must hold for a place to be read, where windows reach places that are not."""
        ends = zip((*dim.rows, *dim.reduced), (*self.form.rows, *self.patch.outer), strict=True)
        last = dim.first + more + sum(step * (i.extent - 1) for step, i in ends)
        found = [place >= integer(dim.begin)] if dim.first < dim.begin else []
        return [*found, *([place < integer(dim.end)] if last >= dim.end else [])]

    def _put(self, number, element, value) -> None:
        """Store an element in each copy of the patch."""
        at = number * integer(self.steps[-2] if len(self.steps) > 1 else 0) + element
        for copy in range(self.problem.copies()):
            place = at + integer(copy * (self.moved + 1))
            offset = integer(self.weight_bytes) + place * integer(2)
            T.evaluate(call("tvmf_store_shared_2", self.shared.data, offset, value[0]))

    # -- products ---------------------------------------------------------------------------------

    def positions(self, line) -> dict:
        """Place of a row of the tile within the rectangle, along its two axes."""
        count = math.prod(self.box)
        if count < self.tile.rows:
            line = tirx.min(line, integer(count - 1))
        down, across = self.problem.axes()
        width = self.box[across]
        found = {self.form.rows[across].var: line % integer(width) if count > width else line}
        if down is not None and self.box[down] > 1:
            found[self.form.rows[down].var] = line // integer(width)
        return found

    def _base(self, fragment: int, half: int) -> tirx.PrimExpr:
        """A lane's address of the first pair of a row's window, in bytes."""
        tile, place = self.tile, self.place
        line = place.warp_row * integer(tile.rows // tile.warp_rows)
        line = line + integer(ROWS * fragment + 8 * half) + place.lane // integer(4)
        element, odd = integer(0), integer(0)
        inside = self.positions(keep(line, "row"))
        for number, iterator in enumerate(self.form.rows):
            if iterator.var not in inside:
                continue
            at = keep(inside[iterator.var], "at")
            for dim, step in zip(self.patch.dimensions, self.steps, strict=True):
                if dim.rows[number]:
                    element = element + at * integer(dim.rows[number] * step)
        element = keep(element, "window")
        if self.problem.copies() > 1:
            odd = element % integer(2)
            element = element + odd * integer(self.moved + 1)
        start = integer(self.weight_bytes) + element * integer(2)
        return keep(start + place.lane % integer(4) * integer(4), "base")

    def _multiply(self, access: Access) -> None:
        tile, place = self.tile, self.place
        self.bases = [
            [self._base(fragment, half) for half in range(2)]
            for fragment in range(tile.row_fragments)
        ]
        self.pairs = self.patch.offsets(self.steps)
        base = keep(column_base(access, tile, place, place.lane), "column_base")
        name = f"tvmf_mma_{OPERAND_TYPES[self.form.anchors[0].rows.dtype][0]}"
        count = tile.depth // 16
        self._load_rows(0)
        for k in range(count):
            self._load_columns(access, base, k)
            # Those of the next depth come while this one's are multiplied.
            if k + 1 < count:
                self._load_rows(k + 1)
            rows, columns = self.row_parts[k % 2], self.column_part
            for row in range(tile.row_fragments):
                for column in range(tile.column_fragments):
                    target = 4 * (row * tile.column_fragments + column)
                    T.evaluate(
                        call(
                            name,
                            self.sums.data,
                            target,
                            rows.data,
                            4 * row,
                            columns.data,
                            2 * column,
                        )
                    )

    def _load_columns(self, access: Access, base, k: int) -> None:
        """Load the fragments of the weights of one depth of the instruction."""
        tile, columns = self.tile, self.column_part
        for fragment in range(0, tile.column_fragments, 2):
            offsets = column_fragment(access, tile, base, self.place, fragment, k)
            at = 2 * fragment
            T.evaluate(call(reader(access), columns.data, at, self.shared.data, *offsets))

    def _load_rows(self, k: int) -> None:
        """Load the fragments of the windows of one depth of the instruction."""
        tile, rows = self.tile, self.row_parts[k % 2]
        if k % _LANES_ANEW == 0:
            self.lane = _again(self.place.lane % integer(4))
        for part in range(2):
            first, jump, mask = self._pairs(self.pairs[8 * k + 4 * part : 8 * k + 4 * part + 4])
            for fragment in range(tile.row_fragments):
                for half in range(2):
                    at = self.bases[fragment][half] + integer(2 * first)
                    if jump is not None:
                        at = at + jump
                    word = call("tvmf_load_shared_word", self.shared.data, at, result="uint32")
                    word = word if mask is None else tirx.bitwise_and(word, mask)
                    T.buffer_store(rows, word, [4 * fragment + 2 * part + half])

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple:
        """Where the pairs of four neighbouring lanes lie: a constant, what lanes add, and what they keep of a word."""
        # A pair that nothing is read of may lie anywhere: behind the one before it.
        offsets = [pairs[0][0]]
        for offset, held in pairs[1:]:
            offsets.append(offset if held else offsets[-1] + 2)
        if not pairs[-1][1]:
            last = max((n for n in range(4) if pairs[n][1]), default=-1)
            offsets[last + 1 :] = [offsets[max(last, 0)]] * (3 - last)
        jumps = [offset - offsets[0] - 2 * n for n, offset in enumerate(offsets)]
        jump = None
        if any(jumps):
            jump = keep(_of_lane(self.lane, [integer(2 * j) for j in jumps]), "jump")
        masks = [_MASKS[held] for _, held in pairs]
        if all(mask == _MASKS[2] for mask in masks):
            return offsets[0], jump, None
        return (
            offsets[0],
            jump,
            keep(_of_lane(self.lane, [tirx.IntImm("uint32", m) for m in masks]), "mask"),
        )


class _PatchEpilogue(Epilogue):
    """Emits the stores of a rectangle."""

    body: _PatchBody

    def _row(self, line) -> tuple[dict, list]:
        body = self.body
        line = keep(line, "row")
        needed, names = [], dict(body.first)
        if math.prod(body.box) < self.tile.rows:
            needed.append(line < integer(math.prod(body.box)))
        for var, at in body.positions(line).items():
            names[var] = keep(body.first[var] + at, "position")
        needed += [names[var] >= own for var, own in body.unstored.items()]
        return {**self.place.batch, **names}, needed


def _of_lane(lane, values: list) -> tirx.PrimExpr:
    """One of four values, by the number of a lane within its four."""
    chosen = values[0]
    for number in range(1, 4):
        if not values[number].value == values[number - 1].value:
            chosen = tirx.Select(lane >= integer(number), values[number], chosen)
    return chosen


def _again(number: tirx.PrimExpr) -> tirx.PrimExpr:
    """The same number, of which the compiler does not know that it is."""
    return keep(call("tvmf_again", number, result="int32"), "again")


def _same(line: tirx.PrimExpr) -> tirx.PrimExpr:
    return line


def _local(name: str, size: int, dtype: str) -> tirx.Buffer:
    """Registers of a thread."""
    return IRBuilder.name(name, T.alloc_buffer((size,), dtype, scope="local"))
