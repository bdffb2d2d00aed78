"""Strips: what the search admits, what the model says, and that planner and template describe a problem alike."""

from __future__ import annotations

import dataclasses

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.strips.form import pack, problem_of, strips
from tvm_fusion.schedules.cuda.tensor_core.template import constants_of

from tvm_fusion.devices import DEVICES
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.guards.footprint import as_proposal, footprint
from tvm_fusion.guards.grouped_products import strip_problem
from tvm_fusion.guards.strip_model import (
    MOST_CHANNELS,
    REGISTERS,
    SUMS,
    UNROLLED,
    Problem,
    Tile,
    best_strips,
    predict,
    reached,
)
from tvm_fusion.guards.tiling import contraction_of
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.cuda_emulation import launch_of
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.transform.lower_groups import lower_groups

H200, T4 = DEVICES["sm_90"], DEVICES["sm_75"]


def depthwise(size: int, channels: int, window: int = 3, stride: int = 1, batch: int = 1, nbytes=2):
    """A depthwise convolution with channels last."""
    return Problem(
        channels, size, size, batch, (window, window), (stride, stride), (1, 1), 1, nbytes, True, True,
        16 // nbytes,
    )  # fmt: skip


PROBLEMS = {
    "112x112x32": depthwise(112, 32),
    "112x112x32, many": depthwise(112, 32, batch=32),
    "56x56x96, strided": depthwise(56, 96, stride=2),
    "7x7x960": depthwise(7, 960),
    "7x7 window": depthwise(56, 96, 7, batch=32),
    "31x31 window": depthwise(56, 96, 31),
    "float32": depthwise(28, 192, nbytes=4),
    "channels first": Problem(1, 28, 28, 192, (3, 3), (1, 1), (1, 1), 1, 4, False, False, 1),
    "groups of 4": Problem(4, 56, 56, 32, (3, 3), (1, 1), (1, 1), 4, 4, False, True, 4),
}


@pytest.mark.parametrize("device", [T4, H200], ids=["T4", "H200"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_strip_can_be_launched(name, device):
    problem = PROBLEMS[name]
    found = best_strips(problem, device, 10_000)
    assert found
    for choice in found:
        tile = choice.tile
        assert tile.outputs <= SUMS and tile.registers(problem) <= REGISTERS
        assert tile.channels * problem.nbytes <= 16 and problem.channels % tile.channels == 0
        assert (
            tile.strips(problem) * tile.outputs >= problem.channels * problem.rows * problem.others
        )
        assert not tile.is_rolled(problem) or tile.rows == 1
        assert tile.outputs * problem.window[1] * problem.chunk <= UNROLLED
    # Times that differ by less than a picosecond are the same, whatever the machine.
    times = [round(c.microseconds, 6) for c in found]
    assert times == sorted(times)


def test_wide_groups_are_left_to_others():
    wide = dataclasses.replace(PROBLEMS["groups of 4"], depth=2 * MOST_CHANNELS)
    assert best_strips(wide, H200) == ()


def test_positions_that_neighbours_share_are_read_once():
    assert reached(4, depthwise(56, 96), 1) == [0, 1, 2, 3, 4, 5]
    assert reached(3, depthwise(56, 96, stride=2), 0) == list(range(7))
    dilated = dataclasses.replace(depthwise(56, 96, stride=2), dilation=(2, 2))
    assert reached(3, dilated, 1) == [0, 2, 4, 6, 8]


def test_time_grows_with_work_and_falls_with_the_chip():
    tile = Tile(8, 2, 4, 128)
    one, many = (predict(depthwise(56, 144, batch=n), H200, tile) for n in (1, 32))
    assert one < many < 32 * one
    assert predict(depthwise(56, 144, 7, batch=32), H200, tile) > many
    assert predict(depthwise(56, 144, batch=32), T4, tile) > many


def test_small_problems_get_small_strips():
    """Most multiprocessors have a block before a thread has more than a few outputs."""
    small, large = (best_strips(depthwise(14, 384, batch=n), H200)[0].tile for n in (1, 32))
    assert small.blocks(depthwise(14, 384)) > H200.multiprocessors / 2
    assert small.outputs <= 8 < large.outputs


@pytest.mark.parametrize(
    ("problem", "tile", "measured"),
    [
        (depthwise(112, 32), Tile(2, 2, 4, 64), 1.57),
        (depthwise(28, 192, batch=32), Tile(2, 4, 4, 64), 4.92),
        (depthwise(28, 120, 5, batch=32), Tile(2, 2, 7, 64), 7.93),
        (depthwise(14, 576, batch=32), Tile(1, 1, 1, 64), 68.87),
        (depthwise(56, 96, 7, batch=32, nbytes=4), Tile(1, 2, 14, 64), 40.39),
    ],
)
def test_predictions_are_near_measurements(problem, tile, measured):
    """One H200, launches that overlap; benchmarks/NOTES.md."""
    assert predict(problem, H200, tile) == pytest.approx(measured, rel=0.25)


def test_blocks_start_one_after_the_other():
    """With hardly any work, time goes with the number of blocks."""
    problem = depthwise(14, 576, batch=32)
    one, two, four = (predict(problem, H200, Tile(n, 1, 1, 64)) for n in (1, 2, 4))
    assert one - two == pytest.approx(2 * (two - four), rel=0.02)
    assert predict(problem, H200, Tile(1, 1, 1, 128)) < 0.6 * one


def test_blocks_that_start_early_crowd():
    """Where several kernels' blocks do not all fit, and only where launches overlap."""
    before = dataclasses.replace(H200, arch="sm_80")
    problem = depthwise(56, 96, 7)
    # 2.2 blocks a multiprocessor, and room for 6; one block each, and room for 11.
    for crowded, case, tile in (
        (True, problem, Tile(1, 4, 4, 64)),
        (False, depthwise(7, 384), Tile(1, 1, 4, 64)),
    ):
        early, late = (predict(case, device, tile) for device in (H200, before))
        assert (early > late) == crowded
        assert early >= late


def network(kind: str):
    """A convolution as a model has it."""
    dtype, layout, groups, outputs, stride, dilation, size = {
        "depthwise": ("float16", "NHWC", 40, 40, 1, 1, 14),
        "strided": ("bfloat16", "NHWC", 20, 20, 2, 2, 15),
        "channels first": ("float32", "NCHW", 40, 40, 2, 1, 14),
        "groups": ("float32", "NHWC", 10, 40, 1, 1, 14),
        "multiplier": ("float16", "NHWC", 40, 80, 1, 1, 14),
        "products": ("float16", "NHWC", 5, 80, 1, 1, 28),
    }[kind]
    b = ModuleBuilder(dtype, layout)
    channels = 20 if kind == "strided" else 40
    x = b.input("x", (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size))
    inner = channels // groups
    weight = (outputs, 3, 3, inner) if layout == "NHWC" else (outputs, inner, 3, 3)
    call = relax.op.nn.conv2d(
        x, b.const(*weight), strides=stride, padding=dilation, dilation=dilation, groups=groups,
        data_layout=layout, kernel_layout="OHWI" if layout == "NHWC" else "OIHW",
    )  # fmt: skip
    return b.finish(b.relu("relu", b.bias("bias", b.op("conv", call))))


@pytest.mark.parametrize(
    "kind", ["depthwise", "strided", "channels first", "groups", "multiplier", "products"]
)
def test_planner_and_template_agree(kind):
    module = network(kind)
    graph = from_relax(module).graph
    (anchor,) = (o for o in graph.operators if o.pattern == "anchor")
    lowered, kernels = lower_groups(as_group(module, "vertical"))
    func = lowered[kernels["fused_vertical_0"]]
    form, _ = pack(strips(func), constants_of(func))
    assert problem_of(form) == strip_problem(graph, anchor, contraction_of(graph, anchor))
    scheduled, template = schedule(func, parse_target("cuda:sm_90a"))
    everything = as_proposal(graph, tuple(o.name for o in graph.operators))
    needs = footprint(graph, everything, H200)
    launch = launch_of(scheduled)
    assert needs.microseconds > 0
    assert (needs.blocks, needs.threads) == (launch.grid[0], launch.block[0])
    assert (template == "strips") == (needs.shared_bytes == 0)
