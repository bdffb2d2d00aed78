"""Bring any Relax module into the canonical form: one function, one dataflow block, one operator a binding."""

from __future__ import annotations

from ...compat import BlockBuilder, ir, relax, structural_equal, tvm
from ...errors import InvalidModelError, UnsupportedOperatorError
from .rewrite import substitute


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FlattenBindings")
class FlattenBindings:
    """Inline private functions, merge binding blocks, split nested expressions, drop aliases and other functions.

    A nested operand becomes a binding with the name of the binding it stood in. Control flow,
    impure calls and calls of PrimFuncs (an already legalized module) are refused with
    ``UnsupportedOperatorError``.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        relax_names = [
            gv.name_hint for gv, f in mod.functions.items() if isinstance(f, relax.Function)
        ]
        if "main" not in relax_names:
            found = ", ".join(relax_names) or "no Relax function"
            raise InvalidModelError(
                f'the module must have a Relax function named "main" (it has {found})'
            )
        if len(relax_names) > 1:
            mod = relax.transform.InlinePrivateFunctions()(mod)
        func = _Flattener().flatten(mod["main"])
        return tvm.IRModule({"main": func}, attrs=mod.attrs, global_infos=mod.global_infos)


class _Flattener:
    def __init__(self) -> None:
        self._builder = BlockBuilder()
        self._bindings: list[tuple[relax.Var, ir.Expr]] = []
        self._map: dict[relax.Var, ir.Expr] = {}

    def flatten(self, func: relax.Function) -> relax.Function:
        result = self._leaf(func.body, "output", keep_tuple=True)
        returned = set(result.fields if isinstance(result, relax.Tuple) else [result])
        out, final = [], {}
        for var, value in self._bindings:
            new = relax.Var(var.name, var.ty) if var in returned else var
            if new is not var:
                final[var] = new
            out.append(relax.VarBinding(new, self._builder.normalize(substitute(value, final))))
        body = relax.SeqExpr([relax.DataflowBlock(out)], substitute(result, final))
        body = BlockBuilder().normalize(body)
        return relax.Function(func.params, body, body.ty, True, func.attrs, func.span)

    def _leaf(self, expr: ir.Expr, name: str, keep_tuple: bool = False) -> ir.Expr:
        """Return ``expr`` as a leaf, binding what has to be computed under ``name``."""
        if isinstance(expr, relax.Var):
            return self._map.get(expr, expr)
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    self._bind(binding)
            return self._leaf(expr.body, name, keep_tuple)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._leaf(field, name) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            value = self._leaf(expr.tuple_value, name)
            if isinstance(value, relax.Tuple):
                return value.fields[expr.index]
            return self._emit(relax.TupleGetItem(value, expr.index), name)
        if isinstance(expr, ir.Call):
            return self._emit(self._call(expr, name), name)
        if isinstance(expr, relax.If | relax.Function):
            raise UnsupportedOperatorError(
                f"operator {type(expr).__name__} (node {name!r}) is not supported: export the model "
                "without control flow"
            )
        return expr

    def _call(self, call: ir.Call, name: str) -> ir.Call:
        if not isinstance(call.op, ir.Op):
            callee = (
                getattr(call.op, "name_hint", None)
                or getattr(call.op, "global_symbol", None)
                or str(call.op)
            )
            raise UnsupportedOperatorError(
                f"node {name!r} calls the function {callee!r} instead of an operator: import the module before "
                "LegalizeOps, FuseOps or any other lowering"
            )
        if call.op.name.startswith("relax.call_"):
            raise UnsupportedOperatorError(
                f"node {name!r} is an already lowered {call.op.name.removeprefix('relax.')}: import the module before "
                "LegalizeOps or any other lowering"
            )
        args = [self._leaf(arg, name) for arg in call.args]
        if all(a.same_as(b) for a, b in zip(args, call.args, strict=True)):
            return call
        return ir.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _emit(self, expr: ir.Expr, name: str) -> relax.Var:
        expr = self._builder.normalize(expr)
        var = relax.DataflowVar(name, expr.ty)
        self._bindings.append((var, expr))
        return var

    def _bind(self, binding: relax.Binding) -> None:
        name = binding.var.name
        if isinstance(binding, relax.MatchCast):
            value = self._leaf(binding.value, name)
            if not structural_equal(value.ty, binding.ty):
                raise UnsupportedOperatorError(
                    f"operator match_cast (node {name!r}) is not supported: give the model static shapes"
                )
            self._map[binding.var] = value
            return
        self._map[binding.var] = self._leaf(binding.value, name)
