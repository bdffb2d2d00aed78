"""Kernels of a model: its distinct functions, and what they are called in records."""

from __future__ import annotations

from ..compat import structural_hash, tirx, tvm
from ..schedules.base import CONSTANTS, MEMBER

_MASK = 2**64 - 1

#: Attributes on which a schedule depends; others say where a function comes from.
_KEPT = (CONSTANTS, MEMBER)
_OPTIONS, _STAGE = "tvm_fusion.options", "stage"


def kernel_digest(func: tirx.PrimFunc) -> str:
    """Name of a function in records.

    Equal for functions of which a template makes the same kernel: names of variables do not matter, nor whether one
    operator is a group or stands alone. The same in every process and on every machine, for one version of TVM.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function.

    Returns
    -------
    str
        16 hexadecimal digits of TVM's structural hash.
    """
    return f"{structural_hash(bare(func)) & _MASK:016x}"


def bare(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the attributes alone on which its schedule depends."""
    attrs = dict(func.attrs.items()) if func.attrs is not None else {}
    kept = {key: attrs[key] for key in _KEPT if attrs.get(key)}
    options = attrs.get(_OPTIONS) or {}
    if _STAGE in options:
        kept[_OPTIONS] = {_STAGE: options[_STAGE]}
    return tirx.PrimFunc(
        func.params, func.body, func.ret_type, tvm.ir.make_node("ir.DictAttrs", **kept)
    )
