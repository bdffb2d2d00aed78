"""Registers, spills and shared memory of generated kernels, as ptxas reports them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..compat import tvm
from ..errors import CompilerError

#: The options with which TVM itself compiles (``tvm.support.nvcc``): other options give other register counts.
_OPTIONS = (
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--use_fast_math",
)

_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What one kernel takes.

    Parameters
    ----------
    registers : int
        32-bit registers of a thread.
    spill_bytes : int
        Bytes of registers stored to and loaded from local memory, per thread.
    shared_bytes : int
        Static shared memory of a block in bytes.
    stack_bytes : int
        Stack frame of a thread in bytes: spills, and arrays that are indexed by run-time values.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int = 0


def find_nvcc() -> str:
    """Return the path of nvcc: on PATH, where TVM finds CUDA, or from NVIDIA's Python wheels.

    Raises
    ------
    CompilerError
        If there is none.
    """
    found = shutil.which("nvcc")
    if found:
        return found
    candidates = []
    try:
        candidates.append(Path(tvm.support.nvcc.find_cuda_path(), "bin", "nvcc"))
    except (RuntimeError, OSError):
        pass  # TVM has not found a CUDA toolkit either (or not "which", which it asks); the wheels are left.
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        candidates += sorted(Path(root).glob("*/bin/nvcc"))
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise CompilerError(
        'nvcc is not installed; install the CUDA toolkit or "tvm_fusion[cuda]" to read register counts'
    )


def has_nvcc() -> bool:
    """Whether `find_nvcc` finds one."""
    try:
        find_nvcc()
    except CompilerError:
        return False
    return True


def arch_of(source: str, arch: str) -> str:
    """The arch that a source needs: instructions of one chip alone (``wgmma``) need its ``a`` variant."""
    return f"{arch}a" if "tvmf_wgmma" in source and not arch.endswith("a") else arch


def assemble(source: str, arch: str) -> tuple[bytes, str]:
    """Compile CUDA source to machine code.

    Parameters
    ----------
    source : str
        CUDA source as TVM generates it.
    arch : str
        Arch such as ``"sm_90a"``.

    Returns
    -------
    cubin : bytes
        The machine code.
    report : str
        Everything that the compiler printed.

    Raises
    ------
    CompilerError
        If nvcc is missing or rejects the source; the message carries its first error line.
    """
    level = os.environ.get("TVM_CUDA_PTXAS_REG_LEVEL", "10")
    extra = shlex.split(os.environ.get("TVM_CUDA_PTXAS_EXTRA_OPTS", ""))
    assembler = ["-v", f"--register-usage-level={level}", *extra]
    command = [find_nvcc(), "-cubin", f"-arch={arch_of(source, arch)}", *_OPTIONS]
    with tempfile.TemporaryDirectory() as folder:
        path, made = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        path.write_text(source)
        result = subprocess.run(
            [*command, f"--ptxas-options={','.join(assembler)}", "-o", str(made), str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        output = result.stdout + result.stderr
        if result.returncode == 0:
            return made.read_bytes(), output
    lines = [line for line in output.splitlines() if "error" in line.lower() or "fatal" in line]
    first = (lines[0] if lines else output.strip().splitlines()[-1]).replace(f"{folder}/", "")
    raise CompilerError(f"nvcc rejects the generated code for {arch}: {first.strip()}")


def kernel_resources(source: str, arch: str) -> dict[str, KernelResources]:
    """Compile CUDA source and read what its kernels take.

    Parameters
    ----------
    source : str
        CUDA source as TVM generates it.
    arch : str
        Arch such as ``"sm_90a"``.

    Returns
    -------
    dict of str to KernelResources
        By kernel name, in the order of the source.

    Raises
    ------
    CompilerError
        If nvcc is missing or rejects the source; the message carries its first error line.
    """
    return parse_report(assemble(source, arch)[1])


def parse_report(text: str) -> dict[str, KernelResources]:
    """Read the report of ``ptxas -v``.

    Parameters
    ----------
    text : str
        Everything that the compiler printed.

    Returns
    -------
    dict of str to KernelResources
        By kernel name.
    """
    found: dict[str, KernelResources] = {}
    name, stack, spill = "", 0, 0
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            name, stack, spill = match[1], 0, 0
        elif match := _SPILL.search(line):
            stack, spill = int(match[1]), int(match[2]) + int(match[3])
        elif name and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[name] = KernelResources(
                int(match[1]), spill, int(shared[1]) if shared else 0, stack
            )
    return found
