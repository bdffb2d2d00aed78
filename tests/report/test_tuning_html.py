"""The page about tuning: one file, well-formed, escaped, and its numbers are those of the trials."""

from __future__ import annotations

import re

import pytest

from tvm_fusion.errors import DatabaseError
from tvm_fusion.report import render_tuning
from tvm_fusion.report.curves import build_curve
from tvm_fusion.report.tuning_page import MAX_EXAMPLES, VERDICTS
from tvm_fusion.report.tuning_text import clock, gain_text, operators_text, time_text
from tvm_fusion.testing.html_page import Page
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.summary import (
    ChainNote,
    KernelNote,
    RowNote,
    Slower,
    Summary,
    save_summary,
)  # fmt: skip
from tvm_fusion.tuning.work_dir import WorkDir

HOSTILE = "<script>alert(1)</script>&"

#: A chain conv → relu → conv → relu whose pairs win and whose depth 4 spills.
CONV, RELU, PAIR, FOUR = "conv", "relu", "pair", "four"


def summary(**fields) -> Summary:
    kernels = (
        KernelNote(CONV, ("conv2d",), "", 1, 0, 2048, 0.5, 9.0),
        KernelNote(RELU, ("relu",), "", 1, 0, 4096, 0.5, 4.0),
        KernelNote(PAIR, ("conv2d", "relu"), "vertical", 2, 2, 2048, 0.5, 11.0, ((CONV, 1), (RELU, 1))),
        KernelNote(FOUR, ("conv2d", "relu") * 2, "vertical", 4, 0, 2048, 0.5, None, ((CONV, 2), (RELU, 2))),
    )  # fmt: skip
    rows = (
        RowNote(1, 1, (CONV, RELU, CONV, RELU), 4 << 20, False, False),
        RowNote(2, 2, (PAIR, PAIR), 2 << 20, True, False),
        RowNote(3, 4, (FOUR,), 1 << 20, False, True),
    )
    chain = ChainNote(("c0", HOSTILE, "c1", "r1"), ("conv2d", "relu") * 2, 3, rows)
    values = {
        "model": f"net {HOSTILE}", "target": "cuda sm_90", "dtype": "float16", "device": "a GPU",
        "driver": "1.2", "trials": 12, "budget": 50, "state": "finished", "launches": (4, 2),
        "groups": 2, "kernels": kernels, "chains": (chain,),
        "slower": (Slower("vertical", ("c0", HOSTILE), "21.0 µs, its parts take 14.0 µs"),),
        "tuned_us": 14.5, "unfused_us": 25.5, "default_us": 30.0, "date": "2026-02-03T04:05",
    }  # fmt: skip
    return Summary(**{**values, **fields})


def trials():
    """Trials of the four kernels; what the compiler says of the best is in the page."""
    of = {"driver": "1.2", "shared_bytes": 512}
    yield trial(CONV, 1, 8.0, operators=("conv2d",), **of)
    yield trial(CONV, 2, 7.0, operators=("conv2d",), **of)
    yield trial(RELU, 1, 4.0, operators=("relu",), **of)
    for number, us in enumerate((11.0, 9.0, 7.0, 8.0, 40.0)):
        yield trial(PAIR, number, us, registers=40 + number, spill_bytes=0, **of)
    for number in range(MAX_EXAMPLES + 2):
        yield trial(FOUR, number, None, message=f"{number} spilled {HOSTILE}", spill_bytes=64, **of)
    yield trial(FOUR, 99, None, verdict="wrong", message="off by 3", **of)


def place_with(folder, *summaries):
    place = WorkDir(folder).place("sm_90", "float16", "0.27.0")
    place.create()
    place.records().add(*trials())
    for one in summaries:
        save_summary(place.folder, one)
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return render_tuning([place_with(tmp_path_factory.mktemp("work"), summary())])


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def words(page: Page) -> str:
    return " ".join(" ".join(t for stack, t in page.texts if stack[-1] != "style").split())


def test_it_needs_nothing_from_outside_and_no_script(text, page) -> None:
    for tag, attrs in page.elements:
        for name in ("src", "href", "action", "data", "srcset"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    assert not re.search(r"@import|url\(|https?://|//cdn|<script", text)
    (policy,) = [a for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy["content"].startswith("default-src 'none'") and "script" not in policy["content"]
    assert len(text) < 60_000


def test_names_are_escaped(page) -> None:
    assert [t for stack, t in page.texts if stack[-1] == "h1"] == [f"net {HOSTILE}"]
    assert f"0 spilled {HOSTILE}" in words(page)


def test_it_is_accessible(page) -> None:
    assert page.of("html") == [{"lang": "en"}]
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.of("th"))
    assert page.of("svg") and all(a["role"] == "img" and a["aria-label"] for a in page.of("svg"))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"][1:] for attrs in page.of("a")]
    assert links and set(links) <= set(ids)


def test_the_outcome(page) -> None:
    told = words(page)
    for fact in ("cuda sm_90", "float16", "a GPU, driver 1.2", "12 trials of 50", "2026-02-03"):
        assert fact in told
    assert "25.5 → 14.5 −43 %" in told and "30.0 → 14.5 −52 %" in told
    assert "was not timed" not in told and "compiled without groups" not in told


def test_the_kernels(page) -> None:
    pair = page.row("pair, matmul")
    assert pair[1:] == ["2", "5 of 5", "7.0", "11.0", "11.0", "−36 %", "42", "512"]
    assert page.row("relu relu")[1:] == ["–", "1 of 1", "4.0", "4.0", "–", "±0 %", "–", "512"]
    assert page.row("conv2d + relu + conv2d + relu four")[1:5] == ["–", "0 of 8", "–", "–"]
    first = next(cells[0] for _, cells in page.rows if cells and "matmul" in cells[0])
    assert "pair" in first  # what the plan calls comes first


def test_the_curve_of_a_kernel_falls(page) -> None:
    titles = page.titles()
    assert "trial 3: matmul rows=2: 7.0 µs" in titles
    assert "trial 1: matmul rows=0: spills" in titles
    best = [a["d"] for a in page.of("path") if a.get("class") == "best"]
    ys = [[float(y) for y in re.findall(r"[ V]([\d.]+)", d)] for d in best]
    assert all(line == sorted(line) for line in ys) and max(map(len, ys)) == 3
    # One trial makes no curve.
    assert not any("of relu" in a["aria-label"] for a in page.of("svg"))


def test_depth_against_latency(page) -> None:
    rows = {
        cells[0].split()[0]: cells
        for _, cells in page.rows
        if len(cells) == 8 and cells[1].isdecimal()
    }
    assert rows["1,"][1:] == ["4", "4.0", "", "–", "–", "22.0", ""]
    assert rows["2"][1:] == ["2", "2.0", "−50 %", "42", "0", "14.0", "−36 %"]
    assert rows["3–4"][1:] == ["1", "1.0", "−75 %", "–", "–", "no right kernel", ""]
    marks = {cells[0].strip() for cells in rows.values()}
    assert "2 in the plan fastest" in marks and len(marks) == 3
    assert "3 times in the model, first at" in words(page)


@pytest.mark.parametrize("shipped", ["unfused", "default"])
def test_after_a_fall_back_the_page_agrees_with_itself(tmp_path, shipped) -> None:
    """What is compiled is the outcome; groups are not called, and are not said to be slower than their parts."""
    one = summary(
        shipped=shipped, tuned_us=28.0, unfused_us=25.5, default_us=20.0 if shipped == "default" else 30.0,
        launches=(4, 4), groups=0,
    )  # fmt: skip
    told = words(Page(render_tuning([place_with(tmp_path, one)])))
    assert "(28.0 µs)" in told and "1 group is not compiled because of measured times" in told
    assert "→ tuned" not in told and "measured slower than the best plan" not in told
    if shipped == "unfused":
        assert "TVM's default → unfused µs 30.0 → 25.5" in told and "kernel launches 4 → 4" in told
        assert "unfused → " not in told.replace("default → unfused", "")
    else:
        assert "whole model, unfused → TVM's default µs 25.5 → 20.0" in told
        assert "kernel launches" not in told and "none of the kernels below" in told


def test_what_differs_by_the_noise_is_explained(tmp_path, page) -> None:
    one = summary(tuned_us=25.9)
    told = words(Page(render_tuning([place_with(tmp_path, one)])))
    assert "25.5 → 25.9" in told and "slower by less than the noise" in told
    assert "the noise" not in words(page) and "untuned →" not in words(page)


def test_what_was_rejected(page) -> None:
    told = words(page)
    count = MAX_EXAMPLES + 2
    assert f"spills {count} {VERDICTS['spills']} {100 * count / 16:.0f} %" in told
    assert f"wrong 1 {VERDICTS['wrong']} 6 %" in told and "off by 3" in told
    assert f"{count - MAX_EXAMPLES} more are in trials.jsonl" in told
    assert "1 group was measured slower" in told and "21.0 µs, its parts take 14.0 µs" in told


def test_how_to_go_on(page) -> None:
    told = words(page)
    assert "tvm-fusion compile MODEL --work-dir DIR" in told and "db report DIR" in told


UNTUNED = {"shipped": "untuned", "tuned_us": 26.0, "untuned_us": 23.0}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"state": "stopped", "tuned_us": None}, "The run was stopped; the plan is the best so far"),
        ({"state": "running", "tuned_us": None}, "under way, or was killed"),
        ({"state": "finished", "tuned_us": None}, "not timed on this machine: only servers measured"),
        ({"shipped": "unfused", "tuned_us": 26.0}, "(26.0 µs), so it is compiled without groups"),
        ({"shipped": "default", "tuned_us": 36.0}, "(36.0 µs), so the model is compiled by it"),
        ({**UNTUNED, "tuned_us": 26.0}, "(26.0 µs), so it is compiled as without tuning"),
        (UNTUNED, "whole model, unfused → untuned µs 25.5 → 23.0"),
        ({"untuned_us": 29.0}, "whole model, untuned → tuned µs 29.0 → 14.5"),
        ({"untuned_us": 14.4}, "slower than untuned by less than the noise"),
    ],
)  # fmt: skip
def test_other_ends(tmp_path, fields, sentence) -> None:
    assert sentence in words(Page(render_tuning([place_with(tmp_path, summary(**fields))])))


def test_trials_without_a_run(tmp_path) -> None:
    place = place_with(tmp_path)
    page = Page(render_tuning([place]))
    assert "No run of a model is on record" in words(page)
    assert page.row("conv2d conv")[2] == "2 of 2" and not page.of("caption")
    with pytest.raises(DatabaseError, match="no run of a model 'other'"):
        render_tuning([place], model="other")


def test_several_models_are_one_page(tmp_path) -> None:
    place = place_with(tmp_path, summary(model="one"), summary(model="two"))
    page = Page(render_tuning([place]))
    assert [t for stack, t in page.texts if stack[-1] == "h1"] == ["2 models"]
    test_it_is_accessible(page)
    only = Page(render_tuning([place], model="two"))
    assert [t for stack, t in only.texts if stack[-1] == "h1"] == ["two"]


def test_a_page_of_no_trials(tmp_path) -> None:
    place = WorkDir(tmp_path).place("sm_90", "float16", "0.27.0")
    place.create()
    with pytest.raises(DatabaseError, match="no trials are on record there yet"):
        render_tuning([place])
    # Of a model without kernels there is something to tell.
    save_summary(place.folder, summary(kernels=(), chains=(), trials=0))
    assert "0 trials of 50" in words(Page(render_tuning([place])))


def test_a_curve_without_a_right_trial() -> None:
    curve = build_curve([trial("k", 1, None), trial("k", 2, None)], [("floor", 1.0)])
    assert curve.line == "" and len(curve.failed) == 2 and not curve.dots


def test_a_floor_far_below_does_not_flatten_a_curve() -> None:
    times = [trial("k", n, us) for n, us in enumerate((30.0, 20.0, 400.0))]
    curve = build_curve(times, [("floor", 0.01), ("untuned", 30.0), ("unfused", float("inf"))])
    assert [level.name for level in curve.levels] == ["untuned"]
    assert curve.dots[0][1] < curve.dots[1][1] and curve.dots[2][1] == min(d[1] for d in curve.dots)


def test_texts() -> None:
    assert [clock(s) for s in (0, 187.4, 3723, float("inf"))] == ["0:00", "3:07", "1:02:03", "–"]
    assert time_text(None) == time_text(float("inf")) == "–" and time_text(12.34) == "12.3"
    assert (
        gain_text(None, 1.0) == gain_text(float("inf"), 1.0) == ""
        and gain_text(2.0, 1.0) == "−50 %"
    )
    assert operators_text("abcdef") == "a + b + c + d + e + f"
    assert operators_text("abcdefgh") == "a + b + c + … 3 more … + g + h"
