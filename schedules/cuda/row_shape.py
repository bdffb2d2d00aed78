"""How threads divide rows: a small model of the time that a kernel of rows takes.

Large problems are bound by memory or by instructions, small ones by the time that a block takes from its first load to
its last store. The model compares shapes of one function, so that only their differences have to be right.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterator

from ...compat import Target, ir, tirx
from ...devices import DeviceSpec, device_for
from ..analysis import dtype_bytes
from ..base import limits
from .fast_math import fast_math, function_of
from .row_form import RowFunction, uses
from .row_pieces import RowShape
from .row_places import VECTOR_BYTES, Place, parts_of, places_of

#: Cycles from a load to its arrival, of an exchange within a warp, and of a barrier with what surrounds it.
_LOAD, _WARP_EXCHANGE, _BLOCK_EXCHANGE = 800.0, 150.0, 120.0

#: Cycles between instructions of a thread that has the multiprocessor almost for itself.
_ALONE = 2.5

#: Instructions of a thread besides those for its elements, and of a function's call.
_FIXED, _CALL = 40.0, 8.0

#: Instructions of an access to memory.
_ACCESS = 2.0

#: What costs an instruction.
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min, tirx.Div, tirx.Select)

#: Registers of a thread besides its elements, and how many it may take in all.
_BASE_REGISTERS, _MOST_REGISTERS = 24, 128

#: Exponent of the mean of times that overlap: the larger, the closer to their maximum.
_OVERLAP = 4

#: Part of the peak rates that kernels reach.
_ISSUED, _MOVED = 0.8, 0.85

#: Bytes that a multiprocessor gets from the second-level cache in a cycle.
_ARRIVING = 48.0

#: Cycles that a multiprocessor takes to start a block.
_START = 60.0

#: Threads of a block that holds several rows: more only wait longer for each other.
_THREADS = 256

#: Threads of a warp, which a block should have at least.
_WARP = 32

#: Bytes that memory moves at once.
_SECTOR = 32

#: Chunks of a round.
_ROUND = (4, 8)


@dataclasses.dataclass(frozen=True)
class RowWork:
    """What the model knows of a function.

    Parameters
    ----------
    form : RowFunction
        The function.
    across : bool
        Whether rows, not columns, are neighbours in memory.
    vector : int
        Elements of a chunk.
    places : tuple of Place
        Where it reads and writes parameters.
    each : float
        Instructions of an element.
    """

    form: RowFunction
    across: bool
    vector: int
    places: tuple[Place, ...]
    each: float

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        found = 0
        for place in self.places:
            found += dtype_bytes(place.dtype) * math.prod(int(e) for e in place.buffer.ty.shape)
        return found

    @property
    def loaded_bytes(self) -> int:
        """Bytes of an element that go through registers."""
        return sum(dtype_bytes(place.dtype) for place in self.places if place.is_vector)


def row_work(form: RowFunction, across: bool) -> RowWork:
    """Describe a function; its chunk is the one with the fewest accesses for an element."""
    along, extent = (form.row, form.count) if across else (form.column, form.length)
    found = []
    for vector in (8, 4, 2, 1):
        if extent % vector:
            continue
        places = places_of(form, along, vector)
        sizes = [dtype_bytes(place.dtype) for place in places if place.is_vector]
        # Wider than one access of the narrowest type gains nothing; TVM has no vectors of bytes that all code takes.
        if vector > 1 and (not sizes or min(sizes) < 2 or vector * min(sizes) > VECTOR_BYTES):
            continue
        found.append((sum(place.accesses for place in places), -vector, places))
    _, negative, places = min(found, key=lambda entry: entry[:2])
    return RowWork(form, across, -negative, tuple(places), _each(form))


def _each(form: RowFunction) -> float:
    """Instructions for an element in all stages."""
    found = 0.0
    for stage in form.stages:
        if stage.is_wide:
            value = fast_math(stage.value, narrow=form.is_narrow)
            found += _count(value, form.column, set()) + (stage.kind == "reduction")
    return found


def _count(expr: tirx.PrimExpr, column: tirx.Var, seen: set[str]) -> float:
    """Instructions of an expression; what is the same for a row, or was computed before, costs nothing."""
    if not uses(expr, column) or str(expr) in seen:
        return 0.0
    seen.add(str(expr))
    below = sum(_count(part, column, seen) for part in parts_of(expr))
    if isinstance(expr, ir.Call):
        return below + (_CALL if function_of(expr) != "if_then_else" else 1)
    if isinstance(expr, tirx.Add | tirx.Sub) and any(
        isinstance(part, tirx.Mul) and uses(part, column) for part in (expr.a, expr.b)
    ):
        return below  # one instruction with the product
    return below + isinstance(expr, _ARITHMETIC)


def row_shapes(
    work: RowWork,
    device: DeviceSpec,
    most_threads: int,
    most_lines: int | None = None,
    count: int = 1,
) -> list[RowShape]:
    """Ways in which threads can divide the rows of a function, the fastest first.

    Parameters
    ----------
    work : RowWork
        The function.
    device : DeviceSpec
        Where it will run.
    most_threads : int
        Threads that a block may have.
    most_lines : int or None
        Threads that a row may have across rows, None for any number.
    count : int
        How many at most.
    """
    most_lines = most_lines or most_threads
    shapes = _across(work, most_threads, most_lines) if work.across else _along(work, most_threads)
    fitting = [shape for shape in shapes if _registers(work, shape) <= _room(shape, device)]
    # Of equal ones the block of more threads: fewer blocks are to be started.
    return heapq.nsmallest(
        count,
        fitting,
        key=lambda shape: (_cycles(work, shape, device), -shape.lanes * shape.lines),
    )


def shapes_of(
    work: RowWork, target: Target, most_lines: int | None = None
) -> Callable[[int], list[RowShape]]:
    """`row_shapes` for a target, as a function of their number."""
    return functools.partial(
        row_shapes, work, device_for(target), limits(target).threads, most_lines
    )


def _chunked(total: int) -> Iterator[tuple[int, int]]:
    """Chunks of a round and rounds, for so many chunks in all."""
    yield total, 1
    for chunks in _ROUND:
        if total > chunks:
            yield chunks, -(-total // chunks)


def _along(work: RowWork, most_threads: int) -> Iterator[RowShape]:
    length, vector = work.form.length, work.vector
    for lanes in (1, 2, 4, 8, 16, *range(32, most_threads + 1, 32)):
        total = -(-length // (lanes * vector))
        fewer = lanes // 2 if lanes <= 32 else lanes - 32
        if lanes > 1 and -(-length // (fewer * vector)) == total:
            continue
        for lines in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            threads = lanes * lines
            if lines > 1 and (threads > _THREADS or lines >= 2 * work.form.count):
                break
            if threads >= _WARP or lines >= work.form.count:
                for chunks, rounds in _chunked(total):
                    yield RowShape(lanes, lines, vector, chunks, rounds)


def _across(work: RowWork, most_threads: int, most_lines: int) -> Iterator[RowShape]:
    groups = -(-work.form.count // max(1, work.vector // 4))
    for lanes in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if lanes >= 2 * groups:
            break
        for lines in sorted({*(2**n for n in range(10)), *_fractions(work.form.length)}):
            if lanes * lines > most_threads or lines >= 2 * work.form.length or lines > most_lines:
                break
            if lanes * lines < _WARP and lanes < groups:
                continue
            total = -(-work.form.length // lines)
            for vector in (work.vector, work.vector // 2, work.vector // 4):
                for chunks, rounds in _chunked(total) if vector else ():
                    yield RowShape(lanes, lines, vector, chunks, rounds)


def _fractions(length: int) -> set[int]:
    """Divisors of a length that leave no thread without work."""
    return {-(-length // n) for n in range(1, 33) if length % n == 0}


def _room(shape: RowShape, device: DeviceSpec) -> float:
    """Registers that a thread of a block may have."""
    return min(_MOST_REGISTERS, device.registers_per_multiprocessor // _warped(shape, device))


def _warped(shape: RowShape, device: DeviceSpec) -> int:
    """Threads of a block with those that fill up the last warp."""
    return -(-shape.lanes * shape.lines // device.warp_size) * device.warp_size


def _registers(work: RowWork, shape: RowShape) -> float:
    """Registers of a thread: a float for every element if several stages read it, and part of what is loaded."""
    kept = 1.0 if shape.rounds == 1 and work.form.reductions + work.form.wide_outputs > 1 else 0.5
    loaded = min(work.loaded_bytes / 4, 3.0)
    numbers = 2 * shape.vector if work.across else 0
    return _BASE_REGISTERS + numbers + shape.elements * (kept + 0.5 * loaded)


def _exchange(work: RowWork, shape: RowShape) -> tuple[float, float]:
    """Instructions and cycles of a thread for the exchange after a reduction."""
    if work.across:
        if shape.lines == 1:
            return 0.0, 0.0
        ends = work.form.wide_outputs == 0 and shape.vector <= shape.lines
        each = 1.3 * shape.lines * (1 if ends else shape.vector)
        return 10 + shape.vector + each, _BLOCK_EXCHANGE + each * _ALONE
    warps = shape.lanes / 32
    inside = 2 * math.log2(min(shape.lanes, 32))
    if warps <= 1:
        return inside, _WARP_EXCHANGE * inside / 10
    return inside + 12 + 1.25 * warps, _WARP_EXCHANGE + _BLOCK_EXCHANGE + 4 * warps


def _cycles(work: RowWork, shape: RowShape, device: DeviceSpec) -> float:
    """Estimated cycles of the kernel."""
    form, chips = work.form, device.multiprocessors
    threads = _warped(shape, device)
    resident = min(
        device.max_threads_per_multiprocessor // threads,
        int(device.registers_per_multiprocessor // (_registers(work, shape) * threads)),
        device.max_blocks_per_multiprocessor,
    )
    per_block = shape.lanes * shape.vector if work.across else shape.lines
    blocks = -(-form.count // per_block)
    loads = sum(1.25 for place in work.places if place.is_vector)
    stages = form.reductions + form.wide_outputs
    again = stages if shape.rounds > 1 else 1
    each = (work.each + loads * again) * shape.elements * shape.rounds
    each += _ACCESS * loads * again * shape.chunks * shape.rounds
    exchanged, waited = _exchange(work, shape)
    instructions = _FIXED + each + form.reductions * exchanged
    # The busiest multiprocessor issues 128 lanes a cycle.
    issue = -(-blocks // chips) * (threads * instructions / (128 * _ISSUED) + _START)
    clock = device.peak_flops("float32") / (256 * chips)
    memory = work.nbytes * clock / (device.memory_bandwidth * _MOVED)
    if shape.rounds > 1 and stages > 1:
        memory *= 1 + 0.3 * (stages - 1)  # from the second-level cache
    waste = 1.0
    if work.across:
        narrowest = min((dtype_bytes(p.dtype) for p in work.places if p.is_vector), default=4)
        waste = max(1.0, _SECTOR / (shape.lanes * shape.vector * narrowest))
    memory *= waste
    # A multiprocessor alone gets a few times its share of the bandwidth.
    memory *= max(1.0, chips / (4 * min(blocks, chips)))
    latency = _LOAD * (1 + 0.5 * (shape.rounds * again - 1)) + form.reductions * waited
    at_once = min(-(-blocks // chips), max(1, resident))
    latency += instructions * _ALONE + at_once * waste * work.nbytes / blocks / _ARRIVING
    waves = -(-blocks // (chips * max(1, resident)))
    # They overlap, but not perfectly.
    together = sum(part**_OVERLAP for part in (issue, memory, waves * latency))
    return together ** (1 / _OVERLAP) + latency
