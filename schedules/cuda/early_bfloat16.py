"""Bfloat16 on chips before sm_80, which have no such type: TVM keeps the values as float32, in twice the room."""

from __future__ import annotations

import dataclasses

from ...compat import Target, s_tir, tirx
from ..analysis import nodes_of
from ..base import Limits, arch_number, limits


def limits_for(func: tirx.PrimFunc, target: Target) -> Limits:
    """Return the limits of a target, with room for what becomes of a function's bfloat16 values."""
    bounds = limits(target)
    if widens_bfloat16(func, target):
        return dataclasses.replace(bounds, shared_bytes=bounds.shared_bytes // 2)
    return bounds


def widens_bfloat16(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether TVM keeps a function's bfloat16 values as float32: chips before sm_80 have no bfloat16."""
    buffers = [
        *func.params,
        *(b for block in nodes_of(func.body, s_tir.SBlock) for b in block.alloc_buffers),
    ]
    return 0 < arch_number(target) < 80 and any(str(b.ty.dtype) == "bfloat16" for b in buffers)
