"""Proposals → annotation: each group becomes a call of a ``relay.Function`` with attributes.

The function has ``Composite`` (``"tvm_fusion.vertical"`` and so on) and the ``tvm_fusion.*``
attributes; constants stay inside, several results are a tuple. What is computed does not change.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from ..strategies.attributes import group_attrs
from ..strategies.base import Proposal
from .compat import Op, relay, tvm
from .expressions import with_operands
from .nodes import Node, RelayGraph, Structure, Value
from .operators import is_view

#: Calls that fill a tensor of another's shape, and what fills one of a given shape.
_LIKE = {"ones_like": relay.ones, "zeros_like": relay.zeros}

#: Results by value: the expressions of the new function.
Environment = dict[Value, Any]


def annotate(
    mod: tvm.IRModule,
    found: RelayGraph,
    groups: Mapping[str, Proposal],
    *,
    numerics: str = "wide",
) -> tvm.IRModule:
    """Turn sets of operators of ``main`` into group functions.

    Parameters
    ----------
    mod : IRModule
        The module that was read, with types; it is left untouched.
    found : RelayGraph
        Its graph.
    groups : mapping of str to Proposal
        Disjoint, jointly acyclic groups.
    numerics : str
        One of ``config.NUMERICS``; groups say so where it is ``"strict"``.

    Returns
    -------
    IRModule
        The module with groups, and with types.

    Raises
    ------
    PlanError
        If groups need each other's results.
    """
    if not groups:
        return mod
    func = found.function
    body = _Writer(found, groups, numerics).body()
    new = relay.Function(func.params, body, func.ret_type, func.type_params, func.attrs, func.span)
    # Passes of TVM copy before they change; a module that Python builds would lose what this one
    # has beside its functions.
    result = relay.transform.InferType()(mod)
    result.update_func(result.get_global_var("main"), new)
    return relay.transform.InferType()(result)


class _Writer:
    """Writes the function again, unit by unit: a group, or an operator in none."""

    def __init__(self, found: RelayGraph, groups: Mapping[str, Proposal], numerics: str) -> None:
        self.found = found
        self.groups = groups
        self.numerics = numerics
        graph = found.graph
        # Reshapes that no call of the model is: what each is of, and that one's shape.
        self.implied: dict[Any, tuple[Any, tuple[int | None, ...]]] = {}
        self.group_of = {n: name for name, p in groups.items() for n in p.operators}
        self.name_of = {node: name for name, node in found.nodes.items()}
        self._join_implied()
        members: dict[str, list[str]] = {name: [] for name in groups}
        for name in graph.names:
            if name in self.group_of:
                members[self.group_of[name]].append(name)
        self.members = {name: tuple(found) for name, found in members.items()}
        self.hidden = {
            helper for name, node in found.nodes.items() for helper in self._hidden(name, node)
        }

    def _join_implied(self) -> None:
        """Let a group return what the model has, where the graph has it in another shape."""
        graph = self.found.graph
        for name, node in self.found.nodes.items():
            (source, *_) = graph.by_name[name].inputs if node.is_implied else (None,)
            if source is None or name in self.group_of or source in graph.outputs:
                continue
            maker = graph.producer.get(source)
            if maker and maker.name in self.group_of and len(graph.consumers[source]) == 1:
                self.group_of[name] = self.group_of[maker.name]

    def body(self) -> Any:
        """The new body of the function."""
        env: Environment = {}
        for param in self.found.function.params:
            env.update(_items(self.found.values[param], param))
        for var, _ in self.found.closures:
            env[self.found.values[var]] = var  # bound around the whole body
        for unit in self._units():
            if unit in self.groups:
                self._group(unit, env)
                continue
            node = self.found.nodes[unit]
            if node not in self.hidden and not all(value in env for value in node.outputs):
                self._bind(node, self._written(node, env), env)
        rewriter = _Rewriter(self.found, env, self.implied)
        body = rewriter.visit(self.found.function.body)
        for var, closure in reversed(self.found.closures):
            body = relay.Let(var, rewriter.copy(closure), body)
        return body

    def _hidden(self, name: str, node: Node) -> list[Node]:
        """The helpers of a call that stays whole: with it in one unit, and read by nothing else."""
        graph = self.found.graph
        names = {name, *(self.name_of[helper] for helper in node.helpers)}
        own = self.group_of.get(name)
        for helper in names - {name}:
            operator, group = graph.by_name[helper], self.group_of.get(helper)
            # A view costs nothing wherever it stands.
            if group != own and not (group is None and not operator.does_work):
                return []
            if any(c.name not in names for t in operator.outputs for c in graph.consumers[t]):
                return []
        return node.helpers

    def _units(self) -> list[str]:
        """Groups and single operators, each after what it needs, else in the order of the graph."""
        graph = self.found.graph
        unit_of = {name: self.group_of.get(name, name) for name in graph.names}
        first: dict[str, int] = {}
        for i, name in enumerate(graph.names):
            first.setdefault(unit_of[name], i)
        needs: dict[str, set[str]] = {unit: set() for unit in first}
        after: dict[str, set[str]] = {unit: set() for unit in first}
        for operator in graph.operators:
            unit = unit_of[operator.name]
            for earlier in graph.predecessors(operator):
                if (other := unit_of[earlier.name]) != unit:
                    needs[unit].add(other)
                    after[other].add(unit)
        ready = [(first[unit], unit) for unit in first if not needs[unit]]
        heapq.heapify(ready)
        out = []
        while ready:
            _, unit = heapq.heappop(ready)
            out.append(unit)
            for later in after[unit]:
                needs[later].discard(unit)
                if not needs[later]:
                    heapq.heappush(ready, (first[later], later))
        if len(out) < len(first):
            stuck = sorted(unit for unit in first if needs[unit] and unit in self.groups)
            raise PlanError(
                f"{' and '.join(stuck)} need their own results through other kernels; "
                "take an operator out of one of them"
            )
        return out

    def _group(self, name: str, env: Environment) -> None:
        """Write one group: a function and its call."""
        graph, members = self.found.graph, self.members[name]
        nodes = [self.found.nodes[member] for member in members]
        made = {value for node in nodes for value in node.outputs}
        written = [node for node in nodes if node not in self.hidden]
        reads = (v for node in written for v in self._expression(node)[1])
        inputs = [v for v in dict.fromkeys(reads) if v not in made and not v.is_constant]
        params = [relay.var(f"p{i}", type_annotation=_type(v)) for i, v in enumerate(inputs)]
        inner: Environment = dict(zip(inputs, params, strict=True))
        for node in written:
            self._bind(node, self._written(node, inner), inner)
        names = set(graph.external_outputs(members))
        results = [
            value
            for member, node in zip(members, nodes, strict=True)
            for tensor, value in zip(graph.by_name[member].outputs, node.outputs, strict=True)
            if tensor in names
        ]
        returned = [inner[value] for value in results]
        func = relay.Function(params, returned[0] if len(returned) == 1 else relay.Tuple(returned))
        proposal = self.groups[name]
        func = func.with_attr("Composite", f"tvm_fusion.{proposal.strategy}")
        for key, value in group_attrs(proposal, self.numerics).items():
            func = func.with_attr(key, value)
        call = relay.Call(func, [env[value] for value in inputs])
        for i, value in enumerate(results):
            env[value] = call if len(results) == 1 else relay.TupleGetItem(call, i)

    def _expression(self, node: Node) -> tuple[Any, list[Value]]:
        """The expression of an operator, and the values that it is written over."""
        if not self.hidden.issuperset(node.helpers):
            return node.apart, node.inputs
        made = {value for helper in node.helpers for value in helper.outputs}
        reads = (v for n in (*node.helpers, node) for v in n.inputs)
        return node.root, [v for v in reads if v not in made]

    def _written(self, node: Node, env: Environment) -> Any:
        """An operator over what stands in ``env`` for its operands."""
        root, inputs = self._expression(node)
        own = {v: env[v] for v in inputs if not v.is_constant}
        return _Rewriter(self.found, own, self.implied).copy(root)

    def _bind(self, node: Node, expr: Any, env: Environment) -> None:
        env.update(_items(node.structure, expr))
        if node.is_implied and node.inputs[0] in env:
            self.implied[expr] = (env[node.inputs[0]], node.inputs[0].shape)
        elif node.op != "reshape" and is_view(node.root) and is_view(expr):
            # An operator that was moved before a reshape ends with one.
            shape = _shape_of(node.root.args[0])
            if shape is not None:
                self.implied[expr] = (expr.args[0], shape)


def _items(structure: Structure, expr: Any) -> Environment:
    """Expressions for the values of a result."""
    if isinstance(structure, Value):
        return {structure: expr}
    out: Environment = {}
    for i, field in enumerate(structure):
        out.update(_items(field, relay.TupleGetItem(expr, i)))
    return out


def _shape_of(expr: Any) -> tuple[int, ...] | None:
    """The extents of an expression of the model; None where they are not known."""
    ty = expr._checked_type_
    static = isinstance(ty, relay.TensorType) and all(hasattr(n, "value") for n in ty.shape)
    return tuple(int(n.value) for n in ty.shape) if static else None


def _type(value: Value) -> Any:
    extents = [relay.Any() if extent is None else extent for extent in value.shape]
    return relay.TensorType(extents, value.dtype)


class _Rewriter:
    """Copies an expression down to the values of an environment."""

    def __init__(
        self,
        found: RelayGraph,
        env: Environment,
        implied: Mapping[Any, tuple[Any, tuple[int | None, ...]]],
    ) -> None:
        self.implied = implied
        self.values = found.values
        self.bound = found.bound
        self.env = env
        self.bases = {value.base: value for value in env}
        self.done: dict[Any, Any] = {}

    def visit(self, expr: Any) -> Any:
        """What stands for an expression, or a copy of it."""
        if expr not in self.done:
            known = self.known(expr)
            self.done[expr] = self.copy(expr) if known is None else known
        return self.done[expr]

    def known(self, expr: Any) -> Any:
        """What stands for an expression in the environment; None if nothing does."""
        if isinstance(expr, relay.Var) and expr in self.bound and expr not in self.values:
            return self.visit(self.bound[expr])
        structure = self.values.get(expr)
        if isinstance(expr, relay.Call) and isinstance(expr.op, Op) and expr.op.name in _LIKE:
            # A group must not read the tensor that gives the shape.
            if isinstance(structure, Value) and structure.is_constant:
                return _LIKE[expr.op.name](structure.shape, structure.dtype)
        found = self._stands_for(structure)
        if found is None and isinstance(structure, Value):
            found = self._reshaped(structure, is_view(expr))
        return found

    def _reshaped(self, value: Value, is_view: bool) -> Any:
        """A value of which the graph has another reshape; None if it has none, or the model's own view makes it.

        No reshape is undone by another one: with each pass there would be two more.
        """
        source = self.bases.get(value.base)
        if source is None or value.is_constant or not value.is_static:
            return None
        expr, shape = self.env[source], source.shape
        if is_view:
            return expr if shape == value.shape else None
        while shape != value.shape and expr in self.implied:
            expr, shape = self.implied[expr]
        return expr if shape == value.shape else relay.reshape(expr, value.shape)

    def _stands_for(self, structure: Structure | None) -> Any:
        if structure is None:
            return None
        if isinstance(structure, Value):
            return self.env.get(structure)
        fields = [self._stands_for(field) for field in structure]
        return relay.Tuple(fields) if fields and None not in fields else None

    def copy(self, expr: Any) -> Any:
        """A copy of an expression; the expression itself is not looked up."""
        if isinstance(expr, relay.Let):
            return self.visit(expr.body)
        if isinstance(expr, relay.Var):
            return self.visit(self.bound[expr]) if expr in self.bound else expr
        return with_operands(expr, self.visit, self.known)
