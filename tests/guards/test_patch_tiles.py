"""Tiles that read windows of images of few channels from a patch: what plans count with is what kernels have."""

from __future__ import annotations

import dataclasses

import pytest
from tvm_fusion.schedules.cuda.tensor_core.patch_form import patch_problem
from tvm_fusion.schedules.cuda.tensor_core.template import products_of

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.patch_tiles import PatchProblem, line_threads, patch_choices, resident_blocks
from tvm_fusion.guards.tensor_cores import patch_of
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.transform.lower_groups import lower_groups

#: The 7x7 first layer of ResNet-50 at batch 32: rows, places and channels of an image of 224x224.
FIRST = PatchProblem(
    (32, 112, 112), ((1, 0, 0), (0, 2, 0), (0, 0, 6)), (1, 7, 21), columns=64, depth=160
)


def convolution(channels: int, kernel: int, outputs: int = 16, dtype: str = "float16", **attrs):
    """A convolution, channels last."""
    b = ModuleBuilder(dtype, "NHWC")
    x = b.input("x", (2, 33, 29, channels))
    return b.finish(b.relu("relu", b.conv("conv", x, outputs, kernel, **attrs)))


def described(mod):
    """What plans count with."""
    graph = graph_of(mod)
    return patch_of(graph, [o for o in graph.operators if o.pattern == "anchor"])


@pytest.mark.parametrize(
    ("channels", "kernel", "attrs"),
    [(3, 7, {"stride": 2}), (3, 3, {}), (1, 5, {}), (5, 3, {"stride": 2}), (3, 4, {"stride": 3})],
)
def test_plans_count_with_the_problem_that_kernels_have(channels, kernel, attrs):
    mod = convolution(channels, kernel, **attrs)
    lowered, kernels = lower_groups(as_group(mod, "vertical"))
    func = lowered[kernels["fused_vertical_0"]]
    forms, _ = products_of(func, parse_target("cuda:sm_90"))
    assert described(mod) == patch_problem(forms[1]) is not None


@pytest.mark.parametrize(
    "mod",
    [
        convolution(16, 3),
        convolution(4, 3),
        convolution(3, 3, outputs=12),
        convolution(3, 3, dtype="float32"),
    ],
)
def test_other_convolutions_have_none(mod):
    assert described(mod) is None


def test_a_line_is_read_by_few_idle_threads():
    assert line_threads(63, 128) == 32
    assert line_threads(8, 128) == 8
    assert line_threads(256, 256) == 32


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_registers_of_resident_blocks_fit(arch):
    device = DEVICES[arch]
    for choice in patch_choices(FIRST, device, 64):
        blocks = resident_blocks(FIRST, device, choice.tile)
        assert blocks * choice.tile.threads <= device.max_threads_per_multiprocessor
        held = choice.tile.registers(None) * choice.tile.threads * blocks
        assert blocks == 1 or held <= device.registers_per_multiprocessor


def test_deeper_windows_and_more_images_take_longer():
    times = [
        patch_choices(problem, DEVICES["sm_90"])[0].microseconds
        for problem in (
            FIRST,
            dataclasses.replace(FIRST, depth=320),
            dataclasses.replace(FIRST, extents=(64, 112, 112)),
        )
    ]
    assert times[0] < times[1]
    assert times[2] > 1.8 * times[0]
