"""Why a node is fused as it is: the answers agree with the plan and with the planner's candidates."""

from __future__ import annotations

import json

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import device_for
from tvm_fusion.errors import FusionError, UnknownNodeError
from tvm_fusion.guards import ACCEPTED, Verdict
from tvm_fusion.planner import Candidate, explain
from tvm_fusion.planner.cost import Cost
from tvm_fusion.planner.explain import explain_model, explain_node, group_ids
from tvm_fusion.planner.planner import solve
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.transform.fuse import graph_of

TARGET = "cuda:sm_90"
DEVICE = device_for(parse_target(TARGET))


def solved(module, **options):
    graph = graph_of(module)
    solution = solve(graph, DEVICE, FusionConfig(**options))
    return graph, solution.chosen, solution.considered


def one(module, node, **options):
    """The explanation of a node that is one operator."""
    (found,) = explain_node(*solved(module, **options), node).operators
    return found


def towers():
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 16, 16)), b.input("y", (1, 8, 8, 8))
    return b.finish(b.relu("r0", b.conv("c0", x, 8)), b.relu("r1", b.conv("c1", y, 8)))


def test_the_facts_of_an_operator():
    facts = one(towers(), "c0").facts
    assert (facts.name, facts.op, facts.source_names) == ("c0", "conv2d", ("c0",))
    assert facts.inputs == ("float32[1,8,16,16]", "float32[8,8,3,3]")
    assert facts.outputs == ("float32[1,8,16,16]",)
    assert facts.flops == 2 * 8 * 16 * 16 * 8 * 9
    assert facts.bytes_read == 4 * (8 * 256 + 8 * 8 * 9) and facts.bytes_written == 4 * 8 * 256
    assert facts.does_work and not facts.candidate  # 15.8 FLOP/B
    assert one(towers(), "r0").facts.candidate


def test_the_group_is_that_of_the_plan():
    module = towers()
    plan = tf.plan(module, TARGET)
    for node in ("c0", "r0", "c1", "r1"):
        group, found = plan.group_of(node), one(module, node).group
        assert (found.id, found.strategy, found.operators) == (
            group.id,
            group.strategy,
            group.nodes,
        )
        assert found.predicted_us_after == group.predicted_us_after
        saving = group.predicted_us_before - group.predicted_us_after
        assert found.saving_us == pytest.approx(saving, abs=1e-3)


def test_a_refused_group_carries_its_verdict():
    found = one(towers(), "c0")
    (refused,) = [a for a in found.alternatives if a.reason == "shape_mismatch"]
    assert refused.strategy in ("horizontal", "compound") and "c1" in refused.partners
    assert refused.outcome == "unsupported" and refused.numbers["input_shapes"]
    assert "different shape" in refused.detail
    assert refused.predicted_us_after is None  # it cannot be built
    assert refused.overlaps


def test_what_the_user_denies_is_told():
    found = one(towers(), "r0", deny=("c0",))
    assert found.group is None
    assert {a.reason for a in found.alternatives} == {"denied"}
    assert [(n.name, n.role, n.reason) for n in found.neighbours] == [("c0", "producer", "denied")]


def chain(length=12):
    """A graph of pointwise operators n0, n1, …"""
    b = ModuleBuilder()
    value = b.input("x", (1, 8, 8, 8))
    for i in range(length):
        value = b.relu(f"n{i}", value)
    return graph_of(b.finish(value))


def candidate(first, last, saving=1.0, reason="", strategy="vertical"):
    """The operators from one number to another, accepted or refused."""
    names = tuple(f"n{i}" for i in range(first, last + 1))
    verdict = Verdict("unprofitable", reason, {}, f"{reason} it is") if reason else ACCEPTED
    before = Cost(len(names), 1, 1, 10.0)
    return Candidate(Proposal(strategy, names), verdict, before, Cost(1, 1, 1, 10.0 - saving))


def explained(node, chosen, others):
    (found,) = explain_node(chain(), chosen, [*chosen, *others], node).operators
    return found


def test_a_neighbour_behind_two_views_is_told_of_once():
    """And a view is not told of: it is no kernel that could be joined."""
    b = ModuleBuilder()
    x = b.input("x", (4, 8, 6, 6))
    first = b.relu("first", x)
    rows, columns = (
        b.op(f"to{shape[0]}", relax.op.reshape(first, shape)) for shape in ((4, 288), (288, 4))
    )
    module = b.finish(b.op("last", relax.op.matmul(rows, columns)))
    graph, _, considered = solved(module, deny=("*",))
    (found,) = explain_node(graph, [], considered, "last").operators
    assert [(n.name, n.role) for n in found.neighbours] == [("first", "producer")]
    assert [n.name for n in one(module, "first", deny=("*",)).neighbours] == ["last"]


def test_a_group_that_others_outdid_says_which():
    taken = [candidate(0, 3, 4.0), candidate(4, 5, 2.0), candidate(8, 9, 1.0)]
    found = explained("n3", taken, [candidate(2, 4, 3.0)])
    (told,) = found.alternatives
    assert (told.partners, told.reason, told.outcome) == (
        ("n2", "n4"),
        "overlaps_better",
        "unprofitable",
    )
    assert told.overlaps == ("fused_vertical_0", "fused_vertical_1")
    assert told.numbers == {"saving_us": 3.0, "taken_saving_us": 6.0}
    assert told.detail == (
        "it would save 3.0 µs, but 2 groups that were taken hold some of its operators and save 6.0 µs"
    )
    assert (told.predicted_us_before, told.predicted_us_after) == (10.0, 7.0)


def test_a_group_outdone_by_a_smaller_saving_says_why():
    found = explained("n3", [candidate(3, 5, 2.0)], [candidate(2, 4, 3.0)])
    (told,) = found.alternatives
    assert told.detail.endswith("saves 2.0 µs, and the model as a whole is predicted faster so")


def test_a_group_that_would_close_a_cycle():
    (told,) = explained("n7", [candidate(0, 3, 2.0)], [candidate(6, 7, 3.0)]).alternatives
    assert told.overlaps == () and "it would close a cycle" in told.detail


def test_of_nested_groups_only_the_largest_is_told():
    others = [candidate(0, i, reason="registers") for i in range(4, 12)]
    others += [candidate(2, 9, reason="spill"), candidate(3, 8, reason="spill")]
    found = explained("n3", [candidate(0, 3, 2.0)], others)
    assert [(len(a.partners), a.reason) for a in found.alternatives] == [
        (11, "registers"),
        (7, "spill"),
    ]
    assert found.considered == 11


def test_what_lies_inside_the_group_that_was_taken_is_not_told():
    inside = [candidate(1, 3), candidate(0, 2, reason="slower_predicted")]
    assert explained("n2", [candidate(0, 4, 5.0)], inside).alternatives == ()


def test_the_list_is_bounded_and_every_reason_is_in_it():
    long = [candidate(first, first + 9, reason="spill") for first in range(3)]
    others = [*long, candidate(0, 4, reason="recompute"), candidate(1, 3, reason="denied")]
    many = [candidate(i, 11, reason="work_ratio", strategy="cross") for i in (2, 3)]
    assert len(explained("n3", [], [*others, *many]).alternatives) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "MAX_ALTERNATIVES", 4)
        told = explained("n3", [], [*others, *many]).alternatives
    assert [a.reason for a in told] == ["spill", "work_ratio", "recompute", "denied"]
    assert [len(a.partners) for a in told] == [9, 9, 4, 2]  # the largest first


def test_a_source_node_may_be_several_operators():
    b = ModuleBuilder()
    module = b.finish(b.relu("n", b.bias("n", b.conv("n", b.input("x", (1, 8, 8, 8)), 8))))
    found = explain_node(*solved(module), "n")
    assert [o.facts.name for o in found.operators] == ["n", "n#2", "n#3"]
    (second,) = explain_node(*solved(module), "n#2").operators
    assert second.facts.op == "add" and second.facts.source_names == ("n",)


@pytest.mark.parametrize(
    ("node", "hint"),
    [
        ("conv_0", "did you mean 'conv0' or"),
        (
            "zzzz",
            "the model has no node 'zzzz'; tvm-fusion plan with --format json lists the nodes$",
        ),
        ("conv2d", "it is an operator type, of nodes like 'conv0' or 'conv1'"),
        ("V1", "did you mean 'conv1'"),
    ],
)
def test_an_unknown_node(node, hint):
    assert issubclass(UnknownNodeError, FusionError)
    with pytest.raises(UnknownNodeError, match=hint):
        explain_node(*solved(parallel_convs(2, spatial=8)), node)


def test_views_are_looked_through():
    b = ModuleBuilder()
    x = b.input("x", (4, 8))
    flat = b.op("flat", relax.op.reshape(b.op("up", relax.op.nn.softmax(x)), (8, 4)))
    module = b.finish(b.op("down", relax.op.nn.softmax(flat)))
    (near,) = one(module, "down").neighbours
    assert (near.name, near.role, near.reason) == ("up", "producer", "no_partner")
    assert "flat, a reshape" in near.detail
    view = one(module, "flat")
    assert not view.facts.does_work and not view.facts.candidate


@pytest.mark.parametrize("seed", range(8))
def test_every_neighbour_outside_the_group_is_explained(seed):
    graph, chosen, considered = solved(random_module(seed, operators=25))
    owner = {n: i for i, c in enumerate(chosen) for n in c.operators}
    for operator in graph.operators:
        (found,) = explain_node(graph, chosen, considered, operator.name).operators
        told = {(n.role, n.name) for n in found.neighbours}
        for role, near in (
            ("producer", graph.predecessors(operator)),
            ("consumer", graph.successors(operator)),
        ):
            for other in near:
                apart = owner.get(operator.name, -1) != owner.get(other.name, -2)
                if other.does_work and operator.does_work:
                    assert ((role, other.name) in told) == apart
        assert all(n.reason and n.detail for n in found.neighbours)
        own = set() if found.group is None else set(found.group.operators)
        for other in found.alternatives:
            assert not {*other.partners, operator.name} <= own
            assert other.reason and other.detail and other.outcome != "ok"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_summary_counts_what_the_plan_lists(seed):
    module = random_module(seed, operators=30)
    plan, told = tf.plan(module, TARGET), tf.explain(module, TARGET)
    assert told == explain_model(*solved(module))
    assert sum(r.count for r in told.reasons) == len(plan.rejected)
    for entry in told.reasons:
        listed = [
            r for r in plan.rejected if (r.reason, r.outcome) == (entry.reason, entry.outcome)
        ]
        assert entry.count == len(listed) and list(entry.examples) == listed[:3]
    assert sum(told.groups.values()) == len(plan.groups)
    assert told.ungrouped == plan.ungrouped and told.operators == plan.operators
    assert told.considered >= told.accepted >= len(plan.groups)


def test_ids_are_those_of_the_plan():
    module = random_module(5, operators=30)
    assert group_ids(solved(module)[1]) == [g.id for g in tf.plan(module, TARGET).groups]


def test_everything_is_json_and_prints():
    for found in (tf.explain(towers(), TARGET), tf.explain(towers(), TARGET, node="c0")):
        assert json.loads(json.dumps(found.to_dict()))
        assert "shape_mismatch" in str(found)
    assert "c0 (conv2d): in fused_" in str(tf.explain(towers(), TARGET, node="c0"))
