"""Elementwise operators behind attention: a group with them, and one without."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Vertical
from tvm_fusion.strategies.attention import attention_of
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of

op = relax.op
MIXED = (2, 24, 64)


def attention(behind):
    """Attention of two heads side by side, and ``behind(builder, mixed, weights)``."""
    b = ModuleBuilder("float16")
    q, k, v = (b.input(n, (2, 2, 24, 32)) for n in "qkv")
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    weights = b.op("softmax", op.nn.softmax(scores))
    swapped = b.op("swap", op.permute_dims(b.op("mixed", op.matmul(weights, v)), (0, 2, 1, 3)))
    made = behind(b, b.op("merged", op.reshape(swapped, MIXED)), weights)
    return b.finish(*(made if isinstance(made, tuple) else (made,)))


def groups(module):
    """Names of the operators of each proposed group, the smaller first, and the graph's reading of it."""
    graph = graph_of(module)
    made = [p for p in Vertical().propose(graph, FusionConfig()) if p.option("form") == "attention"]
    for proposal in made:
        assert attention_of(graph, proposal).operators == proposal.operators
    return [set(p.operators) for p in made], [attention_of(graph, p) for p in made]


CORE = {"turn", "scores", "softmax", "mixed", "swap"}


def gate(b, mixed, weights):
    return b.op("gated", op.multiply(mixed, b.op("gate", op.sigmoid(b.input("g", MIXED)))))


def joint_gate(b, mixed, weights):
    """SiLU of one half: the half has two readers, both inside."""
    half = b.op("half", op.strided_slice(b.input("g", (2, 24, 128)), [2], [64], [128]))
    made = b.op("gate", op.multiply(half, b.op("one", op.sigmoid(half))))
    return b.op("gated", op.multiply(mixed, made))


def scaled(b, mixed, weights):
    x = b.op("scaled", op.multiply(mixed, relax.const(0.5, "float16")))
    return b.op("sum", op.add(x, b.input("r", MIXED)))


def of_heads(b, mixed, weights):
    gate = b.op("view", op.reshape(b.input("g", (2, 24, 2, 1)), (2, 24, 2, 1)))
    wide = b.op("heads", op.reshape(mixed, (2, 24, 2, 32)))
    return b.op("gated", op.multiply(wide, gate))


@pytest.mark.parametrize(
    ("behind", "names"),
    [
        (gate, {"gate", "gated"}),
        (joint_gate, {"half", "one", "gate", "gated"}),
        (scaled, {"scaled", "sum"}),
        (of_heads, {"gated"}),
    ],
)
def test_two_groups_are_weighed(behind, names):
    (small, large), read = groups(attention(behind))
    assert small == CORE and CORE | names <= large
    assert not any(group.stray for group in read)


def shared_gate(b, mixed, weights):
    gate = b.op("gate", op.sigmoid(b.input("g", MIXED)))
    return b.op("gated", op.multiply(mixed, gate)), b.op("other", op.nn.relu(gate))


def test_what_something_else_reads_stays_outside():
    (_, large), _ = groups(attention(shared_gate))
    assert "gated" in large and "gate" not in large


def read_twice(b, mixed, weights):
    return b.op("gated", op.multiply(mixed, b.input("g", MIXED))), b.op("other", op.nn.relu(mixed))


def wider(b, mixed, weights):
    return b.op("gated", op.multiply(mixed, b.input("g", (3, *MIXED))))


def another_type(b, mixed, weights):
    return b.op("wide", op.astype(mixed, "float32"))


def not_elementwise(b, mixed, weights):
    return b.op("norm", op.nn.softmax(mixed))


def nothing(b, mixed, weights):
    return mixed


@pytest.mark.parametrize("behind", [read_twice, wider, another_type, not_elementwise, nothing])
def test_one_group_is_proposed(behind):
    found, _ = groups(attention(behind))
    assert found == [CORE]
