"""Compound proposals: chains inside the members of a horizontal group, and groups side by side."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Compound, Horizontal, Vertical
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.synthetic_blocks import mixed_convs
from tvm_fusion.testing.transformer_blocks import dense_norm_heads, head_projections, matmul_pair


def composed(module, without=(), **options):
    """Compounds of everything that the simple strategies propose, but for some operator sets."""
    graph, config = graph_of(module), FusionConfig(**options)
    found = [p for s in (Vertical(), Horizontal()) for p in s.propose(graph, config)]
    survived = [p for p in found if p.operators not in without]
    return list(Compound().compose(graph, config, survived))


def test_chains_in_the_members_of_a_merged_group():
    found = composed(mixed_convs([8, 16, 8], channels=8, size=6))
    (p,) = found
    assert p.strategy == "compound" and p.options == (("form", "merged"), ("join", "apart"))
    assert p.parts == (
        ("vertical", ("conv0", "relu0")),
        ("vertical", ("conv1", "relu1")),
        ("vertical", ("conv2", "relu2")),
        ("horizontal", ("conv0", "conv1", "conv2")),
    )


def test_the_join_and_what_follows_it():
    found = composed(parallel_convs(2, channels=8, spatial=6, relu=True))
    (p,) = [p for p in found if "add1" in p.operators]
    assert p.operators == ("conv0", "relu0", "conv1", "relu1", "add1")
    assert [s for s, _ in p.parts] == ["vertical", "vertical", "horizontal"]


def test_members_of_one_operator_compound_nothing():
    assert composed(parallel_convs(3, channels=8, spatial=6, join=None)) == []
    assert composed(parallel_convs(3, channels=8, spatial=6)) == []


def test_only_what_survived_alone_is_a_part():
    module = mixed_convs([8, 8], channels=8, size=6)
    (p,) = composed(module, without=[("conv0", "relu0")])
    assert p.parts == (("vertical", ("conv1", "relu1")), ("horizontal", ("conv0", "conv1")))
    (p,) = composed(module, without=[("conv0", "conv1")])
    assert [s for s, _ in p.parts] == ["vertical", "vertical"]
    assert composed(module, without=[("conv0", "relu0"), ("conv1", "relu1")]) == []


def test_products_with_norms_side_by_side():
    found = composed(dense_norm_heads(heads=4, rows=16, width=32, outputs=32))
    found_norms = [p for p in found if "norm0" in p.operators]
    (p,) = [p for p in found_norms if p.option("form") == "partitioned"]
    assert p.option("join") == "apart"
    assert p.members == tuple((f"fc{i}", f"fc{i}_bias", f"norm{i}") for i in range(4))
    assert p.parts == tuple(("vertical", m) for m in p.members)
    assert set(p.anchors) == {f"{n}{i}" for n in ("fc", "norm") for i in range(4)}
    # the same as one product of stacked weights
    assert any(p.option("form") == "merged" and len(p.members) == 4 for p in found_norms)
    # and the projections with their biases, for a plan whose norms stay apart
    assert any(p.option("form") == "merged" and "norm0" not in p.operators for p in found)


def test_norms_of_separate_inputs_stand_at_one_level():
    found = composed(dense_norm_heads(heads=3, rows=16, width=32, outputs=32, separate=True))
    assert any(len(p.members) == 3 and "norm0" in p.operators for p in found)


def test_groups_side_by_side_are_at_most_max_members():
    found = composed(dense_norm_heads(heads=8, rows=16, width=32, outputs=32))
    sizes = sorted(
        len(p.members)
        for p in found
        if p.option("form") == "partitioned" and {"norm0", "norm7"} & set(p.operators)
    )
    assert sizes == [2, 6]


def test_a_concatenation_of_groups_side_by_side():
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    parts = [b.layer_norm(f"norm{i}", b.dense(f"fc{i}", x, 32)) for i in range(2)]
    found = composed(b.finish(b.concat("cat", parts, axis=-1)))
    (p,) = [p for p in found if "norm0" in p.operators and p.option("form") == "partitioned"]
    assert p.operators[-1] == "cat" and p.option("join") == "concat"
    # a part that is read elsewhere must be written anyway
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    parts = [b.layer_norm(f"norm{i}", b.dense(f"fc{i}", x, 32)) for i in range(2)]
    found = composed(b.finish(b.concat("cat", parts, axis=-1), parts[0]))
    (p,) = [p for p in found if "norm0" in p.operators and p.option("form") == "partitioned"]
    assert "cat" not in p.operators and p.option("join") == "apart"


def test_a_lone_pair_has_no_sibling():
    assert composed(matmul_pair()) == []


def test_projections_of_all_heads():
    found = composed(head_projections(heads=2, tokens=16, hidden=32, width=8))
    (p,) = [p for p in found if len(p.members) == 6]
    assert p.option("form") == "merged" and len(p.parts) == 7


def test_composing_is_deterministic():
    module = dense_norm_heads(heads=3, rows=16, width=32, outputs=32, relu=True)
    assert composed(module) == composed(module)


def turned(b, name, value, *, scale=False, after=None):
    """Halves of a value swapped, and added to it; after another value, or with one more operator."""
    if after is not None:
        value = b.add(f"{name}_after", value, after)
    low = b.op(f"{name}_low", relax.op.strided_slice(value, [1], [0], [4]))
    high = b.op(f"{name}_high", relax.op.strided_slice(value, [1], [4], [8]))
    both = b.concat(f"{name}_turn", [high, low], 1)
    return b.add(name, value, b.op(f"{name}_scale", relax.op.exp(both)) if scale else both)


def rotaries(*, scale=False, dependent=False):
    b = ModuleBuilder()
    first = turned(b, "q", b.input("x", (6, 8)))
    after = first if dependent else None
    return b.finish(first, turned(b, "k", b.input("y", (6, 8)), scale=scale, after=after))


def test_rotary_embeddings_of_queries_and_keys_share_a_launch():
    (p,) = [p for p in composed(rotaries()) if p.option("form") == "partitioned"]
    assert [len(member) for member in p.members] == [4, 4]
    assert {"q", "k", "q_turn", "k_turn"} < set(p.operators)
    (group,) = tf.plan(rotaries(), "cuda:sm_90").groups
    assert group.members == 2 and group.options["form"] == "partitioned"


@pytest.mark.parametrize("options", [{"scale": True}, {"dependent": True}])
def test_groups_that_run_other_operators_or_depend_on_each_other_do_not(options):
    found = composed(rotaries(**options))
    assert not any({"q_turn", "k_turn"} <= set(p.operators) for p in found)
