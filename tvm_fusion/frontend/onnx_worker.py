"""The child process in which ONNX's checker, shape inference and simplifier see an untrusted graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .child import serve
from .onnx_control_flow import resolve_control_flow
from .onnx_functions import EXPANDED, expand_functions, state_defaults

if TYPE_CHECKING:
    import onnx

#: Control flow inside control flow is resolved to this depth.
MAX_DEPTH = 8


def main() -> None:
    """Serve one request: {"stage": "infer", "check" or "simplify", "fold_bytes": int}, with a ModelProto as data."""
    serve(answer)


def answer(request: dict[str, Any], data: bytes) -> bytes:
    """Carry out one request."""
    import onnx

    model = onnx.load_model_from_string(data)
    if request["stage"] == "infer":
        return onnx.shape_inference.infer_shapes(model, data_prop=True).SerializeToString()
    if request["stage"] == "check":
        return _check(model).SerializeToString()
    return _simplify(model, request["fold_bytes"]).SerializeToString()


def _simplify(model: onnx.ModelProto, fold_bytes: int) -> onnx.ModelProto:
    import onnx
    import onnxsim

    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    for depth in range(MAX_DEPTH):
        # Before the simplifier, which refuses outputs without a shape, as those of loops are.
        resolved = 0
        while resolved < MAX_DEPTH and resolve_control_flow(model.graph, opset):
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
            resolved += 1
        if depth and not resolved:
            break
        # Without "optimization" the nodes keep their names and no batch norm is fused: that is our
        # passes' work.
        model, _ = onnxsim.simplify(
            model, perform_optimization=False, tensor_size_threshold=f"{fold_bytes // 1024}KB"
        )
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


def _with_output_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model for the checker: it wants types and shapes of outputs, of loops too, but does not read them."""
    import onnx

    missing = [v for v in model.graph.output if not v.type.tensor_type.HasField("shape")]
    if not missing:
        return model
    copy = type(model)()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        # Inference knows nothing of what comes from functions that are not written out yet.
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return copy


def _check(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    for node in model.graph.node:  # before the first inference, which reads them
        state_defaults(node, model)
    if not all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        # The checker wants shapes of outputs, which exporters may leave out.
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        if any(value.type.WhichOneof("value") is None for value in model.graph.output):
            # The checker would only say that; inference says which node it does not understand.
            onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    onnx.checker.check_model(_with_output_types(model))
    if model.functions or any(node.op_type in EXPANDED for node in model.graph.node):
        model = expand_functions(onnx.shape_inference.infer_shapes(model, data_prop=True))
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
