"""A model run by TVM's VM, call by call: on a CPU, and on a GPU where graphs are no choice."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..compat import relax, tvm
from .frameworks import NumpyArrays, as_tvm, framework_of, sort_out
from .signature import Signature


class _Turns:
    """Orders the VM calls of all models: TVM's pool hands the memory of one on to the next.

    On a GPU the call that had the memory may still run then, on another stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: int | None = None

    @contextmanager
    def take(self, driver: Any, stream: int) -> Iterator[None]:
        """Let a call on a stream wait for the last one on another."""
        with self._lock:
            if self._last is not None and self._last != stream:
                driver.order(self._last, stream)
            self._last = stream
            with driver.use(stream):
                yield


#: The pool is one for the whole process.
TURNS = _Turns()


class VmRunner:
    """Calls TVM's VM.

    Parameters
    ----------
    vm : VirtualMachine
        The loaded model.
    signature : Signature
        Its inputs and outputs.
    function : str
        Name of its function.
    device : Device
        Where it runs.
    driver : CudaDriver, optional
        For a GPU.
    """

    def __init__(
        self,
        vm: relax.VirtualMachine,
        signature: Signature,
        function: str,
        device: Any,
        driver: Any = None,
    ) -> None:
        self._vm, self._function = vm, function
        self._inputs = signature.inputs
        self._device, self._driver = device, driver
        self._frameworks: dict[type, NumpyArrays] = {}
        self._lock = threading.Lock()

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run the model; see ``LoadedModel.__call__``."""
        with self._lock:
            framework = self._framework(values)
            values, on_device = sort_out(framework, self._inputs, values)
            tensors = [as_tvm(framework, v) for v in values]
            if self._driver is None:
                return [framework.from_tvm(t) for t in self._results(tensors)]
            stream = framework.stream() if on_device else 0
            if stream and self._driver.is_capturing(stream):
                raise RuntimeError(
                    "the model runs without CUDA graphs, so it cannot be captured in one"
                )
            if not on_device:
                tensors = [t.copyto(self._device) for t in tensors]
            with TURNS.take(self._driver, stream):
                results = self._results(tensors)
            if not on_device:
                results = [t.copyto(tvm.cpu()) for t in results]
            elif not framework.asynchronous:
                self._driver.synchronize(stream)
            return [framework.from_tvm(t) for t in results]

    def _framework(self, values: Sequence[Any]) -> NumpyArrays:
        kind = framework_of(type(values[0])) if values else NumpyArrays
        if kind not in self._frameworks:
            self._frameworks[kind] = kind(self._inputs, self._device)
        return self._frameworks[kind]

    def _results(self, tensors: Sequence[Any]) -> list[Any]:
        result = self._vm[self._function](*tensors)
        results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        del result  # the tuple holds its tensors too
        # What is held elsewhere is an input or a constant: the caller gets a copy.
        return [t if references(t) == 1 else t.copyto(self._device) for t in results]

    def time(self, arrays: Sequence[Any], number: int, repeat: int) -> list[float]:
        """Seconds per call of each measurement, by TVM's evaluator."""
        framework = self._framework(arrays)
        values, _ = sort_out(framework, self._inputs, arrays)
        tensors = [as_tvm(framework, v).copyto(self._device) for v in values]
        evaluator = self._vm.time_evaluator(
            self._function, self._device, number=number, repeat=repeat
        )
        return list(evaluator(*tensors).results)


def references(tensor: Any) -> int:
    """How many hold a tensor of TVM: Python's object, other frameworks' views, TVM itself.

    The object's header begins with the strong count (``TVMFFIObject`` in tvm-ffi's stable C ABI).
    """
    return counter(tensor).value


def counter(tensor: Any) -> ctypes.c_uint32:
    """Return the reference count in a tensor's header; valid as long as the tensor is held."""
    return ctypes.c_uint32.from_address(tensor.__chandle__())
