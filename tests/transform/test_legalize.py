"""Legalisation with float32 accumulation, and the definitions for horizontal groups, against numpy and torch."""

import ml_dtypes
import numpy as np
import pytest

from tvm_fusion.compat import relax, tirx, tvm
from tvm_fusion.testing.groups import emit_joined, group_module, run_on_cpu
from tvm_fusion.transform.infinite_identities import infinite_identities
from tvm_fusion.transform.legalize import LEGALIZE_MAP, legalize
from tvm_fusion.transform.legalize_horizontal import emit_concat_stores, emit_split_store

op = relax.op
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def module(shapes, dtype, make):
    """Return a module whose main computes ``make`` of inputs of one dtype."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(*inputs)))
        builder.emit_func_output(result)
    return builder.get()


def prim_funcs(mod):
    return [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]


def run(mod, *arrays):
    results = run_on_cpu(mod, arrays)
    return results[0] if len(results) == 1 else results


def float64(array):
    return np.asarray(array).astype("float64")


def window_mean(x):
    return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3)).mean(axis=(-1, -2))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normalised(x, axes):
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5)


# name: shapes, operator, numpy reference in float64. Offsets make sums large, so that a narrow sum
# is off or infinite.
CASES = {
    "mean": ([(2, 3, 7, 7)], lambda x: op.mean(x, [2, 3]), lambda x: x.mean((2, 3))),
    "sum": ([(64, 64)], lambda x: op.sum(x, [1]), lambda x: x.sum(1)),
    "variance": ([(4, 256)], lambda x: op.variance(x, [1]), lambda x: x.var(1)),
    "std": ([(4, 256)], lambda x: op.std(x, [1]), lambda x: x.std(1)),
    "avg_pool2d": ([(1, 3, 7, 7)], lambda x: op.nn.avg_pool2d(x, (3, 3)), window_mean),
    "avg_pool2d_nhwc": (
        [(1, 7, 7, 3)],
        lambda x: op.nn.avg_pool2d(x, (3, 3), layout="NHWC"),
        lambda x: window_mean(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
    ),
    "adaptive_avg_pool2d": (
        [(1, 3, 7, 7)],
        lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)),
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    "softmax": ([(4, 300)], op.nn.softmax, softmax),
    "log_softmax": ([(4, 300)], op.nn.log_softmax, lambda x: np.log(softmax(x))),
    "layer_norm": (
        [(4, 64), (64,), (64,)],
        lambda x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]),
        lambda x, g, b: normalised(x, 1) * g + b,
    ),
    "rms_norm": (
        [(4, 64), (64,)],
        lambda x, g: op.nn.rms_norm(x, g, axes=[-1]),
        lambda x, g: x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * g,
    ),
    "instance_norm": (
        [(2, 4, 5, 5), (4,), (4,)],
        lambda x, g, b: op.nn.instance_norm(x, g, b, channel_axis=1, axes=[2, 3]),
        lambda x, g, b: normalised(x, (2, 3)) * g[:, None, None] + b[:, None, None],
    ),
    "matmul": ([(5, 512), (512, 7)], op.matmul, np.matmul),
    "matmul_vectors": ([(512,), (512,)], op.matmul, np.matmul),
    "matmul_broadcast": ([(3, 1, 5, 64), (4, 64, 7)], op.matmul, np.matmul),
    "matmul_vector_right": ([(2, 5, 64), (64,)], op.matmul, np.matmul),
    "conv2d_pointwise": (
        [(1, 256, 3, 3), (8, 256, 1, 1)],
        op.nn.conv2d,
        lambda x, w: np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]),
    ),
    "conv2d_nhwc": (
        [(1, 3, 3, 256), (8, 1, 1, 256)],
        lambda x, w: op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"),
        lambda x, w: np.einsum("nhwc,oc->nhwo", x, w[:, 0, 0]),
    ),
    "conv1d_pointwise": (
        [(1, 256, 5), (8, 256, 1)],
        op.nn.conv1d,
        lambda x, w: np.einsum("ncw,oc->now", x, w[:, :, 0]),
    ),
    "conv2d_transpose_pointwise": (
        [(1, 256, 3, 3), (256, 8, 1, 1)],
        op.nn.conv2d_transpose,
        lambda x, w: np.einsum("nchw,co->nohw", x, w[:, :, 0, 0]),
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_reduction_is_rounded_once(name, dtype):
    shapes, make, reference = CASES[name]
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal(shape) + 1).astype(TYPES[dtype]) for shape in shapes]
    result = float64(run(legalize(module(shapes, dtype, make)), *arrays))
    expected = reference(*[float64(array) for array in arrays])
    # Half a unit in the last place of the result, and the float32 error of the sum, which is far
    # smaller.
    ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(result, expected, rtol=1.01 * ulp, atol=2e-5)


def test_mean_beyond_the_largest_float16():
    values = np.full((1, 4, 16, 16), 1000, "float16")
    result = run(legalize(module([values.shape], "float16", lambda x: op.mean(x, [2, 3]))), values)
    np.testing.assert_array_equal(result, np.full((1, 4), 1000, "float16"))


@pytest.mark.parametrize("name", CASES)
def test_float32_keeps_the_default(name):
    shapes, make, _ = CASES[name]
    mod = module(shapes, "float32", make)
    kept = infinite_identities(relax.transform.LegalizeOps()(mod))
    tvm.ir.assert_structural_equal(legalize(mod), kept)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["power", "mod", "isnan", "isinf", "isfinite"])
def test_what_tvm_has_no_bfloat16_code_for(name, dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 3, (4, 30)).astype(TYPES[dtype]) for _ in range(2)]
    if name.startswith("is"):
        arrays = [np.where(np.arange(30) % 3, arrays[0], [[np.nan], [1], [np.inf], [-np.inf]])]
        arrays = [array.astype(TYPES[dtype]) for array in arrays]
    result = run(legalize(module([(4, 30)] * len(arrays), dtype, getattr(op, name))), *arrays)
    expected = getattr(np, name)(*[float64(array) for array in arrays])
    np.testing.assert_allclose(float64(result), float64(expected), rtol=2.0**-8, atol=2.0**-7)


def test_operators_without_a_sum_keep_the_default():
    mod = module([(2, 8, 6, 6)], "float16", lambda x: op.nn.relu(op.nn.max_pool2d(x, (2, 2))))
    mod = relax.transform.Normalize()(mod)
    kept = infinite_identities(relax.transform.LegalizeOps()(mod))
    tvm.ir.assert_structural_equal(legalize(mod), kept)


def test_input_module_is_untouched():
    mod = module([(4, 8)], "float16", op.nn.softmax)
    before = mod.script()
    legalize(mod)
    assert mod.script() == before


def test_map_names_operators_that_tvm_legalises():
    assert all(tvm.ir.Op.get(name).has_attr("FLegalize") for name in LEGALIZE_MAP)


def test_products_stay_narrow_in_memory():
    mod = legalize(module([(5, 64), (64, 7)], "float16", op.matmul))
    (func,) = prim_funcs(mod)
    assert [str(param.ty.dtype) for param in func.params] == ["float16"] * 3
    assert [str(buffer.ty.dtype) for buffer in func.body.block.alloc_buffers] == ["float32"]


def conv(x, w, bias, attrs, out_dtype="float64"):
    """Reference convolution, NCHW and OIHW, in float64."""
    torch = pytest.importorskip("torch")
    top, left, bottom, right = (int(p) for p in attrs.padding)
    padded = np.pad(float64(x), [(0, 0), (0, 0), (top, bottom), (left, right)])
    return torch.nn.functional.conv2d(
        torch.tensor(padded),
        torch.tensor(float64(w)),
        None if bias is None else torch.tensor(float64(bias)),
        stride=[int(s) for s in attrs.strides],
        dilation=[int(d) for d in attrs.dilation],
        groups=int(attrs.groups),
    ).numpy()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layouts", [("NCHW", "OIHW"), ("NHWC", "OHWI"), ("NHWC", "HWIO")])
@pytest.mark.parametrize(
    ("groups", "stride", "dilation", "join"), [(1, 1, 1, "add"), (2, 2, 2, "maximum")]
)
def test_joined_convolutions(dtype, layouts, groups, stride, dilation, join):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 8, 9, 7)).astype(dtype)
    w = rng.standard_normal((3, 6, 8 // groups, 3, 3)).astype(dtype)
    bias = rng.standard_normal((3, 6)).astype(dtype)
    data_layout, kernel_layout = layouts
    data = np.ascontiguousarray(x.transpose(*["NCHW".index(axis) for axis in data_layout]))
    kernel = np.ascontiguousarray(
        w.transpose(0, *[1 + "OIHW".index(axis) for axis in kernel_layout])
    )
    attrs = op.nn.conv2d(
        relax.Var("x", relax.TensorType(data.shape, dtype)),
        relax.Var("w", relax.TensorType(kernel.shape[1:], dtype)),
        strides=stride,
        padding=(1, 2, 0, 1),
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    ).attrs

    def make(builder, x, w, bias):
        return builder.emit(emit_joined(builder, x, w, bias, ["relu"], join, attrs, dtype))

    mod = group_module([data.shape, kernel.shape, bias.shape], dtype, make)
    assert len(prim_funcs(mod)) == 1
    branches = np.stack([np.maximum(conv(x, w[b], bias[b], attrs), 0) for b in range(3)])
    expected = {"add": branches.sum(0), "maximum": branches.max(0)}[join]
    result = float64(run(mod, data, kernel, bias))
    back = [data_layout.index(axis) for axis in "NCHW"]
    np.testing.assert_allclose(result.transpose(*back), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.torch
def test_joined_without_bias_or_epilogue():
    rng = np.random.default_rng(2)
    x, w = (
        rng.standard_normal((1, 3, 5, 5)).astype("float32"),
        rng.standard_normal((2, 4, 3, 1, 1)).astype("float32"),
    )
    attrs = op.nn.conv2d(
        relax.Var("x", relax.TensorType(x.shape, "float32")),
        relax.Var("w", relax.TensorType(w.shape[1:], "float32")),
    ).attrs
    mod = group_module(
        [x.shape, w.shape],
        "float32",
        lambda builder, x, w: builder.emit(
            emit_joined(builder, x, w, None, [], "multiply", attrs, "float32")
        ),
    )
    expected = conv(x, w[0], None, attrs) * conv(x, w[1], None, attrs)
    np.testing.assert_allclose(run(mod, x, w), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("shape", "sizes", "axis"), [((2, 10, 3, 3), [3, 1, 6], 1), ((2, 3, 7), [2, 5], -1)]
)
def test_split_store(dtype, shape, sizes, axis):
    x = np.random.default_rng(3).standard_normal(shape).astype(dtype)

    def make(builder, x):
        return builder.emit(emit_split_store(builder, builder.emit(op.nn.relu(x)), sizes, axis))

    mod = group_module([shape], dtype, make)
    (func,) = prim_funcs(mod)
    assert len(func.params) == 1 + len(sizes)
    expected = np.split(np.maximum(x, 0), np.cumsum(sizes)[:-1], axis)
    for part, reference in zip(run(mod, x), expected, strict=True):
        np.testing.assert_array_equal(part, reference)


def test_split_store_refuses_sizes_that_do_not_add_up():
    with pytest.raises(ValueError, match="do not add up to 10"):
        emit_split_store(
            relax.BlockBuilder(), relax.Var("x", relax.TensorType((2, 10), "float32")), [3, 6], 1
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", [1, -3])
def test_concat_stores(dtype, axis):
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((2, channels, 3, 3)).astype(dtype) for channels in (10, 3))

    def make(builder, x, y):
        parts = [builder.emit(op.nn.relu(x)), builder.emit(op.abs(y)), y]
        return builder.emit(emit_concat_stores(builder, parts, axis))

    mod = group_module([x.shape, y.shape], dtype, make)
    assert len(prim_funcs(mod)) == 1
    np.testing.assert_array_equal(
        run(mod, x, y), np.concatenate([np.maximum(x, 0), np.abs(y), y], 1)
    )


def test_concat_stores_refuses_what_does_not_fit():
    builder = relax.BlockBuilder()
    tensors = [relax.Var(f"x{i}", relax.TensorType((1, 2, i + 3), "float32")) for i in range(2)]
    with pytest.raises(ValueError, match="cannot concatenate"):
        emit_concat_stores(builder, tensors, 1)
    symbolic = relax.Var("s", relax.TensorType((tirx.Var("n", "int64"), 2), "float32"))
    with pytest.raises(ValueError, match="symbolic shape"):
        emit_concat_stores(builder, [symbolic], 0)
