"""Softmax as models write it around attention: chains, sinks, other axes, and what is named elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Vertical
from tvm_fusion.strategies.attention import attention_of
from tvm_fusion.strategies.softmax_forms import Sink
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of

op = relax.op
HEADS, ROWS, KEYS, WIDTH = 4, 48, 40, 32


def attention(weights):
    """Attention whose weights are made from scores by ``weights(builder, scores)``."""
    b = ModuleBuilder("float16")
    q, k, v = (
        b.input(n, (2, HEADS, s, WIDTH)) for n, s in zip("qkv", (ROWS, KEYS, KEYS), strict=True)
    )
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    return b.finish(b.op("mixed", op.matmul(weights(b, scores), v)))


def found(module):
    """The group of the form, and its proposal; None where there is none."""
    graph = graph_of(module)
    made = [p for p in Vertical().propose(graph, FusionConfig()) if p.option("form") == "attention"]
    if not made:
        return None, None
    (proposal,) = made
    return attention_of(graph, proposal), proposal


def number(value: float) -> relax.Expr:
    return relax.const(value, "float16")


def chain(b, x, largest="max", added="number", inverse=False, swapped=False):
    """``exp(x - m) / (sum + something)``."""
    sink = b.const(1, HEADS, 1, 1)
    shift = None
    if largest:
        shift = b.op("most", op.max(x, [-1], True))
        if largest == "bounded":
            shift = b.op("bound", op.maximum(shift, number(0.0)))
        if largest == "beside":
            shift = b.op("bound", op.maximum(shift, sink))
        x = b.op("less", op.subtract(x, shift))
    power = b.op("power", op.exp(x))
    total = b.op("total", op.sum(power, [-1], True))
    other = {
        "": lambda: None,
        "number": lambda: number(2.0),
        "zero": lambda: op.exp(b.op("minus", op.negative(shift))),
        "half": lambda: op.exp(b.op("minus", op.subtract(number(0.5), shift))),
        "sink": lambda: op.exp(b.op("minus", op.subtract(sink, shift)) if largest else sink),
        "plain": lambda: sink,
        "shift": lambda: op.exp(shift),
        "below": lambda: number(-1.0),
    }[added]
    other = other()
    if added not in ("", "number", "plain", "below"):
        other = b.op("extra", other)
    if other is not None:
        total = b.op("whole", op.add(*((other, total) if swapped else (total, other))))
    if inverse:
        return b.op("weights", op.multiply(b.op("inverse", op.divide(number(1.0), total)), power))
    return b.op("weights", op.divide(power, total))


@pytest.mark.parametrize(
    ("kinds", "sink"),
    [
        ({"largest": "", "added": "number"}, Sink(score=math.log(2.0))),
        ({"largest": "", "added": ""}, None),
        ({"largest": "", "added": "sink"}, Sink("const0")),
        ({"largest": "max", "added": "number"}, Sink(share=2.0, counts=False)),
        ({"largest": "max", "added": "zero"}, Sink(score=0.0, counts=False)),
        ({"largest": "max", "added": "zero", "swapped": True}, Sink(score=0.0, counts=False)),
        ({"largest": "max", "added": "zero", "inverse": True}, Sink(score=0.0, counts=False)),
        ({"largest": "bounded", "added": "zero"}, Sink(score=0.0)),
        ({"largest": "bounded", "added": "half"}, Sink(score=0.5)),
        ({"largest": "beside", "added": "sink"}, Sink("const0")),
        ({"largest": "max", "added": "sink"}, Sink("const0", counts=False)),
    ],
)
def test_chains(kinds, sink):
    group, proposal = found(attention(lambda b, x: chain(b, x, **kinds)))
    assert not group.stray and group.softmax == "weights"
    assert group.sink == sink and not group.is_scored
    assert {"power", "total", "weights"} < set(proposal.operators)
    assert (group.rows, group.keys) == (ROWS, KEYS)


@pytest.mark.parametrize(
    ("kinds", "stray"),
    [
        ({"largest": "max", "added": "plain"}, "whole"),
        ({"largest": "", "added": "plain"}, "whole"),
        ({"largest": "max", "added": "shift"}, "whole"),
        ({"largest": "max", "added": "below"}, "whole"),
        ({"largest": "bounded", "added": "number"}, "whole"),
    ],
)
def test_other_sums_are_named(kinds, stray):
    group, _ = found(attention(lambda b, x: chain(b, x, **kinds)))
    assert group.stray == stray and "something else than one exponential" in group.why


def beside(b, x, first=False, cut="sink", axis=-1, places=1, wide=True):
    """The softmax of scores beside a column, which is sliced off again."""
    sink = b.const(1, HEADS, 1, places) if wide else b.input("column", (2, HEADS, ROWS, places))
    if wide:
        sink = b.op("column", op.broadcast_to(sink, (2, HEADS, ROWS, places)))
    joined = b.op("joined", op.concat([sink, x] if first else [x, sink], axis))
    weights = b.op("softmax", op.nn.softmax(joined))
    begin = places if first == (cut == "sink") else 0
    return b.op("weights", op.strided_slice(weights, [3], [begin], [begin + KEYS]))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_columns(first, wide):
    group, proposal = found(attention(lambda b, x: beside(b, x, first, wide=wide)))
    assert not group.stray and group.softmax == "weights" and group.sink.tensor
    assert {"joined", "softmax", "weights"} < set(proposal.operators)
    assert ("column" in proposal.operators) is wide
    assert group.keys == KEYS


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kinds", [{"cut": "key"}, {"places": 2}])
def test_other_columns_are_named(first, kinds):
    """A score is sliced off instead, or two columns are."""
    group, _ = found(attention(lambda b, x: beside(b, x, first, **kinds)))
    assert group.stray == "joined"


def of_queries(b, x):
    return b.op("softmax", op.nn.softmax(x, axis=-2))


def sum_of_queries(b, x):
    power = b.op("power", op.exp(x))
    total = b.op("total", op.sum(power, [-2], True))
    return b.op("softmax", op.divide(power, b.op("whole", op.add(total, number(1.0)))))


@pytest.mark.parametrize(("weights", "stray"), [(of_queries, "softmax"), (sum_of_queries, "total")])
def test_another_axis_is_named(weights, stray):
    group, _ = found(attention(weights))
    assert group.stray == stray and "axis" in group.why


def from_the_right():
    b = ModuleBuilder("float16")
    q, k = (b.input(n, (4, 32, 32)) for n in "qk")
    v = b.input("v", (4, 16, 32))
    weights = b.op("softmax", op.nn.softmax(b.op("scores", op.matmul(q, k))))
    return b.finish(b.op("mixed", op.matmul(v, weights)))


def test_weights_as_the_second_operand_are_named():
    group, _ = found(from_the_right())
    assert group.stray == "mixed" and "from the right" in group.why


def told(module, *names):
    """What the plan says of nodes, and what ``explain`` says of the last of them."""
    plan = tf.plan(module, target="cuda:sm_90")
    entries = [r for r in plan.rejected if "attention around" in r.detail]
    assert {(r.outcome, r.reason) for r in entries} == {("unsupported", "no_template")}
    (detail,) = {r.detail for r in entries}
    assert entries[0].numbers["node"] in names
    assert detail in str(tf.explain(module, "cuda:sm_90", node=names[-1]))
    return detail


@pytest.mark.parametrize(
    ("weights", "stray"),
    [
        (of_queries, "softmax"),
        (sum_of_queries, "total"),
        (lambda b, x: chain(b, x, "max", "shift"), "whole"),
        (lambda b, x: beside(b, x, cut="key"), "joined"),
    ],
)
def test_the_plan_and_explain_name_it(weights, stray):
    assert told(attention(weights), stray).startswith(f"{stray} (")


@pytest.mark.parametrize("flat", [False, True])
def test_operands_that_are_moved_before(flat):
    """They stay kernels, and the plan says why."""
    module = turned_values(flat)
    detail = told(module, "turned")
    assert detail.startswith("turned (permute_dims)") and "values whose rows" in detail


def turned_values(flat):
    b = ModuleBuilder("float16")
    q, k, v = (b.input(n, (4, 32, 32)) for n in "qkv")
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 2, 1)))))
    turned = b.op("turned", op.permute_dims(v, (0, 2, 1)))
    if flat:
        turned = b.op("same", op.reshape(b.op("flat", op.reshape(turned, (128, 32))), (4, 32, 32)))
    return b.finish(b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), turned)))


def test_nothing_is_told_of_one_kernel():
    module = attention(lambda b, x: b.op("softmax", op.nn.softmax(x)))
    plan = tf.plan(module, target="cuda:sm_90")
    assert not [r for r in plan.rejected if "attention around" in r.detail]
    assert len(plan.groups) == 1 and not plan.ungrouped


def test_limits_are_told():
    """Attention of more operators than are allowed is refused by that limit, by name of its anchors."""
    module = attention(lambda b, x: b.op("softmax", op.nn.softmax(x)))
    plan = tf.plan(module, target="cuda:sm_90", config=FusionConfig(max_operators=3))
    (entry,) = [r for r in plan.rejected if set(r.nodes) == {"scores", "softmax", "mixed"}]
    assert entry.reason == "group_too_large" and np.isfinite(entry.numbers["max_operators"])
