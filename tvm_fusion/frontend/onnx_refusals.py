"""Legal ONNX that TVM 0.27 imports with another meaning: refused by name, not imported wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedOperatorError

if TYPE_CHECKING:
    import onnx

#: Sizes closer than this to a whole number count as whole: scales are stored as float32.
_WHOLE = 1e-4


def refuse_fractional_resize(graph: onnx.GraphProto) -> None:
    """Refuse a Resize or Upsample by scales that do not give whole sizes.

    ONNX maps coordinates by the given scale, TVM by the ratio of the rounded sizes. With aligned
    corners both use the sizes.

    Parameters
    ----------
    graph : GraphProto
        A graph with inferred shapes.

    Raises
    ------
    UnsupportedOperatorError
        Naming the node and the size.
    """
    import onnx.numpy_helper

    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            stored.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {value.name: value.type.tensor_type for value in values}
    for node in graph.node:
        place = {"Resize": 2, "Upsample": 1}.get(node.op_type)
        if place is None or len(node.input) <= place or node.input[place] not in stored:
            continue
        modes = {a.name: a.s for a in node.attribute}
        if modes.get("coordinate_transformation_mode") == b"align_corners":
            continue
        scales = onnx.numpy_helper.to_array(stored[node.input[place]])
        extents = (
            [d.dim_value for d in types[node.input[0]].shape.dim] if node.input[0] in types else []
        )
        for extent, scale in zip(extents, scales.tolist(), strict=False):
            size = extent * scale
            if extent and abs(size - round(size)) > _WHOLE * max(size, 1):
                raise UnsupportedOperatorError(
                    f"operator {node.op_type} (node {node.name!r}) scales {extent} by {scale:g} to {size:g}, which "
                    "is not whole and which TVM would compute otherwise; export it with sizes"
                )
