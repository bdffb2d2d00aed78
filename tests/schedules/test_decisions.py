"""Choices of templates: found by recording, made by deciding."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import tvm_ffi
from tvm import relax
from tvm_fusion.schedules import decisions, registry
from tvm_fusion.schedules.decisions import Point, alternatives, attempt, deciding, part, recording

from tvm_fusion.errors import LoweringError
from tvm_fusion.targets import parse_target, with_variant


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int
    steps: tuple[int, ...]
    scope: str
    cost: float


SIZES = [
    Size(8, (1, 2), "shared", 0.5),
    Size(4, (1, 2), "shared", 0.7),
    Size(4, (2, 2), "local", 1.0),
]


def ranked(count):
    """The sizes, best first."""
    return SIZES[:count]


def test_the_first_option_without_a_decision():
    assert alternatives("size", ranked) == SIZES[:1]
    assert alternatives("size", ranked, count=2) == SIZES[:2]


def test_recording_notes_every_option():
    with recording() as points:
        assert alternatives("size", ranked, microseconds=lambda s: s.cost) == SIZES[:1]
        alternatives("lanes", lambda count: [32, 64][:count])
    size, lanes = points
    assert size.options[2] == (
        ("size.rows", 4), ("size.steps.0", 2), ("size.steps.1", 2), ("size.scope", "local")
    )  # fmt: skip
    assert size.microseconds == (0.5, 0.7, 1)
    assert lanes == Point("lanes", ((("lanes", 32),), (("lanes", 64),)))


def test_deciding_returns_any_recorded_option():
    with recording() as points:
        alternatives("size", ranked)
    for option, size in zip(points[0].options, SIZES, strict=True):
        with deciding(option):
            assert alternatives("size", ranked, count=3) == [size]
    assert not decisions.is_deciding()


def test_what_is_no_option_is_refused():
    with pytest.raises(LoweringError, match=r"size\.rows=5.*tune it again"):
        with deciding((("size.rows", 5),)):
            alternatives("size", ranked)


def test_a_part_that_nobody_asks_for_is_refused():
    with pytest.raises(LoweringError, match="depth is no choice"):
        with deciding((("lanes", 64), ("depth", 2))):
            alternatives("lanes", lambda count: [32, 64][:count])


def test_parts_and_repeated_choices_have_names_of_their_own():
    with recording() as points:
        for number in range(2):
            with part(f"member{number}"):
                alternatives("size", ranked)
        alternatives("size", ranked)
        alternatives("size", ranked)
    assert [p.name for p in points] == ["member0.size", "member1.size", "size", "size2"]


def test_choices_of_a_failed_attempt_are_forgotten():
    with recording() as points:
        with attempt():
            alternatives("size", ranked)
        with attempt() as keep:
            alternatives("size", ranked)
            keep()
    assert [p.name for p in points] == ["size"]


def product(emit, x, y):
    """A matrix product with a bias and ReLU."""
    return emit(relax.op.nn.relu(emit(relax.op.matmul(x, y))))


FUNCTIONS = {
    "tensor_core": (product, ((64, 128), (128, 64)), "float16"),
    "multiply_add": (product, ((64, 128), (128, 64)), "float32"),
    "rows": (lambda e, x: e(relax.op.nn.softmax(x)), ((64, 256),), "float16"),
    "elementwise": (lambda e, x: e(relax.op.tanh(x)), ((64, 256),), "float16"),
    "pooling": (partial(lambda e, x: e(relax.op.nn.max_pool2d(x, (2, 2)))), ((1, 8, 8, 8),), "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spaces_of_templates(cuda, name):
    make, shapes, dtype = FUNCTIONS[name]
    func, target = (
        cuda.function(make, *shapes, dtype=dtype),
        with_variant(parse_target("cuda:sm_90")),
    )
    default, template = registry.schedule(func, target)
    space = registry.spaces(func, target)[0]
    assert space.template == template == name
    first = tuple(entry for point in space.points for entry in point.options[0])
    again = registry.schedule_with(func, target, name, first)
    assert tvm_ffi.structural_equal(default, again)
    other = tuple(entry for point in space.points for entry in point.options[-1])
    assert first != other
    assert not tvm_ffi.structural_equal(default, registry.schedule_with(func, target, name, other))


def test_a_lookup_decides(cuda):
    func, target = cuda.function(product, (64, 128), (128, 64)), parse_target("cuda:sm_90")
    space = registry.spaces(func, target)[0]
    decision = space.points[0].options[3]
    with registry.deciding_by(lambda f, t: (space.template, decision)):
        found, template = registry.schedule(func, target)
    assert template == space.template
    assert tvm_ffi.structural_equal(found, registry.schedule_with(func, target, template, decision))
    assert not tvm_ffi.structural_equal(found, registry.schedule(func, target)[0])


def test_an_outdated_record_leaves_the_choice_to_the_model(cuda, caplog):
    func, target = cuda.function(product, (64, 128), (128, 64)), parse_target("cuda:sm_90")
    with registry.deciding_by(lambda f, t: ("multiply_add", (("tile.thread_rows", 99),))):
        found, _ = registry.schedule(func, target)
    assert tvm_ffi.structural_equal(found, registry.schedule(func, target)[0])
    assert "cannot be built any more" in caplog.text


def test_members_of_a_kernel_are_decided_one_by_one(cuda):
    def apart(emit, a, b, x, y):
        return relax.Tuple([product(emit, a, b), product(emit, x, y)])

    shapes = ((64, 128), (128, 64), (64, 96), (96, 128))
    func, target = cuda.function(apart, *shapes, dtype="float16"), parse_target("cuda:sm_90")
    space = registry.spaces(func, target)[0]
    assert space.template == "partitioned"
    names = [point.name for point in space.points]
    assert names == ["member0.tensor_core.tile", "member1.tensor_core.tile"]
    default = registry.schedule(func, target)[0]
    for point in space.points:
        changed = registry.schedule_with(func, target, "partitioned", point.options[5])
        assert not tvm_ffi.structural_equal(default, changed)
