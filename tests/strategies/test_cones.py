"""Vertical groups that move elements: rotary embeddings, embeddings with their norm, masks."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Vertical
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of

op = relax.op


def proposed(module, **options):
    return {p.operators for p in Vertical().propose(graph_of(module), FusionConfig(**options))}


def rotary(extra=None, width=16):
    """A rotary embedding of ``[1, 8, 2, width]``; ``extra`` names an operator whose result is a second output."""
    b = ModuleBuilder("float16")
    made = {"x": b.op("x", op.permute_dims(b.input("in", (1, 8, 2, width)), [0, 2, 1, 3]))}
    half = width // 2
    made["low"] = b.op("low", op.strided_slice(made["x"], [3], [0], [half], [1]))
    made["high"] = b.op("high", op.strided_slice(made["x"], [3], [half], [width], [1]))
    made["neg"] = b.op("neg", op.negative(made["high"]))
    made["turned"] = b.op("turned", op.concat([made["neg"], made["low"]], axis=-1))
    made["cos"] = b.op("cos", op.multiply(made["x"], b.const(8, width)))
    made["sin"] = b.op("sin", op.multiply(made["turned"], b.const(8, width)))
    results = [b.op("sum", op.add(made["cos"], made["sin"]))]
    return b.finish(*results, *([made[extra]] if extra else []))


ALL = ("x", "low", "high", "neg", "turned", "cos", "sin", "sum")


def test_a_rotary_embedding_is_one_group():
    assert ALL in proposed(rotary())
    (group,) = tf.plan(rotary(), "cuda:sm_90").groups
    assert group.operators.count("strided_slice") == 2 and len(group.operators) == len(ALL)


@pytest.mark.parametrize("extra", ["x", "turned", "neg"])
def test_what_is_needed_elsewhere_stays_outside(extra):
    sets = proposed(rotary(extra))
    assert ALL not in sets
    # What only leads to the value that is kept stays outside with it, the rest is found.
    assert not any(extra in names and "sum" in names for names in sets)
    if extra == "neg":
        assert ("low", "turned", "cos", "sin", "sum") in sets


def test_the_limit_of_operators():
    assert ALL not in proposed(rotary(), max_operators=7)


def embedding(*, axis=0, cast=True, scale=False):
    """Tokens looked up, a position added, a layer norm."""
    b = ModuleBuilder("float32")
    ids = b.input("ids", (2, 8))
    if scale:
        ids = b.op("scale", op.multiply(ids, b.const(1)))
    if cast:
        ids = b.op("cast", op.astype(ids, "int32"))
    table = b.const(50, 64) if axis == 0 else b.const(64, 50)
    found = b.op("take", op.take(table, ids, axis=axis))
    if axis == 1:
        found = b.op("move", op.permute_dims(found, [1, 2, 0]))
    return b.finish(b.layer_norm("norm", b.op("add", op.add(found, b.const(1, 8, 64)))))


def test_an_embedding_and_its_norm():
    assert ("cast", "take", "add", "norm") in proposed(embedding())
    (group,) = tf.plan(embedding(), "cuda:sm_90").groups
    assert group.operators == ("astype", "take", "add", "layer_norm")


def test_work_on_the_indices_is_not_repeated_for_every_column():
    sets = proposed(embedding(scale=True))
    assert ("cast", "take", "add", "norm") in sets
    assert not any("scale" in names and "take" in names for names in sets)


def test_columns_of_a_table_are_not_looked_up_row_by_row():
    """Neighbours of a row lie far apart in memory."""
    assert not any("take" in s and "norm" in s for s in proposed(embedding(axis=1)))


def test_chains_of_one_shape_are_not_proposed_again():
    b = ModuleBuilder()
    y = b.relu("relu", b.add("add", b.input("x", (4, 8)), b.input("y", (4, 8))))
    found = [p.operators for p in Vertical().propose(graph_of(b.finish(y)), FusionConfig())]
    assert found.count(("add", "relu")) == 1


def test_a_view_in_front_of_everything_stays_outside():
    b = ModuleBuilder()
    x = b.op("view", op.reshape(b.input("x", (4, 8)), (8, 4)))
    y = b.op("exp", op.exp(b.op("swap", op.permute_dims(x, [1, 0]))))
    assert ("swap", "exp") in proposed(b.finish(y))
    assert not any("view" in s and "exp" in s for s in proposed(b.finish(y)))
