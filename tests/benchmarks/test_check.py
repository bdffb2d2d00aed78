"""The must targets on made-up results: all hold, and each kind of miss is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import check
import pytest

SCRIPT = Path(check.__file__)


def row(name: str, dtype: str) -> dict[str, Any]:
    """A row that meets every target."""
    return {
        "name": name, "dtype": dtype, "ours_us": 10.0, "untuned_us": 10.0, "unfused_us": 30.0,
        "peers": {"eager": 40.0, "inductor_freeze": 20.0}, "expert_us": 12.5,
        "experts": {"expert": 12.5}, "floor_us": 5.0, "error": 3e-4, "missing": {}, "spread": {"ours": 0.01},
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    """Results in which every target holds."""
    rows = [row(n, d) for d in ("float16", "float32") for n in check.TARGET_ROWS]
    return {"device": "NVIDIA H200", "rows": rows}


def find(results: dict[str, Any], name: str, dtype: str = "float16") -> dict[str, Any]:
    """One row."""
    return next(r for r in results["rows"] if (r["name"], r["dtype"]) == (name, dtype))


def test_all_targets_hold(results: dict[str, Any]) -> None:
    assert check.failures(results) == []


def test_a_faster_peer_is_named_with_the_ratio(results: dict[str, Any]) -> None:
    find(results, "qkv8")["peers"]["jax"] = 10.4
    assert [f for f in check.failures(results)] == [
        "qkv8 float16: 1.040x jax, must be 1.05x: 10.00 us against 10.40 (noise of the run 1.0 %)"
    ]


def test_a_peer_just_slow_enough_is_no_miss(results: dict[str, Any]) -> None:
    find(results, "qkv8")["peers"]["jax"] = 10.5
    assert check.failures(results) == []


def test_at_float32_level_is_enough_but_no_less(results: dict[str, Any]) -> None:
    find(results, "cbr1", "float32")["peers"]["jax"] = 10.0
    assert check.failures(results) == []
    find(results, "cbr1", "float32")["peers"]["jax"] = 9.99
    (failure,) = check.failures(results)
    assert failure.startswith("cbr1 float32: 0.999x jax, must be 1x")


def test_the_geometric_mean_over_peers(results: dict[str, Any]) -> None:
    for r in results["rows"]:
        r["peers"]["inductor_freeze"] = 17.9
    (failure,) = check.failures(results)
    assert failure == "float16: geometric mean 1.790x the best automatic peer, must be 1.8x"


def test_the_expert_on_one_row(results: dict[str, Any]) -> None:
    find(results, "dwpw")["expert_us"] = 9.4
    assert any(
        "dwpw float16: 0.940x the expert, must be 0.95x" in f for f in check.failures(results)
    )
    find(results, "dwpw")["expert_us"] = 9.6
    assert check.failures(results) == []


def test_the_geometric_mean_over_experts(results: dict[str, Any]) -> None:
    for r in results["rows"]:
        r["expert_us"] = 11.9
    (failure,) = check.failures(results)
    assert failure == "float16: geometric mean 1.190x the expert, must be 1.2x"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_never_slower_than_unfused(results: dict[str, Any], dtype: str) -> None:
    find(results, "cbr3", dtype)["unfused_us"] = 9.99
    (failure,) = check.failures(results)
    assert failure.startswith(f"cbr3 {dtype}: slower than our own unfused plan")
    find(results, "cbr3", dtype)["unfused_us"] = 10.0
    assert check.failures(results) == []


def test_gelu_ln_on_an_h200_only(results: dict[str, Any]) -> None:
    slow = find(results, "gelu_ln")
    for key in ("ours_us", "unfused_us", "expert_us"):
        slow[key] *= 8.1
    slow["peers"] = {k: 8.1 * v for k, v in slow["peers"].items()}
    assert check.failures(results) == ["gelu_ln float16: 81.0 us, must be at most 80"]
    other = copy.deepcopy(results)
    other["device"] = "NVIDIA A100"
    assert check.failures(other) == []


def test_what_is_not_measured_is_a_miss(results: dict[str, Any]) -> None:
    results["rows"].remove(find(results, "fcln4"))
    find(results, "cbr1").update(ours_us=None, missing={"ours": "over tolerance: error 0.5"})
    find(results, "cbr3")["unfused_us"] = None
    find(results, "dwpw")["expert_us"] = None
    find(results, "cross31")["peers"] = {}
    text = "\n".join(check.failures(results))
    for part in (
        "fcln4 float16: not measured",
        "cbr1 float16: ours is missing: over tolerance",
        "cbr3 float16: our own unfused plan was not measured",
        "dwpw float16: the expert's version was not measured",
        "cross31 float16: no automatic peer was measured",
    ):
        assert part in text
    assert len(text.splitlines()) == 5


def test_aims_and_rows_without_targets_are_notes(results: dict[str, Any]) -> None:
    for r in results["rows"]:
        r["peers"]["inductor_freeze"] = 25.0
    results["rows"].append(row("bert128", "float16"))
    assert check.notes(results) == []
    find(results, "bert128")["unfused_us"] = 9.0
    find(results, "cbr1").update(floor_us=3.9, expert_us=9.8)
    for r in results["rows"]:
        r["peers"]["inductor_freeze"] = 24.0
    assert check.notes(results) == [
        "bert128 float16: slower than our own unfused plan: 10.00 us against 9.00 (noise of the run 1.0 %)",
        "cbr1 float16: 2.56x the floor, aim 2.5x",
        "cbr1 float16: 0.980x the expert, aim 1x",
        "float16: geometric mean 2.400x the best peer, aim 2.5x",
    ]
    assert check.failures(results) == [], "notes are no misses"


def test_nothing_measured_is_no_pass() -> None:
    assert len(check.failures({"device": "CPU", "rows": []})) == 22


def test_rows_without_targets_do_not_matter(results: dict[str, Any]) -> None:
    slow = row("bert128", "float16")
    slow["ours_us"] = 1000.0
    results["rows"].append(slow)
    assert check.failures(results) == []


@pytest.mark.parametrize(("unfused", "status"), [(30.0, 0), (1.0, 1)])
def test_the_script(results: dict[str, Any], tmp_path: Path, unfused: float, status: int) -> None:
    find(results, "cbr1")["unfused_us"] = unfused
    find(results, "cbr1")["missing"] = {"tensorrt": "not installed"}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
    assert done.returncode == status
    assert "missing: cbr1 float16 tensorrt: not installed" in done.stdout
    assert ("FAILED" in done.stdout) is bool(status)
