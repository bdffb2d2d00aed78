"""If, Loop and Scan whose course is known: the branch that is taken, or the iterations written out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .onnx_shapes import small_value

if TYPE_CHECKING:
    import onnx

#: Loops are written out while the iterations have no more nodes than this together.
MAX_NODES = 20_000


def resolve_control_flow(graph: onnx.GraphProto, opset: int) -> bool:
    """Replace every If, Loop and Scan whose course is known by what it computes, in place.

    An If is known when its condition is constant; a Loop when its number of iterations is constant
    and its condition stays true, or follows from stored numbers and counters; a Scan when the length
    of its sequences is. Inner ones are resolved by the next call.

    Parameters
    ----------
    graph : GraphProto
        A graph, with inferred shapes where there are Scans.
    opset : int
        The opset of the default domain.

    Returns
    -------
    bool
        Whether anything was replaced.
    """
    return _Resolver(graph, opset).run()


class _Resolver:
    def __init__(self, graph: onnx.GraphProto, opset: int) -> None:
        import onnx.helper

        self._graph, self._opset = graph, opset
        self._opsets = [onnx.helper.make_opsetid("", opset)]
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self._stored.update(
                    (node.output[0], a.t) for a in node.attribute if a.name == "value"
                )
        values = (*graph.input, *graph.value_info, *graph.output)
        self._types = {value.name: value.type.tensor_type for value in values}
        self._nodes: list[onnx.NodeProto] = []
        self._spliced = self._counter = 0

    def run(self) -> bool:
        resolvers = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        changed = False
        for node in self._graph.node:
            resolver = resolvers.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            outputs = resolver(node) if resolver is not None else None
            if outputs is None:
                self._nodes.append(node)
                continue
            changed = True
            for name, value in zip(node.output, outputs, strict=False):
                if name:
                    self._add("Identity", [value], [name], node)
        if changed:
            del self._graph.node[:]
            self._graph.node.extend(self._nodes)
        return changed

    def _if(self, node: onnx.NodeProto) -> list[str] | None:
        condition = self._value(node.input[0])
        if condition is None or condition.size != 1:
            return None
        branch = "then_branch" if condition.item() else "else_branch"
        body = _body(node, branch)
        return self._splice(body, self._adopted(body, node), node)

    def _loop(self, node: onnx.NodeProto) -> list[str] | None:
        count, start = (*node.input, "")[:2]
        body = _body(node, "body")
        trips, condition = self._value(count), self._value(start)
        if (count and (trips is None or trips.size != 1)) or (start and condition is None):
            return None
        states = list(node.input[2:])
        most = int(trips.item()) if trips is not None else None
        if condition is not None and not condition.item():
            most = 0
        number = self._iterations(body, most, states)
        if number is None or not self._fits(body, number):
            return None
        if number < 1:
            empty = self._empty_rows(body, node, len(states))
            return None if empty is None else [*states, *empty]
        rows: list[list[str]] = []
        stored = self._adopted(body, node)
        true = self._store(np.array(True), node)
        for i in range(number):
            index = self._store(np.array(i, "int64"), node)
            actual = dict(zip((v.name for v in body.input), [index, true, *states], strict=False))
            outputs = self._splice(body, stored | actual, node)[1:]
            states, row = outputs[: len(states)], outputs[len(states) :]
            rows.append(row)
        return [*states, *(self._stack(column, 0, node) for column in zip(*rows, strict=True))]

    def _iterations(
        self, body: onnx.GraphProto, most: int | None, states: Sequence[str]
    ) -> int | None:
        """Return how often a loop runs whose first condition is true, at most ``most`` times; None if unknown."""
        if most is not None and (most < 1 or self._stays_true(body)):
            return max(most, 0)
        needed = _needed_for(body, body.output[0].name)
        if needed is None:
            return None
        stored = {name: self._value(name) for name in self._stored}
        stored |= {tensor.name: _array(tensor) for tensor in body.initializer}
        stored = {name: array for name, array in stored.items() if array.size <= 64}
        current = [stored.get(name) for name in states]
        number = 0
        while (most is None or number < most) and self._fits_also(body, number + 1):
            given = [np.array(number, "int64"), np.array(True), *current]
            pairs = zip((v.name for v in body.input), given, strict=False)
            known = stored | {name: array for name, array in pairs if array is not None}
            for inner in needed:
                value = small_value(inner, known, {}, self._opsets)
                if value is not None:
                    known[inner.output[0]] = value
            number += 1
            condition, *current = [known.get(v.name) for v in body.output[: 1 + len(states)]]
            if condition is None:
                return None
            if not condition.all():
                return number
        return number if number == most else None

    def _empty_rows(
        self, body: onnx.GraphProto, node: onnx.NodeProto, states: int
    ) -> list[str] | None:
        """Store what a loop stacks that never runs: no rows, of the shape that each would have."""
        import onnx.helper

        rows = []
        for value, name in zip(body.output[1 + states :], node.output[states:], strict=False):
            kind, outer = value.type.tensor_type, self._types.get(name)
            dims = [d.dim_value for d in kind.shape.dim] if kind.HasField("shape") else None
            if dims is None and outer is not None and outer.HasField("shape"):
                dims = [d.dim_value for d in outer.shape.dim][1:]
            code = kind.elem_type or (outer.elem_type if outer is not None else 0)
            if not code or dims is None or 0 in dims:
                return None
            dtype = onnx.helper.tensor_dtype_to_np_dtype(code)
            rows.append(self._store(np.zeros((0, *dims), dtype), node))
        return rows

    def _scan(self, node: onnx.NodeProto) -> list[str] | None:
        if self._opset < 9:  # one operand more, and a batch axis
            return None
        body = _body(node, "body")
        ints = {a.name: list(a.ints) for a in node.attribute}
        count = next(a.i for a in node.attribute if a.name == "num_scan_inputs")
        first = len(node.input) - count
        sequences = list(node.input[first:])
        in_axes = ints.get("scan_input_axes") or [0] * count
        length = self._length(sequences, in_axes)
        if length is None or length < 1 or not self._fits(body, length):
            return None
        states, rows = list(node.input[:first]), []
        stored = self._adopted(body, node)
        backward = ints.get("scan_input_directions") or [0] * count
        for i in range(length):
            slices = [
                self._pick(name, axis, length - 1 - i if back else i, node)
                for name, axis, back in zip(sequences, in_axes, backward, strict=True)
            ]
            actual = dict(zip((v.name for v in body.input), [*states, *slices], strict=True))
            outputs = self._splice(body, stored | actual, node)
            states, row = outputs[:first], outputs[first:]
            rows.append(row)
        columns = [list(column) for column in zip(*rows, strict=True)]
        axes = ints.get("scan_output_axes") or [0] * len(columns)
        reversed_ = ints.get("scan_output_directions") or [0] * len(columns)
        stacks = [
            self._stack(column[::-1] if back else column, axis, node)
            for column, axis, back in zip(columns, axes, reversed_, strict=True)
        ]
        return [*states, *stacks]

    def _length(self, names: Sequence[str], axes: Sequence[int]) -> int | None:
        for name, axis in zip(names, axes, strict=True):
            dims = self._types[name].shape.dim if name in self._types else ()
            dims = dims or [
                _Size(n) for n in (self._stored[name].dims if name in self._stored else ())
            ]
            if -len(dims) <= axis < len(dims) and dims[axis].dim_value > 0:
                return dims[axis].dim_value
        return None

    def _fits_also(self, body: onnx.GraphProto, iterations: int) -> bool:
        return self._spliced + max(len(body.node), 1) * iterations <= MAX_NODES

    def _fits(self, body: onnx.GraphProto, iterations: int) -> bool:
        self._spliced += max(len(body.node), 1) * max(iterations, 0)
        return self._spliced <= MAX_NODES

    def _stays_true(self, body: onnx.GraphProto) -> bool:
        """Return whether the condition that the body returns is constantly true or the one that it is given."""
        producers = {name: node for node in body.node for name in node.output}
        name = body.output[0].name
        while name in producers and producers[name].op_type == "Identity":
            name = producers[name].input[0]
        if len(body.input) > 1 and name == body.input[1].name:
            return True
        own = {tensor.name: tensor for tensor in body.initializer}
        if name in producers and producers[name].op_type == "Constant":
            own.update((name, a.t) for a in producers[name].attribute if a.name == "value")
        tensor = own.get(name, self._stored.get(name))
        return tensor is not None and bool(_array(tensor).all())

    def _splice(
        self, body: onnx.GraphProto, actual: Mapping[str, str], node: onnx.NodeProto
    ) -> list[str]:
        """Append a copy of ``body`` with its own names made unique; return the names of its outputs."""
        prefix, names = f"{self._fresh(node)}/", dict(actual)
        for inner in body.node:
            names.update((name, prefix + name) for name in inner.output if name)
        for inner in body.node:
            copy = type(inner)()
            copy.CopyFrom(inner)
            _rename(copy, names)
            copy.name = prefix + inner.name if inner.name else ""
            self._nodes.append(copy)
        return [names.get(value.name, value.name) for value in body.output]

    def _adopted(self, body: onnx.GraphProto, node: onnx.NodeProto) -> dict[str, str]:
        """Move copies of a body's stored values to the graph; return their new names by the old ones."""
        prefix, names = f"{self._fresh(node)}/", {}
        for tensor in body.initializer:
            names[tensor.name] = prefix + tensor.name
            copy = self._graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = names[tensor.name]
            self._stored[copy.name] = copy
        return names

    def _stack(self, values: Sequence[str], axis: int, node: onnx.NodeProto) -> str:
        if self._opset < 13:
            rows = [self._add("Unsqueeze", [value], None, node, axes=[axis]) for value in values]
        else:
            axes = self._store(np.array([axis], "int64"), node)
            rows = [self._add("Unsqueeze", [value, axes], None, node) for value in values]
        return self._add("Concat", rows, None, node, axis=axis)

    def _pick(self, name: str, axis: int, index: int, node: onnx.NodeProto) -> str:
        at = self._store(np.array(index, "int64"), node)
        return self._add("Gather", [name, at], None, node, axis=axis)

    def _add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: list[str] | None,
        source: onnx.NodeProto,
        **attributes: int | list[int],
    ) -> str:
        import onnx.helper

        outputs = outputs or [self._fresh(source)]
        self._nodes.append(
            onnx.helper.make_node(op_type, inputs, outputs, name=source.name, **attributes)
        )
        return outputs[0]

    def _store(self, array: np.ndarray, source: onnx.NodeProto) -> str:
        import onnx.numpy_helper

        name = self._fresh(source)
        self._graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        self._stored[name] = self._graph.initializer[-1]
        return name

    def _fresh(self, source: onnx.NodeProto) -> str:
        self._counter += 1
        return f"{source.output[0] or source.name}/{self._counter}"

    def _value(self, name: str) -> np.ndarray | None:
        return _array(self._stored[name]) if name in self._stored else None


class _Size:
    """A stored dimension, in the form of an inferred one."""

    def __init__(self, size: int) -> None:
        self.dim_value = size


def _needed_for(body: onnx.GraphProto, name: str) -> list[onnx.NodeProto] | None:
    """Return the nodes that a result of a loop's body follows from, also by way of earlier iterations.

    None where one of them has more than one result or a domain of its own.
    """
    states = {v.name: out.name for v, out in zip(body.input[2:], body.output[1:], strict=False)}
    wanted, size = {name}, 0
    while size < len(wanted):  # until nothing new is wanted
        size = len(wanted)
        wanted.update(states[name] for name in list(wanted) if name in states)
        for inner in reversed(body.node):
            if wanted.intersection(inner.output):
                wanted.update(inner.input)
    nodes = [inner for inner in body.node if wanted.intersection(inner.output)]
    plain = all(len(n.output) == 1 and n.domain in ("", "ai.onnx") for n in nodes)
    return nodes if plain else None


def _body(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    return next(a.g for a in node.attribute if a.name == name)


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    import onnx.numpy_helper

    return onnx.numpy_helper.to_array(tensor)


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Replace names in a node, and those of outer values in the graphs that it holds, in place."""
    for i, name in enumerate(node.input):
        node.input[i] = names.get(name, name)
    for i, name in enumerate(node.output):
        node.output[i] = names.get(name, name)
    for graph in _graphs(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        outer = {old: new for old, new in names.items() if old not in own}
        for inner in graph.node:
            _rename(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
