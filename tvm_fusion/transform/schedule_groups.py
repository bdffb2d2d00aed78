"""PrimFuncs → scheduled PrimFuncs, by the first template that accepts each."""

from __future__ import annotations

from collections.abc import Collection

from ..compat import Target, relax, tirx, tvm, with_functions
from ..errors import LoweringError
from ..schedules import schedule
from ..targets import parse_target
from .pack_constants import pack_constants
from .strip_fusion import STRATEGY

#: TVM's pattern kind "opaque": FuseOps of a default pipeline must not fuse what is scheduled
#: already.
_OPAQUE = 8

#: Attribute that names the template that scheduled a function.
TEMPLATE = "tvm_fusion.template"


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ScheduleGroups")
class ScheduleGroups:
    """Schedule every PrimFunc that has no schedule yet.

    Parameters
    ----------
    target : Target, str or None
        Target to schedule for; None takes the current one.

    Raises
    ------
    LoweringError
        If no template makes one kernel of a group.
    """

    def __init__(self, target: Target | str | None = None) -> None:
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Schedule a module."""
        out, failures = schedule_functions(mod, parse_target(self.target))
        for name, message in failures.items():
            raise LoweringError(f"{name}: {message}")
        return out


def schedule_functions(
    mod: tvm.IRModule, target: Target, default: Collection[str] = ()
) -> tuple[tvm.IRModule, dict[str, str]]:
    """Schedule what a template accepts, except the functions named in ``default``.

    Reshapes stay as they are, so that TVM turns them into views; an operator outside groups that no
    template accepts is left to TVM's default schedule.

    Returns
    -------
    mod : tvm.IRModule
        The module with scheduled functions.
    failures : dict of str to str
        Message by name of each group that could not become one kernel.
    """
    out = with_functions(mod)
    failures: dict[str, str] = {}
    for gv, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or _is_done(func) or gv.name_hint in default:
            continue
        is_group = func.attrs is not None and STRATEGY in func.attrs
        if not is_group and relax.analysis.has_reshape_pattern(func):
            continue
        try:
            scheduled, template = schedule(func, target)
        except (LoweringError, tvm.error.InternalError) as err:
            # TVM itself makes functions that it then finds malformed (gathers of tensors without elements).
            if is_group:
                failures[gv.name_hint] = str(err).strip().splitlines()[-1]
            continue
        if is_group and template == "fallback" and _form(func) == "attention":
            failures[gv.name_hint] = "no template for attention accepts this group as it is written"
            continue
        attrs = {TEMPLATE: template, "op_pattern": _OPAQUE}
        out.update_func(out.get_global_var(gv.name_hint), scheduled.with_attrs(attrs))
    return pack_constants(out), failures


def _form(func: tirx.PrimFunc) -> str:
    return str((func.attrs.get("tvm_fusion.options") or {}).get("form", ""))


def _is_done(func: tirx.PrimFunc) -> bool:
    return func.attrs is not None and bool(func.attrs.get("tirx.is_scheduled", False))
