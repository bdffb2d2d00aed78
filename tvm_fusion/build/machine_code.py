"""Machine code of CUDA sources, made where there is no GPU for where there is no compiler.

TVM compiles CUDA code when it generates it, but on a machine without a GPU it leaves the source in
the library, and the machine that loads the library has to compile it. Machine code that is kept
beside the source is given to TVM when it asks for that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import tvm_ffi

from ..compat import process_cpu_count, tvm
from .cuda_source import COMPILE_HOOK, HOOK_LOCK
from .ptxas import assemble

#: Machine code by digest of the source.
Cubins = Mapping[bytes, bytes]


def digest(source: str) -> bytes:
    """SHA-256 of a source."""
    return hashlib.sha256(source.encode()).digest()


def cubins_of(sources: Sequence[str], arch: str) -> dict[bytes, bytes]:
    """Compile sources, some at a time on each core.

    Parameters
    ----------
    sources : sequence of str
        CUDA sources as TVM generates them.
    arch : str
        Arch such as ``"sm_90"``.

    Raises
    ------
    CompilerError
        If nvcc is missing or rejects a source.
    """
    distinct = list(dict.fromkeys(sources))
    with concurrent.futures.ThreadPoolExecutor(process_cpu_count()) as pool:
        made = list(pool.map(lambda source: assemble(source, arch)[0], distinct))
    return {digest(s): code for s, code in zip(distinct, made, strict=True)}


@contextlib.contextmanager
def known_code(cubins: Cubins) -> Iterator[None]:
    """Let TVM find the machine code of known sources instead of compiling them."""
    with HOOK_LOCK:
        real = tvm.get_global_func(COMPILE_HOOK)

        def find(source: str) -> bytes:
            found = cubins.get(digest(source))
            return real(source) if found is None else found

        tvm_ffi.register_global_func(COMPILE_HOOK, find, override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(COMPILE_HOOK, real, override=True)


def fits(arch: str, compute_version: str) -> bool:
    """Whether machine code for an arch runs on a GPU of a compute capability such as ``"9.0"``.

    It does within a major version, from its minor version on; code for ``sm_90a`` on 9.0 only (CUDA
    C++ Programming Guide, "Binary Compatibility" and "Architecture-Specific Feature Set").
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    device = re.fullmatch(r"(\d+)\.(\d+)", compute_version)
    if not match or not device:
        return False
    major, minor, exact = int(match[1]), int(match[2]), bool(match[3])
    if major != int(device[1]):
        return False
    return minor == int(device[2]) if exact else minor <= int(device[2])
