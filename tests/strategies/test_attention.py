"""Attention in graphs: which operators belong to it, and which one stops it."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Vertical
from tvm_fusion.strategies.attention import attention_of
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.transformer_blocks import bert_block

op = relax.op


def attention(between=None, behind=None, before=None, dtype="float16", results=()):
    """Attention of heads, with something between its pieces.

    ``between`` follows the first product, ``behind`` the softmax, ``before`` goes before keys are transposed.
    """
    b = ModuleBuilder(dtype)
    q, k, v = (b.input(name, (2, 4, 48, 32)) for name in "qkv")
    k = before(b, k) if before else k
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    scores = between(b, scores) if between else scores
    weights = b.op("softmax", op.nn.softmax(scores))
    weights = behind(b, weights) if behind else weights
    mixed = b.op("mixed", op.matmul(weights, v))
    named = {"scores": scores, "softmax": weights}
    return b.finish(mixed, *(named[name] for name in results))


def found(module):
    """The group of the form, and its proposal; None where there is none."""
    graph = graph_of(module)
    made = [p for p in Vertical().propose(graph, FusionConfig()) if p.option("form") == "attention"]
    if not made:
        return None, None
    (proposal,) = made
    return attention_of(graph, proposal), proposal


def scale(b, x):
    return b.op("scale", op.multiply(x, b.array(np.array(0.125))))


def mask(b, x):
    return b.op("mask", op.add(x, b.const(2, 1, 1, 48)))


def cast(b, x):
    wide = b.op("wide", op.astype(x, "float32"))
    return b.op("narrow", op.astype(wide, "float16"))


def view(b, x):
    flat = b.op("flat", op.reshape(x, (8, 48, 48)))
    return b.op("whole", op.reshape(flat, (2, 4, 48, 48)))


def cap(b, x):
    return b.op("cap", op.tanh(x))


@pytest.mark.parametrize(
    ("between", "names", "scored"),
    [
        (None, set(), False),
        (scale, {"scale"}, False),
        (mask, {"mask"}, True),
        (cast, {"wide", "narrow"}, False),
        (view, {"flat", "whole"}, False),
        (cap, {"cap"}, True),
    ],
)
def test_between_product_and_softmax(between, names, scored):
    group, proposal = found(attention(between))
    assert not group.stray and group.is_scored is scored
    assert set(proposal.operators) == {"turn", "scores", "softmax", "mixed", *names}
    assert proposal.anchors == ("scores", "softmax", "mixed")
    assert (group.heads, group.rows, group.keys, group.width, group.value_width) == (
        8,
        48,
        48,
        32,
        32,
    )


@pytest.mark.parametrize(
    ("behind", "names"), [(cast, {"wide", "narrow"}), (view, {"flat", "whole"})]
)
def test_between_softmax_and_product(behind, names):
    group, proposal = found(attention(behind=behind))
    assert not group.stray and names < set(proposal.operators)


@pytest.mark.parametrize(
    ("numbers", "scored"),
    [((0.125,), False), ((-0.125,), True), ((-0.5, -0.25), False), ((2, -0.25), True)],
)
def test_scores_of_the_opposite_sign_are_expressions(numbers, scored):
    def scales(b, x):
        for number in numbers:
            x = b.op("scale", op.multiply(x, relax.const(number, "float16")))
        return x

    group, _ = found(attention(scales))
    assert not group.stray and group.is_scored is scored
    group, _ = found(attention(before=scales))
    assert not group.stray and group.is_scored is scored


@pytest.mark.parametrize("number", [np.inf, 0.0])
def test_factors_that_no_sum_has(number):
    def far(b, x):
        return b.op("far", op.multiply(x, relax.const(number, "float16")))

    group, proposal = found(attention(before=far))
    assert not group.stray and "far" not in proposal.operators
    group, proposal = found(attention(between=far))
    assert "far" in proposal.operators
    assert (group.stray, group.is_scored) == (("", True) if number else ("far", False))


def turn_scores(b, x):
    return b.op("stray", op.permute_dims(x, (0, 1, 3, 2)))


def double(b, x):
    return b.op("stray", op.add(x, x))


def cut(b, x):
    return b.op("stray", op.nn.relu(x))


def rolled(b, x):
    return b.op("stray", op.take(x, relax.const(np.roll(np.arange(48), 1), "int64"), axis=-1))


def centred(b, x):
    return b.op("centred", op.subtract(x, b.op("stray", op.mean(x, -1, keepdims=True))))


def shrunk(b, x):
    return b.op("stray", op.multiply(x, relax.const(0.5, "float16")))


def clipped(b, x):
    return b.op("stray", op.clip(x, 0, 1))


def moved(b, x):
    return b.op("stray", op.add(x, relax.const(0.5, "float16")))


@pytest.mark.parametrize(
    "place",
    [
        {"between": turn_scores},
        {"between": rolled},
        {"between": centred},
        *(
            {"behind": f}
            for f in (turn_scores, double, cut, rolled, centred, shrunk, clipped, moved)
        ),
    ],
)
def test_a_stray_operator_is_named(place):
    group, proposal = found(attention(**place))
    assert group.stray == "stray" and "stray" in proposal.operators and group.why


def zeros(b, x, number=0.0):
    return b.op("zeros", op.full_like(x, relax.const(number, "float16")))


def nan_rows(b, x):
    return b.op("rows", op.where(b.op("nan", op.isnan(x)), zeros(b, x), x))


def nan_rows_by_a_number(b, x):
    nan = b.op("nan", op.isnan(x))
    return b.op("rows", op.where(nan, relax.const(0.0, "float16"), x))


def defined_rows(b, x):
    known = b.op("known", op.logical_not(b.op("nan", op.isnan(x))))
    return b.op("rows", op.where(known, x, zeros(b, x)))


@pytest.mark.parametrize("behind", [nan_rows, nan_rows_by_a_number, defined_rows])
def test_rows_without_any_key_become_zero(behind):
    group, proposal = found(attention(behind=behind))
    assert not group.stray and {"nan", "rows"} < set(proposal.operators)


def masked(hidden=-np.inf, shared=False, kept=False):
    """An additive mask, and zeros for rows whose largest mask is a number; ``shared``: that is a result, too."""
    b = ModuleBuilder("float16")
    q, k, v = (b.input(name, (2, 4, 48, 32)) for name in "qkv")
    mask = b.input("mask", (2, 1, 48, 48))
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    weights = b.op("softmax", op.nn.softmax(b.op("masked", op.add(scores, mask))))
    largest = b.op("largest", op.max(mask, [-1], True))
    hides = b.op("hides", op.equal(largest, relax.const(hidden, "float16")))
    zero = relax.const(0.0, "float16")
    chosen = op.where(hides, weights, zero) if kept else op.where(hides, zero, weights)
    mixed = b.op("mixed", op.matmul(b.op("rows", chosen), v))
    return b.finish(mixed, *([largest] if shared else []))


@pytest.mark.parametrize(
    ("module", "inside"),
    [
        pytest.param(masked(), True, id="mask"),
        pytest.param(masked(shared=True), False, id="mask whose largest is a result"),
        pytest.param(masked(hidden=-1.0), False, id="another number"),
        pytest.param(masked(kept=True), False, id="the other rows"),
    ],
)
def test_rows_that_a_condition_hides_become_zero(module, inside):
    """It is computed inside where nothing else needs it and it says that no key is left; else it is read."""
    group, proposal = found(module)
    assert not group.stray and "rows" in proposal.operators
    assert ({"largest", "hides"} <= set(proposal.operators)) is inside


def nan_kept(b, x):
    return b.op("stray", op.where(b.op("nan", op.isnan(x)), x, zeros(b, x)))


def ones(b, x):
    return b.op("stray", op.where(b.op("nan", op.isnan(x)), zeros(b, x, 1.0), x))


def infinite(b, x):
    return b.op("stray", op.where(b.op("inf", op.isinf(x)), zeros(b, x), x))


@pytest.mark.parametrize("behind", [nan_kept, ones, infinite])
def test_other_selections_are_named(behind):
    group, _ = found(attention(behind=behind))
    assert group.stray == "stray" and group.why


@pytest.mark.parametrize("place", ["scores", "masked", "softmax"])
def test_another_reader_of_a_value_is_named(place):
    b = ModuleBuilder("float16")
    q, k, v = (b.input(name, (2, 4, 48, 32)) for name in "qkv")
    values = {}
    values["scores"] = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    values["masked"] = mask(b, values["scores"])
    values["softmax"] = b.op("softmax", op.nn.softmax(values["masked"]))
    mixed = b.op("mixed", op.matmul(values["softmax"], v))
    group, _ = found(b.finish(mixed, b.op("stray", op.nn.relu(values[place]))))
    assert group.stray == "stray" and "never be written" in group.why


def test_another_reader_of_an_operand_is_in_no_ones_way():
    b = ModuleBuilder("float16")
    q, k, v = (b.op(f"{name}_cut", op.nn.relu(b.input(name, (2, 4, 48, 32)))) for name in "qkv")
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    mixed = b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), v))
    others = [b.op(f"{n}_other", op.tanh(x)) for n, x in zip("qkv", (q, k, v), strict=True)]
    group, proposal = found(b.finish(mixed, *others))
    assert not group.stray and not {"q_cut", "k_cut", "v_cut"} & set(proposal.operators)


def test_a_value_that_is_needed_elsewhere():
    group, _ = found(attention(results=["softmax"]))
    assert group.stray == "softmax"


def test_an_operand_whose_rows_are_not_contiguous():
    b = ModuleBuilder("float16")
    q, k, v = (
        b.input(n, (2, 4, *s)) for n, s in (("q", (48, 32)), ("k", (32, 48)), ("v", (48, 32)))
    )
    scores = b.op("scores", op.matmul(q, b.op("stray", op.nn.relu(k))))
    module = b.finish(b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), v)))
    group, _ = found(module)
    assert group.stray == "stray" and "contiguous" in group.why


def test_operands_are_read_through_views():
    group, proposal = found(bert_block(sequence=32, hidden=128, heads=4, dtype="float16"))
    assert not group.stray
    assert {"query_heads", "key_heads", "value_heads", "context_swap"} < set(proposal.operators)
    # A reshape that only precedes a transpose costs nothing outside.
    assert "query_split" not in proposal.operators


def test_shared_heads_are_read_through():
    b = ModuleBuilder("float16")
    q, k, v = b.input("q", (2, 4, 48, 32)), *(b.input(n, (2, 2, 48, 32)) for n in "kv")

    def repeat(name, x):
        x = b.op(f"{name}1", op.reshape(x, (2, 2, 1, 48, 32)))
        x = b.op(f"{name}2", op.broadcast_to(x, (2, 2, 2, 48, 32)))
        return b.op(f"{name}3", op.reshape(x, (2, 4, 48, 32)))

    k = b.op("turn", op.permute_dims(repeat("k", k), (0, 1, 3, 2)))
    weights = b.op("softmax", op.nn.softmax(b.op("scores", op.matmul(q, k))))
    group, proposal = found(b.finish(b.op("mixed", op.matmul(weights, repeat("v", v)))))
    assert not group.stray and {"k2", "v2", "turn"} < set(proposal.operators)


def joint(results=0):
    """Queries, keys and values of one tensor, split; some of its parts are results too."""
    b = ModuleBuilder("float16")
    x = b.input("x", (2, 48, 3 * 128))
    parts = b.split("split", x, [128, 256], axis=-1)

    def heads(name, part):
        part = b.op(f"{name}_parts", op.reshape(part, (2, 48, 4, 32)))
        return b.op(f"{name}_heads", op.permute_dims(part, (0, 2, 1, 3)))

    q, k, v = (heads(name, part) for name, part in zip("qkv", parts, strict=True))
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    mixed = b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), v))
    return b.finish(mixed, *parts[:results])


def test_a_split_is_read_in_place():
    group, proposal = found(joint())
    assert not group.stray and {"split", "q_heads", "k_heads", "v_heads"} < set(proposal.operators)


def test_a_split_that_something_else_reads_stays_outside():
    group, proposal = found(joint(results=1))
    assert not group.stray and "split" not in proposal.operators
    assert {"q_heads", "k_heads", "v_heads"} < set(proposal.operators)


def causal(b, x, shift=0, hidden=-np.inf):
    mask = np.where(np.arange(48)[None] - np.arange(48)[:, None] <= shift, 0, hidden)
    return b.op("mask", op.add(x, b.array(mask)))


def test_constant_causal_masks_are_known():
    group, _ = found(attention(causal))
    assert (group.shift, group.is_scored) == (0, False)
    group, _ = found(attention(lambda b, x: causal(b, x, 3)))
    assert (group.shift, group.is_scored) == (3, False)
    group, _ = found(attention(lambda b, x: causal(b, x, hidden=-5.0)))
    assert (group.shift, group.is_scored) == (None, True)
    # A second mask is evaluated.
    group, _ = found(attention(lambda b, x: causal(b, causal(b, x))))
    assert (group.shift, group.is_scored) == (0, True)


def widened(narrow_result=True, weights="float16"):
    """Products in float32 of float16 operands."""
    b = ModuleBuilder("float16")
    q, k, v = (b.op(f"{n}_wide", op.astype(b.input(n, (2, 4, 48, 32)), "float32")) for n in "qkv")
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    mixed = b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), v))
    return b.finish(b.op("narrow", op.astype(mixed, "float16")) if narrow_result else mixed)


def test_conversions_are_read_through():
    group, proposal = found(widened())
    assert not group.stray and group.dtype == "float16"
    assert {"q_wide", "k_wide", "v_wide", "narrow"} < set(proposal.operators)
    # A result in float32 is not to be had of float16 weights.
    group, _ = found(widened(narrow_result=False))
    assert group.stray and "another type" in group.why


def test_a_stray_operator_before_views_is_named():
    b = ModuleBuilder("float16")
    q, k, v = (b.input(name, (2, 4, 48, 32)) for name in "qkv")
    turned = b.op("stray", op.nn.relu(b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    flat = b.op("flat", op.reshape(turned, (8, 32, 48)))
    scores = b.op("scores", op.matmul(b.op("rows", op.reshape(q, (8, 48, 32))), flat))
    v = b.op("values", op.reshape(v, (8, 48, 32)))
    group, proposal = found(
        b.finish(b.op("mixed", op.matmul(b.op("softmax", op.nn.softmax(scores)), v)))
    )
    assert group.stray == "stray" and {"stray", "flat"} < set(proposal.operators)


def test_no_attention():
    b = ModuleBuilder("float16")
    x = b.input("x", (32, 64))
    y = b.op("softmax", op.nn.softmax(b.op("first", op.matmul(x, b.const(64, 64)))))
    assert found(b.finish(y)) == (None, None)
    other = ModuleBuilder("float16")
    q, v = other.input("q", (4, 48, 48)), other.input("v", (4, 48, 32))
    weights = other.op("softmax", op.nn.softmax(q, axis=-1))
    assert found(other.finish(other.op("mixed", op.matmul(weights, v)))) == (None, None)
