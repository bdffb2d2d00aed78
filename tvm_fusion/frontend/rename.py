"""Expression mutators that import and the transforms share."""

from __future__ import annotations

from typing import Any

from ..compat import Constant, PyExprMutator, ir, mutator, relax

#: Operators whose legalisation makes scalar constants immediates; all others take them as tensors.
_SCALARS_AS_IMMEDIATES = frozenset(
    f"relax.{name}"
    for name in (
        "add", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "dequantize", "divide", "equal", "floor_divide",
        "floor_mod", "full", "full_like", "greater", "greater_equal", "left_shift", "less", "less_equal",
        "log_add_exp", "logical_and", "logical_or", "logical_xor", "maximum", "minimum", "mod", "multiply",
        "not_equal", "power", "quantize", "right_shift", "subtract",
    )
)  # fmt: skip


@mutator
class Substitute(PyExprMutator):
    """Replaces variables by other expressions.

    Parameters
    ----------
    names : dict
        Replacement by variable; may grow while the mutator is in use.
    """

    def __init__(self, names: dict[Any, Any]) -> None:
        super().__init__()
        self.names = names

    def visit_var_(self, op: Any) -> Any:
        """Replace one variable."""
        return self.names.get(op, op)

    def visit_dataflow_var_(self, op: Any) -> Any:
        """Replace one dataflow variable."""
        return self.names.get(op, op)


@mutator
class LiftConstants(PyExprMutator):
    """Replaces variables, and tensor constants by new parameters (FuseTIR takes no tensor constant).

    Parameters
    ----------
    names : dict
        Replacement by variable.

    Scalars become immediates in binary operators; elsewhere (``where``, ``take``) TVM keeps them as
    tensors, so they are lifted too.

    Attributes
    ----------
    lifted : list of (Constant, Var)
        Each constant met, once, with its parameter.
    """

    def __init__(self, names: dict[Any, Any]) -> None:
        super().__init__()
        self.names = names
        self.lifted: list[tuple[Any, Any]] = []
        self._keep_scalars = True

    def visit_var_(self, op: Any) -> Any:
        """Replace one variable."""
        return self.names.get(op, op)

    def visit_dataflow_var_(self, op: Any) -> Any:
        """Replace one dataflow variable."""
        return self.names.get(op, op)

    def visit_call_(self, call: Any) -> Any:
        """Replace the operands of one call."""
        self._keep_scalars = isinstance(call.op, ir.Op) and call.op.name in _SCALARS_AS_IMMEDIATES
        return super().visit_call_(call)

    def visit_generic_const_(self, op: Constant) -> Any:
        """Replace one constant."""
        scalar = isinstance(op.ty, relax.TensorType) and op.ty.ndim == 0
        if not isinstance(op.ty, relax.TensorType) or (scalar and self._keep_scalars):
            return op
        for constant, param in self.lifted:
            if constant.same_as(op):
                return param
        param = relax.Var(f"const{len(self.lifted)}", op.ty)
        self.lifted.append((op, param))
        return param
