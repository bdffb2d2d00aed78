"""The child process in which ONNX's checker, shape inference and simplifier see an untrusted graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .child import serve

if TYPE_CHECKING:
    import onnx


def main() -> None:
    """Serve one request: {"stage": "check" or "simplify", "fold_bytes": int}, with a ModelProto as data."""
    serve(_step)


def _step(request: dict[str, Any], data: bytes) -> bytes:
    import onnx

    model = onnx.load_model_from_string(data)
    if request["stage"] == "check":
        return _check(model).SerializeToString()
    import onnxsim

    # Without "optimization" the nodes keep their names and no batch norm is fused: that is our
    # passes' work.
    simplified, _ = onnxsim.simplify(
        model,
        perform_optimization=False,
        tensor_size_threshold=f"{request['fold_bytes'] // 1024}KB",
    )
    return simplified.SerializeToString()


def _check(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    if not all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        # The checker wants shapes of outputs, which exporters may leave out.
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    onnx.checker.check_model(model)
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
