"""bfloat16 inside kernels: kept wide by default, rounded with ``numerics="strict"``."""

import ml_dtypes
import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

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
def test_cuda_code_rounds(arch="sm_75"):
    """nvcc takes it, and run on the CPU it gives what one kernel per operator gives."""
    x = values(ml_dtypes.bfloat16)
    hundred = ml_dtypes.bfloat16(100)
    mod = tf.frontend.from_relax(chain("bfloat16"))
    config = FusionConfig(numerics="strict")
    tf.compile(mod, f"cuda:{arch}", config=config, verify=False, strict=True)
    emulated = EmulatedPlan(mod, parse_target(f"cuda:{arch}"), config)
    (got,) = emulated(x)
    rounded = np.abs(x + hundred) - hundred
    np.testing.assert_array_equal(got.astype("float32"), rounded.astype("float32"))


def test_archs_with_bfloat16_instructions_are_refused():
    mod = tf.frontend.from_relax(chain("bfloat16"))
    with pytest.raises(tf.errors.LoweringError, match="cannot be built for sm_90"):
        tf.compile(mod, "cuda:sm_90", config=FusionConfig(numerics="strict"), verify=False)
