"""Explanations as text."""

from __future__ import annotations

import tvm_fusion as tf
from tvm_fusion.report import render_explanation
from tvm_fusion.testing.modules import ModuleBuilder


def module():
    """Two convolutions of other shapes, one of them with a bias under the same name, after a ReLU."""
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 16, 16)), b.input("y", (1, 8, 8, 8))
    left = b.bias("net/left[0]", b.conv("net/left[0]", x, 8))
    return b.finish(b.relu("act", left), b.relu("other", b.conv("right", y, 8)))


def shown(node: str | None = None, width: int = 160) -> str:
    explanation = tf.explain(module(), "cuda:sm_90", node=node)
    return render_explanation(explanation, model="net", width=width)


def test_a_node_of_several_operators():
    text = shown("net/left[0]").splitlines()
    assert text[0] == "net/left[0] of net is 2 operators."
    assert "net/left[0]: conv2d" in text and "net/left[0]#2: add" in text
    assert "  from net/left[0]" in text
    assert "  float32[1,8,16,16], float32[8,8,3,3] → float32[1,8,16,16]" in text
    assert any(line.startswith("  In fused_vertical_0 with") for line in text)
    assert "  In fused_vertical_0, as net/left[0]." in text  # told once
    assert "memory-bound" in "\n".join(text)


def test_refused_groups_have_their_reason_and_figures():
    text = shown("right")
    assert "shape_mismatch" in text and "unsupported" in text
    assert "read inputs of different shape" in text and "(input shapes" in text


def test_a_lone_operator():
    b = ModuleBuilder()
    alone = b.finish(b.conv("only", b.input("x", (1, 8, 8, 8)), 8))
    text = render_explanation(tf.explain(alone, node="only"), width=100)
    assert "In no group: a kernel of its own." in text
    assert "No group with it was proposed." in text
    assert "Neighbours" not in text


def test_the_whole_model():
    text = shown()
    assert text.startswith("net: 5 operators; ") and "2 taken (2 vertical)" in text
    assert "What stopped the rest" in text and "shape_mismatch" in text
    assert text.endswith("One node: tvm-fusion explain MODEL --node NAME")


def test_it_fits_the_width():
    assert max(map(len, shown("right", width=90).splitlines())) <= 90
