"""The partitioned kernel: one launch for independent members, run on the CPU by emulation."""

import dataclasses
import re
import subprocess

import numpy as np
import pytest
from tvm_fusion.schedules import limits, registry
from tvm_fusion.schedules.base import CONSTANTS, MEMBER, PACKED
from tvm_fusion.schedules.cuda.partition_lower import (
    BLOCK_TAGS,
    THREAD_TAGS,
    FlatMember,
    lower_member,
)
from tvm_fusion.schedules.cuda.partition_members import split_members
from tvm_fusion.schedules.cuda.partition_merge import merge_members
from tvm_fusion.schedules.cuda.partitioned import Partitioned, member_of

from tvm_fusion.compat import Target, relax, tirx, tvm
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import (
    group_function,
    group_module,
    packed_arrays,
    run_on_cpu,
    with_group_function,
)
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.transform.legalize_horizontal import emit_concat_stores

op = relax.op
CHANNELS_LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def chip(arch):
    return Target(
        {"kind": "cuda", "arch": arch, "max_threads_per_block": 1024, "thread_warp_size": 32}
    )


SM90 = chip("sm_90")
BOUNDS = limits(SM90)


def conv_relu(builder, x, w, **options):
    return builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, w, **options))))


def scale_shift_relu(builder, x, scale, shift):
    scaled = builder.emit(op.multiply(x, scale))
    return builder.emit(op.nn.relu(builder.emit(op.add(scaled, shift))))


def two_towers(builder, x, w, y, v):
    return [conv_relu(builder, x, w, padding=1), conv_relu(builder, y, v, padding=1)]


def fire(builder, x, squeeze, expand):
    parts = [conv_relu(builder, x, squeeze), conv_relu(builder, x, expand, padding=1)]
    return builder.emit(emit_concat_stores(builder, parts, 1))


def fire_channels_last(builder, x, squeeze, expand):
    wide = conv_relu(builder, x, expand, padding=1, **CHANNELS_LAST)
    parts = [conv_relu(builder, x, squeeze, **CHANNELS_LAST), wide]
    return builder.emit(emit_concat_stores(builder, parts, 3))


def elementwise_branches(builder, x, y, z, scale, shift):
    return [scale_shift_relu(builder, branch, scale, shift) for branch in (x, y, z)]


def mixed(builder, x, w, rows, a, b):
    return [
        conv_relu(builder, x, w, padding=1),
        builder.emit(op.nn.max_pool2d(x, (3, 3), padding=1)),
        builder.emit(op.nn.softmax(rows)),
        builder.emit(op.matmul(a, b)),
        builder.emit(op.mean(x, [2, 3])),
        builder.emit(op.nn.gelu(rows)),
    ]


def six_convolutions(builder, *inputs):
    return [conv_relu(builder, inputs[i], inputs[6 + i]) for i in range(6)]


def copies(builder, x, w, v):
    """Two branches and the input itself, which is copied into its slice."""
    parts = [conv_relu(builder, x, w, padding=1), x, builder.emit(op.nn.conv2d(x, v))]
    return builder.emit(emit_concat_stores(builder, parts, 1))


def copies_alone(builder, x, y):
    return builder.emit(emit_concat_stores(builder, [x, y, x], 1))


def short_rows(builder, x, y):
    """Rows shorter than a warp: threads read what they wrote, which a linear thread index hides from TVM."""
    return [builder.emit(op.nn.softmax(x)), builder.emit(op.nn.softmax(y))]


def whole_groups(builder, x, deep, wide, a, b, scale, shift, y, p, gate):
    """Vertical and cross groups side by side: back to back, anchor and row, gate, pooling."""
    inner = conv_relu(builder, x, deep, padding=1, groups=8)
    row = op.nn.layer_norm(builder.emit(op.matmul(a, b)), scale, shift, axes=[-1])
    sigmoid = builder.emit(op.sigmoid(builder.emit(op.nn.conv2d(p, gate))))
    return [
        conv_relu(builder, inner, wide),
        builder.emit(row),
        builder.emit(op.multiply(y, sigmoid)),
        builder.emit(op.nn.layer_norm(a, shift, scale, axes=[-1])),
        builder.emit(op.nn.avg_pool2d(x, (3, 3), padding=1)),
    ]


# name: input shapes, group, number of members
CASES = {
    "copies": ([(1, 16, 12, 12), (8, 16, 3, 3), (12, 16, 1, 1)], copies, 3),
    "copies_alone": ([(1, 16, 13, 13), (1, 3, 13, 13)], copies_alone, 3),
    "short_rows": ([(50, 12), (6, 700)], short_rows, 2),
    "short_rows_twice": ([(50, 12), (50, 12)], short_rows, 2),
    "whole_groups": (
        [
            *[(1, 8, 10, 10), (8, 1, 3, 3), (16, 8, 1, 1), (9, 40), (40, 40), (40,), (40,)],
            *[(1, 24, 8, 8), (1, 10, 1, 1), (24, 10, 1, 1)],
        ],
        whole_groups,
        5,
    ),
    "two_towers": ([(1, 16, 14, 14), (32, 16, 3, 3)] * 2, two_towers, 2),
    "fire": ([(1, 16, 13, 13), (32, 16, 1, 1), (32, 16, 3, 3)], fire, 2),
    "fire_channels_last": (
        [(1, 13, 13, 16), (24, 1, 1, 16), (40, 3, 3, 16)],
        fire_channels_last,
        2,
    ),
    "elementwise": ([(1, 16, 14, 14)] * 3 + [(1, 16, 1, 1)] * 2, elementwise_branches, 3),
    "mixed": ([(1, 16, 14, 14), (16, 16, 3, 3), (4, 300), (32, 48), (48, 40)], mixed, 6),
    "six": ([(1, 8, 7, 7)] * 6 + [(8, 8, 1, 1)] * 6, six_convolutions, 6),
}


def inputs_of(shapes, dtype):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape) / 2).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_with_right_numbers(name, dtype):
    shapes, make, count = CASES[name]
    mod = group_module(shapes, dtype, make)
    func = group_function(mod)
    assert len(split_members(func)) == count
    scheduled, template = registry.schedule(func, SM90)
    assert template == "partitioned"
    source = cuda_emulation.cuda_source(scheduled, SM90)
    assert len(cuda_emulation.kernels(source)) == 1
    arrays = inputs_of(shapes, dtype)
    expected = run_on_cpu(mod, arrays)
    tolerance = {"float32": 1e-5, "float16": 4e-3}[dtype]
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, arrays, SM90, backward=backward, source=source)
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(
                result.astype("float64"),
                reference.astype("float64"),
                rtol=tolerance,
                atol=tolerance,
            )


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_nvcc_accepts_it(arch, tmp_path):
    shapes, make, _ = CASES["mixed"]
    scheduled, _ = registry.schedule(
        group_function(group_module(shapes, "float16", make)), chip(arch)
    )
    path = tmp_path / "kernel.cu"
    path.write_text(cuda_emulation.cuda_source(scheduled, chip(arch)))
    subprocess.run(
        ["nvcc", "-cubin", f"-arch={arch}", "-o", str(tmp_path / "kernel.cubin"), str(path)],
        check=True,
    )


def test_blocks_are_the_sum_and_threads_the_maximum():
    shapes, make, _ = CASES["mixed"]
    func = group_function(group_module(shapes, "float32", make))
    parts = [lower_member(registry.schedule(part, SM90)[0], SM90) for part in split_members(func)]
    launch = cuda_emulation.launch_of(Partitioned().apply(func, SM90))
    assert launch.grid == (sum(part.size(BLOCK_TAGS) for part in parts), 1, 1)
    assert launch.block == (max(part.size(THREAD_TAGS) for part in parts), 1, 1)
    assert len({part.size(THREAD_TAGS) for part in parts}) > 1


def test_a_member_of_many_threads_takes_fewer_beside_one_of_few():
    def make(builder, a, b, x, w):
        return [builder.emit(op.matmul(a, b)), conv_relu(builder, x, w)]

    shapes = [(1, 1024), (1024, 50), (1, 8, 10, 10), (12, 8, 1, 1)]
    func = group_function(group_module(shapes, "float32", make))
    alone = [cuda_emulation.launch_of(registry.schedule(p, SM90)[0]) for p in split_members(func)]
    assert alone[0].block[0] * alone[0].block[1] > 256
    assert cuda_emulation.launch_of(Partitioned().apply(func, SM90)).block[0] <= 256


def test_members_of_many_threads_keep_them():
    def make(builder, a, b, c):
        return [builder.emit(op.matmul(a, b)), builder.emit(op.matmul(a, c))]

    func = group_function(group_module([(1, 1024), (1024, 50), (1024, 50)], "float32", make))
    (first, second) = [
        lower_member(registry.schedule(p, SM90)[0], SM90) for p in split_members(func)
    ]
    assert first.size(THREAD_TAGS) == second.size(THREAD_TAGS) > 256
    launch = cuda_emulation.launch_of(Partitioned().apply(func, SM90))
    assert launch.block[0] == first.size(THREAD_TAGS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_concatenation_with_the_shortcut_and_what_follows_it(cuda, dtype, layout):
    b = ModuleBuilder(dtype, layout)
    extent = (1, 16, 11, 11) if layout == "NCHW" else (1, 11, 11, 16)
    after = (1, 36, 11, 11) if layout == "NCHW" else (1, 11, 11, 36)
    x, y = b.input("x", extent), b.input("y", after)
    parts = [b.relu("relu0", b.conv("conv0", x, 8, 3)), x, b.conv("conv1", x, 12, 1)]
    total = b.add("add", b.bias("bias", b.concat("concat", parts)), y)
    mod = b.finish(b.relu("relu", total))
    options = {"form": "partitioned", "join": "concat", "shortcut": "identity"}
    cuda.check_group(cuda.group(mod, "cross", dtype, **options), "partitioned", positions=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vertical_groups_side_by_side(cuda, dtype):
    """Four projections with layer norms of other widths, as a compound group."""
    b = ModuleBuilder(dtype)
    x = b.input("x", (9, 48))
    members = [
        b.layer_norm(f"norm{i}", b.dense(f"dense{i}", x, columns))
        for i, columns in enumerate((32, 64, 40, 100))
    ]
    group = cuda.group(b.finish(*members), "compound", dtype, form="partitioned", join="apart")
    cuda.check_group(group, "partitioned")


def tensor_members(builder, x, w, a, b):
    """A convolution by its depth and a product on tensor cores, beside a ReLU."""
    return [
        conv_relu(builder, x, w, padding=1, groups=16, **CHANNELS_LAST),
        builder.emit(op.matmul(a, b)),
        builder.emit(op.nn.relu(a)),
    ]


TENSOR_SHAPES = [(1, 14, 14, 16), (16, 3, 3, 1), (70, 48), (48, 40)]


def test_members_on_tensor_cores_ask_for_no_more_shared_memory_than_they_use():
    func = group_function(group_module(TENSOR_SHAPES, "float16", tensor_members))
    part = split_members(func)[1]
    scheduled, template = registry.schedule(part, SM90)
    alone, _ = registry.schedule(part.without_attr(MEMBER), SM90)
    assert template == "tensor_core"
    assert cuda_emulation.launch_of(scheduled).shared < cuda_emulation.launch_of(alone).shared
    together = cuda_emulation.launch_of(Partitioned().apply(func, SM90))
    assert together.shared == cuda_emulation.launch_of(scheduled).shared


def test_members_with_more_dynamic_shared_memory_than_a_block_has_are_refused():
    func = group_function(group_module(TENSOR_SHAPES, "float16", tensor_members))
    parts = [member_of(part, SM90) for part in split_members(func)]
    assert merge_members(func, parts, BOUNDS, SM90) is not None
    tight = dataclasses.replace(BOUNDS, dynamic_shared_bytes=1024)
    assert merge_members(func, parts, tight, SM90) is None


def test_every_member_waits_for_the_previous_kernel_if_one_does():
    """The launch overlaps with the previous one, so a member that did not wait would read what is not there yet."""

    def make(builder, x, w, a, b):
        # A window of one element is left to an older template.
        scaled = conv_relu(builder, x, w, groups=16, **CHANNELS_LAST)
        return [scaled, builder.emit(op.matmul(a, b)), builder.emit(op.nn.relu(a))]

    shapes = [TENSOR_SHAPES[0], (16, 1, 1, 1), *TENSOR_SHAPES[2:]]
    func = group_function(group_module(shapes, "float16", make))
    source = cuda_emulation.cuda_source(registry.schedule(func, SM90)[0], SM90)
    body = source[source.rindex('extern "C" __global__') :]
    assert body.count("tvmf_wait_for_previous();") == 3
    # The convolution comes first, and has no wait of its own.
    code = body[body.index("{") :]
    assert code.index("tvmf_wait_for_previous();") < code.index("x0_ptr")


def test_constants_of_members_are_packed():
    func = group_function(group_module(TENSOR_SHAPES, "float16", tensor_members))
    given = [p.name for p in func.params].index("x3")
    scheduled, _ = registry.schedule(func.with_attr(CONSTANTS, [given]), SM90)
    assert [int(axis) for axis in scheduled.attrs[PACKED][str(given)]] == [1, 0]
    assert [int(extent) for extent in scheduled.params[given].ty.shape] == [40, 48]
    arrays = inputs_of(TENSOR_SHAPES, "float16")
    expected = run_on_cpu(group_module(TENSOR_SHAPES, "float16", tensor_members), arrays)
    results = cuda_emulation.run(scheduled, packed_arrays(scheduled, arrays), SM90)
    for result, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(
            result.astype("float64"), reference.astype("float64"), rtol=4e-3, atol=4e-3
        )


def test_a_constant_of_two_members_stays_as_it_is():
    def make(builder, x, y, w):
        return [builder.emit(op.matmul(x, w)), builder.emit(op.matmul(y, w))]

    func = group_function(group_module([(33, 48), (17, 48), (48, 40)], "float16", make))
    given = [p.name for p in func.params].index("x2")
    scheduled, template = registry.schedule(func.with_attr(CONSTANTS, [given]), SM90)
    assert template == "partitioned"
    assert PACKED not in scheduled.attrs


def shared_bytes(source):
    sizes = {"float": 4, "half": 2}
    found = re.findall(r"__shared__ alignas\(\d+\) (\w+) \w+\[(\d+)\]", source)
    return sum(sizes[kind] * int(count) for kind, count in found)


def test_members_share_shared_memory():
    shapes, make, _ = CASES["two_towers"]
    func = group_function(group_module(shapes, "float32", make))
    target = chip("sm_75")
    alone = [
        shared_bytes(cuda_emulation.cuda_source(registry.schedule(part, target)[0], target))
        for part in split_members(func)
    ]
    scheduled, _ = registry.schedule(func, target)
    together = shared_bytes(cuda_emulation.cuda_source(scheduled, target))
    assert together == max(alone) > 0


def test_refuses_what_does_not_fit_in_shared_memory():
    shapes, make, _ = CASES["two_towers"]
    func = group_function(group_module(shapes, "float32", make))
    parts = [lower_member(registry.schedule(part, SM90)[0], SM90) for part in split_members(func)]
    assert merge_members(func, parts, dataclasses.replace(BOUNDS, shared_bytes=0), SM90) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda builder, x, w: conv_relu(builder, x, w, padding=1),
        lambda builder, x, w: (lambda y: [y, builder.emit(op.exp(y))])(
            conv_relu(builder, x, w, padding=1)
        ),
    ],
    ids=["one_member", "two_outputs_of_one_member"],
)
def test_does_not_fire_for_a_single_member(make):
    func = group_function(group_module([(1, 16, 14, 14), (32, 16, 3, 3)], "float32", make))
    assert split_members(func) is None
    assert Partitioned().apply(func, SM90) is None


def test_does_not_fire_when_members_share_an_intermediate():
    def make(builder, x, w, v):
        shared = builder.emit(op.nn.relu(x))
        return [conv_relu(builder, shared, w), conv_relu(builder, shared, v)]

    func = group_function(group_module([(1, 8, 7, 7), (8, 8, 1, 1), (8, 8, 1, 1)], "float32", make))
    assert Partitioned().apply(func, SM90) is None


def test_a_joined_concat_is_one_member():
    def make(builder, x, w, v):
        parts = [conv_relu(builder, x, w), conv_relu(builder, x, v)]
        return builder.emit(op.concat(parts, 1))

    func = group_function(group_module([(1, 8, 7, 7), (8, 8, 1, 1), (8, 8, 1, 1)], "float32", make))
    assert split_members(func) is None


def test_compiles_beside_other_functions_and_relax():
    shapes, make, _ = CASES["fire"]
    mod = group_module(shapes, "float32", make)
    scheduled, _ = registry.schedule(group_function(mod), SM90)
    mod = with_group_function(mod, scheduled)
    other = group_function(
        group_module([(1, 8, 9)], "float32", lambda builder, x: builder.emit(op.nn.softmax(x)))
    )
    softmax, _ = registry.schedule(other, SM90)
    mod.update_func(tvm.ir.GlobalVar("softmax"), softmax.with_attr("global_symbol", "softmax"))
    executable = tvm.compile(mod, target=SM90)

    def sources(module):
        own = [module.inspect_source()] if module.kind == "cuda" else []
        return own + [source for child in module.imports for source in sources(child)]

    kernels = [
        name for source in sources(executable.mod) for name in cuda_emulation.kernels(source)
    ]
    assert len(kernels) == 2


def test_group_attributes_are_kept():
    shapes, make, _ = CASES["fire"]
    func = group_function(group_module(shapes, "float32", make)).with_attr(
        "tvm_fusion.strategy", "horizontal"
    )
    scheduled, _ = registry.schedule(func, SM90)
    assert scheduled.attrs["tvm_fusion.strategy"] == "horizontal"
    assert bool(scheduled.attrs["tirx.is_scheduled"])
    assert all(
        first.same_as(second) for first, second in zip(scheduled.params, func.params, strict=True)
    )
    # One root block, which TVM's analyses expect, around the launch that is flat already.
    assert scheduled.body.block.name_hint == "root"
    assert "T.launch_thread" in scheduled.script() and scheduled.script().count("T.sblock(") == 1


def test_refuses_a_barrier_that_would_stand_under_a_condition():
    lane = tirx.Var("lane", "int32")
    shared = tirx.decl_buffer((32,), "float32", "stage", scope="shared", layout=None)
    write = tirx.BufferStore(shared, tirx.const(1.0, "float32"), [lane])
    read = tirx.BufferStore(shared, shared[31 - lane], [lane])

    def member(body):
        extents = {"threadIdx.x": 32, "blockIdx.x": 2}
        return FlatMember([], [body], {lane: "threadIdx.x"}, extents, [shared])

    both = tirx.SeqStmt([write, read])
    func = tirx.PrimFunc([], both)
    apart = [member(tirx.SeqStmt([write, read])) for _ in range(2)]
    under = [member(tirx.IfThenElse(lane < 16, both, None)) for _ in range(2)]
    assert merge_members(func, apart, BOUNDS, SM90) is not None
    assert merge_members(func, under, BOUNDS, SM90) is None


def flat_member(threads, barrier_under_lane):
    """Return a member with one barrier, under a condition that differs between threads or not."""
    lane = tirx.Var("lane", "int32")
    barrier = tirx.Evaluate(
        tirx.call_intrin("void", "tirx.tvm_storage_sync", tvm.ir.StringImm("shared"))
    )
    body = tirx.IfThenElse(lane < 16, barrier, None) if barrier_under_lane else barrier
    return FlatMember(
        [], [body], {lane: "threadIdx.x"}, {"threadIdx.x": threads, "blockIdx.x": 2}, []
    )


@pytest.mark.parametrize(
    ("threads", "barrier_under_lane", "merges"),
    [((32, 32), True, True), ((32, 64), False, True), ((32, 64), True, False)],
)
def test_surplus_threads_reach_every_barrier_or_it_is_refused(threads, barrier_under_lane, merges):
    members = [flat_member(count, barrier_under_lane) for count in threads]
    func = tirx.PrimFunc([], members[0].body[0])
    assert (merge_members(func, members, BOUNDS, SM90) is not None) == merges
