"""The base of the passes: what it leaves alone, and what it always repairs."""

from __future__ import annotations

from tvm_fusion.compat import relax, tvm
from tvm_fusion.frontend.canonical.rewrite import BindingRewriter, bindings_of, op_name
from tvm_fusion.testing.modules import ModuleBuilder


def model() -> tvm.IRModule:
    b = ModuleBuilder()
    x = b.input("x", (2, 3))
    y = b.relu("a", x)
    return b.finish(b.relu("b", y), b.op("c", relax.op.exp(y)))


class Rename(BindingRewriter):
    """Makes every ReLU a tanh."""

    def visit(self, name, value):
        return relax.op.tanh(value.args[0]) if op_name(value) == "nn.relu" else value


def test_nothing_to_do_keeps_the_function() -> None:
    # The first time the tuple of results, which the builder binds, is taken apart.
    mod = BindingRewriter().transform(model())
    out = BindingRewriter().transform(mod)
    assert out["main"].same_as(mod["main"])
    assert not Rename().transform(mod)["main"].same_as(mod["main"])


def test_dead_bindings_go_even_if_nothing_else_changes() -> None:
    b = ModuleBuilder()
    x = b.input("x", (2, 3))
    b.relu("dead2", b.relu("dead1", x))
    mod = BindingRewriter().transform(b.finish(b.relu("kept", x)))
    assert [binding.var.name for binding in bindings_of(mod["main"])] == ["kept"]


def test_results_are_plain_variables_whatever_they_were() -> None:
    mod = model()
    func = mod["main"]
    x = relax.Var("x", func.params[0].ty)
    inner = relax.Var("inner", x.ty)  # not a result, so it becomes a dataflow variable
    outer = relax.Var("outer", x.ty)
    block = relax.DataflowBlock(
        [relax.VarBinding(inner, relax.op.nn.relu(x)), relax.VarBinding(outer, relax.op.exp(inner))]
    )
    other = relax.Function([x], relax.SeqExpr([block], outer), x.ty)
    out = BindingRewriter().transform(relax.transform.Normalize()(tvm.IRModule({"main": other})))
    first, second = bindings_of(out["main"])
    assert isinstance(first.var, relax.DataflowVar)
    assert not isinstance(second.var, relax.DataflowVar)
