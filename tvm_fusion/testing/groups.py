"""Groups for tests of templates: a Relax expression as the one fused PrimFunc that a group becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..compat import BlockBuilder, relax, tirx, tvm
from ..transform.legalize import legalize

Make = Callable[..., "relax.Expr | Sequence[relax.Expr]"]


def group_module(shapes: Sequence[Sequence[int]], dtype: str, make: Make) -> tvm.IRModule:
    """Return a module whose ``main`` calls one group, lowered as LowerGroups does.

    Parameters
    ----------
    shapes : sequence of shapes
        The group's inputs.
    dtype : str
        Type of every input.
    make : callable
        ``make(builder, *inputs)`` emits the group's operators and returns its result, or a list of results.
    """
    builder = BlockBuilder()

    def variables() -> list[relax.Var]:
        return [
            relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)
        ]

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


def run_on_cpu(
    mod: tvm.IRModule, arrays: Sequence[np.ndarray], target: tvm.target.Target | str = "llvm"
) -> list:
    """Compile a module for the CPU and return the results of ``main`` as numpy arrays."""
    machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [result.numpy()] if hasattr(result, "numpy") else [part.numpy() for part in result]
