"""Times of groups from the kernels that were tuned for them."""

from __future__ import annotations

import math

import pytest

from tvm_fusion.build.resources import KernelCompiler
from tvm_fusion.compat import te
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import device_for
from tvm_fusion.guards import Resources
from tvm_fusion.planner.compare import kernel_of, single
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import parse_target, with_variant
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.trials import trial
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeReferences, FakeRunner
from tvm_fusion.tuning.choice import LEAST_NOISE, Times, resources_of, timing_of, verdict_of
from tvm_fusion.tuning.measure import RunResult
from tvm_fusion.tuning.session import Session
from tvm_fusion.tuning.tuner import Budget, Device, Tuner
from tvm_fusion.tuning.work_dir import WorkDir

TARGET = parse_target("llvm")


def samples(*values):
    """A trial of these times."""
    return trial(us=None, verdict="ok", samples_us=values)


def test_a_time_is_the_median_of_the_samples():
    assert timing_of(samples(5.0)).microseconds == 5
    assert timing_of(samples(1.0, 100.0, 3.0)).microseconds == 3
    assert timing_of(samples(1.0, 2.0, 3.0, 100.0)).microseconds == 2.5


def test_the_noise_is_at_least_that_of_a_clock_that_drifts():
    assert timing_of(samples(5.0)).noise == LEAST_NOISE * 5
    assert timing_of(samples(5.0, 5.0, 5.0)).noise == LEAST_NOISE * 5


def test_the_noise_is_the_standard_error_of_the_median():
    spread = [10.0 + 0.5 * i for i in range(-4, 5)]  # median deviation of 1
    assert timing_of(samples(*spread)).noise == pytest.approx(1.25 * 1.4826 * 1 / 3)
    assert timing_of(samples(*spread * 4)).noise == pytest.approx(1.25 * 1.4826 * 1 / 6)


def test_one_outlier_is_no_noise():
    quiet, loud = [10.0, 10.1, 9.9, 10.05, 9.95], [10.0, 10.1, 9.9, 10.05, 500.0]
    assert timing_of(samples(*loud)).noise < 2 * timing_of(samples(*quiet)).noise


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [("wrong", "numerics"), ("spills", "spill"), ("shared_memory", "shared_memory"),
     ("crashed", "no_template"), ("timeout", "no_template")],
)  # fmt: skip
def test_a_kernel_that_always_fails_says_how(verdict, reason):
    tried = [trial(rows=n, us=None, verdict=verdict, message="why") for n in range(3)]
    tried.append(trial(rows=9, us=None, verdict="error"))
    found = verdict_of(tried)
    assert not found.accepted and found.reason == reason
    assert dict(found.numbers) == {verdict: 3, "error": 1}
    assert found.detail == f"of 4 kernels that were tried none is right ({told(verdict)}): why"


def told(verdict):
    """The counts as they are told."""
    return ", ".join(sorted([f"3 {verdict}", "1 error"], key=lambda text: text[2:]))


def test_a_kernel_that_cannot_be_tried_says_why():
    assert verdict_of([], "no reference").detail == "no reference"


def doubled(value):
    """Twice a tensor."""
    return te.compute(value.shape, lambda i, j: value[i, j] * 2.0)


class Compiler:
    """Lowers each proposal to a function of its own; what has ``bad`` in it cannot be lowered."""

    def __init__(self):
        self.asked = []

    def lower(self, proposals):
        """Answer for each proposal."""
        self.asked.append([p.operators for p in proposals])
        return [
            Resources(error="it became 2 kernels") if "bad" in p.operators else self.function(p)
            for p in proposals
        ]

    @staticmethod
    def function(proposal):
        """A chain of as many operators."""
        x = value = te.placeholder((4, 64), "float32")
        for _ in proposal.operators:
            value = doubled(value)
        return te.create_prim_func([x, value])


@pytest.fixture
def parts(tmp_path):
    """Times of a model of three operators with a fake clock."""

    class Parts:
        def __init__(self, time):
            b = ModuleBuilder()
            y = b.relu("c", b.relu("bad", b.relu("a", b.input("x", (4, 64)))))
            self.graph, self.compiler = graph_of(b.finish(y)), Compiler()
            records = WorkDir(tmp_path).open("x86_64", "float32")
            self.runner = FakeRunner(time)
            self.tuner = Tuner(
                with_variant(TARGET), FakeBuilder(), FakeReferences(), self.runner, records, Device("cpu")
            )  # fmt: skip
            self.times = Times(
                self.graph, device_for(TARGET), self.compiler, self.tuner, self.measure
            )

        def measure(self, kernels):
            self.tuner.measure_first(kernels, Budget(100))

    return Parts


PAIR = Proposal("vertical", ("a", "c"), (), (("a", "c"),), 2)


def test_each_kernel_is_lowered_and_measured_once(parts):
    found = parts(lambda *_: 7.0)
    first = found.times([PAIR, single("a"), single("c")])
    assert [t.microseconds for t in first] == [7.0] * 3
    # a and c alone are one kernel
    assert len(found.runner.ran) == 2 and sum(map(len, found.compiler.asked)) == 3
    assert found.times([PAIR, single("c")]) == [first[0], first[2]]
    assert len(found.runner.ran) == 2 and sum(map(len, found.compiler.asked)) == 3


def test_proposals_that_overlap_are_lowered_apart(parts):
    found = parts(lambda *_: 7.0)
    found.times([PAIR, single("a"), single("c")])
    for together in found.compiler.asked:
        names = [name for operators in together for name in operators]
        assert len(set(names)) == len(names)


def test_recalling_measures_nothing(parts):
    found = parts(lambda *_: 7.0)
    assert found.times.recall([PAIR]) == [None]
    assert not found.runner.ran and not found.compiler.asked
    found.times([PAIR])
    assert found.times.recall([PAIR, single("a")])[0].microseconds == 7


def test_what_cannot_be_lowered_has_no_time_and_says_why(parts):
    found = parts(lambda *_: 7.0)
    pair = Proposal("vertical", ("a", "bad"), (), (("a", "bad"),), 2)
    assert found.times([pair, single("a")])[0] is None
    assert {key: v.detail for key, v in found.times.failed().items()} == {
        kernel_of(pair): "it became 2 kernels"
    }


def test_what_fails_has_no_time_until_something_works(parts):
    broken = True

    def time(kernel, template, decision):
        return RunResult("wrong", (), "off by one") if broken else 7.0

    found = parts(time)
    assert found.times([PAIR]) == [None]
    assert found.times.failed()[kernel_of(PAIR)].reason == "numerics"
    assert "off by one" in found.times.failed()[kernel_of(PAIR)].detail
    broken = False
    (kernel,) = found.tuner.kernels.values()
    kernel.progress.weight = 1
    found.tuner.run(Budget(100))
    assert math.isclose(found.times([PAIR])[0].microseconds, 7)
    assert not found.times.failed()


def test_resources_are_those_of_the_fastest_trial():
    taken = {"registers": 80, "spill_bytes": 0, "shared_bytes": 76928}
    found = resources_of(trial(template="tensor_core", **taken))
    assert (found.registers, found.spill_bytes, found.shared_bytes) == (80, 0, 76928)
    assert found.template == "tensor_core" and found.dynamic_shared and not found.error


def test_the_compiler_is_asked_only_about_what_was_not_measured(tmp_path):
    asked = []

    class Asked(KernelCompiler):
        def __call__(self, proposals):
            asked.extend(p.operators for p in proposals)
            return super().__call__(proposals)

    b = ModuleBuilder()
    module = b.finish(b.relu("c", b.relu("a", b.input("x", (4, 64)))))
    for name, seconds in (("timed", 100.0), ("not timed", 0.0)):
        records = WorkDir(tmp_path / name).open("x86_64", "float32")
        parts = FakeBuilder(), FakeReferences(), FakeRunner(lambda *_: 7.0)
        tuner = Tuner(with_variant(TARGET), *parts, records, Device("cpu"))
        session = Session(module, TARGET, FusionConfig(), tuner, Budget(30, seconds))
        session._compiler = session.times._compiler = Asked(session.mod, TARGET)
        session.run()
        assert bool(asked) == (name == "not timed")
