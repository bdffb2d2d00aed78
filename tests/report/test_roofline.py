"""The roofline plot: right roof, right places."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tvm_fusion.devices import CPU, DEVICES
from tvm_fusion.planner import TargetInfo
from tvm_fusion.report.roofline import build_roofline, device_of, rate


def test_the_roof_is_that_of_the_device(plan, graph) -> None:
    plot = build_roofline(plan, graph)
    device = DEVICES["sm_90"]
    assert plot.peak == device.peak_flops("float32") and plot.bandwidth == device.memory_bandwidth
    assert plot.ridge == pytest.approx(plot.peak / plot.bandwidth)
    (x0, y0), (x1, y1), (x2, y2) = plot.roof
    assert x0 < x1 < x2 and y0 > y1 == y2  # rises to the ridge, then flat
    decade = plot.x_ticks[1].at - plot.x_ticks[0].at
    rise = plot.y_ticks[0].at - plot.y_ticks[1].at
    assert (y0 - y1) / rise == pytest.approx((x1 - x0) / decade, abs=0.01)  # slope one


def test_dots_stand_where_their_numbers_say(plan, graph) -> None:
    plot = build_roofline(plan, graph)
    decade = plot.x_ticks[1].at - plot.x_ticks[0].at
    for group, (before, after) in zip(plan.groups, plot.pairs, strict=True):
        assert before.intensity == pytest.approx(group.flops_before / group.bytes_before)
        assert after.intensity == pytest.approx(group.flops_after / group.bytes_after)
        speed = group.flops_after / (group.predicted_us_after * 1e-6)
        assert after.flops_per_second == pytest.approx(speed)
        moved = math.log10(after.intensity / before.intensity) * decade
        assert after.x - before.x == pytest.approx(moved, abs=0.2)
        assert after.x > before.x and after.kind == group.strategy
    assert [dot.kind for dot in plot.alone] == ["alone"] and plot.hidden == 0


def test_equal_kernels_say_that_they_hide_each_other(plan, graph) -> None:
    assert not any("same place" in after.title for _, after in build_roofline(plan, graph).pairs)
    twice = dataclasses.replace(plan, groups=(plan.groups[0], *plan.groups))
    titles = [after.title for _, after in build_roofline(twice, graph).pairs]
    assert ["1 other group at the same place" in title for title in titles] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_measured_times_come_first(plan, measured, graph) -> None:
    assert not build_roofline(plan, graph).measured
    plot = build_roofline(measured, graph)
    assert plot.measured
    group, (_, after) = measured.groups[0], plot.pairs[0]
    assert after.flops_per_second == pytest.approx(group.flops_after / 4.75e-6)


def test_kernels_without_arithmetic_are_counted(plan, graph) -> None:
    first = dataclasses.replace(plan.groups[0], flops_before=0, flops_after=0)
    plot = build_roofline(dataclasses.replace(plan, groups=(first, *plan.groups[1:])), graph)
    assert plot.hidden == 1 and len(plot.pairs) == len(plan.groups) - 1


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (TargetInfo("cuda", "sm_90a"), "NVIDIA H200 SXM"),
        (TargetInfo("cuda", "sm_87"), DEVICES["sm_86"].name),
        (TargetInfo("llvm", None, CPU.name), CPU.name),
        (TargetInfo("llvm", None, "generic CPU, 4 cores"), "generic CPU, 4 cores"),
        (TargetInfo("llvm"), CPU.name),
    ],
)
def test_devices(target, name) -> None:
    assert device_of(target).name == name


@pytest.mark.parametrize(
    "target", [TargetInfo("cuda", "sm_1"), TargetInfo("cuda"), TargetInfo("x")]
)
def test_no_device_no_plot(target, plan, graph) -> None:
    assert device_of(target) is None
    assert build_roofline(dataclasses.replace(plan, target=target), graph) is None


def test_rates() -> None:
    assert [rate(v) for v in (989e12, 4.8e12, 1e15, 12.0)] == ["989 T", "4.8 T", "1 P", "12 "]
