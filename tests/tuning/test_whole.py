"""The whole model timed: tuned, unfused, untuned, by TVM's default pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from tvm_fusion.schedules import spaces

import tvm_fusion as tf
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.targets import parse_target, with_variant
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.tuning import whole
from tvm_fusion.tuning.untuned import untuned_model
from tvm_fusion.tuning.whole import Untuned, WholeTimes, time_whole

TARGET = parse_target("llvm")


def model(seed: int = 0):
    """A convolution with bias and ReLU; the seed makes its weights."""
    b = ModuleBuilder(seed=seed)
    x = b.input("x", (1, 4, 10, 10))
    return canonicalize(b.finish(b.relu("r", b.bias("b", b.conv("c", x, 4)))))


def two_blocks():
    """Two convolutions with ReLU."""
    b = ModuleBuilder()
    x = b.input("x", (1, 4, 10, 10))
    x = b.relu("r0", b.conv("c0", x, 4))
    return canonicalize(b.finish(b.relu("r1", b.conv("c1", x, 4))))


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


def tuned_lookup(number: int):
    """Every kernel by one of its choices; 0 is the one without tuning."""

    def find(func, target):
        (space,) = spaces(func, with_variant(target), most=1)
        chosen = [point.options[min(number, len(point.options) - 1)] for point in space.points]
        return space.template, tuple(itertools.chain.from_iterable(chosen))

    return find


def timed_with_untuned(monkeypatch, lookup, plan=None, mod=None):
    """Time a model beside the untuned one; also which plans were compiled, and the sides that were timed."""
    compiled, sides = [], []
    real_compile, real_settle = whole.compile_model, whole._settle

    def compile_model(*args, plan, **options):
        compiled.append(plan)
        return real_compile(*args, plan=plan, **options)

    def settle(given, arrays, *, same):
        sides.append((list(given), dict(same)))
        return real_settle(given, arrays, same=same)

    monkeypatch.setattr(whole, "compile_model", compile_model)
    monkeypatch.setattr(whole, "_settle", settle)
    mod = mod or model()
    untuned = untuned_model(mod, TARGET)
    found = time_whole(mod, TARGET, plan or untuned.plan, lookup, untuned)
    (one,) = sides
    return found, compiled, *one


def test_untuned_is_a_side_where_records_change_a_kernel(monkeypatch):
    found, compiled, sides, same = timed_with_untuned(monkeypatch, tuned_lookup(1))
    assert sides == ["tuned", "unfused", "untuned", "default"] and not same
    assert found.untuned_us > 0 and len(compiled) == 3


def test_untuned_is_a_side_where_the_plan_is_another(monkeypatch):
    """No record says anything, but the times of groups led to other groups."""
    mod = two_blocks()
    plan = tf.plan(mod, TARGET)
    fewer = dataclasses.replace(plan, groups=plan.groups[:1])
    assert len(plan.groups) > 1
    found, compiled, sides, same = timed_with_untuned(monkeypatch, lambda *_: None, fewer, mod)
    assert "untuned" in sides and not same and len(compiled) == 3 and found.untuned_us > 0


@pytest.mark.parametrize("known", [True, False])
def test_untuned_of_the_same_code_is_not_timed_twice(monkeypatch, known):
    """Whether no record covers the model, or they all say what is chosen without them."""
    lookup = tuned_lookup(0) if known else lambda *_: None
    found, compiled, sides, same = timed_with_untuned(monkeypatch, lookup)
    assert sides == ["tuned", "unfused", "default"] and same == {"untuned": "tuned"}
    assert found.untuned_us == found.tuned_us and len(compiled) == 2
    assert found.fastest != "untuned"


def test_untuned_may_be_the_unfused_code(monkeypatch):
    mod = model()
    untuned = untuned_model(mod, TARGET)
    bare = Untuned(whole.unfused_plan(untuned.plan), untuned.lookup)
    taken = []
    real = whole._settle
    monkeypatch.setattr(
        whole, "_settle", lambda s, a, *, same: taken.append(same) or real(s, a, same=same)
    )
    found = time_whole(mod, TARGET, untuned.plan, lambda *_: None, bare)
    assert taken == [{"untuned": "unfused"}] and found.untuned_us == found.unfused_us


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_an_untuned_plan_that_is_wrong_or_fails_has_no_time(monkeypatch, fault):
    lookup = tuned_lookup(1)
    real, calls = whole.compile_model, []

    def compile_model(mod, *args, **options):
        calls.append(0)
        if len(calls) < 3:
            return real(mod, *args, **options)
        if fault == "fails":
            raise tf.errors.CompilerError("it does not compile")
        return real(model(seed=1), *args, **options)

    monkeypatch.setattr(whole, "compile_model", compile_model)
    mod = model()
    found = time_whole(mod, TARGET, tf.plan(mod, TARGET), lookup, untuned_model(mod, TARGET))
    assert len(calls) == 3 and found.untuned_us is None and found.fastest != "untuned"


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


def settled(*sides, clock=None, same=None, **more):
    """Time sides given by their arguments; the outcome and the rounds that it took."""
    clock = clock or Clock()
    names = ("tuned", "unfused", "default")
    asked = {**dict(zip(names, sides, strict=False)), **more}
    made = {name: Side(clock, seed=i, **side) for i, (name, side) in enumerate(asked.items())}
    found = whole._settle(made, (), same=same or {}, clock=clock)
    rounds = {side.measured for side in made.values()}
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
        names = ("tuned", "unfused")
        sides = {name: Side(clock, 100, 0.2, seed=2 * seed + n) for n, name in enumerate(names)}
        found = whole._settle(sides, (), same={}, clock=clock)
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
    same = {"unfused": "tuned"}
    found, rounds = settled({"us": 100, "noise": 0.1}, same=same)
    assert found.tuned_us == found.unfused_us and rounds == whole._ROUNDS
    found, rounds = settled({"us": 100}, same=same, default={"us": 50})
    assert found.fastest == "default" and found.default_us == pytest.approx(50)


def test_tuned_slower_than_untuned_by_more_than_the_noise():
    """As on a notebook's processor; less than the noise does not count, and neither does what is slower."""
    sides = {"us": 251, "noise": 0.02}, {"us": 300, "noise": 0.02}
    found, rounds = settled(*sides, untuned={"us": 226, "noise": 0.02})
    assert found.fastest == "untuned" and rounds == whole._ROUNDS * whole._MOST_BLOCKS
    assert found.untuned_us == pytest.approx(226, rel=0.02) and 0 < found.untuned_noise < 0.01
    found, rounds = settled(*sides, untuned={"us": 280, "noise": 0.02})
    assert found.fastest == "tuned" and rounds == whole._ROUNDS
    found, _ = settled({"us": 251, "noise": 0.3}, {"us": 400}, untuned={"us": 250, "noise": 0.3})
    assert found.fastest == "tuned"
    # Of the four ways it may be the one that is taken, or not.
    found, _ = settled({"us": 251}, {"us": 200}, untuned={"us": 226})
    assert found.fastest == "unfused"
    found, _ = settled({"us": 251}, {"us": 240}, untuned={"us": 226})
    assert found.fastest == "untuned"
    found, _ = settled({"us": 251}, {"us": 300}, {"us": 200}, untuned={"us": 226})
    assert found.fastest == "default" and found.default_noise < 0.01
    found, _ = settled({"us": 251}, {"us": 300}, {"us": 224}, untuned={"us": 226})
    assert found.fastest == "untuned"


def test_what_contradicts_the_untuned_kernels_is_measured_again():
    slow_at_first = {"us": 120, "later": (0.09, 80)}
    found, rounds = settled(slow_at_first, {"us": 200}, untuned={"us": 100})
    assert found.fastest == "tuned" and rounds > whole._ROUNDS


def test_untuned_within_the_noise_keeps_what_was_tuned():
    outcomes = []
    for seed in range(60):
        clock = Clock()
        names = ("tuned", "unfused", "untuned")
        sides = {name: Side(clock, 100, 0.2, seed=3 * seed + n) for n, name in enumerate(names)}
        outcomes.append(whole._settle(sides, (), same={}, clock=clock).fastest)
    assert outcomes.count("tuned") >= 52
