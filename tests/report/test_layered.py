"""The layered drawing: rows follow the edges, nothing overlaps, straight where it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.report.layout import Layout, layered


def rows(layout: Layout) -> dict[float, list[str]]:
    """Names by centre line, for boxes of one height."""
    out: dict[float, list[str]] = {}
    for name, (_, y) in sorted(layout.boxes.items(), key=lambda item: item[1][::-1]):
        out.setdefault(y, []).append(name)
    return out


def sizes(names: str, width: float = 40, height: float = 20) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(names, (width, height))


def test_nothing() -> None:
    assert layered({}, []) == Layout({}, {}, 0.0, 0.0)


def test_a_chain_is_straight() -> None:
    layout = layered({"a": (40, 20), "b": (90, 30), "c": (60, 20)}, [("a", "b"), ("b", "c")])
    assert [y for _, y in layout.boxes.values()] == [0, 48, 106]
    centres = {
        name: x + w / 2
        for (name, (x, _)), w in zip(layout.boxes.items(), (40, 90, 60), strict=True)
    }
    assert len(set(centres.values())) == 1
    assert (layout.width, layout.height) == (90, 126)
    assert layout.routes["a", "b"] == ((45, 20), (45, 20), (45, 48), (45, 48))


def test_branches_stand_side_by_side_around_their_fork() -> None:
    layout = layered(sizes("abcd"), [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    assert list(rows(layout).values()) == [["a"], ["b", "c"], ["d"]]
    x = {name: box[0] for name, box in layout.boxes.items()}
    assert x["b"] + x["c"] == pytest.approx(2 * x["a"]) == pytest.approx(2 * x["d"])


def test_a_long_edge_passes_beside_the_boxes() -> None:
    layout = layered(sizes("abcd"), [*itertools.pairwise("abcd"), ("a", "d")])
    points = layout.routes["a", "d"]
    assert len(points) == 8  # out, two rows passed, in
    for name in "bc":
        (x, y) = layout.boxes[name]
        beside = [px for px, py in points if y <= py <= y + 20]
        assert beside and not any(x <= px <= x + 40 for px in beside)


def test_an_input_stands_just_above_its_reader() -> None:
    layout = layered(sizes("iabcd"), [("i", "d"), *itertools.pairwise("abcd")])
    assert layout.boxes["i"][1] == layout.boxes["c"][1]


def test_crossings_are_removed() -> None:
    edges = [("a", "d"), ("b", "c"), ("r", "a"), ("r", "b")]
    layout = layered(sizes("rabcd"), edges)
    x = {name: box[0] for name, box in layout.boxes.items()}
    assert (x["a"] < x["b"]) == (x["d"] < x["c"])


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        layered(sizes("ab"), [("a", "b"), ("b", "a")])


@st.composite
def drawings(draw):
    count = draw(st.integers(1, 25))
    names = [f"n{i}" for i in range(count)]
    boxes = {
        n: (draw(st.integers(10, 120)), draw(st.integers(10, 80))) for n in names
    }  # fmt: skip
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = draw(st.lists(pairs, max_size=50))
    return boxes, [(names[min(e)], names[max(e)]) for e in edges]


@given(drawings())
def test_any_graph(drawing) -> None:
    boxes, edges = drawing
    layout = layered(boxes, edges)
    assert layout == layered(boxes, edges)
    placed = [(x, y, *boxes[name]) for name, (x, y) in layout.boxes.items()]
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(placed, 2):
        apart = x + w <= u + 1e-6 or u + s <= x + 1e-6 or y + h <= v + 1e-6 or v + t <= y + 1e-6
        assert apart
    for x, y, w, h in placed:
        assert -1e-6 <= x and x + w <= layout.width + 1e-6 and y + h <= layout.height + 1e-6
    for (a, b), points in layout.routes.items():
        assert layout.boxes[a][1] + boxes[a][1] < layout.boxes[b][1]
        assert all(p[1] <= q[1] + 1e-6 for p, q in itertools.pairwise(points))
    assert set(layout.routes) == {(a, b) for a, b in edges if a != b}
