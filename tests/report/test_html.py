"""The HTML page: one file, well-formed, escaped, small, and its numbers are the plan's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import tvm_fusion as tf
from tvm_fusion.errors import PlanError
from tvm_fusion.frontend import onnx as onnx_frontend
from tvm_fusion.planner import Plan, TargetInfo
from tvm_fusion.report import html as html_module
from tvm_fusion.report import render_html
from tvm_fusion.report.words import LETTERS, OPTION_WORDS, mib
from tvm_fusion.testing.html_page import Page
from tvm_fusion.testing.models import light_model
from tvm_fusion.testing.modules import parallel_convs

CSS = (Path(html_module.__file__).parent / "templates/plan.css").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(plan, graph) -> Page:
    return Page(render_html(plan, graph))


def test_the_page_needs_nothing_from_outside(plan, graph, page) -> None:
    for tag, attrs in page.elements:
        for name in ("src", "href", "action", "data", "xlink:href", "srcset", "poster"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    assert not re.search(r"@import|url\(|https?://|//cdn", render_html(plan, graph))
    (policy,) = [a for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy["content"].startswith("default-src 'none'")


def test_names_are_escaped(plan, graph, page, hostile) -> None:
    text = render_html(plan, graph)
    assert "<script>alert" not in text and len(page.of("script")) == 1
    assert any(hostile in title for title in page.titles())
    assert page.row("vertical")  # the table survived the name
    headings = [t for stack, t in page.texts if stack[-1] == "h1"]
    assert headings == [plan.model]
    (script,) = [t for stack, t in page.texts if stack[-1] == "script"]
    assert "alert" not in script and "stem" not in script


def test_it_is_accessible(page) -> None:
    assert page.of("html") == [{"lang": "en"}]
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.of("th"))
    for attrs in page.of("svg"):
        assert attrs["role"] == "img" and attrs["aria-label"]
    for attrs in page.of("div"):
        if "scroll" in attrs.get("class", ""):
            assert attrs["tabindex"] == "0" and attrs["aria-label"]
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"][1:] for attrs in page.of("a")]
    assert links and set(links) <= set(ids)


def test_a_strategy_is_also_a_letter(page) -> None:
    badges = [t for stack, t in page.texts if stack[-1] == "b" and t.strip()]
    assert set(badges) == set(LETTERS.values()) == {"V", "H", "X", "C"}
    heads = [t for stack, t in page.texts if stack[-3:] == ("svg", "g", "text")]
    assert {"V0", "X0", "C0", "H0"} <= set(heads)


def test_the_totals_are_those_of_the_plan(plan, page) -> None:
    t = plan.totals
    row = page.row("whole model")
    assert row[1:5] == [
        str(len(plan.groups)), str(plan.operators), f"{t.launches_before} → {t.launches_after}",
        f"{mib(t.bytes_before)} → {mib(t.bytes_after)}",
    ]  # fmt: skip
    assert row[6] == f"{t.predicted_us_before:.1f} → {t.predicted_us_after:.1f}"
    text = " ".join(t for stack, t in page.texts if "dl" in stack)
    assert f"{t.launches_before} → {t.launches_after}" in " ".join(text.split())


def test_the_rows_of_the_strategies_add_up(plan, page) -> None:
    for group in plan.groups:  # one of each
        row = page.row(f"{LETTERS[group.strategy]} {group.strategy}")
        assert row[1:4] == [
            "1", str(len(group.nodes)), f"{group.launches_before} → {group.launches_after}",
        ]  # fmt: skip
        assert row[7] == f"{group.predicted_us_before - group.predicted_us_after:.1f}"
    rest = page.row("not fused")
    assert rest[2:4] == ["1", "1 → 1"] and rest[6:8] == ["1.5 → 1.5", "–"]


def test_every_group_has_a_row_a_card_and_two_dots(plan, page) -> None:
    for index, group in enumerate(plan.groups):
        (cells,) = [cells for attrs, cells in page.rows if attrs.get("id") == f"row-{index}"]
        tidy = [" ".join(cell.split()) for cell in cells]
        assert group.id in tidy[0]
        assert tidy[2] == f"{group.launches_before} → {group.launches_after}"
        assert tidy[3] == f"{mib(group.bytes_before)} → {mib(group.bytes_after)}"
        assert tidy[4] == f"{group.intensity_before:.1f} → {group.intensity_after:.1f}"
        assert tidy[5] == f"{group.predicted_us_before:.1f} → {group.predicted_us_after:.1f}"
        for key, value in group.options.items():
            assert OPTION_WORDS[key][value] in tidy[1]
        for node in group.nodes:
            assert " ".join(node.split()) in tidy[1]
        marked = [name for name, a in page.elements if a.get("data-group") == str(index)]
        assert marked.count("g") == marked.count("tr") == 1 and marked.count("circle") == 2
    (cells,) = [cells for attrs, cells in page.rows if attrs.get("id") == "row-2"]
    assert "V vertical, 2.2 µs alone" in " ".join(cells[1].split())


def test_every_operator_is_in_the_drawing_once(graph, page) -> None:
    titles = [title.split("\n")[0] for title in page.titles()]
    for operator in graph.operators:
        assert titles.count(operator.name) == 1, operator.name
    assert "input image" in titles and "output softmax" in titles
    (stem,) = [t for t in page.titles() if t.startswith("stem\n")]
    assert "conv2d → float32[1,8,16,16]" in stem and "in fused_vertical_0" in stem
    (flat,) = [t for t in page.titles() if t.startswith("flat\n")]
    assert "no work" in flat
    (soft,) = [t for t in page.titles() if t.startswith("softmax\n")]
    assert "a kernel of its own: no_partner, memory-bound" in soft


def test_refusals_by_reason(page) -> None:
    blocks = {a["data-reason"] for a in page.of("details") if "data-reason" in a}
    options = {a["value"] for a in page.of("option")}
    assert options == blocks | {""} == {"", "no_template", "work_ratio"}
    summary = " ".join(t for stack, t in page.texts if "summary" in stack)
    assert "the branches of a join do too unequal amounts of work" in summary
    tables = " ".join(" ".join(cells) for _, cells in page.rows)
    assert "4.25 to 1" in tables and "ratio 5.5" in tables and "n 12,345" in tables


def test_many_refusals_are_cut(plan, graph, monkeypatch) -> None:
    monkeypatch.setattr(html_module, "MAX_REFUSALS", 1)
    text = render_html(plan, graph)
    assert "5.5 to 1" not in text and "1 more are in the JSON plan" in text


def test_the_search_and_the_regions_are_told(plan, graph, page) -> None:
    text = " ".join(t for _, t in page.texts)
    assert "3 regions of competing groups: 2 solved to the least predicted time, 1 within" in text
    assert page.row("a … c_relu")[1:3] == ["serial", "fused_compound_0"]
    bare = dataclasses.replace(plan, regions=(), search=type(plan.search)())
    assert "How it was chosen" not in render_html(bare, graph)
    assert "#regions" not in render_html(bare, graph)


def test_measured_and_compiled_numbers_appear_where_they_are_known(plan, measured, graph) -> None:
    static, full = render_html(plan, graph), render_html(measured, graph)
    for text in ("measured µs", "measured time", "spilled B"):
        assert text in full and text not in static
    page = Page(full)
    (cells,) = [cells for attrs, cells in page.rows if attrs.get("id") == "row-0"]
    tidy = [" ".join(cell.split()) for cell in cells]
    assert tidy[6:] == ["9.5 → 4.8", "50 est. 40", "0", "1024 est. 2048"]
    assert "measured, some.template" in tidy[0]
    assert page.row("whole model")[8] == "41.5 → 22.2"
    assert "Registers estimated within 20 % on average (1 kernel)" in full
    assert sum(a.get("class") == "bad" for a in page.of("td")) == 1  # the one that spills
    assert "est. 40" in static


def test_a_plan_without_groups(graph) -> None:
    plan = Plan("empty", TargetInfo("llvm"), "float32", 3)
    page = Page(render_html(plan, graph))
    text = " ".join(t for _, t in page.texts)
    assert "Nothing is fused" in text and "Everything is fused" in text
    assert not page.row("whole model")[7].strip("–")


def test_an_unknown_device_has_no_roofline(plan, graph) -> None:
    unknown = dataclasses.replace(plan, target=TargetInfo("cuda", "sm_12345"))
    text = render_html(unknown, graph)
    assert 'id="roofline"' not in text and 'href="#roofline"' not in text
    assert 'id="roofline"' in render_html(plan, graph)


def test_a_plan_of_another_model_is_refused(plan) -> None:
    with pytest.raises(PlanError, match="which the model lacks; plan this model again"):
        render_html(plan, parallel_convs(2, spatial=8))


def test_a_module_is_taken_as_well_as_a_graph() -> None:
    module = parallel_convs(3, relu=True, spatial=16)
    plan = tf.plan(module, "cuda:sm_80")
    assert Page(render_html(plan, module)).row("whole model")
    assert render_html(plan, module) == render_html(plan, module)


def test_a_whole_network_is_small() -> None:
    module = onnx_frontend.load(light_model("resnet50"), dtype="float16")
    plan = tf.plan(module, "cuda:sm_90", name="resnet50")
    text = render_html(plan, module)
    assert len(text.encode()) < 400_000
    page = Page(text)
    assert sum(
        "card" in a.get("class", "").split() and "data-group" in a for a in page.of("g")
    ) == (len(plan.groups))


def _themes() -> list[dict[str, str]]:
    """The colours of the light and the dark theme."""
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    assert len(blocks) == 2
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def _luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(k * c for k, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", _themes(), ids=["light", "dark"])
def test_text_has_contrast(theme) -> None:
    """WCAG AA asks for 4.5."""
    grounds = ["page", "panel", "stripe"]
    pairs = [(ink, ground) for ink in ("ink", "soft", "bad", "cross") for ground in grounds]
    for strategy in LETTERS:
        pairs += [(strategy, "panel"), (strategy, f"{strategy}-tint"), ("ink", f"{strategy}-tint")]
        pairs.append(("badge-ink", strategy))
    for ink, ground in [*pairs, ("soft", "vertical-tint")]:
        assert _contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
