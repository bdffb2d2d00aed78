"""A function's structure is read once, and again when a schedule has changed it."""

from __future__ import annotations

from tvm_fusion.schedules import analysis
from tvm_fusion.schedules.analysis import structure, without_inlined

from tvm_fusion.compat import s_tir, te


def chain():
    """Two pointwise operators."""
    x = te.placeholder((8, 16), "float32")
    y = te.compute((8, 16), lambda i, j: x[i, j] + 1)
    return te.create_prim_func([x, te.compute((8, 16), lambda i, j: y[i, j] * 2)])


def test_it_is_read_once_for_each_schedule_of_a_function(monkeypatch):
    func, read = chain(), []
    real = analysis._describe
    monkeypatch.setattr(analysis, "_describe", lambda *a: read.append(a) or real(*a))
    one, two = s_tir.Schedule(func), s_tir.Schedule(func)
    assert structure(one) == structure(one) == structure(two)
    # Handles are of the schedule that was asked about: they work there.
    for sch in (one, two):
        for block in structure(sch).blocks:
            assert sch.get(block.handle).name_hint == block.name
    assert len(read) <= 2 * 2  # a schedule may have a copy of the function


def test_it_is_read_again_when_the_schedule_changes_the_function():
    sch = s_tir.Schedule(chain())
    before = structure(sch)
    sch.compute_inline(before.blocks[0].handle)
    after = structure(sch)
    assert [b.name for b in after.blocks] == [before.blocks[1].name]
    assert after.blocks[0].reads != before.blocks[1].reads
    sch.reorder(*reversed(sch.get_loops(after.blocks[0].handle)))
    assert structure(sch) == after


def test_few_functions_are_kept():
    for _ in range(2 * analysis._MOST_DESCRIBED):
        structure(s_tir.Schedule(chain()))
    assert len(analysis._DESCRIBED) == analysis._MOST_DESCRIBED


def test_after_inlining_only_the_consumers_are_read_anew(monkeypatch):
    x = te.placeholder((8, 16), "float32")
    cheap = te.compute((8, 16), lambda i, j: x[i, j] + 1)
    left = te.compute((8, 16), lambda i, j: cheap[i, j] * 2)
    right = te.compute((16, 8), lambda j, i: cheap[i, j] - x[i, j])
    far = te.compute((8, 16), lambda i, j: left[i, j] + 3)
    sch = s_tir.Schedule(te.create_prim_func([x, right, far]))
    before = structure(sch)
    (block,) = (b for b in before.blocks if len(before.consumers(b)) == 2)
    sch.compute_inline(block.handle)
    read, real = [], analysis._describe
    monkeypatch.setattr(analysis, "_describe", lambda *a: read.append(a) or real(*a))
    after = without_inlined(sch, before, block)
    assert len(read) == 2
    assert after == structure(sch)
    assert [b.is_output for b in after.blocks].count(True) == 2
