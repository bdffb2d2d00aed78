"""The base of every canonicalisation pass: rebuild ``main`` binding by binding, keeping names."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...compat import BlockBuilder, ir, relax, structural_equal, tirx, tvm


class BindingRewriter:
    """Rebuilds the dataflow block of ``main``.

    A subclass overrides ``visit(name, value)``: ``value`` is the bound expression with its operands
    already rewritten (leaves: variables, constants, tuples, shapes), and the result is what the old
    variable stands for from now on. Returning ``value`` itself keeps the binding. Returning another
    call binds that one under the same name. Returning a leaf drops the binding. Further bindings
    come from ``emit``. Dead bindings are dropped at the end.

    Names are kept as they are: TVM's BlockBuilder would make them unique ("conv1", "conv1_1"), but
    they name nodes of the user's model.
    """

    def __init__(self) -> None:
        self._builder = BlockBuilder()
        self._bindings: dict[relax.Var, ir.Expr] = {}
        self._map: dict[relax.Var, ir.Expr] = {}  # variables that stand for something else
        self._uses: Counter[int] = Counter()  # by handle: comparing two variables is slow
        self.visiting: relax.Var | None = None  # the old variable whose value ``visit`` is given

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        """Return the replacement of ``value``; see the class."""
        return value

    def visit_param(self, param: relax.Var) -> ir.Expr:
        """Return the new parameter, or the constant that replaces it."""
        return param

    def visit_output(self, output: ir.Expr) -> ir.Expr:
        """Return the replacement of one of the function's outputs."""
        return output

    def emit(self, name: str, expr: ir.Expr) -> ir.Expr:
        """Bind ``expr`` to a new variable called ``name``; leaves are returned as they are."""
        if not isinstance(expr, ir.Call | relax.TupleGetItem | relax.MatchCast):
            return expr
        expr = self.typed(expr)
        var = relax.DataflowVar(name, expr.ty)
        self._bindings[var] = expr
        return var

    def typed(self, expr: ir.Expr) -> ir.Expr:
        """Return ``expr`` with its type deduced."""
        return self._builder.normalize(expr)

    def producer(self, expr: ir.Expr, op: str | None = None) -> Any:
        """Return the value bound to the variable ``expr``, or None (parameters, constants, another operator)."""
        value = self._bindings.get(expr) if isinstance(expr, relax.Var) else None
        return value if op is None or op_name(value) == op else None

    def single_use(self, expr: ir.Expr) -> bool:
        """Return whether the (new) variable ``expr`` is read once."""
        return self.uses(expr) <= 1

    def uses(self, expr: ir.Expr) -> int:
        """Return how often the (new) variable ``expr`` is read."""
        return self._uses[_handle(expr)]

    def transform(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a copy of ``mod`` with ``main`` rewritten."""
        gvar = mod.get_global_var("main")
        func = mod[gvar]
        scan = _scan(func)
        self._uses.update(scan.counts)
        for param in func.params:
            self._bind(param, self.visit_param(param), scan)
        params = [self._map.get(param, param) for param in func.params]
        params = [param for param in params if isinstance(param, relax.Var)]
        for var, value in scan.bindings:
            new = self.substitute(value)
            if isinstance(new, ir.Call | relax.TupleGetItem):
                self.visiting = var
                new = self.visit(var.name, new)
            if new is value:  # nothing changed: the variable and its type stay
                self._bindings[var] = value
            else:
                self._bind(var, self.emit(var.name, new), scan)
        outputs = self.substitute(scan.result)
        if isinstance(outputs, relax.Tuple):
            fields = [self.visit_output(field) for field in outputs.fields]
            kept = all(a.same_as(b) for a, b in zip(fields, outputs.fields, strict=True))
            outputs = outputs if kept else relax.Tuple(fields)
        else:
            outputs = self.visit_output(outputs)
        unchanged = not self._map and len(self._bindings) == len(scan.bindings)
        if unchanged and outputs is scan.result and scan.is_finished:
            return with_main(mod, func)
        return with_main(mod, _finish(func, params, self._bindings, outputs))

    def _bind(self, old: relax.Var, new: ir.Expr, scan: _Scan) -> None:
        if new.same_as(old):
            return
        self._map[old] = new
        if isinstance(new, relax.Var):
            self._uses[_handle(new)] += scan.counts[_handle(old)]

    def substitute(self, expr: ir.Expr) -> ir.Expr:
        """Return ``expr`` over the new variables; the same object when nothing in it changed."""
        return substitute(expr, self._map) if self._map else expr


class _Scan:
    """What a pass has to know of a function before it starts.

    Attributes
    ----------
    bindings : list of (Var, Expr)
        The variables and their values, in order.
    result : Expr
        The function's result.
    counts : Counter of int
        How often each variable is read, by handle.
    """

    def __init__(self, func: relax.Function) -> None:
        self.func = func
        self.bindings = [(binding.var, binding.value) for binding in bindings_of(func)]
        self.result = func.body.body
        values = (value for _, value in self.bindings)
        self.counts = Counter(_handle(var) for value in values for var in variables(value))
        self.counts.update(_handle(var) for var in variables(self.result))

    @functools.cached_property
    def is_finished(self) -> bool:
        """Whether `_finish` would leave the function as it is."""
        blocks = self.func.body.blocks
        if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
            return False
        if not all(isinstance(binding, relax.VarBinding) for binding in blocks[0].bindings):
            return False
        returned = {_handle(var) for var in variables(self.result)}
        # Every variable is read by a later binding or returned, and so all of them are live.
        return all(
            self.counts[_handle(var)] > 0
            and isinstance(var, relax.DataflowVar) != (_handle(var) in returned)
            for var, _ in self.bindings
        )


_shared: contextvars.ContextVar[list[_Scan] | None] = contextvars.ContextVar("shared", default=None)


@contextlib.contextmanager
def sharing_scans() -> Iterator[None]:
    """Let the passes that run inside share what they read of a function that none of them changed."""
    token = _shared.set([])
    try:
        yield
    finally:
        _shared.reset(token)


def _scan(func: relax.Function) -> _Scan:
    kept = _shared.get()
    if kept and kept[0].func.same_as(func):
        return kept[0]
    scan = _Scan(func)
    if kept is not None:
        kept[:] = [scan]
    return scan


def bindings_of(func: relax.Function) -> list[relax.Binding]:
    """Return the bindings of all blocks (TVM drops the block of a function without bindings)."""
    return [binding for block in func.body.blocks for binding in block.bindings]


def op_name(expr: Any) -> str | None:
    """Return the operator's name of a call ("nn.conv2d", "add"), else None."""
    if isinstance(expr, ir.Call) and isinstance(expr.op, ir.Op):
        return expr.op.name.removeprefix("relax.")
    return None


def variables(expr: ir.Expr) -> Iterator[relax.Var]:
    """Yield the Relax variables that a bound value (or the function's result) reads, with repetition."""
    kind = _kind(type(expr))
    if kind is relax.Var:
        yield expr
    elif kind is ir.Call:
        for arg in expr.args:
            yield from variables(arg)
    elif kind is relax.Tuple:
        for field in expr.fields:
            yield from variables(field)
    elif kind is relax.TupleGetItem:
        yield from variables(expr.tuple_value)


@functools.cache
def _kind(cls: type) -> type | None:
    """The class among those that `variables` tells apart; asking each object anew is slow."""
    kinds = (relax.Var, ir.Call, relax.Tuple, relax.TupleGetItem)
    return next((kind for kind in kinds if issubclass(cls, kind)), None)


def _handle(var: relax.Var) -> int:
    """Identity of a variable that is alive: Python makes a new object at each access."""
    return var.__chandle__()


def substitute(expr: ir.Expr, mapping: Mapping[relax.Var, ir.Expr]) -> ir.Expr:
    """Return ``expr`` with variables replaced; the same object when nothing in it changed."""
    if isinstance(expr, relax.Var):
        return mapping.get(expr, expr)
    if isinstance(expr, ir.Call):
        args = [substitute(arg, mapping) for arg in expr.args]
        if all(a.same_as(b) for a, b in zip(args, expr.args, strict=True)):
            return expr
        return ir.Call(expr.op, args, expr.attrs, expr.ty_args, expr.span)
    if isinstance(expr, relax.Tuple):
        fields = [substitute(field, mapping) for field in expr.fields]
        if all(a.same_as(b) for a, b in zip(fields, expr.fields, strict=True)):
            return expr
        return relax.Tuple(fields)
    if isinstance(expr, relax.TupleGetItem):
        value = substitute(expr.tuple_value, mapping)
        if value.same_as(expr.tuple_value):
            return expr
        return (
            value.fields[expr.index]
            if isinstance(value, relax.Tuple)
            else relax.TupleGetItem(value, expr.index)
        )
    return expr


def with_attrs(call: ir.Call, **changes: Any) -> ir.Call:
    """Return ``call`` (untyped) with some attributes changed."""
    info = type(call.attrs).__tvm_ffi_type_info__
    attrs = {field.name: getattr(call.attrs, field.name) for field in info.fields}
    new = tvm.ir.make_node(info.type_key, **{**attrs, **changes})
    return ir.Call(call.op, call.args, new, call.ty_args, call.span)


def with_args(call: ir.Call, *args: ir.Expr) -> ir.Call:
    """Return ``call`` (untyped) on other operands."""
    return ir.Call(call.op, list(args), call.attrs, call.ty_args, call.span)


def static_shape(expr: ir.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor as integers, or None when a dimension (or the rank) is unknown."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or not all(
        isinstance(d, tirx.IntImm) for d in shape.values
    ):
        return None
    return tuple(int(d) for d in shape.values)


def dims(expr: ir.Expr) -> list[int | ir.Expr] | None:
    """Return the sizes of a tensor, static ones as integers, or None when even its rank is unknown."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in shape.values]


def same_dim(a: int | ir.Expr, b: int | ir.Expr) -> bool:
    """Return whether two sizes are provably equal."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return structural_equal(a, b)


def dtype_of(expr: ir.Expr) -> str | None:
    """Return the dtype name of a tensor, or None."""
    dtype = getattr(expr.ty, "dtype", None)
    return None if dtype is None else str(dtype)


def same_type(a: ir.Expr, b: ir.Expr) -> bool:
    """Return whether two tensors have equal dtype and (provably) equal shape."""
    return structural_equal(a.ty, b.ty)


def with_main(mod: tvm.IRModule, func: relax.Function) -> tvm.IRModule:
    """Return a copy of ``mod`` whose ``main`` is ``func``."""
    functions = {
        gvar: func if gvar.name_hint == "main" else other for gvar, other in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _finish(
    func: relax.Function,
    params: list[relax.Var],
    bindings: dict[relax.Var, ir.Expr],
    outputs: ir.Expr,
) -> relax.Function:
    """Drop dead bindings and rebuild the function around the rest."""
    live = set(variables(outputs))
    for var, value in reversed(bindings.items()):
        if var in live:
            live.update(variables(value))
    returned = {var for var in variables(outputs) if var in bindings}
    renamed: dict[relax.Var, ir.Expr] = {}
    out = []
    for var, value in bindings.items():
        if var not in live:
            continue
        new_value = substitute(value, renamed) if renamed else value
        if new_value is not value:
            new_value = BlockBuilder().normalize(new_value)
        if var in returned and isinstance(var, relax.DataflowVar):
            renamed[var] = relax.Var(var.name, var.ty)
        elif var not in returned and not isinstance(var, relax.DataflowVar):
            renamed[var] = relax.DataflowVar(var.name, var.ty)
        out.append(relax.VarBinding(renamed.get(var, var), new_value))
    result = substitute(outputs, renamed)
    body = BlockBuilder().normalize(relax.SeqExpr([relax.DataflowBlock(out)], result))
    return relax.Function(params, body, body.ty, func.is_pure, func.attrs, func.span)
