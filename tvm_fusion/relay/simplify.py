"""Bring operators of the graph to the form that the Relax path's clean-up leaves.

The expressions stay as they are: an operator that was merged into another becomes part of its
expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np

from .move_reshapes import MoveReshapes
from .nodes import Node, Structure, Value
from .recognize_norms import RecognizeNorms
from .rewrite import NodeRewriter
from .slice_splits import SliceSplits
from .split_products import SplitProducts

_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_TRANSPOSED = {"conv1d_transpose", "conv2d_transpose", "conv3d_transpose"}
_SCALING = ("add", "subtract", "multiply", "divide", "negative")


#: The passes before the merging of scales, in the order of `frontend.canonical.CANONICAL_PASSES`.
_PASSES = (RecognizeNorms, MoveReshapes, SplitProducts, SliceSplits)


def simplify(
    nodes: Iterable[Node],
    returned: list[Value],
    owners: Mapping[Any, str],
    values: MutableMapping[Any, Structure],
) -> list[Node]:
    """Rewrite operators, and leave out those whose results nothing reads.

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
    every, left = list(nodes), None
    for make in _PASSES:
        # Reshapes that were merged with others are dead, and still of use to MoveReshapes.
        left = make(
            every if make is MoveReshapes else left or every, returned, owners, values
        ).run()
    merger = _Merger(left, returned, owners, values)
    for step in (merger.merge_scales, merger.fold_scale, merger.simplify_bias):
        for node in list(merger.nodes):
            if node in merger.alive:
                step(node)
        merger.sweep()
    return merger.nodes


class _Step(NamedTuple):
    """``base * scale + shift``; one of the two is None, except in ``constant - base``, which is never alone."""

    node: Node
    base: Value
    scale: np.ndarray | None
    shift: np.ndarray | None


class _Merger(NodeRewriter):
    def merge_scales(self, node: Node) -> None:
        """((x * a + b) * c + d) → x * (a c) + (b c + d)."""
        step = _step(node)
        if step is None:
            return
        chain = [step]
        while self.uses[chain[-1].base] == 1:
            inner = _step(chain[-1].base.node)
            if inner is None or inner.node not in self.alive or not self.together(node, inner.node):
                break
            chain.append(inner)
        rewritten = _wants_rewrite(node)
        if len(chain) == 1 and not rewritten:
            return
        if len(chain) == 2 and not rewritten and chain[0].scale is None and chain[1].shift is None:
            return  # already one multiplication and one addition
        merged = _merged(chain[::-1])
        if merged is not None:
            self._write(node, chain[-1], *merged)

    def _write(
        self, last: Node, first: _Step, scale: np.ndarray | None, shift: np.ndarray | None
    ) -> None:
        """Make a chain from ``first`` to ``last`` one multiplication and one addition."""
        base = first.base
        if scale is not None and shift is not None:
            first.node.op, first.node.attrs = "multiply", {}
            first.node.inputs = [base, _constant(scale, base.dtype)]
            last.inputs = [first.node.output, _constant(shift, base.dtype)]
            last.op, last.attrs = "add", {}
            return
        last.op, last.attrs = ("add" if scale is None else "multiply"), {}
        last.inputs = [base, _constant(shift if scale is None else scale, base.dtype)]

    def fold_scale(self, node: Node) -> None:
        """conv(x, w) * s → conv(x, w * s), and conv(x * s, w) → conv(x, s * w); the same for products."""
        if node.op == "multiply" and node.inputs[1].is_constant and self.uses[node.inputs[0]] == 1:
            anchor = node.inputs[0].node
            if (
                anchor is not None
                and not anchor.helpers
                and self.together(node, anchor)
                and _scales_outputs(anchor, node.inputs[1])
                and anchor.output.same_type(node.output)
            ):
                node.op, node.attrs, node.inputs = anchor.op, anchor.attrs, anchor.inputs
        elif node.op in _CONVOLUTIONS or node.op == "matmul":
            product = node.inputs[0].node
            if (
                product is not None
                and product.op == "multiply"
                and product.inputs[1].is_constant
                and not product.helpers
                and self.uses[node.inputs[0]] == 1
                and self.together(node, product)
                and _scales_inputs(node, product.inputs[1])
                and product.inputs[0].same_type(product.output)
            ):
                node.inputs = [product.inputs[0], node.inputs[1]]

    def simplify_bias(self, node: Node) -> None:
        """A bias behind a convolution is [1, C, 1, 1] and stands on the right; behind a product [N]."""
        if node.op != "add":
            return
        data, bias = node.inputs
        if data.is_constant and not bias.is_constant:
            data, bias = bias, data
        anchor = data.node
        if not bias.is_constant or anchor is None or not node.output.same_type(data):
            return
        shape = data.shape
        if anchor.op in _CONVOLUTIONS | _TRANSPOSED:
            axis = str(anchor.attrs.get("out_layout") or anchor.attrs["data_layout"]).index("C")
            wanted = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        elif anchor.op == "matmul":
            axis, wanted = len(shape) - 1, shape[-1:]
        else:
            return
        aligned = (1,) * (len(shape) - len(bias.shape)) + bias.shape
        if any(n != 1 for i, n in enumerate(aligned) if i != axis):
            return
        array = None if bias.array is None else np.broadcast_to(bias.array.reshape(-1), shape[axis])
        numbers = None if array is None else array.reshape(wanted)
        node.inputs = [data, Value(wanted, bias.dtype, is_constant=True, data=numbers)]


def _step(node: Node | None) -> _Step | None:
    """Read an operator as a scale or a shift by a constant."""
    if node is None or node.op not in _SCALING:
        return None
    if node.op == "negative":
        step = _Step(node, node.inputs[0], np.float64(-1.0), None)
    else:
        left, right = node.inputs
        if left.is_constant == right.is_constant:
            return None
        base, constant = (left, right) if right.is_constant else (right, left)
        if constant.array is None or "float" not in base.dtype:
            return None
        step = _scale_or_shift(node, base, constant.array.astype(np.float64), right.is_constant)
    fits = step is not None and "float" in step.base.dtype and step.base.same_type(node.output)
    return step if fits else None


def _scale_or_shift(node: Node, base: Value, number: np.ndarray, on_right: bool) -> _Step | None:
    with np.errstate(all="ignore"):
        if node.op == "add":
            return _Step(node, base, None, number)
        if node.op == "multiply":
            return _Step(node, base, number, None)
        if node.op == "subtract":
            return _Step(node, base, None, -number) if on_right else _Step(
                node, base, np.float64(-1.0), number
            )  # fmt: skip
        return _Step(node, base, 1.0 / number, None) if on_right else None


def _merged(chain: list[_Step]) -> tuple[np.ndarray | None, np.ndarray | None] | None:
    """Scale and shift of a chain, innermost step first; None where they are not finite."""
    scale = shift = None
    with np.errstate(all="ignore"):
        for step in chain:
            if step.scale is not None:
                scale = step.scale if scale is None else scale * step.scale
                shift = None if shift is None else shift * step.scale
            if step.shift is not None:
                shift = step.shift if shift is None else shift + step.shift
        dtype = chain[0].base.dtype
        rounded = [_constant(a, dtype).array for a in (scale, shift) if a is not None]
    return (scale, shift) if all(np.isfinite(a).all() for a in rounded) else None


def _wants_rewrite(node: Node) -> bool:
    """Whether a constant stands on the left, or is subtracted."""
    if node.op in ("add", "multiply"):
        return node.inputs[0].is_constant
    return node.op == "subtract" and node.inputs[1].is_constant


def _constant(array: Any, dtype: str) -> Value:
    # numpy has no bfloat16; float32 has its range.
    array = np.asarray(array).astype("float32" if dtype == "bfloat16" else dtype)
    return Value(array.shape, dtype, is_constant=True, data=array)


def _scales_outputs(anchor: Node, scale: Value) -> bool:
    """Whether the numbers of a scale belong to the output channels of an anchor with a constant weight."""
    if (
        anchor.op not in _CONVOLUTIONS | _TRANSPOSED | {"matmul"}
        or not anchor.inputs[1].is_constant
    ):
        return False
    rank, weight = len(anchor.output.shape), anchor.inputs[1]
    if anchor.op == "matmul":
        return len(weight.shape) >= 2 and _is_along(scale, rank, rank - 1)
    layout = str(anchor.attrs.get("out_layout") or anchor.attrs["data_layout"])
    fits = len(str(anchor.attrs["kernel_layout"])) == len(weight.shape) and len(layout) == rank
    return fits and weight.dtype == scale.dtype and _is_along(scale, rank, layout.index("C"))


def _scales_inputs(anchor: Node, scale: Value) -> bool:
    """Whether the numbers of a scale belong to the input channels of an anchor with a constant weight."""
    data, weight = anchor.inputs
    if not weight.is_constant or weight.dtype != scale.dtype:
        return False
    rank = len(data.shape)
    if anchor.op == "matmul":
        return len(weight.shape) >= 2 and _is_along(scale, rank, rank - 1)
    layout, kernel = str(anchor.attrs["data_layout"]), str(anchor.attrs["kernel_layout"])
    if len(kernel) != len(weight.shape) or len(layout) != rank:
        return False
    if not _is_along(scale, rank, layout.index("C")):
        return False
    return int(np.prod(scale.shape)) <= 1 or int(anchor.attrs["groups"]) == 1


def _is_along(scale: Value, rank: int, axis: int) -> bool:
    """Whether a constant, as an operand of a tensor of this rank, varies along one axis alone."""
    aligned = (1,) * (rank - len(scale.shape)) + scale.shape
    return len(aligned) == rank and all(n == 1 for i, n in enumerate(aligned) if i != axis)
