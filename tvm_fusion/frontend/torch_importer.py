"""TVM's torch.export importer, with bindings named after fx nodes and with errors that name the node."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import torch
from torch import fx
from torch._ops import OpOverload
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..compat import BlockBuilder, ir, relax, silent_native, tvm
from .canonical.rewrite import op_name, with_attrs
from .naming import NodeNames, abandon
from .onnx_native import first_line
from .torch_arguments import Refusal
from .torch_converters import bound_converters
from .torch_program import (
    NotConverted,
    agreeing,
    decomposed,
    decomposed_further,
    of_tensors,
    operators_of,
    source_name,
)
from .torch_special_sizes import as_vector, constant_result

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
    with silent_native(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch deprecates its own internals while decomposing
        program = decomposed(program)
        own = operators_of(program)
        tried: set[OpOverload] = set()
        while True:
            try:
                return _converted(program)
            except NotConverted as error:
                if error.operators <= own:
                    cause = error  # its message has the name that the program has
                smaller = None
                if error.operators and not error.operators & tried:
                    smaller = decomposed_further(program, error.operators)
                if smaller is None:
                    raise cause from None
                program, tried = smaller, tried | error.operators


def _converted(program: torch.export.ExportedProgram) -> tvm.IRModule:
    importer = _NamedImporter()
    importer.refuse_unknown(program.graph)
    try:
        mod = importer.from_exported_program(of_tensors(program), False, True, False, None)
    except _CONVERTER_ERRORS as error:
        if importer.block_builder is not None:
            abandon(importer.block_builder)
        reason = first_line(str(error)) or type(error).__name__
        operator = None if isinstance(error, Refusal) else importer.operator
        raise NotConverted(f"{importer.where} cannot be imported: {reason}", [operator]) from error
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
        #: What is being converted.
        self.operator: OpOverload | None = None
        self.stock = dict(self.convert_map)
        self.convert_map.update(bound_converters(self))
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
        """Raise NotConverted naming every node that has no converter."""
        missing = [
            node
            for node in graph.nodes
            if node.op == "call_function" and node.target.__name__ not in self.convert_map
        ]
        if missing:
            names = [f"{node.target.__name__} (node {source_name(node)!r})" for node in missing]
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise NotConverted(
                f"the program uses operators that cannot be imported: {', '.join(names[:5])}{more}",
                [node.target for node in missing],
            )

    def _marking(self, convert: Callable[[fx.Node], object]) -> Callable[[fx.Node], object]:
        def converted(node: fx.Node) -> object:
            name = source_name(node)
            self.where = f"operator {getattr(node.target, '__name__', node.target)} (node {name!r})"
            self.operator = node.target if isinstance(node.target, OpOverload) else None
            result = constant_result(self.block_builder, node)
            if result is None:
                result = agreeing(self.block_builder, as_vector(self, convert, node), node)
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
