"""Corrections of cost models from synthetic trials."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import scipy.stats

from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.corrections import NAME, load_models, models_of, rows_of, save_models
from tvm_fusion.tuning.cost_model import FEW_RECORDS, LEAST_RECORDS, Candidate, CostModel
from tvm_fusion.tuning.refit import (
    LEAST_KERNELS,
    LEAST_TRIALS,
    Correction,
    Row,
    rank_correlation,
    refit,
)
from tvm_fusion.tuning.work_dir import WorkDir


def rows(kernels=8, trials=20, *, exponent=1.0, power=0.0, noise=0.05, seed=0, template="matmul"):
    """Trials of kernels whose time is scale · predicted^exponent · (1 + columns)^power, and noise."""
    chance = random.Random(seed)
    found = []
    for number in range(kernels):
        scale = chance.uniform(0.5, 50)
        for _ in range(trials):
            values = {
                "tile.rows": chance.choice([32, 64, 128]),
                "tile.columns": 2 ** chance.randrange(3, 9),
            }
            predicted = scale * chance.uniform(1, 3)
            time = 2 * predicted**exponent * (1 + values["tile.columns"]) ** power
            decision = (*values.items(), ("how", "ldmatrix"))
            measured = time * math.exp(chance.gauss(0, noise))
            found.append(Row(f"k{number}", template, decision, predicted, measured))
    return found


def test_what_the_model_forgets_is_learnt():
    (found,) = refit(rows(power=0.5)).values()
    assert found.used and found.after > 0.9 > found.before + 0.2
    assert found.powers["tile.columns"] == pytest.approx(0.5, abs=0.15)
    assert abs(found.powers["tile.rows"]) < 0.1
    assert found.kernels == 8 and found.trials == 160


def test_a_right_model_is_left_alone():
    (found,) = refit(rows()).values()
    assert not found.used and found.before > 0.9
    assert found.exponent == pytest.approx(1, abs=0.1) and found.scale == pytest.approx(2, rel=0.2)


def test_noise_alone_is_seldom_a_correction():
    """Times that have nothing to do with the decisions, beyond what the model says of them."""
    used = 0
    for seed in range(20):
        (found,) = refit(rows(kernels=5, trials=8, noise=0.6, seed=seed)).values()
        assert all(abs(power) < 0.4 for power in found.powers.values())
        used += found.used
    assert used <= 5


def test_a_gain_must_exceed_its_error():
    assert correction(before=0.5, after=0.6, error=0.05).used
    assert not correction(before=0.5, after=0.6, error=0.15).used


def test_corrected_times_are_in_microseconds():
    data = rows(exponent=1.3, power=0.5, noise=0.01)
    (found,) = refit(data).values()
    away = [math.log(found.microseconds(r.predicted_us, r.decision) / r.measured_us) for r in data]
    plain = [math.log(r.predicted_us / r.measured_us) for r in data]
    assert np.mean(np.abs(away)) < 0.5 * np.mean(np.abs(plain))


def test_the_order_of_the_trials_does_not_count():
    data = rows(power=0.5)
    shuffled = data.copy()
    random.Random(1).shuffle(shuffled)
    assert refit(shuffled) == refit(data)


@pytest.mark.parametrize(
    ("kernels", "trials", "fitted"),
    [(LEAST_KERNELS, LEAST_TRIALS, 1), (LEAST_KERNELS - 1, 50, 0), (50, LEAST_TRIALS - 1, 0)],
)
def test_a_template_needs_enough_kernels_with_enough_trials(kernels, trials, fitted):
    assert len(refit(rows(kernels, trials))) == fitted


def test_templates_are_fitted_apart():
    found = refit([*rows(power=0.5), *rows(power=-0.5, template="rows"), *rows(1, 3, template="x")])
    assert sorted(found) == ["matmul", "rows"]
    assert (
        found["matmul"].powers["tile.columns"] > 0.2 > -0.2 > found["rows"].powers["tile.columns"]
    )


@pytest.mark.parametrize("seed", range(20))
def test_rank_correlation_is_spearmans(seed):
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 6, 12), rng.normal(size=12)
    assert rank_correlation(one, other) == pytest.approx(scipy.stats.spearmanr(one, other)[0])
    assert rank_correlation(one, one) == pytest.approx(1) == -rank_correlation(other, -other)


def test_a_constant_correlates_with_nothing():
    assert rank_correlation(np.ones(5), np.arange(5.0)) == 0


def correction(**fields):
    """Narrow tiles are faster than the model thinks."""
    known = {
        "template": "matmul", "scale": 1.0, "exponent": 1.0, "powers": {"tile.columns": 1.0},
        "kernels": 3, "trials": 30, "before": 0.5, "after": 0.9,
    }  # fmt: skip
    return Correction(**{**known, **fields})


WIDE = Candidate("matmul", (("tile.columns", 256),), 1.0)
NARROW = Candidate("matmul", (("tile.columns", 32),), 2.0, 1)


def test_a_correction_ranks_kernels_of_which_little_is_known():
    for corrections, first in (({}, 0), ({"matmul": correction()}, 1)):
        model = CostModel(corrections)
        assert int(np.argmax(model.scores([WIDE, NARROW], "k"))) == first


def test_a_correction_of_no_use_is_not_used():
    model = CostModel({"matmul": correction(after=0.505)})
    assert not model.corrects("matmul") and model.predicted(WIDE) == 1.0
    assert int(np.argmax(model.scores([WIDE, NARROW], "k"))) == 0


def test_trees_rank_kernels_of_which_much_is_known():
    """The kernel's own trials say that wide tiles are fast, whatever the correction says."""
    model = CostModel({"matmul": correction()})
    for n in range(LEAST_RECORDS):
        columns = (32, 256)[n % 2]
        candidate = Candidate("matmul", (("tile.columns", columns), ("n", n)), 1.0)
        model.add("known", candidate, 512.0 / columns)
    assert LEAST_RECORDS > FEW_RECORDS
    assert int(np.argmax(model.scores([WIDE, NARROW], "known"))) == 0
    assert int(np.argmax(model.scores([WIDE, NARROW], "new"))) == 1


def test_what_was_learnt_is_kept(tmp_path):
    models = refit(rows(power=0.5))
    save_models(tmp_path, "GPU 0", models)
    save_models(tmp_path, "GPU 1", {})
    save_models(tmp_path, "GPU 2", {"matmul": correction()})
    assert load_models(tmp_path) == {"GPU 0": models, "GPU 2": {"matmul": correction()}}
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_without_a_file_there_is_nothing(tmp_path, recwarn):
    assert load_models(tmp_path) == {} and not recwarn.list


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": 2, "devices": {}}', '{"schema": 1}', '{"schema": 1, "devices": {"a": 3}}',
     '{"schema": 1, "devices": {"a": [{}]}}', "[" * 100_000, '{"schema": 1, "devices": {"a": [null]}}',
     json.dumps({"schema": 1, "devices": {"a": [{**correction().to_dict(), "scale": -1}]}}),
     json.dumps({"schema": 1, "devices": {"a": [{**correction().to_dict(), "powers": {"n": "x"}}]}})],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_one_warning(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.warns(UserWarning, match="is ignored") as told:
        assert load_models(tmp_path) == {}
    assert len(told) == 1
    save_models(tmp_path, "GPU", {"matmul": correction()})
    assert load_models(tmp_path) == {"GPU": {"matmul": correction()}}


def recorded(row, device="GPU"):
    """The trial of a row."""
    return trial(
        row.kernel, template=row.template, us=None, verdict="ok", samples_us=(row.measured_us,),
        predicted_us=row.predicted_us, device=device, rows=hash(row.decision) % 2**31,
    )  # fmt: skip


def test_trials_keep_what_was_predicted():
    one = trial(predicted_us=3.5)
    assert type(one).from_dict(one.to_dict()) == one
    assert "predicted_us" not in trial().to_dict()
    for wrong in (0, -1, math.inf, math.nan, "3", True):
        with pytest.raises(ValueError, match="predicted_us"):
            trial(predicted_us=wrong)


def test_only_right_trials_with_a_prediction_are_fitted():
    trials = [trial(predicted_us=3.0), trial(rows=1), trial(rows=2, us=None, predicted_us=3.0)]
    assert [r.predicted_us for r in rows_of(trials)] == [3.0]


def test_a_device_learns_from_its_own_trials(tmp_path):
    records = WorkDir(tmp_path).open("sm_90", "float16")
    records.add(*(recorded(row) for row in rows(power=0.5)))
    assert models_of(records, "another") == {}
    assert "matmul" in models_of(records, "GPU")
    save_models(records.folder, "GPU", {"other": correction(template="other")})
    assert list(models_of(records, "GPU")) == ["other"]
