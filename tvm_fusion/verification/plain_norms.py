"""Row normalisations written out, for references in float64, which TVM's own definitions refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..compat import PyExprMutator, ir, mutator, relax, tvm, with_functions


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WriteOutNorms")
class WriteOutNorms:
    """Replace layer, group, instance and RMS normalisation by means, squares and roots."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function."""
        out = with_functions(mod)
        for gv, func in mod.functions.items():
            if isinstance(func, relax.Function):
                out.update_func(gv, _WriteOut().visit_expr(func))
        return out


@mutator
class _WriteOut(PyExprMutator):
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        write = {
            "relax.nn.layer_norm": self._layer_norm,
            "relax.nn.rms_norm": self._rms_norm,
            "relax.nn.group_norm": self._group_norm,
            "relax.nn.instance_norm": self._instance_norm,
        }.get(name)
        return write(call) if write else call

    def _normalised(self, x: Any, axes: Sequence[int], epsilon: float, centred: bool = True) -> Any:
        """(x - mean) / sqrt(mean of squares + epsilon) over some axes."""
        emit, op = self.builder_.emit, relax.op
        if centred:
            x = emit(op.subtract(x, emit(op.mean(x, list(axes), keepdims=True))))
        squares = emit(op.mean(emit(op.multiply(x, x)), list(axes), keepdims=True))
        root = emit(op.sqrt(emit(op.add(squares, relax.const(epsilon, str(x.ty.dtype))))))
        return emit(op.divide(x, root))

    def _scaled(self, value: Any, attrs: Any, scale: Any, shift: Any | None) -> Any:
        emit = self.builder_.emit
        if getattr(attrs, "scale", True):
            value = emit(relax.op.multiply(value, scale))
        if shift is not None and getattr(attrs, "center", True):
            value = emit(relax.op.add(value, shift))
        return value

    def _layer_norm(self, call: Any) -> Any:
        x, gamma, beta = call.args
        value = self._normalised(x, call.attrs.axes, float(call.attrs.epsilon))
        return self._scaled(value, call.attrs, gamma, beta)

    def _rms_norm(self, call: Any) -> Any:
        x, weight = call.args
        value = self._normalised(x, call.attrs.axes, float(call.attrs.epsilon), centred=False)
        return self._scaled(value, call.attrs, weight, None)

    def _instance_norm(self, call: Any) -> Any:
        x, gamma, beta = call.args
        axis = int(call.attrs.channel_axis)
        value = self._normalised(x, call.attrs.axes, float(call.attrs.epsilon))
        return self._scaled(value, call.attrs, *self._along(x, axis, gamma, beta))

    def _group_norm(self, call: Any) -> Any:
        """Normalise [.., groups, channels / groups, ..] over the named axes and the channels of a group."""
        x, gamma, beta = call.args
        shape, axis = [int(d) for d in x.ty.shape], int(call.attrs.channel_axis) % x.ty.ndim
        groups = int(call.attrs.num_groups)
        split = [*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :]]
        axes = [
            axis + 1,
            *(a % len(shape) + (a % len(shape) > axis) for a in map(int, call.attrs.axes)),
        ]
        grouped = self.builder_.emit(relax.op.reshape(x, split))
        value = self._normalised(grouped, axes, float(call.attrs.epsilon))
        value = self.builder_.emit(relax.op.reshape(value, shape))
        return self._scaled(value, call.attrs, *self._along(x, axis, gamma, beta))

    def _along(self, x: Any, axis: int, *operands: Any) -> list[Any]:
        """Reshape per-channel operands so that they broadcast along an axis."""
        shape = [1] * x.ty.ndim
        out = []
        for operand in operands:
            shape[axis] = math.prod(int(d) for d in operand.ty.shape)
            out.append(self.builder_.emit(relax.op.reshape(operand, list(shape))))
        return out
