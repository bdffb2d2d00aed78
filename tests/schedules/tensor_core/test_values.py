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
    parts = [
        conv(emit, data, weights[0], padding=1),
        conv(emit, data, weights[1]),
        conv(emit, other, weights[2], padding=1, strides=2),
        conv(emit, data, weights[3], padding=2),
    ][: len(weights)]
    total = emit(op.nn.relu(parts[0]))
    for part in parts[1:]:
        total = emit(op.add(total, emit(op.nn.relu(part))))
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


def to_float32(emit, data, weight):
    """A result wider than the operands."""
    if str(data.ty.dtype) == "float64":
        return product(emit, data, weight)
    return emit(op.nn.relu(emit(op.matmul(data, weight, out_dtype="float32"))))


def relu_float64(emit, data, weight):
    """As ``to_float32``, in any type."""
    return emit(op.nn.relu(product(emit, data, weight)))


def concatenated(emit, data, weight, other):
    """The channels of a convolution and those of another tensor."""
    return emit(op.concat([conv(emit, data, weight, padding=1), other], axis=3))


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
    case("stem", block, (1, 33, 33, 3), (16, 7, 7, 3), (16,), strides=2, padding=3),
    case("5 channels", block, (1, 9, 9, 5), (16, 3, 3, 5), (16,), padding=1),
    case("4 channels", block, (1, 9, 9, 4), (16, 3, 3, 4), (16,), padding=1),
    case("18 channels to 10", block, (1, 9, 9, 18), (10, 3, 3, 18), (10,), padding=1),
    case("20 channels to 12", block, (1, 9, 9, 20), (12, 3, 3, 20), (12,), padding=1),
    case("to 13", block, (1, 9, 9, 16), (13, 3, 3, 16), (13,), padding=1),
    case("hwio", conv_hwio, (1, 9, 9, 16), (3, 3, 16, 24), padding=1),
    case("hwio packed", conv_hwio, (1, 9, 9, 16), (3, 3, 16, 20), padding=1, constants=(1,)),
    case("relu before", before, (1, 9, 9, 16), (24, 3, 3, 16), padding=1),
    case("relu before, 3 channels", before, (1, 9, 9, 3), (16, 3, 3, 3), padding=1),
    case("relu before, padded behind", before, (1, 9, 9, 16), (24, 1, 1, 16), padding=[0, 0, 1, 1]),
    case(
        "affine before", scaled_before, (1, 9, 9, 16), (16,), (16,), (24, 3, 3, 16), padding=1
    ),
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
    case("concat", concatenated, (1, 9, 9, 16), (24, 3, 3, 16), (1, 9, 9, 8)),
    case("concat at 20", concatenated, (1, 9, 9, 16), (20, 3, 3, 16), (1, 9, 9, 7)),
    case("matmul", product, (64, 64), (64, 64)),
    case("matmul, tails", product, (33, 40), (40, 104)),
    case("matmul, 65 rows", product, (65, 64), (64, 72)),
    case("5 rows", product, (5, 128), (128, 40)),
    case("17 deep", turned, (33, 17), (24, 17)),
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
    case("float32 result", relu_float64, (50, 64), (64, 96)),
    case("bfloat16", block, (1, 9, 9, 16), (24, 3, 3, 16), (24,), padding=1, dtype="bfloat16"),
    case("bfloat16 before", before, (1, 9, 9, 16), (24, 3, 3, 16), padding=1, dtype="bfloat16"),
    case("bfloat16 matmul", dense_gelu, (50, 64), (64, 96), (96,), dtype="bfloat16"),
]


@pytest.mark.parametrize(
    ("build", "shapes", "outputs", "constants", "dtype", "tolerance"), CASES
)
def test_values(tensor, build, shapes, outputs, constants, dtype, tolerance):
    function = tensor.function(
        build, *shapes, dtype=dtype, constants=constants, outputs=outputs
    )
    tensor.check(function, tensor.scheduled(function), tolerance=tolerance)
