"""What a compiled library takes and returns, stored in the library itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..compat import Target, ir, relax, tirx, tvm, with_functions
from ..errors import InvalidModelError
from .library import load_library

#: Name of the VM function that returns the signature as JSON.
FUNCTION = "tvm_fusion_signature"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape (symbolic extents as text) and dtype of one input or output."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a compiled model, and the target (TVM's JSON form) it was compiled for."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: str

    def to_json(self) -> str:
        """Return the signature as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Signature:
        """Read a signature that ``to_json`` wrote."""
        data = json.loads(text)
        specs = {
            key: tuple(TensorSpec(s["name"], tuple(s["shape"]), s["dtype"]) for s in data[key])
            for key in ("inputs", "outputs")
        }
        return Signature(specs["inputs"], specs["outputs"], data["target"])


def signature_of(mod: tvm.IRModule, target: Target) -> Signature:
    """Read the signature of ``main`` in a canonical module."""
    func = mod["main"]
    returned = func.body.body
    bound = {b.var: b.value for b in func.body.blocks[0].bindings}.get(returned, returned)
    results = list(bound.fields) if isinstance(bound, relax.Tuple) else [returned]
    return Signature(
        tuple(_spec(p, p.name) for p in func.params),
        tuple(_spec(r, getattr(r, "name", f"output{i}")) for i, r in enumerate(results)),
        str(target),
    )


def _spec(expr: Any, name: str) -> TensorSpec:
    ty = expr.ty
    if not isinstance(ty, relax.TensorType):
        raise InvalidModelError(
            f"{name!r} is no tensor but a {type(ty).__name__}; return tensors only"
        )
    shape = () if ty.shape is None else tuple(_extent(dim) for dim in ty.shape)
    return TensorSpec(name, shape, str(ty.dtype))


def _extent(dim: Any) -> int | str:
    return int(dim.value) if isinstance(dim, tirx.IntImm) else str(dim)


def with_signature(mod: tvm.IRModule, signature: Signature) -> tvm.IRModule:
    """Add the function that returns the signature to a module that is about to be compiled."""
    out = with_functions(mod)
    text = ir.StringImm(signature.to_json())
    var = relax.Var("signature", relax.ObjectType())
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, text)])], var)
    attrs = ir.DictAttrs({"global_symbol": FUNCTION})
    func = relax.Function([], body, relax.ObjectType(), attrs=attrs)
    out[FUNCTION] = func
    return out


def read_signature(path: str | Path) -> Signature:
    """Read the signature stored in an exported library.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    InvalidModelError
        If the file is not a library that this package exported.
    """
    return signature_in(load_library(path), str(path))


def signature_in(library: Any, name: str) -> Signature:
    """Read the signature of a loaded library."""
    if not library.implements_function("vm_load_executable"):
        raise InvalidModelError(
            f"{name} holds no compiled model; write one with `tvm-fusion compile`"
        )
    vm = relax.VirtualMachine(library, tvm.cpu())
    try:
        text = str(vm[FUNCTION]())
    except (ValueError, AttributeError, RuntimeError) as err:
        raise InvalidModelError(
            f"{name} has no signature; compile it with `tvm-fusion compile`"
        ) from err
    return Signature.from_json(text)
