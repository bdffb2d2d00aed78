"""A run as a table and as a line."""

from __future__ import annotations

import math

from rich.console import Console

from tvm_fusion.report.tuning_text import progress_line, progress_table
from tvm_fusion.tuning.overview import KernelView, Overview


def state(**fields) -> Overview:
    kernels = (
        KernelView("a", ("conv2d", "relu"), "vertical", 2, 3, 20, 8.0, 10.0, 16.0, (("b", 1), ("c", 1))),
        KernelView("b", ("conv2d",), calls=1, trials=4, best_us=9.0, untuned_us=12.0),
        KernelView("c", ("[relu]",), trials=2, problem="no template takes it"),
    )  # fmt: skip
    values = {
        "kernels": kernels, "trials": 26, "new_trials": 6, "budget": 46, "seconds": 30.0,
        "limit": math.inf, "groups": 3, "launches": 4, "unfused_launches": 7, "model_us": 33.0,
        "unfused_us": 57.0,
    }  # fmt: skip
    return Overview(**{**values, **fields})


def shown(overview: Overview, rows: int = 9, note: str = "") -> list[str]:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(progress_table(overview, rows, note))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_table() -> None:
    head, first, second, third, plan, left = shown(state())
    assert head.split() == "kernel calls trials best µs untuned µs unfused µs gain".split()
    assert first.split()[-7:] == ["3", "20", "8.0", "10.0", "16.0", "−50", "%"]
    assert first.startswith("vertical: conv2d + relu ") and "−25 %" in second
    assert "[relu]" in third and "no template takes it" in third and third.split()[-3:] == ["–"] * 3
    assert plan.startswith("plan of the moment: 3 groups, launches 7 → 4")
    assert "33.0 µs (unfused 57.0, −42 %)" in plan
    # 6 trials in 30 s: 20 more take 100 s.
    assert left == "26 of 46 trials, 0:30 gone, 1:40 left"


def test_a_small_terminal_and_troubles() -> None:
    lines = shown(state(disk_problem="the disk is full"), rows=1, note="stopping")
    assert "… 2 more kernels, 6 trials" in lines
    assert lines[-2:] == ["trials are kept in memory only: the disk is full", "stopping"]
    assert len(shown(state(), rows=0)) == 5  # never without a kernel


def test_numbers_are_never_cut() -> None:
    long = KernelView(
        "a", ("conv2d",) * 6, calls=1, trials=1, best_us=123456.0, untuned_us=234567.0
    )
    console = Console(width=70, record=True, file=open("/dev/null", "w"))
    console.print(progress_table(state(kernels=(long,)), 5))
    text = console.export_text()
    assert "123,456" in text and "234,567" in text and "−47 %" in text


def test_the_line() -> None:
    line = progress_line(state())
    assert line.startswith(
        "0:30 26 of 46 trials, 3 kernels, 1:40 left; plan of the moment: 3 groups"
    )
    early = progress_line(state(launches=0, new_trials=0, model_us=math.inf))
    assert early == "0:30 26 of 46 trials, 3 kernels; no plan yet"


def test_the_time_that_is_left_is_the_nearer_of_two_ends() -> None:
    assert state().seconds_left == 100
    assert state(limit=50.0).seconds_left == 20
    assert state(limit=10.0).seconds_left == 0
    assert state(trials=46).seconds_left == 0
    assert state(new_trials=0).seconds_left == math.inf
