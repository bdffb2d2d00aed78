"""Operators that ONNX itself defines by others, written out by that definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

#: Operators that TVM 0.27 lacks or imports otherwise.
EXPANDED = (
    "Attention", "BlackmanWindow", "CausalConvWithState", "CenterCropPad", "HammingWindow", "HannWindow",
    "LinearAttention", "NegativeLogLikelihoodLoss", "RotaryEmbedding",
    "SoftmaxCrossEntropyLoss", "SwiGLU", "Swish",
)  # fmt: skip

_DOMAIN = "tvm_fusion.expanded"


def expand_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` with its functions, and the operators in ``EXPANDED``, replaced by their bodies.

    Parameters
    ----------
    model : ModelProto
        A model with inferred types; it may be changed.
    """
    import onnx.inliner

    for _ in range(4):  # bodies hold such operators, too
        opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
        nodes = [
            n for n in model.graph.node if n.domain in ("", "ai.onnx") and n.op_type in EXPANDED
        ]
        if not nodes and not model.functions:
            break
        types = {
            v.name: v.type
            for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)
        }
        for tensor in model.graph.initializer:
            types.setdefault(
                tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            )
        for node in nodes:
            state_defaults(node, model)
        plain = []
        for number, node in enumerate(nodes):
            body = _body_for(node, types, opset)
            if body is None:
                plain.append(("", node.op_type))
                continue
            body.name, body.domain = f"{node.op_type}_{number}", _DOMAIN
            node.op_type, node.domain = body.name, _DOMAIN
            model.functions.append(body)
        if model.functions:
            if any(function.domain == _DOMAIN for function in model.functions):
                model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
            model = onnx.inliner.inline_local_functions(model)
            kept = [o for o in model.opset_import if o.domain != _DOMAIN]
            del model.opset_import[:]
            model.opset_import.extend(kept)
        if plain:
            model = onnx.inliner.inline_selected_functions(
                model, plain, exclude=False, inline_schema_functions=True
            )
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


def state_defaults(node: onnx.NodeProto, model: onnx.ModelProto) -> None:
    """Give a node that has a body the attributes that it leaves to their defaults: the body refers to them."""
    import onnx

    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset, ""):
        return
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    # ONNX's shape inference of STFT reads an attribute as false that is true by default.
    if not (schema.has_function or schema.has_context_dependent_function or node.op_type == "STFT"):
        return
    stated = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in stated and attribute.default_value.name:
            node.attribute.append(attribute.default_value)


def _body_for(
    node: onnx.NodeProto, types: dict[str, onnx.TypeProto], opset: int
) -> onnx.FunctionProto | None:
    """Return the body of a node whose definition depends on its attributes and types; None for others.

    ``onnx.inliner`` writes such nodes out itself, unless an optional operand is left out.
    """
    import onnx

    schema = onnx.defs.get_schema(node.op_type, opset, "")
    if not schema.has_context_dependent_function:
        return None
    version = max(
        (v for v in schema.context_dependent_function_opset_versions if v <= opset), default=None
    )
    if version is None:
        return None
    given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
    data = schema.get_context_dependent_function_with_opset_version(
        version, node.SerializeToString(), given
    )
    if not data:
        return None
    body = onnx.FunctionProto.FromString(data)
    del body.opset_import[:]  # the inliner leaves alone what is of another opset than the model
    body.opset_import.append(onnx.helper.make_opsetid("", opset))
    return body
