"""Strategies of one's own: what they propose is judged and chosen like everything else."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax, structural_equal, tvm
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.guards import judge
from tvm_fusion.planner.plan import Plan
from tvm_fusion.strategies import Proposal, Strategy
from tvm_fusion.strategies.base import depth_of
from tvm_fusion.testing.modules import ModuleBuilder

#: Built-in strategies have nothing to do in the model below.
IDLE = tf.FusionConfig(strategies=("horizontal",))


def chain() -> tvm.IRModule:
    """Four elementwise operators, one after the other."""
    b = ModuleBuilder()
    x = b.input("x", (8, 16))
    for name in ("abs", "exp", "tanh", "sigmoid"):
        x = b.op(name, getattr(relax.op, name)(x))
    return b.finish(x)


class Named(Strategy):
    """Proposes the operators that it is given."""

    name = "vertical"

    def __init__(self, *names: str) -> None:
        self.names = names

    def propose(self, graph, config):
        names = graph.sort(self.names)
        yield Proposal(self.name, names, (), (names,), depth_of(graph, names))


def test_it_is_taken() -> None:
    assert not tf.plan(chain(), config=IDLE).groups
    plan = tf.plan(chain(), config=IDLE, proposers=[Named("exp", "tanh")])
    assert [group.nodes for group in plan.groups] == [("exp", "tanh")]
    assert Plan.from_json(plan.to_json()) == plan
    assert tf.verify(chain(), plan=plan).passed


def test_the_better_of_two_is_taken() -> None:
    proposers = [Named("exp", "tanh"), Named("abs", "exp", "tanh")]
    plan = tf.plan(chain(), config=IDLE, proposers=proposers)
    assert [group.nodes for group in plan.groups] == [("abs", "exp", "tanh")]


def test_what_is_illegal_is_refused() -> None:
    strategy, graph = Named("abs", "tanh"), from_relax(chain()).graph
    assert not tf.plan(chain(), config=IDLE, proposers=[strategy]).groups
    (proposal,) = strategy.propose(graph, IDLE)
    assert judge(proposal, graph, IDLE).reason == "not_convex"


def test_limits_hold() -> None:
    config = tf.FusionConfig(strategies=("horizontal",), deny=("exp",))
    assert not tf.plan(chain(), config=config, proposers=[Named("exp", "tanh")]).groups


def test_beside_the_built_in_ones() -> None:
    """Where those find something better, it is taken."""
    plan = tf.plan(chain(), proposers=[Named("exp", "tanh")])
    assert [len(group.nodes) for group in plan.groups] == [4]


@pytest.mark.parametrize("names", [("exp", "tanh"), ("abs", "exp", "tanh")])
def test_the_pass_does_what_the_plan_says(names) -> None:
    strategy = Named(*names)
    plan = tf.plan(chain(), config=IDLE, proposers=[strategy])
    canonical = tf.transform.Canonicalize()(chain())
    by_pass = tf.transform.Fuse(IDLE, "llvm", proposers=[strategy])(canonical)
    assert structural_equal(by_pass, tf.transform.Fuse(plan)(canonical))
    assert structural_equal(tf.transform.StripFusion()(by_pass), canonical)
    # Without it the module stays as it is.
    assert structural_equal(tf.transform.Fuse(IDLE, "llvm")(canonical), canonical)
