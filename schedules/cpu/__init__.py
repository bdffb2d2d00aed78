"""CPU templates, in the order in which they are tried."""

from ..registry import register
from .templates import CpuContraction, CpuElementwise, CpuFallback, CpuRows, CpuWindow

__all__ = ["CpuContraction", "CpuElementwise", "CpuFallback", "CpuRows", "CpuWindow"]

for _template in (CpuContraction, CpuWindow, CpuRows, CpuElementwise, CpuFallback):
    register(_template())
