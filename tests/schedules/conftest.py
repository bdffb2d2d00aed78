"""What the tests of CUDA templates share: real functions, and a check of everything that must hold."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm_fusion.schedules import limits, schedule, templates

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.compat import Constant, relax
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module, packed_arrays
from tvm_fusion.testing.modules import as_group
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.verification.reference import Reference

#: Largest error relative to the largest value, by type of the output.
TOLERANCE = {
    "float32": 2e-5,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "int64": 0,
    "int32": 0,
    "bool": 0,
}


class LoweredGroup:
    """A group of all operators of a module as a PrimFunc, lowered like LowerGroups does, with the arrays of its call.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module, the group's operators.
    strategy : str
        Of the group.
    dtype : str
        The module's type.
    **options : str
        The group's options.
    """

    def __init__(self, mod, strategy: str, dtype: str = "float32", **options: str) -> None:
        self.mod, self.dtype = mod, dtype
        lowered, kernels = lower_groups(as_group(mod, strategy, **options))
        self.func = lowered[kernels[f"fused_{strategy}_0"]]
        main = lowered["main"]
        (call,) = [
            binding.value
            for binding in main.body.blocks[0].bindings
            if isinstance(binding.value, relax.Call)
        ]
        self._operands, self._params = call.args[1].fields, main.params

    def arrays(self, make: Callable) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The model's inputs and the kernel's (bfloat16 as uint16), of values by ``make(number, shape)``."""
        kind = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        given = {}
        for number, param in enumerate(self._params):
            given[param] = make(number, [int(n) for n in param.ty.shape]).astype(kind)
        operands = [
            a.value.numpy() if isinstance(a, Constant) else given[a] for a in self._operands
        ]
        bits = [a.view("uint16") if a.dtype == ml_dtypes.bfloat16 else a for a in operands]
        return list(given.values()), bits


def random_values(number: int, shape) -> np.ndarray:
    """Normally distributed values."""
    return np.random.default_rng(number).standard_normal(shape)


def coded_positions(number: int, shape) -> np.ndarray:
    """Values that tell where they stand: a wrong index gives a wrong result, not a similar one."""
    return (np.arange(np.prod(shape)).reshape(shape) % (211 + 12 * number)) / 105.0 - 1.0


class CudaChecks:
    """Makes functions from operators and checks what a template makes of them."""

    target = staticmethod(parse_target)

    @staticmethod
    def function(
        build: Callable,
        *shapes: tuple[int, ...],
        dtype: str | tuple[str, ...] = "float32",
        group: bool = True,
        with_builder: bool = False,
    ):
        """PrimFunc of what ``build(emit, *inputs)`` or ``build(builder, *inputs)`` emits, lowered like a group."""
        make = build if with_builder else lambda builder, *inputs: build(builder.emit, *inputs)
        func = group_function(group_module(shapes, dtype, make))
        return func.with_attr("tvm_fusion.strategy", "vertical") if group else func

    @staticmethod
    def template(name: str):
        """A registered template by name."""
        return next(t for t in templates(parse_target("cuda:sm_90")) if t.name == name)

    @staticmethod
    def inputs(func, outputs: int = 1, seed: int = 0) -> list[np.ndarray]:
        """Random arrays for the inputs of a function; integers from 0 to 15."""
        rng = np.random.default_rng(seed)

        def values(shape: list[int], dtype: str) -> np.ndarray:
            whole = dtype.startswith("int")
            found = rng.integers(0, 16, shape) if whole else rng.standard_normal(shape)
            return found.astype(dtype)

        return [
            values([int(n) for n in param.ty.shape], str(param.ty.dtype))
            for param in list(func.params)[:-outputs]
        ]

    @staticmethod
    def expected(func, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """What the unscheduled function computes on the CPU."""
        built = tvm.compile(
            tvm.IRModule({"f": func.with_attr("global_symbol", "f")}), target="llvm"
        )
        results = [
            tvm.runtime.tensor(np.zeros([int(n) for n in param.ty.shape], str(param.ty.dtype)))
            for param in list(func.params)[len(inputs) :]
        ]
        built["f"](*map(tvm.runtime.tensor, inputs), *results)
        return [result.numpy() for result in results]

    def check(self, func, template: str, outputs: int = 1, arch: str = "sm_90") -> str:
        """Schedule by the registry: one kernel of the named template, right in both thread orders. Return its code."""
        target = parse_target(f"cuda:{arch}")
        scheduled, name = schedule(func, target)
        assert name == template
        source = cuda_emulation.cuda_source(scheduled, target)
        assert len(cuda_emulation.kernels(source)) == 1
        launch = cuda_emulation.launch_of(scheduled)
        assert np.prod(launch.block) <= limits(target).threads
        inputs = self.inputs(func, outputs)
        expected = self.expected(func, inputs)
        for backward in (False, True):
            results = cuda_emulation.run(
                scheduled, inputs, target, source=source, backward=backward
            )
            for result, reference in zip(results, expected, strict=True):
                reference64 = reference.astype("float64")
                scale = max(1e-6, np.abs(reference64).max())
                error = np.abs(result.astype("float64") - reference64).max() / scale
                assert error <= TOLERANCE[str(reference.dtype)], (
                    f"error {error}, backward={backward}"
                )
        return source

    #: Makes a PrimFunc of a module whose operators are one annotated group.
    group = LoweredGroup

    @staticmethod
    def check_group(
        group: LoweredGroup, template: str, positions: bool = False, arch: str = "sm_90"
    ) -> str:
        """Schedule a group: one kernel by the template, with the values of the unfused operators in float32.

        The inputs are random, or tell their positions. Returns the kernel's code.
        """
        target = parse_target(f"cuda:{arch}")
        scheduled, name = schedule(group.func, target)
        assert name == template
        return CudaChecks.check_kernel(group, scheduled, target, positions)

    @staticmethod
    def check_kernel(
        group: LoweredGroup, scheduled, target, positions: bool = False, backwards=(False, True)
    ) -> str:
        """Check the values of a group's kernel, in these thread orders. Return its code."""
        source = cuda_emulation.cuda_source(scheduled, target)
        assert len(cuda_emulation.kernels(source)) == 1
        inputs, arrays = group.arrays(coded_positions if positions else random_values)
        arrays = packed_arrays(scheduled, arrays)
        expected = Reference(group.mod, group.dtype)(*inputs)
        for backward in backwards:
            results = cuda_emulation.run(
                scheduled, arrays, target, source=source, backward=backward
            )
            for result, reference in zip(results, expected, strict=True):
                if group.dtype == "bfloat16":
                    result = result.view(ml_dtypes.bfloat16)
                error = np.abs(result.astype("float64") - reference).max()
                assert error <= TOLERANCE[group.dtype] * np.abs(reference).max(), (
                    f"error {error}, backward={backward}"
                )
        return source

    @staticmethod
    def resources(func, arch: str):
        """What the only kernel of a function takes, by nvcc."""
        target = parse_target(f"cuda:{arch}")
        scheduled, _ = schedule(func, target)
        (kernel,) = kernel_resources(cuda_emulation.cuda_source(scheduled, target), arch).values()
        assert kernel.spill_bytes == 0
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= limits(target).shared_bytes
        return kernel


@pytest.fixture(scope="session")
def cuda() -> CudaChecks:
    """The checks."""
    return CudaChecks()
