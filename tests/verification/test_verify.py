"""Verification finds what is wrong, names it, and passes what is right."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.executable import CompiledModel
from tvm_fusion.build.inputs import make_inputs, position_coded
from tvm_fusion.build.signature import TensorSpec
from tvm_fusion.compat import relax, tvm
from tvm_fusion.errors import LoweringError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.transform import schedule_groups
from tvm_fusion.transform.fuse import graph_of
from tvm_fusion.verification import verify
from tvm_fusion.verification.reference import Reference
from tvm_fusion.verification.report import Comparison
from tvm_fusion.verification.verify import worst_element


def chain():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 9, 9))
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 8)))
    return b.finish(b.op("tanh", relax.op.tanh(b.bias("b2", b.conv("c2", y, 12)))))


def test_right_model_passes():
    report = tf.verify(chain(), "llvm", inputs=1)
    assert report.passed and len(report.comparisons) == 3
    assert "2 of 2 groups match" in str(report)


@pytest.fixture
def wrong_tanh(monkeypatch):
    """A template that computes exp for tanh, as a scheduling error would."""
    real = schedule_groups.schedule

    def schedule(func, target):
        func, name = real(func, target)
        text = func.script()
        if "T.tanh(" in text:
            func = tvm.script.from_source(text.replace("T.tanh(", "T.exp("))
        return func, name

    monkeypatch.setattr(schedule_groups, "schedule", schedule)


def test_a_wrong_group_is_named_and_left_out(wrong_tanh):
    module = chain()
    report = tf.verify(module, "llvm", inputs=1)
    assert not report.passed
    assert [c.nodes for c in report.failed if c.name != "model"] == [("c2", "b2", "tanh")]
    assert "worst at" in str(report)
    with pytest.warns(RuntimeWarning, match="left unfused"):
        compiled = tf.compile(module, "llvm")
    assert [g.nodes for g in compiled.plan.groups] == [("c1", "b1", "r1")]
    assert compiled.plan.rejected[-1].reason == "numerics"
    with pytest.raises(LoweringError, match="left unfused"):
        tf.compile(module, "llvm", strict=True)


def test_products_in_tf32_may_differ_as_those_of_float16_on_a_gpu_alone():
    module, gpu, cpu = chain(), parse_target("cuda:sm_90"), parse_target("llvm")
    exact = tf.plan(module, gpu)
    plan = tf.plan(module, gpu, tf.FusionConfig(float32_products="tf32"))
    assert exact.float32_products == "float32" and plan.float32_products == "tf32"
    for table in (verify.GROUP_TOLERANCE, verify.MODEL_TOLERANCE):
        assert table["float32"] < table["tf32"] == table["float16"]
        assert verify.tolerance_of(plan, gpu, table) == table["tf32"]
        assert verify.tolerance_of(plan, gpu, table, dense=False) == table["float32"]
        assert verify.tolerance_of(plan, cpu, table) == table["float32"]
        assert verify.tolerance_of(exact, gpu, table) == table["float32"]


def mixed(*, narrow: bool):
    """A product in float32 of float16 inputs, rounded to float16 or not."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(n, relax.TensorType((32, 32), "float16")) for n in "xy")
    with builder.function("main", [x, y], {"num_input": 2}):
        with builder.dataflow():
            wide = [builder.emit(relax.op.astype(v, "float32")) for v in (x, y)]
            out = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(*wide))))
            out = builder.emit(relax.op.astype(out, "float16")) if narrow else out
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    return tf.transform.Canonicalize()(builder.get())


@pytest.mark.parametrize("narrow", [True, False])
def test_results_of_a_narrower_type_than_the_products_are_rounded(narrow):
    module = mixed(narrow=narrow)
    plan = tf.plan(module, "llvm")
    assert plan.dtype == "float32"
    report = tf.verify(module, "llvm", plan=plan)
    assert report.passed
    table = verify.MODEL_TOLERANCE
    assert report.comparisons[0].tolerance == table["float16" if narrow else "float32"]


def test_a_plan_in_tf32_is_verified_on_its_own_layout():
    """Its convolutions are channels-last; the model's inputs and outputs are not."""
    module = chain()
    plan = tf.plan(module, "cuda:sm_90", tf.FusionConfig(float32_products="tf32"))
    assert any(o.op == "permute_dims" for o in graph_of(module, "tf32").operators)
    assert not any(o.op == "permute_dims" for o in graph_of(module).operators)
    report = tf.verify(module, "llvm", plan=plan, inputs=1)
    assert report.passed and len(report.comparisons) == 1 + len(plan.groups)


def test_a_refusal_names_the_groups_own_strategy_and_is_legal_json():
    plan = tf.plan(parallel_convs(3, channels=4, spatial=7, relu=True), "llvm")
    (group,) = plan.groups
    wrong = Comparison(group.id, group.nodes, float("inf"), 1e-5, "y[0]", 2)
    (refusal,) = verify.refusals_of([wrong], plan).values()
    assert (refusal.strategy, refusal.outcome, refusal.reason) == (
        "compound",
        "illegal",
        "numerics",
    )
    json.dumps(dict(refusal.numbers), allow_nan=False)
    unbuilt = dataclasses.replace(wrong, problem="no template")
    (refusal,) = verify.refusals_of([unbuilt], plan).values()
    assert (refusal.outcome, refusal.reason) == ("unsupported", "no_template")


def test_worst_element_is_reported():
    spec = TensorSpec("y", (2, 3), "float32")
    wanted = np.arange(6.0).reshape(2, 3)
    got = wanted.copy()
    got[1, 0] += 1
    error, text = worst_element(spec, got, wanted)
    assert error == pytest.approx(1 / 5) and text.startswith("y[1, 0] = 4")


def test_nan_is_an_error_unless_the_reference_has_it():
    spec = TensorSpec("y", (2,), "float32")
    assert worst_element(spec, np.array([np.nan, 1]), np.array([0.0, 1]))[0] == float("inf")
    assert worst_element(spec, np.array([np.nan, 1]), np.array([np.nan, 1]))[0] == 0


def test_position_coded_rows_differ_along_every_axis():
    array = position_coded(TensorSpec("x", (2, 3, 4), "float32"))
    for axis in range(3):
        rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        assert len({r.tobytes() for r in rows}) == array.shape[axis]


def test_inputs_are_repeatable():
    specs = [TensorSpec("x", (3, 3), "float32")]
    first, second = ([a[0] for a in make_inputs(specs, 2, seed=3)] for _ in range(2))
    assert len(first) == 3 and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_dropped_row_index_is_found():
    """A result that repeats its first row passes on a constant input and fails on the position-coded one."""
    spec = TensorSpec("x", (4, 4), "float32")
    coded = position_coded(spec)
    dropped = np.repeat(coded[:1], 4, axis=0)
    assert worst_element(spec, dropped, coded)[0] > 0.1


def total(axis):
    """A sum over some axes, with a tanh that follows."""
    b = ModuleBuilder()
    x = b.input("x", (5, 7, 3))
    return b.finish(b.op("tanh", relax.op.tanh(b.op("sum", relax.op.sum(x, axis)))))


@pytest.mark.parametrize("axis", [None, [0, 1], [1], [2]])
def test_no_sum_of_the_coded_input_cancels(axis):
    """Of a sum that is zero but for rounding every order leaves something else, which is no error of a kernel."""
    array = position_coded(TensorSpec("x", (5, 7, 3), "float64"))
    sums = array.sum(axis=tuple(axis) if axis else None)
    assert np.abs(sums).max() > 0.1
    assert tf.verify(total(axis), "llvm", inputs=1).passed


def test_the_coded_value_of_one_element_is_not_zero():
    assert all(position_coded(TensorSpec("x", s, "float32")).min() > 0 for s in ((), (1,), (1, 1)))


@pytest.mark.parametrize("written_out", [True, False])
def test_operators_that_tvm_writes_out_can_be_referred_to(written_out):
    """A scatter is one block of written loops, which has no root to schedule."""
    b = ModuleBuilder()
    x = b.input("x", (4, 6))
    places = relax.const(np.arange(24).reshape(4, 6) % 5, "int64")
    if written_out:
        y = b.op("scatter", relax.op.scatter_elements(x, places, x, axis=1, reduction="add"))
    else:
        y = b.op("gather", relax.op.gather_elements(x, places, axis=1))
    module = b.finish(b.op("tanh", relax.op.tanh(y)))
    report = tf.verify(module, "llvm", inputs=1)
    assert report.passed and report.comparisons[0].inputs == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types(dtype):
    module = parallel_convs(3, channels=8, spatial=9, relu=True, dtype=dtype, layout="NHWC")
    assert tf.verify(module, "llvm", inputs=1).passed


def test_a_plan_can_be_verified():
    module = chain()
    plan = tf.plan(module, "llvm")
    plan = dataclasses.replace(plan, groups=plan.groups[:1])
    assert len(tf.verify(module, "llvm", plan=plan, inputs=1).comparisons) == 2


def norms(name):
    b = ModuleBuilder()
    x = b.input("x", (2, 6, 5, 4))
    nn = relax.op.nn
    if name == "layer_norm":
        return b.finish(b.op("n", nn.layer_norm(x, b.const(4), b.const(4), axes=[-1])))
    if name == "rms_norm":
        return b.finish(b.op("n", nn.rms_norm(x, b.const(4), axes=[-1])))
    if name == "group_norm":
        call = nn.group_norm(x, b.const(6), b.const(6), num_groups=3, channel_axis=1, axes=[2, 3])
        return b.finish(b.op("n", call))
    return b.finish(
        b.op("n", nn.instance_norm(x, b.const(6), b.const(6), channel_axis=1, axes=[2, 3]))
    )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "instance_norm"])
def test_the_written_out_norms_are_those_of_tvm(name):
    """In float64 for reference and in float32 as TVM defines them."""
    module = norms(name)
    x = np.random.default_rng(0).standard_normal((2, 6, 5, 4)).astype("float32")
    (wide,) = Reference(module, "float32")(x)
    vm = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    assert wide.dtype == np.float64
    assert np.allclose(vm["main"](tvm.runtime.tensor(x)).numpy(), wide, atol=1e-5)
    assert tf.verify(module, "llvm", inputs=1).passed


def test_groups_of_integers_are_exact():
    x = relax.Var("x", relax.TensorType((3, 4), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.add(x, relax.const(3, "int64")))
            y = builder.emit_output(builder.emit(relax.op.multiply(y, y)))
        builder.emit_func_output(y)
    report = tf.verify(builder.get(), "llvm", inputs=1)
    assert report.passed and len(report.comparisons) == 2


def test_an_annotated_module_can_be_verified():
    annotated = tf.transform.VerticalFusion(target="llvm")(chain())
    report = tf.verify(annotated, "llvm", inputs=1)
    assert report.passed and len(report.comparisons) == 3


def test_a_narrow_model_that_rounds_too_much_unfused_too_is_no_failure(monkeypatch):
    module = parallel_convs(2, channels=8, spatial=9, relu=True, dtype="float16", layout="NHWC")
    monkeypatch.setitem(verify.MODEL_TOLERANCE, "float16", 1e-9)
    (whole, *_) = tf.verify(module, "llvm", inputs=1).comparisons
    assert whole.error > 1e-9 and not whole.passed and whole.tolerance == pytest.approx(5e-9)
    monkeypatch.setitem(verify.MODEL_TOLERANCE, "float16", 4e-4)
    (whole, *_) = tf.verify(module, "llvm", inputs=1).comparisons
    assert whole.passed and whole.tolerance < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrong_model_never_raises_its_own_tolerance(monkeypatch, dtype):
    module = parallel_convs(2, channels=8, spatial=9, relu=True, dtype=dtype, layout="NHWC")
    real = CompiledModel.__call__
    monkeypatch.setattr(CompiledModel, "__call__", lambda self, *a: [2 * r for r in real(self, *a)])
    report = tf.verify(module, "llvm", inputs=1)
    assert [c.name for c in report.failed] == ["model"]


def test_an_overflow_of_the_models_own_type_is_no_error():
    spec = TensorSpec("y", (2,), "float32")
    wanted = np.array([1e300, -1e300])
    assert worst_element(spec, np.array([np.inf, -np.inf], "float32"), wanted)[0] == 0
    assert worst_element(spec, np.array([np.inf, 1.0], "float32"), wanted)[0] > 1
