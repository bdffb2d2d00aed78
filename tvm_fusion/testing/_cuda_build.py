"""Compiling kernels for the CPU: the headers and the scheduler once in a process, each kernel once."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from ..errors import CompilerError
from ._cuda_runtime import RUNTIME
from ._cuda_shim import SHIM

# Products are not contracted, so that results are the same everywhere; a fortified longjmp refuses to change stacks.
_FLAGS = (
    "-std=c++17", "-w", "-fPIC", "-fno-strict-aliasing", "-march=native", "-ffp-contract=off",
    "-fno-threadsafe-statics", "-fno-exceptions", "-fvisibility=hidden", "-U_FORTIFY_SOURCE",
)  # fmt: skip
# Of the sanitizers only the instrumentation is used: the scheduler has the functions that it calls. Every access of a
# kernel's code goes through them.
_KERNEL = ("-O1", "-fsanitize=thread,alignment,bounds")
# Takes longer than all the rest, and changes no code: only where a line is asked for. addr2line of binutils 2.40 takes
# the file of a line from the wrong place of version 5.
_LINES = ("-g1", "-gdwarf-4")


class _Request(ctypes.Structure):
    """The same as ``simt::Request`` of the scheduler."""

    _fields_ = (
        ("pointers", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("sizes", ctypes.c_void_p),
        ("clusters", ctypes.c_void_p),
        ("cluster_count", ctypes.c_long),
        ("shared_bytes", ctypes.c_int),
        ("backward", ctypes.c_int),
        ("check_races", ctypes.c_int),
        ("message", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
    )


@dataclasses.dataclass(frozen=True)
class Library:
    """A kernel in machine code.

    Attributes
    ----------
    folder : Path
        Where its files are.
    handle : ctypes.CDLL
        The loaded library.
    """

    folder: Path
    handle: ctypes.CDLL

    def launch(
        self,
        arrays: list[np.ndarray],
        written: list[np.ndarray],
        sizes: tuple[int, ...],
        shared: int,
        clusters: list[int],
        options: tuple[bool, bool],
    ) -> tuple[str, int] | None:
        """Run the kernel.

        Parameters
        ----------
        arrays : list of numpy.ndarray
            Its arguments, changed in place.
        written : list of numpy.ndarray
            For each of them one byte for each of its bytes, set to 1 where the kernel writes.
        sizes : tuple of int
            Of grid, block and cluster along x, y and z.
        shared : int
            Bytes of dynamic shared memory.
        clusters : list of int
            Which clusters to run; x runs fastest.
        options : tuple of bool
            Whether threads run backward, and whether races are errors.

        Returns
        -------
        tuple or None
            What went wrong, with ``{number}`` for an argument, and the line of the source (0 if unknown); None if
            nothing did.
        """
        values = {
            "pointers": np.array([array.ctypes.data for array in arrays], "uintp"),
            "bytes": np.array([array.nbytes for array in arrays], "int64"),
            "written": np.array([mask.ctypes.data for mask in written], "uintp"),
            "sizes": np.array(sizes, "int32"),
            "clusters": np.array(clusters, "int64"),
            "message": np.zeros(512, "uint8"),
            "place": np.zeros(3, "int64"),
        }
        request = _Request(
            count=len(arrays),
            cluster_count=len(clusters),
            shared_bytes=shared,
            backward=options[0],
            check_races=options[1],
            **{name: array.ctypes.data for name, array in values.items()},
        )
        status = self.handle.drive(ctypes.byref(request))
        if status == 2:
            raise MemoryError("no address space for the emulated memory")
        if status == 3:
            raise ValueError(f"{shared} bytes of shared memory are more than is emulated")
        if not status:
            return None
        line, address, base = (int(value) for value in values["place"])
        line = line or (self._line(address - base) if address else 0)
        return bytes(values["message"]).split(b"\0")[0].decode(), line

    def _line(self, offset: int) -> int:
        """Line of the source of the code before an address, relative to where the library is loaded; 0 if unknown."""
        path = _link(self.folder, "lines", _LINES)
        try:
            result = subprocess.run(
                ["addr2line", "-i", "-e", str(path), hex(offset - 1)],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            return 0
        # The innermost call first; what it is inlined into follows.
        places = [line.split(" ")[0].rsplit(":", 1) for line in result.stdout.splitlines()]
        lines = [place[1] for place in places if place[0].endswith("kernel.cu")]
        return int(lines[0]) if lines and lines[0].isdigit() else 0


@functools.lru_cache(maxsize=256)
def build(text: str) -> Library:
    """Compile C++ that includes what is in ``SHIM`` and link it with the scheduler.

    Raises
    ------
    CompilerError
        If the C++ compiler is missing or rejects the text.
    """
    folder = Path(tempfile.mkdtemp(dir=_common()))
    (folder / "kernel.cc").write_text(text)
    return Library(folder, ctypes.CDLL(str(_link(folder, "kernel"))))


def _link(folder: Path, name: str, options: tuple[str, ...] = ()) -> Path:
    header, runtime = (str(_common() / name) for name in ("shim.h", "runtime.o"))
    flags = [*_FLAGS, *_KERNEL, *options, "-include", header]
    _run([*flags, "-c", "kernel.cc", "-o", f"{name}.o"], folder)
    _run(["-shared", "-Wl,-z,defs", "-o", f"{name}.so", f"{name}.o", runtime], folder)
    return folder / f"{name}.so"


@functools.lru_cache(maxsize=1)
def _common() -> Path:
    """The folder of this process, with the compiled headers and the scheduler."""
    folder = Path(tempfile.mkdtemp(prefix="tvm_fusion_emulation_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "shim.h").write_text(SHIM)
    (folder / "runtime.cc").write_text(RUNTIME)
    _run([*_FLAGS, *_KERNEL, "-x", "c++-header", "shim.h", "-o", "shim.h.gch"], folder)
    _run([*_FLAGS, "-O2", "-c", "runtime.cc"], folder)
    return folder


def _run(arguments: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(
            ["g++", *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise CompilerError("g++ is not installed; emulation needs a C++17 compiler") from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        raise CompilerError(f"g++ rejects the kernel: {lines[0] if lines else result.stderr[:200]}")
