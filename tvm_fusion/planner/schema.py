"""JSON values → the plan's dataclasses, with every type checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import PlanError


def read(cls: type, data: Any, where: str) -> Any:
    """Build a dataclass from a JSON object, lists becoming tuples at every level.

    Parameters
    ----------
    cls : type
        The dataclass; every field must be there, and no other.
    data : object
        What the JSON holds.
    where : str
        Name of the place, for messages.

    Raises
    ------
    PlanError
        If a field is missing, unknown or of another type.
    """
    if not isinstance(data, dict):
        raise PlanError(f"{where!r} of the plan is not an object; plan again")
    hints = typing.get_type_hints(cls)
    extra = sorted(set(data) - set(hints))
    if extra:
        raise PlanError(f"{where!r} of the plan has the unknown field {extra[0]!r}; plan again")
    values = {}
    for field in dataclasses.fields(cls):
        if field.name not in data:
            raise PlanError(
                f"{where!r} of the plan is incomplete: {field.name!r} is missing; plan again"
            )
        values[field.name] = _value(hints[field.name], data[field.name], f"{where}.{field.name}")
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    """Check one value against its annotation and freeze it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [a for a in arguments if a is not type(None)]
        return _value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where!r} of the plan is not a list; plan again")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise PlanError(f"{where!r} of the plan is not an object; plan again")
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return read(hint, value, where)
    if hint is Any:
        return _frozen(value)
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise PlanError(f"{where!r} of the plan is {value!r}, not a {hint.__name__}; plan again")
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
