"""Whole plans for a GPU, without one: the CUDA source of every kernel of a compilation, run on the CPU."""

from __future__ import annotations

import re
import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from tvm import relax

import tvm_fusion as tf
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import blocks, cuda_emulation, transformer_blocks
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.modules import ALL_KINDS, parallel_convs, random_module
from tvm_fusion.verification.reference import Reference
from tvm_fusion.verification.verify import GROUP_TOLERANCE

#: Largest error relative to the largest value: a few roundings between operators.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

#: name: module of a type, templates of 16-bit plans on sm_90.
IMAGES = {
    "bottleneck": (
        partial(blocks.resnet_bottleneck, channels=32, width=16, size=9, projection=True),
        {"tensor_core"},
    ),
    "repvgg": (partial(blocks.repvgg_block, channels=24, size=9), {"tensor_core"}),
    "inception": (
        partial(blocks.inception_module, channels=24, widths=(16, 24, 32, 8, 16, 8), size=9),
        {"tensor_core"},
    ),
    "inverted residual": (
        partial(blocks.inverted_residual, channels=16, size=9, stride=2, outputs=24),
        {"tensor_core"},
    ),
    "fire": (partial(blocks.fire, channels=32, squeeze=16, expand=24, size=9), {"tensor_core"}),
    "head": (
        partial(blocks.segmentation_head, channels=16, outputs=24, size=9, join="concat"),
        {"partitioned"},
    ),
    "squeeze and excite": (partial(blocks.squeeze_excite, channels=24, size=9), set()),
    "csp": (partial(blocks.csp_block, channels=16, size=8), {"tensor_core"}),
    "depthwise": (
        partial(blocks.depthwise_pointwise, channels=24, outputs=40, size=9),
        {"tensor_core"},
    ),
    "parallel": (
        partial(parallel_convs, 4, channels=16, spatial=9, relu=True),
        {"tensor_core"},
    ),
    "apart": (
        partial(
            parallel_convs, 3, channels=16, spatial=9, outputs=[24, 8, 40], join=None, kernel=1
        ),
        {"tensor_core"},
    ),
}
TEXT = {
    "bert": (
        partial(transformer_blocks.bert_block, sequence=16, hidden=48, heads=3),
        {"tensor_core"},
    ),
    "llama": (
        partial(transformer_blocks.llama_layer, sequence=24, hidden=64, heads=4, inner=88),
        {"tensor_core", "attention", "partitioned", "rows"},
    ),
    "llama grouped": (
        partial(
            transformer_blocks.llama_layer,
            sequence=24,
            hidden=64,
            heads=4,
            kv_heads=2,
            inner=88,
        ),
        {"tensor_core", "attention", "elementwise", "rows"},
    ),
    "projections": (
        partial(transformer_blocks.head_projections, heads=3, tokens=24, hidden=48, width=16),
        {"tensor_core"},
    ),
    "dense norm": (
        partial(transformer_blocks.dense_norm_heads, heads=3, rows=24, width=48, outputs=64),
        {"tensor_rows"},
    ),
}


def error_of(
    module, dtype: str, arch: str, config: tf.FusionConfig | None = None
) -> tuple[float, EmulatedPlan]:
    """Largest error of a model's plan, relative to the largest value, and the plan."""
    with warnings.catch_warnings():
        # A group that cannot become one kernel is left unfused with a warning; here it is an error.
        warnings.simplefilter("error", RuntimeWarning)
        plan = EmulatedPlan(module, parse_target(f"cuda:{arch}"), config)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = np.random.default_rng(0)
    inputs = [
        rng.standard_normal([int(n) for n in p.ty.shape]).astype(kind)
        for p in module["main"].params
    ]
    errors = []
    for result, expected in zip(plan(*inputs), Reference(module, dtype)(*inputs), strict=True):
        difference = np.abs(result.astype("float64") - expected.astype("float64")).max()
        errors.append(difference / max(1e-6, np.abs(expected).max()))
    return max(errors), plan


@pytest.mark.parametrize("name", [*IMAGES, *TEXT])
def test_blocks_in_half_precision(name):
    make, templates = {**IMAGES, **TEXT}[name]
    layout = {"layout": "NHWC"} if name in IMAGES else {}
    error, plan = error_of(make(dtype="float16", **layout), "float16", "sm_90")
    assert error <= TOLERANCE["float16"]
    assert templates <= set(plan.templates.values())


@pytest.mark.parametrize(
    "name",
    [
        "depthwise",
        "bert",
        "dense norm",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("bottleneck", "inception", "projections")
        ),
    ],
)
def test_blocks_in_tf32(name):
    """Within the tolerance of verification, and off by more than float32 is."""
    make, templates = {**IMAGES, **TEXT}[name]
    module = canonicalize(make(dtype="float32"), channels_last=True)
    error, plan = error_of(module, "float32", "sm_90", tf.FusionConfig(float32_products="tf32"))
    assert TOLERANCE["float32"] < error <= GROUP_TOLERANCE["tf32"]
    assert plan.plan.float32_products == "tf32"
    assert templates <= set(plan.templates.values())
    assert "multiply_add" not in plan.templates.values()
    exact = EmulatedPlan(module, parse_target("cuda:sm_90"))
    assert not {"tensor_core", "tensor_rows"} & set(exact.templates.values())


def equal_projections(dtype):
    """Products of one shape whose inputs, weights and results are tensors of their own."""
    mod = relax.BlockBuilder()
    rng = np.random.default_rng(0)
    inputs = [relax.Var(f"x{i}", relax.TensorType((32, 64), dtype)) for i in range(3)]
    with mod.function("main", inputs):
        with mod.dataflow():
            made = []
            for x in inputs:
                weight = relax.const(rng.standard_normal((64, 64)) / 8, dtype)
                bias = relax.const(rng.standard_normal(64), dtype)
                made.append(mod.emit(relax.op.add(relax.op.matmul(x, weight), bias)))
            result = mod.emit_output(relax.Tuple(made))
        mod.emit_func_output(result)
    return canonicalize(mod.get())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_equal_members_keep_their_own_tensors(dtype):
    error, plan = error_of(equal_projections(dtype), dtype, "sm_90")
    assert error <= TOLERANCE[dtype]
    assert "partitioned" in plan.templates.values()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [equal_projections, TEXT["bert"][0]], ids=["equal", "bert"])
def test_what_is_emulated_is_what_is_compiled(make, dtype):
    module, target = make(dtype=dtype), parse_target("cuda:sm_90")
    plan = EmulatedPlan(module, target)
    built = tf.compile(module, target, plan=plan.plan, verify=False)
    compiled = kernels_of("\n".join(built.cuda_sources()))
    assert compiled
    for name, func in plan.mod.functions_items():
        kernel = f"{name.name_hint}_kernel"
        if kernel in compiled:
            (emulated,) = kernels_of(cuda_emulation.cuda_source(func, target)).values()
            assert compiled.pop(kernel) == emulated
    assert not compiled


def kernels_of(source: str) -> dict[str, str]:
    """Code of the kernels of a source by name, without the names."""
    start = r'^extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)(?=\()'
    _, *parts = re.split(start, source, flags=re.MULTILINE)
    code = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if not text.split("{")[0].rstrip().endswith(";"):  # a declaration
            code[name] = text.strip()
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "arch"), [("bfloat16", "sm_80"), ("float32", "sm_90"), ("float16", "sm_75")]
)
@pytest.mark.parametrize("name", [*IMAGES, *TEXT])
def test_blocks_in_other_types(name, dtype, arch):
    make, _ = {**IMAGES, **TEXT}[name]
    layout = {"layout": "NHWC"} if name in IMAGES and dtype != "float32" else {}
    error, plan = error_of(make(dtype=dtype, **layout), dtype, arch)
    assert error <= TOLERANCE[dtype]
    assert arch != "sm_75" or not {"tensor_core", "tensor_rows"} & set(plan.templates.values())


@pytest.mark.parametrize("seed", [10, pytest.param(range(40), marks=pytest.mark.slow)], ids=str)
def test_random_graphs(seed):
    for number in [seed] if isinstance(seed, int) else seed:
        module = canonicalize(random_module(number, 12, "float32", ALL_KINDS), "float16")
        error, _ = error_of(module, "float16", "sm_90")
        assert error <= TOLERANCE["float16"], f"seed {number}"
