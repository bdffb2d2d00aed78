"""The must targets of tuning on made-up results: all hold, and each kind of miss is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_tuning
import pytest


def row(name: str, **changes: Any) -> dict[str, Any]:
    """A row that meets every target."""
    return {
        "name": name, "dtype": "float16", "ours_us": 10.0, "untuned_us": 10.5, "unfused_us": 30.0,
        "peers": {"inductor_freeze": 12.0, "tvm_tuned": 40.0}, "extra": {"ours_tuned_deepest": 11.0},
        "errors": {"ours_tuned": {"l2": 3e-4}}, "spread": {"ours_tuned": 0.01, "ours": 0.02}, **changes,
    }  # fmt: skip


def failures(*rows: dict[str, Any]) -> list[str]:
    """What is missed."""
    return check_tuning.failures({"rows": list(rows)})


def test_all_targets_hold() -> None:
    assert failures(row("cbr1"), row("resnet50_b1"), row("resnet50_b32")) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"errors": {"ours": {"l2": 3e-4}}}, "cbr1 float16: not tuned"),
        (
            {"untuned_us": 9.7},
            "cbr1 float16: 10.00 us tuned, 9.70 untuned (noise of the run 2.0 %)",
        ),
        (
            {"unfused_us": 9.8},
            "cbr1 float16: 10.00 us tuned, 9.80 unfused (noise of the run 1.0 %)",
        ),
        ({"unfused_us": None}, "cbr1 float16: unfused was not measured"),
    ],
)
def test_a_row_that_misses_is_named(changes: dict[str, Any], found: str) -> None:
    assert failures(row("cbr1", **changes), row("dwpw")) == [found]


def test_noise_is_no_miss() -> None:
    assert failures(row("cbr1", untuned_us=9.9), row("dwpw")) == []


def test_the_same_code_is_not_slower() -> None:
    same = {"about": {c: {"code": "a"} for c in ("ours", "ours_tuned")}}
    other = {"about": {"ours": {"code": "a"}, "ours_tuned": {"code": "b"}}}
    faster = row("dwpw", untuned_us=12.0)
    assert failures(row("cbr1", untuned_us=9.5, **same), faster) == []
    assert len(failures(row("cbr1", untuned_us=9.5, **other), faster)) == 1


def test_times_of_the_same_code_say_how_far_processes_are_apart() -> None:
    def alike(us: float) -> dict[str, Any]:
        codes = {"ours": "a", "ours_tuned": "b", "ours_tuned_deepest": "b"}
        about = {c: {"code": code} for c, code in codes.items()}
        return {"about": about, "extra": {"ours_tuned_deepest": us}, "untuned_us": 9.7}

    rows = [row("cbr1", **alike(10.5)), row("cbr3", **alike(10.4)), row("dwpw", **alike(30.0))]
    assert check_tuning.noise_between_processes(rows) == pytest.approx(0.1 / 2.1, rel=0.01)
    assert check_tuning.noise_between_processes([row("cbr1")]) == 0
    assert not any("us tuned" in text for text in failures(*rows))


def test_the_depth_must_pay_in_geometric_mean() -> None:
    same = row("cbr1", extra={"ours_tuned_deepest": 9.0}, peers={"tvm_tuned": 9.5})
    assert failures(same) == [
        "geometric mean 0.900x the deepest plan, must be over 1x (1 rows)",
        "geometric mean 0.950x tuned stock TVM, must be over 1x (1 rows)",
    ]
    assert failures(same, row("dwpw", extra={"ours_tuned_deepest": 12.0})) == []


def test_networks_have_targets_by_batch() -> None:
    one = row("resnet50_b1", peers={"inductor": 11.0, "inductor_freeze": 10.4, "tvm_tuned": 40.0})
    many = row("resnet50_b32", peers={"inductor": 9.1, "tvm_tuned": 40.0, "jax": 1.0})
    assert failures(one, many) == [
        "resnet50_b1 float16: 1.040x inductor_freeze, must be 1.05x: 10.0 us against 10.4"
    ]
    slow = row("resnet50_b32", peers={"inductor": 8.9, "tvm_tuned": 40.0})
    assert "must be 0.9x" in failures(slow)[0]
    assert (
        "torch.compile was not measured" in failures(row("resnet50_b1", peers={"tvm_tuned": 40}))[0]
    )


def test_the_command_line(tmp_path: Path) -> None:
    head = {"device": "NVIDIA H200", "driver": "1", "commit": "abc", "versions": {}, "ceilings": {}}
    files = [tmp_path / "rows.json", tmp_path / "networks.json"]
    for file, name in zip(files, ("cbr1", "resnet50_b1"), strict=True):
        file.write_text(json.dumps({**head, "rows": [row(name)]}))
    command = [sys.executable, check_tuning.__file__, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "every must target holds" in done.stdout
    assert "against the deepest plan: geometric mean 1.100" in done.stdout
