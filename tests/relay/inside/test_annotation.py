"""What annotation writes: functions, attributes, tuples; and that the numbers stay."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relay

import tvm_fusion.relay as fusion
from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import FusionError, PlanError
from tvm_fusion.relay.compat import plain_attrs
from tvm_fusion.testing.relay_cases import case_names, make_case
from tvm_fusion.testing.relay_models import (
    bert,
    branches,
    constant,
    conv,
    conv_chain,
    group_calls,
    inputs_of,
    module,
    residual,
    run_graph,
    run_vm,
    simplified,
)
from tvm_fusion.testing.relay_random import random_module

CUDA = "cuda:sm_90a"


def close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_chain_is_one_function_with_its_attributes() -> None:
    mod = fusion.VerticalFusion(target=CUDA)(simplified(conv_chain()))
    (call,) = group_calls(mod)
    assert [arg.name_hint for arg in call.args] == ["x"]  # constants are inside
    assert plain_attrs(call.op.attrs) == {
        "Composite": "tvm_fusion.vertical", "tvm_fusion.strategy": "vertical", "tvm_fusion.depth": 3,
        "tvm_fusion.members": 1, "tvm_fusion.parts": (), "tvm_fusion.options": {},
    }  # fmt: skip
    assert call.op.body.op.name == "nn.relu"
    assert call.checked_type == call.op.ret_type  # types are there for the next pass


def test_depth_limits_the_chain() -> None:
    mod = simplified(conv_chain())
    assert not group_calls(fusion.VerticalFusion(max_depth=1, target=CUDA)(mod))
    (call,) = group_calls(fusion.VerticalFusion(max_depth=2, target=CUDA)(mod))
    assert plain_attrs(call.op.attrs)["tvm_fusion.depth"] == 2


def test_branches_are_a_tuple_of_one_function() -> None:
    before = simplified(branches(3))
    mod = fusion.HorizontalFusion(target=CUDA)(before)
    (call,) = group_calls(mod)
    attrs = plain_attrs(call.op.attrs)
    assert attrs["Composite"] == "tvm_fusion.horizontal" and attrs["tvm_fusion.members"] == 3
    assert isinstance(call.op.body, relay.Tuple) and len(call.op.body.fields) == 3
    inputs = inputs_of(before)
    close(run_vm(mod, inputs), run_vm(before, inputs))


def test_members_are_limited() -> None:
    mod = simplified(branches(4))
    groups = group_calls(fusion.HorizontalFusion(max_members=2, target=CUDA)(mod))
    assert [plain_attrs(g.op.attrs)["tvm_fusion.members"] for g in groups] == [2, 2]


def unequal_branches() -> tvm.IRModule:
    random = np.random.RandomState(0)
    x = relay.var("x", shape=(1, 16, 14, 14))
    left, right = (relay.nn.relu(conv(random, x, 16, 16, kernel)) for kernel in (3, 1))
    return simplified(module(relay.nn.relu(relay.add(left, right)), x))


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"max_work_ratio": 20.0}, {"form": "joined", "join": "add"}),
        ({"balance": "pad"}, {"form": "merged", "join": "add", "balance": "pad"}),
        ({"balance": "warps"}, {"form": "joined", "join": "add", "balance": "warps"}),
    ],
)
def test_branches_and_their_sum_are_one_function(options: dict, form: dict) -> None:
    before = unequal_branches()
    mod = fusion.CrossFusion(target=CUDA, **options)(before)
    (call,) = group_calls(mod)
    attrs = plain_attrs(call.op.attrs)
    assert attrs["Composite"] == "tvm_fusion.cross"
    assert attrs["tvm_fusion.options"] == form
    inputs = inputs_of(before)
    close(run_vm(mod, inputs), run_vm(before, inputs))


def test_unequal_branches_stay_apart_unless_balanced() -> None:
    mod = unequal_branches()
    assert not group_calls(fusion.CrossFusion(target=CUDA)(mod))
    refused = fusion.plan(mod, CUDA, FusionConfig(strategies="cross")).rejected
    assert {r.reason for r in refused} == {"work_ratio"}


def test_compound_holds_its_parts() -> None:
    mod = simplified(branches(3))
    (call,) = group_calls(fusion.CompoundFusion(target=CUDA)(mod))
    attrs = plain_attrs(call.op.attrs)
    assert attrs["Composite"] == "tvm_fusion.compound"
    parts = ("vertical:0,1", "vertical:2,3", "vertical:4,5", "horizontal:0,2,4")
    assert attrs["tvm_fusion.parts"] == parts
    assert not group_calls(fusion.CompoundFusion(mode="parallel", target=CUDA)(mod))
    with pytest.raises(ValueError, match="unknown mode"):
        fusion.CompoundFusion(mode="both")


def test_passes_compose_in_a_sequential() -> None:
    """A later pass keeps or absorbs whole groups of an earlier one, as in Relax."""
    with tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential([
            relay.transform.InferType(), relay.transform.SimplifyInference(), relay.transform.FoldScaleAxis(),
            relay.transform.FoldConstant(), fusion.VerticalFusion(target=CUDA), fusion.HorizontalFusion(target=CUDA),
            fusion.CrossFusion(target=CUDA), fusion.CompoundFusion(target=CUDA),
        ])(branches(3))  # fmt: skip
    (call,) = group_calls(mod)
    attrs = plain_attrs(call.op.attrs)
    assert attrs["tvm_fusion.strategy"] == "horizontal"
    assert attrs["tvm_fusion.parts"] == ("vertical:0,1", "vertical:2,3", "vertical:4,5")


def test_target_in_scope_is_taken_and_a_missing_one_named() -> None:
    mod = simplified(conv_chain())
    with tvm.target.Target("cuda -arch=sm_80"):
        assert len(group_calls(fusion.VerticalFusion()(mod))) == 1
    with pytest.raises(FusionError, match="no target is given"):
        fusion.VerticalFusion()(mod)


def test_the_given_module_stays_as_it_is() -> None:
    mod = simplified(conv_chain())
    text = mod.astext()
    fusion.Fuse(target=CUDA)(mod)
    assert mod.astext() == text


def test_what_is_beside_main_stays() -> None:
    mod = simplified(conv_chain()).with_attr("note", tvm.runtime.convert("kept"))
    other = relay.var("y", shape=(2,))
    mod["other"] = relay.Function([other], relay.exp(other))
    out = fusion.Fuse(target=CUDA)(mod)
    assert str(out.attrs["note"]) == "kept" and out["other"].body.op.name == "exp"


def test_strict_numerics_are_said() -> None:
    (call,) = group_calls(fusion.Fuse(None, CUDA)(simplified(conv_chain())))
    assert "tvm_fusion.numerics" not in plain_attrs(call.op.attrs)
    strict = fusion.VerticalFusion(target=CUDA, numerics="strict")
    (call,) = group_calls(strict(simplified(conv_chain())))
    assert plain_attrs(call.op.attrs)["tvm_fusion.numerics"] == "strict"


def test_a_plan_is_carried_out_and_kept_as_json() -> None:
    mod = simplified(residual())
    plan = fusion.plan(mod, CUDA, name="net")
    again = type(plan).from_json(plan.to_json())
    assert again == plan and json.loads(plan.to_json())["model"] == "net"
    assert len(group_calls(fusion.Fuse(again)(mod))) == len(plan.groups) > 0
    with pytest.raises(PlanError, match="plan this model again"):
        fusion.Fuse(again)(simplified(conv_chain()))


def test_strip_gives_the_module_back() -> None:
    for mod in map(simplified, (conv_chain(), branches(), residual())):
        annotated = fusion.Fuse(target=CUDA)(mod)
        assert group_calls(annotated)
        assert tvm.ir.structural_equal(fusion.StripFusion()(annotated), mod)
        assert tvm.ir.structural_equal(fusion.StripFusion()(mod), mod)


def test_groups_of_others_are_left_alone() -> None:
    """A function of another back end is one opaque operator."""
    p = relay.var("p", shape=(2, 8))
    other = relay.Function([p], relay.tanh(p)).with_attr("Composite", "other.tanh")
    v = relay.var("v", shape=(2, 8))
    y = relay.nn.relu(relay.exp(relay.Call(other, [relay.exp(relay.negative(v))])))
    mod = relay.transform.InferType()(module(y, v))
    out = fusion.VerticalFusion(target=CUDA)(mod)
    names = [str(plain_attrs(c.op.attrs)["Composite"]) for c in group_calls(out)]
    assert names == ["tvm_fusion.vertical", "other.tanh", "tvm_fusion.vertical"]
    inputs = inputs_of(mod)
    close(run_vm(out, inputs), [np.maximum(np.exp(np.tanh(np.exp(-inputs[0]))), 0)])


@pytest.mark.parametrize("name", case_names())
def test_numbers_stay(name: str) -> None:
    mod = make_case(name)
    inputs = inputs_of(mod)
    for target in ("llvm", CUDA):
        annotated = fusion.Fuse(target=target)(mod)
        assert len(group_calls(annotated)) == len(fusion.plan(mod, target).groups)
    close(run_vm(annotated, inputs), run_graph(mod, inputs))
    assert not group_calls(fusion.StripFusion()(annotated))


@pytest.mark.parametrize("name", case_names())
def test_further_passes_add_nothing(name: str) -> None:
    """Groups that stand are written again as they are, their reshapes with them."""
    mod = make_case(name)
    before = mod.astext(show_meta_data=False).count("reshape(")
    once = fusion.Fuse(target=CUDA)(mod)
    again = once
    for _ in range(3):
        again = fusion.Fuse(target=CUDA)(again)
    counts = [m.astext(show_meta_data=False).count("reshape(") for m in (once, again)]
    assert counts[1] <= max(counts[0], before)
    assert len(group_calls(again)) == len(group_calls(once))


def test_attributes_without_a_class() -> None:
    """TVM 0.16 has no Python class for the attributes of some pools."""
    x = relay.var("x", shape=(2, 8, 6))
    attrs = relay.transform.InferType()(module(relay.nn.adaptive_avg_pool1d(x, 3), x))[
        "main"
    ].body.attrs
    found = plain_attrs(attrs)
    assert found["output_size"] == (3,) and found["layout"] == "NCW"


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed: int) -> None:
    """Groups are convex whatever the graph, passes compose, and (for every fifth) the numbers stay."""
    mod = random_module(seed)
    makers = (
        fusion.VerticalFusion,
        fusion.HorizontalFusion,
        fusion.CrossFusion,
        fusion.CompoundFusion,
    )
    for target in ("llvm", CUDA):
        out = tvm.transform.Sequential([make(target=target) for make in makers])(mod)
    again = fusion.Fuse(target=CUDA)(out)
    flat = fusion.StripFusion()(again)
    assert not group_calls(flat)
    if seed % 5 == 0:
        inputs = inputs_of(mod)
        wanted = run_graph(mod, inputs)
        close(run_vm(again, inputs), wanted)
        close(run_graph(flat, inputs), wanted)


def test_bert_runs_by_every_pass() -> None:
    mod = simplified(bert())
    inputs = inputs_of(mod)
    wanted = run_graph(mod, inputs)
    passes = [
        fusion.VerticalFusion,
        fusion.HorizontalFusion,
        fusion.CrossFusion,
        fusion.CompoundFusion,
    ]
    both = tvm.transform.Sequential([make(target=CUDA) for make in passes])(mod)
    assert len(group_calls(both)) == 10  # five kernels a layer
    close(run_vm(both, inputs), wanted)
    close(run_graph(fusion.StripFusion()(both), inputs), wanted)


def test_saved_and_read_again() -> None:
    mod = fusion.Fuse(target=CUDA)(simplified(residual()))
    again = tvm.ir.load_json(tvm.ir.save_json(mod))
    assert tvm.ir.structural_equal(again, mod)
    # A pass over an annotated module keeps its groups.
    assert tvm.ir.structural_equal(fusion.Fuse(target=CUDA)(again), mod)


def test_group_of_a_part_of_a_call() -> None:
    """``nn.dense`` is a transposition and a product: where a group takes one of them, the call is taken apart."""
    mod = make_case("dense_of_parameters")
    plan = fusion.plan(mod, CUDA)
    (group,) = [g for g in plan.groups if "matmul" in g.operators]
    assert "permute_dims" not in group.operators
    out = fusion.Fuse(plan)(mod)
    text = out.astext(show_meta_data=False)
    assert "transpose(" in text and "nn.matmul(" in text and "nn.dense(" not in text
    deny = fusion.VerticalFusion(target=CUDA, deny=("matmul",))
    assert "nn.dense(" in deny(mod).astext(show_meta_data=False)


def test_parameters_that_are_tuples() -> None:
    tensor = relay.TensorType((2, 8))
    pair = relay.var("pair", relay.TupleType([tensor, tensor]))
    left, right = (relay.TupleGetItem(pair, i) for i in range(2))
    mod = module(relay.nn.relu(relay.subtract(relay.exp(left), relay.tanh(right))), pair)
    (call,) = group_calls(fusion.VerticalFusion(target=CUDA)(mod))
    assert [arg.index for arg in call.args] == [0, 1]
    p, q = (v.name_hint for v in call.op.params)
    text = call.op.astext(show_meta_data=False)
    assert f"exp(%{p})" in text and f"tanh(%{q})" in text


def test_constant_results() -> None:
    """A result that is an input or a constant stays."""
    random = np.random.RandomState(0)
    v = relay.var("v", shape=(2, 8))
    mod = module(relay.Tuple([v, constant(random, 3), relay.nn.relu(relay.exp(v))]), v)
    out = fusion.Fuse(target=CUDA)(mod)
    assert len(group_calls(out)) == 1
    inputs = inputs_of(mod)
    close(run_vm(out, inputs), run_vm(mod, inputs))
