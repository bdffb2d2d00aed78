"""TVM's torch.export importer, with bindings named after fx nodes and with errors that name the node."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import fx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..compat import BlockBuilder, ir, relax, silent_native, tvm
from ..errors import UnsupportedOperatorError
from .canonical.constants import to_constant
from .canonical.rewrite import op_name, with_attrs
from .naming import NodeNames, abandon
from .onnx_native import first_line

#: What TVM's converters raise on a node that they cannot take: there is no common base class.
_CONVERTER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


def import_program(program: torch.export.ExportedProgram) -> tvm.IRModule:
    """Return the Relax module of a program, weights bound, bindings named after the program's own nodes.

    Raises
    ------
    UnsupportedOperatorError
        If a node cannot be converted; the message names operator and node.
    """
    importer = _NamedImporter()
    with silent_native(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch deprecates its own internals while decomposing
        if all(tensor.layout is torch.strided for tensor in program.state_dict.values()):
            program = program.run_decompositions()
        importer.refuse_unknown(program.graph)
        try:
            mod = importer.from_exported_program(program, False, True, False, None)
        except _CONVERTER_ERRORS as error:
            if importer.block_builder is not None:
                abandon(importer.block_builder)
            reason = first_line(str(error)) or type(error).__name__
            raise UnsupportedOperatorError(
                f"{importer.where} cannot be imported: {reason}"
            ) from error
    return importer.names.apply(mod)


class _TypedBuilder(BlockBuilder):
    """Lets convolutions and matmuls deduce their dtype: TVM 0.27 asks for float32, whatever the program's dtype is."""

    def emit(self, expr: ir.Expr, name_hint: str = "") -> relax.Var:
        if isinstance(expr, ir.Call) and (op_name(expr) or "").startswith(("nn.conv", "matmul")):
            expr = with_attrs(expr, out_dtype=None)
        return super().emit(expr, name_hint)


class _NamedImporter(ExportedProgramImporter):
    """Marks the result of every converted node, and copies weights instead of sharing torch's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names = NodeNames()
        self.where = "the program"
        # TVM's own converter drops two of the operator's three factors, which SELU sets.
        self.convert_map["elu.default"] = self._elu
        # TVM's own converter fails without weights.
        self.convert_map["native_group_norm.default"] = self._group_norm_with_weights
        self.convert_map = {
            name: self._marking(convert) for name, convert in self.convert_map.items()
        }

    @property
    def block_builder(self) -> BlockBuilder | None:
        """The builder; the base class sets a plain one for each program."""
        return self._builder

    @block_builder.setter
    def block_builder(self, builder: BlockBuilder | None) -> None:
        self._builder = None if builder is None else _TypedBuilder()

    def refuse_unknown(self, graph: fx.Graph) -> None:
        """Raise UnsupportedOperatorError naming every node that has no converter."""
        missing = [
            f"{node.target.__name__} (node {source_name(node)!r})"
            for node in graph.nodes
            if node.op == "call_function" and node.target.__name__ not in self.convert_map
        ]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UnsupportedOperatorError(
                f"the program uses operators that cannot be imported: {', '.join(missing[:5])}{more}"
            )

    def _elu(self, node: fx.Node) -> relax.Expr:
        """``scale * (max(0, x) + min(0, alpha * (exp(x * input_scale) - 1)))``, as ATen defines it."""
        x = self.retrieve_args(node)[0]
        given = {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}
        given.update(zip(given, node.args[1:], strict=False))
        given.update({key: value for key, value in node.kwargs.items() if key in given})
        alpha, scale, input_scale = (
            relax.const(float(value), str(x.ty.dtype)) for value in given.values()
        )
        emit, op = self.block_builder.emit, relax.op
        one, zero = relax.const(1.0, str(x.ty.dtype)), relax.const(0.0, str(x.ty.dtype))
        grown = emit(op.exp(x if given["input_scale"] == 1 else emit(op.multiply(x, input_scale))))
        below = emit(op.multiply(emit(op.subtract(grown, one)), alpha))
        value = emit(op.add(emit(op.nn.relu(x)), emit(op.minimum(below, zero))))
        return value if given["scale"] == 1 else emit(op.multiply(value, scale))

    def _group_norm_with_weights(self, node: fx.Node) -> relax.Expr:
        """``native_group_norm(x, weight, bias, N, C, HxW, group, eps)``, ones and zeros where weights are None."""
        x, gamma, beta, _, channels, _, groups, epsilon = self.retrieve_args(node)
        dtype = str(x.ty.dtype)
        if gamma is None:
            gamma = to_constant(np.ones(int(channels), "float32"), dtype)
        if beta is None:
            beta = to_constant(np.zeros(int(channels), "float32"), dtype)
        axes = list(range(2, int(x.ty.ndim)))
        norm = relax.op.nn.group_norm(
            x, gamma, beta, num_groups=groups, channel_axis=1, axes=axes, epsilon=epsilon
        )
        return self.block_builder.emit(norm)

    def _marking(self, convert: Callable[[fx.Node], object]) -> Callable[[fx.Node], object]:
        def converted(node: fx.Node) -> object:
            name = source_name(node)
            self.where = f"operator {getattr(node.target, '__name__', node.target)} (node {name!r})"
            result = convert(node)
            if isinstance(result, ir.Expr):
                return self.names.mark(self.block_builder, result, name)
            if isinstance(result, tuple | list):
                marked = [
                    self.names.mark(self.block_builder, item, name)
                    if isinstance(item, ir.Expr)
                    else item
                    for item in result
                ]
                return type(result)(marked)
            return result

        return converted

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor_value: torch.Tensor) -> tvm.runtime.Tensor:
        dense = tensor_value if tensor_value.layout is torch.strided else tensor_value.to_dense()
        dense = dense.detach().cpu().contiguous()
        if dense.dtype is torch.bfloat16:  # numpy knows no bfloat16; the bits are the same
            import ml_dtypes

            return tvm.runtime.tensor(dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return tvm.runtime.tensor(dense.numpy())


def source_name(node: fx.Node) -> str:
    """Return the name that ``node`` had before decomposition ("conv2d", not "convolution")."""
    sources = node.meta.get("from_node") or []
    return sources[0].name if sources else node.name
