"""What this machine's processor is called: a time of one is none of another."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from pathlib import Path

from ..compat import codegen

#: Fields of /proc/cpuinfo that hold a name: of x86, of some ARM boards, of POWER and of RISC-V.
_FIELDS = ("model name", "Model", "cpu", "uarch")


@functools.cache
def processor_name() -> str:
    """Name of the processor, with the microarchitecture that LLVM sees in it.

    Returns
    -------
    str
        As ``"AMD EPYC 7763 64-Core Processor (znver3)"``; only what LLVM says, as ``"neoverse-n1"``,
        where the system has no name.
    """
    seen = str(codegen.llvm_get_system_cpu())
    name = " ".join(_name_of_system().split())
    if not name:
        return seen or platform.machine()
    return f"{name} ({seen})" if seen and seen != name else name


def _name_of_system() -> str:
    """What the operating system calls it; empty where it does not say."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ""
    try:
        return named_in(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return platform.processor()


def named_in(text: str) -> str:
    """The processor's name in the text of ``/proc/cpuinfo``; empty where it has none."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        field, _, value = line.partition(":")
        found.setdefault(field.strip(), value.strip())
    return next((found[field] for field in _FIELDS if found.get(field)), "")
