"""Sets of bindings → functions that ``main`` calls instead: how a fusion group stands in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compat import ir, relax, tvm, update_type, with_functions
from ..errors import PlanError
from .rename import LiftConstants

#: Attribute of the calling function that holds the original positions of its bindings.
ORDER = "tvm_fusion.order"


def outline(
    mod: tvm.IRModule,
    groups: Mapping[str, Sequence[Any]],
    attrs: Mapping[str, Mapping[str, Any]],
    func_name: str = "main",
) -> tvm.IRModule:
    """Make each set of bindings a private function, and remember where they stood.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module; it is left untouched.
    groups : mapping of str to sequence of relax.Var
        The variables that a group binds, by the name of its function. Disjoint.
    attrs : mapping of str to mapping
        Attributes of the functions.
    func_name : str
        The function to take the bindings from.

    Raises
    ------
    PlanError
        If groups need each other's results.
    """
    if not groups:
        return mod
    func = mod[func_name]
    bindings = list(func.body.blocks[0].bindings)
    position = {binding.var: i for i, binding in enumerate(bindings)}
    group_of = {position[var]: name for name, found in groups.items() for var in found}
    readers = _readers(bindings, func.body.body)
    out, order, functions = [], [], {}
    for unit in _units(bindings, position, group_of):
        order.extend(unit)
        name = group_of.get(unit[0])
        if name is None:
            out.append(bindings[unit[0]])
            continue
        inside = [bindings[i] for i in unit]
        results = _results([binding.var for binding in inside], unit, readers)
        gv, group, replaced = _extract(name, inside, results, attrs[name])
        functions[gv] = group
        out.extend(replaced)
    own = {**(dict(func.attrs.items()) if func.attrs else {}), ORDER: order}
    body = relax.SeqExpr([relax.DataflowBlock(out)], func.body.body)
    main = relax.Function(func.params, body, func.ret_ty, func.is_pure, ir.DictAttrs(own))
    result = with_functions(mod, {**dict(mod.functions.items()), **functions})
    result.update_func(mod.get_global_var(func_name), main)
    return relax.transform.Normalize()(result)


def _units(
    bindings: Sequence[Any], position: Mapping[Any, int], group_of: Mapping[int, str]
) -> list[list[int]]:
    """Contract groups and sort topologically, keeping the original order where dependence allows.

    Raises
    ------
    PlanError
        If groups need each other's results.
    """
    members: dict[Any, list[int]] = {}
    unit_of = [group_of.get(i, i) for i in range(len(bindings))]
    for i, unit in enumerate(unit_of):
        members.setdefault(unit, []).append(i)
    needs: dict[Any, list[Any]] = {}
    for unit, inside in members.items():
        reads = (v for i in inside for v in relax.analysis.free_vars(bindings[i].value))
        found = (unit_of[position[v]] for v in reads if v in position)
        needs[unit] = list(dict.fromkeys(u for u in found if u != unit))
    done: set[Any] = set()
    active: set[Any] = set()
    out: list[list[int]] = []
    for root in members:
        stack = [(root, iter(needs[root]))]
        while stack:  # an explicit stack: models have chains deeper than Python's recursion limit
            unit, rest = stack[-1]
            active.add(unit)
            following = next((u for u in rest if u not in done), None)
            if unit in done:
                stack.pop()
            elif following is None:
                done.add(unit)
                out.append(members[unit])
                stack.pop()
            elif following in active:
                path = [u for u, _ in stack]
                names = [u for u in path[path.index(following) :] if isinstance(u, str)]
                raise PlanError(
                    f"{' and '.join(names)} need their own results through other kernels; "
                    "take an operator out of one of them"
                )
            else:
                stack.append((following, iter(needs[following])))
    return out


def _readers(bindings: Sequence[Any], returned: Any) -> dict[Any, set[int]]:
    """Positions of the bindings that read each variable; what is returned stands after the last."""
    readers: dict[Any, set[int]] = {}
    for i, value in enumerate([*(binding.value for binding in bindings), returned]):
        for var in relax.analysis.free_vars(value):
            readers.setdefault(var, set()).add(i)
    return readers


def _results(
    made: Sequence[Any], unit: Sequence[int], readers: Mapping[Any, set[int]]
) -> list[Any]:
    """Variables bound in a unit that something outside it reads, in binding order."""
    inside = set(unit)
    return [
        v for v in made if readers.get(v, set()) - inside or not isinstance(v, relax.DataflowVar)
    ]


def _extract(
    name: str, inside: Sequence[Any], results: Sequence[Any], attrs: Mapping[str, Any]
) -> tuple[Any, relax.Function, list[Any]]:
    """Build the group function and the bindings that call it."""
    made = {binding.var for binding in inside}
    reads = (v for b in inside for v in relax.analysis.free_vars(b.value))
    inputs = list(dict.fromkeys(v for v in reads if v not in made))
    params = [relax.Var(v.name, v.ty) for v in inputs]
    rename = LiftConstants(dict(zip(inputs, params, strict=True)))
    body = []
    for binding in inside:
        kind = relax.Var if binding.var in results else relax.DataflowVar
        inner = kind(binding.var.name, binding.var.ty)
        body.append(relax.VarBinding(inner, rename.visit_expr(binding.value)))
        rename.names[binding.var] = inner
    outs = [rename.names[v] for v in results]
    if len(outs) == 1:
        value, ty = outs[0], outs[0].ty
    else:
        value, ty = relax.Tuple(outs), ir.TupleType([o.ty for o in outs])
        packed = relax.Var("results", ty)
        body.append(relax.VarBinding(packed, value))
        value = packed
    func = relax.Function(
        [*params, *(p for _, p in rename.lifted)],
        relax.SeqExpr([relax.DataflowBlock(body)], value),
        ty,
        attrs=ir.DictAttrs(dict(attrs)),
    )
    gv = ir.GlobalVar(name)
    update_type(gv, func.ty)
    call = relax.Call(gv, [*inputs, *(c for c, _ in rename.lifted)])
    update_type(call, ty)
    if len(results) == 1:
        return gv, func, [relax.VarBinding(results[0], call)]
    packed = relax.DataflowVar(name, ty)
    items = [relax.VarBinding(v, relax.TupleGetItem(packed, k)) for k, v in enumerate(results)]
    return gv, func, [relax.VarBinding(packed, call), *items]
