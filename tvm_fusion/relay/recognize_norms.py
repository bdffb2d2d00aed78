"""Read norms that a model spells out as one operator, as `frontend.canonical.RecognizeNorms` does."""

from __future__ import annotations

from .nodes import Node, Value
from .rewrite import NodeRewriter

_NARROW = ("float16", "bfloat16")


class RecognizeNorms(NodeRewriter):
    """x · rsqrt(mean(x²) + eps) · w -> rms_norm; of x = y - mean(y), with an addition behind it, layer_norm(y).

    Over the last axis. Casts to float32 and back around the norm are part of it. A value of the chain
    that something else reads, too, keeps the chain, and so does a group that holds a part of it.
    """

    def visit(self, node: Node) -> None:
        match = {"multiply": self._rms_norm, "add": self._layer_norm}.get(node.op)
        for data, row in (node.inputs, node.inputs[::-1]) if match else ():
            if not data.is_static or not data.shape or data.dtype != row.dtype:
                continue
            if row.shape == data.shape[-1:] and match(node, data, row):
                break
        self.add(node)

    def _rms_norm(self, node: Node, normed: Value, scale: Value) -> bool:
        if not self.single_use(normed):
            return False
        cast = self.producer(normed, "astype")
        core = self.producer(normed if cast is None else cast.inputs[0])
        data, squares = self._over_root(core)
        if data is None or (cast is not None and not self.single_use(cast.inputs[0])):
            return False
        epsilon = self._mean_of_squares(squares, data)
        if epsilon is None or not self.together(node, core):
            return False
        if cast is not None:
            widened = self.producer(data, "astype")
            narrow = normed.dtype in _NARROW
            if widened is None or not narrow or widened.inputs[0].dtype != normed.dtype:
                return False
            data = widened.inputs[0]
        self._become(node, "rms_norm", [data, scale], {"epsilon": epsilon})
        return True

    def _over_root(self, core: Node | None) -> tuple[Value | None, Value | None]:
        """``x`` and ``v`` of x · rsqrt(v), x · (1 / sqrt(v)) or x / sqrt(v); None where it is none of them."""
        op = None if core is None else core.op
        if op == "divide":
            root = self.producer(core.inputs[1], "sqrt")
            return (None, None) if root is None else (core.inputs[0], root.inputs[0])
        for data, factor in (core.inputs, core.inputs[::-1]) if op == "multiply" else ():
            inverse = self.producer(factor)
            if inverse is not None and inverse.op == "rsqrt":
                return data, inverse.inputs[0]
            if inverse is not None and inverse.op == "divide" and _number(inverse.inputs[0]) == 1:
                root = self.producer(inverse.inputs[1], "sqrt")
                if root is not None:
                    return data, root.inputs[0]
        return None, None

    def _mean_of_squares(self, value: Value, data: Value) -> float | None:
        """``eps`` of mean(data²) + eps over the last axis; None if ``value`` is something else."""
        total = self.producer(value, "add")
        for mean, number in (total.inputs, total.inputs[::-1]) if total is not None else ():
            epsilon, squares = _number(number), self._mean(mean)
            if epsilon is None or squares is None:
                continue
            product = self.producer(squares)
            if product is not None and product.op in ("square", "multiply"):
                return epsilon if all(operand is data for operand in product.inputs) else None
        return None

    def _mean(self, value: Value) -> Value | None:
        """What ``value`` is the mean of, over the last axis, which is kept."""
        mean = self.producer(value, "mean")
        if mean is None or not mean.attrs["keepdims"] or mean.attrs["axis"] is None:
            return None
        data = mean.inputs[0]
        rank = len(data.shape)
        return data if [int(a) % rank for a in mean.attrs["axis"]] == [rank - 1] else None

    def _layer_norm(self, node: Node, normed: Value, shift: Value) -> bool:
        norm = self.producer(normed, "rms_norm")
        centred = None if norm is None else self.producer(norm.inputs[0], "subtract")
        if centred is None or not self.single_use(normed):
            return False
        data, mean = centred.inputs
        if self._mean(mean) is not data or not self.together(node, norm, centred):
            return False
        attrs = {"epsilon": norm.attrs["epsilon"], "center": True, "scale": True}
        self._become(node, "layer_norm", [data, norm.inputs[1], shift], attrs)
        return True

    @staticmethod
    def _become(node: Node, op: str, inputs: list[Value], attrs: dict[str, object]) -> None:
        """Make the last operator of a chain the whole of it; its expression is the chain's already."""
        node.op, node.inputs, node.attrs = op, inputs, {"axes": (-1,), **attrs}
        node.apart, node.helpers = None, []


def _number(value: Value) -> float | None:
    """The value of a constant of one element."""
    array = value.array if value.is_constant else None
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
