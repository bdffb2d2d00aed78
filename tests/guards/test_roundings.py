"""Forms that leave out roundings to narrow types, where the model's are asked for."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import CPU, DEVICES
from tvm_fusion.guards.roundings import Roundings
from tvm_fusion.strategies import Horizontal, Vertical
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import graph_of

GPU = DEVICES["sm_90"]


def of_form(strategy, module, form):
    """The first proposal of a form, and its graph."""
    graph = graph_of(module)
    made = strategy.propose(graph, FusionConfig())
    return next(p for p in made if p.option("form") == form), graph


def summed(dtype):
    return of_form(Horizontal(), parallel_convs(2, channels=8, spatial=8, dtype=dtype), "collapsed")


def branches(dtype):
    """The same with a ReLU in each branch: every convolution is rounded on its own."""
    module = parallel_convs(2, channels=8, spatial=8, relu=True, dtype=dtype)
    return of_form(Horizontal(), module, "merged")


def attention(dtype):
    b = ModuleBuilder(dtype)
    q, k, v = (b.input(name, (1, 2, 16, 32)) for name in "qkv")
    turned = b.op("turn", relax.op.permute_dims(k, (0, 1, 3, 2)))
    weights = b.op("softmax", relax.op.nn.softmax(b.op("scores", relax.op.matmul(q, turned))))
    module = b.finish(b.op("mixed", relax.op.matmul(weights, v)))
    return of_form(Vertical(), module, "attention")


@pytest.mark.parametrize(
    ("make", "dtype", "device", "refused"),
    [
        (summed, "float16", GPU, True),
        (summed, "bfloat16", GPU, True),
        (summed, "float16", CPU, True),
        (summed, "float32", GPU, False),
        (branches, "float16", GPU, False),
        (attention, "float16", GPU, True),
        (attention, "float16", CPU, False),  # there scores are stored, and rounded
        (attention, "float32", GPU, False),
    ],
)
def test_strict_numerics(make, dtype, device, refused):
    proposal, graph = make(dtype)
    verdict = Roundings().check(proposal, graph, FusionConfig(numerics="strict"), device)
    if refused:
        assert (verdict.outcome, verdict.reason) == ("illegal", "numerics")
        assert verdict.numbers == {"dtype": dtype} and "numerics='strict'" in verdict.detail
    else:
        assert verdict.accepted
    assert Roundings().check(proposal, graph, FusionConfig(), device).accepted
