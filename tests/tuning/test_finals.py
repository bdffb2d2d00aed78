"""The last round: what seems fastest against what would be compiled without tuning."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tvm_fusion.testing.trials import trial
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeReferences, spills
from tvm_fusion.tuning.cost_model import Candidate
from tvm_fusion.tuning.finals import FINALISTS, LEAST_GAIN, ROUNDS, Finals, is_gain
from tvm_fusion.tuning.measure import KernelSource, RunResult
from tvm_fusion.tuning.trials import TrialSet, ranked

SOURCE = KernelSource("k0", "{}", '{"kind": "llvm"}')
DEFAULT = Candidate("matmul", (("rows", 64),), 1.0)


class Clock:
    """Times by number of rows; each run gives the next sample."""

    in_parts = True

    def __init__(self, **times):
        self.times = {int(rows[1:]): itertools.cycle(t) for rows, t in times.items()}
        self.ran = []

    def run(self, requests):
        results = []
        for request in requests:
            rows = int(str(request.built.artifact).split('"rows": ')[1].split("}")[0])
            self.ran.append(rows)
            time = next(self.times[rows])
            results.append(
                RunResult("ok", (time,)) if time else RunResult("wrong", (), "off by one")
            )
        return results


def decide(clock, tried, first=DEFAULT, builder=None):
    """What is to be recorded."""
    return Finals(builder or FakeBuilder(), FakeReferences(), clock).decide(SOURCE, first, tried)


def test_who_was_only_lucky_loses_to_the_default():
    clock = Clock(r64=[2.0], r32=[2.02, 2.01, 2.03])
    tried = [trial(rows=64, us=2.0), trial(rows=32, us=1.9)]
    found = decide(clock, tried)
    assert clock.ran == [64, 32] * ROUNDS
    times = TrialSet([*tried, *found])
    assert dict(times.best("k0").decision) == {"rows": 64}
    # The loser's time is the one of all rounds now.
    assert {dict(t.decision)["rows"]: t.microseconds for t in times} == {64: 2.0, 32: 2.02}


def test_a_gain_that_is_there_again_is_taken():
    found = decide(
        Clock(r64=[2.0], r32=[1.9, 1.92, 1.91]), [trial(rows=64, us=2.0), trial(rows=32, us=1.8)]
    )
    (winner,) = (t for t in found if t.settled)
    assert dict(winner.decision) == {"rows": 32} and winner.microseconds == 1.91
    assert winner.samples_us == (1.9, 1.92, 1.91)


def test_nothing_is_measured_for_a_gain_within_chance():
    clock = Clock()
    tried = [trial(rows=64, us=2.0), trial(rows=32, us=2.0 * (1 - LEAST_GAIN / 2))]
    (winner,) = decide(clock, tried)
    assert dict(winner.decision) == {"rows": 64} and winner.settled and not clock.ran


def test_noise_is_no_gain():
    wide = (1.0, 1.5, 2.0, 2.5, 3.0)
    one, other = trial(samples_us=wide), trial(samples_us=tuple(s * 0.95 for s in wide))
    assert not is_gain(other, one)
    assert is_gain(trial(us=1.9), trial(us=2.0)) and not is_gain(trial(us=2.0), trial(us=1.9))


def test_few_are_measured_again():
    tried = [trial(rows=64, us=2.0), *(trial(rows=r, us=1.0 + r / 100) for r in range(1, 20))]
    clock = Clock(r64=[2.0], **{f"r{r}": [1.5] for r in range(1, 20)})
    decide(clock, tried)
    assert set(clock.ran) == {64, *range(1, 1 + FINALISTS)}


def test_what_is_settled_is_left_alone_until_something_was_tried():
    clock = Clock(r64=[2.0], r32=[1.9], r16=[1.7])
    tried = [trial(rows=64, us=2.0), trial(rows=32, us=1.8)]
    known = TrialSet([*tried, *decide(clock, tried)])
    clock.ran.clear()
    assert decide(clock, list(known)) == [] and not clock.ran
    later = dataclasses.replace(trial(rows=16, us=1.6), date="2999-01-01")
    found = decide(clock, [*known, later])
    assert [dict(t.decision)["rows"] for t in found if t.settled] == [16]
    # One winner: the former one is settled no more.
    after = TrialSet([*known, later, *(dataclasses.replace(t, date="2999-01-02") for t in found)])
    assert sum(t.settled for t in after) == 1
    assert dict(after.best("k0").decision) == {"rows": 16}


@pytest.mark.parametrize(
    "tried",
    [[], [trial(rows=32, us=1.8)], [trial(rows=64, us=None), trial(rows=32, us=1.8)]],
    ids=["nothing", "no default", "default fails"],
)
def test_without_a_default_that_works_the_fastest_stays(tried):
    assert decide(Clock(), tried) == []


def test_what_fails_now_changes_nothing():
    tried = [trial(rows=64, us=2.0), trial(rows=32, us=1.8)]
    assert decide(Clock(r64=[2.0], r32=[0.0]), tried) == []
    assert decide(Clock(), tried, builder=FakeBuilder(spills)) == []


def test_settled_goes_first_and_survives_a_file():
    slow, fast = trial(rows=1, us=2.0, settled=True), trial(rows=2, us=1.0)
    assert ranked([fast, slow]) == [slow, fast]
    again = type(slow).from_dict(slow.to_dict())
    assert again.settled and "settled" not in fast.to_dict()
