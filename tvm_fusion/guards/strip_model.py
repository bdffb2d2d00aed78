"""Strips of a convolution with few channels a group, and a model of where a multiprocessor's time goes with each.

A thread computes a strip: some rows and columns of the image, of neighbouring channels where these are last. It loads
each row of its window once, and keeps the sums in registers; nothing passes through shared memory. The template chooses
its strip here (`schedules/cuda/strips`), and the planner predicts its time here. The model has five parts: what warps
issue, loads through the first-level cache, traffic from the second-level cache, the chain of dependent steps of one
warp, and the start of one block after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from ..devices import DeviceSpec, capability

WARP = 32

#: Bytes of the widest load.
WIDEST = 16

#: Multiply-adds of a thread up to which its code is written out: about what the instruction cache holds.
UNROLLED = 2048

#: Threads of a block. More make room for blocks, and what is left over, coarse: of 44 strips 5 were faster with 256
#: threads on an H200, by 2 to 5 %, and most slower, by up to 41 %.
THREADS = (64, 128)

#: Sums of a thread, and registers that its estimate may reach.
SUMS, REGISTERS = 64, 160

#: Registers for addresses, positions and the epilogue; of weights at most; rows of data that the compiler has on their
#: way. Read from 32 kernels (3x3 and 5x5 windows: 27 fewer to 73 more than estimated, 7 fewer in the median).
ADDRESSES, WEIGHTS, ROWS = 20, 96, 3

#: Registers that a kernel may take beyond the estimate.
SPARE = 40

#: Input channels of a group that are loaded at once: more would take too many registers for weights.
CHUNK = 4

#: Input channels of a group up to which this is worth it: with more, tiles in shared memory are read more often.
MOST_CHANNELS = 32

#: Registers of weights up to which a thread that computes several rows keeps all of them.
HELD = 40


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the search knows of a function: sums over windows that meet in elementwise outputs.

    Attributes
    ----------
    channels : int
        Neighbouring output channels that a thread may share out, a group's where each group reads its own input; 1
        where channels are not last.
    rows, columns : int
        Positions of the output along the two axes of the window.
    others : int
        Other output elements: images, groups, and channels that are not last.
    window, stride, dilation : tuple of (int, int)
        Of the window, down and across.
    depth : int
        Positions of the window that a sum takes from other places: channels of a group's input.
    nbytes : int
        Bytes of an element of the operands.
    own_data : bool
        Whether each channel reads an input channel of its own (depthwise).
    channels_last : bool
        Whether neighbouring threads have neighbouring channels; else neighbouring columns.
    vector : int
        Neighbouring channels that can be loaded at once.
    anchors : int
        Such sums for each output element.
    """

    channels: int
    rows: int
    columns: int
    others: int
    window: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    depth: int
    nbytes: int
    own_data: bool
    channels_last: bool
    vector: int
    anchors: int = 1

    @property
    def chunk(self) -> int:
        """Input channels of a group that are loaded at once."""
        return math.gcd(CHUNK, self.depth) if self.channels_last else 1

    @property
    def taps(self) -> int:
        """Positions of the window."""
        return self.window[0] * self.window[1]


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """Sizes of a thread's and of a block's work.

    Attributes
    ----------
    channels, rows, columns : int
        Outputs of a thread along each axis.
    threads : int
        Threads of a block.
    """

    channels: int
    rows: int
    columns: int
    threads: int

    @property
    def outputs(self) -> int:
        """Outputs of a thread."""
        return self.channels * self.rows * self.columns

    def strips(self, problem: Problem) -> int:
        """Threads that have work."""
        return (
            -(-problem.channels // self.channels)
            * -(-problem.rows // self.rows)
            * -(-problem.columns // self.columns)
            * problem.others
        )

    def blocks(self, problem: Problem) -> int:
        """Thread blocks of a kernel."""
        return -(-self.strips(problem) // self.threads)

    def products(self, problem: Problem) -> int:
        """Multiply-adds of a thread for one chunk of input channels."""
        return self.outputs * problem.taps * problem.chunk

    def is_rolled(self, problem: Problem) -> bool:
        """Whether rows of the window are a loop."""
        return self.products(problem) > UNROLLED

    def data_registers(self, problem: Problem) -> int:
        """Registers of one row of the window as it is loaded."""
        width = self.channels if problem.own_data else problem.chunk
        each = -(-width * problem.nbytes // 4)
        return each * len(reached(self.columns, problem, 1))

    def weight_registers(self, problem: Problem) -> int:
        """Registers of all weights of a chunk as they are loaded."""
        each = -(-self.channels * problem.nbytes // 4)
        return each * problem.taps * problem.chunk

    def registers(self, problem: Problem) -> int:
        """Estimated registers of a thread: sums, two rows of data, one of weights, addresses."""
        width = self.channels if problem.own_data else problem.chunk
        weights = self.channels * problem.window[1] * problem.chunk
        if self.rows > 1 or problem.depth > 1:
            # As float32, of several rows of the window.
            weights = max(weights, min(self.channels * problem.taps * problem.chunk, WEIGHTS))
        sums = self.outputs * problem.anchors
        return sums + ROWS * self.data_registers(problem) + width + weights + ADDRESSES


def reached(count: int, problem: Problem, axis: int) -> list[int]:
    """Distinct positions of the input that so many neighbouring outputs read along an axis (0: down, 1: across)."""
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    window = range(problem.window[axis])
    return sorted({stride * i + dilation * k for i in range(count) for k in window})


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor.

    Times are fitted to kernels of 42 problems on an H200 that overlap with their predecessor, instructions counted in
    130 of them (nvcc 13, sm_90; of depthwise ones within 6 %). Held-out problems: rank correlation 0.82, the
    chosen strip 5 % from the best measured one, the time of a problem off by 11 % (benchmarks/NOTES.md).

    Attributes
    ----------
    issue : float
        Instructions of warps that are issued a cycle.
    load, store, thread, convert : float
        Instructions of a load with its predicate, of an output's epilogue, of a thread's positions, and of an element
        that becomes float32.
    line : float
        Bytes a cycle from the first-level cache, the hardware's (fitted: 135).
    cache : float
        Bytes a cycle that a multiprocessor reads from the second-level cache, less what of their time overlaps with
        work: the rest comes on top, for most strips are short and begin together.
    write : float
        Bytes a cycle that it writes, of the last blocks: nothing overlaps with them, and the next kernel waits for
        them. Pointwise products of the same sizes show the same (`benchmarks/NOTES.md`).
    block : float
        Cycles from the start of a block of the kernel to that of the next. It shows in strips of one output: a block
        of 64 threads takes 2.07 cycles, whatever its threads do.
    overlap, apart : float
        Exponents with which times that overlap add up: of parts of the work, and of the work and the start of blocks.
    chain, latency : float
        One warp's chain: cycles an instruction (its code has no loops, so that warps wait for instructions, too), and
        from its first load to its data.
    crowd : float
        Work of the most crowded multiprocessor of a kernel that starts early, beyond its share; see `_crowded`.
    start : float
        What a kernel pays once.
    clock : float
        Cycles in a microsecond.
    """

    issue: float = 3.67
    load: float = 2.0
    store: float = 3.3
    thread: float = 40.0
    convert: float = 1.1
    line: float = 128.0
    cache: float = 135.6
    write: float = 15.3
    block: float = 2.07
    overlap: float = 2.91
    apart: float = 8.0
    chain: float = 1.65
    latency: float = 324.5
    crowd: float = 0.875
    start: float = 1267.0
    clock: float = 1750.0


RATES = Rates()

#: Least compute capability times ten with launches that overlap, and kernels whose blocks are on the chip at once.
_OVERLAP_FROM, _TOGETHER = 90, 4

#: FLOP/s of a multiprocessor for which multiply-adds are one instruction each.
_FITTED_FLOPS = 67e12 / 132


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strip with its predicted time in microseconds, launch included."""

    tile: Tile
    microseconds: float


@functools.lru_cache(maxsize=4096)
def best_strips(problem: Problem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the strips of least predicted time, best first; none where none fits.

    Parameters
    ----------
    problem : Problem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    if problem.depth > MOST_CHANNELS:
        return ()
    found = []
    sizes = (1, 2, 3, 4, 7, 8, 14)
    for channels, rows, columns, threads in itertools.product((1, 2, 4, 8), sizes, sizes, THREADS):
        tile = Tile(channels, rows, columns, threads)
        if _fits(problem, device, tile):
            found.append(Choice(tile, predict(problem, device, tile)))
    # Of strips that take the same time, the smallest in every field: the choice never depends on the machine.
    found.sort(key=lambda choice: (round(choice.microseconds, 6), choice.tile))
    return tuple(found[:count])


def _fits(problem: Problem, device: DeviceSpec, tile: Tile) -> bool:
    rolled = tile.is_rolled(problem)
    return (
        problem.vector % tile.channels == 0
        and tile.channels * problem.nbytes <= WIDEST
        and tile.rows <= problem.rows
        and tile.columns <= problem.columns
        # Where columns are neighbours in memory, a thread's begin where all of them can be stored at once.
        and (problem.channels_last or _is_stored_at_once(problem, tile))
        and tile.outputs * problem.anchors <= SUMS
        and tile.registers(problem) <= REGISTERS
        and (not rolled or (tile.rows == 1 and _row_products(problem, tile) <= UNROLLED))
        and tile.threads <= device.max_threads_per_block
    )


def _is_stored_at_once(problem: Problem, tile: Tile) -> bool:
    return tile.columns in (1, 2, 4) and problem.columns % tile.columns == 0


def _row_products(problem: Problem, tile: Tile) -> int:
    return tile.outputs * problem.window[1] * problem.chunk


def predict(problem: Problem, device: DeviceSpec, tile: Tile, rates: Rates = RATES) -> float:
    """Predicted time of one strip in microseconds, launch included."""
    chunks = problem.depth // problem.chunk
    down, across = (len(reached(n, problem, i)) for i, n in enumerate((tile.rows, tile.columns)))
    width = tile.channels if problem.own_data else problem.chunk
    loads = down * across * chunks
    again = tile.rows if tile.weight_registers(problem) > HELD else 1
    weights = problem.taps * problem.depth * again
    issued = _instructions(problem, device, tile, loads * width, loads, weights, rates)
    # Lanes beside each other load neighbouring bytes; where channels are not last, every so many columns' ones.
    apart = 1 if problem.channels_last else tile.columns * problem.stride[1]
    lines = (
        loads * max(4, width * problem.nbytes * apart) + weights * tile.channels * problem.nbytes
    )
    read = down * chunks * width * problem.nbytes * min(across, tile.columns * problem.stride[1])
    strips = tile.strips(problem)
    blocks = tile.blocks(problem)
    share = -(-blocks // device.multiprocessors)
    # Threads of a multiprocessor that has most of them.
    threads = min(share * tile.threads, -(-strips // WARP) * WARP)
    threads *= 1 + rates.crowd / math.sqrt(share) * _crowded(problem, device, tile)
    waves = -(-share // min(share, promised_blocks(problem, device, tile)))
    p = rates.overlap
    work = (threads / WARP * issued / rates.issue) ** p
    work += (problem.anchors * threads * lines / rates.line) ** p
    work += (waves * (rates.latency + issued * rates.chain)) ** p
    moved = problem.anchors * read / rates.cache
    moved += tile.outputs * problem.nbytes / waves / rates.write
    work = work ** (1 / p) + strips / device.multiprocessors * moved
    p = rates.apart
    return (rates.start + (work**p + (blocks * rates.block) ** p) ** (1 / p)) / rates.clock


def _instructions(
    problem: Problem,
    device: DeviceSpec,
    tile: Tile,
    elements: int,
    loads: int,
    weights: int,
    rates: Rates,
) -> float:
    """Instructions of a warp whose threads load so many elements of data, and do so many loads of data and weights."""
    slowness = _FITTED_FLOPS * device.multiprocessors / device.peak_flops("float32")
    products = tile.outputs * problem.taps * problem.depth * slowness
    wide = problem.nbytes < 4
    converted = (elements + weights * tile.channels) * rates.convert if wide else 0.0
    issued = (loads + weights) * rates.load + converted + products
    return problem.anchors * issued + tile.outputs * rates.store + rates.thread


def _crowded(problem: Problem, device: DeviceSpec, tile: Tile) -> bool:
    """Whether blocks that start while earlier kernels run land on few multiprocessors.

    A kernel lets the next one start as soon as its own blocks have started, so that blocks of several kernels are there
    at once. They spread evenly where all of them fit, and where no multiprocessor has room for more than its share.
    Else the last ones go where room appears first, and how many land on one multiprocessor varies like the square root
    of their number. On an H200 such kernels took up to 1.5 times as long as after a plain launch, others did not.
    """
    if capability(device.arch) < _OVERLAP_FROM:
        return False
    share = -(-tile.blocks(problem) // device.multiprocessors)
    return share < promised_blocks(problem, device, tile) <= _TOGETHER * share


def promised_blocks(problem: Problem, device: DeviceSpec, tile: Tile) -> int:
    """Blocks that the compiler has to leave room for on a multiprocessor.

    Without a limit it loads as many rows in advance as there are registers, and there is room for few threads.
    """
    registers = -(-min(255, tile.registers(problem) + SPARE) // 8) * 8
    return max(
        1,
        min(
            device.registers_per_multiprocessor // (registers * tile.threads),
            device.max_threads_per_multiprocessor // tile.threads,
            device.max_blocks_per_multiprocessor,
        ),
    )


def supports(device: DeviceSpec, dtype: str) -> bool:
    """Whether the template has kernels for a type on a device: chips before sm_80 have no bfloat16."""
    if device.kind != "cuda" or dtype not in ("float32", "float16", "bfloat16"):
        return False
    return dtype != "bfloat16" or capability(device.arch) >= 80
