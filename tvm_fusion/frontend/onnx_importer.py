"""TVM's ONNX importer, with bindings named after the model's own nodes and with errors that name the node."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compat import ir, relax, silent_native, tvm
from ..errors import InvalidModelError, UnsupportedOperatorError
from .canonical.constants import to_constant
from .naming import NodeNames, abandon
from .onnx_native import first_line
from .onnx_types import InferredTypes
from .operator_builder import OperatorBuilder

if TYPE_CHECKING:
    import onnx

#: What TVM's converters raise on a model that they cannot take: there is no common base class.
_CONVERTER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip

#: Dtypes that ONNX stores as numpy does.
_PLAIN_DTYPES = {
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip


def known_operators() -> set[str]:
    """Return the names of the operators that TVM converts."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    return {*_get_convert_map(), "Constant"}


def import_graph(
    graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto], opset: int
) -> tvm.IRModule:
    """Return the Relax module of a prepared graph.

    Parameters
    ----------
    graph : GraphProto
        The graph; every node has a name. Inputs named in ``weights`` stand for those tensors.
    weights : mapping of name to TensorProto
        Initializers kept apart from the graph.
    opset : int
        The opset of the default domain.

    Raises
    ------
    UnsupportedOperatorError
        If a converter refuses its node; the message names operator and node.
    """
    importer = _importer_class()(graph, weights)
    # TVM prints the failing operator's operands and warns of what onnx.checker said: neither is for
    # the user.
    with silent_native(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            mod = importer.from_onnx(graph, opset)
        except _CONVERTER_ERRORS as error:
            abandon(importer.bb)
            reason = first_line(str(error)) or type(error).__name__
            raise UnsupportedOperatorError(
                f"{importer.where()} cannot be imported: {reason}"
            ) from error
    return importer.names.apply(mod)


def _importer_class() -> type:
    """Return the importer; made on demand because TVM's frontend imports onnx."""
    from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

    class NamedImporter(ONNXGraphImporter):
        """Binds each node's results to variables of its own, which tell the node's bindings from the next one's."""

        def __init__(self, graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto]) -> None:
            super().__init__(None, None, sanitize=False)
            self.bb = OperatorBuilder()
            self._types = InferredTypes(graph)
            self._outputs = iter([list(node.output) for node in graph.node])
            self._weights = weights
            self._node: tuple[str, str] | None = None
            self.names = NodeNames()

        def where(self) -> str:
            """Return the place of an error."""
            return (
                "the model" if self._node is None else "operator {} (node {!r})".format(*self._node)
            )

        def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
            for name, tensor in [*((t.name, t) for t in graph.initializer), *self._weights.items()]:
                self._nodes[name] = to_constant(tensor_array(name, tensor))

        def _convert_operator(
            self, op_name: str, inputs: list[ir.Expr], attrs: dict[str, Any], opset: int
        ) -> ir.Expr:
            name = attrs["tvm_custom"]["name"]
            self._node = (op_name, name)
            outputs = next(self._outputs)  # the base class asks for one node after the other
            result = super()._convert_operator(op_name, inputs, attrs, opset)
            if not isinstance(result, ir.Expr):
                return result
            result = self.bb.normalize(result) if isinstance(result, ir.Call) else result
            if isinstance(result.ty, ir.TupleType) and not isinstance(result, relax.Tuple):
                # Unpacked here, where the node is known; the base class would do it after this
                # method.
                whole = self.names.mark(self.bb, result, name)
                result = relax.Tuple(
                    [relax.TupleGetItem(whole, i) for i in range(len(result.ty.fields))]
                )
            if isinstance(result, relax.Tuple):
                fields = [self.bb.emit(field) for field in result.fields]
                named = zip(fields, outputs, strict=False)
                agreed = [self._types.agreeing(self.bb, *pair) for pair in named]
                result = relax.Tuple([*agreed, *fields[len(agreed) :]])
            else:
                result = self._types.agreeing(self.bb, result, outputs[0])
            return self.names.mark(self.bb, result, name)

    return NamedImporter


def tensor_array(name: str, tensor: onnx.TensorProto) -> np.ndarray:
    """Return the value of an initializer.

    Raises
    ------
    InvalidModelError
        If the data does not have the size that the shape asks for.
    """
    import onnx.helper
    import onnx.numpy_helper

    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if (
            tensor.HasField("raw_data")
            and sys.byteorder == "little"
            and dtype.name in _PLAIN_DTYPES
        ):
            return np.frombuffer(tensor.raw_data, dtype).reshape(
                tuple(tensor.dims)
            )  # to_array would copy once more
        return onnx.numpy_helper.to_array(tensor).reshape(tuple(tensor.dims))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModelError(
            f"initializer {name!r} of shape {list(tensor.dims)} does not hold the data that it claims, the file is "
            f"damaged: {first_line(str(error))}"
        ) from None
