"""Batches: the model's favourites, and what would teach something."""

from __future__ import annotations

import itertools
import math

import numpy as np

from tvm_fusion.tuning.cost_model import Candidate
from tvm_fusion.tuning.picking import hopeless_templates, pick

TILES = [
    Candidate("tiles", (("rows", rows), ("columns", columns), ("stages", stages)))
    for rows, columns, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (2, 3, 4))
]


def predicted(candidate: Candidate) -> float:
    """Rows of 64 are best, then columns of 64; stages do not matter."""
    values = dict(candidate.decision)
    away = [abs(math.log2(values[name] / 64)) for name in ("rows", "columns")]
    return 1 + 0.2 * away[0] + 0.1 * away[1]


def scores(candidates) -> np.ndarray:
    """What the model says."""
    return np.array([1 / predicted(c) for c in candidates])


def chosen(candidates, tried, count):
    """The batch itself."""
    return [candidates[i] for i in pick(candidates, scores(candidates), tried, count)]


def test_most_of_a_batch_is_ranked_best():
    batch = chosen(TILES, {}, 10)
    assert len(batch) == len(set(batch)) == 10
    ranked = sorted(predicted(c) for c in TILES)
    assert [predicted(c) for c in batch[:6]] == ranked[:6]


def test_the_rest_has_choices_that_were_not_tried():
    """Only 64 rows were tried; the batch has all the others that are plausible."""
    tried = {c: 1.0 for c in TILES if dict(c.decision)["rows"] == 64}
    left = [c for c in TILES if c not in tried]
    rows = {dict(c.decision)["rows"] for c in chosen(left, tried, 10)}
    assert rows == {16, 32, 128}
    # By the model alone it has rows of 32 and 128 only.
    assert {dict(c.decision)["rows"] for c in sorted(left, key=predicted)[:10]} == {32, 128}


def test_what_is_predicted_far_slower_is_not_tried_for_its_novelty():
    odd = Candidate("tiles", (("rows", 1), ("columns", 1), ("stages", 9)))
    everything = [*TILES, odd]
    marks = np.append(scores(TILES), 0.1)
    assert len(TILES) not in pick(everything, marks, {}, 20)
    assert len(TILES) in pick(everything, marks, {}, len(everything))
    near = np.append(scores(TILES), 0.6)
    assert len(TILES) in pick(everything, near, {}, 20)


def test_a_template_that_is_far_slower_comes_last():
    slow = [Candidate("loops", (("threads", n),)) for n in range(1, 9)]
    everything = [*slow, *TILES]
    marks = np.concatenate([np.full(8, 2.0), scores(TILES)])  # the model thinks otherwise
    some = {TILES[0]: 1.0}
    assert pick(everything, marks, some, 4)[0] < 8
    tried = {TILES[0]: 1.0, slow[0]: 12.0}
    assert hopeless_templates(tried) == {"loops"}
    assert min(pick(everything, marks, tried, 40)) >= 8
    assert sorted(pick(everything, marks, tried, len(everything))) == list(range(len(everything)))


def test_a_template_is_not_given_up_for_a_bad_start():
    slow = [Candidate("loops", (("threads", n),)) for n in range(8)]
    assert not hopeless_templates({TILES[0]: 1.0, slow[0]: 3.0})
    assert not hopeless_templates({TILES[0]: 1.0, slow[0]: math.inf})
    assert not hopeless_templates({slow[0]: math.inf})
    assert hopeless_templates({TILES[0]: 1.0} | dict.fromkeys(slow, 3.0)) == {"loops"}


def test_nothing_left_gives_nothing():
    assert pick([], np.zeros(0), {}, 4) == []
