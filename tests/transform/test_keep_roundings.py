"""bfloat16 inside kernels: kept wide by default, rounded with ``numerics="strict"``."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax, structural_equal, te, tirx, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import blocks, modules, transformer_blocks
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.transform.keep_roundings import keep_roundings

op = relax.op


def module(dtype, *steps):
    """Return a module that applies steps to ``x[4, 4, 4]`` one after another."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4, 4), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for step in steps:
                value = builder.emit(step(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def chain(dtype):
    """100 added and taken away: what is left of x depends on what the sum is rounded to."""
    hundred = relax.const(100.0, dtype)
    return module(dtype, lambda v: op.add(v, hundred), op.abs, lambda v: op.subtract(v, hundred))


def values(dtype):
    x = np.random.default_rng(0).standard_normal(64).astype("float32")
    x[:4] = [np.nan, np.inf, 2**-8, 3 * 2**-9]
    return x.reshape(4, 4, 4).astype(dtype)


def fused(mod, numerics):
    """Compile in one kernel."""
    compiled = tf.compile(
        mod, "llvm", config=FusionConfig(numerics=numerics), verify=False, strict=True
    )
    assert len(compiled.plan.groups) == 1 and compiled.plan.numerics == numerics
    return compiled


def test_strict_rounds_between_operators():
    x = values(ml_dtypes.bfloat16)
    hundred = ml_dtypes.bfloat16(100)
    rounded = np.abs(x + hundred) - hundred
    strict = fused(chain("bfloat16"), "strict")(x)[0]
    np.testing.assert_array_equal(strict.astype("float32"), rounded.astype("float32"))


def test_the_default_does_not():
    """The kernel then agrees with float32, rounded once."""
    x = values(ml_dtypes.bfloat16)
    once = (np.abs(x.astype("float32") + 100) - 100).astype(ml_dtypes.bfloat16)
    wide = fused(chain("bfloat16"), "wide")(x)[0]
    np.testing.assert_array_equal(wide.astype("float32"), once.astype("float32"))


@pytest.mark.parametrize("choose", [tirx.Select, tirx.if_then_else])
@pytest.mark.parametrize(
    ("first", "second", "rounded"),
    [
        ("moved", "zero", False),  # padding
        ("zero", "moved", False),
        ("computed", "zero", True),
        ("zero", "computed", True),
        ("computed", "computed", True),
    ],
)
def test_what_only_moves_is_not_rounded_again(choose, first, second, rounded):
    def written(dtype):
        """A function that writes one of two values."""
        x = te.placeholder((8,), dtype)
        parts = {
            "moved": lambda i: x[i],
            "computed": lambda i: x[i] * x[i],
            "zero": lambda i: tirx.const(0, dtype),
        }
        y = te.compute((8,), lambda i: choose(i < 4, parts[first](i), parts[second](i)))
        return tvm.IRModule({"main": te.create_prim_func([x, y])})

    for mod, narrow in ((written("bfloat16"), True), (written("float32"), False)):
        assert structural_equal(mod, keep_roundings(mod)) is not (rounded and narrow)


@pytest.mark.parametrize("numerics", ["wide", "strict"])
def test_float16_is_rounded_either_way(numerics):
    x = values(np.float16)
    hundred = np.float16(100)
    rounded = np.abs(x + hundred) - hundred
    np.testing.assert_array_equal(fused(chain("float16"), numerics)(x)[0], rounded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_there_and_back_are_kept(dtype):
    x = values(np.float32)
    mod = module(
        "float32", lambda v: op.astype(v, dtype), lambda v: op.astype(v, "float32"), op.negative
    )
    narrow = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    strict = fused(mod, "strict")(x)[0]
    np.testing.assert_array_equal(strict, -x.astype(narrow).astype("float32"))


def test_only_strict_groups_say_so():
    mod = tf.frontend.from_relax(chain("bfloat16"))
    target = tvm.target.Target("llvm")
    for numerics in ("wide", "strict"):
        annotated = tf.transform.Fuse(FusionConfig(numerics=numerics), target)(mod)
        attrs = [f.attrs for gv, f in annotated.functions_items() if gv.name_hint != "main"]
        assert [a.get("tvm_fusion.numerics") for a in attrs] == [
            None if numerics == "wide" else "strict"
        ]


def test_unknown_numerics():
    with pytest.raises(ValueError, match="unknown numerics 'exact'; choose from wide, strict"):
        FusionConfig(numerics="exact")


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_cuda_code_rounds(arch, dtype):
    """nvcc takes it, and run on the CPU it gives what one kernel per operator gives."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x, hundred = values(kind), kind.type(100)
    mod = tf.frontend.from_relax(chain(dtype))
    config = FusionConfig(numerics="strict")
    if arch in ("sm_75", "sm_90"):
        tf.compile(mod, f"cuda:{arch}", config=config, verify=False, strict=True)
    (got,) = EmulatedPlan(mod, parse_target(f"cuda:{arch}"), config)(x)
    rounded = np.abs(x + hundred) - hundred
    np.testing.assert_array_equal(got.astype("float32"), rounded.astype("float32"))
    (wide,) = EmulatedPlan(mod, parse_target(f"cuda:{arch}"))(x)
    if dtype == "bfloat16" or arch != "sm_75":
        assert (wide.astype("float32") != rounded.astype("float32")).any()


IMAGES = {
    "depthwise": partial(blocks.depthwise_pointwise, channels=24, outputs=40, size=9),
    "squeeze and excite": partial(blocks.squeeze_excite, channels=24, size=9),
    "parallel": partial(modules.parallel_convs, 4, channels=16, spatial=9, relu=True),
    "inception": partial(
        blocks.inception_module, channels=24, widths=(16, 24, 32, 8, 16, 8), size=9
    ),
    "bottleneck": partial(blocks.resnet_bottleneck, channels=32, width=16, size=9, projection=True),
}
TEXT = {
    "dense norm": partial(
        transformer_blocks.dense_norm_heads, heads=3, rows=24, width=48, outputs=64
    ),
    "bert": partial(transformer_blocks.bert_block, sequence=16, hidden=48, heads=3),
}
SLOW = ("inception", "bottleneck", "bert", "squeeze and excite", "parallel")


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in (*IMAGES, *TEXT)],
)
def test_kernels_of_blocks_round_to_the_bit(name, arch):
    """Whole plans for a GPU against one kernel per operator on the CPU; kept wide, they differ."""
    make = {**IMAGES, **TEXT}[name]
    mod = make(dtype="bfloat16", **({"layout": "NHWC"} if name in IMAGES else {}))
    shapes = [[int(n) for n in p.ty.shape] for p in mod["main"].params]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]
    unfused = tf.compile(mod, "llvm", config=FusionConfig(deny=("*",)), verify=False)(*inputs)

    def equal(numerics):
        plan = EmulatedPlan(mod, parse_target(f"cuda:{arch}"), FusionConfig(numerics=numerics))
        assert plan.plan.groups
        got = plan(*inputs)
        return all((a == b).all() for a, b in zip(got, unfused, strict=True))

    assert equal("strict") and not equal("wide")


def test_the_steps_of_an_operator_are_not_rounded():
    """A GELU is several steps of one operator."""
    x = values(ml_dtypes.bfloat16)
    mod = module("bfloat16", op.nn.gelu, op.nn.gelu)
    alone = module("bfloat16", op.nn.gelu)
    first = tf.compile(alone, "llvm", verify=False)(x)[0]
    twice = tf.compile(alone, "llvm", verify=False)(first)[0]
    strict = fused(mod, "strict")(x)[0]
    np.testing.assert_array_equal(strict.astype("float32"), twice.astype("float32"))


@pytest.mark.parametrize(
    ("numerics", "dtype", "refused"),
    [("strict", "bfloat16", True), ("wide", "bfloat16", False), ("strict", "float32", False)],
)
def test_forms_that_leave_roundings_out_are_refused(numerics, dtype, refused):
    """A sum of convolutions is one convolution of the added weights only where that is allowed."""
    mod = modules.parallel_convs(3, channels=16, spatial=9, relu=False, dtype=dtype)
    plan = tf.plan(mod, "cuda:sm_90", config=FusionConfig(numerics=numerics))
    reasons = {(r.reason, r.outcome) for r in plan.rejected}
    assert (("numerics", "illegal") in reasons) == refused
    forms = {g.options.get("form") for g in plan.groups}
    assert ("collapsed" in forms) != refused
