"""``RelayGraph`` → Relax, operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...compat import BlockBuilder, ir, relax, silent_native, tirx, tvm
from ...errors import InvalidModelError, UnsupportedOperatorError
from ..canonical.constants import to_constant
from ..onnx_native import first_line
from .graph import Constant, Input, Node, RelayGraph, Result, TensorType, Type, Value
from .operators import CONVERTERS, Converter
from .site import Site, shape_of

#: What TVM raises where operands do not fit: there is no common base class.
_TVM_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip

#: A tuple has at most this many tensors: nested ones can ask for any number.
_MAX_OPERANDS = 4096


def convert(
    graph: RelayGraph, version: str, shape: Mapping[str, Sequence[int]] | None = None
) -> tvm.IRModule:
    """Return a graph as a Relax module with one function ``main``.

    Bindings carry the names of the graph's nodes; an operator may become several bindings of one
    name.

    Parameters
    ----------
    graph : RelayGraph
        The model.
    version : str
        The TVM that saved it.
    shape : mapping of input name to sizes, optional
        Sizes of inputs that are symbolic.

    Raises
    ------
    UnsupportedOperatorError
        If operators have no counterpart; the message names each with its place.
    InvalidModelError
        If operands, attributes and stored types do not agree.
    ValueError
        If ``shape`` does not fit the inputs.
    """
    _refuse_unknown(graph)
    with silent_native():
        return _Converter(graph, version, shape or {}).convert()


def _refuse_unknown(graph: RelayGraph) -> None:
    unknown = [node for node in graph.nodes if node.op not in CONVERTERS]
    if not unknown:
        return
    counts = Counter(node.op for node in unknown)
    first = {node.op: node for node in reversed(unknown)}
    places = [
        f"{first[op].place}{f' and {n - 1} more' if n > 1 else ''}" for op, n in counts.items()
    ]
    more = f", and {len(places) - 5} other operators" if len(places) > 5 else ""
    raise UnsupportedOperatorError(
        f"the model uses operators that cannot be imported: {'; '.join(places[:5])}{more}"
    )


class _Converter:
    def __init__(self, graph: RelayGraph, version: str, shape: Mapping[str, Sequence[int]]) -> None:
        self._graph = graph
        self._version = version
        self._builder = BlockBuilder()
        self._bindings: list[relax.VarBinding] = []
        self._inputs = self._make_inputs(shape)
        self._constants: dict[Constant, ir.Expr] = {}
        self._results: list[ir.Expr | tuple[ir.Expr, ...]] = []

    def convert(self) -> tvm.IRModule:
        for node in self._graph.nodes:
            self._results.append(self._convert(node))
        leaves = list(self._leaves(self._graph.output, "the result"))
        result = leaves[0] if not isinstance(self._graph.output, tuple) else relax.Tuple(leaves)
        if isinstance(result, relax.Tuple) and not leaves:
            raise InvalidModelError("main returns an empty tuple: return what the model computes")
        # FlattenBindings makes the results visible outside the block.
        body = relax.SeqExpr([relax.BindingBlock(self._bindings)], result)
        body = self._builder.normalize(body)
        params = list(self._inputs.values())
        main = relax.Function(params, body, body.ty, True).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": main})

    def _make_inputs(self, shape: Mapping[str, Sequence[int]]) -> dict[Input, relax.Var]:
        listing = "; the model's inputs are " + ", ".join(
            f"{i.name}={','.join('?' if n is None else str(n) for n in i.type.shape)}"
            for i in self._graph.inputs
        )
        known = {i.name for i in self._graph.inputs}
        for name in shape:
            if name not in known:
                raise ValueError(f"the model has no input {name!r}{listing}")
        out = {}
        for item in self._graph.inputs:
            sizes = _fixed(item, shape.get(item.name), listing)
            TensorType(sizes, item.type.dtype).check(f"input {item.name!r}")
            out[item] = relax.Var(item.name, relax.TensorType(sizes, item.type.dtype))
        return out

    def _convert(self, node: Node) -> ir.Expr | tuple[ir.Expr, ...]:
        site = Site(node, self._version, lambda expr: self._emit(node, expr))
        converter = CONVERTERS[node.op]
        operands = self._operands(site, converter)
        try:
            result = converter.convert(site, *operands)
        except _TVM_ERRORS as error:
            reason = first_line(str(error)) or type(error).__name__
            raise UnsupportedOperatorError(f"{node.place} cannot be imported: {reason}") from error
        self._check_type(site, result, node.type)
        return result

    def _operands(self, site: Site, converter: Converter) -> list[Any]:
        node = site.node
        if len(node.args) != converter.arity:
            site.damaged(f"it has {len(node.args)} operands instead of {converter.arity}")
        out: list[Any] = []
        for position, value in enumerate(node.args):
            leaves = list(self._leaves(value, node.place))
            whole = position == 0 and converter.takes_tuple
            if not whole and (isinstance(value, tuple) or len(leaves) != 1):
                site.damaged("an operand is a tuple where a tensor must be")
            out.append(leaves if whole else leaves[0])
        return out

    def _leaves(self, value: Value, where: str) -> Iterator[ir.Expr]:
        """Yield the tensors of a value, in order."""
        stack, count = [value], 0
        while stack:
            item = stack.pop()
            if isinstance(item, tuple):
                stack.extend(reversed(item))
            elif isinstance(item, Input):
                yield self._inputs[item]
            elif isinstance(item, Constant):
                yield self._constant(item)
            else:
                yield from self._fields(item, where)
            count += 1
            if count > _MAX_OPERANDS:
                raise InvalidModelError(f"{where} has more than {_MAX_OPERANDS} parts")

    def _fields(self, value: Result, where: str) -> Sequence[ir.Expr]:
        made = self._results[value.node]
        if value.field is None:
            return made if isinstance(made, tuple) else (made,)
        fields = made if isinstance(made, tuple) else (made,)
        alone = not isinstance(made, tuple) and self._graph.nodes[value.node].op != "nn.dropout"
        if alone or not 0 <= value.field < len(fields):
            raise InvalidModelError(
                f"{where} takes result {value.field} of {self._graph.nodes[value.node].place}, which has "
                f"{len(fields)} here: only results of inference can be used"
            )
        return (fields[value.field],)

    def _constant(self, value: Constant) -> ir.Expr:
        if value not in self._constants:
            self._constants[value] = to_constant(value.array)
        return self._constants[value]

    def _emit(self, node: Node, expr: ir.Expr) -> ir.Expr:
        expr = self._builder.normalize(expr)
        if isinstance(expr, relax.Var):
            return expr
        self._check_result(node, expr.ty)
        var = relax.Var(node.name, expr.ty)
        self._bindings.append(relax.VarBinding(var, expr))
        return var

    def _check_result(self, node: Node, ty: Any) -> None:
        """Refuse a result that TVM could not compute: of no fixed size, empty, or larger than any memory."""
        for field in ty.fields if isinstance(ty, ir.TupleType) else [ty]:
            sizes = getattr(field, "shape", None)
            if not isinstance(sizes, relax.ShapeExpr) or not all(
                isinstance(n, tirx.IntImm) for n in sizes.values
            ):
                raise UnsupportedOperatorError(
                    f"{node.place} cannot be imported: the size of its result is not fixed"
                )
            shape = tuple(int(n) for n in sizes.values)
            TensorType(shape, str(field.dtype)).check(f"the result of {node.place}")

    def _check_type(self, site: Site, result: Any, declared: Type) -> None:
        """Compare a result with what Relay's type inference stored."""
        if declared is None:
            return
        if isinstance(declared, tuple) != isinstance(result, tuple):
            if site.node.op == "nn.dropout":
                return
            site.damaged(
                "its stored type is not that of its results: run InferType and save the module again"
            )
        pairs = (
            zip(declared, result, strict=False)
            if isinstance(declared, tuple)
            else [(declared, result)]
        )
        for want, got in pairs:
            if not isinstance(want, TensorType):
                continue
            shape, dtype = shape_of(got), str(got.ty.dtype)
            fits = len(shape) == len(want.shape) and all(
                n is None or n == m for n, m in zip(want.shape, shape, strict=True)
            )
            if not fits or dtype != want.dtype:
                site.damaged(
                    f"its stored type is {want}, but it computes {TensorType(shape, dtype)}"
                )


def _fixed(item: Input, given: Sequence[int] | None, listing: str) -> tuple[int, ...]:
    """Return the sizes of an input, every one of them a number."""
    declared = item.type.shape
    if given is not None:
        if len(given) != len(declared):
            raise ValueError(f"input {item.name!r} does not have {len(given)} dimensions{listing}")
        if any(n is not None and n != int(m) for n, m in zip(declared, given, strict=True)):
            raise ValueError(
                f"input {item.name!r} has a static shape that {tuple(given)} contradicts{listing}"
            )
        return tuple(map(int, given))
    if None in declared:
        sizes = ",".join("?" if n is None else str(n) for n in declared)
        raise InvalidModelError(
            f"dimension {declared.index(None)} of input {item.name!r} is symbolic ({sizes}): give its size with shape "
            f"(--shape {item.name}=N,N,...)"
        )
    return tuple(n for n in declared if n is not None)
