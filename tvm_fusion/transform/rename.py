"""Expression mutators that the transforms share."""

from __future__ import annotations

from typing import Any

from ..compat import Constant, PyExprMutator, mutator, relax


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

    Attributes
    ----------
    lifted : list of (Constant, Var)
        Each constant met, once, with its parameter.
    """

    def __init__(self, names: dict[Any, Any]) -> None:
        super().__init__()
        self.names = names
        self.lifted: list[tuple[Any, Any]] = []

    def visit_var_(self, op: Any) -> Any:
        """Replace one variable."""
        return self.names.get(op, op)

    def visit_dataflow_var_(self, op: Any) -> Any:
        """Replace one dataflow variable."""
        return self.names.get(op, op)

    def visit_generic_const_(self, op: Constant) -> Any:
        """Replace one constant; scalars stay."""
        if not isinstance(op.ty, relax.TensorType) or op.ty.ndim == 0:
            return op
        for constant, param in self.lifted:
            if constant.same_as(op):
                return param
        param = relax.Var(f"const{len(self.lifted)}", op.ty)
        self.lifted.append((op, param))
        return param
