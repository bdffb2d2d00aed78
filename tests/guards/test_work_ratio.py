"""Branches of a join that do unequal amounts of work."""

from __future__ import annotations

import pytest

from tvm_fusion.config import BALANCES, FusionConfig
from tvm_fusion.guards import judge
from tvm_fusion.guards.work_ratio import WorkRatio
from tvm_fusion.strategies import Cross, Horizontal
from tvm_fusion.testing.blocks import residual_block
from tvm_fusion.testing.plans import DEVICE, graph_of
from tvm_fusion.testing.synthetic_blocks import cross_pair


def joined(module, strategy=None, **options):
    """The graph, the largest two-branch proposal of a strategy, and the configuration."""
    graph, config = graph_of(module), FusionConfig(**options)
    found = (strategy or Cross()).propose(graph, config)
    return max((p for p in found), key=lambda p: (len(p.members), len(p.operators))), graph, config


def verdict(module, **options):
    proposal, graph, config = joined(module, **options)
    return judge(proposal, graph, config, DEVICE)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_up_to_one_to_three_branches_are_joined_as_they_are(ratio, balance):
    # equal branches of one input are siblings: horizontal
    strategy = Horizontal() if ratio == 1 else Cross()
    proposal, graph, config = joined(cross_pair(ratio=ratio), strategy, balance=balance)
    assert judge(proposal, graph, config, DEVICE).accepted
    assert proposal.option("form") == ("merged" if ratio == 1 else "joined")
    assert len(proposal.members) == 2 and proposal.option("balance") == ""


def test_one_to_four_is_refused_with_the_numbers():
    # conv: 2 · 28² · 32 outputs · (32 · 9 products), bias and ReLU one operation per output each.
    light = 2 * 28 * 28 * 32 * 32 * 9 + 2 * 28 * 28 * 32
    heavy = 4 * 2 * 28 * 28 * 32 * 32 * 9 + 2 * 28 * 28 * 32
    found = verdict(cross_pair(ratio=4))
    assert (found.outcome, found.reason) == ("unprofitable", "work_ratio")
    assert found.numbers == {
        "ratio": round(heavy / light, 2), "max_work_ratio": 3.0, "heavy_flops": heavy, "light_flops": light,
    }  # fmt: skip
    assert "heavy_conv" in found.detail and "light_conv" in found.detail


def test_the_limit_is_an_option():
    assert verdict(cross_pair(ratio=4), max_work_ratio=4.0).accepted
    assert verdict(cross_pair(ratio=2), max_work_ratio=1.5).reason == "work_ratio"


def test_warps_balance_any_ratio():
    proposal, graph, config = joined(cross_pair(ratio=4), balance="warps")
    assert judge(proposal, graph, config, DEVICE).accepted
    assert proposal.options == (("balance", "warps"), ("form", "joined"), ("join", "add"))


def test_padding_needs_one_input_and_says_when_it_cannot():
    """The branches of a 1:4 pair read two inputs: no kernel of one convolution holds both."""
    found = verdict(cross_pair(ratio=4), balance="pad")
    assert found.reason == "work_ratio" and "cannot be padded" in found.detail
    proposal, graph, config = joined(cross_pair(kernels=(3, 1)), balance="pad")
    assert judge(proposal, graph, config, DEVICE).accepted
    assert proposal.options == (("balance", "pad"), ("form", "merged"), ("join", "add"))


def test_unequal_kernels_are_refused_unless_balanced():
    assert verdict(cross_pair(kernels=(3, 1))).reason == "work_ratio"
    assert verdict(cross_pair(kernels=(3, 1)), balance="warps").accepted


def test_an_identity_shortcut_is_exempt():
    proposal, graph, config = joined(residual_block())
    assert proposal.option("shortcut") == "identity" and len(proposal.members) == 1
    assert judge(proposal, graph, config, DEVICE).accepted


def test_another_label_does_not_evade_the_limit():
    """The same branches, found as horizontal siblings of one input, share the threads all the same."""
    proposal, graph, config = joined(cross_pair(kernels=(3, 1)), Horizontal())
    assert (proposal.strategy, proposal.option("form")) == ("horizontal", "joined")
    assert judge(proposal, graph, config, DEVICE).reason == "work_ratio"
    equal, graph, config = joined(cross_pair(), Horizontal())
    assert WorkRatio().check(equal, graph, config, DEVICE).accepted
