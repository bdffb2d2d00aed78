"""The nine real architectures: plan, compile for both targets, verify, compare with onnxruntime."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.frontend import onnx as onnx_frontend
from tvm_fusion.testing.models import LIGHT_MODELS, light_model

pytest.importorskip("onnx")

#: Small enough for every run of the tests.
QUICK = ("squeezenet",)
ALL = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LIGHT_MODELS]


def imported(name, dtype=None):
    return onnx_frontend.load(light_model(name), dtype=dtype)


def reference(name, x):
    """Outputs of onnxruntime on the unchanged ONNX model."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(light_model(name).SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.mark.parametrize("name", ALL)
def test_whole_model_on_the_cpu(name, tmp_path):
    """Compiled with every group, the model gives what onnxruntime gives, also after export and load."""
    compiled = tf.compile(imported(name), "llvm", verify=False, strict=True)
    compiled.export(tmp_path / "model.so")
    x = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype("float32")
    for got, wanted in zip(tf.load(tmp_path / "model.so")(x), reference(name, x), strict=True):
        assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ALL)
def test_verify(name):
    report = tf.verify(imported(name), "llvm", inputs=1)
    assert report.passed, str(report)


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_cuda(name, dtype):
    """One kernel per group, no group left out, and nvcc accepts all of it for sm_90a."""
    module = imported(name, dtype)
    compiled = tf.compile(module, "cuda:sm_90a", verify=False, strict=True)
    defined = set(compiled.cuda_kernels())
    assert {f"{k}_kernel" for k in compiled.kernels.values()} <= defined
    # Distinct kernels: those of groups, and at most one for each operator outside them. A reshape that
    # is the model's result cannot be a view.
    computing = {name for name in defined if not name.startswith("reshape")}
    assert len(computing) <= len(set(compiled.kernels.values())) + len(compiled.plan.ungrouped)


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("name", ["resnet50", "inception_v1", "shufflenet"])
def test_other_archs(name, arch):
    compiled = tf.compile(imported(name), f"cuda:{arch}", verify=False, strict=True)
    report = kernel_resources("\n".join(compiled.cuda_sources()), arch)
    assert all(report[f"{k}_kernel"].registers <= 255 for k in compiled.kernels.values())


def test_resnet50_is_fused_from_convolution_to_convolution():
    plan = tf.plan(imported("resnet50"), "cuda:sm_90a", tf.FusionConfig(strategies="vertical"))
    plan = dataclasses.replace(
        plan, groups=tuple(g for g in plan.groups if g.options.get("form") != "back_to_back")
    )
    assert {u.op for u in plan.ungrouped} == {"max_pool2d", "avg_pool2d"}
    assert plan.group_of(plan.groups[-1].nodes[-1]).operators == ("matmul", "add", "softmax")
    for group in plan.groups:
        assert group.operators[0] in ("conv2d", "matmul") and group.operators[1] == "add"
    assert plan.totals.launches_before == 176 and plan.totals.launches_after <= 57


def test_resnet50_joins_its_shortcuts():
    """One cross kernel per block, identity or projection, unless two anchors share one; all proven best."""
    plan = tf.plan(imported("resnet50"), "cuda:sm_90a")
    joined = [g for g in plan.groups if g.strategy == "cross"]
    assert {g.options.get("shortcut", "projection") for g in joined} == {"identity", "projection"}
    pairs = [g for g in plan.groups if g.options.get("form") == "back_to_back"]
    assert len(joined) + len(pairs) >= 16
    assert plan.totals.launches_after < 57 and plan.search.bounded == 0
    assert len([r for r in plan.regions if r.kind == "parallel"]) >= 8


def test_inception_merges_the_pointwise_convolutions_of_each_module():
    plan = tf.plan(imported("inception_v1"), "cuda:sm_90a")
    merged = [g for g in plan.groups if g.strategy == "compound"]
    assert len(merged) == 9
    assert all(g.members == 3 and g.options == {"form": "merged", "join": "apart"} for g in merged)


def test_squeezenet_fire_modules_are_one_launch():
    plan = tf.plan(imported("squeezenet"), "cuda:sm_90a")
    fire = [g for g in plan.groups if "concat" in g.operators]
    assert len(fire) == 8
    assert all(g.options == {"form": "partitioned", "join": "concat"} for g in fire)


@pytest.mark.parametrize("name", ["resnet50", "shufflenet"])
def test_float16_keeps_one_layout(name):
    """NHWC throughout: the one transpose that remains is the input's (ShuffleNet's own shuffles aside)."""
    plan = tf.plan(imported(name, "float16"), "cuda:sm_90a")
    transposes = [u.node for u in plan.ungrouped if u.op == "permute_dims"]
    assert len(transposes) == {"resnet50": 1, "shufflenet": 17}[name]
