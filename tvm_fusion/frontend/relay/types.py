"""Types that Relay's inference stored beside the expressions."""

from __future__ import annotations

from ...errors import InvalidModelError
from .graph import TensorType, Type
from .nodes import NodeTable, is_symbolic

#: Tuples of tuples may be this deep.
_MAX_NESTING = 8


def read_type(table: NodeTable, index: int, depth: int = 0) -> Type:
    """Return the type at a node; None for null, and for types of things that are no tensors.

    Raises
    ------
    InvalidModelError
        If a tensor type is damaged.
    """
    kind = table.kind(index)
    if kind == "relay.TensorType":
        dims = table.value(table.get(index, "shape")) or []
        if not isinstance(dims, list) or not all(
            isinstance(n, int) or is_symbolic(n) for n in dims
        ):
            raise InvalidModelError(f"{table.describe(index)} has no shape: the file is damaged")
        shape = tuple(n if isinstance(n, int) else None for n in dims)
        return TensorType(shape, table.get(index, "dtype"))
    if kind == "TupleType":
        if depth > _MAX_NESTING:
            raise InvalidModelError(
                f"{table.describe(index)} is nested too deeply: the file is damaged"
            )
        fields = table.items(table.get(index, "fields"))
        return tuple(read_type(table, field, depth + 1) for field in fields)
    return None
