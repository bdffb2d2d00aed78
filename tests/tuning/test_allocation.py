"""Where the next trials go: pure functions of what is known of each kernel."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tvm_fusion.tuning.allocation import NEAR_FLOOR, Progress, next_kernel


def random_progress(chance: random.Random) -> Progress:
    """A kernel after any number of batches; times only get better."""
    times = sorted((chance.uniform(1, 100) for _ in range(chance.randrange(6))), reverse=True)
    failed = [math.inf] * chance.randrange(3)
    floor = chance.choice([0.0, chance.uniform(0, 5)])
    weight = chance.choice([0.25, 1.0, chance.uniform(0.1, 50)])
    return Progress(weight, floor, failed + times, chance.random() < 0.1)


@pytest.mark.parametrize("seed", range(200))
def test_what_is_chosen_pays_most(seed):
    chance = random.Random(seed)
    kernels = [random_progress(chance) for _ in range(chance.randrange(1, 8))]
    busy = [i for i in range(len(kernels)) if chance.random() < 0.2]
    chosen = next_kernel(kernels, busy)
    gains = {i: k.expected_gain() for i, k in enumerate(kernels) if i not in busy}
    assert all(gain >= 0 and not math.isnan(gain) for gain in gains.values())
    if chosen is None:
        assert not any(gains.values())
    else:
        assert chosen not in busy and not kernels[chosen].is_done
        assert gains[chosen] == max(gains.values()) > 0
        assert all(i >= chosen for i, gain in gains.items() if gain == gains[chosen])
    assert next_kernel(kernels, busy) == chosen


@pytest.mark.parametrize("seed", range(50))
def test_a_kernel_that_is_called_more_often_promises_more(seed):
    kernel = random_progress(random.Random(seed))
    before = kernel.expected_gain()
    kernel.weight *= 3
    assert kernel.expected_gain() == pytest.approx(3 * before)


def test_a_kernel_without_any_result_goes_first():
    assert next_kernel([Progress(100, 0, [50, 1]), Progress(1)]) == 1


def test_one_near_its_floor_is_done():
    near, far = Progress(100, 10, [10 * NEAR_FLOOR]), Progress(1, 10, [10.5 * NEAR_FLOOR])
    assert near.is_done and near.expected_gain() == 0
    assert next_kernel([near, far]) == 1 and next_kernel([near]) is None


def test_one_with_nothing_left_is_done():
    assert next_kernel([Progress(1, 0, [50, 1], exhausted=True)]) is None


def test_one_that_always_fails_is_given_up():
    kernel, turns = Progress(1), 0
    while next_kernel([kernel]) == 0:
        kernel.best.append(math.inf)
        turns += 1
    assert 0 < turns <= 5


def test_batches_that_bring_nothing_lower_the_hope():
    gains = [Progress(1, 0, [20.0] + [10.0] * idle).expected_gain() for idle in range(1, 8)]
    assert all(later < earlier for earlier, later in itertools.pairwise(gains))
    assert gains[-1] > 0  # but it is never given up while there is budget


def test_trials_are_shared_out_by_weight_and_by_what_they_bring():
    """Two kernels whose times fall with their batches, to a floor: the one called ten times gets more."""
    kernels, turns = [Progress(10, 1), Progress(1, 1), Progress(1, 1)], [0, 0, 0]
    for _ in range(40):
        number = next_kernel(kernels)
        if number is None:
            break
        turns[number] += 1
        # The last one has nothing to gain: it starts at its best.
        kernels[number].best.append(8.0 if number == 2 else 2 + 18 / turns[number])
    assert turns[0] > turns[1] > turns[2] >= 1
