"""Groups for tests of templates: a Relax expression as the one fused PrimFunc that a group becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..compat import BlockBuilder, ir, relax, tirx, tvm
from ..schedules.base import PACKED
from ..transform.legalize import legalize
from ..transform.legalize_horizontal import merged_conv2d, select_branch

Make = Callable[..., "relax.Expr | Sequence[relax.Expr]"]


def group_module(
    shapes: Sequence[Sequence[int]], dtype: str | Sequence[str], make: Make
) -> tvm.IRModule:
    """Return a module whose ``main`` calls one group, lowered as LowerGroups does.

    Parameters
    ----------
    shapes : sequence of shapes
        The group's inputs.
    dtype : str or sequence of str
        Type of every input, or of each.
    make : callable
        ``make(builder, *inputs)`` emits the group's operators and returns its result, or a list of
        results.
    """
    builder = BlockBuilder()
    dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else dtype

    def variables() -> list[relax.Var]:
        types = (relax.TensorType(s, d) for s, d in zip(shapes, dtypes, strict=True))
        return [relax.Var(f"x{i}", ty) for i, ty in enumerate(types)]

    inputs = variables()
    with builder.function("group", inputs, attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            made = make(builder, *inputs)
            result = builder.emit_output(
                relax.Tuple(list(made)) if isinstance(made, list | tuple) else made
            )
        builder.emit_func_output(result)
    group = builder.get().get_global_var("group")
    inputs = variables()
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.Call(group, inputs)))
        builder.emit_func_output(result)
    fused = relax.transform.FuseTIR()(legalize(builder.get()))
    return relax.transform.DeadCodeElimination()(fused)


def emit_joined(
    builder: BlockBuilder,
    x: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None,
    epilogue: Sequence[str],
    join: str,
    attrs: ir.Attrs,
    dtype: str,
) -> relax.Expr:
    """Emit a merged convolution and its joined branches as LowerGroups does.

    Parameters
    ----------
    builder : BlockBuilder
        Builder of the group's function.
    x, weight : relax.Expr
        Input, and the members' weights stacked in front.
    bias : relax.Expr or None
        ``[b, f]``.
    epilogue : sequence of str
        Names of unary Relax operators, in order.
    join : str
        Name of the binary Relax operator that joins the branches.
    attrs : Attrs
        Attributes of one member's ``conv2d``.
    dtype : str
        Type of the result.
    """
    axis = 3 if str(attrs.data_layout) == "NHWC" else 1
    value = builder.emit(builder.call_te(merged_conv2d, x, weight, attrs))
    if bias is not None:
        count, channels = (int(extent) for extent in bias.ty.shape)
        shape = [1] * value.ty.ndim
        shape[axis : axis + 2] = count, channels
        wide = builder.emit(relax.op.astype(builder.emit(relax.op.reshape(bias, shape)), "float32"))
        value = builder.emit(relax.op.add(value, wide))
    for name in epilogue:
        value = builder.emit(getattr(relax.op.nn, name)(value))
    parts = [
        builder.emit(builder.call_te(select_branch, value, b, axis))
        for b in range(int(weight.ty.shape[0]))
    ]
    total = parts[0]
    for part in parts[1:]:
        total = builder.emit(getattr(relax.op, join)(total, part))
    return total if dtype == "float32" else relax.op.astype(total, dtype)


def group_function(mod: tvm.IRModule) -> tirx.PrimFunc:
    """Return the only PrimFunc of a module."""
    (func,) = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    return func


def with_group_function(mod: tvm.IRModule, func: tirx.PrimFunc) -> tvm.IRModule:
    """Return the module with its only PrimFunc replaced."""
    (name,) = [name for name, old in mod.functions.items() if isinstance(old, tirx.PrimFunc)]
    replaced = tvm.IRModule(dict(mod.functions.items()))
    replaced.update_func(name, func)
    return replaced


def packed_arrays(scheduled: tirx.PrimFunc, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the inputs of a function as its kernel wants them: constants may be permuted (``PackConstants``)."""
    wanted = scheduled.attrs.get(PACKED) if scheduled.attrs is not None else None
    axes = {int(number): [int(axis) for axis in order] for number, order in (wanted or {}).items()}
    return [
        np.ascontiguousarray(np.transpose(array, axes[number])) if number in axes else array
        for number, array in enumerate(arrays)
    ]


def run_on_cpu(
    mod: tvm.IRModule, arrays: Sequence[np.ndarray], target: tvm.target.Target | str = "llvm"
) -> list:
    """Compile a module for the CPU and return the results of ``main`` as numpy arrays."""
    machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [result.numpy()] if hasattr(result, "numpy") else [part.numpy() for part in result]
