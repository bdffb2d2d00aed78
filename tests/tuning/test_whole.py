"""The whole model timed: tuned, unfused, by TVM's default pipeline."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.tuning import whole
from tvm_fusion.tuning.whole import WholeTimes, time_whole

TARGET = parse_target("llvm")


def model(seed: int = 0):
    """A convolution with bias and ReLU; the seed makes its weights."""
    b = ModuleBuilder(seed=seed)
    x = b.input("x", (1, 4, 10, 10))
    return canonicalize(b.finish(b.relu("r", b.bias("b", b.conv("c", x, 4)))))


def timed(mod) -> WholeTimes:
    return time_whole(mod, TARGET, tf.plan(mod, TARGET), lambda *_: None)


def test_three_ways_are_timed():
    found = timed(model())
    assert min(found.tuned_us, found.unfused_us, found.default_us) > 0


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_default_pipeline_that_is_wrong_or_fails_has_no_time(monkeypatch, fault):
    real = whole.build_stock

    def build(_mod, target):
        if fault == "fails":
            raise tf.errors.CompilerError("it does not compile the model")
        return real(model(seed=1), target)

    monkeypatch.setattr(whole, "build_stock", build)
    found = timed(model())
    assert found.default_us is None and found.fastest in ("tuned", "unfused")
