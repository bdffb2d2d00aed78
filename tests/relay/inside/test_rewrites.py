"""What the passes over operators make of a Relay function, and what they leave alone."""

from __future__ import annotations

import pytest
from tvm import relay

import tvm_fusion.relay as fusion
from tvm_fusion.graph.operators import pattern_of
from tvm_fusion.relay.from_relay import from_relay
from tvm_fusion.relay.fuse import _read
from tvm_fusion.testing.relay_cases import case_names, make_case
from tvm_fusion.testing.relay_models import bert, group_calls, simplified

#: Operators of each case, in order.
OPERATORS = {
    "repeated_constant": "exp add relu",
    "views": "tanh reshape exp exp relu reshape",
    "regrouped_rows": "exp matmul add relu layer_norm square multiply add exp reshape",
    "regrouped_towards_a_lookup": "exp astype take multiply add relu",
    "regrouped_products_of_parameters": "exp exp permute_dims matmul tanh relu",
    "norms_in_pieces": "tanh layer_norm rms_norm",
    "norm_whose_root_is_read": "multiply mean add sqrt divide multiply exp",
    "projections_in_one_product": "matmul add matmul add matmul add permute_dims matmul softmax matmul",
    "parts_of_unequal_products": "matmul matmul softmax exp",
    "split_product_with_two_readers": "matmul split softmax exp exp",
    "split_apart": "tanh strided_slice strided_slice relu exp",
    "part_with_two_readers": "tanh split relu exp exp",
    "neighbours_taken": "tanh strided_slice exp strided_slice reshape exp",
    "first_places_taken_clipped": "tanh take exp",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    graph = from_relay(make_case(name)).graph
    assert [operator.op for operator in graph.operators] == OPERATORS[name].split()


def test_one_number_is_no_tensor() -> None:
    (addition,) = [
        o for o in from_relay(make_case("repeated_constant")).graph.operators if o.op == "add"
    ]
    assert len(addition.inputs) == 1 and addition.attrs["arg1"] == 1.0


@pytest.mark.parametrize("name", [*case_names(), "bert"])
@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
def test_groups_are_read_back(name: str, target: str) -> None:
    """A second pass finds the groups that the first one wrote, of the same operators."""
    mod = simplified(bert()) if name == "bert" else make_case(name)
    wanted = [
        (g.strategy, g.depth, sorted(op for op in g.operators if pattern_of(op) != "view"))
        for g in fusion.plan(mod, target).groups
    ]
    annotated = fusion.Fuse(target=target)(mod)
    calls = group_calls(annotated)
    assert len(calls) == len(wanted)
    assert not any(relay.analysis.free_vars(call.op) for call in calls)
    _, read, existing = _read(annotated)
    # A view may stand at either side of a group's border.
    op_of = {operator.name: operator.op for operator in read.graph.operators if operator.does_work}
    found = [
        (g.strategy, g.depth, sorted(op_of[n] for n in g.operators if n in op_of))
        for g in existing.values()
    ]
    assert sorted(found) == sorted(wanted)
