"""What only a GPU can show: the generated kernels run and are right. Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.bench import compare
from tvm_fusion.testing.modules import parallel_convs, random_module
from tvm_fusion.testing.transformer_blocks import bert_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {"members": 4},
        {"members": 4, "relu": True},
        {"members": 8, "relu": True},
        {"members": 3, "relu": True, "join": None, "outputs": [24, 8, 40], "kernel": 1},
        {"members": 2, "relu": True, "join": "concat", "separate": True},
        {"members": 2, "relu": True, "join": None, "separate": True},
        {"members": 3, "relu": True, "separate": True},
    ],
)
def test_horizontal_groups(options, dtype):
    layout = "NCHW" if dtype == "float32" else "NHWC"
    module = parallel_convs(channels=16, spatial=23, dtype=dtype, layout=layout, **options)
    report = tf.verify(module, "cuda", inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed):
    report = tf.verify(random_module(seed, operators=16), "cuda", inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "inception_v1", "shufflenet"])
def test_models(name, dtype):
    pytest.importorskip("onnx")
    from tvm_fusion.frontend import onnx as onnx_frontend
    from tvm_fusion.targets import parse_target
    from tvm_fusion.testing.models import light_model

    module = onnx_frontend.load(light_model(name), dtype=dtype)
    report = tf.verify(module, "cuda", inputs=1)
    assert report.passed, str(report)
    result = compare(module, parse_target("cuda"), tf.plan(module, "cuda", name=name), repeat=10)
    print(f"\n{name} {dtype}\n{result}")


def test_repeated_runs_give_the_same_bits():
    module = parallel_convs(6, channels=32, spatial=30, relu=True)
    compiled = tf.compile(module, "cuda", verify=False)
    x = np.random.default_rng(0).standard_normal((1, 32, 30, 30)).astype("float32")
    first = compiled(x)[0]
    assert all(np.array_equal(first, compiled(x)[0]) for _ in range(20))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [16, 128, 200])
def test_no_kernel_reads_what_the_run_before_left(tokens, dtype):
    """Kernels start before their predecessors end; what they read too early would be NaN here."""
    module = bert_block(sequence=tokens, dtype=dtype)
    compiled = tf.compile(module, "cuda", verify=False)
    (spec,) = compiled.signature.inputs
    x = np.random.default_rng(0).standard_normal(spec.shape).astype(spec.dtype)
    first = compiled(x)[0]
    assert np.isfinite(first).all()
    for _ in range(10):
        compiled(np.full_like(x, np.nan))
        assert np.array_equal(first, compiled(x)[0])
