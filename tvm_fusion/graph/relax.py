"""Relax function → DataflowGraph, with the way back to its bindings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..compat import Constant, relax, tirx, tvm
from ..errors import InvalidModelError
from .causal import causal_mask
from .dataflow import CAUSAL, LOOKUPS, SLICE, DataflowGraph, Operator, Tensor, unique_name
from .operators import flops_of, pattern_of


@dataclasses.dataclass(frozen=True)
class RelaxGraph:
    """A dataflow graph and where its operators stand in the Relax function.

    Attributes
    ----------
    graph : DataflowGraph
        The IR-neutral graph.
    bindings : mapping of str to tuple of relax.VarBinding
        For each operator its call, followed by the tuple items taken from it.
    tensors : mapping of relax.Var to str
        Tensor name of each variable.
    """

    graph: DataflowGraph
    bindings: Mapping[str, tuple[Any, ...]]
    tensors: Mapping[Any, str]


def from_relax(mod: tvm.IRModule, func_name: str = "main") -> RelaxGraph:
    """Build the graph of one function of a Relax module.

    Parameters
    ----------
    mod : tvm.IRModule
        A module in canonical form (one dataflow block, one operator call per binding).
    func_name : str
        The function to read.

    Raises
    ------
    InvalidModelError
        If the function does not exist or is not in canonical form.
    """
    names = [gv.name_hint for gv in mod.functions]
    if func_name not in names or not isinstance(mod[func_name], relax.Function):
        raise InvalidModelError(
            f"the module has no Relax function {func_name!r}; it has {', '.join(names) or 'none'}"
        )
    return from_function(mod[func_name])


def from_function(func: relax.Function) -> RelaxGraph:
    """Build the graph of one Relax function in canonical form (see `from_relax`)."""
    return _Builder(func).build()


class _Builder:
    def __init__(self, func: relax.Function) -> None:
        self.func = func
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[Any, str] = {}  # relax.Var → tensor name
        self.constants: list[tuple[Any, str]] = []
        self.tuples: dict[Any, tuple[str, ...]] = {}  # tuple-typed Var → its fields' tensors
        self.operators: list[Operator] = []
        self.bindings: dict[str, list[Any]] = {}
        self.owner: dict[Any, str] = {}  # tuple-typed Var → operator

    def build(self) -> RelaxGraph:
        blocks = self.func.body.blocks
        if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
            raise InvalidModelError(
                "the function is not one dataflow block; run tvm_fusion.transform.Canonicalize() first"
            )
        for param in self.func.params:
            self.names[param] = self._add(param.name, param.ty)
        inputs = tuple(self.names[param] for param in self.func.params)
        for binding in blocks[0].bindings:
            self._binding(binding)
        outputs = tuple(self._reads(self.func.body.body))
        graph = DataflowGraph(tuple(self.operators), self.tensors, inputs, outputs)
        return RelaxGraph(graph, {k: tuple(v) for k, v in self.bindings.items()}, self.names)

    def _binding(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.Call):
            self._call(binding)
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.tuples:
            self.names[var] = self.tuples[value.tuple_value][value.index]
            if value.tuple_value in self.owner:
                self.bindings[self.owner[value.tuple_value]].append(binding)
        elif isinstance(value, relax.Tuple):
            self.tuples[var] = tuple(self._reads(value))
        elif isinstance(value, relax.Var):
            self._alias(var, value)
        elif isinstance(value, Constant):
            self.names[var] = self._constant(value)
        else:
            raise InvalidModelError(
                f"binding {var.name!r} is a {type(value).__name__}, not an operator call; run "
                "tvm_fusion.transform.Canonicalize() first"
            )

    def _alias(self, var: Any, value: Any) -> None:
        if value in self.tuples:
            self.tuples[var] = self.tuples[value]
        else:
            self.names[var] = self.names[value]

    def _call(self, binding: Any) -> None:
        var, call = binding.var, binding.value
        source = var.name
        name = unique_name(source, self.bindings)
        inputs = tuple(t for arg in call.args for t in self._reads(arg))
        fields = var.ty.fields if isinstance(var.ty, tvm.ir.TupleType) else None
        attrs = plain_attrs(call)
        layout = attrs.get("out_layout") or attrs.get("data_layout") or attrs.get("layout")
        if fields is None:
            outputs = (self._add(name, var.ty, layout),)
            self.names[var] = outputs[0]
        else:
            outputs = tuple(self._add(f"{name}.{i}", ty, layout) for i, ty in enumerate(fields))
            self.tuples[var], self.owner[var] = outputs, name
        op = op_name(call)
        pattern = pattern_of(op)
        work = pattern != "view"
        reads = [self.tensors[t] for t in dict.fromkeys(inputs)]
        writes = [self.tensors[t] for t in outputs]
        operands = [self.tensors[t] for t in inputs]
        flops = flops_of(op, attrs, operands, writes) if operands else 0
        self.operators.append(
            Operator(
                name,
                op,
                (source,),
                inputs,
                outputs,
                attrs,
                pattern,
                flops,
                _read_bytes(op, reads, writes) if work else 0,
                sum(t.nbytes for t in writes) if work else 0,
            )
        )
        self.bindings[name] = [binding]

    def _reads(self, expr: Any) -> Iterator[str]:
        """Tensor names in an operand: a variable, a constant, or a tuple of them."""
        if isinstance(expr, relax.Var):
            yield from self.tuples.get(expr) or (self.names[expr],)
        elif isinstance(expr, Constant):
            if expr.ty.ndim > 0:  # a scalar is part of the operator, not a tensor that is read
                yield self._constant(expr)
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                yield from self._reads(field)

    def _constant(self, constant: Any) -> str:
        for known, name in self.constants:
            if known.same_as(constant):
                return name
        name = self._add(f"const{len(self.constants)}", constant.ty, is_constant=True)
        self.constants.append((constant, name))
        return name

    def _add(self, name: str, ty: Any, layout: str | None = None, is_constant: bool = False) -> str:
        name = unique_name(name, self.tensors)
        if not isinstance(ty, relax.TensorType):  # shapes, scalars: opaque, no traffic
            self.tensors[name] = Tensor(name, (), "int64")
            return name
        shape = ty.shape
        if isinstance(shape, relax.ShapeExpr):
            dims = tuple(_extent(dim) for dim in shape.values)
        elif shape is None:
            dims = (None,) * max(ty.ndim, 1)
        else:
            dims = tuple(_extent(dim) for dim in shape)
        self.tensors[name] = Tensor(name, dims, str(ty.dtype), layout, is_constant)
        return name


def _read_bytes(op: str, reads: list[Tensor], writes: list[Tensor]) -> int:
    """Bytes that an operator reads: of a table no more than it looks up."""
    if op not in LOOKUPS:
        return sum(t.nbytes for t in reads)
    table, *rest = reads
    return min(table.nbytes, writes[0].nbytes) + sum(t.nbytes for t in rest)


def op_name(call: relax.Call) -> str:
    """Operator type of a call without dialect prefix (``relax.nn.conv2d`` → ``conv2d``)."""
    if isinstance(call.op, tvm.ir.Op):
        return call.op.name.rsplit(".", 1)[-1]
    return f"call:{call.op.name_hint}" if isinstance(call.op, tvm.ir.GlobalVar) else "call"


def plain_attrs(call: relax.Call) -> dict[str, Any]:
    """Attributes of a call as Python values; scalar and shape operands count as attributes ``arg0``, ``arg1``…"""
    out: dict[str, Any] = {}
    if call.attrs is not None:
        for field in type(call.attrs).__tvm_ffi_type_info__.fields:
            out[field.name] = _plain(getattr(call.attrs, field.name))
    for i, arg in enumerate(call.args):
        if isinstance(arg, tirx.IntImm | tirx.FloatImm):
            out[f"arg{i}"] = arg.value
        elif isinstance(arg, relax.ShapeExpr):
            out[f"arg{i}"] = tuple(_extent(dim) for dim in arg.values)
        elif isinstance(arg, Constant) and arg.ty.ndim == 0:
            out[f"arg{i}"] = arg.value.numpy().item()
    if op_name(call) == "strided_slice":
        numbers = [_integers(arg) for arg in call.args[1:]]
        if None not in numbers:
            out[SLICE] = tuple(numbers)
    mask = causal_mask(call)
    if mask is not None:
        out[CAUSAL] = mask.shift
    return out


def _integers(arg: Any) -> tuple[int, ...] | None:
    """Numbers of a tuple; None where one is no number."""
    fields = getattr(arg, "fields", (None,))
    known = all(isinstance(field, tirx.IntImm) for field in fields)
    return tuple(int(field) for field in fields) if known else None


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    try:
        return tuple(_plain(item) for item in value)
    except TypeError:  # a dtype, or another opaque object: its text is what identifies it
        return str(value)


def _extent(dim: Any) -> int | None:
    if isinstance(dim, int):
        return dim
    return int(dim.value) if isinstance(dim, tirx.IntImm) else None
