"""RNN, GRU and LSTM written out from their gates, one step after the other.

The equations and the order of the gates (LSTM: i, o, f, c; GRU: z, r, h) are those of the ONNX
operator specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx

#: Longer sequences would become graphs that take hours to compile.
MAX_STEPS = 512

_DEFAULTS = {
    "RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"],
}  # fmt: skip

#: Activations with parameters: their names and defaults.
_PARAMETERS: dict[str, dict[str, float]] = {
    "affine": {"alpha": 1.0, "beta": 0.0}, "elu": {"alpha": 1.0}, "hardsigmoid": {"alpha": 0.2, "beta": 0.5},
    "leakyrelu": {"alpha": 0.01}, "scaledtanh": {"alpha": 1.0, "beta": 1.0}, "thresholdedrelu": {"alpha": 1.0},
}  # fmt: skip

_OPERATORS = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softsign": "Softsign", "softplus": "Softplus",
    "elu": "Elu", "hardsigmoid": "HardSigmoid", "leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu",
}  # fmt: skip

Activation = Callable[[str], str]


def unroll(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Write out a recurrent layer of known sequence length, in both directions if it has two."""
    attributes = editor.attributes(node)
    x, *_ = operands = editor.operands(node, 8)
    shape = editor.shape(x)
    hidden = attributes.get("hidden_size") or (editor.shape(operands[2]) or [0])[-1]
    if shape is None or not hidden:
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    _require_weights(editor, node, attributes, hidden)
    batch_first = bool(attributes.get("layout", 0))
    if batch_first:
        x = editor.add("Transpose", x, perm=[1, 0, 2])
        shape = (shape[1], shape[0], shape[2])
    if shape[0] > MAX_STEPS:
        editor.refuse(f"its {shape[0]} steps are more than the {MAX_STEPS} that are written out")
    editor.require_room(shape[1], hidden)
    layer = _Layer(editor, node.op_type, attributes, operands, x, shape, hidden)
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
        attributes.get("direction", "forward")
    ]
    results = [layer.run(d, backward) for d, backward in enumerate(directions)]
    steps, *states = (list(column) for column in zip(*results, strict=True))
    rows = [editor.unsqueeze(value, 1) for value in steps]
    y = rows[0] if len(rows) == 1 else editor.add("Concat", *rows, axis=1)
    if batch_first:  # [steps, directions, batch, hidden] -> [batch, steps, directions, hidden]
        y = editor.add("Transpose", y, perm=[2, 0, 1, 3])
    outputs = [y]
    for values in states:
        value = _stacked(editor, values)
        outputs.append(editor.add("Transpose", value, perm=[1, 0, 2]) if batch_first else value)
    return outputs


def _require_weights(
    editor: Editor, node: onnx.NodeProto, attributes: dict[str, Any], hidden: int
) -> None:
    """Refuse weights of other sizes than the layer's."""
    rows = {"RNN": 1, "GRU": 3, "LSTM": 4}[node.op_type] * hidden
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    for name, kind in zip(node.input[1:3], "WR", strict=True):
        dims = editor.dims(name)
        if dims is None or None in dims:
            editor.refuse(f"the shape of its {kind} is not known: give the model static shapes")
        if dims[:2] != [directions, rows] or (kind == "R" and dims[2:] != [hidden]):
            editor.refuse(f"its {kind} of shape {dims} does not fit {directions} x {rows} rows")


def _stacked(editor: Editor, values: Sequence[str]) -> str:
    rows = [editor.unsqueeze(value, 0) for value in values]
    return rows[0] if len(rows) == 1 else editor.add("Concat", *rows, axis=0)


@dataclass
class _Layer:
    """What both directions of a layer share."""

    editor: Editor
    kind: str
    attributes: dict[str, Any]
    operands: list[str]
    x: str
    shape: tuple[int, ...]
    hidden: int

    def run(self, direction: int, backward: bool) -> tuple[str, ...]:
        """Return the outputs of all steps [steps, batch, hidden] and the last states [batch, hidden]."""
        editor, (length, batch, _) = self.editor, self.shape
        _, w, r, b, lengths, initial_h, initial_c, p = self.operands
        dtype = editor.dtype(self.operands[0]) or np.dtype("float32")
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[self.kind]
        self._functions = self._activations(direction)
        zero = np.zeros((batch, self.hidden), dtype)
        h = self._part(initial_h, direction, transposed=True) or editor.store(zero)
        c = self._part(initial_c, direction, transposed=True) or editor.store(zero)
        w_t = editor.add("Transpose", self._part(w, direction), perm=[1, 0])
        self._r = editor.add("Transpose", self._part(r, direction), perm=[1, 0])
        both = self._part(b, direction) or editor.store(np.zeros(2 * gates * self.hidden, dtype))
        self._wb, self._rb = editor.split(both, [gates * self.hidden] * 2, axis=0)
        # One product for all steps: they do not depend on each other.
        from_x = editor.add("Add", editor.add("MatMul", self.x, w_t), self._wb)
        peepholes = self._part(p, direction)
        self._peepholes = self._gates(peepholes, 3, axis=0) if peepholes else None
        mask = self._mask(lengths, length)
        outputs = [""] * length
        for step in reversed(range(length)) if backward else range(length):
            part = editor.add("Gather", from_x, np.array(step), axis=0)
            new_h, new_c = getattr(self, f"_{self.kind.lower()}")(part, h, c)
            if mask is None:
                h, c = new_h, new_c
                outputs[step] = h
                continue
            on = editor.add("Gather", mask, np.array(step), axis=0)  # [batch, 1]
            h = editor.add("Where", on, new_h, h)
            c = editor.add("Where", on, new_c, c) if self.kind == "LSTM" else c
            outputs[step] = editor.add("Where", on, new_h, np.zeros((), dtype))
        states = (h, c) if self.kind == "LSTM" else (h,)
        return (_stacked(editor, outputs), *states)

    def _part(self, name: str, direction: int, *, transposed: bool = False) -> str:
        """Return the part of a weight or state for a direction; empty for one that is absent."""
        if not name:
            return ""
        axis = 1 if transposed and self.attributes.get("layout", 0) else 0
        return self.editor.add("Gather", name, np.array(direction), axis=axis)

    def _mask(self, lengths: str, steps: int) -> str | None:
        """Return whether each step of each sequence is inside it, [steps, batch, 1]."""
        if not lengths:
            return None
        known = self.editor.value(lengths)
        if known is not None and (known >= steps).all():
            return None
        column = self.editor.cast(lengths, "int32")
        numbers = np.arange(steps, dtype="int32")[:, None]
        inside = self.editor.add("Greater", column, numbers)
        return self.editor.unsqueeze(inside, 2)

    def _gates(self, value: str, count: int, axis: int = 1) -> list[str]:
        return self.editor.split(value, [self.hidden] * count, axis)

    def _rnn(self, part: str, h: str, c: str) -> tuple[str, str]:
        add = self.editor.add
        total = add("Add", add("Add", part, add("MatMul", h, self._r)), self._rb)
        return self._functions[0](total), c

    def _gru(self, part: str, h: str, c: str) -> tuple[str, str]:
        add, (f, g) = self.editor.add, self._functions
        x_z, x_r, x_h = self._gates(part, 3)
        r_z, r_r, r_h = self._gates(self._r, 3)
        b_z, b_r, b_h = self._gates(self._rb, 3, axis=0)
        z = f(add("Add", add("Add", x_z, add("MatMul", h, r_z)), b_z))
        r = f(add("Add", add("Add", x_r, add("MatMul", h, r_r)), b_r))
        if self.attributes.get("linear_before_reset", 0):
            hidden = add("Mul", r, add("Add", add("MatMul", h, r_h), b_h))
        else:
            hidden = add("Add", add("MatMul", add("Mul", r, h), r_h), b_h)
        new = g(add("Add", x_h, hidden))
        # (1 - z) * new + z * h
        return add("Add", new, add("Mul", z, add("Sub", h, new))), c

    def _lstm(self, part: str, h: str, c: str) -> tuple[str, str]:
        add, (f, g, last) = self.editor.add, self._functions
        total = add("Add", add("Add", part, add("MatMul", h, self._r)), self._rb)
        t_i, t_o, t_f, t_c = self._gates(total, 4)
        if self._peepholes:
            p_i, p_o, p_f = self._peepholes
            t_i = add("Add", t_i, add("Mul", p_i, c))
            t_f = add("Add", t_f, add("Mul", p_f, c))
        i = f(t_i)
        forget = add("Sub", self._one(), i) if self.attributes.get("input_forget", 0) else f(t_f)
        new_c = add("Add", add("Mul", forget, c), add("Mul", i, g(t_c)))
        if self._peepholes:
            t_o = add("Add", t_o, add("Mul", p_o, new_c))
        return add("Mul", f(t_o), last(new_c)), new_c

    def _one(self) -> np.ndarray:
        return np.ones((), self.editor.dtype(self.operands[0]) or "float32")

    def _activations(self, direction: int) -> list[Activation]:
        """Return the functions of a direction, each with its parameters and with clipped input."""
        defaults = _DEFAULTS[self.kind]
        named = self.attributes.get("activations") or defaults * 2
        names = [n.decode() if isinstance(n, bytes) else n for n in named]
        given = {
            key: list(self.attributes.get(f"activation_{key}", ())) for key in ("alpha", "beta")
        }
        functions = []
        # The parameters are lists over all functions that have any, in order.
        for name in names:
            values = {
                key: given[key].pop(0) if given[key] else default
                for key, default in _PARAMETERS.get(name.lower(), {}).items()
            }
            # The last function of an LSTM takes the cell state, which onnxruntime does not clip.
            clipped = self.kind != "LSTM" or len(functions) % 3 < 2
            functions.append(self._function(name.lower(), values, clipped))
        return functions[direction * len(defaults) :][: len(defaults)]

    def _function(self, name: str, values: dict[str, float], clipped: bool) -> Activation:
        editor, limit = self.editor, self.attributes.get("clip") if clipped else None
        dtype = editor.dtype(self.operands[0]) or np.dtype("float32")
        if name not in _OPERATORS and name not in ("affine", "scaledtanh"):
            editor.refuse(f"the activation {name!r} is unknown")

        def number(key: str) -> np.ndarray:
            return np.array(values[key], dtype)

        def function(value: str) -> str:
            if limit is not None:
                low, high = np.array(-limit, dtype), np.array(limit, dtype)
                value = editor.add("Min", editor.add("Max", value, low), high)
            if name == "affine":
                return editor.add("Add", editor.add("Mul", value, number("alpha")), number("beta"))
            if name == "scaledtanh":
                scaled = editor.add("Tanh", editor.add("Mul", value, number("beta")))
                return editor.add("Mul", scaled, number("alpha"))
            return editor.add(_OPERATORS[name], value, **values)

        return function
