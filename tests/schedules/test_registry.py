"""The list of templates: order, names, refusals."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm_fusion.schedules import (
    ScheduleTemplate,
    limits,
    register,
    registry,
    remembering,
    schedule,
    templates,
)

from tvm_fusion.compat import structural_equal
from tvm_fusion.errors import LoweringError
from tvm_fusion.targets import parse_target


class Refuses(ScheduleTemplate):
    """Takes nothing."""

    name = "refuses"
    kind = "cuda"
    min_arch = 80

    def apply(self, func, target):
        """Refuse."""
        return None


@pytest.fixture
def unchanged(monkeypatch):
    """A copy of the list, so that a test may add to it."""
    templates(parse_target("llvm"))
    monkeypatch.setattr(registry, "_TEMPLATES", dict(registry._TEMPLATES))


def test_a_name_is_registered_once(unchanged):
    register(Refuses())
    with pytest.raises(ValueError, match="refuses"):
        register(Refuses())


def test_a_template_can_be_put_before_another(unchanged):
    register(Refuses(), before="matmul")
    names = [template.name for template in templates(parse_target("cuda:sm_90"))]
    assert names.index("refuses") == names.index("matmul") - 1
    with pytest.raises(ValueError, match="no schedule template"):
        register(type("Other", (Refuses,), {"name": "other"})(), before="nothing")


def test_a_template_takes_the_place_of_its_namesake_where_it_may(unchanged):
    register(Refuses(), before="matmul")
    order = list(registry._TEMPLATES)
    again = register(Refuses(), replace=True)
    assert registry._TEMPLATES["refuses"] is again and list(registry._TEMPLATES) == order
    register(Refuses(), before="elementwise", replace=True)
    names = list(registry._TEMPLATES)
    assert names.index("refuses") == names.index("elementwise") - 1 and len(names) == len(order)


def test_templates_of_this_package_are_there_to_be_named_first():
    """In a fresh process, ``before`` may name one that nothing has loaded yet."""
    text = (
        "from tvm_fusion.schedules import ScheduleTemplate, register, registry\n"
        "class Mine(ScheduleTemplate):\n"
        "    name, kind = 'mine', 'llvm'\n"
        "    def apply(self, func, target): return None\n"
        "register(Mine(), before='cpu_rows')\n"
        "print([name for name in registry._TEMPLATES if name in ('mine', 'cpu_rows')])\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['mine', 'cpu_rows']"


def test_what_was_added_is_told_from_the_templates_of_this_package(unchanged):
    assert registry.added() == []
    first, last = register(Refuses(), before="matmul"), register(Counts())
    assert registry.added() == [(first, "matmul"), (last, None)]


def test_templates_fit_the_target(unchanged):
    register(Refuses())
    cuda = templates(parse_target("cuda:sm_90"))
    assert {template.kind for template in cuda} == {"cuda"}
    assert "refuses" not in [t.name for t in templates(parse_target("cuda:sm_75"))]
    assert {template.kind for template in templates(parse_target("llvm"))} == {"llvm"}


def test_the_fallback_comes_last():
    assert templates(parse_target("cuda:sm_90"))[-1].name == "fallback"


def test_importing_the_folder_under_a_second_name_fails(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    monkeypatch.delitem(sys.modules, "schedules", raising=False)
    with pytest.raises(ImportError):
        importlib.import_module("schedules")


def test_schedule_keeps_attributes_and_leaves_the_function_untouched(cuda):
    func = cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (4, 8))
    text = func.script()
    scheduled, name = schedule(func, parse_target("cuda:sm_90"))
    assert name == "elementwise"
    assert scheduled.attrs["tirx.is_scheduled"]
    assert scheduled.attrs["tvm_fusion.strategy"] == "vertical"
    assert "global_symbol" not in scheduled.attrs
    assert func.script() == text


class Counts(Refuses):
    """Notes what it is asked for."""

    name = "counts"

    def __init__(self):
        self.asked = 0

    def apply(self, func, target):
        """Count."""
        self.asked += 1


def test_equal_functions_are_scheduled_once_inside_remembering(cuda, unchanged):
    counts = register(Counts(), before="elementwise")
    target, older = parse_target("cuda:sm_90"), parse_target("cuda:sm_80")
    func, twin = (cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (4, 8)) for _ in "ab")
    other = cuda.function(lambda e, x: e(relax.op.tanh(x)), (4, 8))
    with remembering(), remembering():
        first, name = schedule(func, target)
        again, same = schedule(twin, target)
        assert counts.asked == 1 and name == same
        tvm.ir.assert_structural_equal(first, again)
        assert not any(a.same_as(b) for a, b in zip(first.params, again.params, strict=True))
        schedule(other, target)
        schedule(func, older)
        assert counts.asked == 3
    schedule(func, target)
    assert counts.asked == 4


def test_what_was_decided_is_remembered_by_its_decision(cuda, unchanged):
    counts = register(Counts(), before="elementwise")
    target = parse_target("cuda:sm_90")
    func = cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (64, 256))
    ((_, points),) = [(s.template, s.points) for s in registry.spaces(func, target, 1)]
    decisions = [point.options[i] for point in points for i in (0, -1)]
    assert decisions[0] != decisions[1]
    with remembering():
        first = registry.schedule_with(func, target, "elementwise", decisions[0])
        again = registry.schedule_with(func, target, "elementwise", decisions[0])
        other = registry.schedule_with(func, target, "elementwise", decisions[1])
        tvm.ir.assert_structural_equal(first, again)
        assert not structural_equal(first, other)
        with registry.deciding_by(lambda *_: ("elementwise", decisions[1])):
            tvm.ir.assert_structural_equal(schedule(func, target)[0], other)
        with pytest.raises(LoweringError, match="does not take"):
            registry.schedule_with(func, target, counts.name)
        for _ in range(2):
            with pytest.raises(LoweringError, match="no choice"):
                registry.schedule_with(func, target, "elementwise", (("nothing", 1),))


def test_a_function_is_remembered_by_what_a_look_up_says(cuda, unchanged):
    """With and without what was tuned it is two kernels; where a look-up knows nothing it is one."""
    counts = register(Counts(), before="elementwise")
    target = parse_target("cuda:sm_90")
    func = cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (64, 256))
    (space,) = registry.spaces(func, target, 1)
    points, counts.asked = space.points, 0
    last = points[0].options[-1]
    with remembering():
        untuned, _ = schedule(func, target)
        with registry.deciding_by(lambda *_: None):
            tvm.ir.assert_structural_equal(schedule(func, target)[0], untuned)
        assert counts.asked == 1
        with registry.deciding_by(lambda *_: ("elementwise", last)):
            tuned, _ = schedule(func, target)
            tvm.ir.assert_structural_equal(schedule(func, target)[0], tuned)
        assert not structural_equal(tuned, untuned)
        tvm.ir.assert_structural_equal(schedule(func, target)[0], untuned)
        assert counts.asked == 1


def test_a_refusal_is_remembered_too(cuda, unchanged):
    func = cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (4, 8))
    registry._TEMPLATES.clear()
    counts = register(Counts())
    with remembering():
        for _ in range(2):
            with pytest.raises(LoweringError, match="leave it ungrouped"):
                schedule(func, parse_target("cuda:sm_90"))
    assert counts.asked == 1


def test_no_template_is_an_error_that_says_what_to_do(cuda, unchanged):
    func = cuda.function(lambda e, x: e(relax.op.nn.relu(x)), (4, 8))
    registry._TEMPLATES.clear()
    register(Refuses())
    with pytest.raises(LoweringError, match="leave it ungrouped"):
        schedule(func, parse_target("cuda:sm_90"))


def test_names_of_a_model_become_names_of_c(cuda):
    data = te.placeholder((4, 8), name="conv1/7x7:0")
    total = te.placeholder((4, 8), name="1")
    func = te.create_prim_func(
        [data, total, te.compute((4, 8), lambda i, j: data[i, j] + total[i, j], name="a b")]
    )
    source = cuda.check(func.without_attr("global_symbol"), "elementwise")
    assert "conv1_7x7_0_ptr" in source
    assert "v_1_ptr" in source


def test_limits_come_from_the_target():
    bounds = limits(parse_target("cuda:sm_75"))
    assert (bounds.threads, bounds.warp, bounds.shared_bytes, bounds.multiprocessors) == (
        1024,
        32,
        49152,
        40,
    )
    small = {
        "kind": "cuda",
        "arch": "sm_80",
        "max_threads_per_block": 256,
        "max_shared_memory_per_block": 16384,
    }
    assert (limits(parse_target(small)).threads, limits(parse_target(small)).shared_bytes) == (
        256,
        16384,
    )


class Forgets(ScheduleTemplate):
    """Returns a function that reads its first parameter twice, and its second never."""

    name = "forgets"
    kind = "cuda"

    def apply(self, func, target):
        """Put the first parameter in the second one's place."""
        first, second = func.params[:2]
        swap = (tirx.Var, lambda var: first if var.same_as(second) else var)
        return func.with_body(tvm_ffi.structural_map(func.body, swap))


def test_a_kernel_that_loses_a_parameter_is_refused(cuda, unchanged):
    func = cuda.function(lambda e, x, y: e(relax.op.add(x, y)), (4, 8), (4, 8))
    schedule(func, parse_target("cuda:sm_90"))
    register(Forgets(), before="elementwise")
    with pytest.raises(LoweringError, match="template forgets lost"):
        schedule(func, parse_target("cuda:sm_90"))


def test_parameters_get_names_of_their_own(cuda):
    x = te.placeholder((4, 8), name="x")
    y = te.placeholder((4, 8), name="x")
    func = te.create_prim_func([x, y, te.compute((4, 8), lambda i, j: x[i, j] + y[i, j], name="x")])
    scheduled, _ = schedule(func, parse_target("cuda:sm_90"))
    assert len({param.name for param in scheduled.params}) == 3
