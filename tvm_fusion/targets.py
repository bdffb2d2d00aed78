"""From what a user writes (``llvm``, ``cuda:sm_90a``, a tag, JSON) to a complete TVM target."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .compat import Target, codegen, tvm
from .devices import TF32, capability
from .errors import TargetError

_FORMS = (
    'use "llvm", "cuda" (this machine\'s GPU), "cuda:sm_90a" or another arch, a TVM target tag '
    'such as "nvidia/nvidia-a100", or TVM\'s JSON form'
)

#: Limits that TVM's schedules read and that TVM does not fill in by itself. 48 KiB is what a block
#: gets without opting in to more.
_CUDA_LIMITS: dict[str, int] = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


#: Least compute capability times ten whose tensor cores have TF32.
_TF32_FROM = 80

#: Archs with a variant ``a`` whose instructions kernels use.
_VARIANTS = frozenset(("sm_90",))


def parse_target(target: str | Mapping[str, Any] | Target | None = None) -> Target:
    """Make a complete TVM target.

    Parameters
    ----------
    target : str, mapping, tvm.target.Target or None
        ``"llvm"``; ``"cuda"``, which takes the arch of this machine's GPU; ``"cuda:sm_90a"`` and
        the like, which need no GPU; a tag or a JSON text or a mapping in TVM's form; or a target.
        ``None`` means the target in scope (``with target:``).

    Returns
    -------
    tvm.target.Target
        Of kind ``llvm`` or ``cuda``; a CUDA target always carries ``arch``,
        ``max_threads_per_block``, ``max_shared_memory_per_block`` and ``thread_warp_size``. What
        the user gave is kept.

    Raises
    ------
    TargetError
        If the kind or the arch is unknown, or ``"cuda"`` is asked for on a machine without a GPU.
    """
    if target is None:
        target = Target.current(allow_none=True)
        if target is None:
            raise TargetError(f"no target is given and none is in scope; {_FORMS}")
    if isinstance(target, Target):
        return _complete(_config(target))
    if isinstance(target, Mapping):
        return _complete(dict(target))
    if not isinstance(target, str):
        raise TargetError(
            f"a target is a text, a mapping or a tvm Target, not {type(target).__name__}; {_FORMS}"
        )
    text = target.strip()
    if text.startswith("{"):
        return _complete(_from_json(text))
    if text == "cuda":
        return _complete({"kind": "cuda", "arch": _present_arch()})
    if text.startswith("cuda:"):
        return _complete({"kind": "cuda", "arch": text.removeprefix("cuda:")})
    if text in ("", *_other_kinds(text)):
        raise TargetError(f"unknown target {text!r}; {_FORMS}")
    return _complete(_config(_make(text)))


#: Features of a CPU whose instructions LLVM generates for numeric code; the others steer tuning.
_INSTRUCTIONS = re.compile(
    r"(s?sse|avx|fma|f16c|bmi|lzcnt|popcnt|movbe|neon|sve|dotprod|fullfp16|v$)"
)


def runs_here(target: Target) -> bool:
    """Say whether this machine can run code for a target.

    Parameters
    ----------
    target : tvm.target.Target
        A complete target.

    Returns
    -------
    bool
        For CUDA whether there is a GPU; for a CPU whether it is this machine's architecture and has
        every instruction set that the target names. Foreign code would end the process by a signal.
    """
    if target.kind.name == "cuda":
        return bool(tvm.cuda(0).exist)
    host = codegen.llvm_get_system_triple().split("-")[0]
    if str(target.attrs.get("mtriple", host)).split("-")[0] != host:
        return False
    here = Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    missing = codegen.llvm_get_cpu_features(target) - codegen.llvm_get_cpu_features(here)
    return not any(_INSTRUCTIONS.match(feature) for feature in missing)


def runnable(target: Target) -> Target:
    """Return the target itself if it runs here, else this machine's CPU, for checks of the numbers."""
    return target if runs_here(target) else parse_target("llvm")


def with_variant(target: Target) -> Target:
    """Return a CUDA target with the arch whose code may use the chip's own instructions, ``sm_90a`` for ``sm_90``.

    Such code runs on chips of that very compute capability alone, which is where it is compiled for anyway. Targets
    are told apart because TVM's other rules (dlight) take an arch with a letter for an unknown one.
    """
    arch = str(target.attrs.get("arch", ""))
    if target.kind.name != "cuda" or arch not in _VARIANTS:
        return target
    return _make({**_config(target), "arch": f"{arch}a"})


def with_products(target: Target, float32_products: str) -> Target:
    """Return a target that says what products of float32 operands are computed in.

    Parameters
    ----------
    target : Target
        A complete target.
    float32_products : str
        One of ``config.FLOAT32_PRODUCTS``. With ``"tf32"``, CUDA targets from sm_80 on get the key ``tf32``, by which
        templates and predictions know; others have no TF32 and stay as they are.
    """
    has_it = target.kind.name == "cuda" and capability(str(target.attrs["arch"])) >= _TF32_FROM
    tf32 = has_it and float32_products == TF32
    if tf32 == (TF32 in target.keys):
        return target
    others = [str(key) for key in target.keys if key != TF32]
    return _make(_without_tag({**_config(target), "keys": [*others, *([TF32] if tf32 else [])]}))


def _other_kinds(text: str) -> tuple[str, ...]:
    """Return ``text`` if it is a bare word other than ``llvm``: a kind we do not serve."""
    return (text,) if text.isidentifier() and text != "llvm" else ()


def _from_json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TargetError(f"the target is no legal JSON ({error}); {_FORMS}") from error


def _config(target: Target) -> dict[str, Any]:
    """Return TVM's dict form."""
    return json.loads(str(target))


def _make(target: str | dict[str, Any]) -> Target:
    try:
        return Target(target)
    except (ValueError, TypeError, RuntimeError) as error:
        # TVM appends how the construction failed to what failed; only the latter helps a user.
        reason = str(error).split(". Target creation")[0].splitlines()[0].rstrip(".")
        raise TargetError(f"{reason}; {_FORMS}") from error


def _without_tag(config: dict[str, Any]) -> dict[str, Any]:
    """Drop an empty tag: TVM writes one, and fails to look it up."""
    return {key: value for key, value in config.items() if key != "tag" or value != ""}


def _complete(config: dict[str, Any]) -> Target:
    """Check kind and arch and add the limits that are missing."""
    config = _without_tag(config)
    if "tag" in config:
        config = {
            **_config(_make(config["tag"])),
            **{k: v for k, v in config.items() if k != "tag"},
        }
    kind = config.get("kind")
    if kind == "llvm":
        target = _make(config)
        cpu, triple = config.get("mcpu"), str(target.attrs.get("mtriple", ""))
        if cpu and not codegen.llvm_is_valid_cpu(cpu, triple or codegen.llvm_get_system_triple()):
            raise TargetError(
                f"LLVM knows no CPU {cpu!r}; leave mcpu out, or name one that it knows"
            )
        return target
    if kind != "cuda":
        raise TargetError(f"target kind {kind!r} is not served; {_FORMS}")
    arch = config["arch"] if "arch" in config else _present_arch()
    try:
        capability(str(arch))
    except ValueError as error:
        raise TargetError(str(error)) from error
    return _make({**_CUDA_LIMITS, **config, "arch": arch})


def _present_arch() -> str:
    """Return the arch of GPU 0."""
    device = tvm.cuda(0)
    if not device.exist:
        raise TargetError(
            'target "cuda" takes the arch of this machine\'s GPU, but there is none; '
            'name the arch, as in "cuda:sm_90a"'
        )
    return "sm_" + device.compute_version.replace(".", "")
