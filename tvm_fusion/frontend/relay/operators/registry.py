"""The table of converters, and how they get into it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

#: Converters by the name of Relay's operator.
CONVERTERS: dict[str, Converter] = {}


@dataclasses.dataclass(frozen=True)
class Converter:
    """A converter, and what operands it takes.

    ``arity`` is the number of operands, ``takes_tuple`` whether the first is a tuple of tensors.
    """

    convert: Callable[..., Any]
    arity: int
    takes_tuple: bool


def operator(
    *names: str, takes_tuple: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function ``(site, *operands)`` as the converter of these operators."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        arity = len(inspect.signature(function).parameters) - 1
        for name in names:
            register(name, function, arity, takes_tuple=takes_tuple)
        return function

    return add


def register(
    name: str, function: Callable[..., Any], arity: int, *, takes_tuple: bool = False
) -> None:
    """Register one converter.

    Raises
    ------
    ValueError
        If the operator has one already.
    """
    if name in CONVERTERS:
        raise ValueError(f"operator {name} has two converters")
    CONVERTERS[name] = Converter(function, arity, takes_tuple)
