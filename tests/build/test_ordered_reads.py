"""Kernels that are launched early read nothing that their predecessor may still write: in the machine code, too."""

from __future__ import annotations

import re

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.base import CONSTANTS

from tvm_fusion.build.ordered_reads import WAIT, ordered_reads
from tvm_fusion.build.ptxas import assemble
from tvm_fusion.compat import relax, structural_equal
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module
from tvm_fusion.testing.sass import disassemble

op = relax.op
NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def residual_norm(emit, x, y, gamma, beta):
    return emit(op.nn.layer_norm(emit(op.add(x, y)), gamma, beta, axes=[-1]))


def residual_gelu(emit, x, bias, y):
    return emit(op.add(emit(op.nn.gelu(emit(op.add(x, bias)))), y))


def dense(emit, x, w, b, y):
    return emit(op.add(emit(op.nn.relu(emit(op.add(emit(op.matmul(x, w)), b)))), y))


def convolution(emit, x, w, b, y):
    made = emit(op.nn.conv2d(x, w, padding=1, **NHWC))
    return emit(op.nn.relu(emit(op.add(emit(op.add(made, b)), y))))


def depthwise(emit, x, w, b):
    made = emit(op.nn.conv2d(x, w, padding=1, groups=32, **NHWC))
    return emit(op.clip(emit(op.add(made, b)), 0, 6))


def branches(emit, x, y, w, v, b):
    """Two products of different inputs: blocks of one launch are divided among them."""
    return [emit(op.add(emit(op.matmul(i, j)), b)) for i, j in ((x, w), (y, v))]


def transposed(emit, x):
    return emit(op.permute_dims(x, [0, 2, 1]))


def pool(emit, x, y):
    return emit(op.add(emit(op.nn.max_pool2d(x, (3, 3), padding=1, layout="NHWC")), y))


#: Function, shapes, and which parameters are constants.
CASES = {
    "rows": (residual_norm, ((128, 768), (128, 768), (768,), (768,)), (2, 3)),
    "short rows": (residual_norm, ((64, 96), (64, 96), (96,), (96,)), (2, 3)),
    "elementwise": (residual_gelu, ((64, 128), (128,), (64, 128)), (1,)),
    "transpose": (transposed, ((4, 64, 96),), ()),
    "pooling": (pool, ((1, 8, 8, 16), (1, 8, 8, 16)), ()),
    "product": (dense, ((128, 256), (256, 192), (192,), (128, 192)), (1, 2)),
    "small product": (dense, ((4, 1024), (1024, 64), (64,), (4, 64)), (1, 2)),
    "convolution": (
        convolution, ((1, 14, 14, 64), (64, 3, 3, 64), (64,), (1, 14, 14, 64)), (1, 2),
    ),
    "depthwise": (depthwise, ((1, 16, 16, 32), (32, 3, 3, 1), (32,)), (1, 2)),
    "partitioned": (
        branches, ((64, 128), (64, 128), (128, 64), (128, 64), (64,)), (2, 3, 4),
    ),
}  # fmt: skip


def scheduled(name: str, dtype: str, constants=None):
    make, shapes, numbers = CASES[name]
    func = group_function(group_module(shapes, dtype, lambda b, *i: make(b.emit, *i)))
    if name == "partitioned":
        func = func.with_attr("tvm_fusion.form", "partitioned")
    target = parse_target("cuda:sm_90")
    numbers = numbers if constants is None else constants
    return schedule(func.with_attr(CONSTANTS, list(numbers)), target)[0], target


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_machine_code_reads_after_the_wait(name, dtype):
    """Without constants nothing may be read before it, nor through the cache for what nobody writes."""
    func, target = scheduled(name, dtype, constants=())
    source = cuda_emulation.cuda_source(func, target)
    (instructions,) = disassemble(assemble(source, "sm_90")[0]).values()
    waits = [i for i, text in enumerate(instructions) if text.startswith("ACQBULK")]
    reads = [i for i, text in enumerate(instructions) if re.search(r"\bLDG", text)]
    assert waits and reads and waits[0] < reads[0]
    assert not [text for text in instructions if "LDG" in text and "CONSTANT" in text]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_every_input_is_opaque_behind_every_wait(name, dtype):
    """Inputs are, constants and outputs are not."""
    func, target = scheduled(name, dtype)
    source = cuda_emulation.cuda_source(func, target)
    body = source[source.rindex("__global__") :]
    inputs = [f"x{i}" for i in range(len(CASES[name][1])) if i not in CASES[name][2]]
    opaque = re.findall(r"tvmf_forget\((\w+)_ptr\);", body)
    assert {re.match(r"x\d+", n)[0] for n in opaque if n.startswith("x")} == set(inputs)
    assert all(n.startswith("x") for n in opaque)
    for wait in re.finditer(rf"{WAIT}\(\);\s+(\w+)", body):
        assert wait[1] == "tvmf_forget"


def test_a_kernel_of_constants_alone_writes_after_the_wait():
    func, target = scheduled("rows", "float32", constants=(0, 1, 2, 3))
    source = cuda_emulation.cuda_source(func, target)
    body = source[source.rindex("__global__") :]
    (opaque,) = re.findall(r"tvmf_forget\((\w+)_ptr\);", body)
    assert not re.match(r"x\d", opaque)


def test_functions_that_do_not_wait_stay_as_they_are():
    make, shapes, _ = CASES["rows"]
    func = group_function(group_module(shapes, "float32", lambda b, *i: make(b.emit, *i)))
    assert structural_equal(ordered_reads(func), func)
