"""The base of the passes over a Relay function's operators."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from .nodes import Node, Structure, Value


def live(nodes: Iterable[Node], returned: Iterable[Value]) -> list[Node]:
    """The operators whose results are read or returned, directly or not."""
    needed = set(returned)
    out = []
    for node in reversed(list(nodes)):
        if any(value in needed for value in node.outputs):
            needed.update(node.inputs)
            out.append(node)
    return out[::-1]


class NodeRewriter:
    """Rebuilds a list of operators, one by one.

    A pass overrides ``visit(node)``, which gets an operator whose operands are rewritten already. It
    keeps the operator with ``add``, or leaves it out and says with ``replace`` what its results are
    from now on. The expressions of the function stay as they are.

    Parameters
    ----------
    nodes : iterable of Node
        Operators in topological order; they are changed in place.
    returned : list of Value
        Results of the function; changed in place.
    owners : mapping of relay.Expr to str
        The group that an expression belongs to already.
    values : mapping of relay.Expr to Structure
        Results of the function's expressions; changed in place.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        returned: list[Value],
        owners: Mapping[Any, str],
        values: MutableMapping[Any, Structure],
    ) -> None:
        self.nodes = list(nodes)
        self.returned = returned
        self.owners = owners
        self.values = values
        self._stands: dict[Value, Value] = {}
        self._out: list[Node] = []
        self.sweep()

    def visit(self, node: Node) -> None:
        """Keep an operator, or replace it; see the class."""
        self.add(node)

    def run(self) -> list[Node]:
        """Visit every operator; return those that are left."""
        for node in self.nodes:
            node.inputs = [self.current(value) for value in node.inputs]
            self.visit(node)
        self.nodes, self._out = self._out, []
        self.returned[:] = [self.current(value) for value in self.returned]
        if self._stands:
            for expr, structure in self.values.items():
                self.values[expr] = self._renewed(structure)
        self.sweep()
        return self.nodes

    def sweep(self) -> None:
        """Leave out what nothing reads, and count the uses again."""
        self.nodes = live(self.nodes, self.returned)
        self.alive = set(self.nodes)
        self.uses = collections.Counter(self.returned)
        for node in self.nodes:
            self.uses.update(node.inputs)
            node.helpers = [helper for helper in node.helpers if helper in self.alive]

    def add(self, node: Node) -> None:
        """Put an operator behind those that are there."""
        self._out.append(node)

    def replace(self, old: Value, new: Value) -> None:
        """Read ``new`` from now on where ``old`` was read."""
        if old is not new:
            self._stands[old] = new
            self.uses[new] += self.uses[old]

    def current(self, value: Value) -> Value:
        """What stands for a value by now."""
        while value in self._stands:
            value = self._stands[value]
        return value

    def producer(self, value: Value, op: str | None = None) -> Node | None:
        """The operator that makes a value, None where it is another one than ``op``, or none at all."""
        node = value.node
        return node if node is not None and (op is None or node.op == op) else None

    def single_use(self, value: Value) -> bool:
        """Whether a value is read once."""
        return self.uses[value] <= 1

    def together(self, *nodes: Node) -> bool:
        """Whether operators belong to one group, or to none."""
        return len({self.owners.get(node.origin) for node in nodes}) == 1

    def _renewed(self, structure: Structure) -> Structure:
        if isinstance(structure, Value):
            return self.current(structure)
        return tuple(self._renewed(field) for field in structure)
