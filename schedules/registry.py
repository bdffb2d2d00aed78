"""The ordered list of templates and the loop that tries them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence

import tvm_ffi

from ..compat import Target, s_tir, structural_equal, structural_hash, tirx
from ..errors import LoweringError
from . import decisions
from .analysis import root_block
from .base import ScheduleTemplate
from .decisions import Decision, Point

_LOG = logging.getLogger(__name__)
_TEMPLATES: dict[str, ScheduleTemplate] = {}

#: What was scheduled inside `remembering`, by hash, target and what was decided: the function with its result or error.
_Known = dict[
    tuple[int, str, object], list[tuple[tirx.PrimFunc, "tuple[tirx.PrimFunc, str] | str"]]
]
_KNOWN: contextvars.ContextVar[_Known | None] = contextvars.ContextVar("known", default=None)


#: Says which template and decision a function is to be scheduled with; None for a function it does not know.
Lookup = Callable[[tirx.PrimFunc, Target], "tuple[str, Decision] | None"]
_LOOKUP: contextvars.ContextVar[Lookup | None] = contextvars.ContextVar("lookup", default=None)


@dataclasses.dataclass(frozen=True)
class Space:
    """What may be decided about a function's kernel.

    Attributes
    ----------
    template : str
        The template that writes it.
    points : tuple of Point
        Its choices, in the order in which they are made.
    """

    template: str
    points: tuple[Point, ...]


@contextlib.contextmanager
def deciding_by(lookup: Lookup) -> Iterator[None]:
    """Schedule functions as ``lookup`` says, such as with what was tuned; others as usual."""
    token = _LOOKUP.set(lookup)
    try:
        yield
    finally:
        _LOOKUP.reset(token)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Schedule equal functions once inside a ``with``.

    One compilation meets a function up to three times: when its registers are asked for, when it is
    verified, and when the model is built.
    """
    token = _KNOWN.set({}) if _KNOWN.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _KNOWN.reset(token)


def register(
    template: ScheduleTemplate, *, before: str | None = None, replace: bool = False
) -> ScheduleTemplate:
    """Add a template to the list that ``schedule`` tries.

    Tuning sends templates from outside this package to the processes that build candidates, so they may be defined
    anywhere, in a notebook too.

    Parameters
    ----------
    template : ScheduleTemplate
        The template; its name must be new.
    before : str or None
        Name of a registered template that must be tried later than this one. None appends: behind the fallback of its
        kind it is reached by name only.
    replace : bool
        Whether it may take the place of one of its name, as when a cell of a notebook runs again.

    Returns
    -------
    ScheduleTemplate
        The same object.

    Raises
    ------
    ValueError
        If the name is taken, or ``before`` names no template.
    """
    if template.name in _TEMPLATES and not replace:
        raise ValueError(
            f"a schedule template named {template.name!r} is registered already; choose another name, or say "
            "replace=True"
        )
    if before is not None and before not in _TEMPLATES:
        _load_own()
    entries = {k: v for k, v in _TEMPLATES.items() if before is None or k != template.name}
    if before is None:
        entries[template.name] = template
    elif before not in entries:
        raise ValueError(
            f"no schedule template is named {before!r}; choose from {', '.join(entries)}"
        )
    else:
        items = list(entries.items())
        items.insert(list(entries).index(before), (template.name, template))
        entries = dict(items)
    _TEMPLATES.clear()
    _TEMPLATES.update(entries)
    return template


def added() -> list[tuple[ScheduleTemplate, str | None]]:
    """Templates from outside this package, each with the name of the one that is tried next (None for the last)."""
    following = [*list(_TEMPLATES)[1:], None]
    own = f"{__package__}."
    pairs = zip(_TEMPLATES.values(), following, strict=True)
    return [pair for pair in pairs if not type(pair[0]).__module__.startswith(own)]


def set_added(wanted: Sequence[tuple[ScheduleTemplate, str | None]]) -> None:
    """Have these templates from outside this package, as `added` told them elsewhere, and no others."""
    for template, _ in added():
        del _TEMPLATES[template.name]
    _load_own()
    for template, following in reversed(wanted):
        register(template, before=following, replace=True)


def _load_own() -> None:
    """Register the templates of this package."""
    # Imported here because the template files import this module's package while it is being set up.
    from . import cpu, cuda  # noqa: F401


def templates(target: Target) -> list[ScheduleTemplate]:
    """Return the templates that may write code for ``target``, in the order in which they are tried."""
    _load_own()
    return [template for template in _TEMPLATES.values() if template.accepts(target)]


def schedule(func: tirx.PrimFunc, target: Target) -> tuple[tirx.PrimFunc, str]:
    """Schedule a function with the first template that accepts it.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function. With the attribute ``tvm_fusion.strategy`` it is a group, which must become exactly
        one kernel.
    target : Target
        Where it will run.

    Returns
    -------
    tuple of (tirx.PrimFunc, str)
        The scheduled function, with every attribute of ``func`` and ``tirx.is_scheduled``, and the template's name.

    Raises
    ------
    LoweringError
        If no template accepts the function; a group then has to be left unfused (reason ``no_template``).
    """
    if decisions.is_deciding():
        return _schedule(func, target, None)
    lookup = _LOOKUP.get()
    known = lookup(func, target) if lookup is not None else None
    # With what was looked up: the same function may be compiled with and without what was tuned.
    decided = ("looked up", *known) if known is not None else None
    return _remembered(func, target, decided, lambda: _schedule(func, target, known))


def _remembered(
    func: tirx.PrimFunc,
    target: Target,
    decided: object,
    make: Callable[[], tuple[tirx.PrimFunc, str]],
) -> tuple[tirx.PrimFunc, str]:
    """What ``make`` returns or raises for a function; inside `remembering` it runs once."""
    known = _KNOWN.get()
    if known is None:
        return make()
    twins = known.setdefault((structural_hash(func), str(target), decided), [])
    found = next((result for twin, result in twins if structural_equal(twin, func)), None)
    is_new = found is None
    if is_new:
        try:
            found = make()
        except LoweringError as error:
            found = str(error)
        twins.append((func, found))
    if isinstance(found, str):
        raise LoweringError(found)
    scheduled, name = found
    # Variables of its own for each: functions that share some could not be merged into one kernel.
    return scheduled if is_new else s_tir.renew_defs(scheduled), name


def schedule_with(
    func: tirx.PrimFunc, target: Target, template: str, decision: Decision = ()
) -> tirx.PrimFunc:
    """Schedule a function with one template, deciding as told.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function.
    target : Target
        Where it will run.
    template : str
        Name of a registered template.
    decision : Decision
        What to choose; choices that it does not name are left to the template's cost model.

    Raises
    ------
    LoweringError
        If there is no such template, it does not take the function, or the decision is none of its options.
    """
    chosen = next((t for t in templates(target) if t.name == template), None)
    if chosen is None:
        raise LoweringError(f"{target.kind.name} has no schedule template {template!r}")

    def make() -> tuple[tirx.PrimFunc, str]:
        with decisions.deciding(decision):
            result = _apply(chosen, func, _with_legal_names(func), target)
        if result is None:
            raise LoweringError(f"template {template} does not take this function as decided")
        return result, template

    # Records are tried before a plan trusts their times, and the same kernel is made again when the model is built.
    return _remembered(func, target, (template, decision), make)[0]


def spaces(func: tirx.PrimFunc, target: Target, most: int = 2) -> list[Space]:
    """Search spaces of the templates that take a function, in the order in which they are tried.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function.
    target : Target
        Where it will run.
    most : int
        Templates to ask until so many accept.
    """
    found: list[Space] = []
    named = _with_legal_names(func)
    for template in templates(target):
        with decisions.recording() as points:
            result = _apply(template, func, named, target)
        if result is not None:
            found.append(Space(template.name, tuple(points)))
        if len(found) == most:
            break
    return found


def _schedule(
    func: tirx.PrimFunc, target: Target, known: tuple[str, Decision] | None
) -> tuple[tirx.PrimFunc, str]:
    """Schedule a function that has not been met yet, as a look-up says if it knows."""
    if known is not None:
        try:
            return schedule_with(func, target, *known), known[0]
        except LoweringError as error:
            # Tuned by another version: the cost models decide.
            _LOG.warning("a tuned kernel cannot be built any more: %s", error)
    named = _with_legal_names(func)
    for template in templates(target):
        with decisions.part(template.name), decisions.attempt() as keep:
            scheduled = _apply(template, func, named, target)
            if scheduled is not None:
                keep()
                return scheduled, template.name
    raise LoweringError(
        f"no schedule template for {target.kind.name} makes one kernel of this function; leave it ungrouped"
    )


def _apply(
    template: ScheduleTemplate, func: tirx.PrimFunc, named: tirx.PrimFunc, target: Target
) -> tirx.PrimFunc | None:
    """Apply a template to a function with legal names; None where it does not fit."""
    try:
        result = template.apply(named, target)
    except s_tir.ScheduleError as error:
        # A primitive refused: the function has a form that the template did not foresee, and a later one may fit.
        _LOG.info("template %s failed: %s", template.name, str(error).splitlines()[0])
        return None
    if result is None:
        return None
    scheduled = result.mod["main"] if isinstance(result, s_tir.Schedule) else result
    if root_block(func) is not None:
        scheduled = _with_root(scheduled)
    if target.kind.name == "cuda":
        # Our own pipeline does this to every kernel; whoever takes scheduled functions into another needs it here.
        # Imported late, as the templates are (see `templates`).
        from .cuda.exact_math import exact_functions

        scheduled = exact_functions(scheduled)
    if target.kind.name == "llvm":
        from .cpu.threads import serial_where_small

        scheduled = serial_where_small(scheduled, target)
    # A Schedule works on a module, whose entry function gets a symbol that ours must not keep.
    if func.attrs is None or "global_symbol" not in func.attrs:
        scheduled = scheduled.without_attr("global_symbol")
    lost = _used(named) - _used(scheduled)
    if lost:
        names = ", ".join(named.params[i].name for i in sorted(lost))
        raise LoweringError(f"template {template.name} lost {names}; please report this")
    attrs = dict(func.attrs.items()) if func.attrs is not None else {}
    return scheduled.with_attrs({**attrs, "tirx.is_scheduled": True})


def _used(func: tirx.PrimFunc) -> set[int]:
    """Numbers of the parameters that occur in the body."""
    numbers = {param.__chandle__(): number for number, param in enumerate(func.params)}
    found: set[int] = set()

    def note(var: tirx.Var) -> None:
        if (number := numbers.get(var.__chandle__())) is not None:
            found.add(number)

    tvm_ffi.structural_walk(func.body, (tirx.Var, note))
    return found


def _with_root(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put a body without blocks into a root block, where passes of Relax look for one."""
    if root_block(func) is not None:
        return func
    root = s_tir.SBlock([], [], [], "root", func.body)
    return func.with_body(s_tir.SBlockRealize([], True, root))


def _with_legal_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give variables names that C accepts, and parameters distinct ones.

    TVM prints the names of a model (``conv1/7x7``) into CUDA code as they are, and orders the parameters of a kernel
    by their names.
    """
    renamed: dict[int, tirx.Var] = {}

    def note(var: tirx.Var) -> None:
        if not (var.name.isidentifier() and var.name.isascii()):
            name = re.sub(r"\W", "_", var.name, flags=re.ASCII)
            renamed[var.__chandle__()] = tirx.Var(
                name if name.isidentifier() else f"v_{name}", var.ty
            )

    tvm_ffi.structural_walk(func, (tirx.Var, note))
    taken: set[str] = set()
    for param in func.params:
        name = renamed.get(param.__chandle__(), param).name
        if name in taken:
            name = next(new for n in itertools.count(1) if (new := f"{name}_{n}") not in taken)
            renamed[param.__chandle__()] = tirx.Var(name, param.ty)
        taken.add(name)
    if not renamed:
        return func
    return tvm_ffi.structural_map(func, (tirx.Var, lambda var: renamed.get(var.__chandle__(), var)))
