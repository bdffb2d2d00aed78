"""Tables and plots of made-up results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import figures
import pytest
import results as results_file
import table


def times(warm: float, cold: float | None = 5.0) -> list[dict[str, float | None]]:
    """Three rounds."""
    return [{"warm": warm * f, "cold": cold, "call": 3 * warm} for f in (1.0, 1.02, 0.98)]


@pytest.fixture
def found() -> dict[str, Any]:
    """Results of two rows, one of them wrong."""
    out = results_file.new_results("NVIDIA H200", "abc", {})
    out.update(driver="1.2", versions={"torch": "2"}, empty_kernel_us={"eager": 1.04})
    good = {"l2": 3e-4, "max": 1e-3}
    about = {
        "ours": {"error": good, "launches": 1, "plan_bytes": 2 << 20, "plan_flops": 1 << 30, "kernels": ["k"]},
        "unfused": {"error": good, "launches": 7, "plan_bytes": 4 << 20, "plan_flops": 1 << 30},
        "eager": {"error": good},
    }  # fmt: skip
    rounds = {
        "eager": times(40.0), "inductor": times(20.0), "expert": times(11.0),
        "expert_compiled": times(12.0), "unfused": times(30.0), "ours": times(10.0),
    }  # fmt: skip
    missing = {"tensorrt": "ImportError: no module"}
    row = results_file.make_row(("convsum4", "float16"), rounds, about, missing, out)
    results_file.put_row(out, row)
    wrong = {**missing, "ours": "over tolerance"}
    rest = {k: v for k, v in rounds.items() if k != "ours"}
    results_file.put_row(out, results_file.make_row(("cbr1", "float16"), rest, about, wrong, out))
    return out


def test_a_row_of_the_file(found: dict[str, Any]) -> None:
    row = found["rows"][0]
    assert (row["ours_us"], row["untuned_us"], row["unfused_us"]) == (10.0, 10.0, 30.0)
    assert row["peers"] == {"eager": 40.0, "inductor": 20.0}
    assert (row["expert_us"], row["cold_expert_us"], row["call_ours_us"]) == (11.0, 5.0, 30.0)
    assert row["floor_us"] == pytest.approx(2.85, abs=0.01)
    assert (row["error"], row["errors"]["eager"]["l2"]) == (3e-4, 3e-4)
    assert row["spread"]["ours"] == pytest.approx(0.04)
    assert row["gb_per_s"] == pytest.approx(
        2 * (2 * 128 * 128 * 64 + 64 * 64 * 9) / 10e-6 / 1e9, rel=1e-3
    )
    assert row["about"]["ours"]["kernels"] == ["k"]


def test_tuned_counts_as_ours(found: dict[str, Any]) -> None:
    about = {"ours": {"error": {"l2": 3e-4}}, "ours_tuned": {"error": {"l2": 2e-4}}}
    rounds = {"ours": times(10.0), "ours_tuned": times(8.0), "ours_tuned_deepest": times(9.0)}
    row = results_file.make_row(("convsum4", "float16"), rounds, about, {}, found)
    assert (row["ours_us"], row["untuned_us"], row["error"]) == (8.0, 10.0, 2e-4)
    assert row["extra"] == {"ours_tuned_deepest": 9.0}


def test_a_row_without_a_time_keeps_the_error(found: dict[str, Any]) -> None:
    row = next(r for r in found["rows"] if r["name"] == "cbr1")
    assert row["ours_us"] is None and row["errors"]["ours"]["l2"] == 3e-4
    assert "gb_per_s" not in row


def test_rows_stand_in_the_order_of_the_table_and_once(found: dict[str, Any]) -> None:
    results_file.put_row(found, dict(found["rows"][0]))
    results_file.put_row(found, {**found["rows"][0], "dtype": "float32"})
    keys = [(r["name"], r["dtype"]) for r in found["rows"]]
    assert keys == [("convsum4", "float16"), ("cbr1", "float16"), ("convsum4", "float32")]


def test_the_table(found: dict[str, Any]) -> None:
    text = table.markdown(found)
    line = next(x for x in text.splitlines() if x.startswith("| convsum4"))
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells == [
        "convsum4", "10.0", "20.0 (inductor)", "2.00", "11.0", "1.10", "30.0", "3.00", "2.9", "3.51",
    ]  # fmt: skip
    mean = "| geometric mean of the 2 rows without attention |  |  | **2.00** |  | **1.10** |  | **3.00** |"
    assert mean in text
    blocks = {**found, "rows": [{**r, "name": "bert128"} for r in found["rows"][:1]]}
    assert "geometric mean" not in table.markdown(blocks)
    assert "| 1 | 7 | 427 | 120.8 | 3.0e-04 | 4.0 % |" in text, "launches, rates, error and noise"
    assert "- tensorrt: ImportError: no module (every row)" in text
    assert "- ours: over tolerance (cbr1)" in text
    assert "NVIDIA H200, driver 1.2" in text and "commit abc" in text
    lines = text.splitlines()
    start = lines.index(line) - 2  # the heads, the rule below them, two rows and the means
    assert len({x.count("|") for x in lines[start : start + 5]}) == 1
    short = table.compact(found).splitlines()
    assert short[:1] == ["**float16**"] and line in short and "### float16" not in "".join(short)


def test_parts_of_a_run_are_one_table(found: dict[str, Any]) -> None:
    other = copy.deepcopy(found)
    other["rows"] = [{**found["rows"][0], "dtype": "float32"}, {**found["rows"][1], "ours_us": 7.0}]
    other["empty_kernel_us"] = {"jax": 1.2}
    whole = results_file.merged([found, other])
    assert [(r["name"], r["dtype"], r["ours_us"]) for r in whole["rows"]] == [
        ("convsum4", "float16", 10.0), ("cbr1", "float16", 7.0), ("convsum4", "float32", 10.0),
    ]  # fmt: skip
    assert whole["empty_kernel_us"] == {"eager": 1.04, "jax": 1.2}
    assert len(found["rows"]) == 2, "the parts stay as they were"
    with pytest.raises(ValueError, match="commit 'def'"):
        results_file.merged([found, {**other, "commit": "def"}])


def test_results_of_a_cpu_are_labelled(found: dict[str, Any]) -> None:
    found["driver"], found["device"] = "", "CPU"
    assert "says nothing about the targets" in table.markdown(found)


def test_the_figures(found: dict[str, Any]) -> None:
    found["ceilings"] = {"copy": 4.0e12}
    found["curve"] = [
        {"case": "one input, summed", "size": 128, "dtype": "float16", "members": n, "chosen": "1 launch",
         "measured_us": {"one": 10.0 + n, "vertical": 4.0 * n, "planned": 9.0 + n}} for n in (2, 3)
    ]  # fmt: skip
    text = figures.markdown(found)
    line = next(x for x in text.splitlines() if x.startswith("| 4 parallel"))
    assert "| 7 → 1 | 4.0 → 2.0 | 30.0 → 10.0 | 3.00× (-67 %) | 140 → 210 | 3 → 5 |" in line
    assert "| one input, summed | 128² | float16 | 3 | 13.0 | 12.0 | – | 12.0 | 1 launch |" in text
    assert "4 FC" not in text, "a line that was not measured is left out"


def test_the_plots(found: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table.plot(found, tmp_path / "rows.svg")
    curve = [
        {
            "case": "c",
            "size": 14,
            "dtype": "float16",
            "members": 2,
            "chosen": "",
            "measured_us": {"one": 1.0},
        }
    ]
    figures.plot(curve, tmp_path / "curve.svg")
    assert (tmp_path / "rows.svg").stat().st_size > 1000
    table.publish(found, tmp_path / "new" / "h200-rows", "float16")
    assert json.loads((tmp_path / "new/h200-rows.json").read_text()) == found
    text = (tmp_path / "new/h200-rows.md").read_text()
    assert text.startswith("![Times of each row](h200-rows.png)") and table.markdown(found) in text
    assert (tmp_path / "new/h200-rows.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no float32 row"):
        table.plot(found, tmp_path / "none.svg", "float32")
    with pytest.raises(ValueError, match="not measured"):
        figures.plot([], tmp_path / "none.svg")
