"""Names of a TVM that still has Relay (0.8 to 0.19; tested with 0.16), in one place.

apache-tvm 0.25 and later, which the rest of this package runs on, has no Relay: the two cannot share
an interpreter.
"""

from __future__ import annotations

from typing import Any

import tvm

try:
    from tvm import relay
except ImportError as error:
    raise ImportError(
        f"TVM {tvm.__version__} has no Relay; use tvm_fusion.relay with a TVM up to 0.19 (docs/relay.md), "
        "or bring the model here with tvm_fusion.frontend.relay"
    ) from error

from tvm.ir import Op, TupleType
from tvm.relay import ExprMutator
from tvm.relay.expr import RefCreate, RefRead, RefWrite
from tvm.target import Target

__all__ = [
    "NAMES", "REFERENCES", "ExprMutator", "Op", "Target", "TupleType", "plain", "plain_attrs", "relay", "tvm",
]  # fmt: skip

#: What a call may call by name.
NAMES: tuple[type, ...] = (Op, relay.GlobalVar, relay.Constructor)

#: Expressions with effects: their order matters.
REFERENCES: tuple[type, ...] = (RefCreate, RefRead, RefWrite)


def plain_attrs(attrs: Any) -> dict[str, Any]:
    """Attributes of a call or function as plain Python values.

    Parameters
    ----------
    attrs : tvm.ir.Attrs or None
        What a call or a function carries.
    """
    if attrs is None or hasattr(attrs, "keys"):
        return {} if attrs is None else {str(key): plain(attrs[key]) for key in attrs.keys()}
    # TVM 0.16 has no Python class for the attributes of some pools: they are plain objects.
    fields = set(dir(attrs)).difference(dir(type(attrs)))
    return {name: plain(getattr(attrs, name)) for name in sorted(fields)}


def plain(value: Any) -> Any:
    """Python's form of a value of TVM: numbers, texts, tuples, dictionaries."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):  # also tvm.runtime.String
        return str(value)
    if isinstance(value, tvm.tir.IntImm | tvm.tir.FloatImm):
        return value.value
    if isinstance(value, tvm.ir.Array):
        return tuple(plain(item) for item in value)
    if isinstance(value, tvm.ir.Map):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)
