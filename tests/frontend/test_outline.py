"""Bindings become functions of their own; the time for it grows with the model, not with model times groups."""

from __future__ import annotations

from tvm_fusion.compat import relax
from tvm_fusion.frontend.outline import outline
from tvm_fusion.testing.modules import ModuleBuilder


def chain(length):
    """Pairs of pointwise operators; every second pair's first result is read by what follows, too."""
    b = ModuleBuilder()
    x = b.input("x", (4, 8))
    for i in range(length):
        y = b.relu(f"first{i}", x)
        z = b.relu(f"second{i}", y)
        x = b.add(f"join{i}", y, z) if i % 2 else z
    return b.finish(x)


def pairs(mod):
    found = {}
    for binding in mod["main"].body.blocks[0].bindings:
        name = binding.var.name
        if not name.startswith("join"):
            found.setdefault("pair" + name.lstrip("firstecond"), []).append(binding.var)
    return found


def test_results_are_what_the_rest_reads():
    mod = chain(4)
    groups = pairs(mod)
    made = outline(mod, groups, {name: {"Primitive": True} for name in groups})
    results = {
        gv.name_hint: len(func.ret_ty.fields) if isinstance(func.body.body, relax.Var) and
        func.body.body.name == "results" else 1
        for gv, func in made.functions.items()
        if gv.name_hint != "main"
    }  # fmt: skip
    assert results == {"pair0": 1, "pair1": 2, "pair2": 1, "pair3": 2}


def test_what_a_value_reads_is_asked_a_few_times_for_each_binding(monkeypatch):
    asked, real = [], relax.analysis.free_vars
    mod = chain(40)
    groups = pairs(mod)
    monkeypatch.setattr(relax.analysis, "free_vars", lambda v: asked.append(v) or real(v))
    outline(mod, groups, {name: {} for name in groups})
    bindings = len(mod["main"].body.blocks[0].bindings)
    assert bindings == 100
    assert len(asked) <= 4 * bindings
