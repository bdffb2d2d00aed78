"""Import of ONNX models: from a file or a ModelProto to the canonical Relax module."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compat import tvm
from ..errors import FusionError, InvalidModelError
from . import (
    child,
    onnx_contrib,
    onnx_graph,
    onnx_native,
    onnx_refusals,
    onnx_rewrites,
    onnx_shapes,
)
from .canonical import canonicalize
from .canonical.constants import MAX_FOLDED_BYTES
from .onnx_editor import Editor
from .onnx_rules import RULES

if TYPE_CHECKING:
    import onnx

_LOGGER = logging.getLogger(__name__)

#: Operators that canonicalisation evaluates by itself when their operands are constants.
_FOLDED_LATER = {
    "Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Expand", "Identity", "Mul", "Reshape", "Split",
    "Squeeze", "Sub", "Transpose", "Unsqueeze",
}  # fmt: skip

#: Operands (from the given position on) that TVM wants as constants: shapes, axes, repeats, scales.
_CONSTANT_OPERANDS = {
    "ConstantOfShape": 0, "CumSum": 1, "Expand": 1, "If": 0, "Loop": 0, "OneHot": 1, "Pad": 1, "Range": 0,
    "ReduceL1": 1, "ReduceL2": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceMin": 1, "ReduceProd": 1, "ReduceSum": 1,
    "Reshape": 1, "Resize": 1, "Scan": 0, "Slice": 1, "Split": 1, "Squeeze": 1, "Tile": 1, "TopK": 1, "Unsqueeze": 1,
    "Upsample": 1,
}  # fmt: skip


def load(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Import an ONNX model as a canonical Relax module.

    Parameters
    ----------
    model : path or ModelProto
        The model. A path may refer to external weight files beside it.
    shape : mapping of input name to sizes, optional
        Sizes of inputs with symbolic or missing dimensions. Dimensions that stay open remain
        symbolic.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.

    Returns
    -------
    IRModule
        One function ``main`` with the model's inputs, under their own names, as parameters;
        bindings carry the names of the model's nodes.

    Raises
    ------
    InvalidModelError
        If the file is missing, truncated or not a legal model.
    UnsupportedOperatorError
        If an operator cannot be imported; the message names it and its node.
    ValueError
        If ``shape`` does not fit the model's inputs.
    """
    try:
        import onnx
    except ImportError:
        raise FusionError(
            "importing ONNX models needs the onnx package: pip install 'tvm_fusion[onnx]'"
        ) from None
    proto = model if isinstance(model, onnx.ModelProto) else _read(Path(model))
    try:
        return canonicalize(_import(proto, shape), dtype)
    except UnicodeDecodeError:  # protobuf decodes names when they are read
        raise InvalidModelError(
            "the model has names that are not text: the file is damaged"
        ) from None
    except MemoryError as error:  # a size of 2**40 in a damaged file
        raise InvalidModelError(
            f"the model asks for more memory than there is: {error}; its sizes may be wrong"
        ) from None


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise InvalidModelError(f"the model file {str(path)!r} does not exist")
    try:
        if path.stat().st_size == 0:
            raise InvalidModelError(f"the model file {str(path)!r} is empty")
        return onnx.load(str(path))
    except (DecodeError, UnicodeDecodeError):
        raise InvalidModelError(f"{str(path)!r} is not an ONNX model, or it is truncated") from None
    except (OSError, onnx.checker.ValidationError, ValueError) as error:
        reason = onnx_native.first_line(str(error))
        raise InvalidModelError(f"the model file {str(path)!r} cannot be read: {reason}") from None


def _import(model: onnx.ModelProto, shape: Mapping[str, Sequence[int]] | None) -> tvm.IRModule:
    from .onnx_importer import import_graph, known_operators

    if not model.HasField("graph") or not model.graph.output:
        raise InvalidModelError(
            "the model has no graph or no output: the file is truncated or not an ONNX model"
        )
    onnx_graph.require_text(model.graph)
    skeleton, weights = onnx_graph.split_weights(model)
    onnx_graph.fix_dimensions(skeleton.graph, weights, shape)
    onnx_graph.name_nodes(skeleton.graph)
    opset = next((o.version for o in skeleton.opset_import if o.domain in ("", "ai.onnx")), 1)
    skeleton = onnx_contrib.write_out(skeleton, opset)
    local = {function.name for function in skeleton.functions}
    onnx_graph.refuse_unknown_operators(skeleton.graph, opset, local=local)
    onnx_refusals.refuse_undefined_attributes(skeleton.graph)  # before functions are written out
    skeleton = onnx_shapes.fold_shapes(onnx_native.check_and_infer(skeleton))
    if _needs_simplifier(skeleton.graph, weights):
        skeleton = _simplify(skeleton)
    graph = skeleton.graph
    onnx_graph.name_nodes(graph)
    onnx_rewrites.store_empty_results(graph)
    onnx_rewrites.settle_reshapes(graph)
    onnx_rewrites.store_constants(graph)
    onnx_refusals.refuse_types(graph, weights)
    onnx_refusals.refuse_missing_operands(graph, opset)
    onnx_refusals.refuse_computed_settings(graph, weights)
    Editor(graph, weights, opset).apply(RULES)
    onnx_graph.refuse_unknown_operators(graph, opset, known=known_operators())
    _bound_computed_constants(graph, weights)
    onnx_rewrites.split_sums(graph)
    return import_graph(graph, weights, opset)


def _simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the simplified model, or the model as it is when the simplifier does not manage."""
    try:
        simplified = onnx_native.simplify(model)
    except child.ChildFailure as error:
        _LOGGER.warning("the ONNX simplifier was left out: %s", error)
        return model
    try:
        return onnx_native.check_and_infer(simplified)
    except InvalidModelError as error:  # the model was valid before
        _LOGGER.warning("the ONNX simplifier was left out, its result is wrong: %s", error)
        return model


def _constant_values(
    graph: onnx.GraphProto, weights: Mapping[str, object]
) -> tuple[set[str], list[onnx.NodeProto]]:
    """Return the names of values that depend on no input, and the nodes that compute them."""
    constant = {tensor.name for tensor in graph.initializer} | set(weights) | {""}
    nodes = []
    for node in graph.node:
        if all(name in constant for name in node.input) and not node.op_type.startswith("Random"):
            constant.update(node.output)
            nodes.append(node)
    return constant, nodes


def _needs_simplifier(graph: onnx.GraphProto, weights: Mapping[str, object]) -> bool:
    """Return whether the graph computes shapes, or constants that canonicalisation does not evaluate.

    Importing the simplifier takes 2 s, so that models that need none of it (most exports of vision
    networks with static shapes) are spared it.
    """
    stored = {tensor.name for tensor in graph.initializer} | {""}
    stored.update(
        output for node in graph.node if node.op_type == "Constant" for output in node.output
    )
    _, computed = _constant_values(graph, weights)
    if any(node.op_type not in _FOLDED_LATER for node in computed):
        return True
    for node in graph.node:
        first = _CONSTANT_OPERANDS.get(node.op_type)
        if node.op_type == "Shape" or (
            first is not None and any(name not in stored for name in node.input[first:])
        ):
            return True
    return False


def _bound_computed_constants(graph: onnx.GraphProto, weights: Mapping[str, object]) -> None:
    """Refuse graphs whose constant nodes (ConstantOfShape, Expand, ...) ask for more memory than is sensible."""
    import onnx

    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
    total = 0
    for node in _constant_values(graph, weights)[1]:
        for name in node.output:
            if name not in types or node.op_type == "Constant":
                continue
            size = (
                onnx.helper.tensor_dtype_to_np_dtype(types[name].elem_type).itemsize
                if types[name].elem_type
                else 4
            )
            for dim in types[name].shape.dim:
                size *= max(dim.dim_value, 1)
            total += size
            if total > MAX_FOLDED_BYTES:
                raise InvalidModelError(
                    f"the constants that the model computes take more than {MAX_FOLDED_BYTES} bytes (node "
                    f"{node.name!r}): store them as initializers or correct their shapes"
                )
