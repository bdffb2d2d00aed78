"""Templates from outside the package reach the processes that build candidates."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tvm_fusion.schedules import ScheduleTemplate, alternatives, register, registry, templates

from tvm_fusion.build.library import load_library
from tvm_fusion.compat import s_tir, tvm
from tvm_fusion.errors import TuningError
from tvm_fusion.targets import parse_target
from tvm_fusion.tuning.builder import Builder
from tvm_fusion.tuning.measure import BuildFailure, BuildRequest, Built

#: Read by a template below: it has to travel with it.
SIZES = (4, 2)


class Outer(ScheduleTemplate):
    """Splits the outermost loop of the first block."""

    name, kind = "outer", "llvm"

    def apply(self, func, target):
        """Split."""
        sch = s_tir.Schedule(func)
        (size,) = alternatives("size", lambda count: SIZES[:count])
        (block, *_) = sch.get_child_blocks(sch.get_sblock("root"))
        sch.split(sch.get_loops(block)[0], [None, size])
        return sch


class Locked(Outer):
    """Holds what no other process can have."""

    name = "locked"

    def __init__(self):
        self.lock = threading.Lock()


@pytest.fixture
def added(monkeypatch):
    """A copy of the list, so that a test may add to it."""
    templates(parse_target("llvm"))
    monkeypatch.setattr(registry, "_TEMPLATES", dict(registry._TEMPLATES))
    return register


def test_workers_search_and_build_a_template_of_the_program(kernels, builder, added):
    source = kernels.dense()
    (before,) = builder.find_spaces([source])
    assert "outer" not in [space.template for space in before.result()]
    added(Outer(), before="cpu_contraction")  # after the workers have started
    (found,) = builder.find_spaces([source])
    first = found.result()[0]
    assert first.template == "outer"
    assert [dict(option)["size"] for option in first.points[0].options] == list(SIZES)
    made = builder.build([BuildRequest(source, "outer", (("size", size),)) for size in SIZES])
    assert all(isinstance(built, Built) for built in made)
    assert made[0].code_digest != made[1].code_digest
    x, w, b = (
        np.random.default_rng(0).standard_normal(s).astype("float32")
        for s in ((32, 64), (64, 128), (128,))
    )
    for built in made:
        out = tvm.runtime.tensor(np.zeros((32, 128), "float32"))
        load_library(built.artifact)["main"](*map(tvm.runtime.tensor, (x, w, b)), out)
        np.testing.assert_allclose(out.numpy(), np.maximum(x @ w + b, 0), atol=1e-4)


def test_a_template_that_replaces_another_is_sent_anew(kernels, added):
    class Narrow(Outer):
        def apply(self, func, target):
            return None

    source = kernels.dense()
    request = BuildRequest(source, "outer", (("size", 2),))
    with Builder(workers=1) as builder:
        added(Outer())
        assert isinstance(builder.build([request])[0], Built)
        added(Narrow(), replace=True)
        (refused,) = builder.build([request])
    assert isinstance(refused, BuildFailure) and "no choice" in refused.message


def test_a_template_that_cannot_be_sent_is_named(kernels, builder, added):
    added(Locked())
    with pytest.raises(TuningError, match="'locked' cannot be sent"):
        builder.find_spaces([kernels.dense()])


def test_templates_of_the_package_are_not_sent(kernels, tmp_path):
    with Builder(workers=1, folder=tmp_path) as builder:
        builder.build([BuildRequest(kernels.dense())])
    assert not list(tmp_path.glob("*.pickle"))
