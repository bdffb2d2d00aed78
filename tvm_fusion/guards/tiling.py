"""How large a piece of the output one thread block computes: the model behind static estimates.

The templates choose their tiles by a search of their own; planning thousands of proposals needs a
formula. It follows the same reasoning: a block of 256 threads, as many accumulators a thread as keep
every multiprocessor busy, and slices of the reduction staged in shared memory. ``plan --build``
reads the true numbers from the compiler and reports how far these are off.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from ..devices import DeviceSpec
from ..graph.dataflow import DTYPE_BYTES, DataflowGraph, Operator

#: Threads of a block of a pointwise, pooling or row kernel, and of a contraction.
THREADS, CONTRACTION_THREADS = 256, 128

#: Accumulators that a thread may keep beside its operands and addresses.
ACCUMULATORS = 64

#: Reduction elements (channels times window) that are staged in shared memory at a time.
SLICE = 72

#: Rows up to which a product is a matrix times vectors, bound by reading the matrix.
VECTOR_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Contraction:
    """One convolution or matrix product as a matrix product per window position.

    Attributes
    ----------
    rows : int
        Output positions (batch and spatial extents, or rows of a matrix).
    columns : int
        Output channels (or columns).
    depth : int
        Products summed per output: channels per group times window.
    window : int
        Window positions: 9 for a 3x3 convolution, 1 for a matrix product.
    stride : int
        Product of the strides.
    groups : int
        Groups of a convolution; ``columns`` when depthwise.
    nbytes : int
        Bytes of an element of the operands.
    """

    rows: int
    columns: int
    depth: int
    window: int
    stride: int
    groups: int
    nbytes: int

    @property
    def is_depthwise(self) -> bool:
        """Whether every output channel reads one input channel."""
        return self.groups > 1 and self.depth == self.window


def product_count(graph: DataflowGraph, anchor: Operator) -> int:
    """Matrix products that an anchor is: those with a right operand of their own."""
    if anchor.op != "matmul":
        return 1
    return math.prod(e or 1 for e in graph.tensors[anchor.inputs[1]].shape[:-2])


def contraction_of(graph: DataflowGraph, anchor: Operator) -> Contraction:
    """Describe an anchor.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    anchor : Operator
        Of the pattern ``"anchor"``.
    """
    out, data = graph.tensors[anchor.outputs[0]], graph.tensors[anchor.inputs[0]]
    nbytes = DTYPE_BYTES.get(data.dtype, 4)
    if anchor.op == "matmul":
        columns = (out.shape[-1] if out.shape else 1) or 1  # two vectors give a number
        return Contraction(
            out.size // max(columns, 1), columns, data.shape[-1] or 1, 1, 1, 1, nbytes
        )
    layout, kernel = str(anchor.attrs.get("data_layout", "NCHW")), graph.tensors[anchor.inputs[1]]
    kernel_layout = str(anchor.attrs.get("kernel_layout", "OIHW"))
    channel = layout.index("C") if "C" in layout and len(layout) == len(out.shape) else 1
    columns = out.shape[channel] or 1
    window = math.prod(
        extent or 1
        for axis, extent in zip(kernel_layout, kernel.shape, strict=False)
        if axis not in "OI"
    )
    depth = anchor.flops // max(2 * out.size, 1)
    stride = math.prod(int(s) for s in anchor.attrs.get("strides") or (1,))
    groups = int(anchor.attrs.get("groups", 1) or 1)
    return Contraction(
        out.size // max(columns, 1), columns, max(depth, 1), window, stride, groups, nbytes
    )


@dataclasses.dataclass(frozen=True)
class BlockTile:
    """What one thread block computes of a contraction."""

    rows: int
    columns: int
    accumulators: int
    blocks: int
    threads: int


@functools.lru_cache(maxsize=4096)
def block_tile(what: Contraction, device: DeviceSpec, copies: int = 1) -> BlockTile:
    """Choose the tile of one block: as large as leaves every multiprocessor a block.

    Parameters
    ----------
    what : Contraction
        The (largest) contraction of the kernel.
    device : DeviceSpec
        The device; multiprocessors decide how small tiles become.
    copies : int
        Accumulators kept for each output element: branches that are joined in registers.
    """
    outputs = max(what.rows * what.columns, 1)
    if what.rows <= VECTOR_ROWS:
        # A matrix times a few vectors: the threads of a warp share the products of an output.
        each = max(1, THREADS // 32)
        return BlockTile(what.rows, each, 1, -(-outputs // each), THREADS)
    most, accumulators = max(1, ACCUMULATORS // copies), 1
    while (
        accumulators * 2 <= most
        and outputs // (CONTRACTION_THREADS * accumulators * 2) >= device.multiprocessors
    ):
        accumulators *= 2
    tile = CONTRACTION_THREADS * accumulators
    columns = min(power_of_two(what.columns), power_of_two(math.isqrt(tile)))
    rows = min(power_of_two(what.rows), max(1, tile // columns))
    columns = min(power_of_two(what.columns), max(1, tile // rows))
    blocks = -(-what.rows // rows) * -(-what.columns // columns)
    threads = min(CONTRACTION_THREADS, max(32, rows * columns // accumulators))
    return BlockTile(rows, columns, accumulators, blocks, threads)


def serial_depth(what: Contraction) -> int:
    """Products that one thread adds up: all of an output, or a warp's share of a matrix-vector one."""
    return -(-what.depth // 32) if what.rows <= VECTOR_ROWS else what.depth


def staged_bytes(what: Contraction, tile: BlockTile, limit: int, copies: int = 1) -> int:
    """Shared memory for one slice of both operands of a contraction.

    Parameters
    ----------
    what : Contraction
        The contraction.
    tile : BlockTile
        What a block computes of it.
    limit : int
        Bytes that a block may use: slices get thinner until they fit, as in the templates.
    copies : int
        Weights of as many branches are staged together.

    Returns
    -------
    int
        Bytes; over ``limit`` only where a slice of one channel exceeds it.
    """
    if what.is_depthwise:
        return 0
    # A window is read from a patch of the input that is a little wider than the tile.
    side = math.isqrt(max(tile.rows, 1)) + math.isqrt(what.window) - 1
    patch = tile.rows * what.stride if what.window == 1 else side * side * what.stride
    channel = (patch + copies * tile.columns * what.window) * what.nbytes
    channels = min(max(1, SLICE // what.window), max(1, what.depth // what.window))
    while channels > 1 and channels * channel > limit:
        channels //= 2
    return channels * channel


def power_of_two(value: int) -> int:
    """Smallest power of two that is no less than a positive number."""
    return 1 << max(0, (max(value, 1) - 1).bit_length())
