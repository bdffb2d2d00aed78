"""Which functions go to tensor cores, and how their form is read."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.tensor_core.access import access_of
from tvm_fusion.schedules.cuda.tensor_core.packing import pack
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op


def conv(emit, data, weight, layout="NHWC", **attrs):
    """A convolution."""
    kernel = "OHWI" if layout == "NHWC" else "OIHW"
    return emit(op.nn.conv2d(data, weight, data_layout=layout, kernel_layout=kernel, **attrs))


def padded(emit, data, weight):
    """A convolution of the same size."""
    return conv(emit, data, weight, padding=1)


def product(emit, left, right):
    """A product."""
    return emit(op.matmul(left, right))


def turned(emit, left, right):
    """A product whose right operand has the reduction innermost."""
    return emit(op.matmul(left, emit(op.permute_dims(right))))


def mixed(emit, left, right):
    """Narrow numbers that are widened first."""
    wide = [emit(op.astype(value, "float32")) for value in (left, right)]
    return emit(op.matmul(*wide))


def squares(emit, left, right):
    """A product of what both operands are multiplied with themselves: its factors are computed."""
    return product(emit, emit(op.multiply(left, left)), emit(op.multiply(right, right)))


def concatenated(emit, data, weight, other):
    """Columns that no product has."""
    return emit(op.concat([conv(emit, data, weight), other], axis=3))


def broadcast(emit, left, right, other):
    """Sums that are read for several outputs each."""
    total = product(emit, left, right)
    return emit(op.add(emit(op.expand_dims(total, 0)), other))


def chosen(tensor, function, arch: str = "sm_90") -> str:
    """Template that a function goes to."""
    return schedule(function.func, tensor.target(arch))[1]


def case(name, template, build, *shapes, dtype="float16", arch="sm_90", **attrs):
    """A function and where it goes."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, dtype, arch, template, id=name)


IMAGE, WEIGHT = (1, 9, 9, 16), (24, 3, 3, 16)

#: One that goes to tensor cores, and next to it what keeps others from it.
CASES = [
    case("convolution", "tensor_core", conv, IMAGE, WEIGHT),
    case("bfloat16", "tensor_core", conv, IMAGE, WEIGHT, dtype="bfloat16"),
    case("sm_80", "tensor_core", conv, IMAGE, WEIGHT, arch="sm_80"),
    case("sm_120", "tensor_core", conv, IMAGE, WEIGHT, arch="sm_120"),
    case("sm_75", "conv2d", conv, IMAGE, WEIGHT, arch="sm_75"),
    case("channels first", "conv2d", conv, (1, 16, 9, 9), (24, 16, 3, 3), layout="NCHW"),
    case("grouped", "tensor_core", conv, IMAGE, (32, 3, 3, 8), groups=2),
    case("depthwise", "strips", conv, IMAGE, (16, 3, 3, 1), groups=16),
    case("3 channels", "conv2d", conv, (1, 9, 9, 3), (24, 3, 3, 3)),
    case("few columns", "conv2d", conv, IMAGE, (6, 3, 3, 16)),
    case("8 columns", "tensor_core", conv, IMAGE, (8, 3, 3, 16)),
    case("short sums", "conv2d", conv, (1, 9, 9, 8), (24, 1, 1, 8)),
    case("sums of 16", "tensor_core", conv, IMAGE, (24, 1, 1, 16)),
    case("product", "tensor_core", product, (33, 64), (64, 40)),
    case("broadcast sums", "matmul", broadcast, (33, 64), (64, 40), (3, 33, 40)),
    case("one row", "matrix_vector", product, (1, 64), (64, 40)),
    case("three rows", "matmul", product, (3, 512), (512, 64)),
    case("four rows", "tensor_core", product, (4, 64), (64, 40)),
    case("misaligned columns", "matmul", product, (33, 64), (64, 20)),
    case("aligned depth", "tensor_core", turned, (33, 64), (20, 64)),
    case("odd depth", "matmul", turned, (33, 63), (20, 63)),
    case("widened first", "tensor_core", mixed, (33, 64), (64, 40)),
    case("computed columns", "matmul", squares, (33, 64), (64, 40)),
]


@pytest.mark.parametrize(("build", "shapes", "dtype", "arch", "template"), CASES)
def test_which_template(tensor, build, shapes, dtype, arch, template):
    assert chosen(tensor, tensor.function(build, *shapes, dtype=dtype), arch) == template


@pytest.mark.parametrize(
    ("build", "shapes"), [(conv, (IMAGE, WEIGHT)), (product, ((33, 64), (64, 40)))]
)
def test_float32_is_left_to_others(tensor, cuda, build, shapes):
    func = cuda.function(build, *shapes)
    assert cuda.template("tensor_core").apply(func, cuda.target("cuda:sm_90")) is None


def test_columns_that_no_product_has_are_left_to_others(tensor):
    function = tensor.function(concatenated, IMAGE, (24, 1, 1, 16), (1, 9, 9, 8))
    assert products(function.func) is None
    assert chosen(tensor, function) != "tensor_core"


@pytest.mark.parametrize("shapes", [((2**20, 4096), (4096, 64)), ((70000, 64), (64, 70000))])
def test_offsets_that_need_64_bits_are_left_to_others(tensor, cuda, shapes):
    func = cuda.function(product, *shapes, dtype="float16")
    assert cuda.template("tensor_core").apply(func, tensor.target("sm_90")) is None


def test_a_chain_of_products_is_left_to_others(tensor, cuda):
    def chain(emit, a, b, c):
        return product(emit, product(emit, a, b), c)

    func = cuda.function(chain, (64, 128), (128, 96), (96, 40), dtype="float16")
    assert cuda.template("tensor_core").apply(func, cuda.target("cuda:sm_90")) is None


def test_a_gather_is_no_operand(tensor, cuda):
    """An embedding in front of a product: its index is not affine."""
    b = ModuleBuilder("float16")
    rows = relax.const([[1, 0, 3, 2, 5, 4, 7, 6]], "int64")
    table = b.input("table", (50, 32))
    value = b.op("take", op.take(table, rows, axis=0))
    function = tensor.group(b.finish(b.dense("dense", value, 24)), "vertical")
    tensor.check(function, tensor.scheduled(function, template=None))


# ---- how it is read --------------------------------------------------------------------------------


def test_the_axes_of_a_convolution(tensor):
    form = products(tensor.function(padded, (2, 9, 9, 16), WEIGHT).func)
    assert [i.extent for i in form.rows] == [2, 9, 9]
    assert [i.extent for i in form.columns] == [24]
    assert form.batch_count == 1
    (anchor,) = form.anchors
    assert anchor.depth == 144
    # The channels are contiguous, so they come last.
    assert [i.extent for i in anchor.reduced] == [3, 3, 16]


def test_the_axes_of_batched_products(tensor):
    form = products(tensor.function(product, (3, 33, 64), (3, 64, 40)).func)
    assert (form.batch_count, form.row_count, form.column_count) == (3, 33, 40)
    one = products(tensor.function(product, (3, 33, 64), (64, 40)).func)
    assert (one.batch_count, one.row_count, one.column_count) == (1, 99, 40)


def width(tensor, function, which: str) -> tuple[str, int]:
    """What is contiguous in an operand, and how many elements are copied at once."""
    form, _ = pack(products(function.func), set(function.constants))
    (anchor,) = form.anchors
    axes = form.rows if which == "rows" else form.columns
    found = access_of(getattr(anchor, which), (*form.batch, *axes), anchor.reduced)
    return (found.major, found.width) if found.copy is not None else ("computed", 1)


@pytest.mark.parametrize(
    ("shapes", "constants", "rows", "columns"),
    [
        (((33, 64), (64, 40)), (), ("k", 8), ("mn", 8)),
        (((33, 64), (64, 40)), (1,), ("k", 8), ("k", 8)),
        (((33, 36), (36, 40)), (1,), ("k", 4), ("k", 4)),
        (((33, 34), (34, 40)), (1,), ("k", 2), ("k", 2)),
        (((33, 35), (35, 40)), (), ("computed", 1), ("mn", 8)),
        (((33, 64), (64, 36)), (), ("k", 8), ("computed", 1)),
        (((33, 64), (64, 36)), (1,), ("k", 8), ("k", 8)),
    ],
)
def test_copies_are_as_wide_as_rows_are_aligned(tensor, shapes, constants, rows, columns):
    function = tensor.function(product, *shapes, constants=constants)
    assert width(tensor, function, "rows") == rows
    assert width(tensor, function, "columns") == columns


@pytest.mark.parametrize(("channels", "expected"), [(16, 8), (20, 4), (18, 2), (3, 1), (5, 1)])
def test_copies_of_images_are_as_wide_as_channels_allow(tensor, channels, expected):
    function = tensor.function(padded, (1, 9, 9, channels), (24, 3, 3, channels))
    assert width(tensor, function, "rows")[1] == expected
