"""The text report: what a stranger needs to see."""

from __future__ import annotations

import tvm_fusion as tf
from tvm_fusion.report import render_plan
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs


def lines(module, **options):
    config = tf.FusionConfig(**options)
    return render_plan(tf.plan(module, "cuda:sm_90", config, name="net"), width=160).splitlines()


def test_a_fused_group_is_shown_with_its_numbers():
    text = lines(parallel_convs(4, relu=True))
    assert text[0].startswith("net (float32, 11 operators) for cuda sm_90, as NVIDIA H")
    assert text[1].startswith("launches 11 → 1   MiB moved 100.6 → 8.6")
    (row,) = [line for line in text if line.startswith("horizontal_0")]
    assert "4 × (conv2d + relu) + 3 × add (merged)" in row and "conv0 … add3" in row


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
