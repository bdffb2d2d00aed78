"""What refuses attention, and what it costs."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import CPU, device_for
from tvm_fusion.guards import judge
from tvm_fusion.guards.footprint import footprint
from tvm_fusion.planner.cost import fused_cost, unfused_cost
from tvm_fusion.strategies import Vertical
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of

op = relax.op


def group(dtype="float16", width=64, stray=False, rows=128):
    b = ModuleBuilder(dtype)
    q, k, v = (b.input(name, (2, 4, rows, width)) for name in "qkv")
    scores = b.op("scores", op.matmul(q, b.op("turn", op.permute_dims(k, (0, 1, 3, 2)))))
    weights = b.op("softmax", op.nn.softmax(scores))
    if stray:
        weights = b.op("stray", op.nn.relu(weights))
    graph = graph_of(b.finish(b.op("mixed", op.matmul(weights, v))))
    made = Vertical().propose(graph, FusionConfig())
    return graph, next(p for p in made if p.option("form") == "attention")


def verdict(arch="sm_90", **attrs):
    graph, proposal = group(**attrs)
    return judge(proposal, graph, FusionConfig(), device_for(parse_target(f"cuda:{arch}")))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accepted(dtype):
    assert verdict(dtype=dtype).accepted
    assert verdict(dtype=dtype, arch="sm_80").accepted


@pytest.mark.parametrize(
    ("attrs", "word"),
    [
        ({"stray": True}, "stray (relu)"),
        ({"dtype": "float32"}, "float32"),
        ({"arch": "sm_75"}, "sm_80"),
        ({"width": 512}, "512"),
    ],
)
def test_refused_with_a_reason(attrs, word):
    refusal = verdict(**attrs)
    assert (refusal.outcome, refusal.reason) == ("unsupported", "no_template")
    assert word in refusal.detail


def test_cpus_take_it():
    graph, proposal = group("float32")
    assert judge(proposal, graph, FusionConfig(), CPU).accepted


def test_one_kernel_costs_less_than_its_parts():
    for rows in (128, 1024):
        graph, proposal = group(rows=rows)
        device = device_for(parse_target("cuda:sm_90"))
        needs = footprint(graph, proposal, device)
        assert needs.microseconds > 0 and needs.dynamic_shared
        fused = fused_cost(graph, proposal, device)
        apart = unfused_cost(graph, proposal.operators, device)
        assert fused.microseconds < apart.microseconds and fused.nbytes < apart.nbytes
