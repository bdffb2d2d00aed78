"""Fusion annotations in a Relay module."""

from __future__ import annotations

import warnings
from typing import Any

from ...errors import InvalidModelError
from .graph import Group
from .nodes import NodeTable

#: Attributes of a group function that the annotation contract names, with the type of each.
_KNOWN: dict[str, type] = {
    "tvm_fusion.depth": int,
    "tvm_fusion.members": int,
    "tvm_fusion.parts": list,
    "tvm_fusion.options": dict,
    "tvm_fusion.numerics": str,
}

_STRATEGY = "tvm_fusion.strategy"
_PREFIX = "tvm_fusion."

STRATEGIES = ("vertical", "horizontal", "cross", "compound")


def group_of(table: NodeTable, function: int, name: str) -> Group | None:
    """Return the fusion annotation of a function, or None if it has none (or one of an unknown strategy).

    Parameters
    ----------
    table : NodeTable
        The module.
    function : int
        Node of the function.
    name : str
        Its global name, or ``""``.

    Raises
    ------
    InvalidModelError
        If an attribute is not of the type that it must be.
    """
    attrs = table.get(function, "attrs")
    if table.kind(attrs) != "DictAttrs":
        return None
    items = table.mapping(table.get(attrs, "__dict__"))
    values: dict[str, Any] = {
        key: table.value(index)
        for key, index in items.items()
        if key == "Composite" or key.startswith(_PREFIX)
    }
    composite = values.get("Composite")
    strategy = values.get(_STRATEGY)
    if strategy is None and isinstance(composite, str) and composite.startswith(_PREFIX):
        strategy = composite.removeprefix(_PREFIX)
    if strategy is None:
        return None
    where = table.describe(function)
    if strategy not in STRATEGIES:
        warnings.warn(
            f"{where} is annotated with the strategy {strategy!r}, which is none of {', '.join(STRATEGIES)}; its "
            "operators are planned as others are",
            stacklevel=2,
        )
        return None
    kept = {}
    for key, kind in _KNOWN.items():
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise InvalidModelError(
                f"{where} has {value!r} as its attribute {key}, which must be of type {kind.__name__}"
            )
        kept[key] = value
    return Group(strategy, kept, name)
