"""What the tests of tensor-core kernels share: functions with arrays and expected values, and the check of a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm_fusion.schedules import limits, schedule
from tvm_fusion.schedules.base import CONSTANTS, PACKED
from tvm_fusion.schedules.cuda.tensor_core.packing import pack
from tvm_fusion.schedules.cuda.tensor_core.recognition import products
from tvm_fusion.schedules.cuda.tensor_core.template import kernel_of
from tvm_fusion.schedules.cuda.tensor_core.tile import problem_of
from tvm_fusion.schedules.registry import schedule_with

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.tensor_tiles import Problem, Tile
from tvm_fusion.guards.warpgroup_tiles import warpgroup_tiles
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module, packed_arrays
from tvm_fusion.testing.modules import as_group
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.verification.reference import lower_reference

#: Half the distance of neighbouring values, relative, by type; outputs may be off by a few of it.
_HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20, "int32": 0.0}


def random_values(number: int, shape: Sequence[int]) -> np.ndarray:
    """Normally distributed values."""
    return np.random.default_rng(number).standard_normal(shape)


def coded_positions(number: int, shape: Sequence[int]) -> np.ndarray:
    """Small integers that tell places apart: sums of their products are exact, and a wrong index gives another one."""
    places = np.arange(np.prod(shape, dtype=int))
    mixed = (places * (2 * number + 7) + places // 11 * 3 + places // 97 + number) * 2654435761
    return ((mixed >> 9) % 5 - 2).reshape(shape)


@dataclasses.dataclass
class Function:
    """A function under test.

    Attributes
    ----------
    func : tirx.PrimFunc
        Unscheduled.
    constants : tuple of int
        Numbers of its parameters that are constants.
    outputs : int
        How many of its last parameters are outputs.
    make : callable
        From ``make(number, shape)`` to the arrays of its inputs, of its own types.
    expect : callable
        From those arrays to the outputs, computed in a wider type.
    """

    func: tvm.tirx.PrimFunc
    constants: tuple[int, ...]
    outputs: int
    make: Callable[[Callable], list[np.ndarray]]
    expect: Callable[[list[np.ndarray]], list[np.ndarray]]

    @property
    def unpacked(self) -> Function:
        """The same function, of which no parameter is known to be constant."""
        return dataclasses.replace(self, constants=(), func=self.func.without_attr(CONSTANTS))


class TensorCoreChecks:
    """Makes functions and checks the kernels made of them."""

    #: Values of the inputs of ``check``.
    positions, random = staticmethod(coded_positions), staticmethod(random_values)

    @staticmethod
    def function(
        build: Callable,
        *shapes: Sequence[int],
        dtype: str = "float16",
        constants: Sequence[int] = (),
        outputs: int = 1,
    ) -> Function:
        """What ``build(emit, *inputs)`` emits, lowered like a group; its reference is the same in float64."""

        def lower(dtype: str) -> tvm.tirx.PrimFunc:
            make = lambda builder, *inputs: build(builder.emit, *inputs)  # noqa: E731
            return group_function(group_module(shapes, dtype, make))

        func = lower(dtype).with_attr("tvm_fusion.strategy", "vertical")
        if constants:
            func = func.with_attr(CONSTANTS, sorted(constants))
        kind = _numpy(dtype)
        wide = lower("float64")

        def expect(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return _on_cpu(wide, [array.astype("float64") for array in arrays])

        return Function(
            func,
            tuple(constants),
            outputs,
            lambda make: [make(i, shape).astype(kind) for i, shape in enumerate(shapes)],
            expect,
        )

    @staticmethod
    def group(mod: tvm.IRModule, strategy: str, dtype: str = "float16", **options) -> Function:
        """The whole module as one group; its reference is the unfused operators in a wider type."""
        lowered, kernels = lower_groups(as_group(mod, strategy, **options))
        func = lowered[kernels[f"fused_{strategy}_0"]]
        main = lowered["main"]
        (call,) = [
            binding.value
            for binding in main.body.blocks[0].bindings
            if isinstance(binding.value, tvm.relax.Call)
        ]
        operands = list(call.args[1].fields)
        kind = _numpy(dtype)
        wide, wide_type = lower_reference(mod, dtype)
        machine = tvm.relax.VirtualMachine(tvm.compile(wide, target="llvm"), tvm.cpu())
        places = [_place(operands, param) for param in main.params]

        def make(values: Callable) -> list[np.ndarray]:
            return [
                operand.value.numpy()
                if isinstance(operand, tvm.ir.expr.GenericConst)
                else values(number, _shape(operand)).astype(kind)
                for number, operand in enumerate(operands)
            ]

        def expect(arrays: list[np.ndarray]) -> list[np.ndarray]:
            given = [tvm.runtime.tensor(arrays[place].astype(wide_type)) for place in places]
            result = machine["main"](*given)
            found = [result] if hasattr(result, "numpy") else list(result)
            return [array.numpy() for array in found]

        numbers = func.attrs.get(CONSTANTS) or ()
        outputs = len(func.params) - len(operands)
        return Function(func, tuple(int(n) for n in numbers), outputs, make, expect)

    # -- kernels ----------------------------------------------------------------------------------

    @staticmethod
    def target(arch: str):
        """A CUDA target."""
        return parse_target(f"cuda:{arch}")

    @staticmethod
    def scheduled(function: Function, template: str | None = "tensor_core", arch: str = "sm_90"):
        """The registry's kernel; it must be of a template, if one is named."""
        made, name = schedule(function.func, parse_target(f"cuda:{arch}"))
        assert template is None or name == template
        return made

    @staticmethod
    def by_template(function: Function, template: str = "tensor_core", arch: str = "sm_90"):
        """The kernel of a template, whatever the registry would choose."""
        return schedule_with(function.func, parse_target(f"cuda:{arch}"), template)

    @classmethod
    def on_arch(cls, function: Function, arch: str):
        """The registry's kernel for an arch; on sm_90a one with warpgroup instructions, where they fit.

        The registry would not choose these for functions as small as those of the tests.
        """
        found = warpgroup_tiles(cls.problem(function), DEVICES["sm_90"]) if arch == "sm_90a" else ()
        return cls.tiled(function, found[0].tile) if found else cls.scheduled(function, arch=arch)

    @staticmethod
    def tiled(function: Function, tile: Tile):
        """The kernel of one tile, which must be possible for the function."""
        form = products(function.func)
        form, packed = pack(form, set(function.constants))
        made = kernel_of(form, tile).without_attr("global_symbol")
        return made.with_attr(PACKED, packed) if packed else made

    @staticmethod
    def problem(function: Function) -> Problem:
        """What the search for a tile knows of a function."""
        form, _ = pack(products(function.func), set(function.constants))
        return problem_of(form)

    @staticmethod
    def source(scheduled, arch: str = "sm_90") -> str:
        """CUDA source of a kernel, which is one kernel of a legal size."""
        target = parse_target(f"cuda:{arch}")
        source = cuda_emulation.cuda_source(scheduled, target)
        assert len(cuda_emulation.kernels(source)) == 1
        launch = cuda_emulation.launch_of(scheduled)
        bounds = limits(target)
        assert np.prod(launch.block) <= bounds.threads
        assert launch.shared <= bounds.dynamic_shared_bytes
        return source

    def check(
        self,
        function: Function,
        scheduled,
        *,
        blocks: int | None = None,
        values: Sequence[Callable] = (coded_positions, random_values),
        tolerance: float = 4.0,
        arch: str = "sm_90",
    ) -> str:
        """Run a kernel in both thread orders and compare it with the reference; return its source.

        ``tolerance`` is in half units of the last place of the largest value.
        """
        target = parse_target(f"cuda:{arch}")
        source = self.source(scheduled, arch)
        types = [str(param.ty.dtype) for param in scheduled.params[-function.outputs :]]
        for number, make in enumerate(values):
            inputs = function.make(make)
            expected = function.expect(inputs)
            arrays = permuted(scheduled, inputs)
            # The orders differ only where threads race, and the checks for that do not depend on values.
            for backward in (False, True) if number == 0 else (False,):
                results = cuda_emulation.run(
                    scheduled, arrays, target, source=source, backward=backward, blocks=blocks
                )
                found = list(zip(results, expected, types, strict=True))
                if blocks is not None:
                    # Of several outputs, the chosen blocks may write some.
                    found = [part for part in found if not np.ma.getmaskarray(part[0]).all()]
                assert found
                for result, reference, kind in found:
                    error = difference(result, reference, kind)
                    limit = tolerance * _HALF_ULP[kind]
                    assert error <= limit, (
                        f"error {error} > {limit}, {make.__name__}, backward={backward}"
                    )
        return source

    @staticmethod
    def run(scheduled, inputs: list[np.ndarray], arch: str = "sm_90") -> list[np.ndarray]:
        """What a kernel computes."""
        target = parse_target(f"cuda:{arch}")
        return cuda_emulation.run(scheduled, permuted(scheduled, inputs), target)

    @staticmethod
    def resources(scheduled, arch: str):
        """What the only kernel takes, by nvcc; nothing may spill."""
        source = cuda_emulation.cuda_source(scheduled, parse_target(f"cuda:{arch}"))
        (found,) = kernel_resources(source, arch).values()
        assert found.spill_bytes == 0
        assert found.stack_bytes == 0
        return found


def permuted(scheduled, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays as a kernel wants them (bfloat16 as uint16)."""
    out = []
    for number, array in enumerate(packed_arrays(scheduled, arrays)):
        assert array.shape == _shape(scheduled.params[number])
        out.append(array.view("uint16") if array.dtype == ml_dtypes.bfloat16 else array)
    return out


def difference(result: np.ndarray, reference: np.ndarray, kind: str) -> float:
    """Largest error relative to the largest value, where something was written."""
    mask = np.ma.getmaskarray(result)
    values = np.ma.getdata(result)
    if kind == "bfloat16":
        values = values.view(ml_dtypes.bfloat16)
    wide, reference = values.astype("float64"), reference.astype("float64")
    assert wide.shape == reference.shape
    error = np.abs(wide - reference)[~mask]
    # NaN is what a place that nothing wrote holds.
    scale = np.abs(reference).max() or 1.0
    return float("inf") if np.isnan(error).any() else error.max() / scale


def _numpy(dtype: str):
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype


def _shape(param) -> tuple[int, ...]:
    return tuple(int(extent) for extent in param.ty.shape)


def _place(operands, param) -> int:
    return next(i for i, operand in enumerate(operands) if operand.same_as(param))


def _on_cpu(func, arrays: list[np.ndarray]) -> list[np.ndarray]:
    built = tvm.compile(tvm.IRModule({"f": func.with_attr("global_symbol", "f")}), target="llvm")
    results = [
        tvm.runtime.tensor(np.zeros(_shape(param), str(param.ty.dtype)))
        for param in list(func.params)[len(arrays) :]
    ]
    built["f"](*map(tvm.runtime.tensor, arrays), *results)
    return [result.numpy() for result in results]


@pytest.fixture(scope="session")
def tensor() -> TensorCoreChecks:
    """The checks."""
    return TensorCoreChecks()
