"""The block builders: what they compute is what their docstrings say, and it survives fusion."""

from __future__ import annotations

from functools import partial

import pytest

import tvm_fusion as tf
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.testing import blocks, synthetic_blocks, transformer_blocks
from tvm_fusion.testing.named_blocks import IMAGE_BLOCKS, NAMED_BLOCKS, named_block

#: Builder at a small size, working operators, shape of the first result.
SMALL = {
    "bottleneck": (partial(blocks.resnet_bottleneck, channels=16, width=4, size=7), 10, (1, 16, 7, 7)),
    "bottleneck_strided": (
        partial(blocks.resnet_bottleneck, channels=8, width=4, size=8, stride=2, projection=True), 12, (1, 16, 4, 4),
    ),
    "residual": (partial(blocks.residual_block, channels=8, size=7, convs=2, relu=True), 7, (1, 8, 7, 7)),
    "repvgg": (partial(blocks.repvgg_block, channels=8, size=7), 7, (1, 8, 7, 7)),
    "squeeze_excite": (
        partial(blocks.squeeze_excite, channels=8, reduced=4, size=6, residual=True), 10, (1, 8, 6, 6),
    ),
    "squeeze_excite_dense": (
        partial(blocks.squeeze_excite, channels=8, reduced=4, size=6, dense=True, batch=2), 8, (2, 8, 6, 6),
    ),
    "head_add": (partial(blocks.segmentation_head, channels=8, outputs=8, size=6), 7, (1, 8, 6, 6)),
    "head_concat": (
        partial(blocks.segmentation_head, channels=8, outputs=8, size=6, join="concat"), 7, (1, 16, 6, 6),
    ),
    "inception": (
        partial(blocks.inception_module, channels=8, widths=(4, 4, 8, 4, 8, 4), size=7), 20, (1, 24, 7, 7),
    ),
    "inverted_residual": (partial(blocks.inverted_residual, channels=8, expand=2, size=7), 9, (1, 8, 7, 7)),
    "inverted_residual_strided": (
        partial(blocks.inverted_residual, channels=8, outputs=4, expand=1, size=8, stride=2), 5, (1, 4, 4, 4),
    ),
    "fire": (partial(blocks.fire, channels=8, squeeze=4, expand=8, size=7), 10, (1, 16, 7, 7)),
    "shuffle": (partial(blocks.shuffle_unit, channels=16, groups=2, size=6), 10, (1, 16, 6, 6)),
    "shuffle_strided": (
        partial(blocks.shuffle_unit, channels=16, groups=2, size=6, stride=2), 11, (1, 32, 3, 3),
    ),
    "csp": (partial(blocks.csp_block, channels=8, size=7), 12, (1, 8, 7, 7)),
    "depthwise_pointwise": (
        partial(blocks.depthwise_pointwise, channels=8, outputs=16, size=7), 6, (1, 16, 7, 7),
    ),
    "bert": (
        partial(transformer_blocks.bert_block, batch=2, sequence=6, hidden=16, heads=2), 25, (2, 6, 16),
    ),
    "projections": (
        partial(transformer_blocks.head_projections, heads=2, tokens=6, hidden=16, width=8), 12, (6, 8),
    ),
    "projections_concat": (
        partial(transformer_blocks.head_projections, heads=2, tokens=6, hidden=16, width=8, join="concat"), 15, (6, 16),
    ),
    "dense_norm_heads": (
        partial(transformer_blocks.dense_norm_heads, rows=6, width=16, outputs=8), 12, (6, 8),
    ),
    "dense_norm_heads_separate": (
        partial(transformer_blocks.dense_norm_heads, rows=6, width=16, outputs=8, separate=True, relu=True), 16, (6, 8),
    ),
    "dense_norm": (partial(transformer_blocks.dense_norm, rows=6, width=16, outputs=8), 4, (6, 8)),
    "dense_gelu": (partial(transformer_blocks.dense_gelu, rows=6, width=16, outputs=8), 3, (6, 8)),
    "matmul_pair": (partial(transformer_blocks.matmul_pair, rows=6, width=16, inner=4, outputs=8), 5, (6, 8)),
    "matmul_pair_bare": (
        partial(transformer_blocks.matmul_pair, rows=6, width=16, inner=4, outputs=8, bias=False), 2, (6, 8),
    ),
    "relaxation_chain": (
        partial(synthetic_blocks.relaxation_chain, depth=2, rows=8, width=8, dtype="float32"), 7, (8, 8),
    ),
    "mixed_convs": (
        partial(synthetic_blocks.mixed_convs, [4, 8, 12], channels=4, size=[5, 5, 7], stride=[1, 2, 1]), 6,
        (1, 4, 5, 5),
    ),
    "conv3d": (partial(synthetic_blocks.conv3d_branches, channels=4, outputs=4, size=4), 7, (1, 4, 4, 4, 4)),
    "conv3d_mixed": (
        partial(synthetic_blocks.conv3d_branches, kernels=(3, 1), channels=4, outputs=4, size=4), 7, (1, 4, 4, 4, 4),
    ),
    "summed_loads": (partial(synthetic_blocks.summed_loads, rows=4, width=16), 29, (4, 16)),
    "elementwise_chain": (partial(synthetic_blocks.elementwise_chain, 20, rows=4, width=8), 20, (4, 8)),
    "diamonds": (partial(synthetic_blocks.diamonds, 20, rows=4, width=8), 20, (4, 8)),
    "cross_pair": (partial(synthetic_blocks.cross_pair, channels=4, outputs=8, size=6), 7, (1, 8, 6, 6)),
    "cross_pair_4": (
        partial(synthetic_blocks.cross_pair, ratio=4, channels=4, outputs=8, size=6, join="maximum"), 7, (1, 8, 6, 6),
    ),
}  # fmt: skip


def first_shape(module):
    """Shape of a module's first result."""
    ty = module["main"].ret_ty
    ty = ty.fields[0] if hasattr(ty, "fields") else ty
    return tuple(int(d) for d in ty.shape)


@pytest.mark.parametrize("name", SMALL)
def test_a_block_survives_fusion(name):
    make, operators, shape = SMALL[name]
    module = make()
    assert first_shape(module) == shape
    plan = tf.plan(module, "llvm", name=name)
    assert plan.operators == operators, "canonicalisation must leave every operator of the block"
    report = tf.verify(module, "llvm", plan=plan, inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["csp", "shuffle", "squeeze_excite", "inverted_residual"])
def test_half_precision_in_its_own_layout(name):
    make, operators, (n, c, h, w) = SMALL[name]
    module = make(dtype="float16", layout="NHWC")
    assert first_shape(module) == (n, h, w, c)
    plan = tf.plan(module, "llvm", name=name)
    assert plan.operators == operators
    report = tf.verify(module, "llvm", plan=plan, inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", NAMED_BLOCKS)
def test_named_blocks_are_canonical_modules(name):
    for dtype in ("float32", "float16"):
        module = canonicalize(named_block(name, dtype))
        assert str(module["main"].params[0].ty.dtype) == dtype


def test_unknown_block():
    assert "fire" in IMAGE_BLOCKS and "bert" not in IMAGE_BLOCKS
    with pytest.raises(ValueError, match="unknown block 'lenet'"):
        named_block("lenet")


@pytest.mark.parametrize(
    ("options", "ratio"), [({}, 1), ({"ratio": 3}, 3), ({"kernels": (3, 1)}, 9), ({"ratio": 4}, 4)]
)
def test_work_ratio_of_a_cross_pair(options, ratio):
    graph = from_relax(synthetic_blocks.cross_pair(channels=4, outputs=4, size=4, **options)).graph
    assert graph.by_name["heavy_conv"].flops == ratio * graph.by_name["light_conv"].flops


def test_weights_are_seeded():
    def weights(seed):
        module = blocks.fire(channels=4, squeeze=2, expand=2, size=4, seed=seed)
        return module["main"].body.blocks[0].bindings[0].value.args[1].value.numpy()

    assert (weights(1) == weights(1)).all() and not (weights(1) == weights(2)).any()


def test_impossible_blocks_are_refused():
    with pytest.raises(ValueError, match="identity shortcut"):
        blocks.resnet_bottleneck(stride=2)
    with pytest.raises(ValueError, match="join must be"):
        blocks.segmentation_head(join="max")


@pytest.mark.torch
def test_mobilenet_v2_from_torch():
    pytest.importorskip("torch")
    from tvm_fusion.testing.torch_models import exported

    settings = ((1, 8, 1, 1), (2, 8, 2, 2))
    program = exported("mobilenet_v2", size=16, settings=settings, last=16, classes=5)
    module = tf.frontend.torch.load(program)
    plan = tf.plan(module, "llvm", name="mobilenet_v2")
    # Stem 3, blocks 5 + 8 + 9 (shortcut), last convolution 3, mean, product and bias.
    assert plan.operators == 31
    assert sum(op == "conv2d" for g in plan.groups for op in g.operators) == 10
    report = tf.verify(module, "llvm", plan=plan, inputs=1)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.torch
def test_whole_mobilenet_v2():
    pytest.importorskip("torch")
    from tvm_fusion.testing.torch_models import exported

    module = tf.frontend.torch.load(exported("mobilenet_v2", size=64))
    plan = tf.plan(module, "llvm", name="mobilenet_v2")
    assert sum(op == "conv2d" for g in plan.groups for op in g.operators) == 52
    report = tf.verify(module, "llvm", plan=plan, inputs=1)
    assert report.passed, str(report)
