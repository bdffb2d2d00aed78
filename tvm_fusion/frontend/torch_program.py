"""What a ``torch.export`` program needs before, and is checked for while, its operators are converted."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    OutputKind,
    TensorArgument,
)

from ..compat import BlockBuilder, ir, relax, tirx
from ..errors import UnsupportedOperatorError
from .onnx_native import first_line
from .torch_arguments import dtype_name, in_dtype

#: What torch raises while it traces a program again: there is no common base class.
TRACE_ERRORS = (
    RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, NotImplementedError,
)  # fmt: skip

#: What changes besides the results, by the kind of output that says so.
_CHANGES = {
    OutputKind.BUFFER_MUTATION: "its buffer",
    OutputKind.USER_INPUT_MUTATION: "its input",
    OutputKind.PARAMETER_MUTATION: "its parameter",
}


class NotConverted(UnsupportedOperatorError):
    """A program with operators that cannot be converted as they are; smaller ones might.

    Parameters
    ----------
    message : str
        For the user.
    operators : sequence of OpOverload or other targets of nodes
        Those operators; None stands for one that nothing can be done about.
    """

    def __init__(self, message: str, operators: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.operators = frozenset(op for op in operators if op is not None)


def operators_of(program: torch.export.ExportedProgram) -> frozenset[Any]:
    """Return the targets that a program calls."""
    return frozenset(n.target for n in program.graph.nodes if n.op == "call_function")


def decomposed_further(
    program: torch.export.ExportedProgram, operators: Collection[Any]
) -> torch.export.ExportedProgram | None:
    """Return the program with some of ATen's core operators in terms of others, where PyTorch has such definitions.

    None if one of them has none, or torch cannot trace it.
    """
    from torch._decomp import decomposition_table

    if not all(op in decomposition_table for op in operators):
        return None
    try:
        smaller = program.run_decompositions({op: decomposition_table[op] for op in operators})
    except TRACE_ERRORS:
        return None
    return None if operators_of(smaller) & frozenset(operators) else smaller


def source_name(node: fx.Node) -> str:
    """Return the name that ``node`` had before decomposition ("conv2d", not "convolution")."""
    sources = node.meta.get("from_node") or []
    return sources[0].name if sources else node.name


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program in ATen's core operators.

    Raises
    ------
    UnsupportedOperatorError
        If the program changes state, or torch cannot decompose it.
    """
    if all(tensor.layout is torch.strided for tensor in program.state_dict.values()):
        try:
            program = program.run_decompositions()
        except TRACE_ERRORS:
            # Decomposed attention has other strides than the CPU's own kernel; a view of its result then fails.
            try:
                program = _with_reshapes(program).run_decompositions()
            except TRACE_ERRORS as error:
                raise UnsupportedOperatorError(
                    f"torch cannot decompose the program into core operators: {first_line(str(error))}"
                ) from error
    _refuse_state(program)
    _refuse_numbers(program)
    return program


def _refuse_state(program: torch.export.ExportedProgram) -> None:
    """A compiled model returns its results and keeps nothing: a program that writes would lose it in silence."""
    for spec in program.graph_signature.output_specs:
        if spec.kind in _CHANGES:
            raise UnsupportedOperatorError(
                f"the program changes {_CHANGES[spec.kind]} {spec.target!r}, which a compiled model cannot: export the "
                "module in evaluation mode (module.eval()), with state as inputs and outputs"
            )


def _refuse_numbers(program: torch.export.ExportedProgram) -> None:
    """Results that are no tensors have no place among a compiled model's."""
    for number, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind is OutputKind.USER_OUTPUT and not isinstance(spec.arg, TensorArgument):
            what = "a size" if spec.arg.name else repr(getattr(spec.arg, "value", spec.arg))
            raise UnsupportedOperatorError(
                f"output {number} of the program is {what}, not a tensor: return tensors only"
            )


def _with_reshapes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a copy, weights shared, whose views are reshapes: the same values, whatever the strides."""
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph))
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
    return program._update(module, program.graph_signature)


def of_tensors(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a copy, weights shared, without the inputs that are numbers or None: the program was exported for those.

    Raises
    ------
    UnsupportedOperatorError
        If one is a number that may vary.
    """
    signature = program.graph_signature
    gone = [spec.arg for spec in signature.input_specs if not isinstance(spec.arg, TensorArgument)]
    if not gone:
        return program
    for arg in gone:
        if not isinstance(arg, ConstantArgument):
            raise UnsupportedOperatorError(
                f"input {arg.name!r} of the program is not a tensor, and it varies: pass it as a tensor, or export the "
                "program for one value"
            )
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph))
    names = {arg.name for arg in gone}
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in names and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    kept = [spec for spec in signature.input_specs if spec.arg not in gone]
    return program._update(module, ExportGraphSignature(kept, signature.output_specs))


def with_shapes(
    program: torch.export.ExportedProgram, shape: Mapping[str, Sequence[int]]
) -> torch.export.ExportedProgram:
    """Return the program exported again for inputs of fixed sizes, weights shared.

    So no symbolic size is left to convert. The program itself where it has none.

    Parameters
    ----------
    program : ExportedProgram
        A program exported with ``torch.export.Dim``.
    shape : mapping of input name to sizes
        All sizes that are symbolic must follow from it.

    Raises
    ------
    ValueError
        If ``shape`` names an unknown input, contradicts a fixed size or the limits of a dimension, or leaves one open.
    UnsupportedOperatorError
        If torch cannot export it again.
    """
    inputs = _user_inputs(program)
    listing = "; the model's inputs are " + ", ".join(
        f"{name}={','.join(map(str, fake.shape))}" for name, fake in inputs.items()
    )
    for name, sizes in shape.items():
        if name not in inputs:
            raise ValueError(f"the model has no input {name!r}{listing}")
        if len(sizes) != inputs[name].ndim:
            raise ValueError(f"input {name!r} does not have {len(sizes)} dimensions{listing}")
    if not any(isinstance(size, torch.SymInt) for fake in inputs.values() for size in fake.shape):
        for name, sizes in shape.items():
            if list(sizes) != list(inputs[name].shape):
                raise ValueError(
                    f"input {name!r} has a static shape that {tuple(sizes)} contradicts{listing}"
                )
        return program
    values = _dimensions(inputs, shape, listing)
    _check_limits(program, values)
    examples = [
        getattr(arg, "value", None)
        if arg.name not in inputs
        else torch.zeros(
            [_size(dim, values, listing) for dim in inputs[arg.name].shape],
            dtype=inputs[arg.name].dtype,
        )
        for arg in _user_arguments(program)
    ]
    args, kwargs = torch.utils._pytree.tree_unflatten(examples, program.call_spec.in_spec)
    try:
        with torch.no_grad():
            return torch.export.export(program.module(), args, kwargs)
    except TRACE_ERRORS as error:
        raise UnsupportedOperatorError(
            f"torch cannot export the program with these sizes: {first_line(str(error))}"
        ) from error


def _user_arguments(program: torch.export.ExportedProgram) -> list[Any]:
    """What the program is called with: tensors, and the numbers and Nones that it was exported for."""
    specs = program.graph_signature.input_specs
    return [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]


def _user_inputs(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    names = [arg.name for arg in _user_arguments(program)]
    fakes = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return {name: fakes[name] for name in names if isinstance(fakes.get(name), torch.Tensor)}


def _dimensions(
    inputs: Mapping[str, torch.Tensor], shape: Mapping[str, Sequence[int]], listing: str
) -> dict[Any, int]:
    """The value of each symbol that is a whole dimension of an input that ``shape`` names."""
    values: dict[Any, int] = {}
    for name, sizes in shape.items():
        for dim, size in zip(inputs[name].shape, sizes, strict=True):
            if not isinstance(dim, torch.SymInt):
                if int(dim) != size:
                    raise ValueError(
                        f"input {name!r} has a static shape that {tuple(sizes)} contradicts{listing}"
                    )
            elif dim.node.expr.is_Symbol and values.setdefault(dim.node.expr, int(size)) != size:
                raise ValueError(
                    f"dimension {dim.node.expr} is given both {values[dim.node.expr]} and {size}{listing}"
                )
    for name, sizes in shape.items():
        for dim, size in zip(inputs[name].shape, sizes, strict=True):
            if _size(dim, values, listing) != size:
                raise ValueError(f"dimension {dim} of input {name!r} cannot be {size}{listing}")
    return values


def _size(dim: Any, values: Mapping[Any, int], listing: str) -> int:
    if not isinstance(dim, torch.SymInt):
        return int(dim)
    value = dim.node.expr.subs(values)
    if not value.is_Integer:
        raise ValueError(
            f"dimension {dim} is symbolic: give every size with shape (--shape){listing}"
        )
    return int(value)


def _check_limits(program: torch.export.ExportedProgram, values: Mapping[Any, int]) -> None:
    for symbol, limits in program.range_constraints.items():
        value = symbol.subs(values)
        if value.is_Integer and not limits.lower <= value <= limits.upper:
            raise ValueError(
                f"dimension {symbol} was exported for sizes from {limits.lower} to {limits.upper}, not {value}"
            )


def agreeing(builder: BlockBuilder, result: Any, node: fx.Node) -> Any:
    """Return a converted result in the type that PyTorch recorded for its node.

    Integers of another width are cast. Another rank, a different fixed size, or numbers of another kind mean that the
    converter computes something else.

    Raises
    ------
    NotImplementedError
        If they disagree otherwise.
    """
    fake = node.meta.get("val")
    if not isinstance(result, ir.Expr):
        return result
    ty = getattr(result, "ty", None)
    if isinstance(fake, tuple | list) and isinstance(ty, relax.TensorType):
        used = {
            user.args[1] for user in node.users if user.target is operator.getitem and user.users
        }
        if used - {0}:
            raise NotImplementedError(
                f"of its results only the first can be had, and others are used ({used})"
            )
    if not isinstance(fake, torch.Tensor):
        return result
    if not isinstance(ty, relax.TensorType):
        result = builder.normalize(result) if isinstance(result, ir.Call) else result
        ty = getattr(result, "ty", None)
    if not isinstance(ty, relax.TensorType):
        return result
    wanted, dtype = dtype_name(fake.dtype), str(ty.dtype)
    if _kind(wanted) != _kind(dtype):
        raise NotImplementedError(f"TVM's result is of type {dtype}, PyTorch's of {wanted}")
    if isinstance(ty.shape, relax.ShapeExpr):
        sizes = list(ty.shape.values)
        if len(sizes) != fake.ndim or any(
            isinstance(size, tirx.IntImm) and isinstance(want, int) and int(size) != want
            for size, want in zip(sizes, fake.shape, strict=True)
        ):
            got = ", ".join(map(str, sizes))
            raise NotImplementedError(
                f"TVM's result is of shape ({got}), PyTorch's of {tuple(fake.shape)}"
            )
    return in_dtype(builder, result, wanted)


def _kind(dtype: str) -> str:
    return "float" if "float" in dtype else "bool" if dtype == "bool" else "int"
