"""Machine code of CUDA kernels as text (SASS), by NVIDIA's nvdisasm."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;")


def find_nvdisasm() -> str | None:
    """Return the path of nvdisasm, on PATH or from NVIDIA's Python wheel; None if there is none."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for candidate in sorted(Path(root).glob("*/bin/nvdisasm")):
            return str(candidate)
    return None


def disassemble(cubin: bytes) -> dict[str, list[str]]:
    """Return the instructions of each kernel.

    Parameters
    ----------
    cubin : bytes
        Machine code as ``build.ptxas.assemble`` makes it.

    Returns
    -------
    dict of str to list of str
        Instructions with their operands, in the order of their addresses, by kernel.

    Raises
    ------
    FileNotFoundError
        If there is no nvdisasm.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed; pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    kernels: dict[str, list[str]] = {}
    instructions: list[str] = []
    for line in done.stdout.splitlines():
        if name := _FUNCTION.match(line):
            instructions = kernels.setdefault(name[1], [])
        elif found := _INSTRUCTION.match(line):
            instructions.append(found[1])
    return kernels
