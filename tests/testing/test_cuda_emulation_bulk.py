"""Kernels with the copy engine on the CPU: values, and that each way to break one is caught."""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.cuda.tensor_core.bulk import bulk_kernel
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.bulk_tiles import BulkTile
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.cuda_emulation import cuda_source, emulate, launch_of
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op
TARGET = parse_target("cuda:sm_90a")
#: Two tiles a block, seven steps in a ring of three slots: every slot is used again, by the next tile too.
ROWS, COLUMNS, DEPTH = 264, 104, 424
FEW = dataclasses.replace(DEVICES["sm_90"], multiprocessors=3)


@functools.cache
def made(
    dtype: str,
    batch: int,
    columns: int,
    stages: int,
    bulk: int,
    rows: int = 128,
    warps: int = 8,
    across: str = "",
    constant: bool = False,
):
    """The kernel of a matrix product, and its source; ``across``: operands with the reduction outermost."""

    def build(builder, x, weights):
        swapped = TRANSPOSED[batch]
        x = builder.emit(op.permute_dims(x, swapped)) if "rows" in across else x
        weights = (
            weights if "columns" in across else builder.emit(op.permute_dims(weights, swapped))
        )
        return builder.emit(op.matmul(x, weights))

    wide = COLUMNS + 24 if bulk == 4 else COLUMNS
    first = (DEPTH, ROWS) if "rows" in across else (ROWS, DEPTH)
    second = (DEPTH, wide) if "columns" in across else (wide, DEPTH)
    shapes = ((*BATCH[batch], *first), (*BATCH[batch], *second))
    form = products(group_function(group_module(shapes, dtype, build)))
    if constant:
        form = dataclasses.replace(form, constants=(form.params[1],))
    tile = BulkTile(rows, columns, 64, warps, 1, 1, stages, bulk=bulk, turns=8 // warps)
    func = bulk_kernel(form, tile, FEW)
    return func, cuda_source(func, TARGET)


BATCH = {1: (), 2: (2,)}
TRANSPOSED = {1: [1, 0], 2: [0, 2, 1]}

CASES = {
    "float16": ("float16", 1, 64, 3, 1),
    "bfloat16": ("bfloat16", 1, 64, 3, 1),
    "interleaved": ("float16", 1, 64, 3, 4),
    "wide": ("float16", 1, 128, 4, 4),
    "batch": ("float16", 2, 96, 3, 1),
    "turns": ("float16", 1, 64, 3, 4, 64, 4),
    "turns of two instructions": ("float16", 1, 64, 3, 1, 128, 4),
    "two instructions": ("float16", 1, 64, 3, 4, 256, 8),
    "constant weights": ("float16", 1, 64, 3, 4, 128, 8, "", True),
    "constant weights, turns": ("float16", 1, 128, 4, 1, 128, 4, "", True),
    "columns across": ("float16", 1, 64, 3, 1, 128, 8, "columns"),
    "several slabs": ("bfloat16", 1, 128, 3, 1, 128, 8, "columns"),
    "both across": ("float16", 2, 128, 3, 1, 128, 4, "rows and columns"),
}


def run(func, source: str, dtype: str = "float16", across: str = "", **options):
    """Results of a kernel, and what they have to be in float64: whole numbers that all types hold exactly."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    inputs = [
        np.random.default_rng(number)
        .integers(-1, 2, [int(extent) for extent in param.ty.shape])
        .astype(kind)
        for number, param in enumerate(func.params[:-1])
    ]
    rows, weights = (array.astype("float64") for array in inputs)
    rows = np.swapaxes(rows, -1, -2) if "rows" in across else rows
    expected = rows @ (weights if "columns" in across else np.swapaxes(weights, -1, -2))
    result = np.full(expected.shape, -1, "int16").view("float16")
    arrays = [array.view("float16") for array in (*inputs, result)]
    if dtype == "bfloat16":
        arrays = [array.view("uint16") for array in arrays]
    names = [param.name for param in func.params]
    written = emulate(source, launch_of(func), dict(zip(names, arrays, strict=True)), **options)
    assert written[names[-1]].all()
    return result.view(kind).astype("float64"), expected


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case, backward):
    func, source = made(*case)
    found, expected = run(func, source, case[0], *case[7:8], backward=backward)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))


def test_constants_are_copied_before_the_wait_for_the_previous_kernel():
    _, source = made(*CASES["constant weights"])
    names = re.findall(
        r"tvmf_(bulk_load_\d|wait_for_previous)\(", source[source.index('extern "C"') :]
    )
    assert names == [
        *["bulk_load_5"] * 3, "wait_for_previous", *["bulk_load_2"] * 3, "bulk_load_2", "bulk_load_5",
        "wait_for_previous",
    ]  # fmt: skip
    _, source = made(*CASES["interleaved"])
    names = re.findall(
        r"tvmf_(bulk_load_\d|wait_for_previous)\(", source[source.index('extern "C"') :]
    )
    assert names == ["wait_for_previous", "bulk_load_2", "bulk_load_5", "wait_for_previous"]


def broken(source: str, call: str, number: int, by: str = "") -> str:
    """A source whose ``number``-th statement that calls a function is another one."""
    start = source.index('extern "C" __global__')
    found = list(re.finditer(rf"\b{call}\([^;]*;", source[start:]))[number]
    return source[: start + found.start()] + (by or ";") + source[start + found.end() :]


def wait(source: str, number: int) -> str:
    """The text of a wait, with the parity after it."""
    start = source.index('extern "C" __global__')
    return list(re.finditer(r"\btvmf_mbarrier_wait\([^;]*;", source[start:]))[number][0]


FAULTS = {
    "no wait for a copy": (
        "tvmf_mbarrier_wait", 1, "before thread .* has waited for the copy|while wgmma .* reads it",
    ),
    "no wait for room": (
        "tvmf_mbarrier_wait", 0,
        "more than 1 times in a phase|while wgmma .* reads it",
    ),
    "no arrival": ("tvmf_mbarrier_arrive", 0, "never ends"),
    "nothing expected": ("tvmf_mbarrier_expect", 0, "never ends: 1 of 1 arrivals"),
    "a copy is missing": ("tvmf_bulk_load_2", 0, "never ends: 0 of 1 arrivals and .* bytes"),
    "no fence of the barriers": ("tvmf_mbarrier_fence", 0, "no fence after mbarrier.init"),
    "no barrier after they are made": ("tvmf_barrier", 0, "no mbarrier.init|without a barrier after"),
    "no barrier of a warp": ("tvmf_warp_barrier", 0, "may still read it"),
    "no wait for products": ("tvmf_wgmma_keep_1", 0, "while wgmma .* reads it"),
    "no wait for the last products": ("tvmf_wgmma_wait_64", 0, "sums .* no wait yet|while wgmma"),
    "a barrier is not made": ("tvmf_mbarrier_init", 3, "no mbarrier.init"),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault, backward):
    call, number, message = fault
    func, source = made(*CASES["float16"])
    with pytest.raises(RuntimeError, match=message):
        run(func, broken(source, call, number), backward=backward)


def test_a_wait_for_the_wrong_phase_is_caught():
    func, source = made(*CASES["float16"])
    text = wait(source, 0)
    other = text.replace("(1 - (", "(0 + (")
    assert other != text
    with pytest.raises(RuntimeError, match="never ends"):
        run(func, source.replace(text, other))


@pytest.mark.parametrize("backward", [False, True])
def test_a_turn_that_nobody_waits_for_is_caught(backward):
    """A parity tells no phase from the one after the next: the second group would take the first one's slots."""
    func, source = made(*CASES["turns"])
    with pytest.raises(RuntimeError, match=r"has waited|never ends|more than 4 times"):
        run(func, broken(source, "tvmf_mbarrier_wait", 1), backward=backward)


def test_a_turn_that_nobody_gives_is_caught():
    func, source = made(*CASES["turns"])
    with pytest.raises(RuntimeError, match="never ends: 4 of 4 arrivals"):
        run(func, broken(source, "tvmf_mbarrier_arrive", 1))


def test_a_copy_of_the_wrong_place_gives_wrong_values():
    func, source = made(*CASES["float16"])
    shifted = re.sub(r"(tvmf_bulk_load_2\([^;]*rows_map[^;]*)\);", r"\1 + 1);", source, count=1)
    assert shifted != source
    found, expected = run(func, shifted)
    assert (found != expected).any()


def test_a_map_that_the_driver_would_refuse_is_an_error():
    func, source = made(*CASES["float16"])
    launch = launch_of(func)
    arrays = {
        param.name: np.zeros([int(e) for e in param.ty.shape], "float16") for param in func.params
    }
    (first, second) = launch.maps
    for change, message in (
        ({"strides": (2, 840)}, "multiples of 16"),
        ({"boxes": (64, 257)}, "boxes"),
        ({"boxes": (128, 64)}, "256 bytes"),
        ({"extents": (DEPTH, ROWS + 1)}, "ends at byte"),
    ):
        wrong = dataclasses.replace(launch, maps=(dataclasses.replace(first, **change), second))
        with pytest.raises(ValueError, match=message):
            emulate(source, wrong, arrays)
