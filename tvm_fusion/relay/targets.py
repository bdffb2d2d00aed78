"""Targets as a TVM with Relay has them, and the devices that plans are made for."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any

from ..config import FusionConfig
from ..devices import TF32, DeviceSpec, capability, device_for
from ..errors import TargetError
from ..planner.plan import TargetInfo
from .compat import Target, plain

_FORMS = (
    'use "llvm", "cuda:sm_90a" or another arch, a text such as "cuda -arch=sm_80", a mapping, or a '
    "tvm Target"
)

#: Least compute capability times ten whose tensor cores have TF32.
_TF32_FROM = 80


def device_of(
    target: Target | str | Mapping[str, Any] | None, config: FusionConfig
) -> tuple[DeviceSpec, TargetInfo]:
    """The device that a plan is for, and how the plan names it.

    Parameters
    ----------
    target : Target, str, mapping or None
        None takes the target in scope. ``"cuda:sm_90a"`` needs no GPU, and no TVM that knows the
        arch.
    config : FusionConfig
        Says whether float32 products are computed in TF32.

    Raises
    ------
    TargetError
        If the target is unknown, not of a kind that is served, or names no arch.
    """
    kind, attrs = _described(target)
    if kind not in ("llvm", "cuda"):
        raise TargetError(f"target kind {kind!r} is not served; {_FORMS}")
    keys = []
    if kind == "cuda":
        if "arch" not in attrs:
            raise TargetError(f"the CUDA target names no arch; {_FORMS}")
        try:
            number = capability(str(attrs["arch"]))
        except ValueError as error:
            raise TargetError(str(error)) from error
        if config.float32_products == TF32 and number >= _TF32_FROM:
            keys.append(TF32)
    described = types.SimpleNamespace(kind=types.SimpleNamespace(name=kind), attrs=attrs, keys=keys)
    device = device_for(described)
    arch = str(attrs["arch"]) if kind == "cuda" else None
    return device, TargetInfo(kind, arch, device.name)


def _described(target: Any) -> tuple[str, Mapping[str, Any]]:
    """Kind and attributes of a target in any form."""
    if target is None:
        target = Target.current(allow_none=True)
        if target is None:
            raise TargetError(f"no target is given and none is in scope; {_FORMS}")
    if isinstance(target, str):
        text = target.strip()
        if text.startswith("cuda:"):
            return "cuda", {"arch": text.removeprefix("cuda:")}
        if text == "cuda":
            return "cuda", {}
        target = _from_json(text) if text.startswith("{") else _made(text)
    if isinstance(target, Mapping):
        return str(target.get("kind")), target
    if isinstance(target, Target):
        return target.kind.name, plain(target.attrs)
    raise TargetError(
        f"a target is a text, a mapping or a tvm Target, not {type(target).__name__}; {_FORMS}"
    )


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TargetError(f"the target is no legal JSON ({error}); {_FORMS}") from error


def _made(text: str) -> Target:
    try:
        return Target(text)
    except (ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].rstrip(".")
        raise TargetError(f"the target {text!r} is unknown ({reason}); {_FORMS}") from error
