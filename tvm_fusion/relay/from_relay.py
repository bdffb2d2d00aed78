"""Relay function → DataflowGraph, with the way back to its expressions."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidModelError
from ..graph.dataflow import DataflowGraph, Operator, Tensor, unique_name
from ..graph.operators import flops_of, pattern_of
from .compat import NAMES, REFERENCES, Op, TupleType, plain_attrs, relay, tvm
from .expressions import children, inside_scopes, outside_scopes, post_order
from .nodes import Node, RelayGraph, Structure, Value, flatten
from .operators import FOLDABLE, NAME_OF, graph_attrs
from .rules import RULES
from .simplify import simplify


def from_relay(mod: tvm.IRModule, owners: Mapping[Any, str] | None = None) -> RelayGraph:
    """Build the graph of a module's ``main``.

    Operators are those that the Relax path has after its clean-up: a reshape of a reshape is one,
    multiplications and additions of constants are merged, a bias is an addition. The function itself
    is left as it is.

    Parameters
    ----------
    mod : IRModule
        A Relay module with types.
    owners : mapping of relay.Expr to str, optional
        The group that a call belongs to already; operators of two groups are not merged.

    Raises
    ------
    InvalidModelError
        If the module has no Relay function ``main``.
    """
    names = [gv.name_hint for gv in mod.get_global_vars()]
    if "main" not in names or not isinstance(mod["main"], relay.Function):
        raise InvalidModelError(
            f"the module has no Relay function 'main'; it has {', '.join(names) or 'none'}"
        )
    return _Builder(mod["main"], owners or {}).build()


class _Builder:
    """Reads a function expression by expression; `rules` holds what single operators need."""

    def __init__(self, func: Any, owners: Mapping[Any, str]) -> None:
        self.func = func
        self.owners = owners
        self.nodes: list[Node] = []
        self.values: dict[Any, Structure] = {}
        self.bound: dict[Any, Any] = {}  # variable of a let → its value
        self.closures: list[tuple[Any, Any]] = []
        self.captured: dict[Any, list[Any]] = {}

    def build(self) -> RelayGraph:
        for param in self.func.params:
            self.values[param] = self.structure_of(param.checked_type)
        order = self._order()
        if any(isinstance(expr, REFERENCES) for expr in post_order([self.func.body], children)):
            # What is read and written in some order must stay in that order.
            self._opaque(self.func.body, "references", self.func.params)
        else:
            for expr in order:
                if expr not in self.values:
                    self.values[expr] = self._read(expr)
        returned = list(flatten(self.values[self.func.body]))
        nodes = simplify(self.nodes, returned, self.owners, self.values)
        return self._graph(nodes, returned)

    def _order(self) -> list[Any]:
        """The expressions that are always computed, each after what it needs, captured values included."""
        main = set(post_order([self.func.body], outside_scopes))
        for expr in main:
            if isinstance(expr, relay.Let):
                self.bound[expr.var] = expr.value
        for expr in main:
            if inside := inside_scopes(expr):
                self.captured[expr] = self._captures(inside, main)

        def needs(expr: Any) -> Iterable[Any]:
            if expr in self.bound:
                return [self.bound[expr]]
            return [*outside_scopes(expr), *self.captured.get(expr, ())]

        return post_order([self.func.body], needs)

    def _captures(self, inside: list[Any], main: set[Any]) -> list[Any]:
        """What branches or a local function's body take from outside."""
        outer = {*self.func.params, *self.bound}

        def stop(expr: Any) -> bool:
            computed = expr in main and not isinstance(expr, (relay.Constant, *NAMES))
            return computed or expr in outer

        found = post_order(inside, lambda e: [] if stop(e) else children(e))
        return [expr for expr in found if stop(expr)]

    def _read(self, expr: Any) -> Structure:
        if isinstance(expr, relay.Constant):
            value = self.structure_of(expr.checked_type)
            value.is_constant, value.data = True, expr
            return value
        if isinstance(expr, relay.Tuple):
            return tuple(self.values[field] for field in expr.fields)
        if isinstance(expr, relay.TupleGetItem):
            source = self.values[expr.tuple_value]
            if isinstance(source, tuple):
                return source[expr.index]
            return self._opaque(expr, "tuple item", [expr.tuple_value])
        if isinstance(expr, relay.Let):
            return self.values[expr.body]
        if isinstance(expr, relay.Var) and expr in self.bound:
            return self._variable(expr)
        if isinstance(expr, relay.Call) and isinstance(expr.op, Op):
            return self._call(expr)
        needs = [e for e in outside_scopes(expr) if e in self.values]
        if isinstance(expr, NAMES):
            return Value((), "int64", is_constant=True, is_tensor=False)
        name = type(expr).__name__.lower()
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.GlobalVar):
            name = f"call:{expr.op.name_hint}"
        return self._opaque(expr, name, [*needs, *self.captured.get(expr, ())])

    def _variable(self, var: Any) -> Structure:
        value = self.bound[var]
        if isinstance(value, relay.Function):
            self.closures.append((var, value))
            # A function that calls itself reads its own name, which is not there yet.
            reads = [e for e in self.captured.get(value, ()) if e in self.values]
            return self._opaque(var, "function", reads)
        return self.values[value]

    def _call(self, call: Any) -> Structure:
        name = call.op.name
        args = [self.values[arg] for arg in call.args]
        attrs = graph_attrs(name, plain_attrs(call.attrs), [v.shape for v in flatten(tuple(args))])
        rule = RULES.get(name)
        found = rule(self, call, args, attrs) if rule else None
        if found is not None:
            return found
        op = NAME_OF.get(name)
        if op is None:
            return self._opaque(call, name, call.args, attrs)
        return self.emit(op, attrs, list(flatten(tuple(args))), call)

    def emit(
        self,
        op: str,
        attrs: dict[str, Any],
        inputs: list[Value],
        root: Any,
        structure: Structure = None,
        **more: Any,
    ) -> Structure:
        """Add an operator, or fold it where it is known at compile time; return its results."""
        if structure is None:
            structure = self.structure_of(root.checked_type)
        results = list(flatten(structure))
        static = all(v.is_static and v.is_tensor for v in results)
        if op in FOLDABLE and static and all(v.is_constant for v in inputs):
            for value in results:
                value.is_constant = True
            return structure
        node = Node(op, attrs, inputs, root, structure, **more)
        node.origin = more.get("origin", root)
        for value in results:
            value.node = node
        self.nodes.append(node)
        self.values[root] = structure
        return structure

    def _opaque(
        self, expr: Any, name: str, reads: Iterable[Any], attrs: dict[str, Any] | None = None
    ) -> Structure:
        inputs = [v for e in reads for v in flatten(self.values[e])]
        structure = self.values[expr] = self.structure_of(expr.checked_type)
        if not list(flatten(structure)):
            structure = self.values[expr] = Value((), "int64", is_tensor=False)
        return self.emit(name, attrs or {}, inputs, expr, structure)

    def structure_of(self, ty: Any) -> Structure:
        """Values of a type."""
        if isinstance(ty, TupleType):
            return tuple(self.structure_of(field) for field in ty.fields)
        if isinstance(ty, relay.TensorType):
            return Value(tuple(map(_extent, ty.shape)), str(ty.dtype))
        return Value((), "int64", is_tensor=False)

    def _graph(self, nodes: list[Node], returned: list[Value]) -> RelayGraph:
        namer = _Namer()
        for param in self.func.params:
            namer.tensors_of(param.name_hint, flatten(self.values[param]))
        inputs = tuple(namer.tensors)
        operators, by_name = [], {}
        for node in nodes:
            name = namer.operator(node)
            by_name[name] = node
            operators.append(_operator(name, node, namer))
        outputs = tuple(namer.name_of(value) for value in returned)
        graph = DataflowGraph(tuple(operators), namer.tensors, inputs, outputs)
        closures = tuple(self.closures)
        return RelayGraph(graph, by_name, self.func, self.values, self.bound, closures)


class _Namer:
    """Names operators and tensors, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Value, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._operators: set[str] = set()

    def operator(self, node: Node) -> str:
        """The frontend's name for the node where there is one, else type and number, as ``conv2d_3``."""
        name = _source_name(node.origin)
        if not name:
            name = f"{node.op.rsplit('.', 1)[-1]}_{self._counts[node.op]}"
            self._counts[node.op] += 1
        name = unique_name(name, self._operators)
        self._operators.add(name)
        layout = next(
            filter(None, map(node.attrs.get, ("out_layout", "data_layout", "layout"))), None
        )
        self.tensors_of(name, node.outputs, layout)
        return name

    def tensors_of(self, name: str, values: Iterable[Value], layout: str | None = None) -> None:
        """Name the tensors of a parameter or operator."""
        values = list(values)
        for i, value in enumerate(values):
            self._add(name if len(values) == 1 else f"{name}.{i}", value, layout)

    def name_of(self, value: Value) -> str:
        """The name of a value; constants get theirs here."""
        if value not in self._names:
            self._add(f"const{self._counts['constants']}", value)
            self._counts["constants"] += 1
        return self._names[value]

    def _add(self, name: str, value: Value, layout: str | None = None) -> None:
        name = self._names[value] = unique_name(name, self.tensors)
        self.tensors[name] = Tensor(name, value.shape, value.dtype, layout, value.is_constant)


def _operator(name: str, node: Node, namer: _Namer) -> Operator:
    attrs = dict(node.attrs)
    for i, value in enumerate(node.inputs):
        if value.is_scalar_constant and value.array is not None:
            attrs[f"arg{i}"] = value.array.item()
    inputs = tuple(namer.name_of(v) for v in node.inputs if not v.is_scalar_constant)
    outputs = tuple(namer.name_of(v) for v in node.outputs)
    operands = [namer.tensors[t] for t in inputs]
    results = [namer.tensors[t] for t in outputs]
    pattern = pattern_of(node.op)
    works = pattern != "view"
    distinct = [namer.tensors[t] for t in dict.fromkeys(inputs)]
    return Operator(
        name,
        node.op,
        (name,),
        inputs,
        outputs,
        attrs,
        pattern,
        flops_of(node.op, attrs, operands, results) if operands else 0,
        sum(t.nbytes for t in distinct) if works else 0,
        sum(t.nbytes for t in results) if works else 0,
    )


def _source_name(expr: Any) -> str:
    """The name that a frontend gave to a call (a parsed text gives its file and a line instead)."""
    span = getattr(expr, "span", None)
    named = isinstance(span, relay.Span) and span.line == 0
    return str(span.source_name.name) if named and span.source_name else ""


def _extent(dim: Any) -> int | None:
    return int(dim.value) if isinstance(dim, tvm.tir.IntImm) else None
