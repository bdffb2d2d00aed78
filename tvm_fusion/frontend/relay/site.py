"""What a converter of an operator works with: its attributes, checked, and a way to emit Relax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ...compat import ir, relax
from ...errors import InvalidModelError, UnsupportedOperatorError
from ..canonical.constants import is_constant, to_constant, to_numpy
from .graph import Node
from .nodes import is_symbolic

#: Constants that an operator makes (zeros, full, arange) take at most this many bytes.
MAX_MADE_BYTES = 256 << 20

_REQUIRED: Any = object()


class Site:
    """The place where one operator is converted.

    TVM takes attributes as they are and may crash on them, so that every number is checked here
    for its range before TVM sees it.

    Parameters
    ----------
    node : Node
        The operator.
    version : str
        The TVM that saved the module, as ``0.8``.
    emit : callable
        Binds a Relax call under the node's name and returns the variable.
    """

    def __init__(self, node: Node, version: str, emit: Callable[[ir.Expr], ir.Expr]) -> None:
        self.node = node
        self.version = version
        self.emit = emit

    def refuse(self, reason: str) -> NoReturn:
        """Raise UnsupportedOperatorError with the operator's place."""
        raise UnsupportedOperatorError(f"{self.node.place} cannot be imported: {reason}")

    def damaged(self, reason: str) -> NoReturn:
        """Raise InvalidModelError with the operator's place."""
        raise InvalidModelError(f"{self.node.place} is not valid: {reason}")

    # -- attributes ----------------------------------------------------------------------------

    def attr(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an attribute as it is; ``default`` where the module has none or null."""
        value = self.node.attrs.get(name)
        if value is None:
            if default is _REQUIRED:
                self.damaged(f"it lacks the attribute {name!r}")
            return default
        return value

    def integer(
        self, name: str, default: Any = _REQUIRED, low: int = -(1 << 31), high: int = 1 << 31
    ) -> Any:
        """Return an integer from ``low`` to ``high``."""
        value = self.attr(name, default)
        return value if value is default else self._in_range(name, value, low, high)

    def integers(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        count: int | None = None,
        low: int = -(1 << 31),
        high: int = 1 << 31,
    ) -> Any:
        """Return a list of integers; a single one is repeated where ``count`` says how many there must be."""
        value = self.attr(name, default)
        if value is default:
            return value
        values = value if isinstance(value, list) else [value]
        if count is not None and len(values) == 1:
            values = values * count
        if count is not None and len(values) != count:
            self.damaged(f"{name} has {len(values)} numbers instead of {count}")
        return [self._in_range(name, item, low, high) for item in values]

    def _in_range(self, name: str, value: Any, low: int, high: int) -> int:
        if is_symbolic(value):
            self.damaged(f"{name} is symbolic: save the module with static shapes")
        if not isinstance(value, int) or not low <= value <= high:
            self.damaged(f"{name} is {value!r}, not an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a floating number that is no NaN."""
        value = self.attr(name, default)
        if not isinstance(value, int | float) or math.isnan(value):
            self.damaged(f"{name} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        return bool(self.attr(name, default))

    def text(self, name: str, *choices: str, default: str = "") -> str:
        """Return a text that is one of ``choices`` (none given: any)."""
        value = self.attr(name, default)
        value = default if value == "" else value
        if not isinstance(value, str):
            self.damaged(f"{name} is {value!r}, not a text")
        if choices and value not in choices:
            self.refuse(f"{name} is {value!r}; known here are {', '.join(map(repr, choices))}")
        return value

    def axis(self, name: str, rank: int, default: Any = _REQUIRED) -> int:
        """Return an axis of a tensor of this rank, counted from the front."""
        return self.axis_of(self.integer(name, default), rank)

    def axis_of(self, axis: int, rank: int) -> int:
        """Return ``axis`` counted from the front."""
        if not -rank <= axis < rank:
            self.damaged(f"axis {axis} does not exist in {rank} dimensions")
        return axis % rank

    def dtype(self, name: str, default: str) -> str:
        """Return a dtype; ``default`` where it is void."""
        value = self.text(name)
        return default if value in ("", "void") else value

    # -- operands ------------------------------------------------------------------------------

    def shape(self, operand: ir.Expr) -> tuple[int, ...]:
        """Return an operand's sizes."""
        return shape_of(operand)

    def rank(self, operand: ir.Expr, *allowed: int) -> int:
        """Return an operand's rank, which must be one of ``allowed``."""
        rank = len(shape_of(operand))
        if allowed and rank not in allowed:
            self.damaged(
                f"an operand has {rank} dimensions instead of {' or '.join(map(str, allowed))}"
            )
        return rank

    def constant(self, operand: ir.Expr, what: str) -> np.ndarray:
        """Return the value of an operand that must be known when the model is imported."""
        if not is_constant(operand):
            self.refuse(f"its {what} is computed by the model: make it a constant")
        return to_numpy(operand)

    def scalar(self, operand: ir.Expr, what: str) -> Any:
        """Return the value of a constant operand with one element."""
        value = self.constant(operand, what)
        if value.size != 1:
            self.damaged(f"its {what} has {value.size} elements instead of one")
        return value.reshape(()).item()

    # -- results -------------------------------------------------------------------------------

    def made(self, shape: Sequence[int], dtype: str, value: Any = 0) -> ir.Expr:
        """Return a constant filled with ``value``."""
        self.check_made(shape)
        return to_constant(np.full(tuple(shape), value), dtype)

    def check_made(self, shape: Sequence[int]) -> None:
        """Refuse a constant that would fill the memory."""
        if math.prod(shape) * 8 > MAX_MADE_BYTES:
            self.refuse(
                f"it makes a constant of shape {tuple(shape)}, which is over {MAX_MADE_BYTES} bytes"
            )

    def number_like(self, value: float, operand: ir.Expr) -> ir.Expr:
        """Return a scalar constant of an operand's dtype."""
        return relax.const(value, str(operand.ty.dtype))

    def cast(self, operand: ir.Expr, dtype: str) -> ir.Expr:
        """Return an operand in another dtype."""
        if str(operand.ty.dtype) == dtype:
            return operand
        return self.emit(relax.op.astype(operand, dtype))

    def reshape(self, operand: ir.Expr, shape: Sequence[int]) -> ir.Expr:
        """Return an operand with other sizes."""
        if math.prod(shape) != math.prod(shape_of(operand)) or min(shape, default=1) < 1:
            self.damaged(f"{shape_of(operand)} cannot be reshaped to {tuple(shape)}")
        if tuple(shape) == shape_of(operand):
            return operand
        return self.emit(relax.op.reshape(operand, [int(n) for n in shape]))

    def permute(self, operand: ir.Expr, axes: Sequence[int]) -> ir.Expr:
        """Return an operand with its axes in another order."""
        if sorted(axes) != list(range(len(shape_of(operand)))):
            self.damaged(f"{list(axes)} is no order of {len(shape_of(operand))} axes")
        if list(axes) == sorted(axes):
            return operand
        return self.emit(relax.op.permute_dims(operand, list(axes)))

    def relayout(self, operand: ir.Expr, layout: str, wanted: str) -> ir.Expr:
        """Return an operand of one layout in another of the same letters, as ``NHWC`` in ``NCHW``."""
        if sorted(layout) != sorted(wanted):
            self.refuse(f"the layout {layout!r} is not one of the letters {wanted}")
        self.rank(operand, len(layout))
        return self.permute(operand, [layout.index(letter) for letter in wanted])


def shape_of(operand: ir.Expr) -> tuple[int, ...]:
    """Return the sizes of a tensor expression whose type has been deduced."""
    return tuple(int(n) for n in operand.ty.shape.values)
