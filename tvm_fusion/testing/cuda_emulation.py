"""Running generated CUDA on the CPU, so that kernels can be checked without a GPU.

A block's threads run as fibers that switch at ``__syncthreads`` and at instructions of their warp (exchanges, matrix
instructions); blocks run one after the other, those of a cluster together. Every access to memory is checked. An error
is: an access out of range or misaligned, a barrier that not every thread reaches, an instruction of a warp that its
lanes do not reach together, and two threads that use the same bytes of shared memory, one of them writing, without a
barrier between. An asynchronous copy writes when its thread waits for it, as late as it may; from its issue on, its
bytes hold NaN. A warpgroup's matrix instruction reads shared memory at once, where all has to be visible to it
(``fence.proxy.async`` of the thread that wrote, then a barrier), and until every thread has waited for it, nobody may
write what it reads, and its sums hold NaN and may not be used. Shared memory starts filled with NaN in every block,
and so do variables. The threads can run in reverse order, which gives another result where a barrier is missing.

Values are not those of a GPU to the last bit: matrix instructions add their products in float32, one after the other,
while hardware adds several at once and truncates; tf32 operands lose their last 13 bits as in hardware; fast functions
such as ``__expf`` are the accurate ones, but those that ``--use_fast_math`` makes wrong or much worse (powers, tanh,
sines of many turns) are as wrong. Of wgmma, only products of two operands in dynamic shared memory with 128-byte
swizzle are covered; of the copy engine (TMA), tiles into the block's own shared memory, without
swizzle or with that of 128 bytes. A copy arrives when no thread can go on without it; who may use its bytes follows
from arrivals and waits at barriers in shared memory. A wait that never ends is an error that says what is missing. Not
covered: wmma, barriers of part of a block, copies to several blocks of a cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import tvm_ffi

from ..build.cuda_source import cuda_source as generate
from ..compat import Target, tirx, tvm
from ._cuda_build import build
from ._cuda_device import device_functions
from ._tensor_maps import TensorMap, tensor_maps

_TAGS = tuple(
    f"{name}.{axis}" for name in ("blockIdx", "threadIdx", "clusterCtaIdx") for axis in "xyz"
)
_KERNEL = re.compile(
    r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))? (\w+)\(([^)]*)\)\s*\{'
)


#: What TVM appends to a parameter's name for its pointer, with a number where it passes the tensor twice.
_POINTER = re.compile(r"_ptr(_\d+)?$")
_SHARED = re.compile(r"__shared__\s+([^;=()]*(?:\([^)]*\))?[^;=()]*?)\b(\w+)\s*((?:\[[^\]]+\])*);")
_DYNAMIC = re.compile(
    r"extern __shared__\s+(?:(?:__align__|alignas)\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes
    ----------
    grid, block : tuple of int
        Blocks of the grid and threads of a block, each (x, y, z).
    shared : int
        Bytes of dynamic shared memory.
    cluster : tuple of int
        Blocks that run together and reach each other's shared memory.
    maps : tuple of TensorMap
        Tensor maps that the host makes.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    maps: tuple[TensorMap, ...] = ()


def launch_of(func: tirx.PrimFunc) -> Launch:
    """Read the launch of a scheduled function with one kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        Function with thread bindings, as loops or as attributes. Its dynamic shared memory is that of its allocation
        statements; of several, which TVM may place one over the other, the sum.

    Raises
    ------
    ValueError
        If one tag has two extents, as in a function of several kernels.
    """
    extents: dict[str, int] = {}
    shared: list[int] = []

    def note(tag: str, extent: tirx.PrimExpr) -> None:
        if tag in _TAGS and extents.setdefault(tag, int(extent)) != int(extent):
            raise ValueError(
                f"{tag} has extents {extents[tag]} and {int(extent)}; launch one kernel at a time"
            )

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None:
            note(str(node.thread_binding.thread_tag), node.extent)

    def attribute(node: tirx.AttrStmt) -> None:
        if node.attr_key == "thread_extent":
            note(str(node.node.thread_tag), node.value)

    def allocation(node: tirx.AllocBuffer) -> None:
        if node.buffer.scope() == "shared.dyn":
            count = math.prod(int(extent) for extent in node.buffer.shape)
            shared.append(count * tvm.DataType(str(node.buffer.dtype)).bits // 8)

    visitors = ((tirx.For, loop), (tirx.AttrStmt, attribute), (tirx.AllocBuffer, allocation))
    tvm_ffi.structural_walk(func.body, visitors)
    sizes = tuple(extents.get(tag, 1) for tag in _TAGS)
    return Launch(sizes[:3], sizes[3:6], sum(shared), sizes[6:], tensor_maps(func))


def cuda_source(func: tirx.PrimFunc, target: Target) -> str:
    """Generate the CUDA source of a scheduled function, without running any CUDA compiler.

    Parameters
    ----------
    func : tirx.PrimFunc
        Scheduled function; its kernel is named ``main_kernel``.
    target : Target
        A CUDA target.
    """
    named = func.with_attrs({"global_symbol": "main", "tirx.is_scheduled": True})
    return generate(tvm.IRModule({"main": named}), target)


def kernels(source: str) -> list[str]:
    """Return the names of the kernels that a CUDA source defines."""
    return [match[1] for match in _KERNEL.finditer(source)]


def sample_blocks(grid: tuple[int, int, int], count: int) -> list[int]:
    """Choose blocks of a grid: its corners, and others spread evenly.

    Parameters
    ----------
    grid : tuple of int
        Blocks along x, y and z.
    count : int
        How many (at least the corners, at most all).

    Returns
    -------
    list of int
        Numbers of blocks in rising order; x runs fastest.
    """
    x, y, z = grid
    total = x * y * z
    corners = {
        (k * y + j) * x + i for i, j, k in itertools.product((0, x - 1), (0, y - 1), (0, z - 1))
    }
    others = [block for block in range(total) if block not in corners]
    wanted = min(max(0, count - len(corners)), len(others))
    return sorted(
        corners | {others[(2 * n + 1) * len(others) // (2 * wanted)] for n in range(wanted)}
    )


def emulate(
    source: str,
    launch: Launch,
    arrays: Mapping[str, np.ndarray],
    *,
    kernel: str | None = None,
    backward: bool = False,
    blocks: int | Sequence[int] | None = None,
    check_races: bool = True,
) -> dict[str, np.ndarray]:
    """Run one kernel of a CUDA source on the CPU.

    Parameters
    ----------
    source : str
        CUDA source as TVM generates it.
    launch : Launch
        Grid, block and dynamic shared memory.
    arrays : mapping of str to numpy.ndarray
        Contiguous arrays by kernel parameter name, changed in place. A parameter ``x_ptr`` also matches ``x``.
        bfloat16 arrays are passed as uint16.
    kernel : str or None
        Which kernel; None for the only one.
    backward : bool
        Run the threads of a block in reverse order.
    blocks : int, sequence of int or None
        Run these blocks only (x runs fastest), or as many as `sample_blocks` chooses; of clusters, all their blocks.
    check_races : bool
        Whether unordered uses of shared memory are errors. Without, they show as wrong values in one of the orders.

    Returns
    -------
    dict
        Which elements the kernel wrote: a boolean array for each of ``arrays``, by the same name.

    Raises
    ------
    ValueError
        If the kernel is not there, a parameter has no array, or dynamic shared memory has no size.
    CompilerError
        If the C++ compiler rejects the source, or it calls a device function with PTX that has no stand-in.
    RuntimeError
        If the kernel does something wrong: see the description of this module.
    """
    found = {match[1]: match for match in _KERNEL.finditer(source)}
    if kernel is None and len(found) == 1:
        kernel = next(iter(found))
    if kernel not in found:
        raise ValueError(f"the source defines the kernels {sorted(found)}; name one of them")
    types, names = _parameters(found[kernel][2])
    # TVM passes a tensor of truth values twice, as `x_ptr` and `x_ptr_1`: as bytes and as truth values.
    keys = [name if name in arrays else _POINTER.sub("", name) for name in names]
    maps = {found.name: found for found in launch.maps}
    # What only the copy engine reads is no parameter of the kernel.
    for tensor in dict.fromkeys(found.tensor for found in launch.maps):
        if tensor not in keys:
            keys.append(tensor)
    own = [
        maps[key].described(keys.index(maps[key].tensor), arrays)
        if key in maps
        else _array(arrays, key, key)
        for key in keys
    ]
    if _DYNAMIC.search(source) and not launch.shared:
        raise ValueError("the source has dynamic shared memory; give its bytes as Launch.shared")
    library = build(_cpu_source(source, kernel, types))
    if isinstance(blocks, int):
        blocks = sample_blocks(launch.grid, blocks)
    clusters = _clusters(launch, range(math.prod(launch.grid)) if blocks is None else blocks)
    written = [np.zeros(array.nbytes, "uint8") for array in own]
    sizes = (*launch.grid, *launch.block, *launch.cluster)
    failure = library.launch(own, written, sizes, launch.shared, clusters, (backward, check_races))
    if failure is not None:
        text, line = failure
        lines = source.splitlines()
        where = f" at line {line}: {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
        text = re.sub(r"\{(\d+)\}", lambda number: keys[int(number[1])], text)
        raise RuntimeError(f"kernel {kernel}, {text}{where}")
    found_writes: dict[str, np.ndarray] = {}
    for key, array, mask in zip(keys, own, written, strict=True):
        if key in maps:
            continue
        elements = mask.reshape(-1, array.itemsize).any(axis=1).reshape(array.shape)
        found_writes[key] = elements | found_writes.get(key, False)
    return found_writes


def _clusters(launch: Launch, blocks: Sequence[int]) -> list[int]:
    """Numbers of the clusters that blocks are of."""
    if any(extent % part for extent, part in zip(launch.grid, launch.cluster, strict=True)):
        raise ValueError(f"a grid of {launch.grid} blocks has no clusters of {launch.cluster}")
    if not all(0 <= block < math.prod(launch.grid) for block in blocks):
        raise ValueError(f"blocks {list(blocks)} are not all of the grid {launch.grid}")
    (x, y, _), (cx, cy, cz) = launch.grid, launch.cluster
    return sorted(
        {
            (block // (x * y) // cz * (y // cy) + block // x % y // cy) * (x // cx)
            + block % x // cx
            for block in blocks
        }
    )


def _cpu_source(source: str, kernel: str, types: list[str]) -> str:
    """C++ of a source, with a function ``drive`` that launches a kernel."""
    first = source.index('extern "C" __global__')
    head, text = source[:first], source[first:]
    functions = device_functions(head, text)
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)simt::DynamicShared();", text)
    text = _SHARED.sub(
        r'static const int \2_place = simt::Reserve(sizeof(Plain<\1 \3>), "\2"); '
        r"Plain<\1 \3>& \2 = *(Plain<\1 \3>*)simt::Shared(\2_place);",
        text,
    )
    casts = ", ".join(
        f"*(const CUtensorMap*)p[{i}]" if kind.endswith("CUtensorMap") else f"({kind})p[{i}]"
        for i, kind in enumerate(types)
    )
    driver = (
        '__attribute__((no_sanitize("thread", "alignment"))) static void Body(void** p) {\n'
        f"  {kernel}({casts});\n}}\n"
        'extern "C" int simt_launch(simt::Body, const void*);\n'
        'extern "C" __attribute__((visibility("default"))) int drive(const void* request) {\n'
        "  return simt_launch(Body, request);\n}\n"
    )
    line = head.count("\n") + 1
    return f'{functions}\n#line {line} "kernel.cu"\n{text}\n{driver}'


def _parameters(text: str) -> tuple[list[str], list[str]]:
    parts = [part.replace("__restrict__", " ").split() for part in text.split(",")]
    return [" ".join(part[:-1]) for part in parts], [part[-1] for part in parts]


def _array(arrays: Mapping[str, np.ndarray], key: str, name: str) -> np.ndarray:
    array = arrays.get(key)
    if array is None:
        raise ValueError(f"kernel parameter {name} has no array; the arrays are {sorted(arrays)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"the array for {name} is not contiguous; copy it first")
    return array


def run(
    func: tirx.PrimFunc,
    inputs: Sequence[np.ndarray],
    target: Target,
    *,
    backward: bool = False,
    source: str | None = None,
    blocks: int | Sequence[int] | None = None,
    check_races: bool = True,
) -> list[np.ndarray]:
    """Generate the code of a scheduled function of one kernel and run it on the CPU.

    Parameters
    ----------
    func : tirx.PrimFunc
        Scheduled function whose last parameters are its outputs.
    inputs : sequence of numpy.ndarray
        Arrays for the first parameters (bfloat16 as uint16).
    target : Target
        A CUDA target.
    backward : bool
        Run the threads of a block in reverse order.
    source : str or None
        The source, where the caller has it already.
    blocks, check_races
        As for `emulate`.

    Returns
    -------
    list of numpy.ndarray
        The outputs, which start filled with a recognisable value (NaN where the type has one). With ``blocks`` they are
        masked arrays (`numpy.ma`) of what those blocks wrote.
    """
    source = cuda_source(func, target) if source is None else source
    names = [param.name for param in func.params]
    outputs = []
    for param in func.params[len(inputs) :]:
        shape = tuple(int(extent) for extent in param.ty.shape)
        dtype = str(param.ty.dtype)
        array = np.empty(math.prod(shape) * tvm.DataType(dtype).bits // 8, "uint8")
        array[:] = 0xFF
        outputs.append(array.view("uint16" if dtype == "bfloat16" else dtype).reshape(shape))
    arrays = dict(zip(names, [*map(np.ascontiguousarray, inputs), *outputs], strict=True))
    written = emulate(
        source, launch_of(func), arrays, backward=backward, blocks=blocks, check_races=check_races
    )
    if blocks is None:
        return outputs
    return [
        np.ma.MaskedArray(array, mask=~written[name])
        for name, array in zip(names[len(inputs) :], outputs, strict=True)
    ]
