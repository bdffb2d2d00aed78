"""Library files: written with a checksum, checked before they are loaded.

The dynamic loader crashes the process on a damaged library. What follows the ELF image is ignored by
loaders: machine code of the CUDA sources that the library holds (`machine_code`), the length of that,
and a checksum of everything before; a file without a matching one is refused. Plain TVM loads the
file as it is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..compat import silent_native, tvm
from ..errors import CompilerError, InvalidModelError, TargetError
from .machine_code import Cubins, fits, known_code

_MARK = b"tvm_fusion sha256 2 "
_DIGEST = hashlib.sha256().digest_size
_LENGTH, _ARCH = 8, 16
_TRAILER = len(_MARK) + _DIGEST


#: Compilers that TVM links with, in the order in which it looks for them.
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")


def find_linker() -> str:
    """Return the path of the C++ compiler that TVM links libraries with: that of CXX or CC, else one on PATH.

    Raises
    ------
    CompilerError
        If there is none.
    """
    named = os.environ.get("CXX") or os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [named] if named else _COMPILERS)), None)
    if found is None:
        lacking = f"{named} (CXX or CC) is not there" if named else "there is none on PATH"
        raise CompilerError(
            f"a C++ compiler links the library, and {lacking}; install g++ or clang++, or name one in CXX"
        )
    return found


def export_library(
    executable: Any, path: str | Path, cubins: Cubins | None = None, arch: str = ""
) -> None:
    """Write a shared library and its checksum.

    Parameters
    ----------
    executable : VMExecutable
        The compiled model.
    path : str or Path
        File to write.
    cubins : mapping of bytes to bytes, optional
        Machine code by digest of the CUDA source that it was made of.
    arch : str
        What that code is for.

    Raises
    ------
    OSError
        If it cannot be written there.
    CompilerError
        If there is no C++ compiler, or the linker fails.
    """
    find_linker()  # TVM itself trips over what it has not found
    target = Path(path)
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "Not a file that can be replaced", str(target))
    # Beside the target, so that the library appears there whole or not at all.
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        made = Path(folder, "model.so")
        try:
            with silent_native():
                executable.export_library(str(made))
        except RuntimeError as err:  # the linker failed
            raise CompilerError(
                f"the library cannot be linked: {str(err).strip().splitlines()[-1]}"
            ) from err
        code = arch.encode().ljust(_ARCH) + b"".join(
            key + len(cubin).to_bytes(_LENGTH, "little") + cubin
            for key, cubin in (cubins or {}).items()
        )
        with made.open("ab") as file:
            file.write(code + len(code).to_bytes(_LENGTH, "little"))
        digest = _digest(made, 0)
        with made.open("ab") as file:
            file.write(_MARK + digest)
        os.replace(made, target)


def load_library(path: str | Path) -> Any:
    """Load an exported library as a TVM runtime module.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    InvalidModelError
        If the file is a folder, damaged, or not a library that this package exported.
    TargetError
        If it needs CUDA and this machine has none.
    CompilerError
        If it holds CUDA source only, and this machine has no compiler for it.
    """
    file = Path(path)
    if file.is_dir():
        raise InvalidModelError(
            f"{str(file)!r} is a folder; name a library that `tvm-fusion compile` wrote"
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; write it with `tvm-fusion compile MODEL -o {file.name}`"
        )
    with file.open("rb") as stream:
        head = stream.read(4)
        stream.seek(max(file.stat().st_size - _TRAILER, 0))
        trailer = stream.read()
    if head != b"\x7fELF":
        raise InvalidModelError(
            f"{file} is not a compiled library; write one with `tvm-fusion compile`"
        )
    if not trailer.startswith(_MARK) or trailer[len(_MARK) :] != _digest(file, _TRAILER):
        raise InvalidModelError(
            f"{file} is damaged, or not from `tvm-fusion compile`; compile it again"
        )
    try:
        with silent_native(), known_code(_cubins(file)):
            return tvm.runtime.load_module(str(file.resolve()))
    except RuntimeError as err:
        if "cuda" in str(err).lower() and tvm.cuda(0).exist:
            raise CompilerError(
                f"{file} holds CUDA source that this machine cannot compile "
                f"({str(err).strip().splitlines()[-1]}); compile the model again where nvcc is installed"
            ) from err
        if "cuda" in str(err).lower():
            raise TargetError(
                f"{file} is compiled for CUDA, which this machine lacks; compile it for llvm"
            ) from err
        raise InvalidModelError(
            f"{file} cannot be loaded here: {str(err).strip().splitlines()[-1]}"
        ) from err


def _cubins(path: Path) -> dict[bytes, bytes]:
    """Machine code of a checked library that runs on this machine's GPU, by digest of its source."""
    device = tvm.cuda(0)
    if not device.exist:
        return {}
    found: dict[bytes, bytes] = {}
    with path.open("rb") as stream:
        stream.seek(-_TRAILER - _LENGTH, os.SEEK_END)
        end = stream.tell()
        left = int.from_bytes(stream.read(_LENGTH), "little")
        stream.seek(end - left)
        if not fits(stream.read(_ARCH).decode().strip(), device.compute_version):
            return {}
        while stream.tell() < end:
            key = stream.read(_DIGEST)
            found[key] = stream.read(int.from_bytes(stream.read(_LENGTH), "little"))
    return found


def _digest(path: Path, trailer: int) -> bytes:
    """Checksum of a file without its last ``trailer`` bytes."""
    left = path.stat().st_size - trailer
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
            total.update(chunk)
            left -= len(chunk)
    return total.digest()
