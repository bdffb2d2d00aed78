"""Kernels of a model: its distinct functions, and what they are called in records."""

from __future__ import annotations

from ..compat import structural_hash, tirx

_MASK = 2**64 - 1


def kernel_digest(func: tirx.PrimFunc) -> str:
    """Name of a function in records.

    Names of variables do not matter, attributes do. The same in every process and on every machine, for one version of
    TVM.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function.

    Returns
    -------
    str
        16 hexadecimal digits: TVM's structural hash of the function without a symbol.
    """
    if func.attrs is not None and "global_symbol" in func.attrs:
        func = func.without_attr("global_symbol")
    return f"{structural_hash(func) & _MASK:016x}"
