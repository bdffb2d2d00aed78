"""Modules that cannot be fused, or not everywhere: they stay as they are, with a reason, and never crash."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relay

import tvm_fusion.relay as fusion
from tvm_fusion.errors import InvalidModelError, TargetError, UnknownNodeError
from tvm_fusion.testing.relay_models import (
    constant,
    conv,
    conv_chain,
    group_calls,
    inputs_of,
    module,
    run_vm,
    simplified,
)

CUDA = "cuda:sm_90a"
RANDOM = np.random.RandomState(0)


def reasons(mod: tvm.IRModule) -> dict[str, str]:
    return {u.op: u.reason for u in fusion.plan(mod, CUDA).ungrouped}


def chain(x: object) -> object:
    return relay.nn.relu(relay.exp(x))


def check(mod: tvm.IRModule, groups: int, *inputs: np.ndarray) -> tvm.IRModule:
    """Annotate, count groups, and compare the numbers."""
    out = fusion.Fuse(target=CUDA)(mod)
    assert len(group_calls(out)) == groups
    arrays = list(inputs) or inputs_of(mod)
    for a, b in zip(run_vm(out, arrays), run_vm(mod, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return out


def test_without_type_inference() -> None:
    """The pass infers types itself."""
    x = relay.var("x", shape=(2, 8))
    mod = tvm.IRModule({"main": relay.Function([x], chain(x))})
    assert len(group_calls(fusion.VerticalFusion(target=CUDA)(mod))) == 1


def test_types_that_do_not_fit() -> None:
    x = relay.var("x", shape=(2, 8))
    y = relay.add(x, relay.var("y", shape=(3, 8)))
    mod = tvm.IRModule()
    mod.update_func(relay.GlobalVar("main"), relay.Function(relay.analysis.free_vars(y), y))
    with pytest.raises(InvalidModelError, match="types of the module do not fit"):
        fusion.VerticalFusion(target=CUDA)(mod)


def test_a_target_where_a_plan_belongs() -> None:
    with pytest.raises(TypeError, match="a target is given as target="):
        fusion.Fuse(CUDA)


def test_no_main() -> None:
    x = relay.var("x", shape=(2, 8))
    mod = tvm.IRModule({"other": relay.Function([x], chain(x))})
    with pytest.raises(InvalidModelError, match="no Relay function 'main'; it has other"):
        fusion.plan(mod, CUDA)
    with pytest.raises(InvalidModelError, match="it has none"):
        fusion.plan(tvm.IRModule(), CUDA)
    with pytest.raises(TypeError, match="not Function"):
        fusion.plan(relay.Function([x], chain(x)), CUDA)


def test_symbolic_extents_stay_out() -> None:
    x = relay.var("x", shape=(relay.Any(), 8))
    static = relay.var("y", shape=(4, 8))
    mod = module(relay.Tuple([chain(x), chain(static)]), x, static)
    mod = relay.transform.InferType()(mod)
    out = fusion.Fuse(target=CUDA)(mod)
    (call,) = group_calls(out)
    assert call.args[0].name_hint == "y"
    plan = fusion.plan(mod, CUDA)
    assert {r.reason for r in plan.rejected} == {"dynamic_shape"}
    arrays = [RANDOM.rand(5, 8).astype("float32"), RANDOM.rand(4, 8).astype("float32")]
    for a, b in zip(run_vm(out, arrays), run_vm(mod, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: relay.nn.dense(chain(x), constant(RANDOM, 4, 8)),
        lambda x: relay.nn.batch_flatten(chain(x)),
        lambda x: relay.mean(chain(x), axis=[1], exclude=True),
        lambda x: relay.concatenate([chain(x), x], 1),
        lambda x: relay.stack([chain(x), x], 0),
        lambda x: relay.nn.l2_normalize(chain(x), 1e-5, [1]),
        lambda x: relay.std(chain(x), axis=[1]),
        lambda x: relay.power(chain(x), relay.const(3.0)),
        lambda x: relay.argmax(chain(x), axis=1),
        lambda x: relay.reshape(chain(x), (-1, 4)),
        lambda x: relay.broadcast_to_like(relay.const(1.0), chain(x)),
        lambda x: relay.strided_slice(chain(x), [0, 0], [1, 4]),
        lambda x: relay.transpose(chain(x)),
        lambda x: relay.nn.softmax(chain(x) * relay.const(2.0) + constant(RANDOM, 8)),
    ],
)
def test_symbolic_extents_at_every_rule(make: object) -> None:
    x = relay.var("x", shape=(relay.Any(), 8))
    mod = relay.transform.InferType()(module(make(x), x))
    plan = fusion.plan(mod, CUDA)
    assert not plan.groups and plan.ungrouped
    out = fusion.Fuse(target=CUDA)(mod)
    array = RANDOM.rand(3, 8).astype("float32")
    np.testing.assert_array_equal(run_vm(out, [array])[0], run_vm(mod, [array])[0])


def test_unknown_rank_of_a_map() -> None:
    x = relay.var("x", shape=(relay.Any(), 8, relay.Any(), relay.Any()))
    y = relay.nn.relu(relay.nn.global_avg_pool2d(conv(RANDOM, relay.exp(x), 8, 8, 3)))
    plan = fusion.plan(module(y, x), CUDA)
    assert not plan.groups and {r.reason for r in plan.rejected} == {"dynamic_shape"}


def test_unsupported_operators_stay_out_with_their_name() -> None:
    x = relay.var("x", shape=(4, 8))
    y = chain(relay.cumsum(chain(x), axis=1))
    mod = relay.transform.InferType()(module(y, x))
    assert reasons(mod)["cumsum"] == "unsupported_op"
    check(mod, 2)


def test_quantised_operators_are_not_taken_for_plain_ones() -> None:
    x = relay.var("x", shape=(4, 8), dtype="int8")
    zero, scale = relay.const(0), relay.const(1.0)
    y = relay.qnn.op.add(x, x, scale, zero, scale, zero, scale, zero)
    mod = relay.transform.InferType()(module(relay.nn.relu(y), x))
    assert reasons(mod)["qnn.add"] == "unsupported_op"


def test_stop_fusion_is_kept() -> None:
    x = relay.var("x", shape=(4, 8))
    mod = module(chain(relay.annotation.stop_fusion(chain(x))), x)
    assert len(group_calls(fusion.VerticalFusion(target=CUDA)(mod))) == 2


def test_a_branch_of_control_flow_stays_out() -> None:
    """What is always computed is fused; what a branch computes alone is not, and keeps its place."""
    x, flag = relay.var("x", shape=(4, 8)), relay.var("flag", shape=(), dtype="bool")
    always = relay.var("always")
    y = relay.If(flag, relay.tanh(relay.negative(always)), relay.sqrt(always))
    mod = module(relay.Let(always, chain(x), chain(y)), x, flag)
    mod = relay.transform.InferType()(mod)
    assert reasons(mod)["if"] == "unsupported_op"
    for value in (True, False):
        array = np.abs(RANDOM.rand(4, 8).astype("float32"))
        out = check(mod, 2, array, np.array(value))
    text = out.astext(show_meta_data=False)
    assert text.index("if (") < text.index("tanh") and "negative" in text


def test_a_loop_stays_out() -> None:
    """A recursive local function, as TVM writes loops."""
    x = relay.var("x", shape=(4, 8))
    step = relay.loops.while_loop(
        lambda i, y: relay.less(i, relay.const(3)),
        [relay.var("i", shape=(), dtype="int32"), relay.var("y", shape=(4, 8))],
        lambda i, y: [relay.add(i, relay.const(1)), relay.nn.relu(relay.exp(relay.negative(y)))],
    )
    result = step(relay.const(0), chain(x))
    mod = relay.transform.InferType()(module(chain(relay.TupleGetItem(result, 1)), x))
    check(mod, 2)


def test_a_local_function_that_takes_values_from_outside() -> None:
    x, f, p = relay.var("x", shape=(4, 8)), relay.var("f"), relay.var("p", shape=(4, 8))
    outer = chain(x)
    body = relay.Let(f, relay.Function([p], relay.add(p, outer)), chain(relay.Call(f, [outer])))
    mod = relay.transform.InferType()(module(body, x))
    assert reasons(mod)["function"] == "unsupported_op"
    check(mod, 2)


def test_data_types_of_the_prelude_stay_out() -> None:
    mod = tvm.IRModule()
    prelude = relay.prelude.Prelude(mod)
    x = relay.var("x", shape=(4, 8))
    cons, nil = prelude.mod.get_type("List")[1], prelude.mod.get_type("List")[2]
    head = relay.var("h")
    values = cons(chain(x), nil())
    match = relay.Match(
        values,
        [relay.Clause(relay.PatternConstructor(cons, [relay.PatternVar(head), relay.PatternWildcard()]), head)],
        complete=False,
    )  # fmt: skip
    mod["main"] = relay.Function([x], chain(match))
    mod = relay.transform.InferType()(mod)
    check(mod, 2)


def test_references_leave_the_whole_function_alone() -> None:
    """What is read and written in some order must stay in that order."""
    x, cell, unused = relay.var("x", shape=(4, 8)), relay.var("cell"), relay.var("unused")
    body = relay.Let(unused, relay.RefWrite(cell, chain(x)), chain(relay.RefRead(cell)))
    mod = relay.transform.InferType()(module(relay.Let(cell, relay.RefCreate(x), body), x))
    plan = fusion.plan(mod, CUDA)
    assert not plan.groups
    assert [(u.op, u.reason) for u in plan.ungrouped] == [("references", "unsupported_op")]
    assert tvm.ir.structural_equal(fusion.Fuse(target=CUDA)(mod), mod)


def test_calls_of_other_functions_stay_out() -> None:
    x, y = relay.var("x", shape=(4, 8)), relay.var("y", shape=(4, 8))
    helper = relay.GlobalVar("helper")
    ty = relay.TensorType((4, 8))
    mod = tvm.IRModule({helper: relay.Function([y], relay.tanh(y), ty)})
    mod["main"] = relay.Function([x], relay.Call(helper, [chain(x)]), ty)
    mod = relay.transform.InferType()(mod)
    assert reasons(mod)["call:helper"] == "unsupported_op"
    check(mod, 1)


def test_groups_with_attributes_of_another_hand() -> None:
    """A group that only says its strategy, or names parts that it does not have."""
    mod = fusion.VerticalFusion(target=CUDA)(simplified(conv_chain()))
    (call,) = group_calls(mod)
    for key, value in (("tvm_fusion.parts", ["vertical:7,9"]), ("tvm_fusion.depth", 99)):
        func = call.op.with_attr(key, tvm.runtime.convert(value))
        main = relay.Function(mod["main"].params, relay.Call(func, call.args))
        changed = fusion.CrossFusion(target=CUDA)(tvm.IRModule({"main": main}))
        assert len(group_calls(changed)) == 1
    bare = relay.Function(call.op.params, call.op.body)
    bare = bare.with_attr("tvm_fusion.strategy", "vertical")
    main = relay.Function(mod["main"].params, relay.Call(bare, call.args))
    assert len(group_calls(fusion.CrossFusion(target=CUDA)(tvm.IRModule({"main": main})))) == 1


def test_an_unknown_strategy_is_an_opaque_function() -> None:
    mod = fusion.VerticalFusion(target=CUDA)(simplified(conv_chain()))
    (call,) = group_calls(mod)
    func = call.op.with_attr("tvm_fusion.strategy", "diagonal")
    main = relay.Function(mod["main"].params, relay.exp(relay.Call(func, call.args)))
    plan = fusion.plan(tvm.IRModule({"main": main}), CUDA)
    assert not plan.groups and "call" in {u.op for u in plan.ungrouped}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cuda", "names no arch"),
        ("cuda:sm_12", "unknown CUDA arch"),
        ("opencl", "not served"),
        ("nonsense", "unknown"),
        ("{", "no legal JSON"),
        (3, "not int"),
    ],
)
def test_targets_that_cannot_be_used(target: object, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        fusion.plan(simplified(conv_chain()), target)


@pytest.mark.parametrize(
    ("target", "arch"),
    [
        ("cuda:sm_90a", "sm_90a"),
        ("cuda -arch=sm_80", "sm_80"),
        ({"kind": "cuda", "arch": "sm_120"}, "sm_120"),
        ('{"kind": "cuda", "arch": "sm_75"}', "sm_75"),
        (tvm.target.Target("cuda -arch=sm_90"), "sm_90"),
        ("llvm -mtriple=x86_64-linux-gnu", None),
        (tvm.target.Target("llvm -num-cores=4"), None),
    ],
)
def test_targets_in_every_form(target: object, arch: str | None) -> None:
    plan = fusion.plan(simplified(conv_chain()), target)
    assert plan.target.arch == arch and len(plan.groups) == 1


def test_tf32_is_taken_where_the_arch_has_it() -> None:
    mod = simplified(conv_chain())
    config = fusion.VerticalFusion(float32_products="tf32").config
    assert fusion.plan(mod, "cuda:sm_80", config).float32_products == "tf32"
    assert fusion.plan(mod, "cuda:sm_75", config).float32_products == "float32"


def test_explain_names_operators() -> None:
    mod = simplified(conv_chain())
    assert fusion.explain(mod, CUDA).to_dict()
    assert "relu_0" in str(fusion.explain(mod, CUDA, node="conv2d_0").to_dict())
    with pytest.raises(UnknownNodeError):
        fusion.explain(mod, CUDA, node="conv2d_9")


def test_a_chain_longer_than_recursion_goes() -> None:
    x = relay.var("x", shape=(2, 2))
    y = x
    for _ in range(1500):
        y = relay.nn.relu(relay.tanh(y))
    out = fusion.VerticalFusion(target=CUDA)(module(y, x))
    assert len(group_calls(out)) > 10
