"""Node table → ``RelayGraph``: scopes, lets, tuples, function calls and sharing are resolved here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidModelError, UnsupportedOperatorError
from .arrays import StoredArrays
from .fields import CONTROL_FLOW, KNOWN_VERSIONS
from .graph import Constant, Group, Input, Node, RelayGraph, Result, TensorType, Type, Value
from .groups import group_of
from .nodes import NodeTable
from .scopes import Closure, Scope
from .types import read_type

#: A graph has at most this many operators, and calls of functions: nested ones can ask for any number.
MAX_NODES = 200_000
MAX_CALLS = 20_000

_Frame = tuple[int, Scope]


def flatten(table: NodeTable, params: Mapping[str, np.ndarray]) -> RelayGraph:
    """Read ``main`` of a saved module.

    Parameters
    ----------
    table : NodeTable
        The module, or a single function.
    params : mapping of str to ndarray
        Values of parameters of ``main`` by name.

    Raises
    ------
    InvalidModelError
        If the file is damaged, or a parameter does not fit.
    UnsupportedOperatorError
        If it holds control flow.
    """
    version = table.version.split(".dev")[0]
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        warnings.warn(
            f"the module was saved by TVM {table.version or 'of an unknown version'}; versions "
            f"{', '.join(KNOWN_VERSIONS)} are tested",
            stacklevel=2,
        )
    return _Flattener(table, params).flatten()


class _Flattener:
    def __init__(self, table: NodeTable, params: Mapping[str, np.ndarray]) -> None:
        self._table = table
        self._params = params
        self._arrays = StoredArrays(table.arrays)
        self._functions: dict[str, int] = {}
        self._types: dict[int, Type] = {}
        self._constants: dict[int, Constant] = {}
        self._nodes: list[Node] = []
        self._groups: list[Group] = []
        self._names: dict[str, int] = {}
        self._calls = 0

    def flatten(self) -> RelayGraph:
        main = self._main()
        scope = Scope(None, None)
        inputs = self._bind_inputs(main, scope)
        body = self._table.get(main, "body")
        output = self._evaluate(body, scope)
        if isinstance(output, Closure):
            raise UnsupportedOperatorError(
                "main returns a function: call it, and return its result"
            )
        return RelayGraph(tuple(inputs), tuple(self._nodes), output, tuple(self._groups))

    def _main(self) -> int:
        table = self._table
        root = table.root
        if not isinstance(root, int):
            raise InvalidModelError("it names no root node: the file is damaged")
        if table.kind(root) == "relay.Function":
            return root
        if table.kind(root).startswith("relay."):
            raise InvalidModelError(
                f"it holds {table.describe(root)}, not a module or a function: save the module"
            )
        table.expect(root, "IRModule")
        pairs = table.items(table.get(root, "functions"))
        if len(pairs) % 2:
            raise InvalidModelError("its functions are not in pairs: the file is damaged")
        for gvar, function in zip(pairs[::2], pairs[1::2], strict=True):
            table.expect(gvar, "GlobalVar")
            self._functions[table.text(table.get(gvar, "name_hint"))] = function
        if "main" not in self._functions:
            found = ", ".join(self._functions) or "none"
            raise InvalidModelError(
                f'the module must have a function named "main" (it has {found})'
            )
        table.expect(self._functions["main"], "relay.Function")
        return self._functions["main"]

    def _bind_inputs(self, main: int, scope: Scope) -> list[Input]:
        """Bind the parameters of ``main`` to inputs, or to the values that ``params`` has for them."""
        table, inputs, left = self._table, [], set(self._params)
        for var in table.items(table.get(main, "params")):
            name, vid = self._variable(var)
            declared = self._type(table.get(var, "type_annotation")) or self._checked_type(var)
            if not isinstance(declared, TensorType):
                raise UnsupportedOperatorError(
                    f"input {name!r} is no tensor of a known type: give it a type_annotation of one tensor"
                )
            declared.check(f"input {name!r}")
            if vid in scope.variables:
                raise InvalidModelError(
                    f"main has the parameter {name!r} twice: the file is damaged"
                )
            if name in self._params:
                left.discard(name)
                scope.variables[vid] = self._parameter(name, declared)
            else:
                inputs.append(Input(self._unique(name or "input"), declared))
                scope.variables[vid] = inputs[-1]
        if left:
            warnings.warn(
                f"main has no parameter named {', '.join(sorted(left)[:5])}, as the parameters file has "
                f"({len(left)} are left over)",
                stacklevel=5,
            )
        return inputs

    def _parameter(self, name: str, declared: TensorType) -> Constant:
        array = self._params[name]
        fits = len(declared.shape) == array.ndim and all(
            n is None or n == m for n, m in zip(declared.shape, array.shape, strict=True)
        )
        if not fits or str(array.dtype) != declared.dtype:
            raise InvalidModelError(
                f"parameter {name!r} is {TensorType(array.shape, str(array.dtype))} in the parameters file, but "
                f"{declared} in the module: take the files of one model"
            )
        return Constant(array, f"parameter {name!r}")

    def _variable(self, var: int) -> tuple[str, int]:
        """Return a variable's name and the node that identifies it."""
        self._table.expect(var, "relay.Var")
        vid = self._table.get(var, "vid")
        self._table.expect(vid, "relay.Id")
        return self._table.text(self._table.get(vid, "name_hint")), vid

    def _type(self, index: int) -> Type:
        if index not in self._types:
            self._types[index] = read_type(self._table, index)
        return self._types[index]

    def _checked_type(self, index: int) -> Type:
        return self._type(self._table.get(index, "_checked_type_"))

    def _unique(self, name: str) -> str:
        """Return a name that no input or operator has yet."""
        while name in self._names:
            self._names[name] += 1
            name = f"{name}_{self._names[name]}"
        self._names[name] = 0
        return name

    # -- expressions ---------------------------------------------------------------------------

    def _evaluate(self, root: int, scope: Scope) -> Value | Closure:
        """Return the value of an expression; with a stack of its own, since models are deep."""
        stack: list[_Frame] = [(root, scope)]
        active: set[tuple[int, int]] = set()
        while stack:
            index, inside = stack[-1]
            key = (index, id(inside))
            if inside.find(index) is not None:
                stack.pop()
                active.discard(key)
                continue
            active.add(key)
            missing = self._step(index, inside)
            for frame in missing:
                if (frame[0], id(frame[1])) in active:
                    raise InvalidModelError(
                        f"{self._table.describe(frame[0])} needs its own result: the node list is cyclic, the file is "
                        "damaged"
                    )
            stack.extend(reversed(missing))
        return scope.find(root)

    def _step(self, index: int, scope: Scope) -> list[_Frame]:
        """Evaluate one expression whose operands are known, or return the frames that it needs."""
        table, kind = self._table, self._table.kind(index)
        if kind == "relay.Var":
            name, vid = self._variable(index)
            value = scope.variable(vid)
            if value is None:
                raise InvalidModelError(
                    f"{table.describe(index)} reads the variable {name!r}, which is not bound: the file is damaged"
                )
        elif kind == "relay.Constant":
            value = self._constant(index)
        elif kind == "relay.Function":
            value = Closure(index, scope)
        elif kind == "relay.Tuple":
            fields = table.items(table.get(index, "fields"))
            missing = scope.missing(fields)
            if missing:
                return missing
            value = tuple(self._plain(scope.find(field), index) for field in fields)
        elif kind == "relay.TupleGetItem":
            operand = table.get(index, "tuple_value")
            missing = scope.missing([operand])
            if missing:
                return missing
            value = self._item(index, scope.find(operand))
        elif kind == "relay.Let":
            return self._let(index, scope)
        elif kind == "relay.Call":
            return self._call(index, scope)
        elif kind in CONTROL_FLOW:
            raise UnsupportedOperatorError(
                f"{kind.removeprefix('relay.')} ({table.describe(index)}) cannot be imported: save the model without "
                "control flow, data types and references"
            )
        else:
            raise InvalidModelError(
                f"{table.describe(index)} stands where an expression of Relay must be: the file is damaged"
            )
        scope.values[index] = value
        return []

    def _constant(self, index: int) -> Constant:
        number = self._table.get(index, "data")
        if number not in self._constants:
            self._constants[number] = Constant(self._arrays[number], f"constant {number}")
        return self._constants[number]

    def _item(self, index: int, value: Value | Closure) -> Value:
        number = self._table.get(index, "index")
        if isinstance(value, tuple):
            if not 0 <= number < len(value):
                raise InvalidModelError(
                    f"{self._table.describe(index)} takes item {number} of a tuple of {len(value)}: the file is damaged"
                )
            return value[number]
        if isinstance(value, Result) and value.field is None:
            return Result(
                value.node, number
            )  # whether it has so many is known when it is converted
        raise InvalidModelError(
            f"{self._table.describe(index)} takes an item of what is no tuple: the file is damaged"
        )

    def _plain(self, value: Value | Closure, index: int) -> Value:
        if isinstance(value, Closure):
            raise UnsupportedOperatorError(
                f"{self._table.describe(index)} takes a function as a value, which cannot be imported: call it where "
                "it is defined"
            )
        return value

    def _let(self, index: int, scope: Scope) -> list[_Frame]:
        table = self._table
        bound, body = table.get(index, "value"), table.get(index, "body")
        missing = scope.missing([bound])
        if missing:
            return missing
        _, vid = self._variable(table.get(index, "var"))
        scope.variables[vid] = scope.find(bound)
        missing = scope.missing([body])
        if not missing:
            scope.values[index] = scope.find(body)
        return missing

    def _call(self, index: int, scope: Scope) -> list[_Frame]:
        table = self._table
        args, op = table.items(table.get(index, "args")), table.get(index, "op")
        kind = table.kind(op)
        if kind in CONTROL_FLOW:
            raise UnsupportedOperatorError(
                f"{table.describe(index)} makes a value of a data type, which cannot be imported: save the model "
                "without data types"
            )
        callee = None
        if kind == "GlobalVar":
            callee = self._global(op)
        elif kind != "Op":
            missing = scope.missing([op])
            if missing:
                return missing
            callee = scope.find(op)
        missing = scope.missing(args)
        if missing:
            return missing
        values = [self._plain(scope.find(arg), index) for arg in args]
        if kind == "Op":
            scope.values[index] = self._operator(index, table.text(op), tuple(values), scope)
            return []
        if not isinstance(callee, Closure):
            raise InvalidModelError(
                f"{table.describe(index)} calls what is no function: the file is damaged"
            )
        inner = scope.calls.get(index)
        if inner is None:
            inner = scope.calls[index] = self._enter(index, callee, values, scope)
        body = table.get(callee.function, "body")
        missing = inner.missing([body])
        if not missing:
            scope.values[index] = inner.find(body)
        return missing

    def _global(self, op: int) -> Closure:
        name = self._table.text(self._table.get(op, "name_hint"))
        function = self._functions.get(name)
        if function is None:
            raise InvalidModelError(
                f"{self._table.describe(op)} names the function {name!r}, which the module does not hold: save the "
                "whole module"
            )
        self._table.expect(function, "relay.Function")
        return Closure(function, Scope(None, None), name)

    def _enter(self, index: int, callee: Closure, values: list[Value], scope: Scope) -> Scope:
        """Return the scope of a call, with the parameters bound."""
        table = self._table
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise InvalidModelError(f"the model calls functions more than {MAX_CALLS} times")
        params = table.items(table.get(callee.function, "params"))
        if len(params) != len(values):
            raise InvalidModelError(
                f"{table.describe(index)} gives {len(values)} arguments to a function of {len(params)} parameters: the "
                "file is damaged"
            )
        if scope.depth >= Scope.MAX_DEPTH:
            raise UnsupportedOperatorError(
                f"{table.describe(index)} calls functions more than {Scope.MAX_DEPTH} deep: recursion cannot be read"
            )
        group = scope.group
        if group is None:  # the outermost annotation decides
            found = group_of(table, callee.function, callee.name)
            if found is not None:
                group = len(self._groups)
                self._groups.append(found)
        inner = Scope(callee.scope, group, scope.depth + 1)
        for var, value in zip(params, values, strict=True):
            inner.variables[self._variable(var)[1]] = value
        return inner

    def _operator(self, index: int, op: str, args: tuple[Value, ...], scope: Scope) -> Result:
        if len(self._nodes) >= MAX_NODES:
            raise InvalidModelError(f"the model has more than {MAX_NODES} operators")
        table = self._table
        attrs = table.attributes(table.get(index, "attrs"), op)
        name = self._unique(self._source_name(index) or self._numbered(op))
        place = f"operator {op} (node {name!r}, JSON node {index})"
        node = Node(name, op, args, attrs, self._checked_type(index), scope.group, place)
        self._nodes.append(node)
        return Result(len(self._nodes) - 1)

    def _numbered(self, op: str) -> str:
        """Return the operator's name with a number, as ``conv2d_3``."""
        short = op.rpartition(".")[2]
        self._names.setdefault(short, -1)
        self._names[short] += 1
        return f"{short}_{self._names[short]}"

    def _source_name(self, index: int) -> str:
        """Return the name of the node that an importer of Relay made the call from, or ``""``.

        Importers write it as a span without a position; one with a position comes from Relay's text.
        """
        table = self._table
        span: Any = table.get(index, "span")
        if table.kind(span) != "Span" or table.get(span, "line") or table.get(span, "column"):
            return ""
        source = table.get(span, "source_name")
        return table.text(source).strip() if table.kind(source) == "SourceName" else ""
