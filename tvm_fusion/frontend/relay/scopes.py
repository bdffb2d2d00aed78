"""Scopes of a Relay function: what its variables and expressions stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from .graph import Value


@dataclasses.dataclass(frozen=True, eq=False)
class Closure:
    """A function with the scope that it was written in."""

    function: int
    scope: Scope
    name: str = ""


class Scope:
    """What variables and expressions stand for inside one call of a function.

    Attributes
    ----------
    variables : dict of int to Value
        By the node of the variable's id.
    values : dict of int to Value
        Evaluated expressions, by node.
    calls : dict of int to Scope
        Scopes of the function calls in it, by the node of the call.
    group : int or None
        The fusion group that it belongs to.
    depth : int
        How many calls it is inside.
    """

    #: Functions that call functions may be this deep.
    MAX_DEPTH: ClassVar[int] = 64

    def __init__(self, parent: Scope | None, group: int | None, depth: int = 0) -> None:
        self.parent = parent
        self.group = group
        self.depth = depth
        self.variables: dict[int, Value | Closure] = {}
        self.values: dict[int, Value | Closure] = {}
        self.calls: dict[int, Scope] = {}

    def variable(self, vid: int) -> Value | Closure | None:
        """Return what a variable stands for here, or None."""
        scope: Scope | None = self
        while scope is not None:
            if vid in scope.variables:
                return scope.variables[vid]
            scope = scope.parent
        return None

    def find(self, index: int) -> Value | Closure | None:
        """Return the value of an expression that has been evaluated here or around, or None."""
        scope: Scope | None = self
        while scope is not None:
            if index in scope.values:
                return scope.values[index]
            scope = scope.parent
        return None

    def missing(self, indices: Sequence[int]) -> list[tuple[int, Scope]]:
        """Return the frames of those expressions that have not been evaluated."""
        return [(index, self) for index in indices if self.find(index) is None]
