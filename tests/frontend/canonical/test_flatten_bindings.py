"""FlattenBindings: one function, one dataflow block, one operator a binding."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.frontend.canonical import FlattenBindings


def test_nested_aliased_and_private(check_pass):
    @I.ir_module
    class Before:
        @R.function(private=True)
        def twice(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            y: R.Tensor((2, 3), "float32") = R.add(x, x)
            return y

        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            cls = Before
            a = R.nn.relu(R.exp(x))
            b = a
            c = (b, x)
            d = c[0]
            e: R.Tensor((2, 3), "float32") = cls.twice(d)
            return e

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            with R.dataflow():
                a1 = R.exp(x)
                a = R.nn.relu(a1)
                y: R.Tensor((2, 3), "float32") = R.add(a, a)
                R.output(y)
            return y

    check_pass(FlattenBindings(), Before, After)


def test_nested_operands_take_the_name_of_their_binding(operators):
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    out = relax.Var("node", relax.TensorType((2, 3), "float32"))
    nested = relax.op.add(relax.op.nn.relu(relax.op.exp(x)), x)
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(out, nested)])], out)
    mod = tvm.IRModule(
        {"main": relax.Function([x], body, out.ty).with_attr("global_symbol", "main")}
    )
    flat = FlattenBindings()(mod)
    assert operators(flat) == [("node", "exp"), ("node", "nn.relu"), ("node", "add")]


def test_canonical_module_stays(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.split(a, 3, axis=1)
                c = b[0]
                R.output(a, c)
            return (a, c)

    check_pass(FlattenBindings(), Before)


def test_control_flow_is_refused():
    @I.ir_module
    class Before:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")) -> R.Tensor(
            (2,), "float32"
        ):
            if c:
                y = R.nn.relu(x)
            else:
                y = R.exp(x)
            return y

    with pytest.raises(UnsupportedOperatorError, match=r"If \(node 'y'\)"):
        FlattenBindings()(Before)


def test_lowered_calls_are_refused():
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def copy(a: T.Buffer((2,), "float32"), b: T.Buffer((2,), "float32")):
            for i in range(2):
                with T.sblock("copy"):
                    v = T.axis.spatial(2, i)
                    b[v] = a[v]

        @R.function
        def main(x: R.Tensor((2,), "float32")):
            cls = Before
            with R.dataflow():
                y = R.call_tir(cls.copy, (x,), out_ty=R.Tensor((2,), "float32"))
                R.output(y)
            return y

    with pytest.raises(UnsupportedOperatorError, match="before LegalizeOps"):
        FlattenBindings()(Before)


def test_main_is_needed():
    @I.ir_module
    class Before:
        @R.function
        def forward(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                y = R.nn.relu(x)
                R.output(y)
            return y

    with pytest.raises(InvalidModelError, match=r'"main".*forward'):
        FlattenBindings()(Before)
