"""Mutations of valid ONNX models: attributes, sizes, types, wiring, operators, stored values, bytes of the file."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

#: Numbers that attributes and stored values are set to.
_NUMBERS = (0, 1, 2, 3, 4, 5, -1, -2, -3, 7, 100, 2**31 - 1, 2**31, 2**40, -(2**63), 2**63 - 1)
_FRACTIONS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-8, 1e8, float("inf"), float("nan"))
_TYPES = tuple(
    getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "DOUBLE", "INT32", "INT64", "UINT8", "BOOL")
)  # fmt: skip

#: Operators of one operand that are appended, with attributes.
_APPENDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Relu", {}), ("Sigmoid", {}), ("Neg", {}), ("Abs", {}), ("Softmax", {"axis": -1}), ("Softmax", {"axis": 0}),
    ("ReduceMax", {}), ("ReduceMean", {"keepdims": 0}), ("Flatten", {"axis": 0}), ("Flatten", {}), ("Transpose", {}),
    ("Cast", {"to": onnx.TensorProto.FLOAT16}), ("Cast", {"to": onnx.TensorProto.INT32}), ("Shape", {}),
    ("Identity", {}), ("Exp", {}), ("Floor", {}), ("Not", {}), ("ArgMax", {"axis": 0}), ("GlobalMaxPool", {}),
    ("MaxPool", {"kernel_shape": [2, 2]}), ("Hardmax", {}), ("IsNaN", {}), ("LayerNormalization", {}),
)  # fmt: skip
_APPENDED_PAIRS = (
    "Add",
    "Mul",
    "Sub",
    "Max",
    "MatMul",
    "Concat",
    "Where",
    "Gather",
    "Equal",
    "Pow",
)


def mutate(model: onnx.ModelProto, chance: random.Random) -> bytes:
    """Return a mutated copy of a model as the content of a file; its outputs' types are left open.

    Parameters
    ----------
    model : ModelProto
        A valid model.
    chance : random.Random
        Decides everything.
    """
    changed = copy.deepcopy(model)
    del changed.graph.value_info[:]
    for value in changed.graph.output:
        value.ClearField("type")
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        chance.choice(_MUTATIONS)(changed, chance)
    content = changed.SerializeToString()
    return flip_bytes(content, chance) if chance.random() < 0.1 else content


def flip_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return content with a few bytes changed, dropped or inserted."""
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        position, kind = chance.randrange(len(made)), chance.random()
        if kind < 0.8:
            made[position] = chance.randrange(256)
        elif kind < 0.9:
            del made[position]
        else:
            made.insert(position, chance.randrange(256))
    return bytes(made)


def _attribute(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another value of an attribute, or none."""
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return _append(model, chance)
    node = chance.choice(nodes)
    attribute = chance.choice(node.attribute)
    if chance.random() < 0.1:
        node.attribute.remove(attribute)
    elif attribute.HasField("i"):
        attribute.i = _near(attribute.i, chance)
    elif attribute.HasField("f"):
        attribute.f = chance.choice(_FRACTIONS)
    elif attribute.ints:
        if chance.random() < 0.2:
            attribute.ints.append(chance.choice(_NUMBERS))
        else:
            place = chance.randrange(len(attribute.ints))
            attribute.ints[place] = _near(attribute.ints[place], chance)
    elif attribute.floats:
        attribute.floats[chance.randrange(len(attribute.floats))] = chance.choice(_FRACTIONS)
    elif attribute.HasField("s"):
        attribute.s = chance.choice(
            (b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"linear", b"nearest", b"cubic", b"reflect", b"edge", b"max",
             b"min", b"sum", b"mean", b"tanh", b"none", b"asymmetric", b"align_corners", b"")
        )  # fmt: skip


def _near(number: int, chance: random.Random) -> int:
    near = chance.choice((number + 1, number - 1, -number, 2 * number))
    return near if chance.random() < 0.6 and abs(near) < 2**62 else chance.choice(_NUMBERS)


def _size(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another size, one size more, or one less, of an input."""
    values = [v for v in model.graph.input if v.type.HasField("tensor_type")]
    if not values:
        return
    dims = chance.choice(values).type.tensor_type.shape.dim
    kind = chance.random()
    if kind < 0.15 or not dims:
        dims.add().dim_value = chance.choice((1, 2, 3))
    elif kind < 0.3:
        del dims[chance.randrange(len(dims))]
    else:
        chance.choice(dims).dim_value = chance.choice((1, 1, 2, 3, 4, 5, 7, 0, 2**20, 2**40))


def _type(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another type of all inputs of one type."""
    values = [v.type.tensor_type for v in model.graph.input if v.type.HasField("tensor_type")]
    if values:
        old, new = chance.choice(values).elem_type, chance.choice(_TYPES)
        for value in values:
            if value.elem_type == old:
                value.elem_type = new


def _wiring(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another operand, none, or one operand less."""
    nodes = [node for node in model.graph.node if node.input]
    if not nodes:
        return
    node = chance.choice(nodes)
    place, kind = chance.randrange(len(node.input)), chance.random()
    if kind < 0.2:
        del node.input[-1]
    elif kind < 0.3:
        node.input[place] = ""
    else:
        node.input[place] = chance.choice(_values(model))


def _values(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    return [
        *(v.name for v in graph.input),
        *(t.name for t in graph.initializer),
        *(name for node in graph.node for name in node.output if name),
    ]


def _operator(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another operator on the same operands."""
    if model.graph.node:
        node = chance.choice(model.graph.node)
        pairs = [*_APPENDED_PAIRS, "Div", "Min", "Expand", "Tile", "Reshape", "Mod", "Slice"]
        single = [name for name, _ in _APPENDED]
        node.op_type = chance.choice(pairs if len(node.input) > 1 else single)


def _append(model: onnx.ModelProto, chance: random.Random) -> None:
    """One operator more, of an output and perhaps another value; its result is an output instead."""
    if not model.graph.output or not model.graph.node:
        return
    output = chance.choice(model.graph.output)
    if not output.name:
        return
    made = f"{output.name}_{len(model.graph.node)}"
    if chance.random() < 0.5:
        name, attributes = chance.choice(_APPENDED)
        names = [output.name]
    else:
        name, attributes = chance.choice(_APPENDED_PAIRS), {}
        names = [output.name, chance.choice(_values(model))]
        if name == "Where":
            names = [*names, names[0]]
        if name == "Concat":
            attributes = {"axis": chance.choice((0, 1, -1))}
    model.graph.node.append(onnx.helper.make_node(name, names, [made], **attributes))
    output.name = made


def _stored(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another stored number: a weight, or an axis, size or count."""
    tensors = [
        t for t in model.graph.initializer if onnx.numpy_helper.to_array(t).dtype.kind in "fiu"
    ]
    if not tensors:
        return _attribute(model, chance)
    tensor = chance.choice(tensors)
    values = onnx.numpy_helper.to_array(tensor).copy()
    if values.size:
        place = chance.randrange(values.size)
        choices = _FRACTIONS if values.dtype.kind == "f" else _NUMBERS
        with np.errstate(all="ignore"):
            new = np.array(chance.choice(choices))
            values.reshape(-1)[place] = new.astype(values.dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def _version(model: onnx.ModelProto, chance: random.Random) -> None:
    """Another version of the operators."""
    if model.opset_import:
        chance.choice(model.opset_import).version = chance.choice((1, 6, 7, 9, 11, 13, 17, 18, 21))


_MUTATIONS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    _attribute, _attribute, _attribute, _size, _size, _type, _wiring, _operator, _append, _append, _append, _stored,
    _stored, _version,
)  # fmt: skip
