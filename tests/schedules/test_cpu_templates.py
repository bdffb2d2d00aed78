"""CPU templates: which one fires, and numbers against the unscheduled function."""

import math

import numpy as np
import pytest
from tvm_fusion.schedules import registry
from tvm_fusion.schedules.analysis import nodes_of, structure
from tvm_fusion.schedules.cpu.narrow import widen_operands
from tvm_fusion.schedules.cpu.split import join_stages, split_stages
from tvm_fusion.schedules.cpu.templates import (
    CpuContraction,
    CpuElementwise,
    CpuFallback,
    CpuRows,
    CpuWindow,
)

import tvm_fusion as tf
from tvm_fusion.compat import Target, relax, s_tir, tirx, tvm
from tvm_fusion.testing.groups import (
    emit_joined,
    group_function,
    group_module,
    run_on_cpu,
    with_group_function,
)
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.transform.legalize_horizontal import emit_concat_stores, emit_split_store

op = relax.op
LLVM = Target("llvm")
CHANNELS_LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
TEMPLATES = {
    template.name: template
    for template in (CpuContraction(), CpuWindow(), CpuRows(), CpuElementwise(), CpuFallback())
}


def unary(operator, **options):
    return lambda builder, x: builder.emit(operator(x, **options))


def conv(**options):
    return lambda builder, x, w: builder.emit(
        op.nn.relu(builder.emit(op.nn.conv2d(x, w, **options)))
    )


def conv_bias_residual(builder, x, w, bias, shortcut):
    value = builder.emit(op.add(builder.emit(op.nn.conv2d(x, w, padding=1)), bias))
    return builder.emit(op.nn.relu(builder.emit(op.add(value, shortcut))))


def two_anchors(builder, x, w, v):
    wide, point = builder.emit(op.nn.conv2d(x, w, padding=1)), builder.emit(op.nn.conv2d(x, v))
    return builder.emit(op.nn.relu(builder.emit(op.add(wide, point))))


def back_to_back(builder, x, w, v):
    return conv()(builder, conv(padding=1)(builder, x, w), v)


def two_outputs(builder, x, w):
    value = builder.emit(op.nn.conv2d(x, w, padding=1))
    return [value, builder.emit(op.nn.relu(value))]


def prologue(builder, x, scale, w):
    value = builder.emit(op.sigmoid(builder.emit(op.multiply(x, scale))))
    return builder.emit(op.nn.conv2d(value, w, padding=1))


def projection(builder, x, w, bias, y, v):
    """Anchors of other inputs, strides and reduction lengths in one sum."""
    left = builder.emit(op.add(builder.emit(op.nn.conv2d(x, w, padding=1)), bias))
    right = builder.emit(op.nn.conv2d(y, v, strides=2))
    return builder.emit(op.nn.relu(builder.emit(op.add(left, right))))


def projection_nhwc(builder, x, w, y, v):
    left = builder.emit(op.nn.conv2d(x, w, padding=1, **CHANNELS_LAST))
    right = builder.emit(op.nn.conv2d(y, v, strides=2, **CHANNELS_LAST))
    return builder.emit(op.nn.relu(builder.emit(op.add(left, right))))


def three_joined(builder, x, w, v, u):
    """The first two results wait in memory for the third."""
    parts = [builder.emit(op.nn.conv2d(x, weight)) for weight in (w, v, u)]
    total = builder.emit(op.maximum(builder.emit(op.multiply(parts[0], parts[1])), parts[2]))
    return builder.emit(op.sigmoid(total))


def gate(builder, s, w, bias, x):
    weights = builder.emit(op.sigmoid(builder.emit(op.add(builder.emit(op.matmul(s, w)), bias))))
    count = int(weights.ty.shape[1])
    return builder.emit(op.multiply(builder.emit(op.reshape(weights, (1, count, 1, 1))), x))


def depthwise_pointwise(builder, x, w, bias, v):
    count = int(x.ty.shape[1])
    value = builder.emit(op.nn.conv2d(x, w, padding=1, groups=count))
    value = builder.emit(op.nn.relu(builder.emit(op.add(value, bias))))
    return conv()(builder, value, v)


def pointwise_depthwise(builder, x, v, w):
    value = conv()(builder, x, v)
    return conv(padding=1, groups=int(w.ty.shape[0]))(builder, value, w)


def two_products(builder, x, w, bias, v):
    return builder.emit(op.matmul(dense_gelu(builder, x, w, bias), v))


def dense_residual_norm(builder, x, w, bias, shortcut, gamma, beta):
    value = builder.emit(op.add(builder.emit(op.matmul(x, w)), bias))
    return layer_norm(builder, builder.emit(op.add(value, shortcut)), gamma, beta)


def norms_apart(builder, x, w, gamma, y, v):
    return [
        builder.emit(op.nn.rms_norm(builder.emit(op.matmul(a, b)), gamma, axes=[-1]))
        for a, b in ((x, w), (y, v))
    ]


def concat_with_copy(builder, x, w, y, bias):
    parts = [conv(padding=1)(builder, x, w), builder.emit(op.add(y, bias)), x]
    return builder.emit(emit_concat_stores(builder, parts, 1))


def split_channels(builder, x, w):
    return builder.emit(emit_split_store(builder, conv(padding=1)(builder, x, w), [24, 16], 1))


def concat_branches(builder, x, w, v):
    parts = [conv(padding=1)(builder, x, w), conv()(builder, x, v)]
    return builder.emit(emit_concat_stores(builder, parts, 1))


def joined(builder, x, w, bias):
    shapes = (1, 8, 14, 14), (6, 8, 3, 3)
    data, kernel = (relax.Var("v", relax.TensorType(shape, str(x.ty.dtype))) for shape in shapes)
    attrs = op.nn.conv2d(data, kernel, padding=1).attrs
    return builder.emit(emit_joined(builder, x, w, bias, ["relu"], "add", attrs, str(x.ty.dtype)))


def dense_gelu(builder, x, w, bias):
    value = builder.emit(op.add(builder.emit(op.matmul(x, w)), bias))
    return builder.emit(op.nn.gelu(value))


def transposed_product(builder, x, w):
    return builder.emit(op.nn.relu(builder.emit(op.matmul(x, builder.emit(op.permute_dims(w))))))


def layer_norm(builder, x, gamma, beta):
    return builder.emit(op.nn.layer_norm(x, gamma, beta, axes=[-1]))


def two_elementwise_outputs(builder, x, y):
    total = builder.emit(op.add(x, y))
    return [builder.emit(op.nn.gelu(total)), builder.emit(op.nn.relu(x))]


# name: template, input shapes, group
CASES = {
    "conv_13x13": ("cpu_contraction", [(1, 32, 13, 13), (24, 32, 3, 3)], conv(padding=1)),
    "conv_7x7_odd_filters": ("cpu_contraction", [(2, 16, 7, 7), (13, 16, 3, 3)], conv(padding=1)),
    "conv_stride_4": (
        "cpu_contraction",
        [(1, 3, 59, 59), (8, 3, 11, 11)],
        conv(strides=4, padding=2),
    ),
    "conv_dilated": (
        "cpu_contraction",
        [(1, 8, 14, 14), (8, 8, 3, 3)],
        conv(padding=2, dilation=2),
    ),
    "conv_1x1_55x55": ("cpu_contraction", [(1, 8, 55, 55), (16, 8, 1, 1)], conv()),
    "conv_one_filter": ("cpu_window", [(1, 8, 9, 9), (1, 8, 3, 3)], conv()),
    "conv_nhwc": (
        "cpu_contraction",
        [(1, 13, 13, 32), (30, 3, 3, 32)],
        conv(padding=1, **CHANNELS_LAST),
    ),
    "conv_nhwc_1x1": ("cpu_contraction", [(2, 7, 7, 16), (40, 1, 1, 16)], conv(**CHANNELS_LAST)),
    "conv_grouped": (
        "cpu_contraction",
        [(1, 32, 14, 14), (32, 8, 3, 3)],
        conv(padding=1, groups=4),
    ),
    "conv_grouped_nhwc": (
        "cpu_contraction",
        [(1, 14, 14, 32), (32, 3, 3, 8)],
        conv(padding=1, groups=4, **CHANNELS_LAST),
    ),
    "conv_transposed": (
        "cpu_contraction",
        [(1, 16, 7, 7), (16, 8, 3, 3)],
        lambda builder, x, w: builder.emit(op.nn.conv2d_transpose(x, w, strides=2, padding=1)),
    ),
    "conv1d": (
        "cpu_contraction",
        [(1, 16, 50), (8, 16, 3)],
        lambda builder, x, w: builder.emit(op.nn.conv1d(x, w, padding=1)),
    ),
    "conv_residual": (
        "cpu_contraction",
        [(1, 16, 14, 14), (16, 16, 3, 3), (1, 16, 1, 1), (1, 16, 14, 14)],
        conv_bias_residual,
    ),
    "conv_prologue": ("cpu_contraction", [(1, 16, 14, 14), (1, 16, 1, 1), (8, 16, 3, 3)], prologue),
    "conv_two_anchors": (
        "cpu_contraction",
        [(1, 16, 14, 14), (16, 16, 3, 3), (16, 16, 1, 1)],
        two_anchors,
    ),
    "conv_back_to_back": (
        "cpu_contraction",
        [(1, 16, 14, 14), (16, 16, 3, 3), (8, 16, 1, 1)],
        back_to_back,
    ),
    "conv_two_outputs": ("cpu_contraction", [(1, 16, 14, 14), (16, 16, 3, 3)], two_outputs),
    "conv_split": ("cpu_contraction", [(1, 16, 14, 14), (40, 16, 3, 3)], split_channels),
    "conv_concat": (
        "cpu_contraction",
        [(1, 16, 14, 14), (16, 16, 3, 3), (24, 16, 1, 1)],
        concat_branches,
    ),
    "conv_joined": ("cpu_contraction", [(1, 8, 14, 14), (3, 6, 8, 3, 3), (3, 6)], joined),
    "projection": (
        "cpu_contraction",
        [(1, 16, 14, 14), (24, 16, 3, 3), (1, 24, 1, 1), (1, 40, 28, 28), (24, 40, 1, 1)],
        projection,
    ),
    "projection_nhwc": (
        "cpu_contraction",
        [(1, 13, 13, 16), (24, 3, 3, 16), (1, 25, 25, 40), (24, 1, 1, 40)],
        projection_nhwc,
    ),
    "three_joined": (
        "cpu_contraction",
        [(1, 16, 7, 7)] + [(24, 16, 1, 1)] * 3,
        three_joined,
    ),
    "gate": ("cpu_contraction", [(1, 8), (8, 32), (32,), (1, 32, 14, 14)], gate),
    "depthwise_pointwise": (
        "cpu_contraction",
        [(1, 16, 14, 14), (16, 1, 3, 3), (1, 16, 1, 1), (24, 16, 1, 1)],
        depthwise_pointwise,
    ),
    "pointwise_depthwise": (
        "cpu_contraction",
        [(1, 16, 13, 13), (24, 16, 1, 1), (24, 1, 3, 3)],
        pointwise_depthwise,
    ),
    "two_products": ("cpu_contraction", [(67, 96), (96, 24), (24,), (24, 96)], two_products),
    "dense_norm": (
        "cpu_contraction",
        [(13, 96), (96, 64), (64,), (13, 64), (64,), (64,)],
        dense_residual_norm,
    ),
    "norms_apart": (
        "cpu_contraction",
        [(13, 96), (96, 64), (64,), (13, 40), (40, 64)],
        norms_apart,
    ),
    "concat_with_copy": (
        "cpu_contraction",
        [(1, 16, 14, 14), (24, 16, 3, 3), (1, 8, 14, 14), (1, 8, 1, 1)],
        concat_with_copy,
    ),
    "dense": ("cpu_contraction", [(67, 96), (96, 100), (100,)], dense_gelu),
    "dense_transposed": ("cpu_contraction", [(16, 96), (100, 96)], transposed_product),
    "dense_1000": ("cpu_contraction", [(1, 256), (256, 1000), (1000,)], dense_gelu),
    "dense_vector_transposed": ("cpu_contraction", [(1, 96), (101, 96)], transposed_product),
    "dense_3_columns": (
        "cpu_contraction",
        [(50, 64), (64, 3)],
        lambda builder, x, w: builder.emit(op.matmul(x, w)),
    ),
    "outer_product": (
        "cpu_window",
        [(17, 1), (1, 8)],
        lambda builder, x, w: builder.emit(op.matmul(x, w)),
    ),
    "batched": (
        "cpu_contraction",
        [(3, 50, 64), (3, 64, 50)],
        lambda builder, x, w: builder.emit(op.nn.softmax(builder.emit(op.matmul(x, w)))),
    ),
    "depthwise": ("cpu_window", [(1, 16, 13, 13), (16, 1, 3, 3)], conv(padding=1, groups=16)),
    "depthwise_55": (
        "cpu_window",
        [(1, 8, 55, 55), (8, 1, 3, 3)],
        conv(strides=2, padding=1, groups=8),
    ),
    "depthwise_nhwc": (
        "cpu_window",
        [(1, 14, 14, 24), (24, 3, 3, 1)],
        conv(padding=1, groups=24, **CHANNELS_LAST),
    ),
    "max_pool": (
        "cpu_window",
        [(1, 8, 55, 55)],
        unary(op.nn.max_pool2d, pool_size=(3, 3), strides=(2, 2)),
    ),
    "max_pool_nhwc": (
        "cpu_window",
        [(1, 13, 13, 24)],
        unary(op.nn.max_pool2d, pool_size=(3, 3), layout="NHWC"),
    ),
    "avg_pool": (
        "cpu_window",
        [(1, 8, 7, 7)],
        unary(op.nn.avg_pool2d, pool_size=(3, 3), padding=(1, 1, 1, 1)),
    ),
    "channel_softmax": ("cpu_window", [(2, 10, 7, 7)], unary(op.nn.softmax, axis=1)),
    "global_avg_pool": (
        "cpu_rows",
        [(1, 32, 7, 7)],
        unary(op.nn.adaptive_avg_pool2d, output_size=(1, 1)),
    ),
    "mean": ("cpu_rows", [(2, 32, 7, 7)], unary(op.mean, axis=[2, 3])),
    "softmax_1000": ("cpu_rows", [(3, 1000)], unary(op.nn.softmax)),
    "layer_norm": ("cpu_rows", [(13, 55), (55,), (55,)], layer_norm),
    "sum_of_all": ("cpu_rows", [(10, 13)], unary(op.sum)),
    "argmax": ("cpu_rows", [(4, 55)], unary(op.argmax, axis=1)),
    "elementwise": ("cpu_elementwise", [(1, 2, 55, 13), (1, 2, 1, 1)], two_elementwise_outputs),
    "transpose": ("cpu_elementwise", [(1, 8, 13, 7)], unary(op.permute_dims, axes=[0, 2, 3, 1])),
    "concat": (
        "cpu_elementwise",
        [(1, 3, 7, 7), (1, 5, 7, 7)],
        lambda builder, x, y: builder.emit(op.nn.relu(builder.emit(op.concat([x, y], 1)))),
    ),
    "scalar": ("cpu_elementwise", [()], unary(op.exp)),
}


def inputs_of(shapes, dtype):
    rng = np.random.default_rng(0)
    return [np.asarray(rng.standard_normal(shape) / 2).astype(dtype) for shape in shapes]


def check_numbers(mod, scheduled, arrays, dtype, target=LLVM):
    results = run_on_cpu(with_group_function(mod, scheduled), arrays, target)
    tolerance = {"float32": 1e-5, "float16": 2e-3}[dtype]
    for result, reference in zip(results, run_on_cpu(mod, arrays), strict=True):
        np.testing.assert_allclose(
            result.astype("float64"), reference.astype("float64"), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_and_template(name, dtype):
    expected, shapes, make = CASES[name]
    mod = group_module(shapes, dtype, make)
    scheduled, template = registry.schedule(group_function(mod), LLVM)
    assert template == expected
    check_numbers(mod, scheduled, inputs_of(shapes, dtype), dtype)


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "cpu_fallback"])
def test_does_not_fire_for_other_kinds(template):
    for name in ("conv_13x13", "max_pool", "softmax_1000", "elementwise"):
        expected, shapes, make = CASES[name]
        if expected != template:
            func = group_function(group_module(shapes, "float32", make))
            assert TEMPLATES[template].apply(func, LLVM) is None


@pytest.mark.parametrize(
    "name", ["conv_7x7_odd_filters", "conv_split", "softmax_1000", "elementwise", "scalar"]
)
def test_fallback_is_legal_for_everything(name):
    _, shapes, make = CASES[name]
    mod = group_module(shapes, "float32", make)
    scheduled = TEMPLATES["cpu_fallback"].apply(group_function(mod), LLVM).mod["main"]
    check_numbers(
        mod, scheduled.with_attr("tirx.is_scheduled", True), inputs_of(shapes, "float32"), "float32"
    )


@pytest.mark.parametrize("cpu", ["nehalem", "core-avx2", "skylake-avx512"])
def test_wider_registers(cpu):
    target = Target({"kind": "llvm", "mcpu": cpu})
    features = {"nehalem": "sse4.2", "core-avx2": "avx2", "skylake-avx512": "avx512f"}
    if not tvm.target.codegen.llvm_cpu_has_features(
        [features[cpu]], Target({"kind": "llvm", "mcpu": host_cpu()})
    ):
        pytest.skip(f"this machine has no {features[cpu]}")
    _, shapes, make = CASES["conv_residual"]
    mod = group_module(shapes, "float32", make)
    scheduled, _ = registry.schedule(group_function(mod), target)
    check_numbers(mod, scheduled, inputs_of(shapes, "float32"), "float32", target)


def host_cpu():
    return tvm.target.codegen.llvm_get_system_cpu()


def test_symbolic_shapes_fall_back():
    n = tirx.Var("n", "int64")
    mod = group_module([(n, 16)], "float32", unary(op.nn.relu))
    scheduled, template = registry.schedule(group_function(mod), LLVM)
    assert template == "cpu_fallback"
    check_numbers(mod, scheduled, inputs_of([(5, 16)], "float32"), "float32")


def test_empty_tensors_fall_back():
    mod = group_module([(3, 0, 16)], "float32", unary(op.nn.relu))
    scheduled, template = registry.schedule(group_function(mod), LLVM)
    assert template == "cpu_fallback"
    check_numbers(mod, scheduled, inputs_of([(3, 0, 16)], "float32"), "float32")


def test_tile_is_parallel_and_vectorised():
    text = stages_of("conv_residual")[0].script()
    assert "T.parallel" in text and "T.vectorized" in text


def test_functions_without_blocks_are_left_alone():
    _, shapes, make = CASES["elementwise"]
    func = group_function(group_module(shapes, "float32", make))
    lowered = s_tir.transform.LowerOpaqueBlock()(
        s_tir.transform.ConvertBlocksToOpaque()(tvm.IRModule({"main": func}))
    )
    scheduled, template = registry.schedule(lowered["main"], LLVM)
    assert template == "cpu_fallback"
    tvm.ir.assert_structural_equal(scheduled.body, lowered["main"].body)


def test_products_read_widened_copies():
    _, shapes, make = CASES["conv_residual"]
    func = widen_operands(group_function(group_module(shapes, "float16", make)))
    (product,) = [block for block in nodes_of(func.body, s_tir.SBlock) if block.init is not None]
    assert not nodes_of(product.body, tirx.Cast)
    assert {str(region.source.ty.dtype) for region in product.reads} == {"float32"}


def test_float32_functions_are_not_widened():
    _, shapes, make = CASES["conv_residual"]
    func = group_function(group_module(shapes, "float32", make))
    assert widen_operands(func).same_as(func)


def affine_prologue(builder, x, scale, w):
    value = builder.emit(op.nn.relu(builder.emit(op.multiply(x, scale))))
    return builder.emit(op.nn.conv2d(value, w))


def test_a_prologue_is_computed_once_and_not_for_every_filter():
    shapes = ((1, 16, 9, 9), (1, 16, 1, 1), (32, 16, 1, 1))
    func = group_function(group_module(shapes, "float32", affine_prologue))
    sch = CpuContraction().apply(func, LLVM)
    updates = [str(sch.get(block.handle).body) for block in structure(sch).reductions]
    assert updates and not any("T.max" in update for update in updates)
    assert "T.max" in sch.mod.script()


def stages_of(name, dtype="float32"):
    """The function of a case as its template schedules it, small loops parallel too, and its loop nests."""
    template, shapes, make = CASES[name]
    func = group_function(group_module(shapes, dtype, make))
    scheduled = TEMPLATES[template].apply(func, LLVM).mod["main"]
    return scheduled, tirx.stmt_list(scheduled.body.block.body)


def computing(nests, text):
    """Numbers of the loop nests in whose body some text occurs."""
    return [number for number, nest in enumerate(nests) if text in str(nest)]


@pytest.mark.parametrize("name", CASES)
def test_every_stage_with_several_results_is_parallel(name):
    _, nests = stages_of(name)
    for nest in nests:
        results = [
            math.prod(int(extent) for extent in region.source.ty.shape)
            for block in nodes_of(nest, s_tir.SBlock)
            for region in block.writes
        ]
        assert max(results) == 1 or nest.kind == tirx.ForKind.PARALLEL


@pytest.mark.parametrize("name", ["projection", "projection_nhwc", "three_joined"])
def test_every_joined_anchor_is_tiled(name):
    """The epilogue is computed with the last anchor; the others are tiled all the same."""
    _, nests = stages_of(name)
    anchors = computing(nests, "_update")
    assert len(anchors) == (3 if name == "three_joined" else 2)
    for number in anchors:
        kinds = {loop.kind for loop in nodes_of(nests[number], tirx.For)}
        assert tirx.ForKind.VECTORIZED in kinds and tirx.ForKind.UNROLLED in kinds
    assert computing(nests, "sigmoid" if name == "three_joined" else "T.max(") == anchors[-1:]


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("dense_norm", "x3["),  # the shortcut, which a layer norm would read in three passes
        ("two_products", "T.erf("),
        ("depthwise_pointwise", "x2["),
        ("dense", "T.erf("),
    ],
)
def test_what_follows_an_anchor_is_computed_in_its_tile(name, work):
    _, nests = stages_of(name)
    assert computing(nests, work) == computing(nests, "_update")[:1]


def test_members_of_a_concatenation_store_into_their_slices():
    _, nests = stages_of("concat_with_copy")
    stores = computing(nests, "concat_store")
    assert len(stores) == 3 and stores[0] in computing(nests, "_update")
    for number in stores:
        kinds = {loop.kind for loop in nodes_of(nests[number], tirx.For)}
        assert tirx.ForKind.VECTORIZED in kinds


def test_padded_tiles_store_whole_vectors():
    """13 × 13 results fill no whole tile; 14 × 14 are a multiple of four."""
    for name, vectors in (("conv_13x13", False), ("projection", True)):
        _, nests = stages_of(name)
        block = next(
            realize
            for realize in nodes_of(nests[-1], s_tir.SBlockRealize)
            if "T.max(" in str(realize.block.body)
        )
        loops = [
            loop.loop_var
            for loop in nodes_of(nests[-1], tirx.For)
            if loop.kind == tirx.ForKind.VECTORIZED
        ]
        used = nodes_of(block.predicate, tirx.Var)
        assert used and any(v.same_as(u) for v in loops for u in used) == vectors


@pytest.mark.parametrize("name", ["projection", "dense_norm", "concat_with_copy", "conv_13x13"])
def test_stages_are_put_back_as_they_were(name):
    _, shapes, make = CASES[name]
    sch = s_tir.Schedule(group_function(group_module(shapes, "float32", make)))
    parts = split_stages(sch)
    assert sum(len(tirx.stmt_list(p.body.block.body)) for p in parts) == len(structure(sch).blocks)
    mod = group_module(shapes, "float32", make)
    joined = join_stages(sch.mod["main"], parts).with_attr("tirx.is_scheduled", True)
    check_numbers(
        mod, joined.without_attr("global_symbol"), inputs_of(shapes, "float32"), "float32"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("channels", "height", "width", "kernel"),
    [
        (11, 13, 17, 1),
        (13, 13, 17, 3),
        (11, 7, 31, 1),
        (17, 1, 97, 1),
        (22, 13, 17, 1),
        (11, 13, 13, 1),
    ],
)
def test_channels_that_no_vector_divides(dtype, channels, height, width, kernel):
    """A tile of one element has no loop of its own: the loop over the map must not be vectorised."""
    b = ModuleBuilder(dtype, "NHWC")
    module = b.finish(b.conv("conv", b.input("x", (1, height, width, 8)), channels, kernel))
    report = tf.verify(module, "llvm", inputs=1)
    assert report.passed, str(report)
