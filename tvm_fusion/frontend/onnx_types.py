"""Types that ONNX infers for values, against those of what TVM's converters make: what disagrees is no import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..compat import BlockBuilder, ir, relax

if TYPE_CHECKING:
    import onnx


class InferredTypes:
    """Element types and sizes of a graph's values, as far as ONNX knows them.

    Parameters
    ----------
    graph : GraphProto
        A graph with inferred shapes.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        values = (*graph.value_info, *graph.output)
        self._types = {v.name: v.type.tensor_type for v in values if v.type.HasField("tensor_type")}

    def agreeing(self, builder: BlockBuilder, result: ir.Expr, name: str) -> ir.Expr:
        """Return what a converter made for the value ``name`` in the type that ONNX infers.

        Integers of another width are cast. Another rank or another kind of numbers mean that the converter computes
        something else. Sizes are not compared: ONNX's inference miscounts windows with ``ceil_mode``.

        Raises
        ------
        NotImplementedError
            If they disagree otherwise.
        """
        import onnx.helper

        known, ty = self._types.get(name), getattr(result, "ty", None)
        if known is None or not isinstance(ty, relax.TensorType):
            return result
        if known.HasField("shape") and ty.ndim not in (-1, len(known.shape.dim)):
            raise NotImplementedError(
                f"TVM's result is of rank {ty.ndim}, ONNX's of rank {len(known.shape.dim)}"
            )
        if not known.elem_type or ty.dtype is None:
            return result
        wanted, got = (
            onnx.helper.tensor_dtype_to_np_dtype(known.elem_type).name,
            str(ty.dtype),
        )
        if wanted == got:
            return result
        if "int" in wanted and "int" in got:
            return builder.emit(relax.op.astype(result, wanted))
        raise NotImplementedError(f"TVM's result is of type {got}, ONNX's of {wanted}")
