"""The text report: what a stranger needs to see."""

from __future__ import annotations

import dataclasses

import tvm_fusion as tf
from tvm_fusion.report import render_plan
from tvm_fusion.report.words import LETTERS
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs


def lines(module, **options):
    config = tf.FusionConfig(**options)
    return render_plan(tf.plan(module, "cuda:sm_90", config, name="net"), width=160).splitlines()


def test_a_fused_group_is_shown_with_its_numbers():
    module = parallel_convs(4, spatial=16)
    text = lines(module)
    plan = tf.plan(module, "cuda:sm_90")
    t, group = plan.totals, plan.groups[0]
    assert text[0].startswith("net (float32, 7 operators) for cuda sm_90, as NVIDIA H")
    moved = f"{t.bytes_before / 2**20:.1f} → {t.bytes_after / 2**20:.1f}"
    assert text[1].startswith(f"launches 7 → {t.launches_after}   MiB moved {moved}   GFLOP")
    (row,) = [line for line in text if line.startswith(group.id.removeprefix("fused_"))]
    assert "4 × (conv2d) + 3 × add (collapsed)" in row and "conv0 … add3" in row
    assert f"{group.launches_before} → 1" in row
    assert f"{group.predicted_us_before:.1f} → {group.predicted_us_after:.1f}" in row
    assert any("one convolution with the added weights" in line for line in text)


def test_refusals_are_explained_in_the_models_names():
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 16, 16)), b.input("y", (1, 8, 8, 8))
    text = "\n".join(lines(b.finish(b.conv("left", x, 8), b.conv("right", y, 8))))
    assert "shape_mismatch" in text and "left, right read inputs of different shape" in text
    assert "Kernels of their own" in text


def test_nothing_is_taken_for_markup():
    b = ModuleBuilder()
    text = "\n".join(lines(b.finish(b.conv("net/block[0]/conv", b.input("x", (1, 8, 8, 8)), 8))))
    assert "net/block[0]/conv" in text


def test_every_reason_appears_once_however_many_refusals_it_has():
    b = ModuleBuilder()
    value = b.input("x", (1, 8, 8, 8))
    for i in range(9):
        value = b.conv(f"c{i}", value, 8)
    text = lines(b.finish(value))
    assert sum(line.startswith("no_template") for line in text) == 1
    assert any("5 more in the JSON plan" in line for line in text)


def shown(plan) -> list[str]:
    return render_plan(plan, width=200).splitlines()


def test_parts_options_search_and_regions(plan):
    text = shown(plan)
    assert text[2] == (
        "preset small-cnn; 3 regions of competing groups: 2 solved to the least predicted time, "
        "1 within 0.25 µs of it"
    )
    joined = "\n".join(text)
    assert "V vertical a, a_relu, 2.2 µs alone" in joined
    assert "H horizontal a, c, 4.5 µs alone" in joined
    assert "balanced: the lighter kernel zero-padded to the heavier one's size" in joined
    assert "Regions: parts of the model that several strategies serve" in text
    (region,) = [line.split() for line in text if " serial " in line]
    assert region[-2:] == ["serial", "compound_0"]


def test_hot_groups_are_marked(plan, measured):
    text = shown(plan)
    assert "Fused: one kernel each (* hot)" in text
    marks = [line.split()[1] == "*" for line in text if line.split("_")[0] in LETTERS]
    assert marks == [True, False, False, False]
    cold = dataclasses.replace(plan.groups[0], hot=False)
    calm = shown(dataclasses.replace(plan, groups=(cold, *plan.groups[1:])))
    assert "Fused: one kernel each" in calm


def test_what_the_compiler_says_stands_beside_the_estimate(plan, measured):
    joined = "\n".join(shown(measured))
    assert "50 (est. 40)" in joined and "1024 (est. 2048)" in joined
    assert "Registers estimated within 20 % on average (1 kernel)." in joined
    assert "measured µs 41.5 → 22.2" in joined and "9.5 → 4.8" in joined
    static = "\n".join(shown(plan))
    assert "est." not in static and "estimated" not in static and "measured" not in static


def test_no_line_ends_in_blanks(measured):
    assert all(line == line.rstrip() for line in shown(measured))
