"""Kernels with warpgroup instructions on the CPU: values, and that each way to break one is caught."""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.cuda.tensor_core.recognition import products
from tvm_fusion.schedules.cuda.tensor_core.warpgroup import warpgroup_kernel

from tvm_fusion.errors import CompilerError
from tvm_fusion.guards.tensor_tiles import Tile
from tvm_fusion.targets import parse_target
from tvm_fusion.testing._cuda_device import device_functions
from tvm_fusion.testing.cuda_emulation import cuda_source, emulate, launch_of
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op
SM90 = parse_target("cuda:sm_90")
ROWS, COLUMNS, DEPTH = (
    100,
    72,
    328,
)  # six tiles of the reduction, so that the ring's slots are used again


@functools.cache
def made(dtype: str, anchors: int, *tile: int):
    """The kernel of a sum of matrix products, and its source."""

    def build(builder, *inputs):
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        parts = [builder.emit(op.matmul(x, op.permute_dims(w))) for x, w in pairs]
        return parts[0] if len(parts) == 1 else op.add(op.nn.relu(parts[0]), parts[1])

    shapes = ((ROWS, DEPTH), (COLUMNS, DEPTH)) * anchors
    form = products(group_function(group_module(shapes, dtype, build)))
    assert len(form.anchors) == anchors
    func = warpgroup_kernel(form, Tile(*tile, warpgroup=True))
    return func, cuda_source(func, SM90)


def run(func, source: str, dtype: str = "float16", threads: int = 0, **options):
    """Results of a kernel, and what they have to be in float64: whole numbers that all types hold exactly."""
    inputs = [
        np.random.default_rng(number)
        .integers(-1, 2, [int(extent) for extent in param.ty.shape])
        .astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for number, param in enumerate(func.params[:-1])
    ]
    wide = [array.astype("float64") for array in inputs]
    expected = wide[0] @ wide[1].T
    if len(wide) > 2:
        expected = np.maximum(expected, 0) + wide[2] @ wide[3].T
    result = np.full((ROWS, COLUMNS), -1, "int16").view("float16")
    arrays = [array.view("float16") for array in (*inputs, result)]
    if dtype == "bfloat16":
        arrays = [array.view("uint16") for array in arrays]
    names = [param.name for param in func.params]
    launch = launch_of(func)
    if threads:
        launch = dataclasses.replace(launch, block=(threads, 1, 1))
    written = emulate(source, launch, dict(zip(names, arrays, strict=True)), **options)
    assert written[names[-1]].all()
    return result.view(inputs[0].dtype).astype("float64"), expected


CASES = {
    "one warpgroup": ("float16", 1, 64, 64, 64, 4, 1, 1, 3),
    "along the rows": ("float16", 1, 128, 32, 64, 8, 1, 1, 4),
    "along the columns": ("float16", 1, 64, 64, 64, 4, 2, 1, 3),
    "odd columns": ("float16", 1, 64, 48, 64, 4, 1, 1, 3),
    "bfloat16": ("bfloat16", 1, 64, 96, 64, 4, 1, 1, 2),
    "two sums": ("float16", 2, 64, 64, 64, 4, 2, 1, 3),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case, backward):
    func, source = made(*case)
    result, expected = run(func, source, case[0], backward=backward)
    np.testing.assert_array_equal(result, expected)


#: In a kernel, what is replaced by what (its last place only if ``last``), and the error.
FAULTS = {
    "no proxy fence": (r"tvmf_fence_async\(\);", "", "without fence.proxy.async"),
    "proxy fence behind the barrier": (
        r"tvmf_fence_async\(\);(.*?tvmf_barrier\(\);)",
        r"\1 tvmf_fence_async();",
        "without fence.proxy.async",
    ),
    "no barrier": (r"tvmf_barrier\(\);", "", "without a barrier|asynchronous copy of thread"),
    "no wait for copies": (r"tvmf_wait_1\(\);", "", "while an asynchronous copy of thread"),
    "late wait for copies": (r"tvmf_wait_1\(\);", "tvmf_wait_2();", "while an asynchronous copy"),
    "no wait": (r"tvmf_wgmma_wait_64\(.*?\);\n", "\n", "written while wgmma of line [0-9]+ reads"),
    "no wait at the end": (
        r"(?s)(.*)tvmf_wgmma_wait_64\(.*?\);\n",
        r"\1\n",
        "sums read while wgmma of line [0-9]+ computes them",
    ),
    "wait behind the barrier": (
        r"(tvmf_wgmma_wait_64\(.*?\);)\s*(tvmf_barrier\(\);)",
        r"\2 \1",
        "written while wgmma of line [0-9]+ reads|written without a barrier after several warps",
    ),
    "no commit": (r"tvmf_wgmma_commit\(\);", "", "written while wgmma of line [0-9]+ reads it"),
    "no fence": (r"tvmf_wgmma_fence\(\);", "", "no wgmma.fence of thread [0-9]+ after it set"),
    "set without a fence": (
        r"(?s)(.*)tvmf_wgmma_fence\(\);",
        r"\1sums_ptr[3] = 1.0f;",
        "no wgmma.fence of thread [0-9]+ after it set its sums",
    ),
    "set while computed": (
        r"tvmf_wgmma_commit\(\);",
        "tvmf_wgmma_commit(); sums_ptr[3] = 1.0f;",
        "sums written while wgmma of line [0-9]+ computes them",
    ),
    "three warps": (
        r"tvmf_wgmma_f16",
        "if (threadIdx.x < 96) tvmf_wgmma_f16",
        "wgmma is not reached by every thread",
    ),
    "half warps": (
        r"tvmf_wgmma_f16",
        "if (threadIdx.x & 16) tvmf_wgmma_f16",
        "different instructions|not reached",
    ),
    "half warps wait": (
        r"tvmf_wgmma_wait_64",
        "if (threadIdx.x & 16) tvmf_wgmma_wait_64",
        "different instructions|not reached",
    ),
    "other rows": (
        r"tvmf_wgmma_descriptor\(shared_ptr, ",
        "tvmf_wgmma_descriptor(shared_ptr, 1024 * (threadIdx.x / 32) + ",
        "descriptors of threads of a warpgroup differ",
    ),
    "beyond the memory": (
        r"tvmf_wgmma_descriptor\(shared_ptr, ",
        "tvmf_wgmma_descriptor(shared_ptr, 196608 + ",
        "wgmma reads byte [0-9]+ of dynamic shared memory, which is out of range",
    ),
    "sums that overlap": (
        r"tvmf_wgmma_f16_64\(sums_ptr, 0, (tvmf_wgmma_descriptor.*)\n(.*tvmf_wgmma_commit)",
        r"tvmf_wgmma_f16_32(sums_ptr, 8, \1\n\2",
        "the sums share registers with those of line",
    ),
    "no swizzle": (
        r"1ull << 62",
        "0ull << 62",
        "only 128-byte swizzle is emulated",
    ),
}


def broken(fault: str) -> tuple:
    """A kernel with a fault."""
    func, source = made(*CASES["one warpgroup"])
    pattern, replacement, _ = FAULTS[fault]
    # Device functions come first; only one fault is in them.
    first = 0 if fault == "no swizzle" else source.index('extern "C" __global__')
    head = source[:first]
    if fault == "sums that overlap":
        head += (
            made("float16", 1, 64, 32, 64, 4, 1, 1, 3)[1].split('extern "C"')[0].split("\n\n")[-1]
        )
    if fault == "late wait for copies":
        head = head.replace("tvmf_wait_1", "tvmf_wait_2").replace("group 1", "group 2")
    flags = 0 if pattern.startswith("(?s)") or "\\n" in pattern else re.DOTALL
    kernel, count = re.subn(pattern, replacement, source[first:], flags=flags)
    assert count
    return func, head + kernel


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_an_error(fault, backward):
    func, source = broken(fault)
    with pytest.raises(RuntimeError, match=FAULTS[fault][2]):
        run(func, source, backward=backward)


@pytest.mark.parametrize(
    "fault", ["no wait at the end", "no wait for copies", "set while computed"]
)
def test_without_the_check_of_races_values_are_wrong(fault):
    func, source = broken(fault)
    wrong = []
    for backward in (False, True):
        result, expected = run(func, source, backward=backward, check_races=False)
        wrong.append((result != expected).any())
    assert any(wrong)


def test_dynamic_shared_memory_is_not_aligned_to_1024_bytes():
    func, source = made(*CASES["one warpgroup"])
    kernel, count = re.subn(r"= tvmf_to_1024\(.*?\);", "= 0;", source)
    assert count == 1
    result, expected = run(func, kernel)
    assert (result != expected).any()


def test_sums_that_nothing_changed_need_no_fence():
    func, source = made(*CASES["one warpgroup"])
    head, name, kernel = source.rpartition('extern "C" __global__')
    before, *rest = kernel.split("tvmf_wgmma_fence();")
    assert len(rest) > 1
    for number in range(1, len(rest)):
        parts = [*("tvmf_wgmma_fence();",) * number, *("",) * (len(rest) - number)]
        text = before + "".join(a + b for a, b in zip(parts, rest, strict=True))
        result, expected = run(func, head + name + text)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("backward", [False, True])
def test_a_block_of_three_warps_has_no_warpgroup(backward):
    func, source = made(*CASES["one warpgroup"])
    with pytest.raises(RuntimeError, match="not reached by all 4 warps of the warpgroup of warp 0"):
        run(func, source, threads=96, backward=backward)


def test_forms_that_are_not_emulated_are_rejected():
    shape = '"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5'
    start = "__device__ void tvmf_x(float* d, float* e, unsigned long long a) {\n  asm volatile("
    sums = '"+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"({}[3]) : "l"(a), "l"(a));}}\n'

    def translate(options: str, last: str = "d") -> str:
        head = f'{start}{shape}, {options};" : {sums.format(last)}'
        return device_functions(head, "tvmf_x(d, e, a);")

    multiply = "MultiplyWarpgroup(simt::kHalf, 8, d, a, a, 1, 0 + 2 * 0, line)"
    assert multiply in translate("1, 1, 1, 0, 0")
    assert "a, a, 0, 0 + 2 * 0, line" in translate("0, 1, 1, 0, 0")
    assert "a, a, 1, 1 + 2 * 0, line" in translate("1, 1, 1, 1, 0")
    for options in ("1, -1, 1, 0, 0", "1, 1, -1, 0, 0"):
        with pytest.raises(CompilerError, match="without scales"):
            translate(options)
    with pytest.raises(CompilerError, match="part of one array"):
        translate("1, 1, 1, 0, 0", "e")
