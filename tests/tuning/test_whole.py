"""The whole model timed: tuned, unfused, by TVM's default pipeline."""

from __future__ import annotations

import random

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


def test_a_plan_without_groups_is_timed_once():
    b = ModuleBuilder()
    lone = canonicalize(b.finish(b.conv("c", b.input("x", (1, 4, 10, 10)), 4)))
    found = timed(lone)
    assert found.tuned_us == found.unfused_us > 0 and found.noise == 0
    assert found.fastest in ("tuned", "default")


class Side:
    """A model whose calls take a time, with noise that all sides share (a drifting clock) and noise of its own."""

    def __init__(self, clock, us, noise=0.0, seed=0, later=None):
        self.clock, self.us, self.noise, self.later = clock, us, noise, later
        self.random, self.measured = random.Random(seed), 0

    def time(self, *_, number=1, repeat=3):
        taken = []
        for _ in range(repeat):
            us = self.us if self.later is None or self.clock.now < self.later[0] else self.later[1]
            taken.append(1e-6 * us * self.clock.drift * (1 + self.noise * self.random.gauss(0, 1)))
            self.clock.now += taken[-1] * number
        self.measured += repeat == 1  # warming up takes more
        return taken


class Clock:
    """Seconds that go by only while something is measured."""

    now, drift = 0.0, 1.0

    def __call__(self):
        return self.now


def settled(*sides, one=False, clock=None):
    """Time sides given by their arguments; the outcome and the rounds that it took."""
    clock = clock or Clock()
    made = [Side(clock, seed=number, **side) for number, side in enumerate(sides)]
    found = whole._settle(made, (), one=one, clock=clock)
    rounds = {side.measured for side in made}
    assert len(rounds) == 1  # in turns
    return found, rounds.pop()


def test_a_clear_answer_takes_one_block():
    found, rounds = settled({"us": 50, "noise": 0.05}, {"us": 100, "noise": 0.05}, {"us": 90})
    assert found.fastest == "tuned" and rounds == whole._ROUNDS
    found, rounds = settled({"us": 50}, {"us": 100}, {"us": 20, "noise": 0.02})
    assert found.fastest == "default" and rounds == whole._ROUNDS


def test_what_contradicts_the_kernels_is_measured_again():
    """Something else runs during the first rounds of the tuned side; later it is faster, as its kernels say."""
    slow_at_first = {"us": 120, "later": (0.06, 80)}
    found, rounds = settled(slow_at_first, {"us": 100})
    assert found.fastest == "tuned" and rounds > whole._ROUNDS
    # It is really slower: after all rounds that stands.
    found, rounds = settled({"us": 120, "noise": 0.02}, {"us": 100, "noise": 0.02})
    assert found.fastest == "unfused" and rounds == whole._ROUNDS * whole._MOST_BLOCKS
    assert found.noise < 0.01


def test_what_differs_by_less_than_the_noise_keeps_its_groups():
    """Of two standard errors, one in fifty of equal sides is told to be slower."""
    outcomes = []
    for seed in range(60):
        clock = Clock()
        sides = [Side(clock, 100, 0.2, seed=2 * seed + number) for number in range(2)]
        found = whole._settle(sides, (), clock=clock)
        outcomes.append(found.fastest)
        assert 0.01 < found.noise < 0.2
    assert outcomes.count("unfused") <= 4


def test_little_but_certain_is_enough():
    found, _ = settled({"us": 101, "noise": 0.002}, {"us": 100, "noise": 0.002})
    assert found.fastest == "unfused"


def test_a_default_near_the_limit_is_measured_again():
    found, rounds = settled({"us": 100, "noise": 0.02}, {"us": 200}, {"us": 97, "noise": 0.02})
    assert rounds > whole._ROUNDS
    found, rounds = settled({"us": 100, "noise": 0.3}, {"us": 200}, {"us": 94, "noise": 0.3})
    assert found.fastest == "tuned" and found.default_noise > 0.03


def test_a_drifting_clock_is_no_noise():
    """All sides get slower together, round by round; their ratio stays."""

    class Drifting(Clock):
        @property
        def drift(self):
            return 1 + 20 * self.now

    found, rounds = settled({"us": 99}, {"us": 100}, clock=Drifting())
    assert found.fastest == "tuned" and rounds == whole._ROUNDS and found.noise < 0.005


def test_patience_ends():
    """Of a model of seconds there is one block."""
    _, rounds = settled({"us": 3e6}, {"us": 2.9e6})
    assert rounds == whole._ROUNDS


def test_one_side_is_enough_where_there_are_no_groups():
    found, rounds = settled({"us": 100, "noise": 0.1}, one=True)
    assert found.tuned_us == found.unfused_us and rounds == whole._ROUNDS
    found, rounds = settled({"us": 100}, {"us": 50}, one=True)
    assert found.fastest == "default" and found.default_us == pytest.approx(50)
