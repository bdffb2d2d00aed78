"""Values of tensor-core kernels: what the registry makes of functions of many forms, run by emulation."""

from __future__ import annotations

import pytest
from tvm import relax

op = relax.op
LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def conv(emit, data, weight, **attrs):
    """A convolution, channels last."""
    return emit(op.nn.conv2d(data, weight, **LAST, **attrs))


def conv_hwio(emit, data, weight, **attrs):
    """A convolution whose weights have the output channels innermost."""
    return emit(op.nn.conv2d(data, weight, data_layout="NHWC", kernel_layout="HWIO", **attrs))


def block(emit, data, weight, bias, **attrs):
    """Convolution, bias, ReLU."""
    return emit(op.nn.relu(emit(op.add(conv(emit, data, weight, **attrs), bias))))


def before(emit, data, weight, **attrs):
    """A ReLU in front, which the operand is computed by."""
    return conv(emit, emit(op.nn.relu(data)), weight, **attrs)


def scaled_before(emit, data, scale, shift, weight, **attrs):
    """An affine function per channel and a ReLU in front: padding stays zero."""
    value = emit(op.add(emit(op.multiply(data, scale)), shift))
    return conv(emit, emit(op.nn.relu(value)), weight, **attrs)


def enlarged(emit, data, weight):
    """Each row of an image twice: which one a place of the window reads is no sum of the place's and the output's."""
    return conv(emit, emit(op.repeat(data, 2, axis=1)), weight, padding=1)


def residual(emit, data, weight, bias, shortcut):
    """Bias, another tensor, clip."""
    total = emit(op.add(conv(emit, data, weight, padding=1), bias))
    return emit(op.clip(emit(op.add(total, shortcut)), -9.0, 9.0))


def several(emit, data, weight):
    """The sum itself and two functions of it."""
    total = conv(emit, data, weight, padding=1)
    return emit(op.nn.relu(total)), emit(op.tanh(emit(op.multiply(total, total)))), total


def joined(emit, data, other, *weights):
    """Convolutions of other windows and inputs that meet in one sum, each behind its own ReLU."""
    ways = [
        (data, {"padding": 1}),
        (data, {}),
        (other, {"padding": 1, "strides": 2}),
        (data, {"padding": 2}),
    ]
    total = None
    for weight, (read, attrs) in zip(weights, ways, strict=False):
        part = emit(op.nn.relu(conv(emit, read, weight, **attrs)))
        total = part if total is None else emit(op.add(total, part))
    return total


def product(emit, left, right):
    """A product alone."""
    return emit(op.matmul(left, right))


def turned(emit, left, right):
    """The right operand has the reduction innermost."""
    axes = [*range(len(right.ty.shape) - 2), len(right.ty.shape) - 1, len(right.ty.shape) - 2]
    return emit(op.matmul(left, emit(op.permute_dims(right, axes))))


def turned_left(emit, left, right):
    """The left operand has the rows innermost."""
    axes = [*range(len(left.ty.shape) - 2), len(left.ty.shape) - 1, len(left.ty.shape) - 2]
    return emit(op.matmul(emit(op.permute_dims(left, axes)), right))


def turned_both(emit, left, right):
    """Both operands are transposed."""
    return turned(emit, emit(op.permute_dims(left)), right)


def dense_gelu(emit, data, weight, bias):
    """Bias and the GELU with erf."""
    return emit(op.nn.gelu(emit(op.add(emit(op.matmul(data, weight)), bias))))


def dense_sigmoid(emit, data, weight, bias):
    """Bias, and the value times its sigmoid."""
    value = emit(op.add(emit(op.matmul(data, weight)), bias))
    return emit(op.multiply(value, emit(op.sigmoid(value))))


def single(emit, data, weight):
    """A result wider than the operands, where these are narrow."""
    wide = "float64" if str(data.ty.dtype) == "float64" else "float32"
    return emit(op.nn.relu(emit(op.matmul(data, weight, out_dtype=wide))))


def gelu_single(emit, data, weight, bias):
    """Bias and GELU of wide sums, rounded at the end."""
    dtype = str(data.ty.dtype)
    wide = "float64" if dtype == "float64" else "float32"
    total = emit(op.matmul(data, weight, out_dtype=wide))
    total = emit(op.add(total, emit(op.astype(bias, wide))))
    return emit(op.astype(emit(op.nn.gelu(total)), dtype))


def padded(emit, data, weight, bias):
    """Rows with zeros behind them and in the reduction, and a scale of zeros at its end."""
    depth = int(weight.ty.shape[0])
    wide = emit(op.nn.pad(emit(op.nn.relu(data)), [0, 3, 0, depth - int(data.ty.shape[1])]))
    scale = emit(op.nn.pad(bias, [0, depth - int(bias.ty.shape[0])]))
    return emit(op.matmul(emit(op.multiply(wide, scale)), weight))


def padded_residual(emit, data, weight, shortcut, bias):
    """An epilogue that reads tensors with zeros behind them."""
    total = product(emit, data, weight)
    behind = [int(t) - int(s) for t, s in zip(total.ty.shape, shortcut.ty.shape, strict=True)]
    wide = emit(op.nn.pad(shortcut, [0, behind[0], 0, behind[1]]))
    total = emit(op.add(total, wide))
    more = int(total.ty.shape[1]) - int(bias.ty.shape[0])
    return emit(op.add(total, emit(op.nn.pad(bias, [0, more]))))


def heads(emit, data, weight, bias):
    """Columns of two axes."""
    total = emit(op.einsum(emit(relax.Tuple([data, weight])), "mk,khd->mhd"))
    return emit(op.add(total, bias))


def channels_first(emit, data, weight, bias, shortcut):
    """A result whose rows and columns change places, with a tensor in the layout before."""
    total = emit(op.add(emit(op.add(conv(emit, data, weight, padding=1), bias)), shortcut))
    return emit(op.permute_dims(total, [0, 3, 1, 2]))


def scores(emit, query, key):
    """Products of heads that stand between rows and depth."""
    return emit(op.einsum(emit(relax.Tuple([query, key])), "bshd,bthd->bhst"))


def mixed_heads(emit, weights, values):
    """Products of heads, put beside each other in every row."""
    return emit(op.permute_dims(emit(op.matmul(weights, values)), [0, 2, 1, 3]))


def with_itself(emit, data, scale):
    """One tensor as both operands, times a number."""
    return emit(op.multiply(turned(emit, data, data), scale))


def positive(emit, left, right):
    """A result that is no number."""
    return emit(op.greater(product(emit, left, right), relax.const(0.0, str(left.ty.dtype))))


def whole_numbers(emit, left, right):
    """A result of whole numbers."""
    return emit(op.astype(product(emit, left, right), "int32"))


def gathered(emit, data, weight):
    """Rows behind each other that the function reads in another order."""
    return product(emit, emit(op.nn.relu(emit(op.flip(data, 0)))), weight)


def case(name, build, *shapes, outputs=1, constants=(), dtype="float16", tolerance=4.0, **attrs):
    """One function under test."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, outputs, constants, dtype, tolerance, id=name)


CASES = [
    case("1x1", block, (1, 14, 14, 64), (48, 1, 1, 64), (48,)),
    case("3x3", block, (1, 14, 14, 32), (64, 3, 3, 32), (64,), padding=1),
    case("3x3 two images", block, (2, 7, 7, 16), (24, 3, 3, 16), (24,), padding=1),
    case("49 rows", block, (1, 7, 7, 64), (40, 1, 1, 64), (40,)),
    case("one row more", block, (1, 13, 5, 16), (16, 1, 1, 16), (16,)),
    case("strided", conv, (1, 15, 15, 16), (24, 3, 3, 16), padding=1, strides=2),
    case("1x1 strided", conv, (1, 15, 15, 16), (24, 1, 1, 16), strides=2),
    case("dilated", conv, (1, 13, 17, 8), (16, 3, 3, 8), padding=2, dilation=2, strides=[1, 2]),
    case("one-sided padding", conv, (1, 9, 9, 8), (16, 2, 4, 8), padding=[0, 1, 1, 2]),
    case("1x1 padded", conv, (1, 9, 9, 16), (16, 1, 1, 16), padding=[0, 0, 1, 2]),
    case("4 channels", block, (1, 9, 9, 4), (16, 3, 3, 4), (16,), padding=1),
    case(
        "3 channels",
        block,
        (2, 15, 13, 3),
        (24, 3, 3, 3),
        (24,),
        padding=1,
        strides=2,
        constants=(1, 2),
    ),
    case(
        "3 channels, 7x7",
        block,
        (1, 17, 19, 3),
        (64, 7, 7, 3),
        (64,),
        padding=3,
        strides=2,
        constants=(1, 2),
    ),
    case("1 channel, 5x5", block, (2, 9, 11, 1), (16, 5, 5, 1), (16,), padding=2, constants=(1, 2)),
    case(
        "5 channels, dilated",
        conv,
        (1, 13, 13, 5),
        (16, 3, 3, 5),
        padding=2,
        dilation=2,
        constants=(1,),
    ),
    case("3 channels, hwio", conv_hwio, (1, 9, 9, 3), (3, 3, 3, 16), padding=1, constants=(1,)),
    case("3 channels, relu before", before, (1, 9, 9, 3), (16, 3, 3, 3), padding=1, constants=(1,)),
    case(
        "3 channels, bfloat16",
        conv,
        (1, 9, 9, 3),
        (16, 3, 3, 3),
        padding=1,
        constants=(1,),
        dtype="bfloat16",
    ),
    case("3 channels, enlarged", enlarged, (1, 6, 9, 3), (16, 3, 3, 3), constants=(1,)),
    case("16 channels, enlarged", enlarged, (1, 6, 9, 16), (16, 3, 3, 16), constants=(1,)),
    case("27 deep", turned, (33, 27), (24, 27), constants=(1,)),
    case("18 channels to 10", block, (1, 9, 9, 18), (10, 3, 3, 18), (10,), padding=1),
    case("20 channels to 12", block, (1, 9, 9, 20), (12, 3, 3, 20), (12,), padding=1),
    case("to 13", block, (1, 9, 9, 16), (13, 3, 3, 16), (13,), padding=1),
    case("hwio", conv_hwio, (1, 9, 9, 16), (3, 3, 16, 24), padding=1),
    case("hwio packed", conv_hwio, (1, 9, 9, 16), (3, 3, 16, 20), padding=1, constants=(1,)),
    case("relu before", before, (1, 9, 9, 16), (24, 3, 3, 16), padding=1),
    case("relu before, padded behind", before, (1, 9, 9, 16), (24, 1, 1, 16), padding=[0, 0, 1, 1]),
    case("affine before", scaled_before, (1, 9, 9, 16), (16,), (16,), (24, 3, 3, 16), padding=1),
    case("residual", residual, (1, 13, 13, 16), (24, 3, 3, 16), (24,), (1, 13, 13, 24)),
    case("residual, 9 channels", residual, (1, 7, 7, 16), (9, 3, 3, 16), (9,), (1, 7, 7, 9)),
    case("outputs", several, (1, 9, 9, 16), (24, 3, 3, 16), outputs=3),
    case("outputs, 11 channels", several, (1, 9, 9, 16), (11, 3, 3, 16), outputs=3),
    *(
        case(
            f"joined {count}",
            joined,
            (1, 13, 13, 16),
            (1, 26, 26, 8),
            *[(16, 3, 3, 16), (16, 1, 1, 16), (16, 3, 3, 8), (16, 5, 5, 16)][:count],
        )
        for count in (3, 4)
    ),
    case("matmul", product, (64, 64), (64, 64)),
    case("matmul, tails", product, (33, 40), (40, 104)),
    case("matmul, 65 rows", product, (65, 64), (64, 72)),
    case("5 rows", product, (5, 128), (128, 40)),
    case("18 deep", turned, (33, 18), (24, 18)),
    case("20 deep", turned, (33, 20), (24, 20)),
    case("10 columns", turned, (33, 64), (10, 64)),
    case("20 columns packed", product, (33, 64), (64, 20), constants=(1,)),
    case("21 columns packed", product, (33, 64), (64, 21), constants=(1,)),
    case("batched", product, (3, 33, 24), (3, 24, 40)),
    case("batched, turned", turned, (3, 33, 24), (3, 10, 24)),
    case("one right operand", product, (3, 33, 24), (24, 40)),
    case("broadcast batch", product, (2, 1, 17, 24), (1, 3, 24, 40)),
    case("rows of another batch", product, (1, 17, 24), (3, 24, 40)),
    case("left turned", turned_left, (40, 48), (40, 64)),
    case("left turned, 20 rows", turned_left, (40, 20), (40, 64)),
    case("both turned", turned_both, (40, 48), (24, 40)),
    case("batched, left turned", turned_left, (2, 40, 48), (2, 40, 64)),
    case("gelu", dense_gelu, (50, 64), (64, 96), (96,)),
    case("sigmoid", dense_sigmoid, (50, 64), (64, 96), (96,)),
    case("float32 result", single, (50, 64), (64, 96)),
    case("float32 result of packed weights", single, (50, 64), (64, 96), constants=(1,)),
    case("wide gelu", gelu_single, (50, 64), (64, 96), (96,), constants=(1, 2)),
    case("padded", padded, (30, 12), (16, 64), (12,), constants=(1,)),
    case("padded more", padded, (30, 24), (32, 64), (20,), constants=(1,)),
    case("padded residual", padded_residual, (33, 32), (32, 40), (20, 28), (36,)),
    case(
        "padded residual packed",
        padded_residual,
        (33, 32),
        (32, 40),
        (20, 28),
        (36,),
        constants=(1,),
    ),
    case("two column axes", heads, (33, 32), (32, 3, 8), (3, 8)),
    case("two odd column axes packed", heads, (33, 32), (32, 3, 5), (3, 5), constants=(1,)),
    case("channels first", channels_first, (2, 9, 9, 16), (24, 3, 3, 16), (24,), (2, 9, 9, 24)),
    case("scores", scores, (2, 17, 3, 24), (2, 24, 3, 24)),
    case("mixed heads", mixed_heads, (2, 3, 17, 24), (2, 3, 24, 16)),
    case("with itself", with_itself, (33, 40), ()),
    case("rows reversed", gathered, (33, 40), (40, 24)),
    case("bfloat16", block, (1, 9, 9, 16), (24, 3, 3, 16), (24,), padding=1, dtype="bfloat16"),
    case("bfloat16 before", before, (1, 9, 9, 16), (24, 3, 3, 16), padding=1, dtype="bfloat16"),
    case("bfloat16 matmul", dense_gelu, (50, 64), (64, 96), (96,), dtype="bfloat16"),
]


#: The instructions of sm_80, launches that overlap, warpgroup instructions.
ARCHS = ("sm_80", "sm_90", "sm_90a")


def on_archs(cases) -> list:
    """Every case on every arch: each arch in turn has one that is not slow."""
    return [
        pytest.param(
            *case.values,
            arch,
            id=f"{case.id}-{arch}",
            marks=pytest.mark.slow if (i + j) % len(ARCHS) else (),
        )
        for i, case in enumerate(cases)
        for j, arch in enumerate(ARCHS)
    ]


@pytest.mark.parametrize(
    ("build", "shapes", "outputs", "constants", "dtype", "tolerance", "arch"), on_archs(CASES)
)
def test_values(tensor, build, shapes, outputs, constants, dtype, tolerance, arch):
    function = tensor.function(build, *shapes, dtype=dtype, constants=constants, outputs=outputs)
    made = tensor.on_arch(function, arch)
    source = tensor.check(function, made, tolerance=tolerance, arch=arch)
    problem = tensor.problem(function)
    takes = arch == "sm_90a" and problem.reduction_inner and problem.rows > 16
    assert ("wgmma.mma_async" in source) == takes


@pytest.mark.parametrize(("build", "kind"), [(positive, "bool"), (whole_numbers, "int32")])
@pytest.mark.parametrize("columns", [24, 13])
def test_results_that_are_no_floats(tensor, build, kind, columns):
    function = tensor.function(build, (33, 40), (40, columns), constants=(1,))
    inputs = function.make(tensor.positions)
    (expected,) = function.expect(inputs)
    (result,) = tensor.run(tensor.scheduled(function), inputs)
    assert str(result.dtype) == kind
    assert (result == expected).all()
    assert expected.any() and not expected.all()
