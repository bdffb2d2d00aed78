"""Choices of templates: tiles, threads, which template at all.

A template asks for `alternatives` wherever it could do otherwise, and takes the first one that works. Usually they come
as its cost model ranks them. Inside `deciding`, there is only what a decision says; inside `recording`, all of them are
noted. So the search space of a kernel is found by scheduling it once, and any point of it is reached by scheduling it
again.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..errors import LoweringError

T = TypeVar("T")

#: What a decision consists of, by name, such as ``"tile.rows"``, in the order of the choices.
Decision = tuple[tuple[str, int | str], ...]

#: Options of one choice that are searched: those that the cost model ranks first. So many that they differ: of the
#: tiles of a product the first 256 are predicted within 30 % of each other, and look alike.
MOST_OPTIONS = 1024


@dataclasses.dataclass(frozen=True)
class Point:
    """One choice of a template.

    Attributes
    ----------
    name : str
        Unique within the kernel.
    options : tuple of Decision
        What may be chosen, best first by the template's model.
    microseconds : tuple of float
        What the model predicts for each, launch included; empty where it only ranks.
    """

    name: str
    options: tuple[Decision, ...]
    microseconds: tuple[float, ...] = ()


@dataclasses.dataclass
class _State:
    """What holds in a context."""

    decision: dict[str, int | str] | None = None
    points: list[Point] | None = None
    prefix: str = ""
    used: set[str] = dataclasses.field(default_factory=set)
    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def unique(self, name: str) -> str:
        """The name of a choice that may be met several times."""
        self.met[name] += 1
        return name if self.met[name] == 1 else f"{name}{self.met[name]}"


_STATE: contextvars.ContextVar[_State | None] = contextvars.ContextVar("decisions", default=None)


def alternatives(
    name: str,
    ranked: Callable[[int], Sequence[T]],
    *,
    count: int = 1,
    values: Callable[[T], object] = lambda option: option,
    microseconds: Callable[[T], float] | None = None,
) -> Sequence[T]:
    """Options of a choice, to be tried in their order.

    Parameters
    ----------
    name : str
        Name of the choice; the second one of a name in a kernel gets a 2 behind it, and so on.
    ranked : callable
        Returns so many options at most, best first.
    count : int
        How many are tried when nobody decides.
    values : callable
        Returns what an option consists of: a number or word, or a dataclass or tuple of them.
    microseconds : callable, optional
        Returns the predicted time of an option.

    Returns
    -------
    sequence
        Empty when there are none.

    Raises
    ------
    LoweringError
        Inside `deciding`, if there is no such option.
    """
    state = _STATE.get()
    if state is None:
        return ranked(count)
    name = state.unique(state.prefix + name)
    options = ranked(MOST_OPTIONS)
    named = [_named(name, values(option)) for option in options]
    if state.points is not None and options:
        times = tuple(map(microseconds, options)) if microseconds is not None else ()
        state.points.append(Point(name, tuple(named), times))
    wanted = _part(state, name)
    if not wanted:
        return options[:count]
    state.used |= wanted.keys()
    for option, own in zip(options, named, strict=True):
        if dict(own) == wanted:
            return [option]
    given = ", ".join(f"{key}={value}" for key, value in wanted.items())
    raise LoweringError(f"{given} is no option of this kernel; tune it again")


#: Arguments of `alternatives` for options that are tiles with a predicted time.
OF_CHOICE = {
    "values": operator.attrgetter("tile"),
    "microseconds": operator.attrgetter("microseconds"),
}


def _part(state: _State, name: str) -> dict[str, int | str]:
    """What a decision says of one choice."""
    decision = state.decision or {}
    return {k: v for k, v in decision.items() if k == name or k.startswith(f"{name}.")}


def _named(name: str, value: object) -> Decision:
    """What an option consists of, by name; parts of a tuple are numbered, estimates (floats) are left out."""
    # A thousand options of some ten numbers each come here for every kernel: plain numbers first.
    if isinstance(value, int):
        return ((name, int(value)),)
    if value is None or isinstance(value, float):
        return ()
    if isinstance(value, str):
        return ((name, value),)
    if isinstance(value, tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    elif isinstance(value, numbers.Integral):  # of numpy or TVM
        return ((name, int(value)),)
    else:
        parts = [(key, getattr(value, key)) for key in _field_names(type(value))]
    found: list[tuple[str, int | str]] = []
    for key, part in parts:
        found += _named(f"{name}.{key}", part)
    return tuple(found)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def is_deciding() -> bool:
    """Whether choices are recorded or decided."""
    return _STATE.get() is not None


@contextlib.contextmanager
def deciding(decision: Decision) -> Iterator[None]:
    """Let templates choose what a decision says, and their first option where it says nothing.

    Raises
    ------
    LoweringError
        At the end, if nobody asked for a part of the decision.
    """
    state = _State(decision=dict(decision))
    token = _STATE.set(state)
    try:
        yield
    finally:
        _STATE.reset(token)
    if unused := state.decision.keys() - state.used:
        raise LoweringError(f"{min(unused)} is no choice of this kernel; tune it again")


@contextlib.contextmanager
def recording(decision: Decision = ()) -> Iterator[list[Point]]:
    """Collect the choices that templates make, with all their options."""
    points: list[Point] = []
    token = _STATE.set(_State(decision=dict(decision), points=points))
    try:
        yield points
    finally:
        _STATE.reset(token)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Give the choices of a kernel's part names of their own, such as ``member0.tile``."""
    state = _STATE.get()
    if state is None:
        yield
        return
    before, state.prefix = state.prefix, f"{state.prefix}{name}."
    try:
        yield
    finally:
        state.prefix = before


@contextlib.contextmanager
def attempt() -> Iterator[Callable[[], None]]:
    """Forget the choices of a template that does not fit; it calls what it gets when it does."""
    state = _STATE.get()
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    count = len(state.points or ()) if state is not None else 0
    met = state.met.copy() if state is not None else None
    try:
        yield keep
    finally:
        if state is not None and not kept:
            state.met = met
            if state.points is not None:
                del state.points[count:]
