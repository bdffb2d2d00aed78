"""Compiled models as callables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..compat import Target, relax, tvm
from ..errors import TargetError
from ..planner.plan import Plan
from ..targets import parse_target, runs_here
from .cuda_source import device_sources
from .library import export_library, load_library
from .signature import Signature, TensorSpec, signature_in

#: Definition (or declaration) of a kernel in CUDA source.
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")


class LoadedModel:
    """A compiled model, ready to run.

    Parameters
    ----------
    library : tvm.runtime.Module or VMExecutable
        The compiled code.
    signature : Signature
        Its inputs and outputs.
    function : str
        Name of the function to run.
    """

    def __init__(self, library: Any, signature: Signature, function: str = "main") -> None:
        self.signature = signature
        self._library = library
        self._function = function
        self._vm: Any = None

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        """Run the model.

        Parameters
        ----------
        *arrays : array_like
            One array per input, in order, of the input's shape and dtype (see ``signature``).

        Returns
        -------
        list of numpy.ndarray
            The outputs in order.

        Raises
        ------
        TypeError, ValueError
            If an array has another dtype or shape than the input, or there are too many or too few.
        TargetError
            If the model needs a GPU that this machine lacks.
        """
        device, vm = self._machine()
        inputs = [
            tvm.runtime.tensor(a, device) for a in check_inputs(self.signature.inputs, arrays)
        ]
        result = vm[self._function](*inputs)
        return [r.numpy() for r in ([result] if hasattr(result, "numpy") else result)]

    def _machine(self) -> tuple[Any, Any]:
        device = device_for_run(parse_target(self.signature.target))
        if self._vm is None:
            self._vm = relax.VirtualMachine(self._library, device)
        return device, self._vm

    def time(self, *arrays: Any, number: int = 1, repeat: int = 3) -> list[float]:
        """Time the model.

        Parameters
        ----------
        *arrays : array_like
            The inputs.
        number, repeat : int
            Calls per measurement, and measurements.

        Returns
        -------
        list of float
            Seconds per call of each measurement.
        """
        device, vm = self._machine()
        inputs = [
            tvm.runtime.tensor(a, device) for a in check_inputs(self.signature.inputs, arrays)
        ]
        return list(
            vm.time_evaluator(self._function, device, number=number, repeat=repeat)(*inputs).results
        )


class CompiledModel(LoadedModel):
    """A model that was just compiled, with its plan.

    Attributes
    ----------
    plan : Plan
        The plan that was carried out (groups that failed are gone from it, with the reason).
    kernels : dict of str to str
        Name of the kernel that serves each group.
    """

    def __init__(
        self,
        executable: Any,
        signature: Signature,
        plan: Plan,
        kernels: dict[str, str],
        target: Any,
    ) -> None:
        super().__init__(executable, signature)
        self.plan = plan
        self.kernels = kernels
        self.target = target

    def export(self, path: str | Path) -> None:
        """Write a shared library that plain TVM runs, without this package."""
        export_library(self._library, path)

    def cuda_sources(self) -> list[str]:
        """CUDA source text of each device module (empty for a CPU model)."""
        return device_sources(self._library.mod)

    def cuda_kernels(self) -> list[str]:
        """Names of the kernels in those sources, in order."""
        found = (_KERNEL.findall(source) for source in self.cuda_sources())
        return list(dict.fromkeys(name for names in found for name in names))


def device_for_run(target: Target) -> Any:
    """Return the device to run a compiled model on.

    Raises
    ------
    TargetError
        If this machine cannot run it: it has no GPU, or another CPU.
    """
    if not runs_here(target):
        what = "CUDA and this machine has no GPU" if target.kind.name == "cuda" else "another CPU"
        raise TargetError(f"the model is compiled for {what}; compile it for llvm to run it here")
    return tvm.cuda(0) if target.kind.name == "cuda" else tvm.cpu()


def check_inputs(specs: Sequence[TensorSpec], arrays: Sequence[Any]) -> list[np.ndarray]:
    """Check arrays against the model's inputs before they reach compiled code."""
    if len(arrays) != len(specs):
        names = ", ".join(s.name for s in specs)
        raise ValueError(f"the model takes {len(specs)} inputs ({names}), got {len(arrays)}")
    out = []
    for spec, value in zip(specs, arrays, strict=True):
        array = value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value)
        if str(array.dtype) != spec.dtype:
            raise TypeError(
                f"input {spec.name!r} must be {spec.dtype}, got {array.dtype}; convert it first"
            )
        fixed = [
            (w, g) for w, g in zip(spec.shape, array.shape, strict=False) if isinstance(w, int)
        ]
        if array.ndim != len(spec.shape) or any(w != g for w, g in fixed):
            raise ValueError(
                f"input {spec.name!r} must have shape {list(spec.shape)}, got {list(array.shape)}"
            )
        out.append(np.asarray(array, order="C"))
    return out


def load(path: str | Path) -> LoadedModel:
    """Load a library that `CompiledModel.export` wrote.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    InvalidModelError
        If the file is not such a library.
    """
    library = load_library(path)
    return LoadedModel(library, signature_in(library, str(path)))
