"""Running generated CUDA on the CPU, so that kernels can be checked without a GPU.

A block's threads run as fibers that switch at ``__syncthreads`` and at warp exchanges; blocks run one after the other.
Shared memory starts filled with NaN in every block, a barrier that not every thread reaches is an error, and the
threads can run in reverse order, which gives another result where a barrier is missing. Asynchronous copies and tensor
cores are not covered.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm_ffi

from ..build.cuda_source import cuda_source as generate
from ..compat import Target, tirx, tvm
from ..errors import CompilerError
from ._cuda_shim import SHIM

_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")
_KERNEL = re.compile(
    r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))? (\w+)\(([^)]*)\)\s*\{'
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grid and block of a kernel, each (x, y, z)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def launch_of(func: tirx.PrimFunc) -> Launch:
    """Read the launch dimensions of a scheduled function with one kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        Function with thread bindings, as loops or as attributes.

    Raises
    ------
    ValueError
        If one tag has two extents, as in a function of several kernels.
    """
    extents: dict[str, int] = {}

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

    tvm_ffi.structural_walk(func.body, ((tirx.For, loop), (tirx.AttrStmt, attribute)))
    sizes = tuple(extents.get(tag, 1) for tag in _TAGS)
    return Launch(sizes[:3], sizes[3:])


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


def emulate(
    source: str,
    launch: Launch,
    arrays: Mapping[str, np.ndarray],
    *,
    kernel: str | None = None,
    backward: bool = False,
) -> None:
    """Run one kernel of a CUDA source on the CPU.

    Parameters
    ----------
    source : str
        CUDA source as TVM generates it.
    launch : Launch
        Grid and block.
    arrays : mapping of str to numpy.ndarray
        Contiguous arrays by kernel parameter name, changed in place. A parameter ``x_ptr`` also matches ``x``.
        bfloat16 arrays are passed as uint16.
    kernel : str or None
        Which kernel; None for the only one.
    backward : bool
        Run the threads of a block in reverse order.

    Raises
    ------
    ValueError
        If the kernel is not there, or a parameter has no array.
    CompilerError
        If the C++ compiler rejects the source: it uses something that is not emulated.
    RuntimeError
        If a barrier is not reached by every thread.
    """
    found = {match[1]: match for match in _KERNEL.finditer(source)}
    if kernel is None and len(found) == 1:
        kernel = next(iter(found))
    if kernel not in found:
        raise ValueError(f"the source defines the kernels {sorted(found)}; name one of them")
    types, names = _parameters(found[kernel][2])
    pointers = (ctypes.c_void_p * len(names))(*[_array(arrays, name).ctypes.data for name in names])
    first = source.index('extern "C" __global__')
    casts = ", ".join(f"({kind})p[{i}]" for i, kind in enumerate(types))
    driver = (
        f"static void Body(void** p) {{ {kernel}({casts}); }}\n"
        'extern "C" int drive(void** p, const int* grid, const int* block, int backward) {\n'
        "  return simt::Launch(Body, p, grid, block, backward);\n}\n"
    )
    # NVCC takes "__shared__ alignas(64) float"; a C++ attribute of the section kind has to follow the alignment.
    text = source[first:].replace("__shared__ alignas(64)", "alignas(64) __shared__")
    library = _compile(SHIM + text + driver)
    drive = library.drive
    drive.restype = ctypes.c_int
    status = drive(
        pointers, (ctypes.c_int * 3)(*launch.grid), (ctypes.c_int * 3)(*launch.block), int(backward)
    )
    if status:
        raise RuntimeError(
            f"kernel {kernel}: a barrier or a warp exchange is not reached by every thread"
        )


def _parameters(text: str) -> tuple[list[str], list[str]]:
    parts = [part.replace("__restrict__", " ").split() for part in text.split(",")]
    return [" ".join(part[:-1]) for part in parts], [part[-1] for part in parts]


def _array(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    array = arrays.get(name, arrays.get(name.removesuffix("_ptr")))
    if array is None:
        raise ValueError(f"kernel parameter {name} has no array; the arrays are {sorted(arrays)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"the array for {name} is not contiguous; copy it first")
    return array


@functools.lru_cache(maxsize=4)
def _compile(text: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path, library = Path(folder, "kernel.cc"), Path(folder, "kernel.so")
        path.write_text(text)
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
        try:
            result = subprocess.run(
                [*command, "-o", str(library), str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise CompilerError("g++ is not installed; emulation needs a C++17 compiler") from error
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            raise CompilerError(
                f"g++ rejects the kernel: {lines[0] if lines else result.stderr[:200]}"
            )
        return ctypes.CDLL(str(library))


def run(
    func: tirx.PrimFunc,
    inputs: Sequence[np.ndarray],
    target: Target,
    *,
    backward: bool = False,
    source: str | None = None,
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

    Returns
    -------
    list of numpy.ndarray
        The outputs, which start filled with a recognisable value (NaN where the type has one).
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
    emulate(source, launch_of(func), arrays, backward=backward)
    return outputs
