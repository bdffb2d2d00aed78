"""Name the bindings that TVM's importers make after the nodes of the model that they import."""

from __future__ import annotations

from ..compat import BlockBuilder, ir, relax, tvm
from .canonical.rewrite import bindings_of, substitute, with_main


class NodeNames:
    """Remembers which bindings belong to which node of the model.

    TVM's importers call their bindings lv, lv1, ... When the importer has converted a node,
    ``mark`` binds its result once more, to a variable that marks the end of that node's bindings;
    ``apply`` then gives every binding the name of the first mark at or after it.
    """

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, builder: BlockBuilder, expr: ir.Expr, node_name: str) -> ir.Expr:
        """Return the marked ``expr``; shapes and constants, whose classes the converters look for, stay unbound."""
        if isinstance(expr, relax.ShapeExpr | ir.GenericConst):
            return expr
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.mark(builder, field, node_name) for field in expr.fields])
        var = builder.emit(expr, f"mark{len(self._marks)}")
        self._marks[var.name] = node_name
        return var

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a copy of ``mod`` with the bindings of ``main`` renamed; the marks stay as aliases."""
        func, builder = mod["main"], BlockBuilder()
        bindings = bindings_of(func)
        names, name = [], "output"
        for binding in reversed(bindings):
            name = self._marks.get(binding.var.name, name)
            names.append(name)
        renamed: dict[relax.Var, ir.Expr] = {}
        out = []
        for binding, name in zip(bindings, reversed(names), strict=True):
            var = type(binding.var)(name, binding.var.ty)
            value = builder.normalize(substitute(binding.value, renamed))
            if isinstance(binding, relax.MatchCast):
                out.append(relax.MatchCast(var, value, binding.ty))
            else:
                out.append(relax.VarBinding(var, value))
            renamed[binding.var] = var
        body = relax.SeqExpr([relax.DataflowBlock(out)], substitute(func.body.body, renamed))
        body = builder.normalize(body)
        return with_main(
            mod, relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        )


def abandon(builder: BlockBuilder) -> None:
    """Close the block that an importer left open when it failed: TVM would warn of it on stderr."""
    try:
        builder._end_block()
    except RuntimeError:  # none is open
        pass
